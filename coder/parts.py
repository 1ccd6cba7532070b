"""The parts of a session: what is loaded from the files of the user and of the project, and what is
started.

All is loaded once, when the session is opened. What is wrong with a file is a ConfigError or a
CoderError, in one line. What belongs to a module that was deleted is None, or empty.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from coder.agent.profiles import choices, load_agents
from coder.ai import ChatModel
from coder.permissions.permissions import Permissions
from coder.permissions.rules import (
    FLAG,
    KINDS,
    Rule,
    load_rules,
    load_workspace_rules,
    rules_of,
    useless_rules,
)
from coder.settings import (
    SETTINGS,
    ConfigError,
    Settings,
    config_folder,
    data_folder,
    needed,
    optional,
    value_of,
)
from coder.sources import load
from coder.tools import built_in
from coder.toolset import Tool, Toolset, tool

if TYPE_CHECKING:
    from coder.agent.instructions import Instruction
    from coder.devtools.trace import Trace
    from coder.extend.guard import Guard
    from coder.extend.mcp import Servers
    from coder.extend.plugins import Plugins
    from coder.extend.prompt_files import PromptFiles
    from coder.hooks import Hooks
    from coder.permissions.redact import Redactor
    from coder.permissions.sandbox import Sandbox
    from coder.providers.errors import RetryPolicy

parallel = optional("coder.agent.parallel")
user_tools = optional("coder.agent.user_tools")
ToolsetClass: type[Toolset] = parallel.ParallelTools if parallel else Toolset
TOOLS: tuple[Tool, ...] = built_in.TOOLS
# For models that are trained on apply_patch
PATCHING: tuple[Tool, ...] = built_in.PATCHING
if user_tools:
    TOOLS = (*TOOLS, user_tools.todo)
    PATCHING = (*PATCHING, user_tools.todo)
MADE_LATER = {"task", "ask_user"}  # tools, by name, that Crew makes


class Keywords(TypedDict, total=False):
    """The keywords of Session.open as a program gives them, for type checkers; docs/library.md says
    what they mean."""

    model: str | ChatModel
    agent: str
    resume: str | bool
    rules: Mapping[str, Any] | Sequence[Rule]
    sandbox: str
    ask: bool
    ask_timeout: float | None
    yolo: bool
    tools: Iterable[Tool | Callable[..., Any]]
    hooks: Sequence[Hooks]
    system: str
    append_system: str
    compaction: bool
    keep: bool
    one_task: bool
    settings: Settings | Mapping[str, str] | None
    config: str | Path | None
    data: str | Path | None
    retry: RetryPolicy | None
    servers: Servers | None
    trace: Trace | None


@dataclass(kw_only=True, eq=False)
class Options:
    """The Keywords as a session works with them: paths are real, settings and rules are read, and
    what was not given has its default."""

    cwd: Path
    settings: Settings
    config: Path
    data: Path
    model: ChatModel | None  # a program's own
    rules: Sequence[Rule]
    tools: Sequence[Tool]
    agent: str = ""
    resume: str | bool = ""
    hooks: Sequence[Hooks] = ()
    ask: bool = True
    ask_timeout: float | None = None
    yolo: bool = False
    system: str = ""
    append_system: str = ""
    compaction: bool = True
    keep: bool = True
    one_task: bool = False
    retry: RetryPolicy | None = None
    servers: Servers | None = None
    trace: Trace | None = None


def options_of(cwd: str | Path, keywords: Keywords) -> Options:
    """Read what the keywords name. Raises ConfigError and CoderError."""
    folder = Path(os.path.realpath(os.path.expanduser(cwd)))
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {cwd}")
    # The keywords that are no options, or not in this form: they are taken out of `given`
    given: dict[str, Any] = dict(keywords)
    config = given.pop("config", None)
    data = given.pop("data", None)
    model = given.pop("model", "")
    wanted_settings = given.pop("settings", None)
    sandbox = given.pop("sandbox", "")
    rules = given.pop("rules", ())
    functions = given.pop("tools", ())

    # What they name
    config_path = Path(os.path.realpath(config)) if config else config_folder()
    data_path = Path(os.path.realpath(data)) if data else data_folder()
    if not isinstance(model, str | ChatModel):
        raise ConfigError(
            "model is a name or a ChatModel; a model of your own goes into an Agent or run_loop"
        )
    settings = settings_of(folder, wanted_settings, model, sandbox, config_path)
    if isinstance(rules, Mapping):
        rules = rules_of(dict(rules), FLAG)
    tools = [one if isinstance(one, Tool) else tool(one) for one in functions]
    return Options(
        cwd=folder,
        settings=settings,
        config=config_path,
        data=data_path,
        model=model if isinstance(model, ChatModel) else None,
        rules=rules,
        tools=tools,
        **given,  # the others, as they are
    )


def settings_of(
    cwd: Path,
    given: Settings | Mapping[str, str] | None,
    model: str | ChatModel,
    sandbox: str,
    config: Path,
) -> Settings:
    """The settings of a session: loaded, or those given; with this model and sandbox, if they are
    not "". Raises ConfigError."""
    name = model if isinstance(model, str) else model.name
    if isinstance(given, Settings):
        found = copy.copy(given)
        found.model = name or found.model
        if sandbox:
            found.sandbox = value_of("CODER_SANDBOX", sandbox)
        return found
    texts = dict(given or {})
    unknown = texts.keys() - SETTINGS.keys()
    if unknown:
        raise ConfigError(f"there is no setting {min(unknown)}; `coder config` lists them")
    if name:
        texts["OPENAI_MODEL"] = name
    if sandbox:
        texts["CODER_SANDBOX"] = sandbox
    return load(cwd, texts, config, needs_server=isinstance(model, str))


class Parts:
    """What is loaded for a session. `notices` are lines that a person should see."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.cwd = options.cwd
        self.config = options.config
        self.settings = options.settings
        self.notices: list[str] = list(options.settings.notes)
        self.redaction = optional("coder.permissions.redact")
        self.redactor: Redactor | None = None
        if self.redaction:
            self.redactor = self.redaction.Redactor(*self.settings.keys)
        self.agents = load_agents(self.config / "agents", self.notices.append)
        self.primary = {spec.name: spec for spec in choices(self.agents, "primary", "all")}
        self.permissions = self._make_permissions()
        self.plugins: Plugins | None = None
        self.servers: Servers | None = None
        self.sandbox = self._make_sandbox()
        try:
            self._load_extensions()
            self._report_useless_rules()
            self.instructions = self._load_instructions()
            self.prompt_files = self._load_prompt_files()
        except BaseException:
            self.close()
            raise

    # -- loading

    def _make_permissions(self) -> Permissions:
        options = self.options
        workspace, remarks = load_workspace_rules(self.cwd)
        self.notices += remarks
        return Permissions(
            load_rules(self.config / "permissions.json"),
            flags=options.rules,
            workspace=workspace,
            private=[self.config, options.data],
            can_ask=options.ask,
            yolo=options.yolo,
        )

    def _make_sandbox(self) -> Sandbox | None:
        wanted = self.settings.sandbox
        name = "coder.permissions.sandbox"
        if wanted == "off":
            return None
        module = needed(name, "--sandbox on") if wanted == "on" else optional(name)
        if module is None:
            self.notices.append(f"Commands are not confined: {name} was deleted.")
            return None
        sandbox: Sandbox = module.Sandbox(
            self.cwd,
            required=wanted == "on",
            network=self.settings.sandbox_network,
            config=self.config,
            data=self.options.data,
            may_leave=self.options.ask or self.permissions.may_allow("unconfined"),
        )
        self.notices += sandbox.notices
        return sandbox

    def _load_extensions(self) -> None:
        """Load the user's hooks, plugins and MCP servers, and take the program's own tools.

        If there are any and their module was deleted, that is an error: a hook may be what keeps
        the model from something.
        """
        self.extra_tools: list[Tool] = list(self.options.tools)
        self.users_hooks: list[Guard] = []
        hooks = self.config / "hooks.json"
        if hooks.exists():
            self.users_hooks += needed("coder.extend.guard", str(hooks)).command_hooks(hooks)

        folder = self.config / "plugins"
        name = "coder.extend.plugins"
        module = needed(name, str(folder)) if folder.exists() else optional(name)
        if module:
            taken = {tool.name for tool in (*TOOLS, *PATCHING, *self.extra_tools)} | MADE_LATER
            plugins = module.Plugins(folder, taken, self.notices.append)
            self.plugins = plugins
            self.users_hooks += plugins.hooks
            self.extra_tools += plugins.tools

        file = self.config / "mcp.json"
        self.servers = self.options.servers
        if self.servers is None and file.exists():
            self.servers = needed("coder.extend.mcp", str(file)).Servers(file, self.cwd)

    def _report_useless_rules(self) -> None:
        """Say which rules never count: a kind may be that of a tool that was loaded."""
        kinds = {tool.kind for tool in (*TOOLS, *PATCHING, *self.extra_tools)}
        rules = self.permissions.rules + self.permissions.flags
        self.notices += useless_rules(rules, {*KINDS, "ask_user", *kinds})

    def _load_instructions(self) -> Sequence[Instruction]:
        module = optional("coder.agent.instructions")
        if module is None:
            return ()
        found: Sequence[Instruction]
        found = module.instructions(self.cwd, self.config, self.notices.append)
        return found

    def _load_prompt_files(self) -> PromptFiles | None:
        """Load commands and skills, if there are any.

        The model may read the user's skills unasked.
        """
        users = [self.config, *self._homes_of_skills()]
        projects = [self.cwd / name for name in (".coder", ".agents", ".claude")]
        if not any(_has_prompt_files(folder) for folder in users + projects):
            return None
        module = optional("coder.extend.prompt_files")
        if module is None:
            return None
        answers = self.options.data / "answers.json"
        files: PromptFiles = module.PromptFiles(users, projects, answers, self.notices.append)
        # Those of the project have a digest: the user is asked about their text
        own = [skill for skill in files.skills.values() if not skill.digest]
        folders = [os.path.realpath(skill.path.parent) for skill in own]
        rules = [Rule("external_directory", f"{folder}/*", "allow", "skills") for folder in folders]
        # In front of the user's own: the last rule that matches decides
        self.permissions.rules = rules + self.permissions.rules
        return files

    def _homes_of_skills(self) -> list[Path]:
        """Where other agents keep the user's skills."""
        if self.config != config_folder():  # the program wants its own files, not the user's
            return []
        homes = [Path(os.path.expanduser(home)) for home in ("~/.agents", "~/.claude")]
        return [home for home in homes if home.is_absolute()]

    def close(self) -> list[str]:
        """End what was started; returns what was changed after the last command."""
        if self.servers:
            self.servers.close()
        return self.sandbox.since() if self.sandbox else []

    # -- what a session does with them

    def redact(self, text: str) -> str:
        return self.redactor.text(text) if self.redactor else text

    def fill(self, prompt: str) -> str:
        """The text of a prompt that is /review or the command of a file, such as "/review HEAD".

        Any other prompt stays as it is. Raises ConfigError for a project's command that the user
        was not asked about.
        """
        if not prompt.startswith("/"):
            return prompt
        line, _, more = prompt.partition("\n")  # such as what came with it on stdin
        name = line.split()[0]
        words = line.removeprefix(name).strip()
        file = self.prompt_files.commands.get(name[1:]) if self.prompt_files else None
        if file and file.answer != "yes":
            raise ConfigError(f"{name} is this project's: a session has to ask about it first")
        if file:
            return f"{file.filled(words)}\n{more}".strip()
        if name == "/review":
            review = needed("coder.agent.instructions", "/review").review
            return f"{review(words)}\n{more}".strip()
        return prompt


def _has_prompt_files(folder: Path) -> bool:
    return (folder / "skills").is_dir() or (folder / "commands").is_dir()
