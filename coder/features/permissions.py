"""Permissions: the hook that decides, when a tool asks for leave, whether to go on, to ask a person, or to refuse.

    Permissions(rules_of({"bash": {"pytest *": "allow"}, "edit": "allow"}), can_ask=True)

Rules come from the user's configuration, the agent and flags, in this order, and the last that fits decides; where none fits
the defaults do. Then come, and can only make it stricter: the built-in protections, what the agent denies or wants to be asked
about, the rules of the workspace, and for a sub-agent all that holds for its parent. A command line takes the strictest answer
of its parts; one that is not plainly understood (lexer.py) is never allowed by a pattern, while a deny is tried on everything
it might run.

What it leaves out: the rules' language (rules.py), the built-in protections (protections.py), how a question looks on the
screen, and confinement (sandbox.py): an allowed command can do what the user can.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from coder.features.lexer import deny_forms, joined, parse
from coder.features.protections import Here, deletes_outside, protected
from coder.features.rules import FLAG, STRICT, Action, Rule, any_of, denies_all, evaluate, fits
from coder.tools import Tool, ToolContext
from coder.types import DeniedError, DoomLoop, Event, Hooks, PermissionAsked, PermissionReplied, Said, ToolCall, ToolResult

DEFAULTS: dict[str, Action] = {"edit": "ask", "bash": "ask", "external_directory": "ask", "doom_loop": "ask", "unconfined": "ask"}
KINDS = {"write": "edit", "apply_patch": "edit", "grep": "read", "glob": "read", "ls": "read"}  # of tools that are not called like theirs
LONGEST = 10_000  # characters of a command that are looked at part by part: who reads more before a yes?
LOOKING = {"grep", "glob", "ls"}  # of the kind read, and asked about under their own names only where a rule names them
PATHS = {"read", "edit", "external_directory", *LOOKING}
PATTERNS = ("edit", "external_directory")  # kinds for which "always" is not exactly what was asked
ASKING = {"read", "edit", "bash", "task"}  # kinds whose tools ask by themselves, with what they are about to touch


@dataclass(frozen=True, slots=True)
class Decision:
    """`remember` is what "always" would store; "" where nothing can be. `firm`: not even -y lifts the question."""

    action: Action
    remember: str = ""
    why: str = ""
    firm: bool = False


ALLOW = Decision("allow")


def strictest(decisions: Iterable[Decision]) -> Decision:
    """Deny before ask before allow; of several questions the firm one, then one that cannot be remembered."""
    return max(decisions, key=lambda each: (STRICT[each.action], each.firm, not each.remember), default=ALLOW)


@dataclass
class Memory:
    """What a person has allowed for this session. It is not saved, and a session that is taken up begins without it (SES-13)."""

    exact: set[tuple[str, str]] = field(default_factory=set)  # (kind, text)
    rules: list[Rule] = field(default_factory=list)

    def __contains__(self, asked: tuple[str, str]) -> bool:
        return asked in self.exact or evaluate((asked[0],), (asked[1],), self.rules) is not None

    def clear(self) -> None:
        """Another conversation, or another agent."""
        self.exact.clear()
        self.rules.clear()

    def add(self, permission: str, remember: str, own: bool) -> None:
        """`own`: a pattern of the person's; else what was shown: all edits, a folder, or exactly a text."""
        if own or permission in PATTERNS:
            self.rules.append(Rule(permission, remember, "allow", "you"))
        else:
            self.exact.add((permission, remember))


