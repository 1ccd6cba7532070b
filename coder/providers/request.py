"""The body of a request in the form that a Profile describes: pure functions over lists.

The same messages come out the same way each time, so that the beginning of a request stays what it
was and the provider's cache serves it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from coder.providers.errors import join
from coder.providers.profiles import (
    BUDGET,
    EFFORT,
    EXTRA_MEMBERS,
    OUTPUT_LIMITS,
    THINK,
    Profile,
    schema_in,
)
from coder.providers.text import JsonObject, dictionaries, mend, mend_all, text_of
from coder.providers.wire import (
    as_read,
    choose_messages,
    common_prefix,
    copied,
    join_rows,
    unconverted,
    wire_messages,
)
from coder.types import Message, ModelError, Reasoning, Request

# Tokens; pi-agent-core's numbers, which know nothing above "high".
REASONING_BUDGETS: dict[str, int] = dict(minimal=128, low=512, medium=1024, high=2048, xhigh=2048)
NEEDED = {"model", "tools", "stream"}  # always sent
SYSTEM = {"system", "developer"}
SECTION = 50  # rounds; to encode each on its own would take longer
CALL = {"id", "type", "function"}
JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
NUL = b"\\u0000"  # as JSON writes it
IN_THIS_FORM = (
    "Your final answer is one JSON object and nothing else. It has to fit this JSON schema:\n"
)
BETWEEN: Message = {"role": "assistant", "content": "Understood."}  # a result and a user message


@dataclass
class Section:
    """Some rounds, which were encoded together.

    A round is an answer and all that follows until the next one. Each is encoded without looking at
    another. The fields describe the list from the first message to the end of the section.
    """

    end: int  # how many messages
    size: int  # how many bytes they became
    system: str  # the texts of the system messages among them


NOTHING = Section(0, 0, "")  # before the first section


@dataclass
class Encoded:
    """The messages of the newest request, as copies, and their bytes: ",{...},{...}"."""

    messages: list[Message] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)
    sections: list[Section] = field(default_factory=lambda: [NOTHING])

    def drop_after(self, unchanged: int) -> None:
        """Drop the sections that go beyond the first `unchanged` messages, and the last one before
        them, which may have got further messages."""
        while self.sections[-1].end > unchanged:
            self.sections.pop()
        if len(self.sections) > 1:
            self.sections.pop()
        last = self.sections[-1]
        del self.messages[last.end :]
        del self.data[last.size :]


class RequestEncoder:
    """The bytes of the requests to one model. What a request has in common with the one before is
    encoded once.

    `extra`: members of each body, `reasoning_budgets`: tokens of the reasoning levels.
    """

    def __init__(
        self,
        model: str,
        profile: Profile,
        extra: Mapping[str, Any],
        reasoning_budgets: Mapping[str, int],
    ) -> None:
        self.model = model
        self.profile = profile
        self.extra = extra
        self.reasoning_budgets = reasoning_budgets
        # The messages of the newest request; the key: which members were left out of them. They are
        # taken out while they are changed: no other thread has them then, and what an interrupt
        # leaves half-done is not used
        self._encoded: dict[frozenset[str], Encoded] = {}
        self._tools: tuple[Any, bytes] = (None, b"")  # those of the newest request, and their JSON

    def encode(self, request: Request, rejected: frozenset[str] = frozenset()) -> bytes:
        """The JSON of a request without the members that the server has rejected.

        The messages come last, so that each request begins as the one before it did. Raises
        ModelError if it cannot be JSON.
        """
        members = self._make_members(request, rejected)
        tools = self._encode_tools(members.pop("tools", None))
        encoded = self._encode_messages(unconverted(request), rejected)
        beginning = to_json(members)[:-1] + tools  # without the "}" of the members

        # The system message, which comes first and is the only one. It describes the form of the
        # answer, if the server has rejected the member for that
        form = ""
        schema = schema_in(request.options)
        if schema and "response_format" in rejected:
            form = IN_THIS_FORM + to_json(schema).decode()
        system = mend(join("\n\n", request.system, form, encoded.sections[-1].system))
        if not system:
            others = encoded.data[1:]  # without the comma before the first
            return b'%s,"messages":[%s]}' % (beginning, others)
        first = to_json({"role": "system", "content": system})
        return b'%s,"messages":[%s%s]}' % (beginning, first, encoded.data)

    def _make_members(self, request: Request, rejected: frozenset[str]) -> JsonObject:
        """What is sent besides the messages. Values of the profile give way to `extra`, and those
        to the request's own options, as far as the model takes them."""
        profile = self.profile
        body: JsonObject = {"model": self.model, "stream": True}
        if profile.stream_options:
            body["stream_options"] = {"include_usage": True}
        if request.tools:  # an empty list is an error on some servers
            body["tools"] = request.tools
        if profile.cache_key and request.session_id:
            body["prompt_cache_key"] = request.session_id[:64]
        options = self._usable_options(request)
        body |= _reasoning_members(profile, request.reasoning, self.reasoning_budgets)
        body |= self.extra
        body |= options

        # Messages come last, the output limit under its name here
        unwanted = {"messages", *OUTPUT_LIMITS, *(rejected - NEEDED)}
        body = {name: value for name, value in body.items() if name not in unwanted}
        return body | self._output_limit(options, rejected)

    def _encode_tools(self, tools: list[Any] | None) -> bytes:
        """The member "tools"; it is hardly ever another one than in the request before."""
        if tools is None:
            return b""
        known, data = self._tools
        if tools != known:
            data = b',"tools":%s' % to_json(tools)
            self._tools = (copied(tools), data)
        return data

    def _usable_options(self, request: Request) -> JsonObject:
        options = dict(request.options)
        if not self.profile.temperature or request.reasoning != "off":
            options.pop("temperature", None)
        if not self.profile.parallel_tool_calls:
            options.pop("parallel_tool_calls", None)
        return options

    def _output_limit(self, options: Mapping[str, Any], rejected: frozenset[str]) -> JsonObject:
        """The limit under its name on this server, or under the other one if that was rejected; {}
        if none is set, or if both names were rejected."""
        names = [self.profile.output_limit, *OUTPUT_LIMITS]
        usable = [name for name in names if name not in rejected]
        if not usable:
            return {}
        for members in (options, self.extra):
            for name in OUTPUT_LIMITS:
                if name in members:
                    return {usable[0]: members[name]}
        return {}

    def _encode_messages(self, messages: list[Message], rejected: frozenset[str]) -> Encoded:
        """The bytes of the messages. What the newest request had, too, is not encoded again."""
        # The beginning that both have
        encoded = self._encoded.pop(rejected, None) or Encoded()
        encoded.drop_after(common_prefix(encoded.messages, messages))
        last = encoded.sections[-1]

        # What comes after it. What was read from a session, and is sent as it is, has its JSON
        unwanted = (EXTRA_MEMBERS - set(self.profile.echoed)) | rejected
        copies, rows = as_read(last.end, messages)
        for first, end in pairwise(_starts_of_sections(messages, last.end)):
            section = messages[first:end]
            new = choose_messages(section, self.model)
            converted = _convert_rounds(new, self.profile, unwanted)
            data = join_rows(section, rows[first:end]) if converted == section else b""
            if converted:  # without its brackets
                encoded.data += b"," + (data or to_json(wire_messages(converted))[1:-1])
            system = join("\n\n", last.system, *_system_texts(new))
            last = Section(end, len(encoded.data), system)
            encoded.sections.append(last)
        encoded.messages += copies
        encoded.messages += copied(messages[len(encoded.messages) :])
        self._encoded = {rejected: encoded}
        return encoded


