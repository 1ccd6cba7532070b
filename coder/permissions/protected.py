"""Built-in protections: what needs no rule to be free, and what no rule allows by accident.

Free: a few commands that only read, with plain arguments inside the workspace; git is not one of them,
since its configuration can name programs. Protected: files from which a later command, another program
or coder itself takes orders (git's own files, shell start files, instruction files, coder's
configuration), and files that hold secrets.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePath

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


# ---- commands --------------------------------------------------------------------------------

# No option of these writes or runs something; without a file they read a pipe.
READERS = {"cat", "head", "tail", "wc", "ls"}
BUILTINS = {"echo", "true", "pwd"}
OPTION = re.compile(r"-[A-Za-z0-9]+|--[a-z-]+")  # behind `=` may be a file (wc --files0-from=)
COUNT = re.compile(r"(?:head|tail) -[nc] [+-]?\d+")


def read_only(
    commands: Sequence[Sequence[str]], workspace: Path, readable: Callable[[str], bool]
) -> list[bool]:
    """Tell which commands of a plain line only read, inside the workspace.

    The line may begin with a `cd` into a folder of it; that may fail, so what follows has to be
    free in both places. Behind a command that does more, a path may lead elsewhere (`ln -s / x`).
    `readable`: may a file be read without a question?
    """
    top = real(workspace)
    places, free = [top], list[bool]()
    for name, *words in commands:
        if name == "cd" and not free and len(words) == 1 and ".." not in PurePath(words[0]).parts:
            places.append(real(top / words[0]))
            is_free = places[1].is_relative_to(top) and not words[0].startswith("-")
        else:
            words = words[2:] if COUNT.fullmatch(" ".join([name, *words[:2]])) else words
            words = [word for word in words if not OPTION.fullmatch(word)]
            paths = [real(place / word) for place in places for word in words]
            is_inside = all(path.is_relative_to(top) and readable(str(path)) for path in paths)
            is_known = bool(places or not words) and not any(word[:1] == "-" for word in words)
            is_free = name in BUILTINS or (name in READERS and is_known and is_inside)
        if not is_free:
            places.clear()
        free.append(is_free)
    return free
