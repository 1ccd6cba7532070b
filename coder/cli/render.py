"""Events on a screen: text as it streams, a line per call, sub-agents at work, and why a run stopped."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from coder import events
from coder.cli import wording
from coder.cli.screen import Screen, cell_count, one_line
from coder.cli.wording import Part, Parts, count
from coder.events import Event, Nested
from coder.history import text_of
from coder.providers.errors import happened

NEARLY_FULL = 0.8  # of the context window
DONE = ("● ", "green")
MAX_LAST = 20  # calls whose outputs can be shown
MIN_TITLE = 40  # columns of a call's title that stand before what came of it
NAME_COLUMNS = 32  # of a sub-agent


@dataclass
class Worker:
    """The agent of the run, or a sub-agent with a name."""

    name: str = ""
    call_id: str = ""  # that it works for
    started: float = field(default_factory=time.monotonic)
    titles: dict[str, str] = field(default_factory=dict)  # of its calls under way, by their ids
    ended: str = ""  # how

    @property
    def activity(self) -> str:
        return " · ".join(self.titles.values()) or "thinking"


class Renderer:
    """Show the events of runs on `screen`, and the answers on `answers`, if there is one.

    `limits`: seconds without data until a request is given up, at its start and later on. `notify_after`: seconds of a
    run from which its questions and its end ring the bell. `context_used`: the share of the context window; None: nobody
    can enter /compact here.
    """

    def __init__(
        self,
        screen: Screen,
        answers: Screen | None,
        *,
        verbose: bool = False,
        limits: tuple[float, float] = (math.inf, math.inf),
        context_used: Callable[[], float] | None = None,
        notify_after: float = math.inf,
    ) -> None:
        self.screen, self.answers, self.verbose = screen, answers, verbose
        self.show_reasoning = verbose
        self._limits, self._context_used, self._notify_after = limits, context_used, notify_after
        self._agent = Worker()
        self._subagents: dict[str, Worker] = {}  # of the run, by their sessions
        self._delta_kind = ""  # "text" or "reasoning" while it comes
        self._asked_at = 0.0  # when a question came that waits for its answer; 0: none waits
        self._last_question: Event | None = None  # the question behind which the result stands
        self._behind_call = False  # the last rows are those of a call
        self._draft_size = "", "", 0  # of the draft: the tool, the titles, the lines
        # Of the newest calls their titles and ends, the newest first
        self.last: deque[tuple[str, events.ToolEnd]] = deque(maxlen=MAX_LAST)

    def __call__(self, event: Event) -> None:
        if self._asked_at:
            self._leave_out_waiting()
        worker = self._agent
        if isinstance(event, Nested) and event.session_id:
            worker, event = self._subagent(event), event.event
        own, idle = worker is self._agent, self._limits[1]
        match event:
            case events.TextDelta(text=text) if self.answers and own:
                self._stream("text", text, self.answers)
            case events.ReasoningDelta(text=text) if self.show_reasoning and own:
                self._stream("reasoning", text, self.screen, "dim")
            case events.TextDelta():
                self._wait("writing", idle)
            case events.ReasoningDelta():
                self._wait("thinking", idle)
            case events.ToolCallDelta():
                self._wait(f"{event.name} …", idle)
            case _:
                self._show(event, worker)

    def _leave_out_waiting(self) -> None:
        """Take the time that the question waited for the user out of the seconds of all that work."""
        waited = time.monotonic() - self._asked_at
        self._asked_at = 0.0
        for each in (self._agent, *self._subagents.values()):
            each.started += waited

    def _show(self, event: Event, worker: Worker) -> None:
        prefix = f"  {worker.name}: " if worker.name else ""
        match event:
            case events.RunStart() if not worker.name:
                self._agent, self._behind_call = Worker(), False
                self._subagents.clear()
                if self._context_used:  # a session, where an entry stands above it
                    self._line("", "")
            case events.StepStart() | events.Status(state="preparing"):
                self._wait("thinking", self._limits[0])
            case events.MessageStart(message={"role": "user", "meta": {"queued": True}} as message):
                self._line("", "")
                self.screen.entry(text_of(message))
                self._line("", "")
            case events.PermissionAsked() | events.DoomLoop() | events.QuestionAsked():
                self._last_question = event
                self.pause()
                self.screen.gap()
                self._notify("a question")
                self._asked_at = time.monotonic()
            case events.PermissionReplied():
                self._wait(self._agent.activity)
            case events.ToolStart():
                self._last_question = None
                if not worker.name:
                    self.screen.status()  # its seconds begin
                worker.titles[event.id] = event.title
                self._wait(self._agent.activity)
            case events.ToolUpdate():
                title = one_line(worker.titles.get(event.id, ""), self.screen.width // 2)
                last = "".join(event.text.rstrip().splitlines()[-1:])
                self._wait(f"{title} │ {last}" if last else self._agent.activity)
            case events.ToolEnd():
                self._end_call(event, worker)
                self._wait(self._agent.activity)
            case Nested(agent="summary"):
                self._wait("summing up the conversation")
            case Nested():  # of no session
                self._wait("shortening the conversation")
            case events.RunEnd():
                self._end_run(event, worker, prefix)
            case _ if warning := _warning(event):
                void = isinstance(event, events.Retry) and self._delta_kind == "text"
                self._line(prefix + warning + " The text above is discarded." * void, "yellow")
                if worker.name or isinstance(event, events.Retry):
                    self._wait("waiting for the next attempt")

    def _end_run(self, event: events.RunEnd, worker: Worker, prefix: str) -> None:
        """Show why it stopped, and what it took."""
        if event.error and not wording.has_cut_answer(event):
            self._line(prefix + wording.error_text(event.text, event.error), "red")
        used = 0.0
        if self._context_used and not worker.name:
            used = self._context_used()
        ended = wording.run_line(event, used, time.monotonic() - worker.started)
        if worker.name:
            worker.ended = ended.removeprefix("done · ")
            self._wait(self._agent.activity)
            return
        self._line(ended, "dim")
        if self._context_used and wording.is_full(event):
            self._line(wording.FULL, "yellow")
        elif used >= NEARLY_FULL:
            self._line(f"The context is nearly full: {wording.FULL}", "yellow")
        self._notify(wording.why_stopped(event))

    def _stream(self, kind: str, text: str, screen: Screen, style: str = "") -> None:
        if self._delta_kind != kind:
            self.pause()
            text = text.lstrip("\n")
            self._delta_kind = kind if text else ""
            if self._behind_call and text and screen is self.screen:
                screen.line()
            self._behind_call = False
        screen.write(text, style)
        self.screen.status(limit=self._limits[1])

    def pause(self) -> None:
        """End the status and the row under way."""
        self.screen.status()
        self.screen.finish_line()
        if self.answers:
            self.answers.finish_line()
        self._delta_kind, self._draft_size = "", ("", "", 0)

    def _notify(self, text: str) -> None:
        if time.monotonic() - self._agent.started >= self._notify_after:
            self.screen.notify(text)

    def _line(self, text: str, style: str) -> None:
        self.pause()
        self.screen.line(text, style)

    def _wait(self, label: str, limit: float = math.inf) -> None:
        """Show what is being waited for, and for how long at most."""
        if self._delta_kind:
            self.pause()
        by_call = {worker.call_id: worker for worker in self._subagents.values()}
        workers = [by_call[each] for each in self._agent.titles if each in by_call]
        rows = [f"  {worker.name} › {worker.activity}" for worker in workers]
        if len(rows) > 1:
            label = f"{len(rows)} sub-agents"
        elif rows:
            label = rows.pop().strip()
        since = min((worker.started for worker in workers), default=0.0)
        self.screen.status(label, limit, *rows, since=since)

    # -- calls and their results

    def _end_call(self, event: events.ToolEnd, worker: Worker) -> None:
        title = worker.titles.pop(event.id, event.name)
        self.last.appendleft((title, event))
        self._behind_call = True
        match self._last_question:
            case events.QuestionAsked(call_id=event.id, answer=event.result.content):
                return  # it stands behind the question
        is_read = event.name in wording.COUNTED_TOOLS and not self.verbose
        if is_read and worker.name:
            return
        if is_read and self.screen.live and not event.is_error:
            self._join(title, event)
            return
        self.pause()
        words, style = wording.outcome(event)
        if ended := [each.ended for each in self._subagents.values() if each.call_id == event.id]:
            words = f" · {ended[0]}"
        elif event.seconds >= 1:
            words += f"  {event.seconds:.1f}s"
        mark = ("✗ ", f"bold {style}") if event.is_error else DONE
        name = (worker.name and f"  {worker.name} ", "dim")
        self.screen.exact_line(*self._call_row(name, mark, title, words, style))
        shown = (
            self._last_question.detail
            if isinstance(self._last_question, events.PermissionAsked)
            else ""
        )
        if not shown or shown != event.result.details.get("diff"):
            rows = wording.result_rows(event, self.verbose)
            for row in rows[: event.is_error] if worker.name else rows:
                row, width = [("  ", ""), *row], self.screen.width - 1
                self.screen.exact_line(*(row if self.verbose else wording.fitted(row, width)))

    def _join(self, title: str, event: events.ToolEnd) -> None:
        """Show a call whose result is counted, in the row of the neighbours before it where there is room."""
        name, titles, before = self._draft_size
        joined, lines = f"{titles}, {title.removeprefix(f'{name} ')}", wording.line_count(event)
        if name != event.name or cell_count(f"● {joined} · {before} lines") >= self.screen.width:
            self.pause()
            joined, before = title, 0
        self._draft_size = event.name, joined, before + lines
        words = f" · {wording.plural(before + lines, 'line')}"
        self.screen.draft(*self._call_row(("", ""), DONE, joined, words, "dim"))

    def _call_row(self, name: Part, mark: Part, title: str, words: str, style: str) -> Parts:
        """The row of a call: whose it is, its title and what came of it, cut to the width."""
        room = self.screen.width - cell_count(name[0]) - 3
        while len(words) > room - min(cell_count(title), MIN_TITLE) and words.count(" · ") > 1:
            words = words.rpartition(" · ")[0]
        return [name, mark, (one_line(title, room - cell_count(words)), ""), (words, style)]

    def show_last(self, number: int = 1) -> None:
        """Show a call with its whole output; 1 is the newest. Raises IndexError."""
        title, event = self.last[number - 1]
        self.screen.line(title, "bold")
        for row in wording.result_rows(event, verbose=True):
            self.screen.exact_line(("  ", ""), *row)

    # -- sub-agents

    def name_of(self, event: Event) -> str:
        """The name of the sub-agent that an event comes from; "" for the run's own agent."""
        return self._subagent(event).name if isinstance(event, Nested) and event.session_id else ""

    def _subagent(self, event: Nested) -> Worker:
        if event.session_id not in self._subagents or isinstance(event.event, events.RunStart):
            title = self._agent.titles.get(event.call_id, event.agent)
            columns = min(NAME_COLUMNS, self.screen.width // 2)
            name = one_line(title.removeprefix("task "), columns)
            self._subagents[event.session_id] = Worker(name, event.call_id)
        return self._subagents[event.session_id]


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
