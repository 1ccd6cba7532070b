"""The application: the library's Agent, and what the command line puts around it.

`build_app` makes it of flags, settings and the user's files; all that is wrong with them is a ConfigError, in one
line. The REPL and the one-shot mode are two ways to use it.
"""

from __future__ import annotations

import argparse
import secrets
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coder.abort import Abort
from coder.agent.agent import Agent
from coder.agent.compaction import Compaction
from coder.agent.folder_instructions import FolderInstructions
from coder.agent.instructions import Instruction, instructions
from coder.agent.parallel import ParallelTools
from coder.agent.profiles import AgentSpec, choices, load_agents
from coder.agent.prompt import system_prompt
from coder.agent.subagent import Equipment, Subagents
from coder.agent.todo import notes, todo
from coder.ai import FIRST_BYTE_TIMEOUT
from coder.cli.config import ConfigError, Settings, config_folder, data_folder, window_of
from coder.cli.signals import Interrupts
from coder.events import Event, Events, Notice, Returning, RunEnd, StepEnd
from coder.extend.command_hooks import HooksError, command_hooks
from coder.extend.guard import Spared
from coder.extend.plugins import load_plugins
from coder.hooks import HOOK_NAMES, FunctionHooks, HookChain, Hooks, implements
from coder.permissions.permissions import DEFAULTS, Permissions
from coder.permissions.redact import RedactingModel, Redaction, Redactor, redact_logs
from coder.permissions.rules import (
    Rule,
    RulesError,
    load_rules,
    load_workspace_rules,
    rule_of,
    shadowed_rules,
    unmatched_rules,
)
from coder.permissions.sandbox import Sandbox, SandboxError
from coder.providers.errors import RetryPolicy
from coder.sessions.rows import spent
from coder.tools.bash import bash
from coder.tools.edit import edit
from coder.tools.files import ls, read, write
from coder.tools.patch import apply_patch
from coder.tools.search import glob, grep
from coder.toolset import Tool
from coder.types import Limits, Message, Request, RunResult, T, Usage

if TYPE_CHECKING:
    from coder.devtools.trace import Trace

TOOLS = (read, write, edit, bash, grep, glob, ls, todo)
PATCHING = (
    read,
    apply_patch,
    bash,
    grep,
    glob,
    ls,
    todo,
)  # for the GPT-5 family, which is trained on it
NO_TASK = Rule("task", "*", "deny", "sub-agents call none")
Show = Callable[[Event], None]