def _starts_of_sections(messages: list[Message], start: int) -> list[int]:
    """Where sections begin from `start` on, and where the last one ends, which is one round: it is
    encoded again if it goes on."""
    later = range(start + 1, len(messages))
    answers = [index for index in later if messages[index]["role"] == "assistant"]
    first = [start] if start < len(messages) else []
    rounds = [*first, *answers, len(messages)]
    return rounds[:-2:SECTION] + rounds[-2:]


def _system_texts(messages: list[Message]) -> list[str]:
    return [text_of(message) for message in messages if message["role"] in SYSTEM]


def _reasoning_members(
    profile: Profile,
    level: Reasoning,
    reasoning_budgets: Mapping[str, int],
) -> JsonObject:
    """The members that ask for this much reasoning; {} if it is off or cannot be asked for."""
    if level == "off":
        return {}
    if level not in REASONING_BUDGETS:
        names = ", ".join(REASONING_BUDGETS)
        raise ValueError(f"reasoning is {level!r}, and has to be off or one of {names}")
    tokens = reasoning_budgets.get(level, REASONING_BUDGETS[level])
    words = {
        EFFORT: profile.efforts.get(level, level),
        BUDGET: max(profile.least_budget, tokens),
    }
    return {name: _fill(value, words) for name, value in profile.reasoning.items()}


