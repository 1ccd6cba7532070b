"""Events on a screen, for people: text as it streams, a line per tool, diffs, and why a run stopped.

A consumer of events and nothing else.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence

from coder.cli.children import Children, unwrapped
from coder.cli.screen import Screen, one_line
from coder.events import (
    Compacted,
    DoomLoop,
    Event,
    HookFailed,
    MessageEnd,
    MessageStart,
    Nested,
    Notice,
    PermissionAsked,
    PermissionReplied,
    QuestionAsked,
    ReasoningDelta,
    Retry,
    RunEnd,
    RunStart,
    Status,
    StepStart,
    TextDelta,
    ToolCallDelta,
    ToolEnd,
    ToolStart,
    ToolUpdate,
)
from coder.history import text_of
from coder.providers.errors import explain, happened
from coder.providers.text import clean, hides, visible
from coder.types import ModelError, ToolResult, Usage

DIFF_LINES = 60
OUTPUT_LINES = 6  # of a command's output, its last ones
DIFF_COLOURS = {"+": "green", "-": "red", "@": "cyan", "f": "bold"}
REASON = 120  # characters of why an attempt failed
MOST_BLANKS = 60  # in a row, in a question
ASKS = {
    "bash": "Run this command?",
    "edit": "Make this change?",
    "external_directory": "Go outside the folder?",
    "unconfined": "Run this command outside the sandbox?",
}
QUIET_TOOLS = {"read", "ls", "grep", "glob"}  # their output is for the model

SHORTENED = {
    "prune": "old tool output was removed",
    "summary": "a summary took the place of what is old",
}
STOPPED = {
    "stop": "done",
    "length": "stopped: the answer reached a length limit",
    "content_filter": "stopped by the content filter",
    "max_steps": "stopped: the step limit is reached; go on with `continue`",
    "max_time": "stopped: the time limit is reached; go on with `continue`",
    "doom_loop": "stopped: the model repeats itself",
    "aborted": "stopped by you",
    "error": "failed",
}


class Renderer:
    """Shows the events of runs on `screen`. `show_text` False leaves the answers to somebody else. `limits`: seconds
    without data until a request is given up, at its start and later on."""

    def __init__(
        self,
        screen: Screen,
        *,
        show_text: bool = True,
        verbose: bool = False,
        limits: tuple[float, float] = (math.inf, math.inf),
    ) -> None:
        self.screen = screen
        self.show_text = show_text
        self.verbose = verbose
        self.thoughts = verbose
        self.first_byte, self.idle = limits
        self.loading = False  # the server was said to load its model
        self.failed = ""  # what happened at the newest attempt
        self.shown = False  # text of the answer under way
        self.started = time.monotonic()
        self.streaming = ""  # "text" or "reasoning" while it comes
        self.titles: dict[str, str] = {}  # of the calls under way, by their ids
        self.asked = ""  # the diff that a question has shown already
        self.children = Children(verbose=verbose)

    def __call__(self, event: Event) -> None:
        match event:
            case TextDelta(text=text):
                self._stream("text", text)
            case ReasoningDelta(text=text):
                self._stream("reasoning", text)
            case ToolCallDelta(name=name):
                self._pause(f"{name} …", self.idle)
            case RunStart():
                self.started, self.loading = time.monotonic(), False
                self.titles.clear()
                self.children.begin()
            case MessageStart(message={"role": "user", "meta": {"queued": True}} as message):
                self._quiet()
                self.screen.line(f"> {text_of(message)}", "bold")
                self._pause("thinking", self.first_byte)
            case MessageEnd():
                self.shown, self.failed = False, ""
            case StepStart() | Status(state="preparing"):
                self._pause("thinking", self.first_byte)
            case ToolStart(id=call_id, title=title):
                self.titles[call_id], self.asked = title, ""
                self.children.called(event)
                self._pause(self._under_way())
                self.screen.restart_clock()
            case ToolUpdate():
                self._progress(event)
            case ToolEnd():
                self._tool(event)
            case Retry():
                self._retry(event)
            case PermissionAsked(detail=detail):
                self.asked = detail
                self._quiet()
            case PermissionReplied(answer=answer) if answer != "no":
                self._pause(self._under_way())
                self.screen.restart_clock()
            case _:
                self._tell(event)

    def _tell(self, event: Event) -> None:
        """What is no step of the work itself."""
        match event:
            case DoomLoop() | QuestionAsked():
                self._quiet()
            case Nested(agent="compaction", event=RunStart()):
                self._pause("shortening the conversation", self.first_byte)
            case Nested():
                self._nested(event)
            case Compacted(before=before, after=after, strategy=strategy):
                self._quiet()
                sizes = f"from {count(before['tokens'])} to {count(after['tokens'])} tokens"
                self.screen.line(
                    f"The conversation was shortened {sizes}: {SHORTENED.get(strategy, strategy)}.",
                    "yellow",
                )
                self._pause("thinking", self.first_byte)
            case Notice(text=text):
                self._quiet()
                self.screen.line(text, "yellow")
            case HookFailed(hook=hook, place=place, error=error):
                self._quiet()
                self.screen.line(f"The hook {hook} failed ({place}): {error}", "yellow")
            case RunEnd():
                self._end(event)

    # -- text

    def _stream(self, kind: str, text: str) -> None:
        if not (self.thoughts if kind == "reasoning" else self.show_text):
            self._pause("thinking" if kind == "reasoning" else "writing", self.idle)
            return
        if self.streaming != kind:
            self._quiet()
            text = text.lstrip("\n")
            self.streaming = kind if text else ""
        if kind == "text":
            self.shown = self.shown or bool(text)
            self.screen.answer(text)
        else:
            self.screen.thought(text)
        self.screen.status("waiting", self.idle, only_stalls=True)

    def _quiet(self) -> None:
        """End what is under way: the status line, a line that is not finished."""
        self.screen.status("")
        self.screen.finish_line()
        self.streaming = ""

    def _pause(self, label: str, limit: float = math.inf) -> None:
        """Something is being waited for: the spinner says what, and for how long at most."""
        if self.streaming:
            self._quiet()
        self.screen.finish_line()
        self.screen.status(label, limit)

    # -- sub-agents

    def _nested(self, nested: Nested) -> None:
        """What a child does: its lines, and a share of the status line."""
        event = unwrapped(nested)[2]
        if isinstance(event, PermissionAsked | DoomLoop | QuestionAsked):
            self._quiet()
            return
        lines = self.children.take(nested)
        if lines:
            self._quiet()
        for text, style in lines:
            self.screen.line(one_line(f"  {text.strip()}", self.screen.width - 1), style)
        if self.children.living:
            self._pause(self._under_way())

    # -- tools

    def _under_way(self) -> str:
        """The calls that run, in a line."""
        if self.children.living:
            return self.children.doing(self.screen.width - 12)
        several = f"{len(self.titles)} calls: " if len(self.titles) > 1 else ""
        return several + " · ".join(self.titles.values())

    def _progress(self, event: ToolUpdate) -> None:
        lines = event.text.rstrip().splitlines()
        if lines:
            self.screen.status(f"{self.titles.get(event.id, '')} │ {lines[-1]}")

    def _tool(self, event: ToolEnd) -> None:
        self._quiet()
        title = self.titles.pop(event.id, event.name)
        seconds = f"  {event.seconds:.1f}s" if event.seconds >= 0.1 else ""
        self.screen.finish_line()
        self.screen.print(
            "✗ " if event.is_error else "● ", "bold red" if event.is_error else "green"
        )
        self.screen.print(one_line(title, self.screen.width - len(seconds) - 2), "")
        self.screen.print(seconds + "\n", "dim")
        self._details(event.name, event.result)
        self._pause(self._under_way() or "thinking")
        self.screen.restart_clock()

    def _details(self, name: str, result: ToolResult) -> None:
        if items := result.details.get("todo"):
            self._checklist(items)
            return
        if changes := result.details.get("diff"):
            if changes != self.asked:
                self.diff(changes)
            return
        content = result.content if isinstance(result.content, str) else ""
        if "session_id" in result.details:
            content = content.rpartition("\n\n[task_id")[0]  # that line is for the model
        lines = clean(content).rstrip().splitlines()
        if name in QUIET_TOOLS and not result.is_error and not self.verbose:
            self._dim([f"{len(lines)} line{'s' if len(lines) != 1 else ''}"])
            return
        hidden = len(lines) - OUTPUT_LINES
        shown = (
            lines if self.verbose or hidden <= 0 else [f"… {hidden} lines", *lines[-OUTPUT_LINES:]]
        )
        self._dim(shown)

    def _checklist(self, items: Sequence[dict[str, str]]) -> None:
        """The model's list of steps; what is done is dim, what is under way is bold."""
        for item in items:
            mark, style = {"done": ("☑", "dim"), "in_progress": ("▸", "bold")}.get(
                item["status"], ("☐", "")
            )
            self.screen.line(
                one_line(f"  {mark} {item['text'].strip()}", self.screen.width - 1), style
            )

    def _dim(self, lines: list[str]) -> None:
        for line in lines:
            self.screen.line(self._cut(line), "dim")

    def _cut(self, line: str, mark: str = "") -> str:
        """One line of foreign text, with its white space."""
        return one_line(f"  {mark}{line.expandtabs(4)}", self.screen.width - 1)

    def diff(self, changes: str) -> None:
        """What a tool has changed: a unified diff in colour, cut to the screen."""
        lines = list(diff_lines(changes))
        for kind, line in lines[:DIFF_LINES]:
            self.screen.line(self._cut(line[1:], line[:1]), DIFF_COLOURS.get(kind, "dim"))
        if len(lines) > DIFF_LINES:
            self.screen.line(f"  … {len(lines) - DIFF_LINES} more lines", "dim")

    def whole_diff(self, changes: str) -> None:
        """Every line, to its end, with what cannot be seen made visible."""
        for line, style in exact_diff(changes):
            self.screen.exactly(line, style)

    # -- what a person has to know

    def _retry(self, event: Retry) -> None:
        back = " The text above is void." if self.shown else ""
        self.shown = False
        self._quiet()
        if event.error.loading:
            if not self.loading:
                self.screen.line(
                    f"The server is not ready: {event.error.message}. Waiting for it.{back}",
                    "yellow",
                )
            self.loading = True
            self._pause("the server loads the model")
            return
        before, self.failed = self.failed, happened(event.error)
        what = "the same again" if self.failed == before else self.failed
        then = f". Attempt {event.attempt + 1} in {event.delay:.0f} s.{back}"
        room = REASON if self.screen.live else len(what)
        self.screen.line(one_line(what[:1].upper() + what[1:], room) + then, "yellow")
        self._pause("waiting to try again")

    def _end(self, event: RunEnd) -> None:
        self._quiet()
        if event.error:
            self.screen.line(error_text(event.text, event.error), "red")
        self.screen.line(summary(event, time.monotonic() - self.started), "dim")