class App:
    """State from one run to the next. `arguments` are the flags, `files` the instruction files of the folder;
    `notices` are lines that the user should see at the next occasion."""

    def __init__(
        self,
        settings: Settings,
        arguments: argparse.Namespace,
        *,
        permissions: Permissions,
        agents: Mapping[str, AgentSpec],
        hooks: Hooks | None,
        sandbox: Sandbox | None,
        files: Sequence[Instruction] | None = None,
    ) -> None:
        self.settings, self.permissions, self.agents = settings, permissions, agents
        self.sandbox, self.cwd = sandbox, Path.cwd()
        self.trace: Trace | None = arguments.trace
        self.system, self.extra = arguments.system_prompt, arguments.append_system_prompt
        self.notices = list(settings.notes)
        self.usage, self.newest = Usage(), Usage()  # of the session; of the newest answer
        self.interrupts = Interrupts()
        self.redactor = Redactor(*settings.keys)
        self.limits = Limits(max_steps=settings.max_steps, max_seconds=settings.max_seconds)
        self.retry = RetryPolicy(base=settings.retry_base)
        taken = {each.name for each in (*TOOLS, *PATCHING)} | {"task"}
        self.plugins = load_plugins(config_folder() / "plugins", taken)
        lock = threading.RLock()
        given = [*([hooks] if hooks else []), *self.plugins.hooks]
        self.users_hooks = [SerializedHook(each, lock) for each in given]
        tell = self.notices.append
        self.files = instructions(self.cwd, config_folder(), tell) if files is None else files
        self.folder_files = FolderInstructions(self.cwd, self.files, tell)
        self.subagents = Subagents(
            choices(agents, "subagent", "all"), self.equip, limits=self.limits, retry=self.retry
        )
        self._begin(agents[arguments.agent or "build"])

    def _begin(self, spec: AgentSpec) -> None:
        """Make the Agent, which works as `spec`."""
        self.spec = spec
        self.chosen = self.settings.model  # the user's, for agents that have none of their own
        self.model = self.chat_model(spec.model or self.chosen)
        prompt = self.agents["compaction"].prompt
        self.compaction = Compaction(self.model, notes=self._notes, prompt=prompt)
        hooks: Sequence[Hooks] = self._hooks(
            self.permissions,
            lambda: self.spec,
            self.users_hooks,
            self.folder_files,
            self.compaction,
        )
        self.agent = Agent(
            self.model,
            thinking_level=self.settings.reasoning,
            hooks=[self.trace.hooks(HookChain(*hooks))] if self.trace else hooks,
            retry=self.retry,
            cwd=self.cwd,
            session_id=secrets.token_hex(8),
        )
        self.agent.subscribe(self._note)
        self.agent.subscribe(self.plugins.told)
        self._work_as(spec, self.model)

    # -- who works

    def work_as(self, agent: str) -> None:
        """Continue as another agent: with its prompt, its rules, its model if it has one. Raises KeyError."""
        spec = self.agents[agent]
        self._work_as(spec, self.chat_model(spec.model or self.chosen))

    def use(self, name: str) -> None:
        """Continue with another model of the same server."""
        self.chosen = name
        self._use(self.chat_model(name))

    def _work_as(self, spec: AgentSpec, model: RedactingModel) -> None:
        self.spec = spec
        self.permissions.agent = list(spec.rules)
        self.permissions.memory.clear()  # permission was given to the agent that asked
        steps = spec.max_steps or self.settings.max_steps
        self.agent.limits = replace(self.limits, max_steps=steps)
        self._use(model)

    def _use(self, model: RedactingModel) -> None:
        agent, seen = self.agent, self.agent.state.tools.seen
        self.model = self.compaction.model = model
        agent.set_model(model)
        agent.set_system_prompt(self._prompt(self.spec, model.name))
        tools = self.permissions.offered([*self.built_in(model.name), self.subagents.tool])
        agent.set_tools(ParallelTools(tools, cwd=self.cwd))
        agent.state.tools.seen = (
            seen  # the files as tools have seen them, whichever tools there are
        )
        if self.trace:
            for secret in self.settings.keys:
                self.trace.hide(secret)
            self.trace.attach(model)

    def _prompt(self, spec: AgentSpec, model: str) -> str:
        """The system prompt: the user's own text, or the agent's, and what the user appends."""
        text = self.system or system_prompt(self.cwd, model, self.files, spec.prompt)
        return "\n\n".join(filter(None, [text, self.extra]))

    def built_in(self, model: str) -> list[Tool]:
        """The tools that a model of this name gets from us and from the plugins."""
        tools = [*tools_for(model), *self.plugins.tools]
        return self.sandbox.tools(tools) if self.sandbox else tools

    @property
    def stalls(self) -> tuple[float, float]:
        """Seconds without data until a request is given up: at its start, later on."""
        return self.model.first_byte_timeout, self.model.idle_timeout

    @property
    def kinds(self) -> list[str]:
        """What a rule can be about: the kinds, and every tool's name."""
        tools = [*TOOLS, *PATCHING, *self.plugins.tools, self.subagents.tool]
        return [*DEFAULTS, "read", *(each.name for each in tools)]

    def chat_model(self, name: str) -> RedactingModel:
        """A model of the server."""
        settings, idle = self.settings, self.settings.idle_timeout
        own = settings.context_window != window_of(settings.model)  # one that the user gave stays
        first = settings.first_byte_timeout
        return RedactingModel(
            name,
            redactor=self.redactor,
            base_url=settings.base_url,
            api_key=settings.api_key,
            context_window=settings.context_window if own else window_of(name),
            idle_timeout=idle,
            first_byte_timeout=(max(FIRST_BYTE_TIMEOUT, idle) if idle else 0)
            if first is None
            else first,
            extra_body=settings.extra_body,
            headers=settings.headers,
            profile=settings.profile,
            price=settings.price_of(name),
        )

    def _hooks(
        self,
        permissions: Permissions,
        spec: Callable[[], AgentSpec],
        users: Sequence[Hooks],
        folder_files: FolderInstructions,
        compaction: Compaction,
    ) -> list[Hooks]:
        """The hooks of an agent, in their order."""
        hooks = [permissions, _temperature(spec), *users, self.sandbox]
        hooks += [Spared(folder_files), Spared(compaction), Redaction(self.redactor)]
        return [each for each in hooks if each]

    def equip(self, spec: AgentSpec, session_id: str) -> Equipment:
        """What a sub-agent works with: it may do nothing that this agent may not."""
        model = self.chat_model(spec.model or self.model.name)
        permissions = self.permissions.child([*spec.rules, NO_TASK])
        folder_files = FolderInstructions(self.cwd, self.files)
        compaction = Compaction(
            model, notes=folder_files.notes, prompt=self.agents["compaction"].prompt
        )
        users = [each.in_child() for each in self.users_hooks]
        hooks = HookChain(*self._hooks(permissions, lambda: spec, users, folder_files, compaction))
        tools = permissions.offered(self.built_in(model.name))
        if self.trace:
            self.trace.attach(model)
        return Equipment(
            model,
            ParallelTools(tools, cwd=self.cwd, session_id=session_id),
            system_prompt(self.cwd, model.name, self.files, spec.prompt),
            self.trace.hooks(hooks) if self.trace else hooks,
        )

    # -- runs

    def run(self, prompt: str, show: Show) -> RunResult:
        """One run, its events shown. Raises KeyboardInterrupt where it had to be broken off."""
        run = self.agent.stream(self.redactor.text(prompt))
        return self._follow(self.trace.watch(run) if self.trace else run, show)

    def compact(self, focus: str, show: Show) -> bool:
        """Summarise the history now. Raises KeyboardInterrupt, and Aborted."""

        def start(abort: Abort) -> Events[bool]:
            return self.compaction.compact(self.agent.messages, abort, focus)

        return self._follow(self.agent.follow(start), show)

    def _follow(self, events: Events[T], show: Show) -> T:
        """Show the events to their end, and the notices that come up; signals stop the work."""
        with self.interrupts.stopping(self.agent.token), Returning(events) as work:
            for event in work:
                notices = [Notice(text) for text in self.taken_notices()]
                last = isinstance(event, RunEnd)  # and stays it
                for each in [*notices, event] if last else [event, *notices]:
                    show(each)
        return work.value

    def _note(self, event: Event) -> None:
        if isinstance(event, StepEnd) and event.usage.input:
            self.newest = event.usage
        elif isinstance(event, RunEnd):
            self.usage += event.usage
        elif used := spent(event):
            self.usage += used

    def taken_notices(self) -> list[str]:
        """What the user should see now; clears the list."""
        notices = [*self.notices, *self.plugins.taken_problems()]
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
        self.subagents.children.clear()
        self.newest = Usage()
        self.folder_files.take_up(messages)

    def _notes(self) -> list[Message]:
        """What a shortened history needs again: instruction files of sub-folders, the checklist."""
        found: list[Message] = []
        for name, notes_of in (
            ("instruction files", self.folder_files.notes),
            ("checklist", partial(notes, self.agent.messages)),
        ):
            try:
                found += notes_of()
            except Exception as error:
                self.notices.append(
                    f"The {name} could not be read, and is left out: {type(error).__name__}: {error}."
                )
        return found


