"""The policy: which actions are allowed, denied or asked about. It asks nobody and runs nothing.

Rules come from the user's configuration, the agent and flags, in this order, and the last that fits
decides; if none fits, what the tool declares (toolset.py), else a question. Four things can only
make that stricter: the built-in protections of paths, what the agent denies or asks about, the
rules of the workspace, and for a sub-agent all that holds for its parent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from coder.permissions.protected import protection
from coder.permissions.read_only import read_only
from coder.permissions.rules import (
    ALLOW,
    BUILT_IN,
    BUILT_IN_AGENT,
    FLAG,
    Decision,
    Rule,
    denies_all,
    denies_line,
    last_match,
    limits_reading,
    strictest,
)
from coder.permissions.shell import joined, parse
from coder.tool_definition import Default, Tool
from coder.tools.workspace import real

# The answer of a kind without a rule, if no tool of it is called; all other kinds ask
DEFAULTS = {tool.kind: tool.default for tool in BUILT_IN.values()}
# In a command, what may be the name of a file
NAME = r"[^\s'\"`=:;|&()<>{}$,@]+"
MAX_COMMAND = 10_000  # characters of a command that a pattern may allow: nobody reads a longer one


@dataclass(frozen=True, slots=True)
class Part:
    """A command of a line. `is_plain`: bash runs it as it is written; `is_free`: it only reads."""

    text: str
    is_plain: bool
    is_free: bool


class Policy:
    """Decides by `rules` of the user, `agent`'s, `flags` of the command line, and `workspace`'s.

    `private`: coder's own folders, which no edit touches unasked. `can_ask`: the user reads the
    events; else a question is denied. `yolo` answers yes to every question that is not
    `even_with_yolo`. `read_only`, as in plan mode: a command that is not known to only read runs in
    a sandbox that can write nothing, and asks only if a rule says so or if it names a secret.
    """

    def __init__(
        self,
        rules: Sequence[Rule] = (),
        *,
        agent: Sequence[Rule] = (),
        flags: Sequence[Rule] = (),
        workspace: Sequence[Rule] = (),
        private: Sequence[Path] = (),
        can_ask: bool = False,
        yolo: bool = False,
        read_only: bool = False,
    ) -> None:
        self.rules = list(rules)
        self.agent = list(agent)
        self.flags = list(flags)
        self.workspace = list(workspace)
        self.private = [real(folder) for folder in private]
        self.can_ask = can_ask
        self.yolo = yolo
        self.read_only = read_only
        self.parent: Self | None = None
        self.memory: list[Rule] = []  # what the user has allowed in this session
        self.known_tools: dict[str, Tool] = {}  # by name, also those that were not offered

    def child(self, agent: Sequence[Rule], read_only: bool = False) -> Self:
        """Make those of a sub-agent: its rules over the user's, and nothing that is denied here."""
        child = copy(self)
        child.agent = list(agent)
        child.parent = self
        child.read_only = read_only
        return child

    @property
    def changes_nothing(self) -> bool:
        """Is this agent, or one that it works for, read-only?"""
        return self.read_only or bool(self.parent and self.parent.changes_nothing)

    @property
    def layers(self) -> tuple[list[Rule], list[Rule], list[Rule]]:
        """The rules of which the last that fits decides; those of the agent and of the workspace,
        which only make that stricter.

        An agent's `ask` does not lift a deny, and a built-in agent's `allow` only limits what its
        own rules ask about or deny.
        """
        agent = [
            rule
            for rule in self.agent
            if rule.action != "ask" and not rule.source.startswith(BUILT_IN_AGENT)
        ]
        return [*self.rules, *agent, *self.flags], self.agent, self.workspace

    def decide(
        self,
        permission: str,
        text: str,
        cwd: Path,
        default: Default | None = None,
    ) -> Decision:
        """Decide on an action; `text` is the command or path that is acted on.

        `default`: what the tool declares for an action that no rule fits.
        """
        decision = self.decide_without_yolo(permission, text, cwd, default)
        if self.yolo and decision.action == "ask" and not decision.even_with_yolo:
            return replace(decision, action="allow")
        return decision

    def decide_without_yolo(
        self,
        permission: str,
        text: str,
        cwd: Path,
        default: Default | None = None,
    ) -> Decision:
        default = default or DEFAULTS.get(permission, "ask")
        if permission in ("bash", "unconfined"):
            own = self._decide_on_command(permission, text, cwd, default)
        else:
            own = self._decide_on_path(permission, text, cwd, default)
        if self.parent is None:
            return own
        parents = self.parent.decide_without_yolo(permission, text, cwd, default)
        return replace(strictest([own, parents]), is_confined=own.is_confined)

    def _decide_on_path(
        self,
        permission: str,
        text: str,
        cwd: Path,
        default: Default,
    ) -> Decision:
        """Decide on an action on one path, or on a call of a tool from elsewhere."""
        names = _names_of(permission, text, cwd)
        rule = last_match(permission, names, self.layers[0])
        decision = self._apply_layers(permission, names, rule, default)

        # A flag that names a path lifts its protection
        protected = protection(permission, text, self.private, cwd)
        is_named = rule is not None and rule.source == FLAG and bool(rule.pattern.strip("*?"))
        is_protected = bool(protected.reason) and not is_named
        if is_protected:
            decision = strictest([decision, protected])

        always = _always_pattern(permission, text, is_protected)
        if decision.action == "ask" and always and last_match(permission, names, self.memory):
            return ALLOW
        return replace(decision, always_pattern=always, reason=protected.reason)

    def _decide_on_command(
        self,
        permission: str,
        command: str,
        cwd: Path,
        default: Default,
    ) -> Decision:
        """Decide on a command line: the strictest decision on its parts."""
        if denies_line(command, self.layers):
            return Decision("deny")
        parts = self._parts_of(permission, command, cwd)
        if permission == "unconfined":
            return self._decide_outside(command, parts, default)
        is_confined = self.changes_nothing and not all(part.is_free for part in parts)
        if self._has_allowed(permission, command):
            return Decision("allow", is_confined=is_confined)
        decisions = [self._decide_on_part(permission, part, default) for part in parts]
        reason = ""
        if is_confined and self._names_closed_file(command, cwd):
            reason = "it names a file that may hold secrets"
            decisions.append(Decision("ask"))
        return replace(
            strictest(decisions),
            always_pattern=command,
            reason=reason,
            is_confined=is_confined,
        )

    def _decide_outside(self, command: str, parts: Sequence[Part], default: Default) -> Decision:
        """Decide on a command outside the sandbox: only a rule for `unconfined` or the user allows
        it, not -y, and nobody does if nothing may be changed.
        """
        if self.changes_nothing:
            return Decision("deny")
        if self._has_allowed("unconfined", command):
            return ALLOW
        decisions = [self._decide_on_part("unconfined", part, default) for part in parts]
        return replace(
            strictest(decisions),
            always_pattern=command,
            reason="it would run outside the sandbox",
            even_with_yolo=True,
        )

    def _has_allowed(self, permission: str, command: str) -> bool:
        """Tell whether the user has allowed exactly this line in this session."""
        whole_commands = [rule for rule in self.memory if rule.is_exact]
        return last_match(permission, [command], whole_commands) is not None

    def _parts_of(self, permission: str, command: str, cwd: Path) -> list[Part]:
        """The commands of a line; a line that is not plain, or that nobody reads, is one part."""
        plain = None
        if len(command) <= MAX_COMMAND:
            plain = parse(command)
        if not plain:
            return [Part(command, is_plain=False, is_free=False)]
        free = [False for _ in plain]
        if permission == "bash":
            is_limited = any(limits_reading(rules) for rules in self.layers)
            free = read_only(plain, cwd, self.is_closed, is_limited)
        return [Part(joined(argv), True, is_free) for argv, is_free in zip(plain, free)]

    def _decide_on_part(self, permission: str, part: Part, default: Default) -> Decision:
        rule = last_match(permission, [part.text], self.layers[0])
        if part.is_plain:
            decision = self._apply_layers(permission, [part.text], rule, default, part.is_free)
            if decision.action == "ask" and last_match(permission, [part.text], self.memory):
                return ALLOW
            return decision
        # A pattern may fit such a line and not what it runs
        if rule and rule.action == "allow":
            rule = None
        return self._apply_layers(permission, [part.text], rule, default)

    def _names_closed_file(self, command: str, cwd: Path) -> bool:
        """Tell whether a word of a command leads to a file that is not shown unasked.

        It is so for a command that is too long to be looked at.
        """
        if len(command) > MAX_COMMAND:
            return True
        names = {os.path.expanduser(word) for word in re.findall(NAME, command)}
        names |= {os.path.realpath(cwd / name) for name in names}
        return any(self.is_closed(name, cwd) for name in names)

    def _apply_layers(
        self,
        permission: str,
        names: Sequence[str],
        rule: Rule | None,
        default: Default,
        is_free: bool = False,
    ) -> Decision:
        """The decision of this rule of the first layer, or without one, if the other layers allow
        it.

        An agent's question stays one with -y, since a plan is to change nothing; it is lifted for
        an action that cannot change anything or `is_free`, needing no rule, and by a flag.
        """
        is_lifted = permission == "bash" and self.changes_nothing
        if rule:
            decisions = [Decision(rule.action)]
            is_lifted = is_lifted or rule.source == FLAG
        else:
            is_lifted = is_lifted or is_free
            decisions = [Decision("allow" if is_lifted else default)]
        limit = last_match(permission, names, self.workspace)
        if limit:
            decisions.append(Decision(limit.action))
        limit = last_match(permission, names, self.agent)
        if limit and not (is_lifted and limit.action == "ask"):
            decisions.append(Decision(limit.action, even_with_yolo=limit.action == "ask"))
        return strictest(decisions)

    def may_allow(self, permission: str) -> bool:
        """Tell whether a rule of the user's allows something of this kind without a question."""
        rules = [*self.rules, *self.flags]
        return any(rule.permission == permission and rule.action == "allow" for rule in rules)

    def is_closed(self, path: str, cwd: Path, is_asked: bool = False) -> bool:
        """Tell whether a file is not shown unasked; `is_asked`: by a search that is permitted."""
        decision = self.decide_without_yolo("read", path, cwd)
        if decision.action == "ask" and is_asked:
            return bool(decision.reason)
        return decision.action != "allow"

    def is_denied(self, tool: Tool) -> bool:
        """Tell whether a tool is denied whatever its arguments."""
        if tool.kind == "mcp":  # its rules are for names
            return self.decide_without_yolo("mcp", tool.name, Path()).action == "deny"
        if any(denies_all(tool.kind, rules) for rules in self.layers):
            return True
        return self.parent is not None and self.parent.is_denied(tool)


def _names_of(permission: str, text: str, cwd: Path) -> list[str]:
    """What a pattern may call that which is acted on.

    A path as it is written, absolute, or relative to the workspace, and a folder with a slash at
    its end, so that `folder/*` fits it as well.
    """
    names = [text]
    path = cwd / text
    if permission in ("read", "edit", "external_directory"):
        names.append(str(path))
        names.append(os.path.relpath(path, cwd))
    if permission == "external_directory":
        names.append(f"{path}/".replace("//", "/"))
    return names


def _always_pattern(permission: str, text: str, is_protected: bool) -> str:
    """What "always" means: all edits if none is protected, the folder outside, or just this."""
    if permission == "edit":
        return "" if is_protected else "*"
    if permission == "external_directory":
        folder = text if Path(text).is_dir() else Path(text).parent
        return f"{folder}/*".replace("//", "/")
    return text
