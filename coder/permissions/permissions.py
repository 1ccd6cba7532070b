"""Permissions: the hook that allows, denies or asks about what a tool is going to do.

    Permissions(rules_of({"bash": {"pytest *": "allow"}, "edit": "allow"}), can_ask=True)

Rules come from the user's configuration, the agent and flags, in this order, and the last that fits
decides; where none fits the defaults do. Four things can only make that stricter: the built-in protections
(protected.py), what the agent denies or asks about, the rules of the workspace, and for a sub-agent all
that holds for its parent. A command line takes the strictest answer of its parts; one that is not plainly
understood (shell.py) is never allowed by a pattern, while a deny is tried at every word of it.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Collection, Generator, Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

from coder.events import DoomLoop, Event, Outcome, PermissionAsked, PermissionReplied
from coder.hooks import Hooks
from coder.permissions.protected import ShellLocation, protected
from coder.permissions.rules import (
    ALLOW,
    FLAG,
    Action,
    Decision,
    Memory,
    Rule,
    any_of,
    denies_all,
    fits,
    last_match,
    strictest,
)
from coder.permissions.shell import deny_texts, joined, parse, word_starts
from coder.toolset import Tool, ToolContext
from coder.types import DeniedError, ToolCall, ToolResult

DEFAULTS: dict[str, Action] = dict.fromkeys(
    ("edit", "bash", "external_directory", "doom_loop", "unconfined"), "ask"
)
# The kind of tools that are not called like theirs.
KINDS = {"write": "edit", "apply_patch": "edit", "grep": "read", "glob": "read", "ls": "read"}
MAX_COMMAND = 10_000  # characters of a command that a pattern may allow: nobody reads a longer one
# Of the kind read, and asked about under their own names only where a rule names them.
LOOKING = {"grep", "glob", "ls"}
PATHS = {"read", "edit", "external_directory", *LOOKING}
ASKING = {"read", "edit", "bash", "task"}  # their tools ask, with what they are about to touch


class Permissions(Hooks):
    """Decides with `rules` of the user, `agent`'s, `flags` of the command line, and `workspace`'s.

    `private`: coder's own folders, which no edit touches unasked. `can_ask`: the user reads the events;
    else a question is denied. `yolo` answers yes to every question that is not `even_with_yolo`.
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
    ) -> None:
        self.rules, self.agent = list(rules), list(agent)
        self.flags, self.workspace = list(flags), list(workspace)
        self.private = [Path(os.path.realpath(folder)) for folder in private]
        self.can_ask, self.yolo = can_ask, yolo
        self.parent: Permissions | None = None
        self.memory = Memory()

    def child(self, agent: Sequence[Rule]) -> Permissions:
        """Make those of a sub-agent: its rules over the user's, and nothing that is not allowed here.

        The memory is shared.
        """
        made = copy(self)
        made.agent, made.parent = list(agent), self
        return made

    @property
    def ordered(self) -> list[Rule]:
        """The rules of which the last that fits decides; an agent's `ask` does not lift a deny."""
        return [*self.rules, *(rule for rule in self.agent if rule.action != "ask"), *self.flags]

    # -- deciding

    def decide(self, permission: str, text: str, cwd: Path, tool: str = "") -> Decision:
        """Decide on an action; `text` is the command or path that is acted on, `tool` what asks."""
        judged = self.judge(permission, text, cwd, tool)
        is_answered = judged.action == "ask" and self.yolo and not judged.even_with_yolo
        return ALLOW if is_answered else judged

    def judge(self, permission: str, text: str, cwd: Path, tool: str = "") -> Decision:
        """The same without -y."""
        if permission in ("bash", "unconfined"):
            own = self._decide_command(permission, text, cwd)
        else:
            kinds = [permission, tool, "read" if permission in LOOKING else ""]
            own = self._decide_path(tuple(filter(None, kinds)), text, cwd)
        if self.parent is None:
            return own
        return strictest([own, self.parent.judge(permission, text, cwd, tool)])

    def _decide_path(self, kinds: tuple[str, ...], text: str, cwd: Path) -> Decision:
        """Decide on an action on one path, or on a tool from elsewhere."""
        permission, texts = kinds[0], _path_names(kinds[0], text, cwd)
        rule = last_match(kinds, texts, self.ordered)
        action = rule.action if rule else DEFAULTS.get(permission, "allow")
        decision = self._tightened(kinds, texts, rule, action)
        pattern = _always_pattern(permission, text)
        reason, even_with_yolo = protected(permission, text, self.private, cwd)
        if reason and not _lifts_protection(rule):
            pattern = "" if permission == "edit" else text
            decision = strictest([decision, Decision("ask", even_with_yolo=even_with_yolo)])
        is_known = pattern and any((permission, each) in self.memory for each in texts)
        if decision.action == "ask" and is_known:
            return ALLOW
        return replace(decision, always_pattern=pattern, reason=reason)

    def _tightened(
        self,
        kinds: tuple[str, ...],
        texts: Collection[str],
        rule: Rule | None,
        action: Action,
        agent_asks: bool = True,
    ) -> Decision:
        """Add what the workspace and the agent deny or ask about; a flag lifts an agent's question.

        An agent's question stays one under -y, since a plan is to change nothing.
        """
        found = [Decision(action)]
        if workspace := last_match(kinds, texts, self.workspace):
            found.append(Decision(workspace.action))
        agent = last_match(kinds, texts, self.agent)
        is_by_flag = rule is not None and rule.source == FLAG
        if agent and agent.action == "deny":
            found.append(Decision("deny"))
        elif agent and agent.action == "ask" and agent_asks and not is_by_flag:
            found.append(Decision("ask", even_with_yolo=True))
        return strictest(found)

    def _decide_command(self, permission: str, command: str, cwd: Path) -> Decision:
        """Decide on a command line: the strictest answer of its parts.

        Outside the sandbox ("unconfined") only a rule that names it or the user allows, and -y does not.
        """
        outside = permission == "unconfined"
        if self._is_line_denied(command):
            return Decision("deny")
        if (permission, command) in self.memory.exact:
            return ALLOW
        rules = self.ordered
        if outside:
            rules = [
                each for each in rules if each.action == "deny" or each.permission == permission
            ]
        parts = parse(command) if len(command) <= MAX_COMMAND else None
        here = ShellLocation(cwd, lambda path: self.judge("read", str(path), cwd).action == "allow")
        answers = [self._decide_part(permission, part, here, rules) for part in parts or []]
        if not parts:
            answers = [self._tightened((permission,), (command,), None, "ask")]
        found = strictest(answers)
        reason = "it would run outside the sandbox" if outside else ""
        even_with_yolo = found.even_with_yolo or outside
        return replace(found, always_pattern=command, even_with_yolo=even_with_yolo, reason=reason)

    def _decide_part(
        self, permission: str, argv: Sequence[str], here: ShellLocation, rules: Sequence[Rule]
    ) -> Decision:
        """Decide on one simple command of a plain line."""
        kinds, texts = (permission,), (joined(argv),)
        is_read_only = here.is_read_only(argv)  # called for each part, since it follows a cd
        unasked = is_read_only and permission == "bash"
        rule = last_match(kinds, texts, rules)
        action: Action = rule.action if rule else "allow" if unasked else "ask"
        agent_asks = not unasked or rule is not None
        decision = self._tightened(kinds, texts, rule, action, agent_asks)
        is_known = (permission, texts[0]) in self.memory
        return ALLOW if decision.action == "ask" and is_known else decision

    def _is_line_denied(self, command: str) -> bool:
        """Tell whether anything is denied that this command line may run, however long it is.

        A pattern that begins with a star fits every end of a text it fits, so it is tried on whole
        commands only; else `{"*": "deny", "ls *": "allow"}` would deny the arguments of ls.
        """
        layers = [
            [rule for rule in layer if fits(rule.permission, "bash")]
            for layer in (self.ordered, self.agent, self.workspace)
        ]
        if not any(rule.action == "deny" for layer in layers for rule in layer):
            return False
        whole, inner = deny_texts(command)
        if any(_is_denied(text, layers) for text in whole):
            return True
        anchored = [
            [rule for rule in layer if rule.action != "deny" or rule.pattern[:1] != "*"]
            for layer in layers
        ]
        denies = any_of(
            rule.pattern for layer in anchored for rule in layer if rule.action == "deny"
        )
        return any(
            denies.fullmatch(text, at) and _is_denied(text[at:], anchored)
            for text in inner
            for at in word_starts(text)
        )

    # -- what the tools and the loop ask

    def authorize(
        self,
        ctx: ToolContext,
        permission: str,
        patterns: Sequence[str],
        detail: str,
        tool: str = "",
        answered: str = "",
    ) -> Generator[Event, None, bool]:
        """Return if allowed, with whether the user was asked. Raises DeniedError.

        `answered`: the permission that the user has already given for this call.
        """
        decision = strictest([self.decide(permission, each, ctx.cwd, tool) for each in patterns])
        if decision.action == "allow" or (decision.action == "ask" and permission == answered):
            return False
        targets = ", ".join(patterns)
        if decision.action == "deny":
            raise DeniedError(
                f"a rule denies {permission} {_truncate(targets)}. Do not try it another way."
            )
        if not self.can_ask:
            raise DeniedError(_denial(permission, decision))
        asked = PermissionAsked(
            ctx.call_id, permission, targets, decision.always_pattern, detail, why=decision.reason
        )
        yield asked
        yield PermissionReplied(asked.id, asked.answer)
        ctx.abort.check()  # Ctrl+C at the question stops the run
        if asked.answer == "no":
            reason = f": {asked.reason}" if asked.reason else ""
            raise DeniedError(f"the user refused{reason}. Do not try it another way.")
        if asked.answer == "always" and decision.always_pattern and asked.remember:
            self.memory.add(
                permission, asked.remember, own=asked.remember != decision.always_pattern
            )
        return True

    def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> Outcome[ToolResult | None]:
        ctx.authorize = partial(self.authorize, tool=call.name)
        ctx.secret = lambda path: self.judge("read", path, ctx.cwd).action != "allow"
        if self.denied(call.name):
            raise DeniedError(f"a rule denies the tool {call.name}.")
        arguments = call.arguments or {}
        if call.name in LOOKING:
            yield from self.authorize(ctx, call.name, [str(arguments.get("path") or ".")], "")
        elif KINDS.get(call.name, call.name) not in ASKING:
            text = json.dumps(arguments, ensure_ascii=False)
            if (yield from self.authorize(ctx, call.name, [text], "")):
                ctx.authorize = partial(self.authorize, tool=call.name, answered=call.name)
        return None

    def on_doom_loop(self, event: DoomLoop) -> Outcome[bool]:
        """Let a rule decide, or the user."""
        action = self.judge("doom_loop", event.name, Path()).action
        if action == "ask" and self.can_ask:
            yield event
            return event.allowed
        return action == "allow"

    # -- which tools are offered

    def denied(self, name: str) -> bool:
        """Tell whether a tool is denied whatever its arguments."""
        kinds = {name, KINDS.get(name, name)}
        layers = (self.ordered, self.agent, self.workspace)
        here = any(denies_all(kinds, rules) for rules in layers)
        return here or bool(self.parent and self.parent.denied(name))

    def offered(self, tools: Iterable[Tool]) -> list[Tool]:
        """The tools that a model gets."""
        return [tool for tool in tools if not self.denied(tool.name)]


