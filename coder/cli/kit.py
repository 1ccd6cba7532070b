"""The kit of an agent: its tools, its system prompt and its hooks, for a session's own agent and for its sub-agents."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coder.agent.compaction import Compaction
from coder.agent.folder_instructions import FolderInstructions
from coder.agent.instructions import Instruction
from coder.agent.parallel import ParallelTools
from coder.agent.profiles import AgentSpec
from coder.agent.prompt import system_prompt
from coder.agent.subagent import Equipment
from coder.agent.todo import todo
from coder.events import Event
from coder.extend.guard import Spared
from coder.hooks import HOOK_NAMES, HookChain, Hooks, implements
from coder.permissions.redact import Redaction
from coder.permissions.rules import Rule
from coder.tools.bash import bash
from coder.tools.edit import edit
from coder.tools.files import ls, read, write
from coder.tools.patch import apply_patch
from coder.tools.search import glob, grep
from coder.toolset import Tool
from coder.types import Request

if TYPE_CHECKING:
    from coder.cli.session import Session

TOOLS = (read, write, edit, bash, grep, glob, ls, todo)
# The GPT-5 family is trained on apply_patch
PATCHING = (
    read,
    apply_patch,
    bash,
    grep,
    glob,
    ls,
    todo,
)
AROUND = ("before_llm_call", "after_llm_call", "before_tool_call", "after_tool_call")
NO_TASK = Rule("task", "*", "deny", "sub-agents call none")


def tools_for(model: str) -> tuple[Tool, ...]:
    """The built-in tools as a model family knows them."""
    return PATCHING if model.rsplit("/", 1)[-1].lower().startswith("gpt-5") else TOOLS


def prompt_of(
    spec: AgentSpec,
    cwd: Path,
    model: str,
    files: Sequence[Instruction],
    instead: str = "",
    extra: str = "",
) -> str:
    """The system prompt: the person's own text, or the agent's, and what the person wants behind it."""
    return "\n\n".join(
        filter(None, [instead or system_prompt(cwd, model, files, spec.prompt), extra])
    )


def equip(session: Session, spec: AgentSpec, session_id: str) -> Equipment:
    """What a sub-agent of this session works with: nothing that the session's agent may not do."""
    model = session.chat_model(spec.model)
    permissions = session.permissions.child([*spec.rules, NO_TASK])
    offered = permissions.offered(session.built_in(model.name))
    folder_files = FolderInstructions(session.cwd, session.files)
    compaction = Compaction(
        model, notes=folder_files.notes, prompt=session.agents["compaction"].prompt
    )
    users = [each.in_child() for each in session.users_hooks]
    chain = HookChain(
        *filter(
            None,
            [
                permissions,
                Temperature(spec),
                *users,
                session.sandbox,
                Spared(folder_files),
                Spared(compaction),
                Redaction(session.redactor),
            ],
        )
    )
    if session.trace:
        session.trace.attach(model)
    return Equipment(
        model,
        ParallelTools(offered, cwd=session.cwd, session_id=session_id),
        prompt_of(spec, session.cwd, model.name, session.files),
        session.trace.hooks(chain) if session.trace else chain,
    )


class Temperature(Hooks):
    """What an agent implements of its own in each request."""

    def __init__(self, spec: AgentSpec) -> None:
        self.spec = spec

    def before_llm_call(self, request: Request) -> None:
        if self.spec.temperature is not None:
            request.options.setdefault("temperature", self.spec.temperature)


class OneAtATime(Hooks):
    """A hook of the user's, which is never at work twice at a time: sub-agents run in threads of their own. Its events are
    passed on between its turns, so that none waits for the other.

    Only the places named are passed on: a run of a sub-agent belongs to that of its parent, so there the hook is asked about each
    request and each call, and not told of the run.
    """

    def __init__(
        self, hook: Hooks, turns: threading.RLock, places: Sequence[str] = HOOK_NAMES
    ) -> None:
        self.hook, self.turns = hook, turns
        for place in places:
            if implements(hook, place):
                setattr(self, place, partial(self._turn, getattr(hook, place)))

    def in_child(self) -> OneAtATime:
        """The same hook for the run of a sub-agent."""
        return OneAtATime(self.hook, self.turns, AROUND)

    def _turn(self, work: Callable[..., Any], *args: Any) -> Generator[Event, None, Any]:
        with self.turns:
            said = work(*args)
        if not isinstance(said, Generator):
            return said
        while True:
            try:
                with self.turns:
                    event = next(said)
            except StopIteration as end:
                return end.value
            yield event
