"""Built-in protections: what needs no rule to be free, and what no rule allows by accident.

Free: a few commands that only read, with plain arguments inside the workspace; git is not one of them,
since its configuration can name programs. Protected: files from which a later command, another program
or coder itself takes orders (git's own files, shell start files, instruction files, coder's
configuration), and files that hold secrets.
"""

from __future__ import annotations

import os
import re
import shutil
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path, PurePath

from coder.tools.process import environment
from coder.tools.secrets import holds_secrets
from coder.tools.workspace import real

# ---- paths -----------------------------------------------------------------------------------------------

FOLDERS = {
    ".git": "git reads its settings and hooks from there",
    ".coder": "coder's own rules are there",
    **dict.fromkeys(
        (".vscode", ".idea", ".zed", ".devcontainer"), "an editor runs commands from there"
    ),
    **dict.fromkeys((".claude", ".cursor"), "another agent reads its instructions from there"),
    **dict.fromkeys((".husky", ".ssh", "autostart"), "it holds start files or keys"),
}
EVEN_WITH_YOLO = (".git", ".coder")  # what a command changes there is undone, so -y allows no edit
FILES = {
    re.compile(
        r"agents(?:\.override)?\.md|claude(?:\.local)?\.md|gemini\.md|copilot-instructions\.md"
        r"|\.cursorrules|\.windsurfrules"
    ): "later sessions follow its instructions",
    re.compile(
        r"\.(?:bashrc|bash_profile|bash_login|bash_logout|bash_aliases|profile|zshrc|zshenv|zprofile"
        r"|zlogin|zlogout|kshrc|cshrc|tcshrc|login|logout|inputrc|xprofile|xinitrc|xsession|gitconfig"
        r"|gitmodules|envrc|pam_environment|exrc|vimrc|nvim\.lua|mcp\.json)|config\.fish"
        r"|.*\.(?:code-workspace|service|timer|desktop)"
    ): "other programs read commands from it",
}


def protected(
    permission: str, path: str, private: Iterable[Path] = (), cwd: Path = Path()
) -> tuple[str, bool]:
    """Say why a path needs the user's permission for this very one, "" where it does not; and is it so with -y?

    `permission` is "edit" or "read", `path` as the tool names it: relative to the workspace `cwd`, or
    absolute; `private` are coder's own folders.
    """
    if permission == "read":
        return ("it may hold secrets" if holds_secrets(path) else ""), False
    if permission != "edit":
        return "", False
    # the workspace may be the home, so coder's own folders may lie in it
    if any(PurePath(cwd / path).is_relative_to(folder) for folder in private):
        return "coder's own configuration and sessions are there", True
    parts = [_bare_name(part) for part in PurePath(path).parts]
    reasons = [FOLDERS[part] for part in parts if part in FOLDERS]
    reasons += [why for files, why in FILES.items() if parts and files.fullmatch(parts[-1])]
    return (reasons[0] if reasons else ""), any(part in EVEN_WITH_YOLO for part in parts)


def _bare_name(name: str) -> str:
    """A name as a file system may see it that ignores case and characters without width."""
    return "".join(c for c in name.casefold() if unicodedata.category(c) != "Cf")


# ---- commands --------------------------------------------------------------------------------------------

# No option of these writes or runs something; without a file they read a pipe.
READERS = {"cat", "head", "tail", "wc"}
BUILTINS = {"echo", "true", "pwd"}
OPTION = re.compile(r"-[A-Za-z0-9]+|--[a-z-]+")  # behind `=` may be a file (wc --files0-from=)
COUNTING, COUNT = ("-n", "-c"), re.compile(r"[+-]?\d+")  # head -n 5: the number is no file
MAX_MOVES = 2  # `cd` in a line that are followed; each one doubles the places


class ShellLocation:
    """The folders that a command line may be in, as far as it has been read: each `cd` may have failed.

    There is none where that is not known any more. `readable`: may a file be read without a question?
    """

    def __init__(
        self,
        workspace: Path,
        readable: Callable[[Path], bool] = lambda path: not holds_secrets(path),
    ) -> None:
        self.workspace = Path(os.path.realpath(workspace))
        self.readable = readable
        self.places = {self.workspace}
        self.moves = 0

    def is_read_only(self, argv: Sequence[str]) -> bool:
        """Tell whether this command only reads, inside the workspace.

        To be called for each command of a line in its order: behind one that does more, a path may
        lead elsewhere (`ln -s / x`).
        """
        name, arguments = argv[0], argv[1:]
        if name == "cd":
            self._follow_cd(arguments)
            return bool(self.places)
        if name in BUILTINS:
            return True
        words = [
            word
            for before, word in zip(["", *arguments], arguments)
            if not (OPTION.fullmatch(word) or (before in COUNTING and COUNT.fullmatch(word)))
        ]
        reads = (name in READERS and (not words or self._are_readable(words))) or (
            name == "ls" and self._are_readable(words or ["."])
        )
        has_option = any(word.startswith("-") for word in words)
        if reads and not has_option and _is_the_systems(name, self.workspace):
            return True
        self.places.clear()
        return False

    def _follow_cd(self, arguments: Sequence[str]) -> None:
        """Follow a `cd`, unless it goes up: bash does that by the letters, the kernel by the links."""
        self.moves += 1
        target = arguments[0] if len(arguments) == 1 else "-"
        is_known = not target.startswith("-") and ".." not in PurePath(target).parts
        if not is_known or self.moves > MAX_MOVES:
            self.places.clear()
        self.places |= {real(place / target) for place in self.places}
        if not all(path.is_relative_to(self.workspace) for path in self.places):
            self.places.clear()

    def _are_readable(self, words: Iterable[str]) -> bool:
        paths = [real(place / word) for word in words for place in self.places]
        return bool(paths) and all(
            path.is_relative_to(self.workspace) and self.readable(path) for path in paths
        )


@cache
def _is_the_systems(name: str, workspace: Path) -> bool:
    """Tell whether the program of this name is none of the workspace's (.venv/bin, direnv's bin)."""
    found = shutil.which(name, path=environment().get("PATH", os.defpath))
    if not found:
        return False
    return not any(
        Path(each).is_relative_to(workspace) for each in (found, os.path.realpath(found))
    )
