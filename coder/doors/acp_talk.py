"""A session as an editor has it: prompts, what is seen of a run, questions, modes, cancelling."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import aclosing
from typing import Any
from urllib.parse import unquote, urlsplit

import acp
from acp import schema
from acp.helpers import update_available_commands

from coder.asynchronous import stream_events
from coder.doors.acp_commands import commands_of
from coder.doors.acp_updates import Updates
from coder.events import Event, Events, Nested, PermissionAsked, Question, QuestionAsked, RunEnd
from coder.providers.errors import explain
from coder.session import Session
from coder.tools.files import image_of
from coder.types import Aborted, CoderError, StopReason, T

FAILED = -32603  # the code of an error of the model's server
YOLO = "yolo"
NONE = "reject"  # the id of the option that is no answer
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
    """A session and the editor that it works for."""

    def __init__(self, session: Session, client: acp.Client) -> None:
        self.session = session
        self.client = client
        self.updates = Updates(session.cwd)
        self.commands = commands_of(session)
        self.is_busy = False
        self.is_cancelled = False
        self._asked: asyncio.Future[Any] | None = None  # what the editor has not answered yet
        self.listing: asyncio.Task[None] | None = None  # of the commands

    async def send(self, update: Any) -> None:
        await self.client.session_update(self.session.id, update)

    # -- prompts

    async def prompt(self, blocks: Sequence[Any]) -> schema.StopReason:
        """One turn. Raises RequestError, CoderError and ConfigError."""
        self._check_idle()
        self.is_busy = True
        self.is_cancelled = False
        end: RunEnd | None = None
        try:
            # Nothing is waited for before the run begins, so that a cancel stops it
            text, images = read_prompt(blocks)
            end = await self._follow(self._begin(text, images))
        except Aborted:  # what is no run of the loop, such as a summary
            self.is_cancelled = True
        finally:
            self.is_busy = False
        if self.is_cancelled:
            return "cancelled"
        if end is None:
            return "end_turn"
        if end.stop_reason == "error":
            why = explain(end.error) if end.error else end.text
            raise acp.RequestError(FAILED, why)
        return STOPPED[end.stop_reason]

    def _check_idle(self) -> None:
        if self.is_busy:
            raise CoderError("the session is at work: cancel the turn, or wait for its end")

    def _begin(self, text: str, images: Sequence[dict[str, Any]]) -> Events[object]:
        """The run of a prompt or a command."""
        name, _, words = text.removeprefix("/").partition(" ")
        command = self.commands.get(name) if text.startswith("/") else None
        if command is None or command.begin is None:
            begun: str | Events[object] = self.session.parts.fill(text)
        else:
            begun = command.begin(self.session, words.strip())
        if isinstance(begun, str):
            return self.session.prompt(begun, images)
        return begun

    async def _follow(self, events: Events[object]) -> RunEnd | None:
        """Show a run; its end."""
        end: RunEnd | None = None
        token = self.session.agent.token
        async with aclosing(stream_events(events, token)) as running:
            async for event in running:
                await self._show(event, caller="")
                if isinstance(event, RunEnd):
                    end = event
        return end

    async def _show(self, event: Event, caller: str) -> None:
        """Show an event and ask what it asks; `caller` begins the ids of a sub-agent's calls."""
        if isinstance(event, Nested):
            await self._show(event.event, f"{caller}{event.call_id}/")
            return
        for update in self.updates.of(event, caller):
            await self.send(update)
        if isinstance(event, Question):
            answer = await self._answer_to(event, caller + event.call_id)
            self.session.answer(event.id, answer)

    def cancel(self) -> None:
        self.is_cancelled = True
        self.session.cancel()
        if self._asked:
            self._asked.cancel()

    # -- questions

    async def _answer_to(self, question: Question, call: str) -> str:
        """The user's answer, in the words of Session.answer."""
        if isinstance(question, PermissionAsked):
            asked = self.updates.question(question, call)
            return await self._choose(asked, answers_to(question)) or "no"
        if not isinstance(question, QuestionAsked):
            title = f"{question.name} with the same arguments, {question.count} times in a row"
            asked = schema.ToolCallUpdate(tool_call_id=call, title=title)
            return await self._choose(asked, {"once": "Run it again"}) or "no"
        if not question.options:  # the protocol has no question for a text
            await self.send(acp.update_agent_message_text(f"\n{question.question}\n"))
            return READ_LATER
        asked = schema.ToolCallUpdate(tool_call_id=call, title=question.question)
        words = {option: option for option in question.options}
        answer = await self._choose(asked, words, none="Another answer, with the next prompt")
        return answer or READ_LATER

    async def _choose(
        self,
        asked: schema.ToolCallUpdate,
        answers: Mapping[str, str],
        none: str = "No",
    ) -> str:
        """The answer that is chosen by its words; "" if it is `none`, or the turn is cancelled."""
        options: list[schema.PermissionOption] = []
        for answer, words in answers.items():
            kind: schema.PermissionOptionKind = "allow_once"
            if answer == "always":
                kind = "allow_always"
            options.append(
                schema.PermissionOption(
                    option_id=answer,
                    name=words,
                    kind=kind,
                )
            )
        options.append(
            schema.PermissionOption(
                option_id=NONE,
                name=none,
                kind="reject_once",
            )
        )
        request = self.client.request_permission(self.session.id, asked, options)
        response = await self._wait_for(request)
        chosen = response.outcome if response else None
        if isinstance(chosen, schema.AllowedOutcome) and chosen.option_id in answers:
            return chosen.option_id
        return ""

    async def _wait_for(self, request: Awaitable[T]) -> T | None:
        """The editor's answer; None if the turn is cancelled, or if it reports an error."""
        asked = asyncio.ensure_future(request)
        self._asked = asked
        try:
            await asyncio.wait({asked})
        finally:
            self._asked = None
            asked.cancel()
        if asked.cancelled() or asked.exception():
            return None
        return asked.result()

    # -- what is offered

    @property
    def modes(self) -> schema.SessionModeState:
        """The agents, and the one that works without questions."""
        described: dict[str, str] = {}
        for spec in self.session.parts.primary.values():
            described[spec.name] = spec.description
        described[YOLO] = "works without asking; what a rule denies stays denied"
        modes: list[schema.SessionMode] = []
        for name, about in described.items():
            modes.append(
                schema.SessionMode(
                    id=name,
                    name=name,
                    description=about,
                )
            )
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

    async def list_commands(self) -> None:
        """Offer the slash commands."""
        offered: list[schema.AvailableCommand] = []
        for name, command in self.commands.items():
            made = schema.AvailableCommand(name=name, description=command.about)
            if command.hint:
                hint = schema.UnstructuredCommandInput(hint=command.hint)
                made.input = schema.AvailableCommandInput(hint)
            offered.append(made)
        await self.send(update_available_commands(offered))


