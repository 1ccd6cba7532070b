"""Built-in protections: what needs no rule to be harmless, and what no rule lifts by accident.

Harmless: a handful of commands that only read, with plain arguments inside the workspace. Protected: places from which a later
command, another program or we ourselves take orders (git's own files, shell start files, instruction files, our configuration),
files that hold secrets, and recursive deletes outside the workspace. The lists are those of the security position that README
describes; git is on no list, since its configuration can name programs.

What it leaves out: rules (rules.py), and what is decided (permissions.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath

from coder.features.lexer import parse, recursive_deletes
from coder.tools.secrets import holds_secrets

HARMLESS = {"pwd", "ls", "cat", "head", "tail", "wc", "true", "echo"}  # no option of theirs writes, or runs something
# Builtins after which a word may mean another program, or a path another place.
STATEFUL = {"cd", "pushd", "popd", "builtin", "command", "eval", "source", ".", "exec", "set", "shopt", "alias", "unalias", "trap",
            "export", "declare", "typeset", "local", "readonly", "unset", "enable", "hash", "read", "mapfile", "readarray", "printf", "let",
            "getopts"}
OPTION = re.compile(r"-[A-Za-z0-9]+|--[a-z-]+")  # with `=` a value may be a file's name (wc --files0-from=)

FOLDERS = {".git": "git takes its orders from there", ".coder": "our own rules are there", ".vscode": "an editor runs what is there",
           ".idea": "an editor runs what is there", ".husky": "git runs what is there"}
FILES = re.compile(r"""
    (?P<instructions> agents\.md | claude\.md | agents\.override\.md | gemini\.md | \.cursorrules )
  | (?P<start> \. (?: bashrc | bash_profile | bash_login | bash_logout | bash_aliases | profile | zshrc | zshenv | zprofile | zlogin
      | zlogout | kshrc | cshrc | tcshrc | login | logout | inputrc | xprofile | xinitrc | xsession | gitconfig | envrc
      | pam_environment ) | config\.fish )""", re.X)
WHY = {"instructions": "later sessions follow what it says", "start": "a shell or git takes its orders from it"}


def protected(permission: str, path: str, private: Iterable[Path] = (), cwd: Path = Path()) -> str:
    """Why a path may not be touched without a person's yes to this very one; "" where it may. `private`: our own folders.

    `permission` is "edit" or "read", `path` as the tool names it: relative to the workspace `cwd`, or absolute.
    """
    if permission == "read":
        return "it may hold secrets" if holds_secrets(path) else ""
    if permission != "edit":
        return ""
    if any(PurePath(cwd / path).is_relative_to(folder) for folder in private):  # the workspace may be the home
        return "our own configuration and sessions are there"
    parts = [part.casefold() for part in PurePath(path).parts]  # some file systems take .GIT for .git
    if why := next((FOLDERS[part] for part in parts if part in FOLDERS), ""):
        return why
    known = FILES.fullmatch(parts[-1]) if parts else None
    return WHY[str(known.lastgroup)] if known else ""


# ---- commands --------------------------------------------------------------------------------------------


class Here:
    """The folders that a command line may be in, as far as it has been read: each `cd` may have worked, or not. None at all
    where that cannot be told any more."""

    def __init__(self, workspace: Path) -> None:
        self.workspace = Path(os.path.realpath(workspace))
        self.places = {self.workspace}

    def harmless(self, argv: Sequence[str]) -> bool:
        """Does this command only read, inside the workspace? A `cd` into it is followed. Ask about each command of a line."""
        name, arguments = argv[0], argv[1:]
        if name in STATEFUL:
            self._go(argv)
            return name == "cd" and bool(self.places) and all(map(self._is_ours, self.places))
        if name in ("echo", "true", "pwd"):
            return True
        words = [word for word in arguments if not OPTION.fullmatch(word)]
        return name in HARMLESS and not any(word.startswith("-") for word in words) and self._inside(words or ["."])

    def _go(self, argv: Sequence[str]) -> None:
        if argv[0] == "cd" and len(argv) == 2 and not argv[1].startswith("-"):
            self.places |= {self._place(place, argv[1]) for place in self.places}
        else:
            self.places.clear()

    def deletes_only_below(self, command: str, targets: Iterable[str]) -> bool:
        """Are all these targets of a command line strictly inside the workspace, wherever it has gone before?"""
        parts = parse(command)
        if parts is None and re.search(r"\b(?:cd|pushd|popd)\b", command):
            self.places.clear()
        for argv in parts or []:
            if argv[0] in STATEFUL:
                self._go(argv)
        return all(map(self._is_below, targets))

    def _is_below(self, target: str) -> bool:
        if re.match(r"~|.*[$`*?\[{]", target) or not (self.places or os.path.isabs(target)):
            return False
        seen = {self._place(place, target) for place in self.places or {self.workspace}}
        return all(path.is_relative_to(self.workspace) and path != self.workspace for path in seen)

    def _inside(self, words: Iterable[str]) -> bool:
        return bool(self.places) and all(self._is_ours(self._place(place, word)) for word in words for place in self.places)

    def _is_ours(self, path: Path) -> bool:
        return path.is_relative_to(self.workspace) and not holds_secrets(path)

    @staticmethod
    def _place(place: Path, word: str) -> Path:
        return Path(os.path.realpath(place / word))


def deletes_outside(command: str, workspace: Path) -> bool:
    """May a command delete recursively outside the workspace, or the workspace itself? What cannot be told counts as yes."""
    targets = recursive_deletes(command)
    return targets is None or (bool(targets) and not Here(workspace).deletes_only_below(command, targets))
