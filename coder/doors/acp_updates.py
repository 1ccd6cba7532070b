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
from coder.tools.text import HUNK
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
IMAGE_URL = r"data:(?P<kind>image/\w+);base64,(?P<data>.+)"
Update = Any  # one of a dozen classes of the package
Content = Any  # what a call shows: text, an image, a diff


class Updates:
    """Those of a session in the folder `cwd`."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self._outputs: dict[str, str] = {}  # of the calls that run

    def of(self, event: Event, caller: str = "") -> list[Update]:
        """The updates for an event; `caller` begins the ids of a sub-agent's calls."""
        match event:
            case events.ToolStart():
                return [self._begin_call(event, caller + event.id)]
            case events.ToolUpdate():
                return [self._show_output(event, caller + event.id)]
            case events.ToolEnd():
                return self._end_call(event, caller + event.id)
        words = "" if caller else words_of(event)
        if not words:
            return []
        if isinstance(event, events.TextDelta | events.RunEnd):
            return [acp.update_agent_message_text(words)]
        return [acp.update_agent_thought_text(words)]

    def _begin_call(self, event: events.ToolStart, call: str) -> Update:
        return acp.start_tool_call(
            call,
            escape_invisible(event.title),
            kind=KINDS.get(event.name, "other"),
            status="in_progress",
            locations=self._places(event.arguments),
            raw_input=event.arguments,
        )

    def _places(self, arguments: Mapping[str, Any]) -> list[schema.ToolCallLocation]:
        """The files that a call names."""
        patch = str(arguments.get("patch", ""))
        paths = [header[2] for header in re.finditer(HEADER, patch)]
        if isinstance(arguments.get("path"), str):
            paths.append(arguments["path"])
        line = arguments.get("offset")
        if not isinstance(line, int) or line < 1:
            line = None
        places: list[schema.ToolCallLocation] = []
        for path in paths:
            whole = absolute(self.cwd, path)
            places.append(schema.ToolCallLocation(path=whole, line=line))
        return places

    def _show_output(self, event: events.ToolUpdate, call: str) -> Update:
        output = self._outputs.get(call, "") + event.text
        self._outputs[call] = output[-MAX_SHOWN:]
        return acp.update_tool_call(
            call,
            content=[verbatim(self._outputs[call])],
        )

    def _end_call(self, event: events.ToolEnd, call: str) -> list[Update]:
        self._outputs.pop(call, None)
        details = event.result.details
        hunks = hunks_of(details.get("diff", ""), self.cwd)
        content = content_of(event.result.content)
        if hunks:
            content = [hunk.content for hunk in hunks]
        ended = acp.update_tool_call(
            call,
            status="failed" if event.is_error else "completed",
            content=content,
            locations=[hunk.place for hunk in hunks] or None,
        )
        if "todo" not in details:
            return [ended]
        return [plan_of(details["todo"]), ended]

    def question(self, question: PermissionAsked, call: str) -> schema.ToolCallUpdate:
        """What permission is asked for, with all that is to be decided on."""
        detail = escape_invisible(question.detail)
        content: list[Content] = [hunk.content for hunk in hunks_of(detail, self.cwd)]
        if detail and not content:
            content.append(verbatim(detail))
        if question.why:
            content.append(verbatim(escape_invisible(question.why)))
        return schema.ToolCallUpdate(
            tool_call_id=call,
            title=escape_invisible(f"{question.permission}: {question.pattern}"),
            status="pending",
            content=content or None,
        )

    def replay(self, messages: Sequence[Message], tools: Toolset) -> Iterator[Update]:
        """The updates for a conversation that goes on; the program's own messages have none."""
        for message in messages:
            meta = message.get("meta", {})
            role = message["role"]
            if role == "user" and not meta.get("own"):
                for block in blocks_of(message["content"]):
                    yield acp.update_user_message(block)
            if role == "assistant" and text_of(message):
                yield acp.update_agent_message_text(text_of(message))
            for call in calls_of(message):
                yield from self.of(begun(call, tools))
            if role == "tool":
                is_error = bool(meta.get("is_error"))
                ended = events.ToolEnd(
                    id=message["tool_call_id"],
                    name="",
                    result=ToolResult(message["content"], is_error),
                    is_error=is_error,
                    seconds=0,
                )
                yield from self.of(ended)


