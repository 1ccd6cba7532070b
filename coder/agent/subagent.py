"""Sub-agents: the tool `task` gives a piece of work to another agent, with a run and a session of
its own.

    agents = Subagents(choices(BUILT_IN, "subagent", "all"), equip)
    # equip(spec, session_id) -> Equipment
    run_loop(messages, model, [read, bash, agents.tool])

All events of the child's run come out as `nested`, its questions among them. The parent's abort is
the child's; its steps count in the parent's budget, its tokens in the parent's usage. Its Equipment
decides what a child may do (Permissions.child: the stricter of both). Several run at the same time
if the tool set can (parallel.py). `task_id` continues a child's conversation. A sub-agent gets no
`task` of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from coder.agent.profiles import AgentSpec
from coder.ai import Model
from coder.events import Events, Nested, Returning
from coder.history import newest, text_of
from coder.hooks import Hooks
from coder.loop import run_loop
from coder.providers.errors import RetryPolicy
from coder.tools import slips
from coder.toolset import Tool, ToolContext, Toolset, tool
from coder.types import Budget, Limits, Message, RunResult, ToolError, ToolResult

DEFAULT_AGENT = "general"


@dataclass
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
    busy: bool = False


Loaded = tuple[str, list[Message]]  # the agent of a child, and its messages


class Subagents:
    """The sub-agents of a session. `load` finds a child of an earlier process."""

    def __init__(
        self,
        specs: Iterable[AgentSpec],
        equip: Callable[[AgentSpec, str], Equipment],
        *,
        limits: Limits = Limits(),
        retry: RetryPolicy = RetryPolicy(),
        load: Callable[[str], Loaded | None] = lambda task_id: None,
    ) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self.equip = equip
        self.limits = limits
        self.retry = retry
        self.load = load
        self.children: dict[str, Child] = {}

    @property
    def tool(self) -> Tool:
        """`task`, with the names of the agents in its schema."""
        make = tool(
            title=_make_title,
            concurrent=True,
            may_change=True,
            permission="task",
            default="allow",
            asks_itself=True,
            slips=slips.TASK,
        )
        task = make(self.task)
        agents = [f"{spec.name}: {spec.description}" for spec in self.specs.values()]
        agent = task.parameters["properties"]["agent"]
        agent["enum"] = list(self.specs)
        agent["description"] = "; ".join(agents)
        return task

    def task(
        self,
        ctx: ToolContext,
        description: str,
        prompt: str,
        agent: str = "",
        task_id: str = "",
    ) -> Events[ToolResult]:
        """Give a task to a sub-agent, which answers once and sees nothing of this conversation.

        Several run side by side.

        description: the task in 3 to 6 words
        prompt: all it has to know, and what to answer
        agent: who does it
        task_id: an earlier task to go on with
        """
        child = self._find_child(agent, task_id)
        yield from ctx.ask("task", child.spec.name)
        if child.busy:
            raise ToolError(f"the task {child.id} is still running")
        child.busy = True
        try:
            result = yield from self._run_child(ctx, child, prompt)
        finally:
            child.busy = False
        return _as_result(result, child)

    def _find_child(self, agent: str, task_id: str) -> Child:
        """A new one, or the one to continue. Raises ToolError."""
        child = self.children.get(task_id)
        if child is None:
            loaded: Loaded | None = (agent or DEFAULT_AGENT, [])
            if task_id:
                loaded = self.load(task_id)
            if not loaded or loaded[0] not in self.specs:
                raise ToolError(f"there is no task {task_id!r}. Leave task_id out for a new one.")
            name, messages = loaded
            child = Child(task_id or os.urandom(6).hex(), self.specs[name], messages)
        if agent not in ("", child.spec.name):
            raise ToolError(f"the task {child.id} is one of {child.spec.name}, not of {agent}")
        self.children[child.id] = child
        return child

    def _run_child(self, ctx: ToolContext, child: Child, prompt: str) -> Events[RunResult]:
        """A run of the child, each of its events nested in one of the parent's."""
        equipment = self.equip(child.spec, child.id)
        steps = child.spec.max_steps or self.limits.max_steps
        events = run_loop(
            child.messages,
            equipment.model,
            equipment.tools,
            prompt=prompt,
            system=equipment.system,
            hooks=equipment.hooks,
            limits=replace(self.limits, max_steps=steps, max_seconds=None),
            retry=self.retry,
            abort=ctx.abort,
            budget=Budget(steps, ctx.budget),
        )
        with Returning(events) as run:
            for event in run:
                yield Nested(child.spec.name, event, child.id, ctx.call_id)
        return run.value


def _as_result(result: RunResult, child: Child) -> ToolResult:
    """What the parent reads of a child's run."""
    task_id = f"[task_id: {child.id}]"
    if result.stop_reason != "stop":
        return ToolResult(
            f"The sub-agent did not finish ({result.stop_reason}): {result.text}\n\n{task_id}",
            is_error=True,
        )
    answer = newest(child.messages)
    if answer.get("role") != "assistant" or not text_of(answer).strip():
        return ToolResult(
            "The sub-agent ended without an answer. "
            f"Ask it again with task_id {child.id}, or do it yourself.",
            is_error=True,
        )
    return ToolResult(f"{result.text}\n\n{task_id}")


def _make_title(arguments: dict[str, object]) -> str:
    return f"{arguments.get('agent') or DEFAULT_AGENT}: {arguments.get('description', '')}"
