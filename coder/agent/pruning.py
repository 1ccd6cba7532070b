"""Pruning: old tool output becomes a note, which tells what was there and how to get it again.

Nothing is pruned that is small, that the model has not seen yet, or that cannot be had again: errors, answers of the
user, the newest checklist. First go outputs that something newer replaces: a file that was read again, the diffs of
edits, the outputs of commands but for the two newest long ones. Then the rest, by when its path was last touched.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from coder.agent.measure import cut, size
from coder.history import calls_of, text_of
from coder.providers.profiles import CHARS_PER_TOKEN
from coder.types import Message

KEEP_TOOL_OUTPUT = 40_000  # tokens of tool output that stay; never more than half the window
SMALL = 1_000  # characters that are never pruned
NEWEST_COMMANDS = 2  # of whose long outputs nothing replaces any

EDITS = {"edit", "write", "apply_patch"}
FOR_THE_USER = {"ask_user"}
CHECKLIST = "todo"
REMOVED = "[Output removed to save room: "
# At the beginning of a line: those of the file have numbers there
PART = re.compile(r"^\((lines \d+-\d+ of \d+);", re.MULTILINE)
TASK_ID = re.compile(r"\[task_id: [^\]]*\]\s*\Z")
PATCHED = re.compile(r"^\*\*\* (?:Add|Update|Delete) File: (.+)$", re.MULTILINE)


@dataclass
class Output:
    """The result of a tool call, and the call."""

    place: int  # in the list of messages
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
    calls = {call["id"]: call["function"] for each in messages for call in calls_of(each)}
    found = []
    for place, message in enumerate(messages):
        if message["role"] == "tool":
            function = calls[message["tool_call_id"]]
            arguments = json.loads(function["arguments"])
            found.append(Output(place, message, function["name"], arguments))
    return found


def prune(messages: list[Message], window: int, keep: int = KEEP_TOOL_OUTPUT) -> list[Message]:
    """The list with at most `keep` tokens of tool output, and notes in the place of the rest.

    Output that the model has not seen yet stays, and is cut if it alone is more than half the window. At least half
    of `keep` is for what it has seen. Ids, order and number of the messages do not change. `messages` have to be in
    order (history.repair).
    """
    outputs = outputs_of(messages)
    newest_answer = -1
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            newest_answer = place
    unseen = [output for output in outputs if output.place > newest_answer]
    seen = outputs[: len(outputs) - len(unseen)]
    shorter = messages[:]

    # First what is new, since the model has asked for it
    most = window // 2 * CHARS_PER_TOKEN
    share = fair_share([output.size for output in unseen], most)
    for output in unseen:
        shorter[output.place] = cut(output.message, share)
    new = size(shorter[output.place] for output in unseen)

    # Then what was seen; what was pruned before is short, and not counted
    kept = keep * CHARS_PER_TOKEN
    room = min(max(kept - new, kept // 2), most - new)
    whole = sum(output.size for output in seen if output.is_long)
    for output in in_order_of_use(seen):
        if whole <= room:
            break
        shorter[output.place] = output.message | {"content": note_of(output)}
        whole -= output.size
    return shorter


def fair_share(sizes: list[int], room: int) -> int:
    """The most that each may have, so that all fit into `room`: what is small leaves more to the others."""
    left = len(sizes)
    for each in sorted(sizes):
        if each * left > room:
            return room // left
        room -= each
        left -= 1
    return max(sizes, default=0)


def in_order_of_use(outputs: list[Output]) -> list[Output]:
    """The outputs that may be pruned, what is needed least first."""
    touched = dict[str, int]()  # where each path was used last
    newest_checklist_at = -1
    for output in outputs:
        touched |= dict.fromkeys(paths_of(output), output.place)
        if output.name == CHECKLIST:
            newest_checklist_at = output.place
    commands = [output.place for output in outputs if output.name == "bash" and output.is_long]
    newest_commands = commands[-NEWEST_COMMANDS:]

    def rank(output: Output) -> tuple[int, int]:
        is_old_command = output.name == "bash" and output.place not in newest_commands
        if is_old_command or _is_replaced(output, outputs):
            return 0, output.place
        return 1, touched.get(output.path, output.place)

    may_go = [each for each in outputs if _may_go(each) and each.place != newest_checklist_at]
    return sorted(may_go, key=rank)


def _may_go(output: Output) -> bool:
    if not output.is_long or output.name in FOR_THE_USER or output.text.startswith(REMOVED):
        return False
    # A command that failed has its exit code in the note
    return output.name == "bash" or not output.is_error


def _is_replaced(output: Output, outputs: list[Output]) -> bool:
    """Is it an edit's diff, or a read after which the whole file, or the same part, was read again?"""
    if output.name != "read":
        return output.name in EDITS
    for later in outputs:
        is_read_again = later.name == "read" and later.path == output.path and not later.is_error
        is_whole = not PART.search(later.text)
        if later.place > output.place and is_read_again and (is_whole or later.part == output.part):
            return True
    return False


