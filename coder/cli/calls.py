"""Calls on the screen: what came of one in a few words, and the rows below it: a diff, a checklist, the end of an output."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from difflib import SequenceMatcher

from coder.cli.screen import one_line
from coder.events import ToolEnd
from coder.permissions.sanitize import strip_controls
from coder.providers.text import text_of

Part = tuple[str, str]  # a text and its style
Parts = list[Part]  # a row

MAX_DIFF_ROWS = 60
OUTPUT_LINES = 6  # of a command's output, its last ones
COUNTED_TOOLS = {"read", "ls", "grep", "glob"}  # their output is for the model
CHECKLIST = {"done": ("☑", "dim"), "in_progress": ("▸", "bold")}

NO_FAILURE = re.compile(r"Denied: |Not run: |Skipped |(?s:.*)\[aborted by the user\]$")
PROGRESS = re.compile(r"(?m)^[^\n]*\r(?=[^\r\n])")
HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
WORD = re.compile(r"\w+|\s+|.")
MAX_WORDS = 100  # at the beginning of a line, among which the changed ones are looked for
MAX_MARKED = 400  # lines of a diff in which they are
SIMILAR = 0.5  # ratio of difflib from which two lines are one that was changed


def outcome(event: ToolEnd) -> tuple[str, str]:
    """What came of a call, and its style. Yellow is a result, or what the user wanted; red a call that could not do its work."""
    details = event.result.details
    if (code := details.get("exit_code")) and not details.get("cause"):
        return f" · exit {code}", "yellow"
    if event.is_error:
        return "", "yellow" if NO_FAILURE.match(str(event.result.content)) else "red"
    if changes := details.get("diff"):
        signs = [parts[1][0] for parts in diff_rows(changes) if len(parts) > 1]
        return f" · +{signs.count('+ ')} -{signs.count('- ')}", "dim"
    return (f" · {lines_of(line_count(event))}" if event.name in COUNTED_TOOLS else ""), "dim"


def line_count(event: ToolEnd) -> int:
    content = event.result.content
    return len(content.splitlines()) if isinstance(content, str) else 0


def lines_of(number: int) -> str:
    return f"{number} line{'s' if number != 1 else ''}"


def result_rows(event: ToolEnd, verbose: bool) -> list[Parts]:
    """What a call did, as far as the user reads it; with `verbose` all of it."""
    content, details = event.result.content, event.result.details
    if items := details.get("todo"):
        marks = [CHECKLIST.get(item["status"], ("☐", "")) for item in items]
        return [[(f"{mark} {each['text']}", style)] for each, (mark, style) in zip(items, marks)]
    if changes := details.get("diff"):
        rows = diff_rows(changes)
        if len(rows) > MAX_DIFF_ROWS and not verbose:
            rows[MAX_DIFF_ROWS:] = [[(f"… {len(rows) - MAX_DIFF_ROWS} more lines", "dim")]]
        return rows
    text = text_of({"content": content}) or "[image]" * bool(content)
    text = text.rpartition("\n\n[task_id")[0] or text  # that line is for the model
    if code := details.get("exit_code"):  # it stands in the line of the call; notes may follow
        output, _, notes = text.rpartition(f"[exit code {code}]")
        text = output + notes.lstrip("\n")
    if not verbose:  # of a line of progress the last state, as on a terminal
        text = PROGRESS.sub("", text)
    lines = strip_controls(text).rstrip().splitlines()
    if event.name in COUNTED_TOOLS and not event.is_error and not verbose:
        return []
    if len(lines) > OUTPUT_LINES and not verbose:
        lines = [f"… {lines_of(len(lines) - OUTPUT_LINES)}", *lines[-OUTPUT_LINES:]]
    return [[(line, "" if event.is_error else "dim")] for line in lines]


def fitted(parts: Parts, width: int) -> Iterator[tuple[str, str]]:
    """The parts of a row, cut to `width` columns. Their text is sanitised here."""
    parts = [(strip_controls(text).expandtabs(4), style) for text, style in parts]
    row = one_line("".join(text for text, _ in parts), width)
    for text, style in parts:
        yield row[: len(text)], style
        row = row[len(text) :]


# ---- diffs -------------------------------------------------------------------------------


def diff_rows(changes: str, shown: Callable[[str], str] = strip_controls) -> list[Parts]:
    """The lines of a unified diff with their numbers and, in a line that was changed, the changed words marked.

    A row of a line is (number, sign, text...). The names go where there is one file. `shown`: what a line looks like.
    """
    lines = changes.removesuffix("\n").split("\n")
    one_file = changes.startswith("--- ") and "\n--- " not in changes
    rows, removed, added = list[Parts](), list[Parts](), list[Parts]()
    old = new = old_end = new_end = 0  # the numbers of the next lines, and those behind the hunk
    for line in [*lines[2 * one_file :], "\\"]:
        sign, text = line[:1], shown(line[1:].expandtabs(4))
        if sign == "-" and old < old_end:
            removed.append(_row(old, sign, text, "red"))
            old += 1
        elif sign == "+" and new < new_end:
            added.append(_row(new, sign, text, "green"))
            new += 1
        else:
            if len(lines) <= MAX_MARKED:
                _mark_words(removed, added)
            rows += removed + added
            removed, added = [], []
            if sign in ("", " ") and new < new_end:
                rows.append(_row(new, " ", text, ""))
                old, new = old + 1, new + 1
            elif hunk := HUNK.match(line):
                rows += [[("   ⋮", "dim")]] if new_end else []
                old, new = int(hunk[1]), int(hunk[3])
                old_end, new_end = old + int(hunk[2] or 1), new + int(hunk[4] or 1)
            else:  # a name, or a remark such as that no newline ends the file
                is_remark = line.startswith("\\")
                new_end *= is_remark
                rows.append([(shown(line), "dim" if is_remark else "bold")])
    return rows[:-1]


def _row(number: int, sign: str, text: str, style: str) -> Parts:
    return [(f"{number:>4} ", "dim"), (f"{sign} ", style), (text, style)]


def _mark_words(removed: list[Parts], added: list[Parts]) -> None:
    """Mark the words that changed, where a line and its successor are similar."""
    for before, after in zip(removed, added):
        olds, news = WORD.findall(before.pop()[0]), WORD.findall(after.pop()[0])
        matcher = SequenceMatcher(None, olds[:MAX_WORDS], news[:MAX_WORDS], autojunk=False)
        marked = " reverse" if matcher.ratio() >= SIMILAR else ""
        for kind, *places in [*matcher.get_opcodes(), ("equal", MAX_WORDS, None, MAX_WORDS, None)]:
            mark = "" if kind == "equal" else marked
            before.append(("".join(olds[places[0] : places[1]]), f"red{mark}"))
            after.append(("".join(news[places[2] : places[3]]), f"green{mark}"))
