"""What an editor is shown: the updates of the protocol, made of events and of messages."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import acp
from acp import schema

from coder import events
from coder.events import Event, PermissionAsked
from coder.history import calls_of, text_of
from coder.permissions.sanitize import escape_invisible
from coder.providers.errors import happened
from coder.tools.patch_format import HEADER
from coder.toolset import Toolset
from coder.types import Message, ToolCall, ToolResult

KINDS: dict[str, schema.ToolKind] = {
    "read": "read",
    "ls": "read",
    "grep": "search",
    "glob": "search",
    "edit": "edit",
    "write": "edit",
    "apply_patch": "edit",
    "bash": "execute",
    "todo": "think",
    "task": "think",
}
PROGRESS: dict[str, schema.PlanEntryStatus] = {
    "pending": "pending",
    "in_progress": "in_progress",
    "done": "completed",
}
LIMITS = ("max_steps", "max_time", "doom_loop")  # their text is no answer of the model's
MAX_SHOWN = 10_000  # characters of the output of a call that runs: each update repeats them
IMAGE_URL = re.compile(r"data:(?P<kind>image/\w+);base64,(?P<data>.+)", re.S)
HUNK = re.compile(
    r"@@ -(?P<old_line>\d+)(?:,(?P<old_size>\d+))? \+(?P<line>\d+)(?:,(?P<size>\d+))? @@.*"
)
Update = Any  # one of a dozen classes of the package


class Updates:
    """Those of a session in the folder `cwd`."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self._outputs: dict[str, str] = {}  # of the calls that run

    def of(self, event: Event, caller: str = "") -> list[Update]:
        """The updates for an event; `caller` begins the ids of a sub-agent's calls."""
        match event:
            case events.ToolStart():
                return [self._start(event, caller + event.id)]
            case events.ToolUpdate():
                return [self._go_on(event, caller + event.id)]
            case events.ToolEnd():
                return self._end(event, caller + event.id)
        return [] if caller else words_of(event)

    def _start(self, event: events.ToolStart, call: str) -> Update:
        return acp.start_tool_call(
            call,
            escape_invisible(event.title),
            kind=KINDS.get(event.name, "other"),
            status="in_progress",
            locations=self._places(event.arguments),
            raw_input=event.arguments,
        )

    def _go_on(self, event: events.ToolUpdate, call: str) -> Update:
        output = self._outputs.get(call, "") + event.text
        self._outputs[call] = output[-MAX_SHOWN:]
        return acp.update_tool_call(call, content=[block_of(self._outputs[call])])

    def _end(self, event: events.ToolEnd, call: str) -> list[Update]:
        self._outputs.pop(call, None)
        result = event.result
        hunks = hunks_of(result.details.get("diff", ""), self.cwd)
        content = [hunk.content for hunk in hunks] or content_of(result.content)
        places = [schema.ToolCallLocation(path=hunk.path, line=hunk.line) for hunk in hunks]
        status: schema.ToolCallStatus = "failed" if event.is_error else "completed"
        ended = acp.update_tool_call(call, status=status, content=content, locations=places or None)
        if "todo" in result.details:
            return [plan_of(result.details["todo"]), ended]
        return [ended]

    def _places(self, arguments: Mapping[str, Any]) -> list[schema.ToolCallLocation]:
        """The files that a call names."""
        paths = [header[2] for header in HEADER.finditer(str(arguments.get("patch", "")))]
        if isinstance(arguments.get("path"), str):
            paths.append(arguments["path"])
        line = arguments.get("offset")
        is_line = isinstance(line, int) and line > 0
        return [
            schema.ToolCallLocation(path=absolute(self.cwd, path), line=line if is_line else None)
            for path in paths
        ]

    def question(self, question: PermissionAsked, call: str) -> schema.ToolCallUpdate:
        """What permission is asked for, with all that is to be decided on."""
        detail = escape_invisible(question.detail)
        content: list[Any] = [hunk.content for hunk in hunks_of(detail, self.cwd)]
        if detail and not content:
            content.append(block_of(detail))
        if question.why:
            content.append(block_of(escape_invisible(question.why)))
        title = escape_invisible(f"{question.permission}: {question.pattern}")
        return schema.ToolCallUpdate(
            tool_call_id=call, title=title, status="pending", content=content or None
        )

    # -- a conversation that goes on

    def replay(self, messages: Sequence[Message], tools: Toolset) -> Iterator[Update]:
        """The updates for what was said and done before."""
        for message in messages:
            match message.get("role"):
                case "user":
                    yield from map_user(message)
                case "assistant":
                    if text_of(message):
                        yield acp.update_agent_message_text(text_of(message))
                    for call in calls_of(message):
                        yield from self.of(_started(call, tools))
                case "tool":
                    yield from self.of(_ended(message))


