"""What came of a call, in words and in rows below it, as far as the user reads it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from coder.cli.diff import diff_rows
from coder.cli.text_rows import Part, Parts, one_line
from coder.events import ToolEnd
from coder.permissions.sanitize import strip_controls
from coder.providers.text import plural, text_of

MAX_DIFF_ROWS = 60
OUTPUT_LINES = 6  # of a command's output, its last ones
COUNTED_TOOLS = {"read", "ls", "grep", "glob"}  # their output is for the model
CHECKLIST = {"done": ("☑", "dim"), "in_progress": ("▸", "bold")}
OPEN_ITEM = ("☐", "")
NO_FAILURE = re.compile(r"Denied: |Not run: |Skipped |(?s:.*)\[aborted by the user\]$")
PROGRESS = re.compile(r"(?m)^[^\n]*\r(?=[^\r\n])")


def outcome(event: ToolEnd) -> tuple[str, str]:
    """What came of a call, and its style: red for a call that could not do its work; yellow for
    a result that differs, or for what the user wanted."""
    details = event.result.details
    code = details.get("exit_code")
    changes = details.get("diff")
    if code and not details.get("cause"):
        return f" · exit {code}", "yellow"
    if event.is_error:
        return "", "yellow" if NO_FAILURE.match(str(event.result.content)) else "red"
    if changes:
        signs = [parts[1][0] for parts in diff_rows(changes) if len(parts) > 1]
        return f" · +{signs.count('+ ')} -{signs.count('- ')}", "dim"
    if event.name in COUNTED_TOOLS:
        return f" · {plural(line_count(event), 'line')}", "dim"
    return "", "dim"


def line_count(event: ToolEnd) -> int:
    content = event.result.content
    return len(content.splitlines()) if isinstance(content, str) else 0


def result_rows(event: ToolEnd, verbose: bool) -> list[Parts]:
    """What a call did; with `verbose` all of it."""
    items = event.result.details.get("todo")
    changes = event.result.details.get("diff")
    if items:
        return [_item_row(item["text"], item["status"]) for item in items]
    if changes:
        rows = diff_rows(changes)
        return rows if verbose else _first_rows(rows)
    if event.name in COUNTED_TOOLS and not event.is_error and not verbose:
        return []
    style = "" if event.is_error else "dim"
    return [[(line, style)] for line in _output_lines(event, verbose)]


def _item_row(text: str, status: str) -> Parts:
    mark, style = CHECKLIST.get(status, OPEN_ITEM)
    return [(f"{mark} {text}", style)]


def _first_rows(rows: list[Parts]) -> list[Parts]:
    left_out = len(rows) - MAX_DIFF_ROWS
    if left_out <= 0:
        return rows
    return [*rows[:MAX_DIFF_ROWS], [(f"… {left_out} more lines", "dim")]]


def _last_lines(lines: list[str]) -> list[str]:
    left_out = len(lines) - OUTPUT_LINES
    if left_out <= 0:
        return lines
    return [f"… {plural(left_out, 'line')}", *lines[-OUTPUT_LINES:]]


def _output_lines(event: ToolEnd, verbose: bool) -> list[str]:
    content = event.result.content
    text = text_of({"content": content})
    if not text and content:
        text = "[image]"
    text = text.rpartition("\n\n[task_id")[0] or text  # that line is for the model
    code = event.result.details.get("exit_code")
    if code:  # the line of the call shows it; notes may follow
        output, _, notes = text.rpartition(f"[exit code {code}]")
        text = output + notes.lstrip("\n")
    if not verbose:  # the last state of a line of progress, as on a terminal
        text = PROGRESS.sub("", text)
    lines = strip_controls(text).rstrip().splitlines()
    return lines if verbose else _last_lines(lines)


def fitted(parts: Parts, width: int) -> Iterator[Part]:
    """The parts of a row, cut to `width` columns. Their text is sanitised here."""
    parts = [(strip_controls(text).expandtabs(4), style) for text, style in parts]
    row = one_line("".join(text for text, _ in parts), width)
    for text, style in parts:
        yield row[: len(text)], style
        row = row[len(text) :]
