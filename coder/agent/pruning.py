"""Pruning: old tool output becomes a note, which tells what was there and how to get it again.

Nothing is pruned that is small, that the model has not seen yet, or that cannot be had again:
errors, answers of the user, the newest checklist. First go outputs that something newer replaces: a
file that was read again, the diffs of edits, the outputs of commands but for the two newest long
ones. Then the rest, by when its path was last touched.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from coder.agent.measure import cut, size
from coder.history import FILE_TOOLS, calls_of, text_of
from coder.providers.profiles import CHARS_PER_TOKEN
from coder.types import Message

KEEP_TOOL_OUTPUT = 40_000  # tokens of tool output that stay; never more than half the window
SMALL = 1_000  # characters that are never pruned
NEWEST_COMMANDS = 2  # of whose long outputs nothing replaces any

FOR_THE_USER = {"ask_user"}
CHECKLIST = "todo"
REMOVED = "[Output removed to save room: "
# At the beginning of a line: those of the file have numbers there
PART = r"(?m)^\((lines \d+-\d+ of \d+);"
TASK_ID = r"\[task_id: [^\]]*\]\s*\Z"
PATCHED = r"(?m)^\*\*\* (?:Add|Update|Delete) File: (.+)$"


@dataclass
class Output:
    """The result of a tool call, and the call."""

    index: int  # in the list of messages
    message: Message
    name: str
    arguments: dict[str, Any]

    @property
    def text(self) -> str:
        return text_of(self.message)

    @property
    def size(self) -> int:
        """Bytes in a request."""
        return size([self.message])

    @property
    def is_long(self) -> bool:
        return len(self.text) > SMALL

    @property
    def is_error(self) -> bool:
        return bool(self.message.get("meta", {}).get("is_error"))

    @property
    def subject(self) -> str:
        """What the call is about: a path, a pattern, a command."""
        texts = [value for value in self.arguments.values() if isinstance(value, str)]
        return " ".join(texts[0].split())[:80] if texts else ""

    @property
    def path(self) -> str:
        return str(self.arguments.get("path") or "")

    @property
    def part(self) -> tuple[Any, Any]:
        """Which lines of a file a read was asked for."""
        return self.arguments.get("offset"), self.arguments.get("limit")


def outputs_of(messages: list[Message]) -> list[Output]:
    """The results in a list that is in order (history.repair), each with its call."""
    functions = {}
    outputs = []
    for index, message in enumerate(messages):
        for call in calls_of(message):
            functions[call["id"]] = call["function"]
        if message["role"] == "tool":
            function = functions[message["tool_call_id"]]
            arguments = json.loads(function["arguments"])
            outputs.append(Output(index, message, function["name"], arguments))
    return outputs


def prune(messages: list[Message], window: int, keep: int = KEEP_TOOL_OUTPUT) -> list[Message]:
    """The list with at most `keep` tokens of tool output, and notes in the place of the rest.

    Output that the model has not seen yet stays, and is cut if it alone is more than half the
    window. At least half of `keep` is for what it has seen. Ids, order and number of the messages
    do not change. `messages` have to be in order (history.repair).
    """
    newest_answer = -1
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            newest_answer = index
    seen = outputs_of(messages)
    unseen = []
    while seen and seen[-1].index > newest_answer:
        unseen.append(seen.pop())
    shorter = messages[:]

    # First what is new, since the model has asked for it
    most = window // 2 * CHARS_PER_TOKEN
    share = fair_share(unseen, most)
    new = 0
    for output in unseen:
        message = cut(output.message, share)
        shorter[output.index] = message
        new += size([message])

    # Then what was seen; what was pruned before is short, and not counted
    kept = keep * CHARS_PER_TOKEN
    room = min(max(kept - new, kept // 2), most - new)
    whole = sum(output.size for output in seen if output.is_long)
    for output in in_order_of_use(seen):
        if whole <= room:
            break
        shorter[output.index] = output.message | {"content": note_of(output)}
        whole -= output.size
    return shorter


def fair_share(outputs: list[Output], room: int) -> int:
    """The most bytes that one output may have, so that all fit into `room`; small ones leave
    more.
    """
    sizes = sorted(output.size for output in outputs)
    left = len(sizes)
    for needed in sizes:
        if needed * left > room:
            return room // left
        room -= needed
        left -= 1
    return max(sizes, default=0)


def in_order_of_use(outputs: list[Output]) -> list[Output]:
    """The outputs that may be pruned, what is needed least first."""
    touched: dict[str, int] = {}  # the index at which a path was used last
    commands = []
    newest_checklist_at = -1
    for output in outputs:
        touched |= dict.fromkeys(paths_of(output), output.index)
        if output.name == "bash" and output.is_long:
            commands.append(output.index)
        if output.name == CHECKLIST:
            newest_checklist_at = output.index
    old_commands = commands[:-NEWEST_COMMANDS]

    def rank(output: Output) -> tuple[int, int]:
        if output.index in old_commands or _is_replaced(output, outputs):
            return 0, output.index
        return 1, touched.get(output.path, output.index)

    may_go = [
        output for output in outputs if _may_go(output) and output.index != newest_checklist_at
    ]
    return sorted(may_go, key=rank)


def _may_go(output: Output) -> bool:
    if not output.is_long or output.name in FOR_THE_USER or output.text.startswith(REMOVED):
        return False
    # A command that failed has its exit code in the note
    return output.name == "bash" or not output.is_error


def _is_replaced(output: Output, outputs: list[Output]) -> bool:
    """Is it an edit's diff, or a read after which the whole file, or the same part, was read
    again?
    """
    if output.name != "read":
        return output.name in FILE_TOOLS
    for later in outputs:
        if later.index <= output.index or later.name != "read" or later.is_error:
            continue
        if later.path != output.path:
            continue
        is_whole = not re.search(PART, later.text)
        if is_whole or later.part == output.part:
            return True
    return False


def paths_of(output: Output) -> list[str]:
    """The files that a call read or changed, as far as it names them."""
    if output.name == "apply_patch":
        return re.findall(PATCHED, str(output.arguments.get("patch") or ""))
    return [output.path] if output.path else []


def changed_paths(messages: list[Message]) -> list[str]:
    """The files that the tools have changed in these messages, in order of the first change."""
    paths: dict[str, None] = {}
    for output in outputs_of(messages):
        if output.name in FILE_TOOLS and not output.is_error:
            paths |= dict.fromkeys(paths_of(output))
    return list(paths)


def newest_checklist(messages: list[Message]) -> str:
    """The newest checklist as the model has it; "" if there is none."""
    for output in reversed(outputs_of(messages)):
        if output.name == CHECKLIST and not output.is_error:
            return output.text
    return ""


# ---- notes ----------------------------------------------------------------------------------


def note_of(output: Output) -> str:
    """What replaces an output: true, and with the way to have it again if there is one."""
    name = output.name
    text = output.text
    if name in FILE_TOOLS:
        first_line = text.partition("\n")[0]
        return f"{first_line} [diff removed]"
    if name == "read":
        lines = _lines_of(text)
        return f"{REMOVED}read {output.subject}, {lines}. Read it again where you need it.]"
    if name == "bash":
        ended = _end_of(text)
        if ended:
            ended = f'It ended with: "{ended}"'
        return f"{REMOVED}{output.subject}, {len(text):,} characters. {ended}]"
    if name == "task":
        note = f"{text[:300].rstrip()}... [the rest was removed to save room]"
        task_id = re.search(TASK_ID, text)
        return f"{note}\n{task_id[0].strip()}" if task_id else note
    about = f"{name} {output.subject}".strip()
    if name in ("grep", "glob", "ls"):
        if output.path and output.path != output.subject:
            about += f" in {output.path}"
        count = len(text.splitlines())
        return f"{REMOVED}{about}, {count} lines. Search again where you need it.]"
    return f"{REMOVED}{about}, {len(text):,} characters.]"


def _lines_of(text: str) -> str:
    """`lines 1-597 of 875` of an output of read."""
    part = re.search(PART, text)
    if part:
        return part[1]
    lines = text.split("\n")
    # Only a read that begins within the file has numbers
    first = re.match(r"\d+(?=\t)", lines[0])
    last = re.match(r"\d+(?=\t)", lines[-1])
    if first and last and int(last[0]) - int(first[0]) == len(lines) - 1:
        return f"lines {first[0]}-{last[0]}, the last"
    return f"all {len(text):,} characters"


def _end_of(text: str) -> str:
    """The last line of an output, and with it how the command ended."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    count = 1
    if lines and re.match(r"\[(exit code|killed|stopped|timed out)", lines[-1]):
        count = 2
    return " ".join(line[:200] for line in lines[-count:])