def _started(call: Mapping[str, Any], tools: Toolset) -> events.ToolStart:
    name = call["function"]["name"]
    try:
        arguments = dict(json.loads(call["function"]["arguments"]))
    except (ValueError, TypeError):  # as the model wrote them
        arguments = {}
    title = tools.title(ToolCall(call["id"], name, arguments))
    return events.ToolStart(call["id"], name, arguments, title)


def _ended(message: Message) -> events.ToolEnd:
    is_error = bool(message.get("meta", {}).get("is_error"))
    result = ToolResult(message["content"], is_error)
    return events.ToolEnd(message["tool_call_id"], "", result, is_error, seconds=0)


def map_user(message: Message) -> Iterator[Update]:
    """A user's message, but for one that the program has written."""
    if message.get("meta", {}).get("own"):
        return
    for block in blocks_of(message["content"]):
        yield acp.update_user_message(block)


# ---- texts and pictures --------------------------------------------------------------------------


def words_of(event: Event) -> list[Update]:
    """What is said in an event."""
    match event:
        case events.TextDelta(text=text):
            return [acp.update_agent_message_text(text)]
        case events.ReasoningDelta(text=text):
            return [acp.update_agent_thought_text(text)]
        case events.Notice(text=text):
            return [acp.update_agent_thought_text(f"{text}\n")]
        case events.Retry(error=error, delay=delay):
            again = f"\n{happened(error)}; the answer begins anew in {delay:.0f} s.\n"
            return [acp.update_agent_thought_text(again)]
        case events.RunEnd(stop_reason=reason, text=text) if reason in LIMITS:
            return [acp.update_agent_message_text(f"\n{text}")]
    return []


def plan_of(items: Sequence[Mapping[str, str]]) -> Update:
    """The model's checklist."""
    return acp.update_plan(
        acp.plan_entry(item["text"], status=PROGRESS[item["status"]]) for item in items
    )


def blocks_of(content: str | Sequence[Mapping[str, Any]]) -> list[Any]:
    """The content of a message or a result, as the protocol's blocks."""
    if isinstance(content, str):
        return [acp.text_block(content)]
    blocks: list[Any] = []
    for part in content:
        url = IMAGE_URL.fullmatch(str((part.get("image_url") or {}).get("url", "")))
        if url:
            blocks.append(acp.image_block(url["data"], url["kind"]))
        elif part.get("type") == "image":
            blocks.append(acp.image_block(part["data"], part["mimeType"]))
        else:
            blocks.append(acp.text_block(part.get("text", "")))
    return blocks


def content_of(content: str | Sequence[Mapping[str, Any]]) -> list[Any]:
    """The result of a call."""
    shown: list[Any] = []
    for block in blocks_of(content):
        is_text = block.type == "text"
        shown.append(block_of(block.text) if is_text else acp.tool_content(block))
    return shown


def block_of(text: str) -> Any:
    """Text as it is: editors take it for Markdown."""
    longest = max((len(ticks) for ticks in re.findall("`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return acp.tool_content(acp.text_block(f"{fence}\n{text}\n{fence}"))


# ---- files ---------------------------------------------------------------------------------------


def absolute(cwd: Path, path: str) -> str:
    """The path of a call, which is relative to the session's folder."""
    return os.path.normpath(cwd / os.path.expanduser(path))


@dataclass
class Hunk:
    """One place of a file that changes: its lines before and after, from `line` on."""

    path: str
    line: int
    old_size: int
    new_size: int
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        return len(self.old) < self.old_size or len(self.new) < self.new_size

    def add(self, line: str) -> None:
        if not line.startswith("+"):
            self.old.append(line[1:])
        if not line.startswith("-"):
            self.new.append(line[1:])

    @property
    def content(self) -> Any:
        """As the protocol has it; no old text says that the file is new."""
        old = joined(self.old) if self.old else None
        return acp.tool_diff_content(self.path, joined(self.new), old)


def joined(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def hunks_of(diff: str, cwd: Path) -> list[Hunk]:
    """The hunks of unified diffs of one file or several."""
    hunks: list[Hunk] = []
    path = ""
    for line in diff.split("\n"):
        header = HUNK.fullmatch(line)
        if hunks and hunks[-1].is_open:
            hunks[-1].add(line)
        elif line.startswith("+++ b/"):
            path = absolute(cwd, line.removeprefix("+++ b/"))
        elif header:
            old_size = int(header["old_size"] or 1)
            new_size = int(header["size"] or 1)
            hunks.append(Hunk(path, int(header["line"]), old_size, new_size))
    return hunks
