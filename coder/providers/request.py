"""The body of a request in the form that a Profile describes: pure functions over lists.

The same messages come out the same way each time, so that the beginning of a request stays what it was and the
provider's cache serves it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from itertools import pairwise
from operator import eq
from typing import Any

from coder.providers.profiles import BUDGET, EFFORT, EXTRA_MEMBERS, LIMITS, THINK, Profile
from coder.providers.text import mend, mend_all, text_of
from coder.types import Message, ModelError, Reasoning, Request

# Tokens; pi-agent-core's numbers, which know nothing above "high".
BUDGETS: dict[str, int] = {"minimal": 128, "low": 512, "medium": 1024, "high": 2048, "xhigh": 2048}
NEEDED = {"model", "tools", "stream"}  # always sent
SYSTEM = {"system", "developer"}
CALL = {"id", "type", "function"}
JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
NUL = b"\\u0000"
BETWEEN: Message = {"role": "assistant", "content": "Understood."}  # a result and a user message


class RequestEncoder:
    """The bytes of the requests to one model. What a request has in common with the one before is made once.

    `extra`: members of each body, `budgets`: tokens of the reasoning levels.
    """

    def __init__(
        self, model: str, profile: Profile, extra: Mapping[str, Any], budgets: Mapping[str, int]
    ) -> None:
        self.model, self.profile, self.extra, self.budgets = model, profile, extra, budgets
        # (rejected members, copies of the messages, (messages up to its end, bytes) of each round of them): replaced
        # as a whole, since another thread may have a request, too
        self._encoded_rounds: tuple[frozenset[str], list[Message], list[tuple[int, bytes]]]
        self._encoded_rounds = frozenset(), [], []

    def encode(self, request: Request, rejected: frozenset[str] = frozenset()) -> bytes:
        """The JSON of a request without the members that the server has rejected. The messages come last, so that it
        begins with the one before it. Raises ModelError where it cannot be JSON."""
        members = encode(self._make_members(request, rejected))
        return b'%s,"messages":[%s]}' % (members[:-1], self._encode_messages(request, rejected))

    def _make_members(self, request: Request, rejected: frozenset[str]) -> dict[str, Any]:
        """What is sent beside the messages. Values of the profile give way to `extra`, and those to the request's own
        options, as far as the model takes them; the output limit goes under its name here."""
        profile, own = self.profile, dict(request.options)
        body: dict[str, Any] = {"model": self.model, "stream": True}
        if profile.stream_options:
            body["stream_options"] = {"include_usage": True}
        if request.tools:  # an empty list is an error on some servers
            body["tools"] = request.tools
        if profile.cache_key and request.session_id:
            body["prompt_cache_key"] = request.session_id[:64]
        if not profile.temperature or request.reasoning != "off":
            own.pop("temperature", None)
        if not profile.parallel_tool_calls:
            own.pop("parallel_tool_calls", None)
        thought = thinking(profile, request.reasoning, self.budgets)
        body |= {**thought, **self.extra, **own}
        limits = [given[name] for given in (own, self.extra) for name in LIMITS if name in given]
        names = sorted({*LIMITS} - rejected, key=lambda name: name != profile.output_limit)
        unwanted = {"messages", *LIMITS, *rejected - NEEDED}  # the conversation's follow
        body = {name: value for name, value in body.items() if name not in unwanted}
        return body | ({names[0]: limits[0]} if limits and names else {})

    def _encode_messages(self, request: Request, rejected: frozenset[str]) -> bytes:
        """The messages with commas between them, and at most one system message, the first."""
        _, copies, known = (
            self._encoded_rounds if self._encoded_rounds[0] == rejected else (rejected, [], [])
        )
        unchanged = [*map(eq, copies, request.messages), False].index(False)
        rounds = [each for each in known if each[0] <= unchanged][:-1]  # the last one may go on
        start = rounds[-1][0] if rounds else 0
        new = request.messages[start:]
        # a round is an answer with what follows on it: nothing in one depends on another
        starts = [at for at, each in enumerate(new) if not at or each["role"] == "assistant"]
        for begin, behind in pairwise([*starts, len(new)]):
            made = map(encode, _convert_round(new[begin:behind], self.profile, rejected))
            rounds.append((start + behind, b",".join(made)))
        self._encoded_rounds = rejected, [*copies[:start], *map(copied, new)], rounds
        system = [text_of(each) for each in request.messages if each["role"] in SYSTEM]
        text = mend("\n\n".join(filter(None, [request.system, *system])))
        first = encode({"role": "system", "content": text}) if text else b""
        return b",".join(filter(None, [first, *[data for _, data in rounds]]))


def thinking(profile: Profile, level: Reasoning, budgets: Mapping[str, int]) -> dict[str, Any]:
    """The members that ask for this much reasoning; none where it is off or the model cannot be asked."""
    if level == "off":
        return {}
    if level not in BUDGETS:
        names = ", ".join(BUDGETS)
        raise ValueError(f"reasoning is {level!r}, and has to be off or one of {names}")
    budget = max(profile.least_budget, budgets.get(level, BUDGETS[level]))
    words = {EFFORT: profile.efforts.get(level, level), BUDGET: budget}

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: filled(item) for name, item in value.items()}
        return words.get(value, value) if isinstance(value, str) else value

    return {name: filled(value) for name, value in profile.reasoning.items()}


def _convert_round(
    messages: list[Message], profile: Profile, rejected: frozenset[str]
) -> list[Message]:
    """One round as the server takes it, the images of its results in a user message behind them."""
    unwanted = EXTRA_MEMBERS - set(profile.echoed) | rejected
    made: list[Message] = []
    images: list[Any] = []
    names: dict[str, str] = {}  # call id -> tool
    behind = 0  # the place behind the results
    for message in messages:
        role = message["role"]
        if role == "assistant":
            if profile.tool_name:
                calls = message.get("tool_calls") or ()
                names = {call["id"]: call["function"]["name"] for call in calls}
            message = _convert_answer(message, profile, unwanted)
        elif role == "tool":
            message, found = _fit_result(message, names.get(message["tool_call_id"], ""), profile)
            images += found
            behind = len(made) + 1
        if role not in SYSTEM:
            made.append(message)
    if images:
        text = {"type": "text", "text": "Images from the tool results above:"}
        made.insert(behind, {"role": "user", "content": [text, *images]})
    return _make_strict_turns(made) if profile.strict_turns else made


def _make_strict_turns(messages: list[Message]) -> list[Message]:
    """User messages in a row become one; an answer stands between a result and a user message."""
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


def _join_contents(*contents: Any) -> Any:
    """The contents of two messages as one: text, or parts where either has parts."""
    if all(isinstance(each, str) for each in contents):
        return "\n\n".join(contents)
    texts = ([{"type": "text", "text": c}] if isinstance(c, str) else c or () for c in contents)
    return [part for parts in texts for part in parts]


def _convert_answer(message: Message, profile: Profile, unwanted: frozenset[str]) -> Message:
    """Only the members that go back, content in the server's form, ids that fit."""
    thought = message.get(THINK) if THINK not in unwanted else None
    if not unwanted.isdisjoint(message) or thought:
        message = {k: v for k, v in message.items() if k not in unwanted and k != THINK}
    if thought:
        message["content"] = f"<think>{thought}</think>\n\n{message.get('content') or ''}"
    calls = message.get("tool_calls")
    if not calls:
        return message
    known = CALL | set(profile.echoed) - unwanted
    made = [{name: each for name, each in call.items() if name in known} for call in calls]
    for call in made:
        call["id"] = _fit_id(call["id"], profile)
    message = message | {"tool_calls": made}
    if profile.reasoning_filled and "reasoning_content" not in message:
        message = message | {"reasoning_content": ""}
    if not message.get("content") and profile.empty_content != "null":
        message = message | {"content": ""}
        if profile.empty_content == "absent":
            del message["content"]
    return message