def diff_lines(changes: str) -> Iterator[tuple[str, str]]:
    """(kind, line) of a unified diff: "+", "-", " ", "@", or "f" for the name of a file where it is of several.

    A line is a header by its place, not by its look: what is removed may begin with dashes, too.
    """
    lines, left = changes.removesuffix("\n").split("\n"), [0, 0]
    several = sum(line.startswith("+++ ") for line in lines) > 1
    for line in lines:
        if (
            counts := None
            if any(left)
            else re.match(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", line)
        ):
            left = [int(count or 1) for count in counts.groups()]
            yield "@", line
        elif any(left):
            left = [left[0] - (line[:1] != "+"), left[1] - (line[:1] != "-")]
            yield line[:1], line
        elif line.startswith("+++ ") and several:
            yield "f", f"  {line[4:].removeprefix('b/')}"
        elif not line.startswith(("--- ", "+++ ")):
            yield " ", line


def error_text(text: str, error: ModelError) -> str:
    """What happened, in the server's words, and what to do, in one line. `text` is that of RunEnd."""
    head = text.partition(":")[0] if text.startswith("Failed after") else "Error"
    return clean(f"{head}: {explain(error)}")


def summary(event: RunEnd, seconds: float) -> str:
    """The line after a run: why it stopped, steps, tokens where any are known, seconds."""
    steps = f"{event.steps} step{'s' if event.steps != 1 else ''}"
    used = [tokens(event.usage)] if event.usage.input or event.usage.output else []
    return " · ".join([STOPPED[event.stop_reason], steps, *used, f"{seconds:.1f} s"])


def tokens(usage: Usage) -> str:
    """Tokens in (how many of them cached) and out (how many of them thought), and their cost; ~ marks an estimate."""
    about = "~" if usage.estimated else ""
    cached = f" ({count(usage.cached)} cached)" if usage.cached else ""
    thought = f" ({count(usage.reasoning)} reasoning)" if usage.reasoning else ""
    cost = (
        f", {about}${usage.cost:.{2 if usage.cost >= 1 else 4}f}" if usage.cost is not None else ""
    )
    return (
        f"{about}{count(usage.input)} in{cached}, {about}{count(usage.output)} out{thought}{cost}"
    )


def count(number: int) -> str:
    return (
        str(number)
        if number < 1000
        else f"{number / 1000:.1f}k"
        if number < 1_000_000
        else f"{number / 1e6:.2f}M"
    )


def exact_diff(changes: str) -> Iterator[tuple[str, str]]:
    """(line, style) of a diff that a person decides on: all of it, nothing in it unseen."""
    return (
        (f"  {folded(visible(line.expandtabs(4)))}", DIFF_COLOURS.get(kind, "dim"))
        for kind, line in diff_lines(changes)
    )


def folded(text: str) -> str:
    """With a number in the place of blanks that would push the rest out of sight."""
    text = re.sub(f"[ \t]{{{MOST_BLANKS},}}", lambda run: f" <{len(run[0])} blanks> ", text)
    return re.sub(
        r"\n(?:[ \t]*\n){4,}", lambda run: f"\n<{run[0].count(chr(10)) - 1} empty lines>\n", text
    )


def question(event: PermissionAsked, who: str = "") -> list[tuple[str, str]]:
    """Everything about the question, exactly, as (line, style): the words that are shown are those that are acted on."""
    asks = ASKS.get(event.permission, f"Allow {event.permission}?")
    lines = [(f"{f'{who} asks: ' if who else ''}{asks}", "bold")]
    lines += [(f"  {line}", "bold") for line in folded(visible(event.pattern)).split("\n")]
    if event.why:
        lines.append((f"  ({visible(event.why)})", "yellow"))
    lines += exact_diff(event.detail) if event.detail else ()
    if unseen := sum(map(hides, event.pattern + event.detail)):
        lines.append(
            (
                f"Careful: {unseen} character{'s' if unseen != 1 else ''} in this cannot be seen or would drive the terminal; "
                "each is shown as <U+…>.",
                "yellow",
            )
        )
    return lines
