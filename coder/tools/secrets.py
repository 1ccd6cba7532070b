"""Secrets by their names: files (`.env`, private keys), variables, headers; the environment of
commands.

The patterns are compiled when they are first used, which most starts never do.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import PurePath

# The last part of a path; an example of a .env holds no secrets.
NAMES = r"""(?xi)
    \. (?: env|dev\.vars ) (?: [-_.~] (?! (?: .* [-_.] )? (?: example|sample|template|dist|defaults ) $ ) .* )? | \.envrc | \.flaskenv
  | env (?: \. (?: local|dev(?: elopment )?|prod(?: uction )?|stag(?: e|ing )|test ) )+
  | (?! (?: example|sample|template|dist|defaults ) \. ) .+ \. env
  | id_(?: rsa|dsa|ecdsa|ed25519 )(?: _sk )? \d* (?: [-_.] (?! (?: .* \. )? pub $ ) .* )? | .+ _(?: rsa|dsa|ecdsa|ed25519 )
  | .* \. (?: pem|key|p12|pfx|jks|keystore|kdbx|ppk|gpg|ovpn )
  | \.netrc | _netrc | \.git-credentials | \.npmrc | \.pypirc | \.pgpass | \.my\.cnf | \.htpasswd | \.vault-token | \.terraformrc
  | \.dockercfg | \.s3cfg | \.boto | \.passwd-s3fs | kubeconfig | auth\.json | .* \. tfvars (?: \. json )?
  | (?: .* [-_.] )? deploy [-_]? key (?: \.txt )? | .* priv(?: ate )? [-_]? key (?: \.txt )?
  | (?: .* [-_.] )? (?: secring|secret|priv(?: ate )? ) (?: [-_.]? key )? \.asc | \. \w+ _history | fish_history
  | (?: (?: access|api|auth|bot|oauth2?|refresh ) [-_.]? )? token \. (?: json|txt|pickle )
  | (?! (?: example|sample|template|dist|defaults ) [-_.] ) (?: .* [-_.] )? credentials (?: \. (?: json|toml|ya?ml|ini|db ) )?
  | secrets? \. (?: json|toml|ya?ml|ini )
  | (?: client_secret | service[-_]?account ) .* \. json
"""
FOLDERS = r"(?i)(?:^|/)(?:\.ssh|\.gnupg|\.aws|\.azure|\.kube|\.docker|\.config/gcloud|\.config/gh|\.password-store)/"
# In such a folder, and yet no secret
PUBLIC = r"(?i).*\.pub|known_hosts|authorized_keys"


def holds_secrets(path: str | PurePath) -> bool:
    """Does a file of this path hold secrets, as far as its name tells?"""
    path = PurePath(path)
    if re.fullmatch(NAMES, path.name):
        return True
    is_in_folder = re.search(FOLDERS, str(path)) is not None
    return is_in_folder and not re.fullmatch(PUBLIC, path.name)


# ---- variables and headers ---------------------------------------------------------------------

SECRET = (
    "(?i)KEY|TOKEN|SECRET|PASSW|PASSPHRASE|PASSCODE|CREDENTIAL|AUTH|JWT|BEARER|WEBHOOK|MNEMONIC"
    "|DATABASE_URL|CONN(?:ECTION)?_?STR|CODER_HEADERS"
    "|(?<![A-Z])(?:PASS|PAT|PSK|CREDS?)(?![A-Z])"  # as words, between digits and signs
    "|(?:DSN|COOKIES?)(?![A-Z])|_PW$"  # as ends of words: a COOKIECUTTER is a program
    "|(?<=[A-Z0-9_])(?<!OLD)PWD(?![A-Z])"  # PWD and OLDPWD are folders
    # An ASKPASS is a program
    "|(?<!COM|ASK|SUR)(?<!BY)(?<!OVER|TRES)(?<!UNDER)PASS[0-9]*$"
)
# A colon and digits before a path are a port; what is alone before an @ is mostly a token.
SCHEME = "(?i)(?:basic|bearer|token) +"  # in front of a header's secret
PASSWORD = r"(?i)://[^\s/@:\[]*:(?!\d+[/?#])[^\s@]+@|https?://[^\s/@:?#]+@"
# Names of sockets and files, without which git and X do not work, and of persons
HARMLESS = "SSH_AUTH_SOCK|XAUTHORITY|GIT_AUTHOR_(?:NAME|EMAIL|DATE)"
# If there is a proxy, nothing reaches the network without its password
PROXY = "(?i)[a-z]+_proxy"


def is_secret(name: str, value: str = "") -> bool:
    """Is a variable of this name a secret, or does its value hold a password or token?"""
    if re.fullmatch(HARMLESS, name):
        return False
    if re.search(SECRET, name):
        return True
    return bool(re.search(PASSWORD, value)) and not re.fullmatch(PROXY, name)


def header_secret(name: str, value: str) -> str:
    """The secret in a header, without the scheme in front of it; "" if there is none."""
    scheme = re.match(SCHEME, value)
    if scheme:
        return value[scheme.end() :]
    if is_secret(name, value) or "cookie" in name.lower():
        return value
    return ""


# ---- the environment of a command --------------------------------------------------------------

# Variables that make a shell run or load something, or that change what a command means. An
# exported function (BASH_FUNC_...) would replace a program.
STEERING = (
    "(?s)BASH_ENV|ENV|SHELLOPTS|BASHOPTS|POSIXLY_CORRECT|CDPATH|GLOBIGNORE|PROMPT_COMMAND"
    "|RIPGREP_CONFIG_PATH|LD_PRELOAD|LD_AUDIT|DYLD_INSERT_LIBRARIES|BASH_FUNC_.*"
)
QUIET = {
    **dict.fromkeys(("PAGER", "GIT_PAGER", "MANPAGER"), "cat"),
    **dict.fromkeys(("EDITOR", "VISUAL", "GIT_EDITOR", "GIT_ASKPASS", "SSH_ASKPASS"), "true"),
    # With `true`, git rebase -i would report success and do nothing
    "GIT_SEQUENCE_EDITOR": "false",
    "TERM": "dumb",
    "GIT_TERMINAL_PROMPT": "0",
    "SSH_ASKPASS_REQUIRE": "never",
    "PIP_NO_INPUT": "1",
    "DEBIAN_FRONTEND": "noninteractive",
}


def environment() -> dict[str, str]:
    """Ours, without what looks like a secret and what steers a shell; pagers and prompts off."""
    kept = {name: value for name, value in os.environ.items() if _is_passed_on(name, value)}
    return kept | {"PATH": clean_path(os.environ.get("PATH", ""))} | QUIET


@lru_cache(1024)  # each command asks about all variables, and they hardly ever change
def _is_passed_on(name: str, value: str) -> bool:
    return not (re.fullmatch(STEERING, name) or is_secret(name, value))


def clean_path(path: str) -> str:
    """Take the relative folders out of a PATH: the `ls` or `git` of a workspace must not be run.

    An empty PATH would mean the workspace, too; the system's own is used instead.
    """
    folders = [folder for folder in path.split(os.pathsep) if os.path.isabs(folder)]
    return os.pathsep.join(folders) or os.defpath
