"""A session as an editor has it: prompts, what is seen of a run, questions, modes, cancelling."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import Any
from urllib.parse import unquote, urlsplit

import acp
from acp import schema

from coder.asynchronous import stream_events
from coder.doors.acp_commands import Command, commands_of
from coder.doors.acp_updates import Updates, block_of
from coder.events import (
    Event,
    Events,
    Nested,
    PermissionAsked,
    Question,
    QuestionAsked,
    RunEnd,
)
from coder.providers.errors import explain
from coder.session import Session
from coder.tools.files import image_of
from coder.types import Aborted, CoderError, StopReason, T

YOLO = "yolo"
STOPPED: dict[StopReason, schema.StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "content_filter": "refusal",
    "max_steps": "max_turn_requests",
    "max_time": "max_turn_requests",
    "doom_loop": "max_turn_requests",
    "aborted": "cancelled",
}
READ_LATER = "The user sees the question and answers it with the next prompt: end your turn now."


class Talk:
    """A session and the editor that it works for; `has_forms`: which can ask for a text."""

    def __init__(self, session: Session, client: acp.Client, has_forms: bool) -> None:
        self.session = session
        self.client = client
        self.has_forms = has_forms
        self.updates = Updates(session.cwd)
        self.commands = commands_of(session)
        self.is_busy = False
        self.is_cancelled = False
        self._asked: set[asyncio.Future[Any]] = set()  # what the editor has not answered yet

    # -- prompts

    async def prompt(self, blocks: Sequence[Any]) -> schema.StopReason:
        """One turn. Raises RequestError, CoderError and ConfigError."""
        self._check_idle()
        self.is_busy = True
        self.is_cancelled = False
        try:
            # Nothing is waited for before the run begins: a cancel that comes next stops it
            events = await self._begin(*read_prompt(blocks))
            end = await self._follow(events) if events else None
        except Aborted:
            self.is_cancelled = True
        finally:
            self.is_busy = False
        if self.is_cancelled:
            return "cancelled"
        if end is None:
            return "end_turn"
        if end.stop_reason == "error":
            raise acp.RequestError(-32603, explain(end.error) if end.error else end.text)
        return STOPPED[end.stop_reason]

    async def _begin(self, text: str, images: Sequence[dict[str, Any]]) -> Events[object] | None:
        """The run of a prompt or a command; None if there is none."""
        name, _, words = text.removeprefix("/").partition(" ")
        command = self.commands.get(name) if text.startswith("/") else None
        if command is None:
            return self.session.prompt(text, images)
        if not await self._trusts(command) or self.is_cancelled:
            return None
        begun = command.begin(self.session, words.strip())
        return self.session.prompt(begun, images) if isinstance(begun, str) else begun

    async def _follow(self, events: Events[object]) -> RunEnd | None:
        """Show a run; its end."""
        end: RunEnd | None = None
        running: AsyncGenerator[Event, None] = stream_events(events, self.session.agent.token)
        async with aclosing(running):
            async for event in running:
                await self._show(event, caller="")
                if isinstance(event, RunEnd):
                    end = event
        return end

    async def _show(self, event: Event, caller: str) -> None:
        if isinstance(event, Nested):
            await self._show(event.event, f"{caller}{event.call_id}/")
            return
        for update in self.updates.of(event, caller):
            await self.send(update)
        if isinstance(event, Question):
            answer = await self._answer_to(event, caller + event.call_id)
            self.session.answer(event.id, answer)

    async def send(self, update: Any) -> None:
        await self.client.session_update(self.session.id, update)

    def cancel(self) -> None:
        self.is_cancelled = True
        self.session.cancel()
        for asked in self._asked:
            asked.cancel()

    def _check_idle(self) -> None:
        if self.is_busy:
            raise CoderError("the session is at work: cancel the turn, or wait for its end")

    # -- questions

    async def _answer_to(self, question: Question, call: str) -> str:
        """The user's answer, in the words of Session.answer."""
        if isinstance(question, QuestionAsked):
            return await self._answer_in_words(question, call)
        if isinstance(question, PermissionAsked):
            return await self._choose(self.updates.question(question, call), choices_of(question))
        title = f"{question.name} with the same arguments, {question.count} times in a row"
        asked = schema.ToolCallUpdate(tool_call_id=call, title=title, status="pending")
        return await self._choose(asked, {"once": "Run it again"})

    async def _answer_in_words(self, question: QuestionAsked, call: str) -> str:
        """By a form of the editor, else by a choice, else with the next prompt."""
        if self.has_forms:
            return await self._fill_form(question, call)
        if question.options:
            asked = schema.ToolCallUpdate(tool_call_id=call, title=question.question)
            options = {option: option for option in question.options}
            return await self._choose(asked, options, refusal="")
        await self.send(acp.update_agent_message_text(f"\n{question.question}\n"))
        return READ_LATER

    async def _fill_form(self, question: QuestionAsked, call: str) -> str:
        about = "\n- ".join([question.question, *question.options])
        answer = schema.ElicitationStringPropertySchema(type="string", title="Answer")
        form = schema.ElicitationFormSessionMode(
            session_id=self.session.id,
            tool_call_id=call,
            requested_schema=schema.ElicitationSchema(properties={"answer": answer}),
        )
        filled = await self._wait_for(self.client.create_elicitation(about, form))
        return str((getattr(filled, "content", None) or {}).get("answer", ""))

    async def _choose(
        self, asked: schema.ToolCallUpdate, choices: dict[str, str], refusal: str = "no"
    ) -> str:
        """The answer that is chosen among these, of which the words are shown."""
        options = [
            schema.PermissionOption(
                option_id=answer,
                name=words,
                kind="allow_always" if answer == "always" else "allow_once",
            )
            for answer, words in choices.items()
        ]
        no = schema.PermissionOption(option_id="no", name="No", kind="reject_once")
        request = self.client.request_permission(self.session.id, asked, [*options, no])
        chosen = getattr(await self._wait_for(request), "outcome", None)
        answer = getattr(chosen, "option_id", "no")
        return answer if answer in choices else refusal

    async def _wait_for(self, request: Awaitable[T]) -> T | None:
        """The editor's answer; None if the turn is cancelled, or if it reports an error."""
        asked = asyncio.ensure_future(request)
        self._asked.add(asked)
        try:
            await asyncio.wait({asked})
        finally:
            self._asked.discard(asked)
            asked.cancel()
        if asked.cancelled() or asked.exception():
            return None
        return asked.result()

    async def _trusts(self, command: Command) -> bool:
        """Whether the user trusts the file of a command, if it is the project's."""
        file = command.file
        files = self.session.parts.prompt_files
        if file is None or file.answer == "yes" or files is None:
            return True
        title = f"Use this text of the project, which instructs the model? {file.path}"
        asked = schema.ToolCallUpdate(
            tool_call_id=f"trust {file.path}",
            title=title,
            status="pending",
            content=[block_of(file.text)],
        )
        answer = await self._choose(asked, {"yes": "Yes, also later"})
        if answer == "yes":
            files.answer([file], "yes")
            self.session.crew.set_prompt()
        return answer == "yes"

    # -- modes

    @property
    def modes(self) -> schema.SessionModeState:
        """Agents, and the one that works without questions."""
        about = {name: spec.description for name, spec in self.session.parts.primary.items()}
        about[YOLO] = "works without asking; what a rule denies stays denied"
        modes = [
            schema.SessionMode(id=name, name=name, description=text) for name, text in about.items()
        ]
        present = YOLO if self.session.permissions.yolo else self.session.spec.name
        return schema.SessionModeState(available_modes=modes, current_mode_id=present)

    def set_mode(self, mode: str) -> None:
        """Raises CoderError for an unknown one, and during a turn."""
        self._check_idle()
        is_yolo = mode == YOLO
        self.session.use(agent="build" if is_yolo else mode)
        self.session.permissions.yolo = is_yolo
        if self.session.conversation:  # the session may be loaded again before a prompt
            self.session.conversation.keep_agent()

    def list_commands(self) -> schema.AvailableCommandsUpdate:
        """The update that offers the slash commands."""
        offered: list[schema.AvailableCommand] = []
        for name, command in self.commands.items():
            words = None
            if command.hint:
                hint = schema.UnstructuredCommandInput(hint=command.hint)
                words = schema.AvailableCommandInput(hint)
            offered.append(
                schema.AvailableCommand(name=name, description=command.about, input=words)
            )
        return schema.AvailableCommandsUpdate(
            session_update="available_commands_update", available_commands=offered
        )


