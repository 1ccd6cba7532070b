"""What runs have changed in a workspace, and how it is shown."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

from coder.sessions.database import StoreError
from coder.sessions.file_states import Entry, Pair
from coder.tools.text import diff
from coder.types import Message

BINARY_AFTER = 8192  # bytes: with a zero byte in them, a file is no text


@dataclass
class RunSnapshot:
    """One run: `message` is the time of its user message, or 0 if it went on without one.

    `steps` are those which changed something; if one is not known, `problem` says why. What the
    files of `lost` were is not kept. `is_partly_known`: a command began before it was known which
    files there are. Once undone, `removed` are the messages that were at a `place` in the list,
    `left` those there now.
    """

    message: int = 0
    steps: list[dict[str, Pair]] = field(default_factory=list)
    problem: str = ""
    lost: list[str] = field(default_factory=list)
    is_partly_known: bool = False
    row: int = 0  # in the file
    place: int = 0
    removed: list[Message] = field(default_factory=list)
    left: list[Message] = field(default_factory=list)

    def to_json(self) -> str:
        """What is kept of it."""
        steps = [{path: _facts(pair) for path, pair in step.items()} for step in self.steps]
        kept = (self.message, steps, self.problem, self.lost, self.is_partly_known)
        return json.dumps(kept)

    @classmethod
    def from_json(cls, text: str, row: int) -> RunSnapshot:
        """From what is kept of it; older versions kept the first three facts only."""
        message, steps, *others = json.loads(text)
        run = cls(message, [], *others)
        run.row = row
        for step in steps:
            pairs = {path: _pair(*facts) for path, facts in step.items()}
            run.steps.append(pairs)
        return run


def _facts(pair: Pair) -> list[Any]:
    return [astuple(entry) if entry else None for entry in pair]


def _pair(before: list[Any] | None, after: list[Any] | None) -> Pair:
    old = Entry(*before) if before else None
    new = Entry(*after) if after else None
    return (old, new)


def net_change(runs: Iterable[RunSnapshot]) -> tuple[dict[str, Pair], set[str]]:
    """What runs have changed, from before the first step to after the last.

    And the paths that the user has changed between two of them. Raises StoreError if a step is not
    known.
    """
    files: dict[str, Pair] = {}
    torn: set[str] = set()
    for run in runs:
        if run.problem:
            raise StoreError(run.problem)
        for step in run.steps:
            for path, (before, after) in step.items():
                first, last = files.get(path, (before, before))
                files[path] = (first, after)
                if last != before:
                    torn.add(path)
    return files, torn


def diff_of(files: Mapping[str, Pair], blobs: Mapping[str, bytes]) -> str:
    """A unified diff of these files, with the contents of their blobs."""
    parts: list[str] = []
    for path, (before, after) in sorted(files.items()):
        if before != after:
            parts += _heading(path, before, after)
            parts.append(_content_diff(path, _content(before, blobs), _content(after, blobs)))
    return "".join(f"{part}\n" for part in parts if part)


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
    return blobs.get(entry.blob) if entry else b""


def _content_diff(path: str, before: bytes | None, after: bytes | None) -> str:
    if before is None or after is None:
        return f"The contents of {path} are no longer kept"
    if before == after:
        return ""
    if b"\0" in before[:BINARY_AFTER] + after[:BINARY_AFTER]:
        return f"Binary files a/{path} and b/{path} differ"
    return diff(before.decode("utf-8", "replace"), after.decode("utf-8", "replace"), path)


def blobs_of(files: Iterable[Pair]) -> set[str]:
    """The contents before and after."""
    return {entry.blob for pair in files for entry in pair if entry}


def reversed_pairs(files: Mapping[str, Pair]) -> dict[str, Pair]:
    """The way back."""
    return {path: (after, before) for path, (before, after) in files.items()}


def named(paths: Collection[str], most: int = 5) -> str:
    """The first of these paths."""
    return ", ".join(sorted(paths)[:most])