def begun(call: Mapping[str, Any], tools: Toolset) -> events.ToolStart:
    """The event with which a call of a message began."""
    name = call["function"]["name"]
    try:
        arguments = dict(json.loads(call["function"]["arguments"]))
    except (ValueError, TypeError):  # as the model wrote them
        arguments = {}
    title = tools.title(ToolCall(call["id"], name, arguments))
    return events.ToolStart(call["id"], name, arguments, title)


# ---- texts and pictures --------------------------------------------------------------------------


def words_of(event: Event) -> str:
    """What is said in an event."""
    match event:
        case events.TextDelta(text=text) | events.ReasoningDelta(text=text):
            return text
        case events.Notice(text=text):
            return f"{text}\n"
        case events.Retry(error=error, delay=delay):
            return f"\n{happened(error)}; the answer begins anew in {delay:.0f} s.\n"
        case events.RunEnd(stop_reason=reason, text=text) if reason in LIMITS:
            return f"\n{text}"
    return ""


def plan_of(items: Sequence[Mapping[str, str]]) -> Update:
    """The model's checklist."""
    entries: list[schema.PlanEntry] = []
    for item in items:
        status = PROGRESS[item["status"]]
        entries.append(acp.plan_entry(item["text"], status=status))
    return acp.update_plan(entries)


def blocks_of(content: str | Sequence[Mapping[str, Any]]) -> list[Any]:
    """The content of a message, as the protocol's blocks."""
    if isinstance(content, str):
        return [acp.text_block(content)]
    blocks: list[Any] = []
    for part in content:
        image = part.get("image_url") or {}
        url = re.fullmatch(IMAGE_URL, image.get("url", ""))
        if url:
            blocks.append(acp.image_block(url["data"], url["kind"]))
        elif part.get("type") == "image":
            blocks.append(acp.image_block(part["data"], part["mimeType"]))
        else:
            blocks.append(acp.text_block(part.get("text", "")))
    return blocks


def content_of(result: str | Sequence[Mapping[str, Any]]) -> list[Content]:
    """What a call has returned."""
    content: list[Content] = []
    for block in blocks_of(result):
        if block.type == "text":
            content.append(verbatim(block.text))
        else:
            content.append(acp.tool_content(block))
    return content


def verbatim(text: str) -> Content:
    """Text as it is, in a fence, since editors take it for Markdown."""
    fence = "```"
    while fence in text:
        fence += "`"
    block = acp.text_block(f"{fence}\n{text}\n{fence}")
    return acp.tool_content(block)


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
    def is_whole(self) -> bool:
        return len(self.old) >= self.old_size and len(self.new) >= self.new_size

    def add(self, line: str) -> None:
        if not line.startswith("+"):
            self.old.append(f"{line[1:]}\n")
        if not line.startswith("-"):
            self.new.append(f"{line[1:]}\n")

    @property
    def place(self) -> schema.ToolCallLocation:
        return schema.ToolCallLocation(path=self.path, line=self.line)

    @property
    def content(self) -> Content:
        """As the protocol has it; without an old text the file is new."""
        old = "".join(self.old)
        new = "".join(self.new)
        return acp.tool_diff_content(self.path, new, old or None)


def hunks_of(diff: str, cwd: Path) -> list[Hunk]:
    """The hunks of unified diffs of one file or several."""
    hunks: list[Hunk] = []
    path = ""
    for line in diff.split("\n"):
        if hunks and not hunks[-1].is_whole:
            hunks[-1].add(line)
            continue
        if line.startswith("+++ b/"):
            path = absolute(cwd, line.removeprefix("+++ b/"))
        header = re.match(HUNK, line)
        if header:
            old_size = int(header["old"] or 1)
            new_size = int(header["new"] or 1)
            hunks.append(
                Hunk(
                    path,
                    int(header["line"]),
                    old_size,
                    new_size,
                )
            )
    return hunks
