"""Events on a screen: text as it streams, a line per tool, diffs, and why a run stopped.

A consumer of events and nothing else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from coder import events
from coder.cli.screen import Screen, one_line
from coder.cli.wording import STOPPED, count, error_text, summary
from coder.events import Event, Nested
from coder.history import text_of
from coder.permissions.sanitize import strip_controls
from coder.providers.errors import happened
from coder.types import Message

NEARLY_FULL = 0.8  # of the context window
FULL = "The context is nearly full: /compact shortens the conversation, /new begins another."
MAX_DIFF_LINES = 60
OUTPUT_LINES = 6  # of a command's output, its last ones
NAME_COLUMNS = 32  # of a sub-agent
DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}  # by the first character of a line
COUNTED_TOOLS = {"read", "ls", "grep", "glob"}  # their output is for the model
CHECKLIST = {"done": ("☑", "dim"), "in_progress": ("▸", "bold")}
MAX_SHOWN = 4_000  # characters of a message in a conversation that goes on

Row = tuple[str, str]  # text, style


@dataclass
class Worker:
    """The agent of the run, or a sub-agent with a name."""

    name: str = ""
    started: float = field(default_factory=time.monotonic)
    titles: dict[str, str] = field(default_factory=dict)  # of its calls under way, by their ids

    @property
    def activity(self) -> str:
        return " · ".join(self.titles.values()) or "thinking"


class Renderer:
    """Show the events of runs on `screen`, and the answers on `answers`, if there is one.

    `limits`: seconds without data until a request is given up, at its start and later on. `notify_after`: seconds of a
    run from which its questions and its end ring the bell.
    """

    def __init__(
        self,
        screen: Screen,
        answers: Screen | None,
        *,
        verbose: bool = False,
        limits: tuple[float, float] = (math.inf, math.inf),
        context_used: Callable[[], float] = lambda: 0.0,
        notify_after: float = math.inf,
    ) -> None:
        self.screen, self.answers, self.verbose = screen, answers, verbose
        self.show_reasoning = verbose
        self._limits, self._context_used = limits, context_used
        self._notify_after = notify_after
        self._agent = Worker()
        self._subagents: dict[str, Worker] = {}  # at work, by their sessions
        self._streaming = ""  # "text" or "reasoning" while it comes
        self._asked_diff = ""  # a question has shown it already

    def __call__(self, event: Event) -> None:
        worker = self._agent
        if isinstance(event, Nested) and event.session_id:
            worker, event = self._subagent(event), event.event
        own = worker is self._agent
        if isinstance(event, events.TextDelta) and self.answers and own:
            self._stream("text", event.text, self.answers)
        elif isinstance(event, events.ReasoningDelta) and self.show_reasoning and own:
            self._stream("reasoning", event.text, self.screen, "dim")
        elif isinstance(event, events.ToolStart | events.ToolUpdate | events.ToolEnd):
            self._show_call(event, worker)
        else:
            self._show(event, worker)

    def _show(self, event: Event, worker: Worker) -> None:
        first_byte, idle = self._limits
        prefix = f"  {worker.name}: " if worker.name else ""
        match event:
            case events.RunStart() if not worker.name:
                self._agent = Worker()
                self._subagents.clear()
            case events.StepStart() | events.Status(state="preparing"):
                self._wait("thinking", first_byte)
            case events.ReasoningDelta():
                self._wait("thinking", idle)
            case events.TextDelta():
                self._wait("writing", idle)
            case events.ToolCallDelta():
                self._wait(f"{event.name} …", idle)
            case events.MessageStart(message={"role": "user", "meta": {"queued": True}} as message):
                self._line(f"> {text_of(message)}", "bold")
            case events.PermissionAsked() | events.DoomLoop() | events.QuestionAsked():
                self._asked_diff = event.detail if isinstance(event, events.PermissionAsked) else ""
                self.pause()
                self._notify("a question")
            case events.PermissionReplied():
                self._wait(self._agent.activity)
            case Nested():  # of no session
                self._wait("shortening the conversation")
            case events.RunEnd():
                self._end_run(event, worker, prefix)
            case _ if warning := _warning(event):
                void = isinstance(event, events.Retry) and self._streaming == "text"
                self._line(prefix + warning + " The text above is discarded." * void, "yellow")
                if worker.name or isinstance(event, events.Retry):
                    self._wait("waiting for the next attempt")

    def _end_run(self, event: events.RunEnd, worker: Worker, prefix: str) -> None:
        self._subagents = {k: v for k, v in self._subagents.items() if v is not worker}
        if event.error:
            self._line(prefix + error_text(event.text, event.error), "red")
        used = 0.0 if worker.name else self._context_used()
        seconds = time.monotonic() - worker.started
        self._line(prefix + summary(event, seconds, used), "dim")
        if used >= NEARLY_FULL:
            self._line(FULL, "yellow")
        if worker.name:
            self._wait(self._agent.activity)
        else:
            self._notify(STOPPED[event.stop_reason])

    def _show_call(
        self, event: events.ToolStart | events.ToolUpdate | events.ToolEnd, worker: Worker
    ) -> None:
        last_line = ""
        match event:
            case events.ToolStart():
                self._asked_diff = ""
                self.pause()
                worker.titles[event.id] = event.title
            case events.ToolUpdate():
                last_line = event.text.rstrip().rpartition("\n")[2]
            case events.ToolEnd():
                self.pause()
                self._call_line(worker, event)
                if not self._asked_diff or self._asked_diff != event.result.details.get("diff"):
                    rows = _result_rows(event, self.verbose)
                    self._rows(rows[: event.is_error] if worker.name else rows)
        title = worker.titles.get(event.id, "")
        self._wait(f"{title} │ {last_line}" if last_line else self._agent.activity)

    def _stream(self, kind: str, text: str, screen: Screen, style: str = "") -> None:
        if self._streaming != kind:
            self.pause()
            text = text.lstrip("\n")
            self._streaming = kind if text else ""
        screen.write(text, style)
        self.screen.status(limit=self._limits[1])

    def pause(self) -> None:
        """End the status and the row under way."""
        self.screen.status()
        self.screen.finish_line()
        if self.answers:
            self.answers.finish_line()
        self._streaming = ""

    def _notify(self, text: str) -> None:
        if time.monotonic() - self._agent.started >= self._notify_after:
            self.screen.notify(text)

    def _line(self, text: str, style: str) -> None:
        self.pause()
        self.screen.line(text, style)

    def _wait(self, label: str, limit: float = math.inf) -> None:
        """Show what is being waited for, and for how long at most."""
        if self._streaming:
            self.pause()
        if workers := self._subagents.values():
            share = max(12, (self.screen.width - 12) // len(workers) - 3)
            each = (f"{worker.name} › {worker.activity}" for worker in workers)
            label = " · ".join(one_line(activity, share) for activity in each)
        self.screen.status(label, limit)

    # -- calls and their results

    def _call_line(self, worker: Worker, event: events.ToolEnd) -> None:
        outcome, style = _outcome(event)
        outcome += f"  {event.seconds:.1f}s" if event.seconds >= 0.1 else ""
        mark = ("✗ ", f"bold {style}") if event.is_error else ("● ", "green")
        name = f"  {worker.name} " if worker.name else ""
        room = self.screen.width - len(outcome) - len(name) - 2
        title = one_line(worker.titles.pop(event.id, event.name), room)
        self.screen.exact_line((name, "dim"), mark, (title, ""), (outcome, style))

    def _rows(self, rows: Iterable[Row]) -> None:
        """Foreign text, indented, one row a line, with its white space."""
        for text, style in rows:
            row = one_line(f"  {text.expandtabs(4)}", self.screen.width - 1)
            self.screen.exact_line((row, style))

    # -- sub-agents

    def name_of(self, event: Event) -> str:
        """The name of the sub-agent that an event comes from; "" for the run's own agent."""
        return self._subagent(event).name if isinstance(event, Nested) and event.session_id else ""

    def _subagent(self, event: Nested) -> Worker:
        if event.session_id not in self._subagents:
            title = self._agent.titles.get(event.call_id, event.agent)
            name = one_line(title.removeprefix("task "), NAME_COLUMNS)
            self._subagents[event.session_id] = Worker(name)
        return self._subagents[event.session_id]


