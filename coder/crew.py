"""The agents of a session: the one that works, and the sub-agents that work for it.

They get their models, hooks, tools and prompts here. A model gets the tools that it is trained on;
a sub-agent may do nothing that its caller may not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coder.abort import Abort
from coder.agent.agent import Agent
from coder.agent.profiles import AgentSpec, choices, choose, system_prompt
from coder.ai import FIRST_BYTE_TIMEOUT, ChatModel
from coder.events import Events
from coder.hooks import FunctionHooks, HookChain, Hooks
from coder.parts import PATCHING, TOOLS, Parts, ToolsetClass, user_tools
from coder.permissions.permissions import Permissions
from coder.permissions.rules import Rule
from coder.providers.errors import RetryPolicy
from coder.settings import client_of, keep_of, optional, window_of
from coder.toolset import Tool
from coder.types import Limits

if TYPE_CHECKING:
    from coder.agent.compaction import Compaction
    from coder.agent.subagent import Equipment, Subagents

NO_TASK = Rule("task", "*", "deny", "sub-agents call none")
LATE_SERVERS = 20.0  # seconds that a run waits for MCP servers; a later run has their tools
LAST_SERVERS = 60.0  # seconds, if there is no later run


class Crew:
    """`agent` works, as `spec` says, with `model`.

    Raises CoderError for an agent that is not there.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.options = parts.options
        self.settings = parts.settings
        self.client = client_of(parts.settings)
        self.permissions = parts.permissions
        spec = choose(parts.agents, parts.options.agent or "build")
        self.limits = Limits(
            max_steps=self.settings.max_steps, max_seconds=self.settings.max_seconds
        )
        self.retry = self.options.retry or RetryPolicy(base=self.settings.retry_base)
        self.subagents = self._make_subagents()
        self._usual_model = self.settings.model  # the name, for agents without a model of their own
        self.model = self.model_named(spec.model or self._usual_model)
        chain, self.compaction = self.hooks_for(self.model, self.permissions, parts.users_hooks)
        hooks: list[Hooks] = [chain]
        if parts.servers:
            hooks.append(FunctionHooks(on_run_start=self._take_servers))
        # Without tools and prompt, which _set_spec gives it
        self.agent = Agent(
            self.model,
            reasoning=self.settings.reasoning,
            hooks=hooks,
            retry=self.retry,
            cwd=parts.cwd,
            session_id=os.urandom(8).hex(),
        )
        self._set_spec(spec, self.model)

    def _make_subagents(self) -> Subagents | None:
        module = optional("coder.agent.subagent")
        if module is None:
            return None
        made: Subagents = module.Subagents(
            choices(self.parts.agents, "subagent", "all"),
            self.equip,
            limits=self.limits,
            retry=self.retry,
        )
        return made

    def _take_servers(self, abort: Abort) -> Events[None]:
        """Wait for the MCP servers that start; their tools come into the set of the run that
        begins.
        """
        servers = self.parts.servers
        assert servers
        yield from servers.wait(abort, LAST_SERVERS if self.options.one_task else LATE_SERVERS)
        tools = self.permissions.offered(servers.tools())
        yield from servers.check_size(tools)
        self.agent.state.tools.tools |= {tool.name: tool for tool in tools}

    # -- who works

    def use(self, agent: str, model: str | ChatModel) -> None:
        """Continue as another agent, with another model, or both. Raises CoderError."""
        spec = choose(self.parts.agents, agent) if agent else self.spec
        if isinstance(model, ChatModel):
            chosen = model
        else:
            chosen = self.model_named(model or spec.model or self._usual_model)
        if model:
            self._usual_model = chosen.name
        if agent:
            self._set_spec(spec, chosen)
        elif model:
            self._set_model(chosen)

    def _set_spec(self, spec: AgentSpec, model: ChatModel) -> None:
        """Let another agent work: with its permissions, its steps and this model."""
        self.spec = spec
        permissions = self.permissions
        permissions.agent = list(spec.rules)
        permissions.read_only = spec.read_only
        permissions.memory.clear()  # permission was given to the agent that asked
        steps = spec.max_steps or self.settings.max_steps
        self.agent.limits = replace(self.limits, max_steps=steps)
        self._set_model(model)

    def _set_model(self, model: ChatModel) -> None:
        """Let this model work, with the tools that it is trained on and its prompt."""
        agent = self.agent
        trace = self.options.trace
        self.model = model
        if self.compaction:
            self.compaction.model = model
            self.compaction.keep = keep_of(model.context_window)
        agent.set_model(model)
        self.set_prompt()
        tools = self.tools_for(model.name, self.spec.read_only)
        if self.subagents:
            tools.append(self.subagents.tool)  # sub-agents have none
        if self.options.ask and user_tools:
            tools.append(user_tools.ask_user)
        seen = agent.state.tools.seen  # what tools have read of the files: it stays known
        agent.set_tools(ToolsetClass(self.permissions.offered(tools), cwd=self.parts.cwd))
        agent.state.tools.seen = seen
        if trace:
            for secret in self.settings.keys:
                trace.hide(secret)
            trace.attach(model)

    def set_prompt(self) -> None:
        """Give the agent its system prompt, with the skills that may be used."""
        prompt = self.options.system or self.prompt_for(self.model, self.spec)
        if self.options.append_system:
            prompt = f"{prompt}\n\n{self.options.append_system}"
        self.agent.set_system(prompt)

    # -- what an agent works with

    def model_named(self, name: str) -> ChatModel:
        """A model of the server, or the program's own."""
        own = self.options.model
        if own and own.name == name:
            return own
        settings = self.settings
        redactor = self.parts.redactor
        idle = settings.idle_timeout
        first = settings.first_byte_timeout
        if first is None:  # not less than `idle`, where 0 is no limit
            first = max(FIRST_BYTE_TIMEOUT, idle) if idle else 0
        # A client of the openai package has the address and the key itself
        server: dict[str, Any] = {"client": self.client}
        if self.client is None:
            server = {"base_url": settings.base_url, "api_key": settings.api_key}
        return ChatModel(
            name,
            context_window=settings.context_window or window_of(name),
            idle_timeout=idle,
            first_byte_timeout=first,
            extra_body=settings.extra_body,
            headers=settings.headers,
            profile=settings.profile,
            price=settings.price_of(name),
            redact=redactor.data if redactor else None,
            **server,
        )

    def model_of(self, spec: AgentSpec) -> ChatModel:
        """The model of an agent that works for the present one: its own, or the present one's."""
        model = self.model_named(spec.model or self.model.name)
        if self.options.trace:
            self.options.trace.attach(model)
        return model

    def hooks_for(
        self, model: ChatModel, permissions: Permissions, users: Sequence[Hooks]
    ) -> tuple[HookChain, Compaction | None]:
        """The hooks of an agent, in their order, and the compaction among them, if it is on."""
        hooks: list[Hooks] = [permissions, *users, *self.options.hooks]
        if self.parts.sandbox:
            hooks.append(self.parts.sandbox)
        instructions = optional("coder.agent.instructions")
        if instructions:
            hooks.append(instructions.FolderInstructions(self.parts.cwd))
        compaction = self._make_compaction(model)
        if compaction:
            guard = optional("coder.extend.guard")
            if guard:  # if the summary fails, the run goes on
                hooks.append(guard.Guard(compaction, seconds=None))
            else:
                hooks.append(compaction)
        if self.parts.redaction:
            hooks.append(self.parts.redaction.Redaction(self.parts.redactor))
        chain = HookChain(*hooks)
        if self.options.trace:
            chain = self.options.trace.hooks(chain)
        return chain, compaction

    def _make_compaction(self, model: ChatModel) -> Compaction | None:
        module = optional("coder.agent.compaction") if self.options.compaction else None
        if module is None:
            return None
        spec = self.parts.agents["compaction"]
        writer = self.model_of(spec) if spec.model else None
        made: Compaction = module.Compaction(
            model,
            prompt=spec.prompt,
            writer=writer,
            keep=keep_of(model.context_window),
        )
        return made

    def tools_for(self, model: str, read_only: bool) -> list[Tool]:
        """The tools for a model of this name: built-in ones, the program's, of plugins and MCP
        servers.
        """
        is_gpt_5 = model.rsplit("/", 1)[-1].lower().startswith("gpt-5")
        tools: list[Tool] = [*(PATCHING if is_gpt_5 else TOOLS), *self.parts.extra_tools]
        if self.parts.servers:
            tools += self.parts.servers.tools()
        if self.parts.sandbox:
            tools = self.parts.sandbox.tools(tools, read_only)
        return tools

    def prompt_for(self, model: ChatModel, spec: AgentSpec) -> str:
        """The system prompt of an agent: rules, place, instruction files, skills."""
        # Whether the prompt has to say that nobody answers questions; a sub-agent's own does
        is_alone = not self.options.ask and spec.mode != "subagent"
        parts = self.parts
        prompt = system_prompt(parts.cwd, model.name, parts.instructions, spec.prompt, is_alone)
        skills = parts.prompt_files.section if parts.prompt_files else ""
        return f"{prompt}\n\n{skills}" if skills else prompt

    def equip(self, spec: AgentSpec, session_id: str) -> Equipment:
        """What a sub-agent works with: it may do nothing that the present agent may not."""
        from coder.agent.subagent import Equipment  # it may be deleted

        model = self.model_of(spec)
        permissions = self.permissions.child([*spec.rules, NO_TASK], spec.read_only)
        users = [hooks.in_child() for hooks in self.parts.users_hooks]
        tools = permissions.offered(self.tools_for(model.name, permissions.changes_nothing))
        hooks, _ = self.hooks_for(model, permissions, users)
        toolset = ToolsetClass(tools, cwd=self.parts.cwd, session_id=session_id)
        return Equipment(model, toolset, self.prompt_for(model, spec), hooks)
