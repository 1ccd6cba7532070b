"""A conversation at the terminal: the model, the tools, the hooks and the list of messages, and one run of them.

The REPL and the one-shot mode are two ways to use it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coder.abort import Abort
from coder.agent.compaction import Compaction
from coder.agent.folder_instructions import FolderInstructions
from coder.agent.instructions import instructions
from coder.agent.parallel import ParallelTools
from coder.agent.profiles import BUILT_IN, AgentSpec, choices
from coder.agent.subagent import Subagents
from coder.agent.todo import notes
from coder.ai import FIRST_BYTE_TIMEOUT, ChatModel
from coder.cli.config import Settings, config_folder, window_of
from coder.cli.kit import PATCHING, TOOLS, OneAtATime, Temperature, equip, prompt_of, tools_for
from coder.cli.signals import Interrupts
from coder.events import Event, Notice, RunEnd, StepEnd
from coder.extend.guard import Spared
from coder.extend.plugins import Plugins
from coder.hooks import HookChain, Hooks
from coder.loop import run_loop
from coder.permissions.permissions import DEFAULTS, Permissions
from coder.permissions.redact import RedactingModel, Redaction, Redactor
from coder.permissions.sandbox import Sandbox
from coder.providers.errors import RetryPolicy
from coder.sessions.journal import spent
from coder.toolset import Tool
from coder.types import Limits, Message, RunResult, T, Usage

if TYPE_CHECKING:
    from coder.devtools.trace import Trace


class Session:
    """State from one run to the next. `system` replaces our system prompt, `extra` follows on either; `agents` are those that there
    are and `agent` the one to begin with; `hooks` and `plugins` are the user's; `sandbox` confines the commands, `trace`
    records all of it."""

    def __init__(
        self,
        settings: Settings,
        cwd: Path,
        permissions: Permissions,
        *,
        agents: Mapping[str, AgentSpec] = BUILT_IN,
        agent: str = "build",
        system: str = "",
        extra: str = "",
        hooks: Hooks | None = None,
        plugins: Plugins | None = None,
        sandbox: Sandbox | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.settings = settings
        self.reasoning = settings.reasoning
        self.cwd = cwd
        self.permissions, self.agents, self.sandbox, self.trace = (
            permissions,
            agents,
            sandbox,
            trace,
        )
        self.plugins = plugins or Plugins()
        turns = threading.RLock()
        self.users_hooks = [
            OneAtATime(each, turns) for each in (*([hooks] if hooks else []), *self.plugins.hooks)
        ]
        self.instead, self.extra = system, extra
        self.redactor = Redactor(*settings.keys)
        # What a person is to be told at the next occasion
        self.notices = [
            *settings.notes,
            *self.plugins.taken_problems(),
        ]
        self.subscribers: list[Callable[[Event], None]] = [self._note, self.plugins.told]
        self.files = instructions(cwd, config_folder(), self.notices.append)
        self.folder_files = FolderInstructions(cwd, self.files, self.notices.append)
        self.messages: list[Message] = []
        self.usage = Usage()
        self.newest = Usage()  # of the newest answer
        self.interrupts = Interrupts()
        self.session_id = secrets.token_hex(8)
        self.seen: dict[
            Path, Any
        ] = {}  # files as the tools have seen them, whichever tools there are
        self.abort = Abort()  # of the run under way
        self.subagents = Subagents(
            choices(agents, "subagent", "all"),
            partial(equip, self),
            limits=self.limits,
            retry=self.retry,
        )
        self.temperature = Temperature(agents[agent])
        self.model = self.chat_model(settings.model)
        self.chosen = settings.model  # the person's, for agents that have none of their own
        self.compaction = Compaction(
            self.model, notes=self._notes, prompt=agents["compaction"].prompt
        )
        self.work_as(agent)
        chain = HookChain(
            *filter(
                None,
                [
                    permissions,
                    self.temperature,
                    *self.users_hooks,
                    sandbox,
                    Spared(self.folder_files),
                    Spared(self.compaction),
                    Redaction(self.redactor),
                ],
            )
        )
        self.hooks = trace.hooks(chain) if trace else chain

    # -- who works

    def work_as(self, agent: str) -> None:
        """Another agent goes on with the conversation: its prompt, its rules, its model if it has one. Raises KeyError."""
        self.agent = self.temperature.spec = self.agents[agent]
        self.permissions.agent = list(self.agent.rules)
        self.permissions.memory.clear()  # a yes was for the agent that asked
        self._talk_to(self.agent.model or self.chosen)

    def use(self, name: str) -> None:
        """Talk to another model of the same server; the conversation goes on."""
        self.chosen = name
        self._talk_to(name)

    def _talk_to(self, name: str) -> None:
        self.model = self.compaction.model = self.chat_model(name)
        self.system = prompt_of(self.agent, self.cwd, name, self.files, self.instead, self.extra)
        self.tools = ParallelTools(
            self.permissions.offered([*self.built_in(name), self.subagents.tool]),
            cwd=self.cwd,
            session_id=self.session_id,
        )
        self.tools.seen = self.seen
        if self.trace:
            for secret in self.settings.keys:
                self.trace.hide(secret)
            self.trace.attach(self.model)

    def built_in(self, model: str) -> list[Tool]:
        """The tools that a model of this name gets from us and from the plugins."""
        tools = [*tools_for(model), *self.plugins.tools]
        return self.sandbox.tools(tools) if self.sandbox else tools

    @property
    def kinds(self) -> list[str]:
        """What a rule can be about: the kinds, and every tool's name."""
        tools = [*TOOLS, *PATCHING, *self.plugins.tools, self.subagents.tool]
        return [*DEFAULTS, "read", *(each.name for each in tools)]

    @property
    def limits(self) -> Limits:
        return Limits(max_steps=self.settings.max_steps, max_seconds=self.settings.max_seconds)

    @property
    def retry(self) -> RetryPolicy:
        return RetryPolicy(base=self.settings.retry_base)

    def chat_model(self, name: str = "") -> ChatModel:
        """A model of the server, without a name another one like ours: for what goes on beside a run."""
        settings, idle, name = self.settings, self.settings.idle_timeout, name or self.model.name
        first = max(FIRST_BYTE_TIMEOUT, idle) if idle else 0
        own = settings.context_window != window_of(settings.model)  # one that the person gave stays
        return RedactingModel(
            name,
            redactor=self.redactor,
            base_url=settings.base_url,
            api_key=settings.api_key,
            context_window=settings.context_window if own else window_of(name),
            idle_timeout=idle,
            first_byte_timeout=first
            if settings.first_byte_timeout is None
            else settings.first_byte_timeout,
            extra_body=settings.extra_body,
            headers=settings.headers,
            profile=settings.profile,
            price=settings.price_of(name),
        )

    @property
    def stalls(self) -> tuple[float, float]:
        """Seconds without data until a request is given up: at its start, later on."""
        return self.model.first_byte_timeout, self.model.idle_timeout

    def run(self, prompt: str, show: Callable[[Event], None]) -> RunResult:
        """One run, its events shown. Raises KeyboardInterrupt where it had to be broken off."""
        limits = replace(self.limits, max_steps=self.agent.max_steps or self.settings.max_steps)
        self.abort = Abort()
        events = run_loop(
            self.messages,
            self.model,
            self.tools,
            prompts=self.redactor.text(prompt),
            system=self.system,
            reasoning=self.reasoning,
            hooks=self.hooks,
            limits=limits,
            retry=self.retry,
            abort=self.abort,
        )
        return self._followed(self.trace.watch(events) if self.trace else events, show)

    def compact(self, focus: str, show: Callable[[Event], None]) -> bool:
        """Let the history be summarised now. Raises KeyboardInterrupt, and Aborted."""
        self.abort = Abort()
        return self._followed(self.compaction.compact(self.messages, self.abort, focus), show)

    def _followed(self, events: Generator[Event, None, T], show: Callable[[Event], None]) -> T:
        """Take the events to their end, tell all who listen, and stop where a person wants it."""
        with self.interrupts.stopping(self.abort):
            try:
                while True:
                    event = next(events)
                    self.interrupts.passing_on = True
                    for subscriber in self.subscribers:
                        subscriber(event)
                    notices = [Notice(text) for text in self.told()]
                    last = isinstance(event, RunEnd)  # and stays it
                    for each in [*notices, event] if last else [event, *notices]:
                        show(each)
                    self.interrupts.passing_on = False
            except StopIteration as end:
                value: T = end.value
                return value
            finally:
                events.close()

    def told(self) -> list[str]:
        """What a person is to be told; taken by this."""
        notices = [*self.notices, *self.plugins.taken_problems()]
        self.notices.clear()
        return notices

    def left_behind(self) -> list[str]:
        """What commands in the background have changed since the last one, which a person is to be told at the end."""
        return self.sandbox.since() if self.sandbox else []

    def adopt(self, messages: list[Message], session_id: str = "") -> None:
        """Go on with this conversation."""
        self.messages = messages
        self.session_id = session_id or secrets.token_hex(8)
        self.tools.session_id = self.session_id
        self.seen.clear()
        self.permissions.memory.clear()
        self.subagents.children.clear()
        self.newest = Usage()
        self.folder_files.take_up(messages)

    def _note(self, event: Event) -> None:
        if isinstance(event, StepEnd) and event.usage.input:
            self.newest = event.usage
        elif isinstance(event, RunEnd):
            self.usage += event.usage
        elif used := spent(event):
            self.usage += used

    def _notes(self) -> list[Message]:
        """What is to be said again where the history is shortened: instruction files of sub-folders, the checklist."""
        found: list[Message] = []
        for name, notes_of in (
            ("instruction files", self.folder_files.notes),
            ("checklist", partial(notes, self.messages)),
        ):
            try:
                found += notes_of()
            except Exception as error:
                self.notices.append(
                    f"The {name} could not be read, and is left out: {type(error).__name__}: {error}."
                )
        return found
