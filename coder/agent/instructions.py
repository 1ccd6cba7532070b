"""Instruction files: AGENTS.md, or CLAUDE.md where there is none, and ETCODE.md: the user's, and those of the project from its
root down.

In each folder the first of each row of NAMES counts. They become part of the system prompt, the nearest last. They are words for the
model: nothing in them changes what is allowed. A file that leads out of its repository through a link is left out, and
characters that nobody sees are made visible. Above the working folder, which may be a shared place such as /tmp, counts only
what belongs to us, to the system, or to the owner of the working folder.

Little is imported here, since their names are shown before the first prompt.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from coder.providers.text import visible
from coder.tools.repository import repository_top

NAMES = (("AGENTS.md", "CLAUDE.md"), ("ETCODE.md",))
MOST = (
    32_000  # characters of all of them (codex's limit is 32 KiB); the nearest are kept whole first
)

INIT = """\
Look at this project and write AGENTS.md in its root: what a coding agent needs to know to work here. Find out how it is built, run, \
linted and tested (and how a single test is run), how the code is laid out, and which conventions its code follows; try the commands \
that are quick. Keep it under 60 lines, facts only, nothing that can be seen at a glance, no advice that holds everywhere. If there is an \
AGENTS.md or CLAUDE.md already, improve it instead of starting anew."""


@dataclass(frozen=True)
class Instruction:
    """One file as the model gets it. `path` is what a person calls it."""

    file: Path
    path: str
    text: str

    def __str__(self) -> str:
        text = self.text.replace("</instructions", "<\\/instructions")
        return f'<instructions path="{visible(self.path)}">\n{text}\n</instructions>'

    def cut(self, most: int) -> Instruction:
        """The same in at most so many characters, and a line that says what is missing."""
        if len(self.text) <= most:
            return self
        return Instruction(
            self.file,
            self.path,
            f"{self.text[:most]}\n[cut: {len(self.text) - most} more characters]",
        )


def instructions(
    cwd: Path, config: Path | None = None, tell: Callable[[str], None] = lambda text: None
) -> list[Instruction]:
    """The user's (in `config`), then the project's from the repository's root to `cwd`; at most MOST characters. `tell` is called
    with a sentence for each that cannot be taken."""
    root = repository_top(cwd, lambda place: _trusted(place, cwd))
    own = found_in(config, config, "~/", tell) if config else ()
    folders = [root, *(root / Path(*parts) for parts in folders_down(cwd.relative_to(root)))]
    found = [each for folder in folders for each in found_in(folder, root, "", tell)]
    return _fitting(
        [*own, *(each for each in found if each.file.parent == cwd or _trusted(each.file, cwd))]
    )


def _trusted(path: Path, cwd: Path) -> bool:
    """Is its owner one of whom nothing has to be feared here: we, the system, or the owner of the working folder?"""
    with contextlib.suppress(OSError):
        return path.stat().st_uid in {os.geteuid(), 0, cwd.stat().st_uid}
    return False


def folders_down(relative: Path) -> Iterator[tuple[str, ...]]:
    """The parts of each folder on the way down."""
    for count in range(1, len(relative.parts) + 1):
        yield relative.parts[:count]


def found_in(
    folder: Path, root: Path, prefix: str = "", tell: Callable[[str], None] = lambda text: None
) -> Iterator[Instruction]:
    """The files of one folder, which have to lie in `root`; `tell` is called for one that cannot be taken."""
    for names in NAMES:
        for name in names:
            shown = prefix + name if prefix else str((folder / name).relative_to(root))
            try:
                text = _read(folder / name, root).strip()
            except OSError as error:
                if os.path.lexists(folder / name):
                    tell(f"{shown} is left out: {error.strerror}.")
                continue
            if text:
                yield Instruction(folder / name, shown, visible(text))
                break


def _read(path: Path, root: Path) -> str:
    """The text of a regular file that really lies in `root`; no waiting for what is none. Raises OSError."""
    real = os.path.realpath(path)
    if not Path(real).is_relative_to(os.path.realpath(root)):
        raise OSError(errno.EXDEV, "a link leads out of the repository")
    fd = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        return os.read(fd, 4 * MOST).decode("utf-8", "replace").removeprefix("\ufeff")
    finally:
        os.close(fd)


def _fitting(found: Sequence[Instruction]) -> list[Instruction]:
    left, kept = MOST, list[Instruction]()
    for each in reversed(found):
        kept.insert(0, each.cut(left))
        left = max(0, left - len(each.text))
    return kept
