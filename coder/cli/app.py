"""The application: the library's Agent, and what the command line puts around it.

It is made of flags, settings and the user's files; all that is wrong with them is a ConfigError, in one line. The
REPL and the one-shot mode are two ways to use it. What belongs to a module that was deleted is None.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from coder.agent.agent import Agent
from coder.agent.profiles import AgentSpec, choices, load_agents, system_prompt
from coder.ai import FIRST_BYTE_TIMEOUT, ChatModel
from coder.cli.config import config_folder, data_folder
from coder.cli.process import needed, optional
from coder.cli.settings import ConfigError, Settings, window_of
from coder.cli.signals import Interrupts
from coder.events import Event, Events, Notice, RunEnd, StepEnd, hidden_usage
from coder.hooks import HookChain, Hooks
from coder.permissions.permissions import DEFAULTS, Permissions
from coder.permissions.rules import (
    Rule,
    load_rules,
    load_workspace_rules,
    rule_of,
    useless_rules,
)
from coder.providers.errors import RetryPolicy
from coder.tools.bash import bash
from coder.tools.edit import edit
from coder.tools.files import ls, read, write
from coder.tools.patch import apply_patch
from coder.tools.search import glob, grep
from coder.toolset import Tool, Toolset
from coder.types import Limits, Message, RunResult, T, Usage

if TYPE_CHECKING:
    from coder.agent.compaction import Compaction
    from coder.agent.instructions import FolderInstructions
    from coder.agent.subagent import Equipment, Subagents
    from coder.devtools.trace import Trace
    from coder.extend.guard import Guard
    from coder.extend.plugins import Plugins
    from coder.permissions.sandbox import Sandbox

PARALLEL = optional("coder.agent.parallel")
TOOLSET: type[Toolset] = PARALLEL.ParallelTools if PARALLEL else Toolset
TODO = optional("coder.agent.todo")
READING = (bash, grep, glob, ls, *([TODO.todo] if TODO else []))
TOOLS = (read, write, edit, *READING)
PATCHING = (read, apply_patch, *READING)  # for the GPT-5 family, which is trained on it
NO_TASK = Rule("task", "*", "deny", "sub-agents call none")
Show = Callable[[Event], None]


class App:
    """State from one run to the next. `arguments` are the flags; `notices` are lines that the user should see at the
    next occasion. Raises ConfigError."""

    def __init__(self, settings: Settings, arguments: argparse.Namespace) -> None:
        self.settings, self.arguments, self.cwd = settings, arguments, Path.cwd()
        self.notices: list[str] = list(settings.notes)
        self.usage, self.newest = Usage(), Usage()  # of the session; of the newest answer
        self.interrupts = Interrupts()
        self.limits = Limits(max_steps=settings.max_steps, max_seconds=settings.max_seconds)
        self.retry = RetryPolicy(base=settings.retry_base)
        self.trace: Trace | None = arguments.trace
        self.agents, notices = load_agents(config_folder() / "agents")
        self.notices += notices
        self.redaction = optional("coder.permissions.redact")
        self.redactor = self.redaction and self.redaction.Redactor(*settings.keys)
        self.redact: Callable[[str], str] = self.redactor.text if self.redactor else str
        if self.redactor:
            self.redaction.redact_logs(self.redactor)
        self.permissions = self._permissions()
        self.sandbox = self._sandbox()
        self.plugins, self.users_hooks = _extensions()
        module, note = optional("coder.agent.instructions"), self.notices.append
        self.files = module.instructions(self.cwd, config_folder(), note) if module else ()
        module = optional("coder.agent.subagent")
        specs = choices(self.agents, "subagent", "all")
        limits = {"limits": self.limits, "retry": self.retry}
        self.subagents: Subagents | None = module and module.Subagents(specs, self.equip, **limits)
        self._begin(arguments.agent or "build")

    def _begin(self, name: str) -> None:
        """Make the Agent, which works as the agent of this name."""
        if name not in (known := [each.name for each in choices(self.agents, "primary", "all")]):
            raise ConfigError(f"there is no agent {name!r}; known: {', '.join(known)}")
        self.chosen = self.settings.model
        model = self.chat_model(self.agents[name].model or self.chosen)
        note, users = self.notices.append, self.users_hooks
        hooks, self.folder_files, self.compaction = self._hooks(
            model, self.permissions, users, note
        )
        self.agent = Agent(
            model,
            reasoning=self.settings.reasoning,
            hooks=hooks,
            retry=self.retry,
            cwd=self.cwd,
            session_id=os.urandom(8).hex(),
        )
        self.agent.subscribe(self._note)
        if self.plugins:
            self.agent.subscribe(self.plugins.notify)
        tools = [*TOOLS, *PATCHING, *(self.plugins.tools if self.plugins else ())]
        kinds = [*DEFAULTS, "read", "task", *(each.name for each in tools)]
        self.notices += useless_rules(self.permissions.rules + self.permissions.flags, kinds)
        self.work_as(name, model)

    # -- what it is made of

    def _permissions(self) -> Permissions:
        """Those of the user's file, the flags and the folder."""
        workspace, remarks = load_workspace_rules(self.cwd)
        self.notices += remarks
        return Permissions(
            load_rules(config_folder() / "permissions.json"),
            flags=[rule_of(text, action) for action, text in self.arguments.rules or []],
            workspace=workspace,
            private=[config_folder(), data_folder()],
            can_ask=self.arguments.can_ask,
            yolo=self.arguments.yolo,
        )

    def _sandbox(self) -> Sandbox | None:
        wanted, name = self.settings.sandbox, "coder.permissions.sandbox"
        if wanted == "off":
            return None
        if not (module := needed(name, "--sandbox on") if wanted == "on" else optional(name)):
            self.notices.append(f"Commands are not confined: {name} was deleted.")
            return None
        folders = {"config": config_folder(), "data": data_folder()}
        options = {"required": wanted == "on", "network": self.settings.sandbox_network}
        sandbox: Sandbox = module.Sandbox(self.cwd, **options, **folders)
        self.notices += sandbox.notices
        return sandbox

    def chat_model(self, name: str) -> ChatModel:
        """A model of the server."""
        settings, idle = self.settings, self.settings.idle_timeout
        first = settings.first_byte_timeout
        if first is None:
            first = max(FIRST_BYTE_TIMEOUT, idle) if idle else 0
        return ChatModel(
            name,
            base_url=settings.base_url,
            api_key=settings.api_key,
            context_window=settings.context_window or window_of(name),
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
        model: ChatModel,
        permissions: Permissions,
        users: Sequence[Hooks],
        report: Callable[[str], object] = str,
    ) -> tuple[HookChain, FolderInstructions | None, Compaction | None]:
        """The hooks of an agent with this model, in their order, and two of them, None where they are off or deleted.

        The run goes on without a feature that fails.
        """
        module = optional("coder.agent.instructions")
        files = module and module.FolderInstructions(self.cwd, self.files, report)
        module = None if self.arguments.no_compaction else optional("coder.agent.compaction")
        prompt = self.agents["compaction"].prompt
        compaction = module and module.Compaction(model, prompt=prompt)
        guard = optional("coder.extend.guard")
        features = filter(None, [files and files.hooks, compaction])
        spared = [guard.Guard(each, seconds=None) if guard else each for each in features]
        redaction = [self.redaction.Redaction(self.redactor)] if self.redaction else []
        sandbox = [self.sandbox] if self.sandbox else []
        hooks = HookChain(permissions, *users, *sandbox, *spared, *redaction)
        return self.trace.hooks(hooks) if self.trace else hooks, files, compaction

    def tools_for(self, model: str) -> list[Tool]:
        """The tools that a model of this name gets from us and from the plugins."""
        is_gpt_5 = model.rsplit("/", 1)[-1].lower().startswith("gpt-5")
        tools = [*(PATCHING if is_gpt_5 else TOOLS), *(self.plugins.tools if self.plugins else ())]
        return self.sandbox.tools(tools) if self.sandbox else tools

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
            system_prompt(self.cwd, model.name, self.files, spec.prompt),
            self._hooks(model, permissions, users)[0],
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
        given, extra = self.arguments.system_prompt, self.arguments.append_system_prompt
        prompt = given or system_prompt(self.cwd, model.name, self.files, self.spec.prompt)
        agent.set_system("\n\n".join(filter(None, [prompt, extra])))
        task = [self.subagents.tool] if self.subagents else []
        tools = self.permissions.offered([*self.tools_for(model.name), *task])
        agent.set_tools(TOOLSET(tools, cwd=self.cwd))
        agent.state.tools.seen = seen  # files as tools have seen them, whichever tools there are
        if self.trace:
            for secret in self.settings.keys:
                self.trace.hide(secret)
            self.trace.attach(model)

    def adopt(self, messages: list[Message], session_id: str) -> None:
        """Continue with this conversation; the list itself is the agent's from now on."""
        self.agent.state.messages = messages
        self.agent.session_id = session_id
        self.agent.state.tools.seen.clear()
        self.permissions.memory.clear()
        self.newest = Usage()
        if self.subagents:
            self.subagents.children.clear()
        if self.folder_files:
            self.folder_files.forget()

    # -- runs

    def stream(self, prompt: str) -> Events[RunResult]:
        """One run, to be followed."""
        run = self.agent.stream(self.redact(prompt))
        return self.trace.watch(run) if self.trace else run

    def compact(self, focus: str, show: Show) -> bool:
        """Summarise the history now. Raises KeyboardInterrupt, Aborted, and ConfigError where that is off."""
        if (compaction := self.compaction) is None:
            raise ConfigError("compaction is off (--no-compaction), or its module was deleted")
        messages = self.agent.messages
        run = self.agent.follow(lambda abort: compaction.compact(messages, abort, focus))
        done = self.follow(run, show)
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
                for text in self.taken_notices():
                    show(Notice(text))
                show(event)

    def _note(self, event: Event) -> None:
        if isinstance(event, StepEnd) and event.usage.input:
            self.newest = event.usage
        elif isinstance(event, RunEnd):
            self.usage += event.usage
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

    def taken_notices(self) -> list[str]:
        """What the user should see now; clears the list."""
        notices = [*self.notices, *(self.plugins.take_problems() if self.plugins else ())]
        self.notices.clear()
        return notices

    def left_behind(self) -> list[str]:
        """What commands in the background have changed since the last one, for the end of the session."""
        return self.sandbox.since() if self.sandbox else []


def _extensions() -> tuple[Plugins | None, list[Guard]]:
    """The user's plugins, and all hooks of the user's. Raises ConfigError, also for those whose module was deleted:
    a hook may be what keeps the model from something."""
    folder, file = config_folder() / "plugins", config_folder() / "hooks.json"
    hooks: list[Guard] = []
    if file.exists():
        hooks += needed("coder.extend.command_hooks", str(file)).command_hooks(file)
    name = "coder.extend.plugins"
    module = needed(name, str(folder)) if folder.exists() else optional(name)
    taken = {each.name for each in (*TOOLS, *PATCHING)} | {"task"}
    plugins: Plugins | None = module and module.load_plugins(folder, taken)
    hooks += plugins.hooks if plugins else []
    return plugins, hooks