def paths_of(output: Output) -> list[str]:
    """The files that a call read or changed, as far as it names them."""
    if output.name == "apply_patch":
        return PATCHED.findall(str(output.arguments.get("patch") or ""))
    return [output.path] if output.path else []


def changed_paths(messages: list[Message]) -> list[str]:
    """The files that the tools have changed in these messages, in order of the first change."""
    changed = [output for output in outputs_of(messages) if output.name in EDITS]
    paths = (path for output in changed if not output.is_error for path in paths_of(output))
    return list(dict.fromkeys(paths))


def newest_checklist(messages: list[Message]) -> str:
    """The newest checklist as the model has it; "" if there is none."""
    lists = [each for each in outputs_of(messages) if each.name == CHECKLIST and not each.is_error]
    return lists[-1].text if lists else ""


# ---- notes ----------------------------------------------------------------------------------


def note_of(output: Output) -> str:
    """What stands in the place of an output: true, and with the way to have it again if there is one."""
    name, text = output.name, output.text
    if name in EDITS:
        first_line = text.partition("\n")[0]
        return f"{first_line} [diff removed]"
    if name == "read":
        return (
            f"{REMOVED}read {output.subject}, {_lines_of(text)}. Read it again where you need it.]"
        )
    if name == "bash":
        ended = " ".join(f'It ended with: "{line}"' for line in _last_lines(text))
        return f"{REMOVED}{output.subject}, {len(text):,} characters. {ended}]"
    if name == "task":
        found = TASK_ID.search(text)
        task_id = f"\n{found[0].strip()}" if found else ""
        return f"{text[:300].rstrip()}... [the rest was removed to save room]{task_id}"
    about = f"{name} {output.subject}".strip()
    if name in ("grep", "glob", "ls"):
        where = f" in {output.path}" if output.path and output.path != output.subject else ""
        lines = len(text.splitlines())
        return f"{REMOVED}{about}{where}, {lines} lines. Search again where you need it.]"
    return f"{REMOVED}{about}, {len(text):,} characters.]"


def _lines_of(text: str) -> str:
    """`lines 1-597 of 875` of an output of read."""
    if part := PART.search(text):
        return part[1]
    lines = text.split("\n")
    # Only a read that begins within the file has numbers
    first = re.match(r"\d+(?=\t)", lines[0])
    last = re.match(r"\d+(?=\t)", lines[-1])
    if first and last and int(last[0]) - int(first[0]) == len(lines) - 1:
        return f"lines {first[0]}-{last[0]}, the last"
    return f"all {len(text):,} characters"


def _last_lines(text: str) -> list[str]:
    """The last line of an output, and with it how the command ended."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    count = 2 if lines and re.match(r"\[(exit code|killed|stopped|timed out)", lines[-1]) else 1
    return [" ".join(line[:200] for line in lines[-count:])] if lines else []
