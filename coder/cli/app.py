"""The application: the library's Agent, and what the command line puts around it.

`build_app` makes it of flags, settings and the user's files; all that is wrong with them is a ConfigError, in one
line. The REPL and the one-shot mode are two ways to use it.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from coder.abort import Abort
from coder.agent.agent import Agent
from coder.agent.profiles import AgentSpec, choices, load_agents, system_prompt
from coder.ai import FIRST_BYTE_TIMEOUT, ChatModel
from coder.cli.config import config_folder
from coder.cli.optional import optional
from coder.cli.settings import ConfigError, Settings, window_of
from coder.cli.setup import (
    PATCHING,
    TOOLS,
    TOOLSET,
    load_extensions,
    load_permissions,
    open_sandbox,
    tools_for,
)
from coder.cli.signals import Interrupts
from coder.events import Event, Events, Notice, RunEnd, StepEnd, hidden_usage
from coder.hooks import FunctionHooks, HookChain, Hooks
from coder.permissions.permissions import DEFAULTS, Permissions
from coder.permissions.rules import (
    Rule,
    useless_rules,
)
from coder.providers.errors import RetryPolicy
from coder.toolset import Tool
from coder.types import Limits, Message, Request, RunResult, T, Usage

if TYPE_CHECKING:
    from coder.agent.compaction import Compaction
    from coder.agent.instructions import FolderInstructions
    from coder.agent.subagent import Equipment, Subagents
    from coder.devtools.trace import Trace
    from coder.permissions.sandbox import Sandbox

NO_TASK = Rule("task", "*", "deny", "sub-agents call none")
Show = Callable[[Event], None]


class App:
    """State from one run to the next. `arguments` are the flags; `notices` are lines that the user should see at the
    next occasion. What belongs to a module that was deleted is None."""

    def __init__(
        self,
        settings: Settings,
        arguments: argparse.Namespace,
        permissions: Permissions,
        agents: Mapping[str, AgentSpec],
        sandbox: Sandbox | None,
    ) -> None:
        self.settings, self.permissions, self.agents = settings, permissions, agents
        self.sandbox, self.cwd = sandbox, Path.cwd()
        self.trace: Trace | None = arguments.trace
        self.system, self.extra = arguments.system_prompt, arguments.append_system_prompt
        self.notices = [*settings.notes, *arguments.notices]
        self.usage, self.newest = Usage(), Usage()  # of the session; of the newest answer
        self.interrupts = Interrupts()
        self.limits = Limits(max_steps=settings.max_steps, max_seconds=settings.max_seconds)
        self.retry = RetryPolicy(base=settings.retry_base)
        self.redaction = optional("coder.permissions.redact")
        self.redactor = self.redaction and self.redaction.Redactor(*settings.keys)
        self.redact: Callable[[str], str] = self.redactor.text if self.redactor else str
        self.plugins, self.users_hooks = load_extensions()
        module = optional("coder.agent.instructions")
        self.files = arguments.files
        if self.files is None:
            read = module.instructions if module else lambda *_: ()
            self.files = read(self.cwd, config_folder(), self.notices.append)
        self.folder_files = self._folder_files(self.notices.append)
        self.compacts = not arguments.no_compaction
        module = optional("coder.agent.subagent")
        specs = choices(agents, "subagent", "all")
        self.subagents: Subagents | None = module and module.Subagents(
            specs, self.equip, limits=self.limits, retry=self.retry
        )
        self._begin(agents[arguments.agent or "build"])

    def _begin(self, spec: AgentSpec) -> None:
        """Make the Agent, which works as `spec`."""
        self.spec = spec
        self.chosen = self.settings.model  # the user's, for agents that have none of their own
        self.model = self.chat_model(spec.model or self.chosen)
        self.compaction = self._compaction(self.model)
        hooks: Sequence[Hooks] = self._hooks(
            self.permissions,
            lambda: self.spec,
            self.users_hooks,
            self.folder_files.hooks if self.folder_files else None,
            self.compaction,
        )
        self.agent = Agent(
            self.model,
            reasoning=self.settings.reasoning,
            hooks=[self.trace.hooks(HookChain(*hooks))] if self.trace else hooks,
            retry=self.retry,
            cwd=self.cwd,
            session_id=secrets.token_hex(8),
        )
        self.agent.subscribe(self._note)
        if self.plugins:
            self.agent.subscribe(self.plugins.notify)
        self._work_as(spec, self.model)

    def _folder_files(self, report: Callable[[str], object] = str) -> FolderInstructions | None:
        module = optional("coder.agent.instructions")
        made: FolderInstructions | None = module and module.FolderInstructions(
            self.cwd, self.files, report
        )
        return made

    def _compaction(self, model: ChatModel) -> Compaction | None:
        module = optional("coder.agent.compaction") if self.compacts else None
        prompt = self.agents["compaction"].prompt
        made: Compaction | None = module and module.Compaction(model, prompt=prompt)
        return made

    # -- who works

    def work_as(self, agent: str) -> None:
        """Continue as another agent: with its prompt, its rules, its model if it has one. Raises KeyError."""
        spec = self.agents[agent]
        self._work_as(spec, self.chat_model(spec.model or self.chosen))

    def use(self, name: str) -> None:
        """Continue with another model of the same server."""
        self.chosen = name
        self._use(self.chat_model(name))

    def _work_as(self, spec: AgentSpec, model: ChatModel) -> None:
        self.spec = spec
        self.permissions.agent = list(spec.rules)
        self.permissions.memory.clear()  # permission was given to the agent that asked
        steps = spec.max_steps or self.settings.max_steps
        self.agent.limits = replace(self.limits, max_steps=steps)
        self._use(model)

    def _use(self, model: ChatModel) -> None:
        agent, seen = self.agent, self.agent.state.tools.seen
        self.model = model
        if self.compaction:
            self.compaction.model = model
        agent.set_model(model)
        prompt = self.system or system_prompt(self.cwd, model.name, self.files, self.spec.prompt)
        agent.set_system("\n\n".join(filter(None, [prompt, self.extra])))
        task = [self.subagents.tool] if self.subagents else []
        tools = self.permissions.offered([*self.built_in(model.name), *task])
        agent.set_tools(TOOLSET(tools, cwd=self.cwd))
        agent.state.tools.seen = seen  # files as tools have seen them, whichever tools there are
        if self.trace:
            for secret in self.settings.keys:
                self.trace.hide(secret)
            self.trace.attach(model)

    def built_in(self, model: str) -> list[Tool]:
        """The tools that a model of this name gets from us and from the plugins."""
        tools = [*tools_for(model), *(self.plugins.tools if self.plugins else ())]
        return self.sandbox.tools(tools) if self.sandbox else tools

    @property
    def stalls(self) -> tuple[float, float]:
        """Seconds without data until a request is given up: at its start, later on."""
        return self.model.first_byte_timeout, self.model.idle_timeout

    def chat_model(self, name: str) -> ChatModel:
        """A model of the server."""
        settings, idle = self.settings, self.settings.idle_timeout
        own = settings.context_window != window_of(settings.model)  # one that the user gave stays
        first = settings.first_byte_timeout
        if first is None:
            first = max(FIRST_BYTE_TIMEOUT, idle) if idle else 0
        return ChatModel(
            name,
            base_url=settings.base_url,
            api_key=settings.api_key,
            context_window=settings.context_window if own else window_of(name),
            idle_timeout=idle,
            first_byte_timeout=first,
            extra_body=settings.extra_body,
            headers=settings.headers,
            profile=settings.profile,
            price=settings.price_of(name),
            redact=self.redactor.data if self.redactor else bytes,
        )

    def _hooks(
        self,
        permissions: Permissions,
        spec: Callable[[], AgentSpec],
        users: Sequence[Hooks],
        *optional_hooks: Hooks | None,
    ) -> list[Hooks]:
        """The hooks of an agent, in their order."""
        guard = optional("coder.extend.guard")
        spared = [
            guard.Guard(each, seconds=None) if guard else each for each in optional_hooks if each
        ]
        redaction = [self.redaction.Redaction(self.redactor)] if self.redaction else []
        sandbox = [self.sandbox] if self.sandbox else []
        return [permissions, _temperature(spec), *users, *sandbox, *spared, *redaction]

    def equip(self, spec: AgentSpec, session_id: str) -> Equipment:
        """What a sub-agent works with: it may do nothing that this agent may not."""
        from coder.agent.subagent import Equipment

        model = self.chat_model(spec.model or self.model.name)
        permissions = self.permissions.child([*spec.rules, NO_TASK])
        folder_files = self._folder_files()
        files = folder_files.hooks if folder_files else None
        compaction = self._compaction(model)
        users = [each.in_child() for each in self.users_hooks]
        hooks = HookChain(*self._hooks(permissions, lambda: spec, users, files, compaction))
        tools = permissions.offered(self.built_in(model.name))
        if self.trace:
            self.trace.attach(model)
        return Equipment(
            model,
            TOOLSET(tools, cwd=self.cwd, session_id=session_id),
            system_prompt(self.cwd, model.name, self.files, spec.prompt),
            self.trace.hooks(hooks) if self.trace else hooks,
        )

    # -- runs

    def stream(self, prompt: str) -> Events[RunResult]:
        """One run, to be followed."""
        run = self.agent.stream(self.redact(prompt))
        return self.trace.watch(run) if self.trace else run

    def compact(self, focus: str, show: Show) -> bool:
        """Summarise the history now. Raises KeyboardInterrupt, Aborted, and ConfigError where that is off."""
        if not (compaction := self.compaction):
            raise ConfigError("compaction is off (--no-compaction), or its module was deleted")

        def start(abort: Abort) -> Events[bool]:
            return compaction.compact(self.agent.messages, abort, focus)

        done = self.follow(self.agent.follow(start), show)
        if done and self.folder_files:
            self.folder_files.forget()
        return done

    def follow(self, events: Events[T], show: Show) -> T:
        """Show the events, and notices that come up, to the end; signals stop the work. Raises KeyboardInterrupt."""
        with self.interrupts.stopping(self.agent.token), contextlib.closing(events):
            while True:
                try:  # by hand, without Returning: no frame more for each token
                    event = next(events)
                except StopIteration as end:
                    return cast(T, end.value)
                notices = [Notice(text) for text in self.taken_notices()]
                last = isinstance(event, RunEnd)  # and stays it
                for each in [*notices, event] if last else [event, *notices]:
                    show(each)

    def _note(self, event: Event) -> None:
        if isinstance(event, StepEnd) and event.usage.input:
            self.newest = event.usage
        elif isinstance(event, RunEnd):
            self.usage += event.usage
        elif used := hidden_usage(event):
            self.usage += used

    def taken_notices(self) -> list[str]:
        """What the user should see now; clears the list."""
        notices = [*self.notices, *(self.plugins.take_problems() if self.plugins else ())]
        self.notices.clear()
        return notices

    def left_behind(self) -> list[str]:
        """What commands in the background have changed since the last one, for the end of the session."""
        return self.sandbox.since() if self.sandbox else []

    def adopt(self, messages: list[Message], session_id: str = "") -> None:
        """Continue with this conversation; the list itself is the agent's from now on."""
        self.agent.state.messages = messages
        self.agent.session_id = session_id or secrets.token_hex(8)
        self.agent.state.tools.seen.clear()
        self.permissions.memory.clear()
        self.newest = Usage()
        if self.subagents:
            self.subagents.children.clear()
        if self.folder_files:
            self.folder_files.forget()