# ---- making it -----------------------------------------------------------------------------------


def build_app(
    settings: Settings,
    arguments: argparse.Namespace,
    can_ask: bool,
    files: Sequence[Instruction] | None = None,
) -> App:
    """The application as the flags want it. Raises ConfigError."""
    agents, notices = load_agents(config_folder() / "agents")
    name = arguments.agent or "build"
    if name not in (known := [each.name for each in choices(agents, "primary", "all")]):
        raise ConfigError(f"there is no agent {name!r}; there are {', '.join(known)}")
    try:
        permissions, remarks = _permissions(arguments, can_ask)
        hooks = command_hooks(config_folder() / "hooks.json")
    except (HooksError, RulesError) as error:
        raise ConfigError(str(error)) from None
    app = App(
        settings,
        arguments,
        permissions=permissions,
        agents=agents,
        hooks=hooks,
        sandbox=(sandbox := _sandbox(settings)),
        files=files,
    )
    app.notices += [
        *notices,
        *remarks,
        *unmatched_rules(permissions.rules + permissions.flags, app.kinds),
    ]
    app.notices += sandbox.notices if sandbox else []
    redact_logs(app.redactor)
    return app


def _sandbox(settings: Settings) -> Sandbox | None:
    """Raises ConfigError where there has to be one and cannot."""
    if settings.sandbox == "off":
        return None
    try:
        return Sandbox(
            Path.cwd(),
            required=settings.sandbox == "on",
            network=settings.network,
            config=config_folder(),
            data=data_folder(),
        )
    except SandboxError as error:
        raise ConfigError(f"--sandbox on: {error}") from None


