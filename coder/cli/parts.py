"""What a session is made of: settings, flags and the user's files, loaded once, at the start.

All that is wrong with them is a ConfigError, in one line. What belongs to a module that was deleted is None, or empty.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coder.agent.profiles import AgentSpec, load_agents, system_prompt
from coder.ai import FIRST_BYTE_TIMEOUT, ChatModel
from coder.cli.process import needed, optional
from coder.cli.settings import ConfigError, Settings, config_folder, data_folder, window_of
from coder.cli.signals import at_end
from coder.hooks import HookChain, Hooks
from coder.permissions.permissions import DEFAULTS, Permissions
from coder.permissions.rules import KINDS, Rule, load_rules, load_workspace_rules, useless_rules
from coder.tools.bash import bash
from coder.tools.edit import edit
from coder.tools.files import ls, read, write
from coder.tools.patch import apply_patch
from coder.tools.search import glob, grep
from coder.toolset import Tool, Toolset

if TYPE_CHECKING:
    from coder.agent.compaction import Compaction
    from coder.devtools.trace import Trace
    from coder.extend.guard import Guard
    from coder.extend.mcp import Servers
    from coder.extend.plugins import Plugins
    from coder.extend.prompt_files import PromptFiles
    from coder.permissions.sandbox import Sandbox

PARALLEL = optional("coder.agent.parallel")
TOOLSET: type[Toolset] = PARALLEL.ParallelTools if PARALLEL else Toolset
TODO = optional("coder.agent.todo")
READING = (bash, grep, glob, ls, *([TODO.todo] if TODO else []))
TOOLS = (read, write, edit, *READING)
PATCHING = (read, apply_patch, *READING)  # for the GPT-5 family, which is trained on it


class Parts:
    """`arguments` are the flags; `notices` are lines that the user should see at the next occasion. Raises ConfigError."""

    def __init__(self, settings: Settings, arguments: argparse.Namespace) -> None:
        self.settings, self.arguments, self.cwd = settings, arguments, Path.cwd()
        self.notices: list[str] = list(settings.notes)
        self.trace: Trace | None = arguments.trace
        self.redaction = optional("coder.permissions.redact")
        self.redactor = self.redaction and self.redaction.Redactor(*settings.keys)
        self.redact: Callable[[str], str] = self.redactor.text if self.redactor else str
        if self.redactor:
            self.redaction.redact_logs(self.redactor)
        self.agents, notices = load_agents(config_folder() / "agents")
        self.notices += notices
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
        self.sandbox = self._sandbox()
        self.extra_tools: list[Tool] = []  # the user's, beside ours
        self.users_hooks: list[Guard] = []
        self.plugins = self._load_extensions()
        self.servers: Servers | None = None
        if (path := config_folder() / "mcp.json").exists():
            self.servers = needed("coder.extend.mcp", str(path)).start(path)
            at_end.append(self.servers.close)
        module, note = optional("coder.agent.instructions"), self.notices.append
        self.files = module.instructions(self.cwd, config_folder(), note) if module else ()
        tools = [*TOOLS, *PATCHING, *self.extra_tools]
        names = (each.name for each in tools)
        kinds = [*DEFAULTS, "read", "task", "ask_user", *(KINDS.get(name, name) for name in names)]
        self.notices += useless_rules(self.permissions.rules + self.permissions.flags, kinds)
        self.prompt_files = self._prompt_files()

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

    def _load_extensions(self) -> Plugins | None:
        """Load the user's hooks, and plugins with their tools. Raises ConfigError, also where their module was deleted:
        a hook may be what keeps the model from something."""
        folder, file = config_folder() / "plugins", config_folder() / "hooks.json"
        if file.exists():
            self.users_hooks += needed("coder.extend.command_hooks", str(file)).command_hooks(file)
        name = "coder.extend.plugins"
        module = needed(name, str(folder)) if folder.exists() else optional(name)
        if not module:
            return None
        taken = {each.name for each in (*TOOLS, *PATCHING)} | {"task", "ask_user"}
        plugins: Plugins = module.Plugins(folder, taken, self.notices)
        self.users_hooks += plugins.hooks
        self.extra_tools += plugins.tools
        return plugins

    def _prompt_files(self) -> PromptFiles | None:
        """Load commands and skills, where there are any. Skills of the user's are read without a question."""
        homes = [Path(os.path.expanduser(each)) for each in ("~/.agents", "~/.claude")]
        users = [config_folder(), *filter(Path.is_absolute, homes)]
        projects = [self.cwd / name for name in (".coder", ".agents", ".claude")]
        places = [f"{each}/{name}" for each in users + projects for name in ("skills", "commands")]
        module = any(map(os.path.isdir, places)) and optional("coder.extend.prompt_files")
        if not module:
            return None
        files: PromptFiles = module.PromptFiles(users, projects, data_folder() / "answers.json")
        self.notices += files.problems
        self.permissions.rules[:0] = [
            Rule("external_directory", f"{os.path.realpath(each.path.parent)}/*", "allow", "skills")
            for each in files.skills.values()
            if not each.digest
        ]
        return files

    def filled(self, prompt: str) -> str:
        """A prompt that is a command of a file, such as "/review HEAD", as its text. Raises ConfigError."""
        line, _, more = prompt.partition("\n")  # such as stdin
        name, *words = line.split(maxsplit=1) if line.startswith("/") else [""]
        file = self.prompt_files and self.prompt_files.commands.get(name[1:])
        if file and file.answer != "yes":
            raise ConfigError(f"{name} is this project's: a session has to ask about it first")
        return f"{file.filled(''.join(words))}\n{more}".strip() if file else prompt

    # -- what an agent works with

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

    def hooks_for(
        self, model: ChatModel, permissions: Permissions, users: Sequence[Hooks]
    ) -> tuple[HookChain, Compaction | None]:
        """The hooks of an agent with this model, in their order, and the compaction, None where it is off or deleted.

        The run goes on without a feature that fails.
        """
        module = None if self.arguments.no_compaction else optional("coder.agent.compaction")
        prompt = self.agents["compaction"].prompt
        compaction = module and module.Compaction(model, prompt=prompt)
        guard = compaction and optional("coder.extend.guard")
        spared = guard.Guard(compaction, seconds=None) if guard else compaction
        redaction = self.redaction and self.redaction.Redaction(self.redactor)
        ours = filter(None, [self.sandbox, spared, redaction])
        hooks = HookChain(permissions, *users, *ours)
        return self.trace.hooks(hooks) if self.trace else hooks, compaction

    def tools_for(self, model: str) -> list[Tool]:
        """The tools that a model of this name gets: ours, and those of plugins and MCP servers."""
        is_gpt_5 = model.rsplit("/", 1)[-1].lower().startswith("gpt-5")
        tools = [*(PATCHING if is_gpt_5 else TOOLS), *self.extra_tools]
        tools += self.servers.tools() if self.servers else ()
        return self.sandbox.tools(tools) if self.sandbox else tools

    def prompt_for(self, model: ChatModel, spec: AgentSpec) -> str:
        """The system prompt of an agent: rules, place, instruction files, skills."""
        prompt = system_prompt(self.cwd, model.name, self.files, spec.prompt)
        skills = self.prompt_files.section if self.prompt_files else ""
        return f"{prompt}\n\n{skills}" if skills else prompt

    def left_behind(self) -> list[str]:
        """What commands in the background have changed since the last one, for the end of the session."""
        return self.sandbox.since() if self.sandbox else []
