"""Events on a screen: text as it streams, a line per tool, diffs, and why a run stopped.

A consumer of events and nothing else.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence

from coder.cli.screen import Screen, one_line
from coder.cli.wording import changed_lines, count, diff_lines, elapsed, error_text, summary
from coder.cli.workers import HELPERS, Subagents, Worker, unwrap
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
from coder.history import calls_of, text_of
from coder.permissions.sanitize import strip_controls
from coder.providers.errors import explain, happened
from coder.toolset import Toolset
from coder.types import Message, ToolCall, ToolResult

MAX_DIFF_LINES = 60
OUTPUT_LINES = 6  # of a command's output, its last ones
REASON_COLUMNS = 120  # of why an attempt failed
DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan", "f": "bold"}
COUNTED_TOOLS = {"read", "ls", "grep", "glob"}  # their output is for the model
CHECKLIST = {"done": ("☑", "dim"), "in_progress": ("▸", "bold")}
SHORTENED = {
    "prune": "old tool output was removed",
    "summary": "a summary replaces the older part",
}


class Renderer:
    """Show the events of runs on `screen`.

    `show_text` False leaves the answers to the caller. `limits`: seconds without data until a request is given up,
    at its start and later on.
    """

    def __init__(
        self,
        screen: Screen,
        *,
        show_text: bool = True,
        verbose: bool = False,
        limits: tuple[float, float] = (math.inf, math.inf),
    ) -> None:
        self.screen, self.show_text, self.verbose = screen, show_text, verbose
        self.show_reasoning = verbose
        self.subagents = Subagents()
        self._agent = Worker()
        self._first_byte, self._idle = limits
        self._loading = False  # "the server loads its model" is on the screen
        self._has_text = False  # of the answer under way
        self._streaming = ""  # "text" or "reasoning" while it comes
        self._asked_diff = ""  # a question has shown it already

    def __call__(self, event: Event) -> None:
        self._agent.follow(event)
        match event:
            case TextDelta(text=text):
                self._stream("text", text)
            case ReasoningDelta(text=text):
                self._stream("reasoning", text)
            case ToolCallDelta():
                self._wait(self._agent.activity, self._idle)
            case StepStart() | Status(state="preparing"):
                self._wait("thinking", self._first_byte)
            case MessageStart(message={"role": "user", "meta": {"queued": True}} as message):
                self._line(f"> {text_of(message)}", "bold")
                self._wait("thinking", self._first_byte)
            case MessageEnd():
                self._has_text = False
            case RunStart():
                self._agent, self._loading = Worker(), False
                self.subagents.begin_run()
            case Nested():
                self._nested(event)
            case ToolStart() | ToolUpdate() | ToolEnd() | PermissionAsked() | PermissionReplied():
                self._tool_event(event)
            case DoomLoop() | QuestionAsked():
                self._pause()
            case _:
                self._notice(event)

    def _notice(self, event: Event) -> None:
        match event:
            case Compacted(before=before, after=after, strategy=strategy):
                sizes = f"from {count(before['tokens'])} to {count(after['tokens'])} tokens"
                how = SHORTENED.get(strategy, strategy)
                self._line(f"The conversation was shortened {sizes}: {how}.", "yellow")
                self._wait("thinking", self._first_byte)
            case RunEnd(error=error):
                if error:
                    self._line(error_text(event.text, error), "red")
                self._line(summary(event, time.monotonic() - self._agent.started), "dim")
            case Retry(error=error):
                back = " The text above is discarded." if self._has_text else ""
                self._has_text = False
                if not error.loading:
                    self._line(self._warning(event, self._agent) + back, "yellow")
                elif not self._loading:
                    what = f"The server is not ready: {error.message}. Waiting for it."
                    self._line(what + back, "yellow")
                self._loading = self._loading or error.loading
                what = (
                    "the server is loading the model" if error.loading else "waiting before a retry"
                )
                self._wait(what)
            case _ if text := self._warning(event, self._agent):
                self._line(text, "yellow")

    def _warning(self, event: Event, worker: Worker) -> str:
        """What the user should know of an event, of any agent; "" for nothing."""
        match event:
            case Retry(error=error, delay=delay, attempt=attempt):
                what = happened(error)
                is_same, worker.last_error = what == worker.last_error, what
                if self.screen.live:
                    what = one_line(what, REASON_COLUMNS)
                what = "The same error" if is_same else what[:1].upper() + what[1:]
                return f"{what}. Attempt {attempt + 1} in {delay:.0f} s."
            case Notice(text=text):
                return text
            case HookFailed(hook=hook, place=place, error=failure):
                return f"The hook {hook} failed ({place}): {failure}"
        return ""

    # -- text

    def _stream(self, kind: str, text: str) -> None:
        if not (self.show_reasoning if kind == "reasoning" else self.show_text):
            self._wait("thinking" if kind == "reasoning" else "writing", self._idle)
            return
        if self._streaming != kind:
            self._pause()
            text = text.lstrip("\n")
            self._streaming = kind if text else ""
        if kind == "text":
            self._has_text = self._has_text or bool(text)
            self.screen.answer(text)
        else:
            self.screen.thought(text)
        self.screen.status("waiting", self._idle, only_stalls=True)

    def _pause(self) -> None:
        """End the status and the row under way."""
        self.screen.status("")
        self.screen.finish_line()
        self._streaming = ""

    def _line(self, text: str, style: str) -> None:
        self._pause()
        self.screen.line(text, style)

    def _wait(self, label: str, limit: float = math.inf) -> None:
        """Show what is being waited for, and for how long at most."""
        if self._streaming:
            self._pause()
        self.screen.finish_line()
        self.screen.status(label, limit)

    def _activity(self) -> str:
        """What runs, in one row."""
        if self.subagents.active:
            return self.subagents.activity(self.screen.width - 12)
        return self._agent.activity

    # -- tools

    def _tool_event(self, event: Event) -> None:
        match event:
            case ToolUpdate():
                self.screen.status(self._agent.activity)
                return
            case PermissionAsked(detail=detail):
                self._asked_diff = detail
                self._pause()
                return
            case PermissionReplied(answer="no"):
                return
            case ToolStart():
                self._asked_diff = ""
                self.subagents.add_call(event)
            case ToolEnd():
                self._tool_end(event)
        self._wait(self._activity())
        self.screen.restart_clock()

    def _tool_end(self, event: ToolEnd) -> None:
        self._pause()
        seconds = elapsed(event.seconds)
        title = one_line(self._agent.last_title, self.screen.width - len(seconds) - 2)
        mark = ("✗ ", "bold red") if event.is_error else ("● ", "green")
        self.screen.styled_line(mark, (title, ""), (seconds, "dim"))
        if items := event.result.details.get("todo"):
            self._checklist(items)
        elif changes := event.result.details.get("diff"):
            if changes != self._asked_diff:
                self._diff(changes)
        else:
            self._output(event.name, event.result)

    def _output(self, name: str, result: ToolResult) -> None:
        content = result.content if isinstance(result.content, str) else ""
        if "session_id" in result.details:
            content = content.rpartition("\n\n[task_id")[0]  # that line is for the model
        lines = strip_controls(content).rstrip().splitlines()
        if name in COUNTED_TOOLS and not result.is_error and not self.verbose:
            lines = [f"{len(lines)} line{'s' if len(lines) != 1 else ''}"]
        elif len(lines) > OUTPUT_LINES and not self.verbose:
            lines = [f"… {len(lines) - OUTPUT_LINES} lines", *lines[-OUTPUT_LINES:]]
        self._rows((line, "dim") for line in lines)

    def _checklist(self, items: Sequence[dict[str, str]]) -> None:
        """The model's list of steps."""
        for item in items:
            mark, style = CHECKLIST.get(item["status"], ("☐", ""))
            self._rows([(f"{mark} {item['text'].strip()}", style)])

    def _diff(self, changes: str) -> None:
        """A unified diff, cut to the screen."""
        lines = diff_lines(changes)
        self._rows(
            (line[:1] + line[1:].expandtabs(4), DIFF_STYLES.get(kind, "dim"))
            for kind, line in lines[:MAX_DIFF_LINES]
        )
        if len(lines) > MAX_DIFF_LINES:
            self.screen.line(f"  … {len(lines) - MAX_DIFF_LINES} more lines", "dim")

    def _rows(self, lines: Iterable[tuple[str, str]]) -> None:
        """Foreign text, indented, one row a line, with its white space."""
        for text, style in lines:
            row = one_line(f"  {text.expandtabs(4)}", self.screen.width - 1)
            self.screen.exact_line(row, style)

    # -- sub-agents

    def _nested(self, event: Nested) -> None:
        agents, _, inner = unwrap(event)
        worker = self.subagents.worker_of(event)
        if isinstance(inner, PermissionAsked | DoomLoop | QuestionAsked):
            self._pause()
            return
        if worker is None:  # a model call of the run's own
            if agents == ["compaction"] and isinstance(inner, RunStart):
                self._wait(HELPERS["compaction"], self._first_byte)
            return
        if agents[-1] in HELPERS:
            worker.activity = HELPERS[agents[-1]]
        else:
            worker.follow(inner)
            if lines := list(self._subagent_lines(worker, inner)):
                self._pause()
                self._rows(lines)
        if isinstance(inner, RunEnd) and agents[-1] not in HELPERS:
            self.subagents.end(worker)
        if self.subagents.active:
            self._wait(self._activity())

    def _subagent_lines(self, worker: Worker, event: Event) -> Iterator[tuple[str, str]]:
        name = worker.name
        match event:
            case ToolEnd(result=result, is_error=is_error):
                changed = changed_lines(result.details.get("diff", ""))
                mark, style = ("✗", "red") if is_error else ("●", "dim")
                yield f"{name} {mark} {worker.last_title}{changed}{elapsed(event.seconds)}", style
                lines = (
                    result.content.rstrip().splitlines() if isinstance(result.content, str) else []
                )
                lines = lines[-OUTPUT_LINES:] if self.verbose else lines[:1] if is_error else []
                yield from ((f"{name} │ {line}", "dim") for line in lines)
            case MessageEnd(message={"role": "assistant"} as message) if self.verbose:
                lines = text_of(message).strip().splitlines()
                yield from ((f"{name} │ {line}", "dim") for line in lines)
            case RunEnd(error=error):
                if error:
                    yield f"{name}: {explain(error)}", "red"
                yield f"{name} {summary(event, time.monotonic() - worker.started)}", "dim"
            case _ if text := self._warning(event, worker):
                yield f"{name}: {text}", "yellow"


