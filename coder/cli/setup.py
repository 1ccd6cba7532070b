"""What an application is made of: the built-in tools, the user's permissions, the sandbox, hooks and plugins.

All that is wrong with the user's files and flags is a ConfigError, in one line.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from coder.cli.config import config_folder, data_folder
from coder.cli.optional import needed, optional
from coder.cli.settings import ConfigError, Settings
from coder.permissions.permissions import Permissions
from coder.permissions.rules import (
    RulesError,
    load_rules,
    load_workspace_rules,
    rule_of,
)
from coder.tools.bash import bash
from coder.tools.edit import edit
from coder.tools.files import ls, read, write
from coder.tools.patch import apply_patch
from coder.tools.search import glob, grep
from coder.toolset import Tool, Toolset

if TYPE_CHECKING:
    from coder.extend.guard import Guard
    from coder.extend.plugins import Plugins
    from coder.permissions.sandbox import Sandbox

PARALLEL = optional("coder.agent.parallel")
TOOLSET: type[Toolset] = PARALLEL.ParallelTools if PARALLEL else Toolset
TODO = optional("coder.agent.todo")
READING = (bash, grep, glob, ls, *([TODO.todo] if TODO else []))
TOOLS = (read, write, edit, *READING)
PATCHING = (read, apply_patch, *READING)  # for the GPT-5 family, which is trained on it


def tools_for(model: str) -> tuple[Tool, ...]:
    """The built-in tools as a model family knows them."""
    return PATCHING if model.rsplit("/", 1)[-1].lower().startswith("gpt-5") else TOOLS


def open_sandbox(settings: Settings) -> Sandbox | None:
    """Raises ConfigError where there has to be one and cannot."""
    required = settings.sandbox == "on"
    load = partial(needed, purpose="--sandbox on") if required else optional
    module = None if settings.sandbox == "off" else load("coder.permissions.sandbox")
    if not module:
        return None
    folders = {"config": config_folder(), "data": data_folder()}
    try:
        sandbox: Sandbox = module.Sandbox(
            Path.cwd(), required=required, network=settings.sandbox_network, **folders
        )
    except module.SandboxError as error:
        raise ConfigError(f"--sandbox on: {error}") from None
    return sandbox


def load_extensions() -> tuple[Plugins | None, list[Guard]]:
    """The user's plugins, and all hooks of the user's. Raises ConfigError, also for those whose module was deleted:
    a hook may be what keeps the model from something."""
    folder, file = config_folder() / "plugins", config_folder() / "hooks.json"
    hooks: list[Guard] = []
    if file.exists():
        module = needed("coder.extend.command_hooks", str(file))
        try:
            hooks += module.command_hooks(file)
        except module.HooksError as error:
            raise ConfigError(str(error)) from None
    load = partial(needed, purpose=str(folder)) if folder.exists() else optional
    module = load("coder.extend.plugins")
    taken = {each.name for each in (*TOOLS, *PATCHING)} | {"task"}
    plugins: Plugins | None = module and module.load_plugins(folder, taken)
    hooks += plugins.hooks if plugins else []
    return plugins, hooks


def load_permissions(arguments: argparse.Namespace, can_ask: bool) -> tuple[Permissions, list[str]]:
    """Those of the user's file, the flags and the folder, and remarks for the user. Raises ConfigError."""
    try:
        rules = load_rules(config_folder() / "permissions.json")
        flags = [rule_of(text, action) for action, text in arguments.rules or []]
        workspace, remarks = load_workspace_rules(Path.cwd())
    except RulesError as error:
        raise ConfigError(str(error)) from None
    permissions = Permissions(
        rules,
        flags=flags,
        workspace=workspace,
        private=[config_folder(), data_folder()],
        can_ask=can_ask,
        yolo=arguments.yolo,
    )
    return permissions, remarks
