"""Sub-agents: the tool `task` hands a piece of work to another agent, with a run and a session of its own.

    agents = Subagents(choices(BUILT_IN, "subagent", "all"), equip)   # equip(spec, session_id) -> Equipment
    run_loop(messages, model, [read, bash, agents.tool])

All events of the child's run come out as `nested`, its questions among them, so that whoever answers the parent's answers them.
An abort of the parent's is the child's; its steps count as the parent's, and it stops where they end; what it costs is in the
parent's usage. What a child may do is decided by its Equipment (Permissions.child: the stricter of both). Several run side by
side where the tool set can (parallel.py). `task_id` goes on with a child: with its messages, and its count of repetitions.

There are no sub-agents of sub-agents: a sub-agent is given no `task`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from coder.agent.profiles import AgentSpec
from coder.ai import Model
from coder.events import Event, Nested, Returning
from coder.hooks import Hooks
from coder.loop import run_loop
from coder.providers.errors import RetryPolicy
from coder.toolset import Tool, ToolContext, Toolset, tool_of
from coder.types import Budget, Limits, Message, RunResult, ToolError, ToolResult

LEAST = (
    2  # steps that have to be left: one of the child's, one of the parent's to say what came of it
)


@dataclass(frozen=True)
class Equipment:
    """What a child works with."""

    model: Model
    tools: Toolset
    system: str
    hooks: Hooks


@dataclass
class Child:
    """A sub-agent's session. `messages` is its list, on which its runs work."""

    id: str
    spec: AgentSpec
    messages: list[Message] = field(default_factory=list)
    repeated: tuple[str, int] = ("", 0)
    busy: bool = False


class Subagents:
    """The sub-agents of a session. `load` finds the messages of a child of an earlier process: (agent, messages), or None."""

    def __init__(
        self,
        specs: Iterable[AgentSpec],
        equip: Callable[[AgentSpec, str], Equipment],
        *,
        limits: Limits = Limits(),
        retry: RetryPolicy = RetryPolicy(),
        load: Callable[[str], tuple[str, list[Message]] | None] = lambda task_id: None,
    ) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self.equip, self.limits, self.retry, self.load = equip, limits, retry, load
        self.children: dict[str, Child] = {}

    @property
    def tool(self) -> Tool:
        """`task`, with the agents that there are in its schema."""
        made = tool_of(
            self.task,
            title=lambda given: (
                f"{given.get('agent') or 'general'}: {given.get('description', '')}"
            ),
            concurrent=True,
        )
        known = "; ".join(f"{spec.name}: {spec.description}" for spec in self.specs.values())
        properties = made.parameters["properties"]
        agent = properties["agent"] | {"enum": list(self.specs), "description": known}
        return replace(
            made, parameters=made.parameters | {"properties": properties | {"agent": agent}}
        )

    def task(
        self,
        ctx: ToolContext,
        description: str,
        prompt: str,
        agent: str = "general",
        task_id: str = "",
    ) -> Generator[Any, None, ToolResult]:
        """Give a task to a sub-agent, which answers once and sees nothing of this conversation. Several run side by side.

        description: the task in 3 to 6 words
        prompt: all it has to know, and what to answer
        agent: who does it
        task_id: an earlier task to go on with
        """
        child = self._child(agent, task_id)
        yield from ctx.ask("task", child.spec.name)
        above = ctx.budget or Budget(self.limits.max_steps + 1)
        if above.left < LEAST:
            raise ToolError("no steps are left for a sub-agent. Finish with what is known.")
        if child.busy:
            raise ToolError(f"the task {child.id} is still at work")
        budget = Budget(
            child.spec.max_steps or self.limits.max_steps, above, repeated=child.repeated
        )
        child.busy = True
        try:
            result = yield from self._run(ctx, child, prompt, budget)
        finally:
            child.busy, child.repeated = False, budget.repeated
        ctx.abort.check()
        return _answer(child, result)

    def _child(self, agent: str, task_id: str) -> Child:
        """A new one, or the one to go on with. Raises ToolError."""
        if not task_id:
            child = Child(secrets.token_hex(6), self._spec(agent))
        elif task_id in self.children:
            child = self.children[task_id]
        elif loaded := self.load(task_id):
            child = Child(task_id, self._spec(loaded[0]), loaded[1])
        else:
            raise ToolError(
                f"there is no task {task_id!r} to go on with. Leave task_id out for a new one."
            )
        return self.children.setdefault(child.id, child)

    def _spec(self, agent: str) -> AgentSpec:
        if agent not in self.specs:
            raise ToolError(
                f"there is no sub-agent {agent!r}. There are: {', '.join(self.specs) or 'none'}"
            )
        return self.specs[agent]

    def _run(
        self, ctx: ToolContext, child: Child, prompt: str, budget: Budget
    ) -> Generator[Event, None, RunResult]:
        """A run of the child, each of its events as one of ours."""
        given = self.equip(child.spec, child.id)
        events = run_loop(
            child.messages,
            given.model,
            given.tools,
            prompts=prompt,
            system=given.system,
            hooks=given.hooks,
            limits=replace(self.limits, max_steps=budget.max_steps, max_seconds=None),
            retry=self.retry,
            abort=ctx.abort,
            budget=budget,
        )
        with Returning(events) as run:
            for event in run:
                yield Nested(child.spec.name, event, child.id, ctx.call_id)
        return run.value


def _answer(child: Child, result: RunResult) -> ToolResult:
    """The child's last text, and how to go on with it."""
    done = result.stop_reason == "stop"
    text = (
        result.text
        if done
        else f"The sub-agent did not get to its end ({result.stop_reason}): {result.text}"
    )
    details = {
        "agent": child.spec.name,
        "session_id": child.id,
        "steps": result.steps,
        "stop_reason": result.stop_reason,
    }
    return ToolResult(f"{text}\n\n[task_id: {child.id}]", is_error=not done, details=details)