class Permissions(Hooks):
    """`rules` are the user's, `agent` the agent's, `flags` the command line's; `workspace` can only tighten. `private`: our own
    folders, which no edit touches unasked. `can_ask`: a person reads the events; else a question is a no. `yolo` answers yes to
    every question that is not firm. `parent`: whose sub-agent it is; its memory is shared."""

    def __init__(self, rules: Sequence[Rule] = (), *, agent: Sequence[Rule] = (), flags: Sequence[Rule] = (),
                 workspace: Sequence[Rule] = (), private: Sequence[Path] = (), can_ask: bool = False, yolo: bool = False,
                 parent: Permissions | None = None) -> None:
        self.rules, self.agent, self.flags, self.workspace = list(rules), list(agent), list(flags), list(workspace)
        self.private = [Path(os.path.realpath(folder)) for folder in private]
        self.can_ask, self.yolo, self.parent = can_ask, yolo, parent
        self.memory: Memory = parent.memory if parent else Memory()

    def child(self, agent: Sequence[Rule]) -> Permissions:
        """For a sub-agent: its own rules over the user's, and nothing that is not allowed here as well."""
        return Permissions(self.rules, agent=agent, flags=self.flags, workspace=self.workspace, private=self.private,
                           can_ask=self.can_ask, yolo=self.yolo, parent=self)

    @property
    def ordered(self) -> list[Rule]:
        """The rules of which the last that fits decides. What an agent wants to be asked about is no answer to a deny."""
        return [*self.rules, *(rule for rule in self.agent if rule.action != "ask"), *self.flags]

    # -- deciding

    def decide(self, permission: str, text: str, cwd: Path, tool: str = "") -> Decision:
        """What becomes of an action. `text` is the command or path that is acted on, `tool` the name of what asks."""
        judged = self.judge(permission, text, cwd, tool)
        return ALLOW if judged.action == "ask" and self.yolo and not judged.firm else judged

    def judge(self, permission: str, text: str, cwd: Path, tool: str = "") -> Decision:
        """The same, where -y is no answer."""
        if permission in ("bash", "unconfined"):
            own = self._command(permission, text, cwd)
        else:
            own = self._path((permission, *([tool] if tool else []), *(["read"] if permission in LOOKING else [])), text, cwd)
        return strictest([own, self.parent.judge(permission, text, cwd, tool)]) if self.parent else own

    def _path(self, kinds: tuple[str, ...], text: str, cwd: Path) -> Decision:
        """An action on one path, or of a tool of somebody's own."""
        permission, texts = kinds[0], _names(kinds[0], text, cwd)
        rule = evaluate(kinds, texts, self.ordered)
        decision = self._tightened(kinds, texts, rule, rule.action if rule else DEFAULTS.get(permission, "allow"))
        remember, (why, firm) = _remembered(permission, text), protected(permission, text, self.private, cwd)
        if why and not _is_meant(rule):
            remember = "" if permission == "edit" else text
            decision = strictest([decision, Decision("ask", firm=firm)])
        known = remember and any((permission, each) in self.memory for each in texts)
        return ALLOW if decision.action == "ask" and known else replace(decision, remember=remember, why=why)

    def _tightened(self, kinds: tuple[str, ...], texts: Collection[str], rule: Rule | None, action: Action,
                   asks: bool = True) -> Decision:
        """With what the agent denies or wants to be asked about, unless a flag says so, and what the workspace does. A question
        of the agent's stays one under -y: a plan is to change nothing. `asks`: do the agent's questions count here?"""
        agent, workspace = (evaluate(kinds, texts, rules) for rules in (self.agent, self.workspace))
        by_flag = rule is not None and rule.source == FLAG
        floors = [Decision(action), *([Decision(workspace.action)] if workspace else [])]
        if agent and agent.action == "deny":
            floors.append(Decision("deny"))
        elif agent and agent.action == "ask" and asks and not by_flag:
            floors.append(Decision("ask", firm=True))
        return strictest(floors)

    def _command(self, permission: str, command: str, cwd: Path) -> Decision:
        """A command line: the strictest answer of its parts. Outside the sandbox ("unconfined") only a rule that names it
        allows, or a yes, and -y is none (SBX-06)."""
        outside = permission == "unconfined"
        if self._denied(command):
            return Decision("deny")
        parts = parse(command) if len(command) <= LONGEST else None
        rules = [rule for rule in self.ordered if rule.action == "deny" or rule.permission == permission] if outside else self.ordered
        meant = parts is not None and len(parts) == 1 and _is_meant(evaluate((permission,), (joined(parts[0]),), rules))
        if deletes_outside(command, cwd) and not meant:
            return Decision("ask", "", "it may delete recursively outside the workspace", firm=True)
        if (permission, command) in self.memory.exact:
            return ALLOW
        here = Here(cwd, lambda path: self.judge("read", str(path), cwd).action == "allow")
        each = [self._part(permission, part, here, rules) for part in parts or []]
        found = strictest([*each, *([] if parts else [self._tightened((permission,), (command,), None, "ask")])])
        return replace(found, remember=command, firm=found.firm or outside, why="it would run outside the sandbox" if outside else "")

    def _part(self, permission: str, argv: Sequence[str], here: Here, rules: Sequence[Rule]) -> Decision:
        """One simple command of a plain line."""
        text = joined(argv)
        harmless = here.harmless(argv) and permission == "bash"  # asked in any case: it follows a cd
        rule = evaluate((permission,), (text,), rules)
        action: Action = rule.action if rule else "allow" if harmless else "ask"
        decision = self._tightened((permission,), (text,), rule, action, asks=not (harmless and rule is None))
        return ALLOW if decision.action == "ask" and (permission, text) in self.memory else decision

    def _denied(self, command: str) -> bool:
        """Is anything denied that this may run? Told from all of it, however long (PRM-15)."""
        rules = [rule for rule in [*self.ordered, *self.workspace] if rule.action == "deny" and fits(rule.permission, "bash")]
        forms = deny_forms(command) if rules else []
        some = any_of(tuple(rule.pattern for rule in rules))
        return any(self._denies(form) for form in forms if some.fullmatch(form))

    def _denies(self, form: str) -> bool:
        rule = evaluate(("bash",), (form,), self.ordered)
        return self._tightened(("bash",), (form,), rule, rule.action if rule else "allow").action == "deny"

    # -- what the tools and the loop ask

    def authorize(self, ctx: ToolContext, permission: str, patterns: Sequence[str], detail: str,
                  tool: str = "") -> Generator[Event, None, None]:
        """Return if allowed. Raises DeniedError."""
        decision = strictest([self.decide(permission, pattern, ctx.cwd, tool) for pattern in patterns])
        if decision.action == "allow":
            return
        if decision.action == "deny":
            raise DeniedError(f"a rule denies {permission} {_short(', '.join(patterns))}. Do not try it another way.")
        if not self.can_ask:
            raise DeniedError(f"{permission} needs a yes{_because(decision)}, and nobody can be asked here; {_how(permission, decision)}")
        asked = PermissionAsked(ctx.call_id, permission, ", ".join(patterns), decision.remember, detail, why=decision.why)
        yield asked
        yield PermissionReplied(asked.id, asked.answer)
        ctx.abort.check()  # Ctrl+C at the question stops the run
        if asked.answer == "no":
            raise DeniedError(f"the user said no{f': {asked.reason}' if asked.reason else ''}. Do not try it another way.")
        if asked.answer == "always" and decision.remember and asked.remember:
            self.memory.add(permission, asked.remember, own=asked.remember != decision.remember)

    def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> Said[ToolResult | None]:
        ctx.authorize = partial(self.authorize, tool=call.name)
        ctx.secret = lambda path: self.judge("read", path, ctx.cwd).action != "allow"
        if self.denied(call.name):
            raise DeniedError(f"a rule denies the tool {call.name}.")
        if call.name in LOOKING:
            yield from self.authorize(ctx, call.name, [str((call.arguments or {}).get("path") or ".")], "")
        elif KINDS.get(call.name, call.name) not in ASKING:
            yield from self.authorize(ctx, call.name, [json.dumps(call.arguments or {}, ensure_ascii=False)], "")
        return None

    def on_doom_loop(self, event: DoomLoop) -> Said[bool]:
        """A rule decides, or a person."""
        action = self._path(("doom_loop",), event.name, Path()).action
        if action == "ask" and self.can_ask:
            yield event
            return event.allowed
        return action == "allow"

    # -- which tools are offered

    def denied(self, name: str) -> bool:
        """Is a tool denied whatever it is called with?"""
        kinds = {name, KINDS.get(name, name)}
        layers = (self.ordered, self.agent, self.workspace)
        return any(denies_all(kinds, rules) for rules in layers) or bool(self.parent and self.parent.denied(name))

    def offered(self, tools: Iterable[Tool]) -> list[Tool]:
        """Those that a model is told of."""
        return [tool for tool in tools if not self.denied(tool.name)]


