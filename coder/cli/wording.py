"""Words and rows for the screen: how a run ended, an error, a session in a list, what came of a call, a diff."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from coder.cli.screen import cell_count, one_line
from coder.events import RunEnd, ToolEnd
from coder.permissions.sanitize import strip_controls
from coder.providers.errors import explain
from coder.providers.text import text_of
from coder.types import ModelError, RunResult, Usage

if TYPE_CHECKING:
    from coder.sessions.store import SessionInfo

STOPPED = {
    "stop": "done",
    "length": "stopped: the answer reached the output limit",
    "content_filter": "stopped by the content filter",
    "max_steps": "stopped: the step limit is reached",
    "max_time": "stopped: the time limit is reached",
    "doom_loop": "stopped: the model repeats itself",
    "aborted": "stopped by the user",
    "error": "failed",
}
TOO_LONG = "stopped: the conversation is too long for the model"
CUT = "stopped: the context is full, so that the answer is cut"
FULL = "/compact shortens the conversation, /new begins another."
MAX_RUN_LINE = 78  # columns
LIMITS = ("max_steps", "max_time")  # behind which the run can go on
ATTACHED = "\n\n<attached "  # begins each file behind the words of an entry
AGES = ((86_400, "d"), (3_600, "h"), (60, "min"))  # seconds, unit
# What /help shows beside the commands, and /permissions above the rules
KEYS = {
    "!command": "run it in your terminal and add its output to the conversation",
    "!!command": "only run it",
    "@path": "attach a file, an image or a folder's list; Tab completes it",
    "Ctrl+J": 'a new line (or Alt+Enter); """ begins and ends an entry of several lines',
    "Ctrl+R": "search the history",
}
BACK = (
    "Go back to before which entry? Its run and all after it are undone, with their file changes."
)
WORKING = "While the agent works: a line steers it, Esc stops it, +line and commands wait until it is done."
RULES = (
    "The last rule that matches an action decides. Without one, reading in this folder is allowed, and so are "
    "commands that only read (ls, cat, find, rg, git diff and the like); other commands, edits, paths "
    "outside and tools that are not built in ask."
)

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


def why_stopped(end: RunEnd | RunResult) -> str:
    """Why a run stopped. A full context is no answer that reached the output limit."""
    if not is_full(end):
        return STOPPED[end.stop_reason]
    return CUT if has_cut_answer(end) else TOO_LONG


def is_full(end: RunEnd | RunResult) -> bool:
    """Whether the context is full, so that the same conversation cannot go on."""
    return bool(end.error and end.error.kind == "overflow")


def has_cut_answer(end: RunEnd | RunResult) -> bool:
    """Whether a full context has cut an answer, which is no error of the server's."""
    from coder.model_call import CONTEXT_LIMIT  # late: a list of sessions needs none of the loop

    return is_full(end) and end.text != CONTEXT_LIMIT


def error_text(text: str, error: ModelError) -> str:
    """The server's words and advice, in one line. `text` is that of RunEnd."""
    head = text.partition(":")[0] if text.startswith("Failed after") else "Error"
    return strip_controls(f"{head}: {explain(error)}")


def tokens(usage: Usage) -> str:
    """Tokens in (how many of them cached) and out (how many of them reasoning), and their cost; ~ marks an estimate."""
    about = "~" if usage.estimated else ""
    cached = f" ({count(usage.cached)} cached)" if usage.cached else ""
    thought = f" ({count(usage.reasoning)} reasoning)" if usage.reasoning else ""
    text = f"{about}{count(usage.input)} in{cached}, {about}{count(usage.output)} out{thought}"
    if usage.cost is None:
        return text
    return f"{text}, {about}${usage.cost:.{2 if usage.cost >= 1 else 4}f}"


def run_line(end: RunEnd, used: float, seconds: float) -> str:
    """The line behind a run: why it stopped, steps, tokens where any are known, what is left of the context, seconds.

    What does not fit into MAX_RUN_LINE columns is left out: words, the reasoning among the tokens, what was cached.
    """
    usage, left = end.usage, f"{max(0, 100 - 100 * used):.0f} % "
    brief = replace(usage, reasoning=0)
    forms = (
        (usage, "of the context left"),
        (usage, "left"),
        (brief, "left"),
        (replace(brief, cached=0), "left"),
    )
    for shown, words in forms:
        facts = [why_stopped(end), plural(end.steps, "step")]
        facts += [tokens(shown)] if shown.input or shown.output else []
        facts += [left + words] if used else []
        line = " · ".join([*facts, f"{seconds:.1f} s"])
        if cell_count(line) <= MAX_RUN_LINE:
            break
    return line


def words_of(text: str) -> str:
    """An entry without what was attached to it."""
    return text.partition(ATTACHED)[0]


def count(number: int) -> str:
    if number < 1000:
        return str(number)
    return f"{number / 1000:.1f}k" if number < 1_000_000 else f"{number / 1e6:.2f}M"


def session_line(info: SessionInfo, head: str = "", tail: str = "", width: int = 0) -> str:
    """A session in a list, between `head` and `tail`: its age, what it is about, its size and model. In one row of
    `width` columns, if that is given."""
    about = " ".join(strip_controls(info.title or info.first).split())
    seconds = max(0.0, time.time() - info.updated / 1000)
    age = next((f"{seconds / size:.0f} {unit}" for size, unit in AGES if seconds >= size), "now")
    facts = ", ".join(filter(None, [plural(info.messages, "message"), strip_controls(info.model)]))
    head, tail = f"{head}{age:>6}  ", f"  ({facts}){tail}"
    if not width:
        return head + about + tail
    about = one_line(about, max(16, width - cell_count(head + tail)))
    return one_line(head + about + tail, width)


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def first_of(names: Sequence[str], most: int = 15) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def by_number(values: Sequence[str], answer: str) -> str:
    """The value with this number, from 1; what is none stands for itself."""
    number = int(answer) if answer.isdecimal() else 0
    return values[number - 1] if 0 < number <= len(values) else answer


# ---- calls and diffs ---------------------------------------------------------------------


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
    return (f" · {plural(line_count(event), 'line')}" if event.name in COUNTED_TOOLS else ""), "dim"


def line_count(event: ToolEnd) -> int:
    content = event.result.content
    return len(content.splitlines()) if isinstance(content, str) else 0


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
        lines = [f"… {plural(len(lines) - OUTPUT_LINES, 'line')}", *lines[-OUTPUT_LINES:]]
    return [[(line, "" if event.is_error else "dim")] for line in lines]


def fitted(parts: Parts, width: int) -> Iterator[tuple[str, str]]:
    """The parts of a row, cut to `width` columns. Their text is sanitised here."""
    parts = [(strip_controls(text).expandtabs(4), style) for text, style in parts]
    row = one_line("".join(text for text, _ in parts), width)
    for text, style in parts:
        yield row[: len(text)], style
        row = row[len(text) :]


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
    from difflib import SequenceMatcher  # late: a list of sessions needs none

    for before, after in zip(removed, added):
        olds, news = WORD.findall(before.pop()[0]), WORD.findall(after.pop()[0])
        matcher = SequenceMatcher(None, olds[:MAX_WORDS], news[:MAX_WORDS], autojunk=False)
        marked = " reverse" if matcher.ratio() >= SIMILAR else ""
        for kind, *places in [*matcher.get_opcodes(), ("equal", MAX_WORDS, None, MAX_WORDS, None)]:
            mark = "" if kind == "equal" else marked
            before.append(("".join(olds[places[0] : places[1]]), f"red{mark}"))
            after.append(("".join(news[places[2] : places[3]]), f"green{mark}"))