def diff_rows(changes: str) -> list[Row]:
    """The lines of a unified diff with their styles, without the names where there is one file."""
    lines = changes.removesuffix("\n").split("\n")
    one_file = changes.startswith("--- ") and "\n--- " not in changes
    return [
        (line[:1] + line[1:].expandtabs(4), DIFF_STYLES.get(line[:1], "dim"))
        for line in lines[2 * one_file :]
    ]


def _outcome(event: events.ToolEnd) -> tuple[str, str]:
    """What came of a call, in a few words, and their style. Red is a call that could not do its work."""
    details, content = event.result.details, event.result.content
    if (code := details.get("exit_code")) and not details.get("cause"):
        return f" · exit {code}", "yellow"
    if event.is_error:
        return "", "red"
    if changes := details.get("diff"):
        lines = changes.splitlines()
        added, removed = (
            sum(line.startswith(sign) and not line.startswith(3 * sign) for line in lines)
            for sign in "+-"
        )
        return f" · +{added} -{removed}", "dim"
    if event.name in COUNTED_TOOLS and isinstance(content, str):
        lines = content.splitlines()
        return f" · {len(lines)} line{'s' if len(lines) != 1 else ''}", "dim"
    return "", "dim"


def _result_rows(event: events.ToolEnd, verbose: bool) -> list[Row]:
    """What a call did, as far as the user reads it."""
    content, details = event.result.content, event.result.details
    if items := details.get("todo"):
        marks = [CHECKLIST.get(item["status"], ("☐", "")) for item in items]
        return [(f"{mark} {item['text']}", style) for item, (mark, style) in zip(items, marks)]
    if changes := details.get("diff"):
        rows = diff_rows(changes)
        more = [(f"… {len(rows) - MAX_DIFF_LINES} more lines", "dim")]
        return rows[:MAX_DIFF_LINES] + more if len(rows) > MAX_DIFF_LINES else rows
    text = content if isinstance(content, str) else ""
    text = text.rpartition("\n\n[task_id")[0] or text  # that line is for the model
    if code := details.get("exit_code"):  # it stands in the line of the call
        text = text.removesuffix(f"[exit code {code}]")
    lines = strip_controls(text).rstrip().splitlines()
    if event.name in COUNTED_TOOLS and not event.is_error and not verbose:
        return []
    if len(lines) > OUTPUT_LINES and not verbose:
        lines = [f"… {len(lines) - OUTPUT_LINES} lines", *lines[-OUTPUT_LINES:]]
    return [(line, "dim") for line in lines]


def _warning(event: Event) -> str:
    """What the user should know of an event of any agent; "" for nothing."""
    match event:
        case events.Retry(error=error, attempt=attempt) if error.loading:
            waits = f"The server is not ready: {error.message}. Waiting for it."
            return waits if attempt == 1 else ""
        case events.Retry(error=error, delay=delay, attempt=attempt):
            what = happened(error)
            return f"{what[:1].upper()}{what[1:]}. Attempt {attempt + 1} in {delay:.0f} s."
        case events.Compacted(before=before, after=after):
            sizes = f"from {count(before['tokens'])} to {count(after['tokens'])} tokens"
            return f"The conversation was shortened {sizes}."
        case events.Notice(text=text):
            return text
    return ""


def print_history(screen: Screen, messages: Sequence[Message]) -> None:
    """Show the last question and the last answer of a conversation that goes on."""
    for role, mark, style in (("user", "> ", "bold"), ("assistant", "", "")):
        texts = (text_of(each) for each in reversed(messages) if each.get("role") == role)
        if text := next(filter(None, texts), "").strip():
            screen.write(mark + text[-MAX_SHOWN:], style)
            screen.finish_line()