def _names(permission: str, text: str, cwd: Path) -> tuple[str, ...]:
    """The names of one path that a pattern may mean: as it is given, absolute, relative to the workspace; a folder's with a slash
    behind it, so that `folder/*` is about the folder as well."""
    if permission not in PATHS:
        return (text,)
    place = cwd / text
    names = [text, str(place), *([str(place.relative_to(cwd))] if place.is_relative_to(cwd) else [])]
    return tuple(dict.fromkeys([*names, *([f"{place}/".replace("//", "/")] if permission == "external_directory" else [])]))


def _remembered(permission: str, text: str) -> str:
    """What "always" stores for an action: all edits, the folder outside, else exactly this."""
    if permission == "edit":
        return "*"
    if permission == "external_directory":
        return f"{text if Path(text).is_dir() else Path(text).parent}/*".replace("//", "/")
    return text


def _because(decision: Decision) -> str:
    return f" ({decision.why})" if decision.why else ""


def _how(permission: str, decision: Decision) -> str:
    """How the person could allow it, for the model to pass on."""
    if decision.firm:
        return "only the user can do it, or allow it in a session."
    plain = permission != "bash" or (decision.remember and parse(decision.remember) is not None)
    flag = f", or --allow {shlex.quote(f'{permission}:{decision.remember}')}" if plain and decision.remember else ""
    return f"-y allows it{_short(flag)}."


def _is_meant(rule: Rule | None) -> bool:
    """A flag that names more than a kind: only that lifts a built-in protection."""
    return rule is not None and rule.source == FLAG and rule.action == "allow" and bool(rule.pattern.strip("*?"))


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"
