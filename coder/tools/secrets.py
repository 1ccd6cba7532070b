"""Files that hold secrets, by their names: `.env`, private keys, credentials, shell histories."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import PurePath

from coder.toolset import ToolContext

# The last part of a path; an example of a .env holds no secrets.
NAMES = re.compile(
    r"""
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
""",
    re.X | re.I,
)
FOLDERS = re.compile(
    r"(?:^|/)(?:\.ssh|\.gnupg|\.aws|\.azure|\.kube|\.docker|\.config/gcloud|\.config/gh|\.password-store)/",
    re.I,
)
# In such a folder, and yet no secret
PUBLIC = re.compile(r".*\.pub|known_hosts|authorized_keys", re.I)


def holds_secrets(path: str | PurePath) -> bool:
    """Does a file of this path hold secrets, as far as its name tells?"""
    path = PurePath(path)
    return bool(NAMES.fullmatch(path.name)) or bool(
        FOLDERS.search(f"{path}") and not PUBLIC.fullmatch(path.name)
    )


def secret_for(ctx: ToolContext) -> Callable[[str], bool]:
    """Which paths grep leaves out: those that a rule asks about, else those of such a name."""
    return ctx.secret or holds_secrets
