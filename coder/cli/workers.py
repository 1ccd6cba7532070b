"""Who works in a run: its agent, and the sub-agents by their sessions, each with a name and what it does right now."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from coder.cli.screen import one_line
from coder.events import (
    Event,
    Nested,
    StepStart,
    TextDelta,
    ToolCallDelta,
    ToolEnd,
    ToolStart,
    ToolUpdate,
)

# Model calls of our own, beside those of an agent
HELPERS = {"compaction": "shortening the conversation"}
ABOUT_COLUMNS = 24  # of a call's description, in a name


@dataclass
class Worker:
    name: str = ""  # of a sub-agent
    about: str = ""  # the description of its call
    activity: str = "thinking"
    started: float = field(default_factory=time.monotonic)
    titles: dict[str, str] = field(default_factory=dict)  # of its calls under way, by their ids
    last_title: str = ""  # of the call that has ended last
    last_error: str = ""  # of its newest attempt

    def follow(self, event: Event) -> None:
        """Note what the event says of its activity."""
        match event:
            case StepStart():
                self.activity, self.last_error = "thinking", ""
            case TextDelta():
                self.activity = "writing"
            case ToolCallDelta(name=name):
                self.activity = f"{name} …"
            case ToolStart(id=call_id, title=title):
                self.titles[call_id] = title
                self.activity = self._calls()
            case ToolUpdate(id=call_id, text=text) if lines := text.rstrip().splitlines():
                self.activity = f"{self.titles.get(call_id, '')} │ {lines[-1]}"
            case ToolEnd(id=call_id, name=name):
                self.last_title = self.titles.pop(call_id, name)
                self.activity = self._calls() or "thinking"

    def _calls(self) -> str:
        several = f"{len(self.titles)} calls: " if len(self.titles) > 1 else ""
        return several + " · ".join(self.titles.values())


def unwrap(event: Event) -> tuple[list[str], str, Event]:
    """The agents that an event came through, the outermost first; the innermost session; the event itself."""
    agents, session = [], ""
    while isinstance(event, Nested):
        agents.append(event.agent)
        session, event = event.session_id or session, event.event
    return agents, session, event


class Subagents:
    """The sub-agents of the run under way, by their sessions."""

    def __init__(self) -> None:
        self.active: dict[str, Worker] = {}
        self._descriptions: dict[str, str] = {}  # of the run's calls, by their ids

    def begin_run(self) -> None:
        self.active.clear()
        self._descriptions.clear()

    def add_call(self, call: ToolStart) -> None:
        """Note a call of the run, which a sub-agent may work for."""
        if description := call.arguments.get("description"):
            self._descriptions[call.id] = one_line(str(description).strip(), ABOUT_COLUMNS)

    def worker_of(self, event: Event) -> Worker | None:
        """The sub-agent that an event comes from; None for the run's own."""
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
            self.active[session or name] = Worker(unique, about)
        return self.active[session or name]

    def end(self, worker: Worker) -> None:
        self.active = {key: each for key, each in self.active.items() if each is not worker}

    def activity(self, width: int) -> str:
        """What all of them do, side by side in one row."""
        share = max(12, width // max(1, len(self.active)) - 3)
        return " · ".join(
            one_line(f"{one_line(each.about or each.name, share // 2)}: {each.activity}", share)
            for each in self.active.values()
        )