def _permissions(arguments: argparse.Namespace, can_ask: bool) -> tuple[Permissions, list[str]]:
    """Those of the user's file, the flags and the folder, and remarks for the user. Raises RulesError."""
    rules = load_rules(config_folder() / "permissions.json")
    flags = [rule_of(text, action) for action, text in arguments.rules or []]
    workspace, remarks = load_workspace_rules(Path.cwd())
    permissions = Permissions(
        rules,
        flags=flags,
        workspace=workspace,
        private=[config_folder(), data_folder()],
        can_ask=can_ask,
        yolo=arguments.yolo,
    )
    return permissions, shadowed_rules([*rules, *flags]) + remarks


def tools_for(model: str) -> tuple[Tool, ...]:
    """The built-in tools as a model family knows them."""
    return PATCHING if model.rsplit("/", 1)[-1].lower().startswith("gpt-5") else TOOLS


def _temperature(spec: Callable[[], AgentSpec]) -> Hooks:
    """The temperature that an agent wants in each request."""

    def before_llm_call(request: Request) -> None:
        if (temperature := spec().temperature) is not None:
            request.options.setdefault("temperature", temperature)

    return FunctionHooks(before_llm_call=before_llm_call)


class SerializedHook(Hooks):
    """A hook of the user's that is never at work twice at a time, since sub-agents run in threads of their own. Its
    events are passed on between its turns, so that none waits for the other.

    Only the places named are passed on: a sub-agent's run belongs to that of its parent, so there the hook sees
    each request and each call, and not the run.
    """

    AROUND = ("before_llm_call", "after_llm_call", "before_tool_call", "after_tool_call")

    def __init__(
        self, hook: Hooks, lock: threading.RLock, places: Sequence[str] = HOOK_NAMES
    ) -> None:
        self.hook, self.lock = hook, lock
        for place in places:
            if implements(hook, place):
                setattr(self, place, partial(self._turn, getattr(hook, place)))

    def in_child(self) -> SerializedHook:
        """The same hook for the run of a sub-agent."""
        return SerializedHook(self.hook, self.lock, self.AROUND)

    def _turn(self, work: Callable[..., Any], *args: Any) -> Generator[Event, None, Any]:
        with self.lock:
            value = work(*args)
        if not isinstance(value, Generator):
            return value
        while True:
            try:
                with self.lock:
                    event = next(value)
            except StopIteration as end:
                return end.value
            yield event
