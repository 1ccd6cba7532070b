"""A conversation at the terminal: the model, the tools, the hooks and the list of messages, and one run of them.

The REPL and the one-shot mode are two ways to use it. What it leaves out: keeping it beyond the process.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

from coder.abort import Abort
from coder.ai import FIRST_BYTE_TIMEOUT, ChatModel
from coder.errors import RetryPolicy
from coder.features.compaction import Compaction
from coder.features.folder_instructions import FolderInstructions
from coder.features.hooks import HookChain
from coder.features.instructions import instructions
from coder.features.parallel import ParallelTools
from coder.features.plugins import Plugins
from coder.features.prompt import system_prompt
from coder.features.todo import newest, todo
from coder.history import user
from coder.loop import run_loop
from coder.terminal.approval import Approval
from coder.terminal.config import Settings, config_folder, window_of
from coder.terminal.interrupts import Interrupts
from coder.tools import Tool
from coder.tools.bash import bash
from coder.tools.edit import edit
from coder.tools.files import ls, read, write
from coder.tools.patch import apply_patch
from coder.tools.search import glob, grep
from coder.types import Event, Hooks, Limits, Message, Nested, Notice, RunEnd, RunResult, StepEnd, T, Usage

if TYPE_CHECKING:
    from coder.features.trace import Trace

TOOLS = (read, write, edit, bash, grep, glob, ls, todo)
PATCHING = (read, apply_patch, bash, grep, glob, ls, todo)  # the GPT-5 family is trained on apply_patch


def tools_for(model: str) -> tuple[Tool, ...]:
    """The built-in tools as a model family knows them."""
    return PATCHING if model.rsplit("/", 1)[-1].lower().startswith("gpt-5") else TOOLS


class Session:
    """State from one run to the next. `system` replaces our system prompt, `extra` follows on either; `hooks` and `plugins`
    are the user's, `trace` records all of it."""

    def __init__(self, settings: Settings, cwd: Path, approval: Approval, *, system: str = "", extra: str = "",
                 hooks: Hooks | None = None, plugins: Plugins | None = None, trace: Trace | None = None) -> None:
        self.settings = settings
        self.reasoning = settings.reasoning
        self.cwd = cwd
        self.approval = approval
        self.trace = trace
        self.plugins = plugins or Plugins()
        self.notices = self.plugins.taken_problems()  # what a person is to be told at the next occasion
        self.subscribers: list[Callable[[Event], None]] = [self._note, self.plugins.told]
        self.files = instructions(cwd, config_folder())
        self.folder_files = FolderInstructions(cwd, self.files)
        self.system = "\n\n".join(filter(None, [system or system_prompt(cwd, settings.model, self.files), extra]))
        self.messages: list[Message] = []
        self.usage = Usage()
        self.newest = Usage()  # of the newest answer
        self.interrupts = Interrupts()
        self.session_id = secrets.token_hex(8)
        self.tools = ParallelTools(cwd=cwd)
        self.abort = Abort()  # of the run under way
        self.use(settings.model)
        self.compaction = Compaction(self.model, notes=self._notes)
        chain = HookChain(*filter(None, [approval, hooks]), *self.plugins.hooks, self.folder_files, self.compaction)
        self.hooks = trace.hooks(chain) if trace else chain

    def use(self, name: str) -> None:
        """Talk to another model of the same server; the conversation goes on."""
        seen = self.tools.seen
        self.model = self.chat_model(name)
        if hasattr(self, "compaction"):
            self.compaction.model = self.model
        self.tools = ParallelTools([*tools_for(name), *self.plugins.tools], cwd=self.cwd, session_id=self.session_id)
        self.tools.seen = seen
        if self.trace:
            self.trace.attach(self.model)

    def chat_model(self, name: str = "") -> ChatModel:
        """A model of the server, without a name another one like ours: for what goes on beside a run."""
        settings, idle, name = self.settings, self.settings.idle_timeout, name or self.model.name
        first = max(FIRST_BYTE_TIMEOUT, idle) if idle else 0
        own = settings.context_window != window_of(settings.model)  # one that the person gave stays
        return ChatModel(name, base_url=settings.base_url, api_key=settings.api_key,
                         context_window=settings.context_window if own else window_of(name), idle_timeout=idle,
                         first_byte_timeout=first if settings.first_byte_timeout is None else settings.first_byte_timeout,
                         extra_body=settings.extra_body, profile=settings.profile, price=settings.price_of(name))

    @property
    def stalls(self) -> tuple[float, float]:
        """Seconds without data until a request is given up: at its start, later on."""
        return self.model.first_byte_timeout, self.model.idle_timeout

    def run(self, prompt: str, show: Callable[[Event], None]) -> RunResult:
        """One run, its events shown. Raises KeyboardInterrupt where it had to be broken off."""
        limits = Limits(max_steps=self.settings.max_steps, max_seconds=self.settings.max_seconds)
        self.abort = Abort()
        events = run_loop(self.messages, self.model, self.tools, prompts=prompt, system=self.system, reasoning=self.reasoning,
                          hooks=self.hooks, limits=limits, retry=RetryPolicy(base=self.settings.retry_base), abort=self.abort)
        return self._followed(self.trace.watch(events) if self.trace else events, show)

    def compact(self, focus: str, show: Callable[[Event], None]) -> bool:
        """Let the history be summarised now. Raises KeyboardInterrupt, and Aborted."""
        self.abort = Abort()
        return self._followed(self.compaction.compact(self.messages, self.abort, focus), show)

    def _followed(self, events: Generator[Event, None, T], show: Callable[[Event], None]) -> T:
        """Take the events to their end, tell all who listen, and stop where a person wants it."""
        with self.interrupts.stopping(self.abort):
            try:
                while True:
                    event = next(events)
                    for subscriber in self.subscribers:
                        subscriber(event)
                    show(event)
                    for text in self.told():
                        show(Notice(text))
            except StopIteration as end:
                value: T = end.value
                return value
            finally:
                events.close()

    def told(self) -> list[str]:
        """What a person is to be told; taken by this."""
        notices = [*self.notices, *self.plugins.taken_problems()]
        self.notices.clear()
        return notices

    def adopt(self, messages: list[Message], session_id: str = "") -> None:
        """Go on with this conversation."""
        self.messages = messages
        self.session_id = session_id or secrets.token_hex(8)
        self.tools.session_id = self.session_id
        self.tools.seen.clear()
        self.newest = Usage()

    def _note(self, event: Event) -> None:
        if isinstance(event, StepEnd) and event.usage.input:
            self.newest = event.usage
        elif isinstance(event, RunEnd):
            self.usage += event.usage
        elif isinstance(event, Nested) and isinstance(event.event, RunEnd):
            self.usage += event.event.usage

    def _notes(self) -> list[Message]:
        """What is to be said again where the history is shortened: instruction files of sub-folders, the checklist."""
        items = newest(self.messages)
        return [*self.folder_files.notes(), *([user(f"Your checklist as it stands:\n{items}")] if items else [])]
