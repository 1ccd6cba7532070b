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
import shutil
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path, PurePath

from coder.features.lexer import parse, recursive_deletes
from coder.tools.process import environment
from coder.tools.secrets import holds_secrets

READING = {"cat", "head", "tail", "wc"}  # no option of theirs writes, or runs something; without a file they read a pipe
BUILTINS = {"echo", "true", "pwd"}
# Builtins after which a word may mean another program, or a path another place.
STATEFUL = {"pushd", "popd", "builtin", "command", "eval", "source", ".", "exec", "set", "shopt", "alias", "unalias", "trap", "export",
            "declare", "typeset", "local", "readonly", "unset", "enable", "hash", "read", "mapfile", "readarray", "printf", "let",
            "getopts"}
OPTION = re.compile(r"-[A-Za-z0-9]+|--[a-z-]+")  # with `=` a value may be a file's name (wc --files0-from=)
COUNTING, COUNT = ("-n", "-c"), re.compile(r"[+-]?\d+")  # head -n 5: the number is no file
MOST_MOVES = 2  # `cd` in a line that are followed; each one doubles the places that we may be in

FOLDERS = {".git": "git takes its orders from there", ".coder": "our own rules are there",
           **dict.fromkeys((".vscode", ".idea", ".zed", ".devcontainer"), "an editor runs what is there"),
           **dict.fromkeys((".claude", ".cursor"), "another agent takes its orders from there"),
           **dict.fromkeys((".husky", ".ssh", "autostart"), "what is there is run, or lets others in")}
FIRM = (".git", ".coder")  # also -y is no answer: a command's change of them is undone
FILES = re.compile(r"""
    (?P<instructions> agents(?:\.override)?\.md | claude(?:\.local)?\.md | gemini\.md | copilot-instructions\.md | \.cursorrules
      | \.windsurfrules )
  | (?P<start> \. (?: bashrc | bash_profile | bash_login | bash_logout | bash_aliases | profile | zshrc | zshenv | zprofile | zlogin
      | zlogout | kshrc | cshrc | tcshrc | login | logout | inputrc | xprofile | xinitrc | xsession | gitconfig | gitmodules | envrc
      | pam_environment | exrc | vimrc | nvim\.lua | mcp\.json ) | config\.fish
      | .* \. (?: code-workspace | service | timer | desktop ) )""", re.X)
WHY = {"instructions": "later sessions follow what it says", "start": "other programs take their orders from it"}


def protected(permission: str, path: str, private: Iterable[Path] = (), cwd: Path = Path()) -> tuple[str, bool]:
    """(why, firm): why a path may not be touched without a person's yes to this very one, "" where it may; and is -y no answer
    either? `private`: our own folders.

    `permission` is "edit" or "read", `path` as the tool names it: relative to the workspace `cwd`, or absolute.
    """
    if permission == "read":
        return ("it may hold secrets" if holds_secrets(path) else ""), False
    if permission != "edit":
        return "", False
    parts = [_bare(part) for part in PurePath(path).parts]
    firm = any(part in FIRM for part in parts)
    if any(PurePath(cwd / path).is_relative_to(folder) for folder in private):  # the workspace may be the home
        return "our own configuration and sessions are there", True
    if why := next((FOLDERS[part] for part in parts if part in FOLDERS), ""):
        return why, firm
    known = FILES.fullmatch(parts[-1]) if parts else None
    return (WHY[str(known.lastgroup)] if known else ""), firm


def _bare(name: str) -> str:
    """A name as a file system may see it that knows no capitals and passes over characters without width."""
    return "".join(c for c in name.casefold() if unicodedata.category(c) != "Cf")


# ---- commands --------------------------------------------------------------------------------------------


class Here:
    """The folders that a command line may be in, as far as it has been read: each `cd` may have worked, or not. None at all
    where that cannot be told any more.

    `readable`: may this file be read without a question?
    """

    def __init__(self, workspace: Path, readable: Callable[[Path], bool] = lambda path: not holds_secrets(path)) -> None:
        self.workspace = Path(os.path.realpath(workspace))
        self.readable = readable
        self.places = {self.workspace}
        self.moves = 0

    def harmless(self, argv: Sequence[str]) -> bool:
        """Does this command only read, inside the workspace? Ask about each command of a line, in their order: after one that is
        not harmless a path may lead elsewhere (`ln -s / x`)."""
        name, arguments = argv[0], argv[1:]
        words = [word for before, word in zip(["", *arguments], arguments)
                 if not (OPTION.fullmatch(word) or (before in COUNTING and COUNT.fullmatch(word)))]
        if name == "cd":
            self._go(arguments)
            return bool(self.places)
        if name in BUILTINS:
            return True
        fine = not any(word.startswith("-") for word in words) and (
            (name in READING and (not words or self._inside(words))) or (name == "ls" and self._inside(words or ["."])))
        if not (fine and _is_the_systems(name, self.workspace)):
            self.places.clear()
            return False
        return True

    def _go(self, arguments: Sequence[str]) -> None:
        """`cd`. Bash goes up by the letters, the kernel by the links: where .. stands in it, that is not told apart."""
        self.moves += 1
        if self.moves > MOST_MOVES or len(arguments) != 1 or arguments[0].startswith("-") or ".." in PurePath(arguments[0]).parts:
            self.places.clear()
        self.places |= {self._place(place, arguments[0]) for place in self.places}
        if not all(map(self._is_inside, self.places)):
            self.places.clear()

    def deletes_only_below(self, command: str, targets: Iterable[str]) -> bool:
        """Are all these targets of a command line strictly inside the workspace, wherever it has gone before?"""
        parts = parse(command)
        if parts is None and re.search(r"\b(?:cd|pushd|popd|ln|mount)\b", command):
            self.places.clear()
        for argv in parts or []:
            if argv[0] == "cd":
                self._go(argv[1:])
            elif argv[0] in STATEFUL or any(os.path.basename(word) in ("ln", "mount") for word in argv):
                self.places.clear()
        return all(map(self._is_below, targets))

    def _is_below(self, target: str) -> bool:
        if re.match(r"~|.*[$`*?\[{]", target) or not self.places:
            return False
        seen = {self._place(place, target) for place in self.places}
        return all(path.is_relative_to(self.workspace) and path != self.workspace for path in seen)

    def _inside(self, words: Iterable[str]) -> bool:
        return bool(self.places) and all(self._is_inside(path := self._place(place, word)) and self.readable(path)
                                         for word in words for place in self.places)

    def _is_inside(self, path: Path) -> bool:
        return path.is_relative_to(self.workspace)

    @staticmethod
    def _place(place: Path, word: str) -> Path:
        return Path(os.path.realpath(place / word))


@cache
def _is_the_systems(name: str, workspace: Path) -> bool:
    """Is the program that a command finds by this name none of the workspace's (.venv/bin, a bin of direnv's)?"""
    found = shutil.which(name, path=environment().get("PATH", os.defpath))
    return bool(found) and not any(Path(each).is_relative_to(workspace) for each in (found or "", os.path.realpath(found or "")))


def deletes_outside(command: str, workspace: Path) -> bool:
    """May a command delete recursively outside the workspace, or the workspace itself? What cannot be told counts as yes."""
    targets = recursive_deletes(command)
    return targets is None or (bool(targets) and not Here(workspace).deletes_only_below(command, targets))
