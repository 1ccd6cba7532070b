"""Protected paths, which need the user's permission for this very one."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path, PurePath

from coder.permissions.rules import ALLOW, Decision
from coder.tools.secrets import holds_secrets

# Files from which a later command, another program or coder itself takes orders.
EVEN_WITH_YOLO = {".git", ".coder"}  # what a command changes there is undone, so -y allows no edit
FOLDERS = EVEN_WITH_YOLO | {".vscode", ".idea", ".zed", ".devcontainer", ".agents", ".claude"}
FOLDERS |= {".cursor", ".husky", ".ssh", "autostart"}
FILES = (
    r"agents(\.override)?\.md|claude(\.local)?\.md|gemini\.md|copilot-instructions\.md|config\.fish"
    r"|\.(cursorrules|windsurfrules|bashrc|bash_profile|bash_login|bash_logout|bash_aliases|profile"
    r"|zshrc|zshenv|zprofile|zlogin|zlogout|kshrc|cshrc|tcshrc|login|logout|inputrc|xprofile|xinitrc"
    r"|xsession|gitconfig|gitmodules|envrc|pam_environment|exrc|vimrc|nvim\.lua|mcp\.json)"
    r"|.*\.(code-workspace|service|timer|desktop)"
)


def protection(
    permission: str,
    path: str,
    private: Iterable[Path],
    cwd: Path,
) -> Decision:
    """The question, with its reason, that an action on a protected path needs; else ALLOW.

    `private`: coder's own folders, which may lie in the workspace, since that may be the home.
    """
    if permission == "read" and holds_secrets(path):
        return Decision("ask", reason="it may hold secrets")
    if permission != "edit":
        return ALLOW
    plain = _plain(path)
    is_private = any((cwd / path).is_relative_to(folder) for folder in private)
    even_with_yolo = is_private or not EVEN_WITH_YOLO.isdisjoint(plain.parts)
    is_protected = not FOLDERS.isdisjoint(plain.parts) or re.fullmatch(FILES, plain.name)
    if not even_with_yolo and not is_protected:
        return ALLOW
    return Decision(
        "ask",
        reason="programs or later sessions follow what is in it",
        even_with_yolo=even_with_yolo,
    )


def _plain(path: str) -> PurePath:
    """A path as a file system may see it that ignores case and characters without width."""
    visible = [char for char in path.casefold() if unicodedata.category(char) != "Cf"]
    return PurePath("".join(visible))
