"""Asking before acting, until there are permissions: commands, edits and places outside the folder need a yes.

A hook: it decides when a tool asks for leave, with the exact command or the diff at hand. Without a terminal to ask on
the answer is no, and the model is told how the person could allow it. What it leaves out: rules, and remembering beyond
the session.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence

from coder.tools import ToolContext
from coder.types import DeniedError, Event, Hooks, PermissionAsked, PermissionReplied, Said, ToolCall, ToolResult

FREE = {"read"}  # needs no leave inside the folder
ALWAYS_ASK = re.compile(r"(^|[/ ])\.git([/,]|$)")  # what lies there is run by git: no "always" covers it


class Approval(Hooks):
    """`yes`: all is allowed (-y). `can_ask`: there is a person at a terminal."""

    def __init__(self, *, yes: bool, can_ask: bool) -> None:
        self.yes = yes
        self.can_ask = can_ask
        self.remembered: set[tuple[str, str]] = set()  # (permission, pattern), for this session only

    def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> Said[ToolResult | None]:
        ctx.authorize = self.authorize
        return None

    def authorize(self, ctx: ToolContext, permission: str, patterns: Sequence[str], detail: str) -> Generator[Event, None, None]:
        """Return if allowed. Raises DeniedError."""
        pattern = ", ".join(patterns)
        remember = "*" if permission == "edit" else pattern
        known = (permission, remember) in self.remembered and not (permission == "edit" and ALWAYS_ASK.search(pattern))
        if self.yes or permission in FREE or known:
            return
        if not self.can_ask:
            raise DeniedError(f"{permission} needs a yes, and nobody can be asked here; -y allows it.")
        asked = PermissionAsked(ctx.call_id, permission, pattern, remember, detail)
        yield asked
        yield PermissionReplied(asked.id, asked.answer)
        ctx.abort.check()  # Ctrl+C at the question stops the run
        if asked.answer == "no":
            raise DeniedError(f"the user said no{f': {asked.reason}' if asked.reason else ''}. Do not try it another way.")
        if asked.answer == "always":
            self.remembered.add((permission, remember))
