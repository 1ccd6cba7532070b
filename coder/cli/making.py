"""Making a session of flags, settings and the user's files: permissions, agents, hooks, plugins, sandbox, memory.

All that is wrong with them is a ConfigError, in one line.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from coder.agent.profiles import choices, load_agents
from coder.cli.config import ConfigError, Settings, config_folder, data_folder
from coder.cli.kit import PATCHING, TOOLS
from coder.cli.memory import Memory
from coder.cli.session import Session
from coder.extend.command_hooks import HooksError, command_hooks
from coder.extend.plugins import load_plugins
from coder.permissions.permissions import Permissions
from coder.permissions.redact import redact_logs
from coder.permissions.rules import RulesError, dead, load_rules, rule_of, tightening, unknown
from coder.permissions.sandbox import Sandbox, SandboxError
from coder.sessions.database import MEMORY
from coder.sessions.store import StoreError, open_store


def session_of(settings: Settings, arguments: argparse.Namespace, can_ask: bool) -> Session:
    """A session as the flags want it. Raises ConfigError."""
    agents, notices = load_agents(config_folder() / "agents")
    name = arguments.agent or "build"
    if name not in (known := [each.name for each in choices(agents, "primary", "all")]):
        raise ConfigError(f"there is no agent {name!r}; there are {', '.join(known)}")
    try:
        permissions, told = _permissions(arguments, can_ask)
        hooks = command_hooks(config_folder() / "hooks.json")
    except (HooksError, RulesError) as error:
        raise ConfigError(str(error)) from None
    plugins = load_plugins(
        config_folder() / "plugins", {each.name for each in (*TOOLS, *PATCHING)} | {"task"}
    )
    sandbox = _sandbox(settings)
    session = Session(
        settings,
        Path.cwd(),
        permissions,
        agents=agents,
        agent=name,
        system=arguments.system_prompt,
        extra=arguments.append_system_prompt,
        hooks=hooks,
        plugins=plugins,
        sandbox=sandbox,
        trace=arguments.trace,
    )
    session.notices += [
        *notices,
        *told,
        *unknown(permissions.rules + permissions.flags, session.kinds),
    ]
    session.notices += sandbox.notices if sandbox else []
    redact_logs(session.redactor)
    return session


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
    """Those of the user's file, the flags and the folder, and what a person should know of them. Raises RulesError."""
    rules = load_rules(config_folder() / "permissions.json")
    flags = [rule_of(text, action) for action, text in arguments.rules or []]
    workspace, told = tightening(Path.cwd())
    return Permissions(
        rules,
        flags=flags,
        workspace=workspace,
        private=[config_folder(), data_folder()],
        can_ask=can_ask,
        yolo=arguments.yolo,
    ), dead([*rules, *flags]) + told


def memory_of(
    session: Session, arguments: argparse.Namespace, *, titles: bool = False, one_task: bool = False
) -> Memory:
    """The session's memory: a new conversation, or the one that -c or -r names. Raises ConfigError."""
    if arguments.no_session and (arguments.continue_ or arguments.resume):
        flag = "-r" if arguments.resume else "-c"
        raise ConfigError(f"--no-session and {flag} exclude each other: give one of them")
    store, notice = open_store(MEMORY if arguments.no_session else data_folder() / "sessions.db")
    session.notices += [notice] if notice else []
    memory = Memory(session, store, data_folder(), titles=titles, one_task=one_task)
    try:
        if arguments.resume:
            memory.resume(arguments.resume)
        elif arguments.continue_ and (newest := memory.latest()):
            memory.resume(newest.id)
        elif arguments.continue_:
            raise ConfigError("there is no conversation of this folder to continue")
        if arguments.agent:
            session.work_as(arguments.agent)
    except (StoreError, ConfigError) as error:
        memory.close()
        raise ConfigError(str(error)) from None
    return memory
