"""Permissions: the hook that allows, denies or asks about what a tool is going to do.

    Permissions(rules_of({"bash": {"pytest *": "allow"}, "edit": "allow"}), can_ask=True)

policy.py decides; the user is asked here, and what a denied call is answered is written here.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path

from coder.events import DoomLoop, Event, Outcome, PermissionAsked, PermissionReplied
from coder.hooks import Hooks
from coder.permissions.policy import Policy
from coder.permissions.rules import KINDS, Decision, Rule, strictest
from coder.permissions.shell import joined, parse
from coder.providers.text import new_id
from coder.toolset import Tool, ToolContext
from coder.types import DeniedError, ToolCall, ToolResult

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


class Permissions(Policy, Hooks):
    """The policy as a hook of a run, which asks the user what the policy leaves open."""

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
        default = None
        if ctx.tool and permission == ctx.tool.kind:
            default = ctx.tool.default
        decision = strictest(
            self.decide(permission, pattern, ctx.cwd, default) for pattern in patterns
        )
        targets = ", ".join(patterns)
        if decision.action == "deny":
            raise self._denied(
                permission, f"a rule denies {permission} {targets}. Do not try it another way."
            )
        if decision.is_confined and not getattr(ctx.confine, "read_only", False):
            raise DeniedError(NOT_CONFINED)
        if decision.action == "allow" or permission == answered:
            return False
        if not self.can_ask:
            raise DeniedError(_denial(permission, decision))
        question = PermissionAsked(
            new_id(),
            permission,
            pattern=targets,
            remember=decision.always_pattern,
            detail=detail,
            why=decision.reason,
            call_id=ctx.call_id,
        )
        yield question
        yield PermissionReplied(question.id, question.answer)
        ctx.abort.check()  # Ctrl+C at the question stops the run
        self._take_answer(question, decision.always_pattern)
        return True

    def _take_answer(self, question: PermissionAsked, shown: str) -> None:
        """Raise DeniedError for a no; after "always" keep the pattern that was `shown`, or the
        user's own.
        """
        if question.answer == "no":
            if question.reason:  # the user may have named another way
                raise DeniedError(f"the user refused and wrote: {question.reason}")
            raise DeniedError("the user refused. Do not try it another way.")
        if question.answer == "always" and shown:
            is_path = question.permission in ("edit", "external_directory")
            rule = Rule(
                question.permission,
                question.remember,
                "allow",
                source="you, this session",
                is_exact=question.remember == shown and not is_path,
            )
            self.memory.append(rule)

    def _denied(self, kind: str, text: str) -> DeniedError:
        """Say with this text that rules deny the action; or that the plan does, which denies this
        kind by itself."""
        if self.changes_nothing:
            text = PLAN_DENIES.get(kind, text)
        return DeniedError(text)

    def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> Outcome[ToolResult | None]:
        ctx.authorize = self.authorize
        ctx.read_only = self.changes_nothing
        ctx.secret = partial(self.is_closed, cwd=ctx.cwd)
        tool = ctx.tool or self.known_tools.get(call.name)
        if tool and self.is_denied(tool):
            raise self._denied(tool.kind, f"a rule denies the tool {call.name}.")
        if ctx.tool and not ctx.tool.asks_itself:  # one that is not there runs nothing
            yield from self._authorize_call(call, ctx, ctx.tool)
        return None

    def _authorize_call(
        self, call: ToolCall, ctx: ToolContext, tool: Tool
    ) -> Generator[Event, None, None]:
        """Authorize a call of a tool that does not ask by itself. Raises DeniedError."""
        arguments = call.arguments or {}
        text = json.dumps(arguments, ensure_ascii=False)
        detail = ""
        if tool.kind == "mcp":
            text = tool.name
            detail = json.dumps(arguments, ensure_ascii=False, indent=2)
        elif tool.kind == "read":
            text = str(arguments.get("path") or ".")
            is_asked = self.decide_without_yolo("read", text, ctx.cwd, tool.default).action == "ask"
            ctx.secret = partial(self.is_closed, cwd=ctx.cwd, is_asked=is_asked)
        is_answered = yield from self.authorize(ctx, tool.kind, [text], detail)
        if is_answered:
            ctx.authorize = partial(self.authorize, answered=tool.kind)

    def on_doom_loop(self, event: DoomLoop) -> Outcome[bool]:
        """Let a rule decide, or the user."""
        action = self.decide_without_yolo("doom_loop", event.name, Path()).action
        if action == "ask" and self.can_ask:
            yield event
            return event.allowed
        return action == "allow"

    def offered(self, tools: Sequence[Tool]) -> list[Tool]:
        """The tools that a model gets."""
        self.known_tools |= {tool.name: tool for tool in tools}
        return [tool for tool in tools if not self.is_denied(tool)]


def _denial(permission: str, decision: Decision) -> str:
    """Say how the user can allow what nobody can be asked about, for the model to pass on."""
    if decision.even_with_yolo:
        way = "only the user can do it, or allow it in a session."
    else:
        rules = _rules_to_allow(permission, decision.always_pattern)
        flags = "".join(f" --allow {shlex.quote(f'{permission}:{rule}')}" for rule in rules)
        way = f"-y allows it, or{flags}." if flags else "-y allows it."
    why = f" ({decision.reason})" if decision.reason else ""
    end = "Do not try another way: say in your answer that you need it."
    return f"{permission} needs permission{why}, and no user can be asked here; {way} {end}"


def _rules_to_allow(permission: str, pattern: str) -> list[str]:
    """The patterns of the flags that allow what "always" would; [] if none can."""
    if permission not in KINDS:  # the pattern holds all arguments
        return ["*"]
    if permission != "bash":
        return [pattern] if pattern else []
    # A pattern is for one command of a line, and its stars are none
    if re.search("[*?]", pattern):
        return []
    return [joined(argv) for argv in parse(pattern) or ()]
