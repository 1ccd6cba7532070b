"""What sub-agents do, for people: a line for each of their calls, one at their end, and what each does right now.

Several work side by side, and each line says whose it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from coder.cli.screen import one_line
from coder.events import (
    Compacted,
    Event,
    HookFailed,
    MessageEnd,
    Nested,
    Notice,
    ReasoningDelta,
    Retry,
    RunEnd,
    RunStart,
    StepStart,
    TextDelta,
    ToolCallDelta,
    ToolEnd,
    ToolStart,
    ToolUpdate,
)
from coder.history import text_of
from coder.providers.errors import explain, happened

# No children of a task
OURS = {
    "compaction": "shortening the conversation",
    "title": "finding a title",
    "summary": "summing up",
}
ABOUT = 24  # columns of what a call says, in a name
SHOWN = 6  # lines of output with -v, its last ones

Line = tuple[str, str]  # text, style


@dataclass
class Child:
    """One at work. `doing` is what it does right now."""

    name: str
    about: str = ""  # what its call says
    doing: str = "thinking"
    started: float = field(default_factory=time.monotonic)
    titles: dict[str, str] = field(default_factory=dict)  # of its calls under way
    failed: str = ""  # what happened at its newest attempt


def unwrapped(event: Event) -> tuple[list[str], str, Event]:
    """The agents that an event came through, the outermost first; the session of the innermost; and the event itself."""
    agents: list[str] = []
    session = ""
    while isinstance(event, Nested):
        agents.append(event.agent)
        session, event = event.session_id or session, event.event
    return agents, session, event


class Children:
    """Those of the run that is under way, by their sessions."""

    def __init__(self, *, verbose: bool = False) -> None:
        self.verbose = verbose
        self.living: dict[str, Child] = {}
        self.calls: dict[str, str] = {}  # what the calls of the run are about, by their ids

    def begin(self) -> None:
        """A run of ours begins."""
        self.living.clear()
        self.calls.clear()

    def called(self, call: ToolStart) -> None:
        """A call of ours, which a child may work for."""
        if about := call.arguments.get("description"):
            self.calls[call.id] = one_line(str(about).strip(), ABOUT)

    def take(self, nested: Nested) -> list[Line]:
        """Follow an event; the lines that it is worth."""
        agents, session, event = unwrapped(nested)
        child = self._child(nested)
        if child is None:
            return []
        if agents[-1] in OURS:
            child.doing = OURS[agents[-1]]
            return []
        if isinstance(event, RunEnd):
            self.living.pop(session or child.name, None)
        return list(self._lines(child, event))

    def name(self, nested: Event) -> str:
        """Whose event it is, "" for the run's own."""
        child = self._child(nested)
        return child.name if child else ""

    def doing(self, width: int) -> str:
        """What they do, side by side in a line; each has its share of the room."""
        share = max(12, width // max(1, len(self.living)) - 3)
        names = {
            child.name: one_line(child.about or child.name, share // 2)
            for child in self.living.values()
        }
        return " · ".join(
            one_line(f"{names[child.name]}: {child.doing}", share) for child in self.living.values()
        )

    def _child(self, nested: Event) -> Child | None:
        agents, session, _ = unwrapped(nested)
        name = " › ".join(agent for agent in agents if agent not in OURS)
        if not name or not isinstance(nested, Nested):
            return None
        about = self.calls.get(nested.call_id, "")
        name = f"{name} ({about})" if about else name
        if (session or name) not in self.living:
            taken = {child.name for child in self.living.values()}
            names = (
                f"{name} {number}" if number > 1 else name for number in range(1, len(taken) + 2)
            )
            self.living[session or name] = Child(
                next(each for each in names if each not in taken), about
            )
        return self.living[session or name]

    def _lines(self, child: Child, event: Event) -> Iterator[Line]:
        match event:
            case ToolEnd():
                yield from self._tool(child, event)
            case MessageEnd(message={"role": "assistant"} as message) if self.verbose and text_of(
                message
            ):
                yield from (
                    (f"  {child.name} │ {line}", "dim")
                    for line in text_of(message).strip().splitlines()
                )
            case Retry(error=error, delay=delay):
                child.doing, before, child.failed = (
                    "waiting to try again",
                    child.failed,
                    happened(error),
                )
                what = "the same again" if child.failed == before else child.failed
                yield f"  {child.name}: {what}. Again in {delay:.0f} s.", "yellow"
            case Notice(text=text):
                yield f"  {child.name}: {text}", "yellow"
            case HookFailed(hook=hook, place=place, error=error):
                yield f"  {child.name}: the hook {hook} failed ({place}): {error}", "yellow"
            case RunEnd():
                yield from self._end(child, event)
            case _:
                self._follow(child, event)

    def _follow(self, child: Child, event: Event) -> None:
        """What it does now."""
        match event:
            case StepStart():
                child.doing, child.failed = "thinking", ""
            case RunStart() | ReasoningDelta() | Compacted():
                child.doing = "thinking"
            case TextDelta():
                child.doing = "writing"
            case ToolCallDelta(name=name):
                child.doing = f"{name} …"
            case ToolStart(id=call_id, title=title):
                child.doing = child.titles[call_id] = title
            case ToolUpdate(id=call_id, text=text) if lines := text.rstrip().splitlines():
                child.doing = f"{child.titles.get(call_id, '')} │ {lines[-1]}"

    def _tool(self, child: Child, event: ToolEnd) -> Iterator[Line]:
        title = child.titles.pop(event.id, event.name)
        child.doing = next(iter(child.titles.values()), "thinking")
        changed = counted(event.result.details.get("diff", ""))
        seconds = f"  {event.seconds:.1f}s" if event.seconds >= 0.1 else ""
        mark, style = ("✗", "red") if event.is_error else ("●", "dim")
        yield f"  {child.name} {mark} {title}{changed}{seconds}", style
        content = event.result.content if isinstance(event.result.content, str) else ""
        lines = content.rstrip().splitlines()
        shown = lines[-SHOWN:] if self.verbose else lines[:1] if event.is_error else []
        yield from ((f"  {child.name} │ {line}", "dim") for line in shown)

    def _end(self, child: Child, event: RunEnd) -> Iterator[Line]:
        from coder.cli.render import summary

        if event.error:
            yield f"  {child.name}: {explain(event.error)}", "red"
        yield f"  {child.name} {summary(event, time.monotonic() - child.started)}", "dim"


def counted(changes: str) -> str:
    """How many lines a diff adds and removes."""
    lines = [line for line in changes.split("\n") if not line.startswith(("+++ ", "--- "))]
    added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    return f"  +{added} -{removed}" if changes else ""
