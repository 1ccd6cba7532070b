"""Events on a screen: text as it streams, a line a call, sub-agents at work, why a run stopped."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from coder import events
from coder.cli import results, wording
from coder.cli.screen import Screen
from coder.cli.text_rows import Part, Parts, cell_count, one_line
from coder.cli.wording import count
from coder.events import Event, Nested
from coder.history import text_of
from coder.providers.errors import happened
from coder.providers.text import plural

NEARLY_FULL = 0.8  # of the context window
# What an agent without a session does, by its name
HIDDEN = {
    "summary": "summing up the conversation",
    "compaction": "shortening the conversation",
}
DONE = ("● ", "green")
NOBODY = ("", "")  # in front of a call of the run's own agent
MAX_LAST = 20  # calls whose outputs can be shown
MIN_TITLE = 40  # columns of a call's title; what came of the call is shortened before it
NAME_COLUMNS = 32  # of a sub-agent


@dataclass
class Worker:
    """The agent of the run, which has no name here, or a sub-agent."""

    started: float
    name: str = ""
    call_id: str = ""  # of the `task` call that it works for
    titles: dict[str, str] = field(default_factory=dict)  # of its running calls, by their ids
    ended: str = ""  # how its run ended, in words

    @property
    def activity(self) -> str:
        return " · ".join(self.titles.values()) or "thinking"


@dataclass
class Draft:
    """The unfinished row that neighbouring calls of one tool share."""

    tool: str = ""
    titles: str = ""
    lines: int = 0  # of all their results


class Renderer:
    """Show the events of runs on `screen`, and the answers on `answer_screen`, if there is one.

    `limits`: seconds without data until a request is given up, at its start and later on.
    `notify_after`: seconds of a run from which its questions and its end ring the bell.
    `context_used`: the share of the context window; None: nobody can enter /compact here.
    """

    def __init__(
        self,
        screen: Screen,
        answer_screen: Screen | None,
        *,
        verbose: bool = False,
        limits: tuple[float, float] = (math.inf, math.inf),
        context_used: Callable[[], float] | None = None,
        notify_after: float = math.inf,
    ) -> None:
        self.screen = screen
        self.answer_screen = answer_screen
        self.verbose = verbose
        self.show_reasoning = verbose
        self._first_limit, self._idle_limit = limits
        self._context_used = context_used
        self._notify_after = notify_after
        self._agent = Worker(screen.clock())
        self._subagents: dict[str, Worker] = {}  # of the run, by their sessions
        self._delta_kind = ""  # "text" or "reasoning" while it comes
        self._asked_at: float | None = None  # when the question came that waits for its answer
        self._last_question: Event | None = None  # until a call starts
        self._follows_call = False  # the last rows are those of a call
        self._draft = Draft()
        # The titles and ends of the newest calls, the newest first
        self.last: deque[tuple[str, events.ToolEnd]] = deque(maxlen=MAX_LAST)

    def __call__(self, event: Event) -> None:
        if self._asked_at is not None:
            self._leave_out_waiting(self._asked_at)
        if isinstance(event, Nested) and event.session_id:
            self._show(event.event, self._subagent(event))
        elif isinstance(event, events.TextDelta) and self.answer_screen:
            self._stream("text", event.text, self.answer_screen)
        elif isinstance(event, events.ReasoningDelta) and self.show_reasoning:
            self._stream("reasoning", event.text, self.screen, "dim")
        else:
            self._show(event, self._agent)

    def _leave_out_waiting(self, since: float) -> None:
        """Take the time that a question waited for the user out of the seconds of all workers."""
        waited = self.screen.clock() - since
        self._asked_at = None
        for worker in (self._agent, *self._subagents.values()):
            worker.started += waited

    def _show(self, event: Event, worker: Worker) -> None:
        match event:
            case events.TextDelta() | events.ReasoningDelta() | events.ToolCallDelta():
                self._wait(_coming(event), self._idle_limit)
            case events.StepStart() | events.Status(state="preparing"):
                self._wait("thinking", self._first_limit)
            case events.RunStart():
                self._begin_run(worker)
            case events.RunEnd():
                self._end_run(event, worker)
            case events.MessageStart(message={"role": "user", "meta": {"queued": True}} as message):
                # What the user entered during the run
                self._line("")
                self.screen.entry(text_of(message))
                self._line("")
            case events.PermissionAsked() | events.DoomLoop() | events.QuestionAsked():
                self._make_room(event)
            case (
                events.PermissionReplied()
                | events.ToolStart()
                | events.ToolUpdate()
                | events.ToolEnd()
            ):
                self._show_call(event, worker)
            case Nested():  # of an agent without a session: __call__ has unpacked all others
                self._wait(HIDDEN.get(event.agent, HIDDEN["compaction"]))
            case _:
                self._warn(event, worker)

    def _make_room(self, question: Event) -> None:
        """Leave the screen to a question, which somebody else shows."""
        self._last_question = question
        self.pause()
        self.screen.gap()
        self._notify("a question")
        self._asked_at = self.screen.clock()

    def _warn(self, event: Event, worker: Worker) -> None:
        warning = _warning(event)
        if not warning:
            return
        is_retry = isinstance(event, events.Retry)
        if is_retry and self._delta_kind == "text":
            warning += " The text above is discarded."
        self._line(_prefix(worker) + warning, "yellow")
        if worker.name or is_retry:
            self._wait("waiting for the next attempt")

    # -- runs

    def _begin_run(self, worker: Worker) -> None:
        if worker.name:
            return
        self._agent = Worker(self.screen.clock())
        self._follows_call = False
        self._subagents.clear()
        if self._context_used:  # a session, in which an entry is above it
            self._line("")

    def _end_run(self, event: events.RunEnd, worker: Worker) -> None:
        """Show why it stopped, and what it took."""
        if event.error and not wording.has_cut_answer(event):
            problem = wording.error_text(event.text, event.error)
            self._line(_prefix(worker) + problem, "red")
        seconds = self.screen.clock() - worker.started
        if worker.name:
            ended = wording.run_line(event, used=0.0, seconds=seconds)
            worker.ended = ended.removeprefix("done · ")
            self._wait(self._agent.activity)
            return
        used = self._context_used() if self._context_used else 0.0
        self._line(wording.run_line(event, used, seconds), "dim")
        if self._context_used and wording.is_full(event):
            self._line(wording.FULL, "yellow")
        elif used >= NEARLY_FULL:
            self._line(f"The context is nearly full: {wording.FULL}", "yellow")
        self._notify(wording.why_stopped(event))

    def _stream(self, kind: str, text: str, screen: Screen, style: str = "") -> None:
        """Write a piece of an answer or of a thought as it comes."""
        if self._delta_kind != kind:  # it begins
            self.pause()
            text = text.lstrip("\n")
            self._delta_kind = kind if text else ""
            if self._follows_call and text and screen is self.screen:
                screen.line()
            self._follows_call = False
        screen.write(text, style)
        self.screen.status(limit=self._idle_limit)

    def pause(self) -> None:
        """End the status and the unfinished row."""
        self.screen.status()
        self.screen.finish_line()
        if self.answer_screen:
            self.answer_screen.finish_line()
        self._delta_kind = ""
        self._draft = Draft()

    def _notify(self, text: str) -> None:
        if self.screen.clock() - self._agent.started >= self._notify_after:
            self.screen.notify(text)

    def _line(self, text: str, style: str = "") -> None:
        self.pause()
        self.screen.line(text, style)

    def _wait(self, label: str, limit: float = math.inf) -> None:
        """Show what is being waited for, and for how long at most."""
        if self._delta_kind:
            self.pause()
        # Sub-agents whose calls still run, in the order of the calls
        by_call = {worker.call_id: worker for worker in self._subagents.values()}
        workers = [by_call[call_id] for call_id in self._agent.titles if call_id in by_call]
        rows = [f"  {worker.name} › {worker.activity}" for worker in workers]
        since = min((worker.started for worker in workers), default=0.0)
        if len(rows) == 1:
            label = rows.pop().strip()
        elif rows:
            label = f"{len(rows)} sub-agents"
        self.screen.status(label, limit, *rows, since=since)

    # -- calls and their results

    def _show_call(
        self,
        event: events.PermissionReplied | events.ToolStart | events.ToolUpdate | events.ToolEnd,
        worker: Worker,
    ) -> None:
        """Show a call as it goes on, and what is being waited for then."""
        activity = ""
        match event:
            case events.ToolStart():
                self._last_question = None
                if not worker.name:
                    self.screen.status()  # no status, so that the next one counts its own seconds
                worker.titles[event.id] = event.title
            case events.ToolUpdate():
                lines = event.text.rstrip().splitlines()
                title = worker.titles.get(event.id, "")
                if lines:
                    activity = f"{one_line(title, self.screen.width // 2)} │ {lines[-1]}"
            case events.ToolEnd():
                self._end_call(event, worker)
        self._wait(activity or self._agent.activity)

    def _end_call(self, event: events.ToolEnd, worker: Worker) -> None:
        title = worker.titles.pop(event.id, event.name)
        self.last.appendleft((title, event))
        self._follows_call = True
        if self._is_answer(event):  # shown after the question
            return
        # Of reads and searches only the lines are counted, in one row; of a sub-agent's nothing
        is_counted = event.name in results.COUNTED_TOOLS and not self.verbose
        if is_counted and worker.name:
            return
        if is_counted and self.screen.live and not event.is_error:
            self._join(title, event)
            return
        self.pause()
        self._show_outcome(title, event, worker)
        self._show_result(event, worker)

    def _is_answer(self, event: events.ToolEnd) -> bool:
        """Whether this result is the answer to the last question."""
        question = self._last_question
        if not isinstance(question, events.QuestionAsked):
            return False
        return question.call_id == event.id and question.answer == event.result.content

    def _show_outcome(self, title: str, event: events.ToolEnd, worker: Worker) -> None:
        words, style = results.outcome(event)
        if event.seconds >= 1:
            words += f"  {event.seconds:.1f}s"
        for subagent in self._subagents.values():
            if subagent.call_id == event.id:  # its run says more than the result of its call
                words = f" · {subagent.ended}"
        name = (f"  {worker.name} ", "dim") if worker.name else NOBODY
        mark = ("✗ ", f"bold {style}") if event.is_error else DONE
        row = self._call_row(name, mark, title, (words, style))
        self.screen.exact_line(*row)

    def _show_result(self, event: events.ToolEnd, worker: Worker) -> None:
        """Show what the call did, unless the user has just read it in a question."""
        question = self._last_question
        changes = event.result.details.get("diff")
        if isinstance(question, events.PermissionAsked) and changes and question.detail == changes:
            return
        rows = results.result_rows(event, self.verbose)
        if worker.name:
            rows = rows[:1] if event.is_error else []
        for row in rows:
            parts = [("  ", ""), *row]
            if not self.verbose:
                parts = list(results.fitted(parts, self.screen.width - 1))
            self.screen.exact_line(*parts)

    def _join(self, title: str, event: events.ToolEnd) -> None:
        """Show a call whose result is counted, in the row of the calls before it if it fits."""
        draft = self._draft
        # How the row would be with it, without the tool's name, which is there already
        added = title.removeprefix(f"{event.name} ")
        titles = f"{draft.titles}, {added}"
        columns = cell_count(f"● {titles} · {draft.lines} lines")
        if draft.tool != event.name or columns >= self.screen.width:  # a new row
            self.pause()
            draft = Draft()
            titles = title
        lines = draft.lines + results.line_count(event)
        self._draft = Draft(event.name, titles, lines)
        words = f" · {plural(lines, 'line')}"
        row = self._call_row(NOBODY, DONE, titles, (words, "dim"))
        self.screen.draft(*row)

    def _call_row(
        self,
        name: Part,
        mark: Part,
        title: str,
        outcome: Part,
    ) -> Parts:
        """The row of a call: whose it is, its title and what came of it, cut to the width."""
        words, style = outcome
        room = self.screen.width - cell_count(name[0]) - 3  # the mark, and the last column is free
        least = min(cell_count(title), MIN_TITLE)
        # The last of its parts (" · a · b") are left out until the title has room
        while len(words) > room - least and words.count(" · ") > 1:
            words = words.rpartition(" · ")[0]
        title = one_line(title, room - cell_count(words))
        return [name, mark, (title, ""), (words, style)]

    def show_last(self, number: int) -> None:
        """Show a call with its whole output; 1 is the newest. Raises IndexError."""
        title, event = self.last[number - 1]
        self.screen.line(title, "bold")
        for row in results.result_rows(event, verbose=True):
            self.screen.exact_line(("  ", ""), *row)

    # -- sub-agents

    def name_of(self, event: Event) -> str:
        """The name of the sub-agent that an event comes from; "" for the run's own agent."""
        if isinstance(event, Nested) and event.session_id:
            return self._subagent(event).name
        return ""

    def _subagent(self, event: Nested) -> Worker:
        worker = self._subagents.get(event.session_id)
        if worker is None or isinstance(event.event, events.RunStart):
            title = self._agent.titles.get(event.call_id, event.agent)
            columns = min(NAME_COLUMNS, self.screen.width // 2)
            name = one_line(title.removeprefix("task "), columns)
            worker = Worker(self.screen.clock(), name, event.call_id)
            self._subagents[event.session_id] = worker
        return worker


def _coming(event: Event) -> str:
    """What the model does, by the piece of its answer that has come."""
    match event:
        case events.ToolCallDelta(name=name):
            return f"{name} …"
        case events.ReasoningDelta():
            return "thinking"
    return "writing"


def _prefix(worker: Worker) -> str:
    return f"  {worker.name}: " if worker.name else ""


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