def answers_to(question: PermissionAsked) -> dict[str, str]:
    """The answers that allow something, each in words."""
    answers = {"once": "Allow once"}
    pattern = question.remember
    if not pattern:
        return answers
    match question.permission:
        case "edit":
            words = f"all edits in this folder ({pattern})"
        case "external_directory":
            words = f"read in {pattern}"
        case "bash" | "unconfined":
            words = f"exactly this command ({pattern})"
        case other:
            words = f"{other} {pattern}"
    return answers | {"always": f"Always: {words}"}


# ---- prompts -------------------------------------------------------------------------------------


def read_prompt(blocks: Sequence[Any]) -> tuple[str, list[dict[str, Any]]]:
    """The text of a prompt, with what is attached, and its images. Raises CoderError."""
    text = ""
    attached = ""
    images: list[dict[str, Any]] = []
    for block in blocks:
        match block.type:
            case "text":
                text += block.text
            case "image":
                images.append(read_image(block.data))
            case "resource_link":
                text += path_of(block.uri)
            case "resource":
                path = path_of(block.resource.uri)
                content = getattr(block.resource, "text", "(not a text)")
                attached += f'\n\n<attached path="{path}">\n{content}\n</attached>'
            case other:
                raise CoderError(f"a prompt with {other} is not taken")
    return text + attached, images


def read_image(data: str) -> dict[str, Any]:
    """An image of a prompt. Raises CoderError."""
    try:
        return image_of(base64.b64decode(data))
    except ValueError as error:
        raise CoderError(f"the image is not taken: {error}") from None


def path_of(uri: str) -> str:
    """The path of a file; any other address as it is."""
    try:
        parts = urlsplit(uri)
    except ValueError:  # brackets that hold no address
        return uri
    return unquote(parts.path) if parts.scheme == "file" else uri