def _is_denied(text: str, layers: Iterable[Sequence[Rule]]) -> bool:
    """Tell whether the last rule that fits a command denies it, in one of these layers."""
    found = (last_match(("bash",), (text,), layer) for layer in layers)
    return any(rule is not None and rule.action == "deny" for rule in found)


def _path_names(permission: str, text: str, cwd: Path) -> tuple[str, ...]:
    """The names of one path that a pattern may mean: as given, absolute, relative to the workspace.

    A folder's name has one more form, with a slash behind it, so that `folder/*` fits it as well.
    """
    if permission not in PATHS:
        return (text,)
    place = cwd / text
    names = [text, str(place)]
    if place.is_relative_to(cwd):
        names.append(str(place.relative_to(cwd)))
    if permission == "external_directory":
        names.append(f"{place}/".replace("//", "/"))
    return tuple(dict.fromkeys(names))


def _always_pattern(permission: str, text: str) -> str:
    """What "always" stores for an action: all edits, the folder outside, else exactly this."""
    if permission == "edit":
        return "*"
    if permission == "external_directory":
        return f"{text if Path(text).is_dir() else Path(text).parent}/*".replace("//", "/")
    return text


def _denial(permission: str, decision: Decision) -> str:
    """Say, where no user can be asked, how the user can allow it, for the model to pass on."""
    way = "only the user can do it, or allow it in a session."
    if not decision.even_with_yolo:
        pattern = decision.always_pattern
        has_flag = pattern and (permission != "bash" or parse(pattern) is not None)
        flag = f", or --allow {shlex.quote(f'{permission}:{pattern}')}" if has_flag else ""
        way = f"-y allows it{_truncate(flag)}."
    why = f" ({decision.reason})" if decision.reason else ""
    return f"{permission} needs permission{why}, and no user can be asked here; {way}"


def _lifts_protection(rule: Rule | None) -> bool:
    """Tell whether a rule is a flag that names more than a kind: only that lifts a protection."""
    if rule is None or rule.source != FLAG or rule.action != "allow":
        return False
    return bool(rule.pattern.strip("*?"))


def _truncate(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"
