"""Instruction files: AGENTS.md (or CLAUDE.md if there is none) and ETCODE.md, of the user and the
project.

They become part of the system prompt, the nearest last; those of a sub-folder are named when a file
below it is used. They are text for the model: nothing in them changes what is allowed. A link that
leads out of its repository is not followed, and invisible characters are made visible. Above the
working folder, which may be shared (/tmp), only files of the user, of root or of the working
folder's owner count.

Little is imported here: the names of the files are shown before the first prompt.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from coder.hooks import Hooks
from coder.permissions.sanitize import escape_invisible
from coder.tools.repository import repository_top
from coder.tools.workspace import TOOL_FOLDERS, read_small_file, real
from coder.types import Message, Report, ToolCall, ToolResult, ignore

NAMES = (("AGENTS.md", "CLAUDE.md"), ("ETCODE.md",))  # of each row the first that has text counts
READ_OR_CHANGE = {"read", "edit", "write", "apply_patch"}
LIMIT = 32_000  # characters of all files together; the nearest are kept whole first

INIT = """\
Look at this project and write AGENTS.md in its root: what a coding agent needs to know to work here. Find out how it is built, run, \
linted and tested (and how a single test is run), how the code is laid out, and which conventions its code follows; try the commands \
that are quick. Keep it under 60 lines, facts only, nothing that can be seen at a glance, no advice that holds everywhere. If there is an \
AGENTS.md or CLAUDE.md already, improve it instead of starting anew."""

REVIEW = """\
Review {}. Change no file. Read the diff first, then as much of the code around it as it takes to be sure. Report what is wrong \
or risky: bugs, cases that are not handled, broken promises of names, comments and documents, missing tests. No praise, no matters \
of taste. For each finding give `path:line` (grep has the numbers), what happens in which case, and how to mend it; the \
most serious first. If there is nothing to report, say so, and name what you could not check."""
UNCOMMITTED = """\
the uncommitted changes of this repository (git status, git diff HEAD, and files that are new); if there are none, the commits that the \
upstream of this branch does not have, or else the newest commit"""


def review(what: str) -> str:
    """The prompt for a review, of what the user names or of what is not committed."""
    return REVIEW.format(what or UNCOMMITTED)


class FolderInstructions(Hooks):
    """Names the instruction files of a sub-folder after the first call that uses a file below it.

    The system prompt has only those from the root down to `cwd`. After a compaction they are named
    again.
    """

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self._known: set[Path] = set()

    def after_tool_call(self, call: ToolCall, result: ToolResult) -> ToolResult | None:
        if call.name not in READ_OR_CHANGE or result.is_error:
            return None
        unknown: list[Path] = []
        for path in result.details.get("paths") or [call.arguments.get("path", "")]:
            file = Path(os.path.normpath(self.cwd / path))
            self._known.add(file)  # it may be such a file itself
            unknown += [above for above in self._files_above(file) if above not in self._known]
            self._known.update(unknown)
        if not unknown or not isinstance(result.content, str):
            return None
        names = ", ".join(escape_invisible(str(file.relative_to(self.cwd))) for file in unknown)
        note = f"[{names}: instructions for work below this folder. Read before you change files there.]"
        return replace(result, content=f"{result.content}\n\n{note}")

    def on_compacted(self, messages: list[Message]) -> None:
        self._known.clear()

    def _files_above(self, file: Path) -> Iterator[Path]:
        """The instruction files of the folders between `cwd` and this file, the nearest last."""
        folders = [folder for folder in file.parents if self.cwd in folder.parents]
        for folder in reversed(folders):
            if folder.name in TOOL_FOLDERS:
                return
            for names in NAMES:
                files = [folder / name for name in names if os.path.isfile(folder / name)]
                yield from files[:1]


@dataclass
class Instruction:
    """One file as the model gets it. `path` is its name for the user."""

    file: Path
    path: str
    text: str

    def __str__(self) -> str:
        text = self.text.replace("</instructions", "<\\/instructions")
        return f'<instructions path="{escape_invisible(self.path)}">\n{text}\n</instructions>'

    def cut(self, limit: int) -> Instruction:
        """The same in at most so many characters, and a line that names what is missing."""
        missing = len(self.text) - limit
        if missing <= 0:
            return self
        return replace(self, text=f"{self.text[:limit]}\n[cut: {missing} more characters]")


def instructions(
    cwd: Path, config: Path | None = None, report: Report = ignore
) -> list[Instruction]:
    """The user's files (in `config`), then the project's from its root down to `cwd`.

    They have at most LIMIT characters. `report` gets a sentence for a file that is left out.
    """
    files: list[Instruction] = []
    if config:
        files += _files_in(config, config, report, "~/")
    root = repository_top(cwd, lambda folder: _is_trusted(folder, cwd))
    folders = [folder for folder in (cwd, *cwd.parents) if folder.is_relative_to(root)]
    for folder in reversed(folders):
        for file in _files_in(folder, root, report):
            if folder == cwd or _is_trusted(file.file, cwd):
                files.append(file)
    kept: list[Instruction] = []
    left = LIMIT
    for file in reversed(files):
        kept.append(file.cut(left))
        left = max(0, left - len(file.text))
    return kept[::-1]


def _is_trusted(path: Path, cwd: Path) -> bool:
    try:
        return path.stat().st_uid in {os.geteuid(), 0, cwd.stat().st_uid}
    except OSError:
        return False


def _files_in(
    folder: Path,
    root: Path,
    report: Report,
    prefix: str = "",
) -> Iterator[Instruction]:
    """The instruction files of one folder, which have to lie in `root`."""
    for names in NAMES:
        for name in names:
            file = folder / name
            path = f"{prefix}{file.relative_to(root)}"
            text = _read_text(file, root)
            if text is None and os.path.lexists(file):
                report(f"{path} is ignored: it is no regular file, or a link that leads elsewhere.")
            elif text:
                yield Instruction(file, path, escape_invisible(text))
                break


def _read_text(path: Path, root: Path) -> str | None:
    """The text of a regular file in `root`, or None."""
    file = real(path)
    if not file.is_relative_to(real(root)):
        return None
    data = read_small_file(file, 4 * LIMIT)
    if data is None:
        return None
    return data.decode("utf-8", "replace").strip("\ufeff \t\r\n")