def _fit_result(message: Message, name: str, profile: Profile) -> tuple[Message, list[Any]]:
    """A result as plain text, which every server takes, and its images, which most take in a user message only."""
    content, images = message["content"], list[Any]()
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        images = [part for part in parts if not isinstance(part.get("text"), str)]
        content = text_of(message) or ("(see the image below)" if images else "(no output)")
    call_id = _fit_id(message["tool_call_id"], profile)
    message = message | {"content": content, "tool_call_id": call_id}
    return (message | {"name": name} if name else message), images


def _fit_id(call_id: str, profile: Profile) -> str:
    """An id goes back as it came, unless another server gave it and it does not match here."""
    if not profile.ids or re.fullmatch(profile.ids, call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def copied(value: Any) -> Any:
    """A copy of a JSON value, which shows later whether the value was changed in place."""
    if isinstance(value, dict):
        return {name: copied(each) for name, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, list) else value


def encode(value: Any) -> bytes:
    """The bytes of a part of a request, without what no server accepts (lone surrogates, NUL). Raises ModelError for what is no
    JSON."""
    try:
        try:
            data = JSON.encode(value).encode()
        except UnicodeEncodeError:
            data = NUL
        return JSON.encode(mend_all(value)).encode() if NUL in data else data
    except (TypeError, ValueError, RecursionError) as error:
        raise ModelError("bad_request", f"what was to be sent is no JSON: {error}") from error
