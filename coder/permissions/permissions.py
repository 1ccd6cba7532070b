"""Permissions: the hook that allows, denies or asks about what a tool is going to do.

    Permissions(rules_of({"bash": {"pytest *": "allow"}, "edit": "allow"}), can_ask=True)

Rules come from the user's configuration, the agent and flags, in this order, and the last that fits
decides; where none fits, what the tool declares (toolset.py), else a question. Four things can only make that stricter: the built-in
protections of paths, what the agent denies or asks about, the rules of the workspace, and for
a sub-agent all that holds for its parent.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import unicodedata
from collections.abc import Generator, Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath

from coder.events import DoomLoop, Event, Outcome, PermissionAsked, PermissionReplied
from coder.hooks import Hooks
from coder.permissions.read_only import read_only
from coder.permissions.rules import (
    ALLOW,
    BUILT_IN,
    BUILT_IN_AGENT,
    FLAG,
    KINDS,
    Decision,
    Rule,
    denies_all,
    denies_line,
    last_match,
    limits_reading,
    strictest,
)
from coder.permissions.shell import joined, parse
from coder.providers.text import new_id
from coder.tools.secrets import holds_secrets
from coder.toolset import Default, Tool, ToolContext
from coder.types import DeniedError, ToolCall, ToolResult

# What holds without a rule where no tool of the kind is called; of all other kinds a question
DEFAULTS = {each.kind: each.default for each in BUILT_IN.values()}
# In a command, what may be the name of a file
NAME = re.compile(r"[^\s'\"`=:;|&()<>{}$,@]+")
NOT_CONFINED = (
    "plan mode changes nothing, and this command is not known to only read. It could run in a sandbox "
    "that can write nothing, but there is none here: it needs Linux with Landlock and seccomp, and no "
    "--sandbox off."
)
# What plan mode denies by itself, by the kind of permission
PLAN_DENIES = {
    "edit": "plan mode changes no file. The user ends it.",
    "unconfined": "in plan mode no command runs outside the sandbox. The user ends it.",
}
MAX_COMMAND = 10_000  # characters of a command that a pattern may allow: nobody reads a longer one


class Permissions(Hooks):
    """Decides with `rules` of the user, `agent`'s, `flags` of the command line, and `workspace`'s.

    `private`: coder's own folders, which no edit touches unasked. `can_ask`: the user reads the
    events; else a question is denied. `yolo` answers yes to every question that is not
    `even_with_yolo`. `read_only`, as in plan mode: a command that is not known to only read runs in a
    sandbox that can write nothing, and asks only where a rule says so or where it names a secret.
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
        self.rules, self.agent = list(rules), list(agent)
        self.flags, self.workspace = list(flags), list(workspace)
        self.private = [Path(os.path.realpath(folder)) for folder in private]
        self.can_ask, self.yolo = can_ask, yolo
        self.read_only = read_only
        self.parent: Permissions | None = None
        self.memory: list[Rule] = []  # what the user has allowed in this session
        self._known_tools: dict[str, Tool] = {}  # by name, also those that were not offered

    def child(self, agent: Sequence[Rule], read_only: bool = False) -> Permissions:
        """Make those of a sub-agent: its rules over the user's, and nothing that is denied here."""
        made = copy(self)
        made.agent, made.parent, made.read_only = list(agent), self, read_only
        return made

    @property
    def changes_nothing(self) -> bool:
        """Is this agent, or one that it works for, read-only?"""
        return self.read_only or bool(self.parent and self.parent.changes_nothing)

    @property
    def layers(self) -> tuple[list[Rule], list[Rule], list[Rule]]:
        """The rules of which the last that fits decides; those of the agent and of the workspace,
        which only make that stricter. An agent's `ask` does not lift a deny, and a built-in agent's
        `allow` only says what its own rules do not mean."""
        agent = [
            rule
            for rule in self.agent
            if rule.action != "ask" and not rule.source.startswith(BUILT_IN_AGENT)
        ]
        return [*self.rules, *agent, *self.flags], self.agent, self.workspace

    # -- deciding

    def decide(
        self, permission: str, text: str, cwd: Path, default: Default | None = None
    ) -> Decision:
        """Decide on an action; `text` is the command or path that is acted on.

        `default`: what the tool declares for where no rule fits.
        """
        judged = self.judge(permission, text, cwd, default)
        is_question = judged.action == "ask" and not judged.even_with_yolo
        return replace(judged, action="allow") if is_question and self.yolo else judged

    def judge(
        self, permission: str, text: str, cwd: Path, default: Default | None = None
    ) -> Decision:
        """The same without -y."""
        default = default or DEFAULTS.get(permission, "ask")
        is_command = permission in ("bash", "unconfined")
        judge = self._judge_command if is_command else self._judge_path
        judged = [judge(permission, text, cwd, default)]
        if self.parent:
            judged.append(self.parent.judge(permission, text, cwd, default))
        return replace(strictest(judged), is_confined=judged[0].is_confined)

    def _judge_path(self, permission: str, text: str, cwd: Path, default: Default) -> Decision:
        """Judge an action on one path, or a tool from elsewhere.

        A pattern may mean a path as given, absolute or relative to the workspace, and a folder with
        a slash behind it, so that `folder/*` fits it as well. "Always" means all edits, the folder
        outside, else exactly this.
        """
        place, names, pattern = cwd / text, [text], text
        if permission in ("read", "edit", "external_directory"):
            names += [str(place), os.path.relpath(place, cwd)]
        if permission == "edit":
            pattern = "*"
        elif permission == "external_directory":
            names.append(f"{place}/".replace("//", "/"))
            pattern = f"{text if Path(text).is_dir() else Path(text).parent}/*".replace("//", "/")
        rule = last_match(permission, names, self.layers[0])
        found = self._answer(permission, names, rule, default)
        reason, even_with_yolo = _protected(permission, text, self.private, cwd)
        if reason and not (rule and rule.source == FLAG and rule.pattern.strip("*?")):
            pattern = "" if permission == "edit" else text
            found = strictest([found, Decision("ask", even_with_yolo=even_with_yolo)])
        if found.action == "ask" and pattern and last_match(permission, names, self.memory):
            return ALLOW
        return replace(found, always_pattern=pattern, reason=reason)

    def _judge_command(
        self, permission: str, command: str, cwd: Path, default: Default
    ) -> Decision:
        """Judge a command line: the strictest answer of its parts.

        Outside the sandbox ("unconfined") only a rule that names it or the user allows, not -y, and
        where nothing may be changed nobody.
        """
        outside = permission == "unconfined"
        if denies_line(command, self.layers) or (outside and self.changes_nothing):
            return Decision("deny")
        plain = parse(command) if len(command) <= MAX_COMMAND else None
        texts = [joined(argv) for argv in plain] if plain else [command]
        free, answers = [False] * len(texts), []
        if plain and not outside:
            free = read_only(plain, cwd, self._is_closed, any(map(limits_reading, self.layers)))
        is_confined = self.changes_nothing and not all(free)
        if last_match(permission, [command], [rule for rule in self.memory if rule.is_exact]):
            return Decision("allow", is_confined=is_confined)
        for text, is_free in zip(texts, free):
            rule = last_match(permission, [text], self.layers[0])
            if rule and rule.action == "allow" and not plain:
                rule = None
            found = self._answer(permission, [text], rule, default, is_free)
            is_known = found.action == "ask" and last_match(permission, [text], self.memory)
            answers.append(ALLOW if plain and is_known else found)
        reason = "it would run outside the sandbox" if outside else ""
        if is_confined and self._names_closed_file(command, cwd):
            reason = "it names a file that may hold secrets"
            answers.append(Decision("ask"))
        found = replace(strictest(answers), always_pattern=command, is_confined=is_confined)
        return replace(found, reason=reason, even_with_yolo=found.even_with_yolo or outside)

    def _names_closed_file(self, command: str, cwd: Path) -> bool:
        """Tell whether a word of a command leads to a file that is not shown unasked.

        So it is of a command that is too long to be looked at.
        """
        names = {os.path.expanduser(word) for word in NAME.findall(command[:MAX_COMMAND])}
        names |= {os.path.realpath(cwd / name) for name in names}
        return len(command) > MAX_COMMAND or any(self._is_closed(name, cwd) for name in names)

    def _answer(
        self,
        permission: str,
        names: Sequence[str],
        rule: Rule | None,
        default: Default,
        is_free: bool = False,
    ) -> Decision:
        """The answer where this rule of the first layer decides, or none.

        An agent's question stays one under -y, since a plan is to change nothing, but not where
        the action `is_free`, needing no rule, or a flag decides.
        """
        reads_only = permission == "bash" and self.changes_nothing  # it cannot change anything
        without_rule = "allow" if is_free or reads_only else default
        found = [Decision(rule.action if rule else without_rule)]
        if limit := last_match(permission, names, self.workspace):
            found.append(Decision(limit.action))
        is_lifted = reads_only or (rule.source == FLAG if rule else is_free)
        limit = last_match(permission, names, self.agent)
        if limit and not (is_lifted and limit.action == "ask"):
            found.append(Decision(limit.action, even_with_yolo=limit.action == "ask"))
        return strictest(found)

    # -- what the tools and the loop ask

    def authorize(
        self,
        ctx: ToolContext,
        permission: str,
        patterns: Sequence[str],
        detail: str,
        answered: str = "",
    ) -> Generator[Event, None, bool]:
        """Return if allowed, with whether the user was asked. Raises DeniedError.

        `answered`: the permission that the user has already given for this call.
        """
        default = ctx.tool.default if ctx.tool and permission == ctx.tool.kind else None
        decided = [self.decide(permission, each, ctx.cwd, default) for each in patterns]
        decision = strictest(decided)
        targets = ", ".join(patterns)
        if decision.action == "deny":
            rules = f"a rule denies {permission} {targets}. Do not try it another way."
            raise DeniedError(self._plans_denial(permission) or rules)
        if decision.is_confined and not getattr(ctx.confine, "read_only", False):
            raise DeniedError(NOT_CONFINED)
        if decision.action == "allow" or permission == answered:
            return False
        if not self.can_ask:
            raise DeniedError(_denial(permission, decision))
        asked = PermissionAsked(
            new_id(),
            permission,
            pattern=targets,
            remember=decision.always_pattern,
            detail=detail,
            why=decision.reason,
            call_id=ctx.call_id,
        )
        yield asked
        yield PermissionReplied(asked.id, asked.answer)
        ctx.abort.check()  # Ctrl+C at the question stops the run
        if asked.answer == "no" and asked.reason:  # the user may have named another way
            raise DeniedError(f"the user refused and wrote: {asked.reason}")
        if asked.answer == "no":
            raise DeniedError("the user refused. Do not try it another way.")
        if asked.answer == "always" and decision.always_pattern:
            self._remember(asked, decision.always_pattern)
        return True

    def _remember(self, asked: PermissionAsked, shown: str) -> None:
        """Allow from now on what "always" means: the pattern that was shown, or one of the user's own."""
        is_path = asked.permission in ("edit", "external_directory")
        is_exact = asked.remember == shown and not is_path
        rule = Rule(asked.permission, asked.remember, "allow", "you, this session", is_exact)
        self.memory.append(rule)

    def _plans_denial(self, kind: str) -> str:
        """Say that it is the plan which denies this kind of action; "" if it is not."""
        return PLAN_DENIES.get(kind, "") if self.changes_nothing else ""

    def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> Outcome[ToolResult | None]:
        ctx.authorize = self.authorize
        ctx.read_only = self.changes_nothing
        ctx.secret = partial(self._is_closed, cwd=ctx.cwd)
        tool = ctx.tool or self._known_tools.get(call.name)
        if tool and self.denied(tool):
            rules = f"a rule denies the tool {call.name}."
            raise DeniedError(self._plans_denial(tool.kind) or rules)
        if ctx.tool and not ctx.tool.asks_itself:  # one that is not there runs nothing
            yield from self._ask_about(call, ctx, ctx.tool)
        return None

    def _ask_about(
        self, call: ToolCall, ctx: ToolContext, tool: Tool
    ) -> Generator[Event, None, None]:
        """Ask about a call of a tool that does not ask by itself. Raises DeniedError."""
        arguments = call.arguments or {}
        text, detail = json.dumps(arguments, ensure_ascii=False), ""
        if tool.kind == "mcp":
            text, detail = tool.name, json.dumps(arguments, ensure_ascii=False, indent=2)
        elif tool.kind == "read":
            text = str(arguments.get("path") or ".")
            is_asked = self.judge("read", text, ctx.cwd, tool.default).action == "ask"
            ctx.secret = partial(self._is_closed, cwd=ctx.cwd, is_asked=is_asked)
        if (yield from self.authorize(ctx, tool.kind, [text], detail)):
            ctx.authorize = partial(self.authorize, answered=tool.kind)

    def _is_closed(self, path: str, cwd: Path, is_asked: bool = False) -> bool:
        """Tell whether a file is not shown unasked; `is_asked`: by a search that is permitted."""
        found = self.judge("read", path, cwd)
        is_open = found.action == "ask" and is_asked and not found.reason
        return found.action != "allow" and not is_open

    def on_doom_loop(self, event: DoomLoop) -> Outcome[bool]:
        """Let a rule decide, or the user."""
        action = self.judge("doom_loop", event.name, Path()).action
        if action == "ask" and self.can_ask:
            yield event
            return event.allowed
        return action == "allow"

    def may_allow(self, permission: str) -> bool:
        """Tell whether a rule of the user's allows something of this kind without a question."""
        rules = [*self.rules, *self.flags]
        return any(rule.permission == permission and rule.action == "allow" for rule in rules)

    # -- which tools are offered

    def denied(self, tool: Tool) -> bool:
        """Tell whether a tool is denied whatever its arguments."""
        if tool.kind == "mcp":  # its rules are for names
            return self.judge("mcp", tool.name, Path()).action == "deny"
        here = any(denies_all(tool.kind, rules) for rules in self.layers)
        return here or bool(self.parent and self.parent.denied(tool))

    def offered(self, tools: Iterable[Tool]) -> list[Tool]:
        """The tools that a model gets."""
        given = list(tools)
        self._known_tools |= {tool.name: tool for tool in given}
        return [tool for tool in given if not self.denied(tool)]


