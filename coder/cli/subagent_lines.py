"""What sub-agents do, for the screen: a line for each of their calls, one at their end, and what each does right now."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from coder.cli.screen import one_line
from coder.cli.wording import changed_lines, hook_failure, summary
from coder.events import (
    Event,
    HookFailed,
    MessageEnd,
    Nested,
    Notice,
    Retry,
    RunEnd,
    StepStart,
    TextDelta,
    ToolCallDelta,
    ToolEnd,
    ToolStart,
    ToolUpdate,
)
from coder.history import text_of
from coder.providers.errors import explain, happened

# Model calls of our own, beside those of an agent
HELPERS = {
    "compaction": "shortening the conversation",
    "title": "finding a title",
    "summary": "summing up",
}
ABOUT_COLUMNS = 24  # of a call's description, in a name
OUTPUT_LINES = 6  # with -v, the last ones

Line = tuple[str, str]  # text, style


@dataclass
class Subagent:
    name: str
    about: str = ""  # the description of its call
    activity: str = "thinking"
    started: float = field(default_factory=time.monotonic)
    titles: dict[str, str] = field(default_factory=dict)  # of its calls under way, by their ids
    last_error: str = ""  # of its newest attempt


def unwrap(event: Event) -> tuple[list[str], str, Event]:
    """The agents that an event came through, the outermost first; the innermost session; the event itself."""
    agents, session = [], ""
    while isinstance(event, Nested):
        agents.append(event.agent)
        session, event = event.session_id or session, event.event
    return agents, session, event


class SubagentLines:
    """The sub-agents of the run under way, by their sessions."""

    def __init__(self, *, verbose: bool = False) -> None:
        self.verbose = verbose
        self.active: dict[str, Subagent] = {}
        self._descriptions: dict[str, str] = {}  # of the run's calls, by their ids

    def begin_run(self) -> None:
        self.active.clear()
        self._descriptions.clear()

    def add_call(self, call: ToolStart) -> None:
        """Note a call of the run, which a sub-agent may work for."""
        if description := call.arguments.get("description"):
            self._descriptions[call.id] = one_line(str(description).strip(), ABOUT_COLUMNS)

    def take(self, nested: Nested) -> list[Line]:
        """Follow an event; the lines to show for it."""
        agents, session, event = unwrap(nested)
        agent = self._agent_of(nested)
        if agent is None:
            return []
        if agents[-1] in HELPERS:
            agent.activity = HELPERS[agents[-1]]
            return []
        if isinstance(event, RunEnd):
            self.active.pop(session or agent.name, None)
        return list(self._lines(agent, event))

    def name_of(self, event: Event) -> str:
        """The sub-agent that an event comes from; "" for the run's own."""
        agent = self._agent_of(event)
        return agent.name if agent else ""

    def activity(self, width: int) -> str:
        """What all of them do, side by side in one row."""
        share = max(12, width // max(1, len(self.active)) - 3)
        return " · ".join(
            one_line(f"{one_line(each.about or each.name, share // 2)}: {each.activity}", share)
            for each in self.active.values()
        )

    def _agent_of(self, event: Event) -> Subagent | None:
        agents, session, _ = unwrap(event)
        name = " › ".join(agent for agent in agents if agent not in HELPERS)
        if not name or not isinstance(event, Nested):
            return None
        about = self._descriptions.get(event.call_id, "")
        name = f"{name} ({about})" if about else name
        if (session or name) not in self.active:
            taken = {each.name for each in self.active.values()}
            unique, number = name, 2
            while unique in taken:
                unique, number = f"{name} {number}", number + 1
            self.active[session or name] = Subagent(unique, about)
        return self.active[session or name]

    def _lines(self, agent: Subagent, event: Event) -> Iterator[Line]:
        match event:
            case ToolEnd():
                yield from self._tool(agent, event)
            case MessageEnd(message={"role": "assistant"} as message) if self.verbose:
                for line in text_of(message).strip().splitlines():
                    yield f"  {agent.name} │ {line}", "dim"
            case Retry(error=error, delay=delay):
                agent.activity, before = "waiting before a retry", agent.last_error
                agent.last_error = happened(error)
                what = "the same error" if agent.last_error == before else agent.last_error
                yield f"  {agent.name}: {what}. Again in {delay:.0f} s.", "yellow"
            case Notice(text=text):
                yield f"  {agent.name}: {text}", "yellow"
            case HookFailed():
                yield f"  {agent.name}: {hook_failure(event)}", "yellow"
            case RunEnd(error=error):
                if error:
                    yield f"  {agent.name}: {explain(error)}", "red"
                yield f"  {agent.name} {summary(event, time.monotonic() - agent.started)}", "dim"
            case _:
                self._follow(agent, event)

    def _follow(self, agent: Subagent, event: Event) -> None:
        match event:
            case StepStart():
                agent.activity, agent.last_error = "thinking", ""
            case TextDelta():
                agent.activity = "writing"
            case ToolCallDelta(name=name):
                agent.activity = f"{name} …"
            case ToolStart(id=call_id, title=title):
                agent.activity = agent.titles[call_id] = title
            case ToolUpdate(id=call_id, text=text) if lines := text.rstrip().splitlines():
                agent.activity = f"{agent.titles.get(call_id, '')} │ {lines[-1]}"

    def _tool(self, agent: Subagent, event: ToolEnd) -> Iterator[Line]:
        title = agent.titles.pop(event.id, event.name)
        agent.activity = next(iter(agent.titles.values()), "thinking")
        changed = changed_lines(event.result.details.get("diff", ""))
        seconds = f"  {event.seconds:.1f}s" if event.seconds >= 0.1 else ""
        mark, style = ("✗", "red") if event.is_error else ("●", "dim")
        yield f"  {agent.name} {mark} {title}{changed}{seconds}", style
        content = event.result.content if isinstance(event.result.content, str) else ""
        lines = content.rstrip().splitlines()
        lines = lines[-OUTPUT_LINES:] if self.verbose else lines[:1] if event.is_error else []
        yield from ((f"  {agent.name} │ {line}", "dim") for line in lines)
