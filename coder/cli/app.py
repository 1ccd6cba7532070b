"""The application: the library's Agent, and what the command line puts around it: settings, flags and the user's files.

The REPL and the one-shot mode are two ways to use it. All that is wrong with the files is a ConfigError, in one line.
What belongs to a module that was deleted is None, or empty.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coder.abort import Abort
from coder.agent.agent import Agent
from coder.agent.profiles import AgentSpec, choices, choose, load_agents, system_prompt
from coder.ai import FIRST_BYTE_TIMEOUT, ChatModel
from coder.cli.process import Interrupts, at_end, needed, optional
from coder.cli.settings import (
    ConfigError,
    Settings,
    client_of,
    config_folder,
    data_folder,
    keep_of,
    window_of,
)
from coder.events import Event, Events, Notice, RunEnd, StepEnd, hidden_usage
from coder.history import user
from coder.hooks import FunctionHooks, HookChain, Hooks
from coder.permissions.permissions import Permissions
from coder.permissions.rules import (
    KINDS,
    Rule,
    load_rules,
    load_workspace_rules,
    useless_rules,
)
from coder.providers.errors import RetryPolicy
from coder.tools.bash import bash
from coder.tools.edit import edit
from coder.tools.files import ls, read, write
from coder.tools.patch import apply_patch
from coder.tools.processes import adopt_orphans
from coder.tools.search import glob, grep
from coder.toolset import Tool, Toolset
from coder.types import Limits, Message, RunResult, T, Usage

if TYPE_CHECKING:
    from coder.agent.compaction import Compaction
    from coder.agent.subagent import Equipment, Subagents
    from coder.devtools.trace import Trace
    from coder.extend.guard import Guard
    from coder.extend.mcp import Servers
    from coder.extend.plugins import Plugins
    from coder.extend.prompt_files import PromptFiles
    from coder.permissions.sandbox import Sandbox

PARALLEL = optional("coder.agent.parallel")
TOOLSET: type[Toolset] = PARALLEL.ParallelTools if PARALLEL else Toolset
USER_TOOLS = optional("coder.agent.user_tools")
READING = (bash, grep, glob, ls, *([USER_TOOLS.todo] if USER_TOOLS else []))
TOOLS = (read, write, replace(edit, twin=apply_patch), *READING)
# For the GPT-5 family, which is trained on it
PATCHING = (read, replace(apply_patch, twin=edit), *READING)
NO_TASK = Rule("task", "*", "deny", "sub-agents call none")
PLAN_IS_OVER = "Plan mode is over: files can be changed now."
Show = Callable[[Event], None]


class App:
    """The Agent with its parts, and its state from one run to the next. Raises ConfigError.

    `arguments` are the flags; `notices` are lines that the user should see at the next occasion.
    """

    def __init__(self, settings: Settings, arguments: argparse.Namespace) -> None:
        self.settings, self.arguments, self.cwd = settings, arguments, Path.cwd()
        self.notices: list[str] = list(settings.notes)
        self.client = client_of(settings)
        self.usage, self.newest = Usage(), Usage()  # of the session; of the newest answer
        self.was_planning = False  # in the newest run of this conversation
        self.interrupts = Interrupts()
        self.trace: Trace | None = arguments.trace
        self.redaction = optional("coder.permissions.redact")
        self.redactor = self.redaction and self.redaction.Redactor(*settings.keys)
        self.redact: Callable[[str], str] = self.redactor.text if self.redactor else str
        if self.redactor:
            self.redaction.redact_logs(self.redactor)
        self.agents = load_agents(config_folder() / "agents", self.notices.append)
        workspace, remarks = load_workspace_rules(self.cwd)
        self.notices += remarks
        self.permissions = Permissions(
            load_rules(config_folder() / "permissions.json"),
            flags=arguments.rules or [],
            workspace=workspace,
            private=[config_folder(), data_folder()],
            can_ask=arguments.can_ask,
            yolo=arguments.yolo,
        )
        adopt_orphans()
        self.sandbox = self._make_sandbox()
        self._load_extensions()
        self._load_prompt_files()
        self.images = [image for _, image in arguments.image or ()]
        if names := ", ".join(f"{path} (image)" for path, _ in arguments.image or ()):
            self.notices.append(f"attached: {names}")
        self._make_agent()

    def _make_sandbox(self) -> Sandbox | None:
        wanted, name = self.settings.sandbox, "coder.permissions.sandbox"
        if wanted == "off":
            return None
        if not (module := needed(name, "--sandbox on") if wanted == "on" else optional(name)):
            self.notices.append(f"Commands are not confined: {name} was deleted.")
            return None
        sandbox: Sandbox = module.Sandbox(
            self.cwd,
            required=wanted == "on",
            network=self.settings.sandbox_network,
            config=config_folder(),
            data=data_folder(),
            may_leave=self.arguments.can_ask or self.permissions.may_allow("unconfined"),
        )
        self.notices += sandbox.notices
        return sandbox

    def _load_extensions(self) -> None:
        """Load the user's hooks, plugins and MCP servers. Raises ConfigError, also where their module was deleted: a hook may
        be what keeps the model from something."""
        self.extra_tools: list[Tool] = []  # the user's, beside the built-in ones
        self.users_hooks: list[Guard] = []
        self.plugins: Plugins | None = None
        self.servers: Servers | None = None
        names, note = {each.name for each in (*TOOLS, *PATCHING)}, self.notices.append
        if (path := config_folder() / "hooks.json").exists():
            self.users_hooks += needed("coder.extend.guard", str(path)).command_hooks(path)
        folder, name = config_folder() / "plugins", "coder.extend.plugins"
        if module := needed(name, str(folder)) if folder.exists() else optional(name):
            self.plugins = module.Plugins(folder, names | {"task", "ask_user"}, note)
            self.users_hooks += self.plugins.hooks
            self.extra_tools += self.plugins.tools
        if (path := config_folder() / "mcp.json").exists():
            self.servers = needed("coder.extend.mcp", str(path)).start(path)
            at_end.append(self.servers.close)
        tools = (*TOOLS, *PATCHING, *self.extra_tools)
        kinds = {*KINDS, "ask_user", *(each.kind for each in tools)}
        self.notices += useless_rules(self.permissions.rules + self.permissions.flags, kinds)

    def _load_prompt_files(self) -> None:
        """Load instructions; and commands and skills, where there are any. Those of the user's are read without a question."""
        module = optional("coder.agent.instructions")
        note = self.notices.append
        self.files = module.instructions(self.cwd, config_folder(), note) if module else ()
        self.prompt_files: PromptFiles | None = None
        homes = [Path(os.path.expanduser(each)) for each in ("~/.agents", "~/.claude")]
        users = [config_folder(), *filter(Path.is_absolute, homes)]
        projects = [self.cwd / name for name in (".coder", ".agents", ".claude")]
        places = [f"{each}/{name}" for each in users + projects for name in ("skills", "commands")]
        module = any(map(os.path.isdir, places)) and optional("coder.extend.prompt_files")
        if not module:
            return
        answers = data_folder() / "answers.json"
        files: PromptFiles = module.PromptFiles(users, projects, answers, note)
        self.prompt_files = files
        self.permissions.rules[:0] = [
            Rule("external_directory", f"{os.path.realpath(each.path.parent)}/*", "allow", "skills")
            for each in files.skills.values()
            if not each.digest
        ]

    def _make_agent(self) -> None:
        settings = self.settings
        self.limits = Limits(max_steps=settings.max_steps, max_seconds=settings.max_seconds)
        self.retry = RetryPolicy(base=settings.retry_base)
        module = optional("coder.agent.subagent")
        specs = choices(self.agents, "subagent", "all")
        limits = {"limits": self.limits, "retry": self.retry}
        self.subagents: Subagents | None = module and module.Subagents(specs, self.equip, **limits)
        self.primary = {each.name: each for each in choices(self.agents, "primary", "all")}
        spec = choose(self.agents, self.arguments.agent or "build")
        self.chosen = settings.model
        model = self.chat_model(spec.model or self.chosen)
        hooks, self.compaction = self.hooks_for(model, self.permissions, self.users_hooks)
        waiting = [FunctionHooks(on_run_start=self._take_servers)] if self.servers else []
        self.agent = Agent(
            model,
            reasoning=settings.reasoning,
            hooks=[hooks, *waiting],
            retry=self.retry,
            cwd=self.cwd,
            session_id=os.urandom(8).hex(),
        )
        self.agent.subscribe(self._count_usage)
        if self.plugins:
            self.agent.subscribe(self.plugins.notify)
        self.work_as(spec.name, model)

    # -- what an agent works with

    def chat_model(self, name: str) -> ChatModel:
        """A model of the server."""
        settings, idle = self.settings, self.settings.idle_timeout
        if (first := settings.first_byte_timeout) is None:
            first = max(FIRST_BYTE_TIMEOUT, idle) if idle else 0
        server: dict[str, Any] = {"client": self.client}
        if self.client is None:
            server = {"base_url": settings.base_url, "api_key": settings.api_key}
        return ChatModel(
            name,
            context_window=settings.context_window or window_of(name),
            idle_timeout=idle,
            first_byte_timeout=first,
            extra_body=settings.extra_body,
            headers=settings.headers,
            profile=settings.profile,
            price=settings.price_of(name),
            redact=self.redactor.data if self.redactor else None,
            **server,
        )

    def model_of(self, spec: AgentSpec) -> ChatModel:
        """The model of an agent that works beside this one: its own, or the present one."""
        model = self.chat_model(spec.model or self.model.name)
        if self.trace:
            self.trace.attach(model)
        return model

    def hooks_for(
        self, model: ChatModel, permissions: Permissions, users: Sequence[Hooks]
    ) -> tuple[HookChain, Compaction | None]:
        """The hooks of an agent with this model, in their order, and the compaction, None where it is off or deleted."""
        module = None if self.arguments.no_compaction else optional("coder.agent.compaction")
        spec = self.agents["compaction"]
        writer = self.model_of(spec) if spec.model else None
        given = {"prompt": spec.prompt, "writer": writer, "keep": keep_of(model.context_window)}
        compaction = module and module.Compaction(model, **given)
        guard = compaction and optional("coder.extend.guard")
        spared = guard.Guard(compaction, seconds=None) if guard else compaction  # may fail
        redaction = self.redaction and self.redaction.Redaction(self.redactor)
        instructions = optional("coder.agent.instructions")
        folders = instructions and instructions.FolderInstructions(self.cwd)
        parts = filter(None, [self.sandbox, folders, spared, redaction])
        hooks = HookChain(permissions, *users, *parts)
        return self.trace.hooks(hooks) if self.trace else hooks, compaction

    def tools_for(self, model: str, read_only: bool) -> list[Tool]:
        """The tools that a model of this name gets: the built-in ones, and those of plugins and MCP servers."""
        is_gpt_5 = model.rsplit("/", 1)[-1].lower().startswith("gpt-5")
        tools = [*(PATCHING if is_gpt_5 else TOOLS), *self.extra_tools]
        tools += self.servers.tools() if self.servers else ()
        return self.sandbox.tools(tools, read_only) if self.sandbox else tools

    def prompt_for(self, model: ChatModel, spec: AgentSpec) -> str:
        """The system prompt of an agent: rules, place, instruction files, skills."""
        # A sub-agent never asks, and its own prompt says so
        is_alone = not self.arguments.can_ask and spec.mode != "subagent"
        prompt = system_prompt(self.cwd, model.name, self.files, spec.prompt, is_alone)
        skills = self.prompt_files.section if self.prompt_files else ""
        return f"{prompt}\n\n{skills}" if skills else prompt

    def equip(self, spec: AgentSpec, session_id: str) -> Equipment:
        """What a sub-agent works with: it may do nothing that this agent may not."""
        from coder.agent.subagent import Equipment

        model = self.model_of(spec)
        permissions = self.permissions.child([*spec.rules, NO_TASK], spec.read_only)
        users = [each.in_child() for each in self.users_hooks]
        tools = permissions.offered(self.tools_for(model.name, permissions.changes_nothing))
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
        self.permissions.read_only = self.spec.read_only
        self.permissions.memory.clear()  # permission was given to the agent that asked
        steps = self.spec.max_steps or self.settings.max_steps
        self.agent.limits = replace(self.limits, max_steps=steps)
        self.use(model or self.chat_model(self.spec.model or self.chosen))

    def use(self, model: ChatModel) -> None:
        """Continue with another model: a tool is offered by the model's name."""
        agent, seen = self.agent, self.agent.state.tools.seen
        self.model = model
        if self.compaction:
            self.compaction.model = model
            self.compaction.keep = keep_of(model.context_window)
        agent.set_model(model)
        self.set_prompt()
        own = [self.subagents.tool] if self.subagents else []  # not for sub-agents
        if self.arguments.can_ask and USER_TOOLS:
            own.append(USER_TOOLS.ask_user)
        given = self.tools_for(model.name, self.spec.read_only)
        tools = self.permissions.offered([*given, *own])
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
        # One that is late has its tools in a later run, which one task has not
        yield from self.servers.wait(abort, 60 if self.arguments.one_task else 20)
        tools = self.permissions.offered(self.servers.tools())
        yield from self.servers.check_size(tools)
        self.agent.state.tools.tools |= {each.name: each for each in tools}

    def adopt(self, messages: list[Message], session_id: str) -> None:
        """Continue with this conversation; the list itself is the agent's from now on."""
        self.agent.state.messages = messages
        self.agent.session_id = session_id
        self.agent.state.tools.seen.clear()
        self.permissions.memory.clear()
        self.newest = Usage()
        self.was_planning = False
        if self.subagents:
            self.subagents.children.clear()

    # -- runs

    def stream(self, prompt: str, images: Sequence[dict[str, Any]] = ()) -> Events[RunResult]:
        """One run, to be followed. The first one has the images of the command line, too."""
        images, self.images = [*self.images, *images], []
        # However it was left: what was denied in it still stands in the conversation
        if self.was_planning and not self.spec.read_only:
            message = user(PLAN_IS_OVER)
            message["meta"]["own"] = True  # it stays when the run is taken back
            self.agent.messages.append(message)
        self.was_planning = self.spec.read_only
        run = self.agent.stream(self.redact(prompt), images)
        return self.trace.watch(run) if self.trace else run

    def compact(self, focus: str, show: Show) -> bool:
        """Summarise the history now. Raises KeyboardInterrupt, Aborted, and ConfigError where that is off."""
        if (compaction := self.compaction) is None:
            raise ConfigError("compaction is off (--no-compaction), or its module was deleted")
        messages = self.agent.messages
        run = self.agent.follow(lambda abort: compaction.compact(messages, abort, focus))
        return self.follow(run, show)

    def sum_up(self, show: Show) -> str:
        """What happened in the conversation. Raises KeyboardInterrupt, Aborted, ModelError, and ConfigError."""
        module, spec = needed("coder.agent.compaction", "/summary"), self.agents["summary"]
        model, messages = self.model_of(spec), self.agent.messages
        if not messages:
            raise ConfigError("there is nothing to sum up")
        run = self.agent.follow(lambda abort: module.sum_up(model, messages, abort, spec.prompt))
        text: str = self.follow(run, show)
        return text

    def follow(self, events: Events[T], show: Show) -> T:
        """Show the events, and notices that come up, to the end; signals stop the work. Raises KeyboardInterrupt."""
        with self.interrupts.stopping(self.agent.token), contextlib.closing(events):
            while True:
                try:  # by hand, without Returning: no frame more for each token
                    event = next(events)
                except StopIteration as end:
                    result: T = end.value
                    return result
                while self.notices:
                    show(Notice(self.notices.pop(0)))
                show(event)

    def _count_usage(self, event: Event) -> None:
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

    def left_behind(self) -> list[str]:
        """What commands in the background have changed since the last one, for the end of the session."""
        return self.sandbox.since() if self.sandbox else []
