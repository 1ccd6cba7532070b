"""Session: the agent of the command line, in a folder, for any program.

    with Session.open("~/project", model="gpt-5") as session:
        for event in session.prompt("Mend the tests."):
            print(event)

What the command line has is switched on: sandbox, questions, rules, redaction, compaction, undo,
instructions, skills, plugins, MCP servers, the conversation on disk. The terminal and the single
task are built on it. It knows no screen, no flags, no signals and no current folder, so that
several sessions can work in one process, each in a folder of its own.

One run at a time. `answer`, `cancel` and `questions` can be used in any thread; all else between
runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from coder.agent.profiles import AgentSpec
from coder.ai import ChatModel
from coder.arguments import Schema
from coder.crew import Crew
from coder.events import (
    Event,
    Events,
    Nested,
    Notice,
    Question,
    RunEnd,
    StepEnd,
    drain,
    hidden_usage,
)
from coder.history import user
from coder.parts import Keywords, Options, Parts, options_of
from coder.questions import ASKING, Questions, question_in
from coder.settings import ConfigError, needed, optional
from coder.types import CoderError, Message, RunResult, T, Usage, V

if TYPE_CHECKING:
    from coder.agent.titles import Titler
    from coder.sessions.conversation import Conversation
    from coder.sessions.snapshots import UndoResult

CLOSING = 2.0  # seconds for a run in another thread to end
PLAN_IS_OVER = "Plan mode is over: files can be changed now."
NO_COMPACTION = "compaction is off (--no-compaction), or its module was deleted"


class Session:
    """An agent at work in a folder. Made by `open`.

    `agent` is the Agent, with its queues and its state; `permissions` say what is allowed.
    `notices` are lines that a person should see, which a run passes on as events. `usage` is that
    of all runs, `newest_usage` that of the newest answer.
    """

    conversation: Conversation | None = None  # None: its module was deleted

    @classmethod
    def open(cls, cwd: str | Path, **keywords: Unpack[Keywords]) -> Session:
        """A session in `cwd`; docs/library.md has a table of the keywords. Raises CoderError."""
        try:
            return cls(options_of(cwd, keywords))
        except ConfigError as error:
            raise CoderError(str(error)) from None

    def __init__(self, options: Options) -> None:
        self.options = options
        self.cwd = options.cwd
        self.settings = options.settings
        self.usage = Usage()
        self.newest_usage = Usage()
        self.parts = Parts(options)
        self.notices = self.parts.notices
        self.permissions = self.parts.permissions
        self._questions = Questions(options.ask_timeout)
        self._is_closed = False
        self._was_planning = False  # in the newest run of this conversation
        try:
            self.crew = Crew(self.parts)
            self.agent = self.crew.agent
            self.agent.subscribe(self._count_usage)
            plugins = self.parts.plugins
            if plugins and plugins.subscribers:
                self.agent.subscribe(plugins.notify)
            self._open_conversation()
        except BaseException:
            self.parts.close()
            raise

    def _open_conversation(self) -> None:
        """Begin a conversation, or continue the one that the program wants."""
        options = self.options
        name = "coder.sessions.conversation"
        module = needed(name, "to resume a conversation") if options.resume else optional(name)
        if module is None:
            return
        made: Conversation = module.open_conversation(
            self.agent,
            self.cwd,
            options.data,
            tell=self.notices.append,
            keep=options.keep,
            one_task=options.one_task,
            resume=options.resume,
        )
        self.conversation = made
        made.agent_name = self.spec.name
        made.count_usage = self._count_usage
        made.subagents = self.crew.subagents
        if made.subagents:
            made.subagents.load = made.load_child
        wants_title = self.settings.titles and options.keep and not options.one_task
        if wants_title and optional("coder.agent.titles"):
            made.make_titler = self._make_titler
        if options.resume:
            self._continue(as_its_agent=not options.agent)

    def _make_titler(self, prompt: str) -> Titler:
        from coder.agent.titles import Titler  # it may be deleted

        spec = self.parts.agents["title"]
        model = self.crew.model_named(spec.model or self.model.name)
        return Titler(model, prompt, spec.prompt)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the run, write what is left of the conversation, stop what was started.

        `notices` has then what was changed after the last command. Can be called twice.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.cancel()
        self.agent.wait_for_idle(CLOSING)
        if self.conversation:
            self.conversation.close()
        self.notices += self.parts.close()

    # -- runs

    def prompt(
        self,
        text: str,
        images: Sequence[dict[str, Any]] = (),
        *,
        output: type[V] | Schema | None = None,
    ) -> Events[RunResult[V]]:
        """One run: its events, the last of which is `run_end`; the generator returns its RunResult.

        It begins with its first event, but a `cancel` from this call on ends it. `images` and
        `output` are as in Agent.prompt. Raises RuntimeError during a run. A question waits until it
        is answered: by its own `reply`, before the next event is taken, or by `answer`.
        """
        self._check_idle()
        # The conversation still holds what was denied in plan mode: say that it no longer counts
        if self._was_planning and not self.spec.read_only:
            message = user(PLAN_IS_OVER)
            message["meta"]["own"] = True  # the program's: it stays when the run is taken back
            self.messages.append(message)
        self._was_planning = self.spec.read_only
        run = self.agent.stream(self.parts.redact(text), images, output=output)
        if self.options.trace:
            run = self.options.trace.watch(run)
        return self._for_the_user(run)

    def aprompt(
        self, text: str, images: Sequence[dict[str, Any]] = ()
    ) -> AsyncGenerator[Event, None]:
        """`prompt` for asyncio: the run works in a thread, and to leave the loop cancels it."""
        from coder.asynchronous import stream_events  # late: asyncio takes 40 ms

        return stream_events(self.prompt(text, images), self.agent.token)

    def run(
        self,
        text: str,
        images: Sequence[dict[str, Any]] = (),
        *,
        output: type[V] | Schema | None = None,
    ) -> RunResult[V]:
        """`prompt` to its end, without the events; `answer` counts from any other thread."""
        return drain(self.prompt(text, images, output=output))

    async def arun(
        self,
        text: str,
        images: Sequence[dict[str, Any]] = (),
        *,
        output: type[V] | Schema | None = None,
    ) -> RunResult[V]:
        """`run` for asyncio; to cancel the task cancels the run."""
        from coder.asynchronous import result_of  # late: asyncio takes 40 ms

        return await result_of(self.prompt(text, images, output=output), self.agent.token)

    def cancel(self) -> None:
        """End the run; from any thread."""
        self.agent.abort()

    def compact(self, focus: str = "") -> Events[bool]:
        """Shorten the conversation now, with what matters most in mind.

        Raises CoderError if that is off.
        """
        compaction, messages = self.crew.compaction, self.messages
        if compaction is None:
            raise CoderError(NO_COMPACTION)
        return self._for_the_user(
            self.agent.run_as_work(lambda abort: compaction.compact(messages, abort, focus))
        )

    def sum_up(self) -> Events[str]:
        """What happened in the conversation, as the value of the events. Raises CoderError."""
        module = optional("coder.agent.compaction")
        spec, messages = self.parts.agents["summary"], self.messages
        if module is None:
            raise CoderError(NO_COMPACTION)
        if not messages:
            raise CoderError("there is nothing to sum up")
        model = self.crew.model_of(spec)
        return self._for_the_user(
            self.agent.run_as_work(lambda abort: module.sum_up(model, messages, abort, spec.prompt))
        )

    def _for_the_user(self, run: Events[T]) -> Events[T]:
        """The events of a run, with the notices that come up; a question waits for its answer."""
        try:
            with contextlib.closing(run):
                while True:
                    try:  # by hand, without Returning: no frame more for each token
                        event = next(run)
                    except StopIteration as end:
                        value: T = end.value
                        return value
                    while self.notices:
                        yield Notice(self.notices.pop(0))
                    # `type` first: most events are tokens, and no questions
                    may_ask = self.options.ask and event.type in ASKING
                    question = question_in(event) if may_ask else None
                    if question:
                        yield from self._ask(question, event)
                    else:
                        yield event
        finally:
            self.settle()

    def _ask(self, question: Question, event: Event) -> Events[None]:
        """Yield the event that is the question, or a sub-agent's with it; wait for the answer."""
        self._questions.put(question)
        try:
            yield event
            self._questions.wait(question, self.agent.token)
        finally:
            self._questions.drop(question)

    def settle(self) -> None:
        """After a run, however it ended: write what is left of it. It can be called again."""
        if self.conversation:
            self.conversation.settle()

    def _count_usage(self, event: Event) -> None:
        if isinstance(event, StepEnd) and event.usage.input:
            self.newest_usage = event.usage
        elif isinstance(event, RunEnd):
            self.usage += event.usage
        elif isinstance(event, Nested):
            self.usage += hidden_usage(event) or Usage()

    # -- questions

    @property
    def questions(self) -> list[Question]:
        """The questions that wait for an answer."""
        return self._questions.waiting()

    def answer(
        self, question_id: str, answer: str, *, reason: str = "", remember: str = ""
    ) -> bool:
        """Answer a question; from any thread. False if it no longer waits: the first answer counts.

        `once`, `always` or `no` for a permission and a repeated call, any text for a question of
        the model's. `reason`: for the model, with `no`. `remember`: with `always`, another pattern
        than the question's own. Raises ValueError for another word.
        """
        return self._questions.answer(question_id, answer, reason, remember)

    # -- who works

    def use(self, *, agent: str = "", model: str | ChatModel = "") -> None:
        """Continue as another agent, with another model, or both.

        Raises CoderError, and RuntimeError during a run.
        """
        self._check_idle()
        self.crew.use(agent, model)
        if self.conversation:
            self.conversation.agent_name = self.spec.name

    @property
    def spec(self) -> AgentSpec:
        """Who works."""
        return self.crew.spec

    @property
    def model(self) -> ChatModel:
        return self.crew.model

    @property
    def context_used(self) -> float:
        """The share of the context window that the newest request and its answer took."""
        newest = self.newest_usage
        return (newest.input + newest.output) / max(1, self.model.context_window)

    def _check_idle(self) -> None:
        if self.agent.state.is_streaming:
            raise RuntimeError("the session is at work: cancel the run, or wait for its end")

    # -- the conversation

    @property
    def id(self) -> str:
        """With which the conversation can be resumed, if it `is_kept`."""
        return self.agent.session_id

    @property
    def is_kept(self) -> bool:
        return bool(self.conversation and self.conversation.is_kept)

    @property
    def messages(self) -> list[Message]:
        """The conversation: the API's dicts."""
        return self.agent.messages

    def begin(self) -> None:
        """Begin a new conversation; the one before is kept. Raises RuntimeError during a run."""
        self._kept_conversation().begin()
        self._forget()

    def resume(self, which: str) -> None:
        """Continue an older conversation, with its agent, by its id or name.

        Raises StoreError; then the present one stays. Raises RuntimeError during a run.
        """
        if self._kept_conversation().resume(which):
            self._continue()

    def undo(self) -> UndoResult:
        """Take back what the last run changed in the folder, and its messages. Raises RuntimeError
        during a run."""
        return self._undo_or_redo(self._kept_conversation().snapshots.undo)

    def redo(self) -> UndoResult:
        """Do again what was undone last."""
        return self._undo_or_redo(self._kept_conversation().snapshots.redo)

    def _undo_or_redo(self, change: Callable[[list[Message]], UndoResult]) -> UndoResult:
        result = change(self.messages)
        self.settle()
        return result

    def _kept_conversation(self) -> Conversation:
        self._check_idle()
        if self.conversation is None:
            raise CoderError("conversations are not available: their modules were deleted")
        return self.conversation

    def _continue(self, as_its_agent: bool = True) -> None:
        """Go on with the resumed conversation, as its agent or as the present one."""
        self._forget()
        assert self.conversation
        name = self.conversation.recorder.info.agent
        folder = self.conversation.began_elsewhere
        spec = self.parts.agents.get(name)
        self._was_planning = bool(spec and spec.read_only)
        if as_its_agent and name != self.spec.name and name in self.parts.primary:
            self.use(agent=name)
            self.notices.append(f"Agent {name} continues: {self.spec.description}.")
        if folder:
            began = f"This conversation began in {folder}"
            self.notices.append(f"{began}; now files and permissions are those of {self.cwd}.")

    def _forget(self) -> None:
        """Forget what belongs to another conversation."""
        self.permissions.memory.clear()
        self.newest_usage = Usage()
        self._was_planning = False
        if self.crew.subagents:
            self.crew.subagents.children.clear()
