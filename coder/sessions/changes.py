"""What runs have changed in a workspace, and how it is shown."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from coder.sessions.database import StoreError
from coder.sessions.file_states import Entry, Pair
from coder.tools.text import diff
from coder.types import Message

BINARY_AFTER = 8192  # bytes: with a zero byte in them, a file is no text


Step = dict[str, Pair]  # by the paths of the files that changed
Kept = list[Any]  # the facts of an entry, as JSON has them


@dataclass
class RunSnapshot:
    """One run: `message` is the time of its user message, or 0 if it went on without one.

    `steps` are those which changed something; if one is not known, `problem` says why. What the
    files of `lost` were is not known. `is_partly_known`: a command began before it was known which
    files there are. Once undone, `removed` are the messages that were at a `place` in the list,
    `left` those there now.
    """

    message: int = 0
    steps: list[Step] = field(default_factory=list)
    problem: str = ""
    lost: list[str] = field(default_factory=list)
    is_partly_known: bool = False
    row: int = 0  # in the file
    place: int = 0
    removed: list[Message] = field(default_factory=list)
    left: list[Message] = field(default_factory=list)

    def to_json(self) -> str:
        """What is kept of it."""
        steps: list[dict[str, list[Kept | None]]] = []
        for step in self.steps:
            facts = {path: [_facts(entry) for entry in pair] for path, pair in step.items()}
            steps.append(facts)
        kept = [
            self.message,
            steps,
            self.problem,
            self.lost,
            self.is_partly_known,
        ]
        return json.dumps(kept)

    @classmethod
    def from_json(cls, text: str, row: int) -> RunSnapshot:
        """From what is kept of it; older versions kept the first three facts only."""
        message, steps, *others = json.loads(text)
        run = cls(message, [], *others)
        run.row = row
        for step in steps:
            pairs: Step = {}
            for path, (before, after) in step.items():
                old = _entry(before)
                new = _entry(after)
                pairs[path] = (old, new)
            run.steps.append(pairs)
        return run


def renumber(runs: Collection[RunSnapshot], new_inodes: dict[int, int]) -> list[RunSnapshot]:
    """Let runs know the new inodes of files with several names, by the former ones. Returns those
    that are to be stored again.

    Another file that had one of the new ones is gone: the number alone is not its own any more.
    """
    if not new_inodes:
        return []
    numbers = {new: -new for new in new_inodes.values()} | new_inodes
    for run in runs:
        for step in run.steps:
            for path, (before, after) in step.items():
                step[path] = (_renumbered(before, numbers), _renumbered(after, numbers))
    return [run for run in runs if run.row]


def _renumbered(entry: Entry | None, numbers: Mapping[int, int]) -> Entry | None:
    if entry is None:
        return None
    return replace(entry, link=numbers.get(entry.link, entry.link))


def _facts(entry: Entry | None) -> Kept | None:
    if entry is None:
        return None
    return [entry.mode, entry.blob, entry.link]


def _entry(facts: Kept | None) -> Entry | None:
    if facts is None:
        return None
    return Entry(*facts)


def net_change(runs: Iterable[RunSnapshot]) -> tuple[Step, set[str]]:
    """What runs have changed, from before the first step to after the last.

    And the paths that the user has changed between two of them. Raises StoreError if a step is not
    known.
    """
    files: Step = {}
    torn: set[str] = set()
    for step in _steps_of(runs):
        for path, (before, after) in step.items():
            first = before
            if path in files:
                first, last = files[path]
                if last != before:
                    torn.add(path)
            files[path] = (first, after)
    return files, torn


def _steps_of(runs: Iterable[RunSnapshot]) -> Iterator[Step]:
    for run in runs:
        if run.problem:
            raise StoreError(run.problem)
        yield from run.steps


def diff_of(files: Mapping[str, Pair], blobs: Mapping[str, bytes]) -> str:
    """A unified diff of these files, with the contents of their blobs."""
    lines: list[str] = []
    for path, (before, after) in sorted(files.items()):
        if before == after:
            continue
        lines += _heading(path, before, after)
        old = _content(before, blobs)
        new = _content(after, blobs)
        content = _content_diff(path, old, new)
        if content:
            lines.append(content)
    return "".join(f"{line}\n" for line in lines)


def _heading(path: str, before: Entry | None, after: Entry | None) -> list[str]:
    lines = [f"diff --git a/{path} b/{path}"]
    if before is None:
        lines.append("new file")
    elif after is None:
        lines.append("deleted file")
    elif before.mode != after.mode:
        lines.append(f"old mode {before.mode:o}")
        lines.append(f"new mode {after.mode:o}")
    return lines


def _content(entry: Entry | None, blobs: Mapping[str, bytes]) -> bytes | None:
    """The content of a file; of none it is empty. None if it is no longer kept."""
    if entry is None:
        return b""
    return blobs.get(entry.blob)


def _content_diff(path: str, before: bytes | None, after: bytes | None) -> str:
    if before is None or after is None:
        return f"The contents of {path} are no longer kept"
    if before == after:
        return ""
    beginnings = before[:BINARY_AFTER] + after[:BINARY_AFTER]
    if b"\0" in beginnings:
        return f"Binary files a/{path} and b/{path} differ"
    old = before.decode("utf-8", "replace")
    new = after.decode("utf-8", "replace")
    return diff(old, new, path)


def blobs_of(files: Iterable[Pair]) -> set[str]:
    """The contents before and after."""
    return {entry.blob for pair in files for entry in pair if entry}


def reversed_pairs(files: Mapping[str, Pair]) -> dict[str, Pair]:
    """The way back."""
    return {path: (after, before) for path, (before, after) in files.items()}


def named(paths: Collection[str], most: int = 5) -> str:
    """The first of these paths."""
    return ", ".join(sorted(paths)[:most])