def _fill(value: Any, words: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        return {name: _fill(item, words) for name, item in value.items()}
    return words.get(value, value) if isinstance(value, str) else value


# ---- messages ------------------------------------------------------------------------------------


def _convert_rounds(
    messages: list[Message],
    profile: Profile,
    unwanted: frozenset[str],
) -> list[Message]:
    """Whole rounds as the server takes them, the images of results in a user message after them.
    A message that stays as it is, is the same object."""
    made: list[Message] = []
    images: list[Any] = []  # of the newest results
    known = CALL | (set(profile.echoed) - unwanted)
    tools: dict[str, str] = {}  # names of tools by call id, if a result has to name its tool
    for message in messages:
        role = message["role"]
        if role in SYSTEM:
            continue  # all in one, at the beginning
        sent = message.copy()
        if role != "tool":
            made += _shown_by_user(images)
            images = []
        match role:
            case "assistant":
                if profile.tool_name:
                    tools = _called_tools(message)
                for name in unwanted.intersection(message):
                    del sent[name]
                _convert_answer(sent, profile, known)
            case "tool":
                tool = tools.get(message["tool_call_id"], "")
                images += _images_of(message)
                _convert_result(sent, tool, profile)
        made.append(message if sent == message else sent)
    made += _shown_by_user(images)
    return _strict_turns(made) if profile.strict_turns else made


def _shown_by_user(images: list[Any]) -> list[Message]:
    """A user message with the images, if there are any."""
    if not images:
        return []
    text = {"type": "text", "text": "Images from the tool results above:"}
    return [{"role": "user", "content": [text, *images]}]


def _called_tools(answer: Message) -> dict[str, str]:
    calls = answer.get("tool_calls") or ()
    return {call["id"]: call["function"]["name"] for call in calls}


def _strict_turns(messages: list[Message]) -> list[Message]:
    """User messages in a row become one; an answer comes between a result and a user message."""
    made: list[Message] = []
    for message in messages:
        last = made[-1]["role"] if made else ""
        if message["role"] != "user" or last not in ("tool", "user"):
            made.append(message)
        elif last == "tool":
            made += [BETWEEN, message]
        else:
            content = _join_contents(made[-1].get("content"), message.get("content"))
            made[-1] = made[-1] | {"content": content}
    return made


def _join_contents(first: Any, second: Any) -> Any:
    """The contents of two messages as one: text, or parts if either has parts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [*_parts_of(first), *_parts_of(second)]


def _parts_of(content: Any) -> Sequence[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content or ()


def _convert_answer(message: Message, profile: Profile, known: set[str]) -> None:
    """In place: content in the server's form, of calls the `known` members and ids that fit."""
    # Thoughts that came between tags, and are wanted, go back between tags in the text
    thoughts = message.pop(THINK, "")
    if thoughts:
        message["content"] = f"<think>{thoughts}</think>\n\n{message.get('content') or ''}"
    calls = message.get("tool_calls")
    if not calls:
        return
    message["tool_calls"] = [_convert_call(call, profile, known) for call in calls]
    if profile.reasoning_filled:
        message.setdefault("reasoning_content", "")
    if not message.get("content"):
        if profile.empty_content == "absent":
            message.pop("content", None)
        elif profile.empty_content != "null":
            message["content"] = ""


def _convert_call(call: JsonObject, profile: Profile, known: set[str]) -> JsonObject:
    made = call
    if not known.issuperset(call):
        made = {name: value for name, value in call.items() if name in known}
    call_id = _fit_id(call["id"], profile)
    return made if call_id == call["id"] else made | {"id": call_id}


def _convert_result(message: Message, tool: str, profile: Profile) -> None:
    """In place: a result as plain text, which every server takes."""
    if isinstance(message["content"], list):
        nothing = "(see the image below)" if _images_of(message) else "(no output)"
        message["content"] = text_of(message) or nothing
    message["tool_call_id"] = _fit_id(message["tool_call_id"], profile)
    if tool:
        message["name"] = tool


def _images_of(result: Message) -> list[Any]:
    """Most servers take them in a user message only."""
    parts = dictionaries(result["content"])
    return [part for part in parts if not isinstance(part.get("text"), str)]


def _fit_id(call_id: str, profile: Profile) -> str:
    """An id goes back as it came, unless another server gave it and it does not match here."""
    if not profile.ids or re.fullmatch(profile.ids, call_id):
        return call_id
    data = call_id.encode("utf-8", "replace")
    return hashlib.sha256(data).hexdigest()[:9]


# ---- JSON ----------------------------------------------------------------------------------------


def to_json(value: Any) -> bytes:
    """The bytes of a part of a request, without what no server accepts (lone surrogates, NUL).
    Raises ModelError for what is no JSON."""
    try:
        try:
            data = JSON.encode(value).encode()
            is_clean = NUL not in data
        except UnicodeEncodeError:  # a lone surrogate
            is_clean = False
        if not is_clean:
            data = JSON.encode(mend_all(value)).encode()
        return data
    except (TypeError, ValueError, RecursionError) as error:
        raise ModelError("bad_request", f"what was to be sent is no JSON: {error}") from error