def build_app(settings: Settings, arguments: argparse.Namespace, can_ask: bool) -> App:
    """The application as the flags want it. Raises ConfigError."""
    agents, notices = load_agents(config_folder() / "agents")
    name = arguments.agent or "build"
    if name not in (known := [each.name for each in choices(agents, "primary", "all")]):
        raise ConfigError(f"there is no agent {name!r}; known: {', '.join(known)}")
    permissions, remarks = load_permissions(arguments, can_ask)
    sandbox = open_sandbox(settings)
    app = App(settings, arguments, permissions, agents, sandbox)
    tools = [*TOOLS, *PATCHING, *(app.plugins.tools if app.plugins else ())]
    kinds = [*DEFAULTS, "read", "task", *(each.name for each in tools)]
    app.notices += [
        *notices,
        *remarks,
        *useless_rules(permissions.rules + permissions.flags, kinds),
    ]
    if sandbox:
        app.notices += sandbox.notices
    elif settings.sandbox != "off":
        app.notices.append("Commands are not confined: coder.permissions.sandbox was deleted.")
    if app.redaction:
        app.redaction.redact_logs(app.redactor)
    return app


def _temperature(spec: Callable[[], AgentSpec]) -> Hooks:
    """The temperature that an agent wants in each request."""

    def before_llm_call(request: Request) -> None:
        if (temperature := spec().temperature) is not None:
            request.options.setdefault("temperature", temperature)

    return FunctionHooks(before_llm_call=before_llm_call)