def _denial(permission: str, decision: Decision) -> str:
    """Say, where no user can be asked, how the user can allow it, for the model to pass on."""
    pattern = decision.always_pattern
    if decision.even_with_yolo:
        way = "only the user can do it, or allow it in a session."
    else:
        rules = [pattern] if pattern else []
        if permission not in KINDS:  # the pattern holds all arguments
            rules = ["*"]
        elif permission == "bash":  # a pattern is for one command of a line, and its stars are none
            plain = None if re.search("[*?]", pattern) else parse(pattern)
            rules = list(map(joined, plain or ()))
        flags = "".join(f" --allow {shlex.quote(f'{permission}:{rule}')}" for rule in rules)
        way = f"-y allows it, or{flags}." if flags else "-y allows it."
    why = f" ({decision.reason})" if decision.reason else ""
    end = "Do not try another way: say in your answer that you need it."
    return f"{permission} needs permission{why}, and no user can be asked here; {way} {end}"


# ---- protected paths -----------------------------------------------------------------------------

# Files from which a later command, another program or coder itself takes orders.
EVEN_WITH_YOLO = {".git", ".coder"}  # what a command changes there is undone, so -y allows no edit
FOLDERS = EVEN_WITH_YOLO | {".vscode", ".idea", ".zed", ".devcontainer", ".agents", ".claude"}
FOLDERS |= {".cursor", ".husky", ".ssh", "autostart"}
FILES = re.compile(
    r"agents(\.override)?\.md|claude(\.local)?\.md|gemini\.md|copilot-instructions\.md|config\.fish"
    r"|\.(cursorrules|windsurfrules|bashrc|bash_profile|bash_login|bash_logout|bash_aliases|profile"
    r"|zshrc|zshenv|zprofile|zlogin|zlogout|kshrc|cshrc|tcshrc|login|logout|inputrc|xprofile|xinitrc"
    r"|xsession|gitconfig|gitmodules|envrc|pam_environment|exrc|vimrc|nvim\.lua|mcp\.json)"
    r"|.*\.(code-workspace|service|timer|desktop)"
)


def _protected(permission: str, path: str, private: Iterable[Path], cwd: Path) -> tuple[str, bool]:
    """Say why a path needs the user's permission for this very one, "" where it does not; and is
    it so with -y?"""
    if permission == "read" and holds_secrets(path):
        return "it may hold secrets", False
    if permission != "edit":
        return "", False
    # As a file system may see them that ignores case and characters without width
    names = "".join(c for c in path.casefold() if unicodedata.category(c) != "Cf")
    parts = PurePath(names).parts
    # The workspace may be the home, so coder's own folders may lie in it
    is_private = any((cwd / path).is_relative_to(folder) for folder in private)
    if is_private or not FOLDERS.isdisjoint(parts) or FILES.fullmatch(PurePath(names).name):
        reason = "programs or later sessions follow what is in it"
        return reason, is_private or not EVEN_WITH_YOLO.isdisjoint(parts)
    return "", False