# ---- a conversation that goes on ---------------------------------------------------------

SHOWN_TURNS = 2
PROMPT_LINES = 12  # of a user's message


def print_history(
    screen: Screen, tools: Toolset, messages: Sequence[Message], turns: int = SHOWN_TURNS
) -> None:
    """Show the last `turns` turns of a conversation; 0: all."""
    begins = [place for place, message in enumerate(messages) if message.get("role") == "user"]
    start = begins[-turns] if turns and len(begins) >= turns else 0
    if start:
        screen.line(f"… {start} earlier message{'' if start == 1 else 's'}", "dim")
    failed = {
        message.get("tool_call_id")
        for message in messages
        if message.get("meta", {}).get("is_error")
    }
    for message in messages[start:]:
        text = strip_controls(text_of(message)).rstrip()
        if message.get("role") == "user" and text:
            lines = text.split("\n")
            more = ["…"] if len(lines) > PROMPT_LINES else []
            screen.line("> " + "\n  ".join(lines[:PROMPT_LINES] + more), "bold")
        elif message.get("role") == "assistant":
            screen.answer(text)
            screen.finish_line()
            for call in calls_of(message):
                mark = ("✗ ", "bold red") if call["id"] in failed else ("● ", "green")
                title = one_line(_title(tools, call["function"]), screen.width - 2)
                screen.styled_line(mark, (title, ""))


def _title(tools: Toolset, function: dict[str, str]) -> str:
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        arguments = None
    is_object = isinstance(arguments, dict)
    return tools.title(ToolCall("", function["name"], arguments if is_object else None))