def choices_of(question: PermissionAsked) -> dict[str, str]:
    """The answers that allow something, each in words."""
    if not question.remember:
        return {"once": "Allow once"}
    return {"once": "Allow once", "always": f"Always: {words_for(question)}"}


def words_for(question: PermissionAsked) -> str:
    """What "always" would allow."""
    pattern = question.remember
    match question.permission:
        case "edit":
            return f"all edits in this folder ({pattern})"
        case "external_directory":
            return f"read in {pattern}"
        case "bash" | "unconfined":
            return f"exactly this command ({pattern})"
    return f"{question.permission} {pattern}"


# ---- prompts -------------------------------------------------------------------------------------


def read_prompt(blocks: Sequence[Any]) -> tuple[str, list[dict[str, Any]]]:
    """The text of a prompt, with what is attached, and its images. Raises CoderError."""
    texts: list[str] = []
    attached: list[str] = []
    images: list[dict[str, Any]] = []
    for block in blocks:
        match block.type:
            case "text":
                texts.append(block.text)
            case "image":
                images.append(read_image(block.data))
            case "resource_link":
                texts.append(path_of(block.uri))
            case "resource":
                text = getattr(block.resource, "text", "(not a text)")
                path = path_of(block.resource.uri)
                attached.append(f'\n\n<attached path="{path}">\n{text}\n</attached>')
            case _:
                raise CoderError(f"a prompt with {block.type} is not taken")
    return "".join(texts + attached), images


def read_image(data: str) -> dict[str, Any]:
    """An image of a prompt. Raises CoderError."""
    try:
        return image_of(base64.b64decode(data))
    except ValueError as error:
        raise CoderError(f"the image is not taken: {error}") from None


def path_of(uri: str) -> str:
    """The path of a file; any other address as it is."""
    parts = urlsplit(uri)
    return unquote(parts.path) if parts.scheme == "file" else uri
