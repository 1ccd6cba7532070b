"""The application: the library's Agent, and what the command line puts around it.

The REPL and the one-shot mode are two ways to use it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from coder.abort import Abort
from coder.agent.agent import Agent
from coder.agent.profiles import AgentSpec, choices, choose
from coder.ai import ChatModel
from coder.cli.parts import TOOLSET, Parts
from coder.cli.process import optional
from coder.cli.settings import ConfigError, Settings
from coder.cli.signals import Interrupts
from coder.events import Event, Events, Notice, RunEnd, StepEnd, hidden_usage
from coder.hooks import FunctionHooks
from coder.permissions.rules import Rule
from coder.providers.errors import RetryPolicy
from coder.types import Limits, Message, RunResult, T, Usage

if TYPE_CHECKING:
    from coder.agent.subagent import Equipment, Subagents

NO_TASK = Rule("task", "*", "deny", "sub-agents call none")
Show = Callable[[Event], None]


class App(Parts):
    """The Agent with its parts, and its state from one run to the next. Raises ConfigError."""

    def __init__(self, settings: Settings, arguments: argparse.Namespace) -> None:
        super().__init__(settings, arguments)
        self.usage, self.newest = Usage(), Usage()  # of the session; of the newest answer
        self.interrupts = Interrupts()
        self.images = [image for _, image in arguments.image or ()]
        if names := ", ".join(f"{path} (image)" for path, _ in arguments.image or ()):
            self.notices.append(f"attached: {names}")
        self.limits = Limits(max_steps=settings.max_steps, max_seconds=settings.max_seconds)
        self.retry = RetryPolicy(base=settings.retry_base)
        module = optional("coder.agent.subagent")
        specs = choices(self.agents, "subagent", "all")
        limits = {"limits": self.limits, "retry": self.retry}
        self.subagents: Subagents | None = module and module.Subagents(specs, self.equip, **limits)
        self.primary = {each.name: each for each in choices(self.agents, "primary", "all")}
        self.chosen, spec = settings.model, choose(self.agents, arguments.agent or "build")
        model = self.chat_model(spec.model or self.chosen)
        hooks, self.compaction = self.hooks_for(model, self.permissions, self.users_hooks)
        self.agent = Agent(
            model,
            reasoning=settings.reasoning,
            hooks=[hooks, FunctionHooks(on_run_start=self._take_servers)]
            if self.servers
            else hooks,
            retry=self.retry,
            cwd=self.cwd,
            session_id=os.urandom(8).hex(),
        )
        self.agent.subscribe(self._note)
        if self.plugins:
            self.agent.subscribe(self.plugins.notify)
        self.work_as(spec.name, model)

    def equip(self, spec: AgentSpec, session_id: str) -> Equipment:
        """What a sub-agent works with: it may do nothing that this agent may not."""
        from coder.agent.subagent import Equipment

        model = self.chat_model(spec.model or self.model.name)
        permissions = self.permissions.child([*spec.rules, NO_TASK])
        users = [each.in_child() for each in self.users_hooks]
        tools = permissions.offered(self.tools_for(model.name))
        if self.trace:
            self.trace.attach(model)
        return Equipment(
            model,
            TOOLSET(tools, cwd=self.cwd, session_id=session_id),
            self.prompt_for(model, spec),
            self.hooks_for(model, permissions, users)[0],
        )

    # -- who works

    def work_as(self, agent: str, model: ChatModel | None = None) -> None:
        """Continue as another agent: with its prompt, its rules, its model if it has one. Raises KeyError."""
        self.spec = self.agents[agent]
        self.permissions.agent = list(self.spec.rules)
        self.permissions.memory.clear()  # permission was given to the agent that asked
        steps = self.spec.max_steps or self.settings.max_steps
        self.agent.limits = replace(self.limits, max_steps=steps)
        self._use(model or self.chat_model(self.spec.model or self.chosen))

    def use(self, name: str) -> None:
        """Continue with another model of the same server, also for agents that have none of their own."""
        self.chosen = name
        self._use(self.chat_model(name))

    def _use(self, model: ChatModel) -> None:
        agent, seen = self.agent, self.agent.state.tools.seen
        self.model = model
        if self.compaction:
            self.compaction.model = model
        agent.set_model(model)
        self.set_prompt()
        own = [self.subagents.tool] if self.subagents else []  # not for sub-agents
        if self.arguments.can_ask and (module := optional("coder.agent.ask_user")):
            own.append(module.ask_user)
        tools = self.permissions.offered([*self.tools_for(model.name), *own])
        agent.set_tools(TOOLSET(tools, cwd=self.cwd))
        agent.state.tools.seen = seen  # files as tools have seen them, whichever tools there are
        if self.trace:
            for secret in self.settings.keys:
                self.trace.hide(secret)
            self.trace.attach(model)

    def set_prompt(self) -> None:
        """Give the agent its system prompt, with the skills that may be used."""
        given, extra = self.arguments.system_prompt, self.arguments.append_system_prompt
        prompt = given or self.prompt_for(self.model, self.spec)
        self.agent.set_system("\n\n".join(filter(None, [prompt, extra])))

    def _take_servers(self, abort: Abort) -> Events[None]:
        """Wait for the MCP servers that start; their tools come into the set of the run that begins."""
        assert self.servers
        yield from self.servers.wait(abort)
        tools = self.permissions.offered(self.servers.tools())
        self.agent.state.tools.tools |= {each.name: each for each in tools}

    def adopt(self, messages: list[Message], session_id: str) -> None:
        """Continue with this conversation; the list itself is the agent's from now on."""
        self.agent.state.messages = messages
        self.agent.session_id = session_id
        self.agent.state.tools.seen.clear()
        self.permissions.memory.clear()
        self.newest = Usage()
        if self.subagents:
            self.subagents.children.clear()

    # -- runs

    def stream(self, prompt: str, images: Sequence[dict[str, Any]] = ()) -> Events[RunResult]:
        """One run, to be followed. The first one has the images of the command line, too."""
        images, self.images = [*self.images, *images], []
        run = self.agent.stream(self.redact(prompt), images)
        return self.trace.watch(run) if self.trace else run

    def compact(self, focus: str, show: Show) -> bool:
        """Summarise the history now. Raises KeyboardInterrupt, Aborted, and ConfigError where that is off."""
        if (compaction := self.compaction) is None:
            raise ConfigError("compaction is off (--no-compaction), or its module was deleted")
        messages = self.agent.messages
        run = self.agent.follow(lambda abort: compaction.compact(messages, abort, focus))
        return self.follow(run, show)

    def follow(self, events: Events[T], show: Show) -> T:
        """Show the events, and notices that come up, to the end; signals stop the work. Raises KeyboardInterrupt."""
        with self.interrupts.stopping(self.agent.token), contextlib.closing(events):
            while True:
                try:  # by hand, without Returning: no frame more for each token
                    event = next(events)
                except StopIteration as end:
                    return cast(T, end.value)
                while self.notices:
                    show(Notice(self.notices.pop(0)))
                show(event)

    def _note(self, event: Event) -> None:
        if isinstance(event, StepEnd) and event.usage.input:
            self.newest = event.usage
        elif isinstance(event, RunEnd):
            self.usage += event.usage
            if event.error and event.error.kind == "not_found":
                from coder.cli.models import advise  # late: once

                advise(event.error, self.model, self.agent.token)
        elif used := hidden_usage(event):
            self.usage += used

    @property
    def context_used(self) -> float:
        """The share of the context window that the newest answer took, with what was sent for it."""
        return (self.newest.input + self.newest.output) / max(1, self.model.context_window)

    @property
    def stalls(self) -> tuple[float, float]:
        """Seconds without data until a request is given up: at its start, later on."""
        return self.model.first_byte_timeout, self.model.idle_timeout
