r"""ChatModel: one streamed chat completion with tools.

The request has the whole conversation, and the tools that the model may call:

    POST /v1/chat/completions
    {"model": "gpt-5", "stream": true, "tools": [{"type": "function", "function": {...}}],
     "messages": [{"role": "user", "content": "What is 2 + 3?"}]}

The answer is a stream of server-sent events, each with a piece of it, the delta. Pieces of a call
are those with the same index; its arguments are JSON text, cut anywhere:

    data: {"choices": [{"delta": {"content": "Let me "}}]}
    data: {"choices": [{"delta": {"content": "add."}}]}
    data: {"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "c1",
             "function": {"name": "add", "arguments": "{\"a\": 2,"}}]}}]}
    data: {"choices": [{"delta": {"tool_calls": [{"index": 0,
             "function": {"arguments": " \"b\": 3}"}}]}}]}
    data: {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}
    data: [DONE]

Each piece is passed on at once (TextDelta, ToolCallDelta), and kept. At the end all of them are one
Completion, whose message enters the conversation:

    {"role": "assistant", "content": "Let me add.", "tool_calls": [{"id": "c1", "type": "function",
     "function": {"name": "add", "arguments": "{\"a\": 2, \"b\": 3}"}}]}

Read `ChatModel.stream`, then `_ask_once`. The work is done in providers/, by one file for each
step: request.py makes the body, endpoint.py the head, connection.py sends both, sse.py reads the
events, assembler.py puts the pieces together. What differs between servers is in profiles.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from coder.abort import Abort
from coder.events import Events, Notice
from coder.providers.assembler import CUT_OFF, DROPPED, Assembler, check_context, has_dropped
from coder.providers.connection import Redact
from coder.providers.endpoint import Endpoint
from coder.providers.errors import refuse_malformed
from coder.providers.profiles import (
    CHARS_PER_TOKEN,
    LEARNT,
    OUTPUT_LIMITS,
    Price,
    droppable_param,
    profile_of,
)
from coder.providers.request import REASONING_BUDGETS, RequestEncoder
from coder.providers.sse import Tap, read_answer
from coder.providers.text import host_of
from coder.types import Completion, ModelError, Request

FIRST_BYTE_TIMEOUT = 300.0  # seconds: a long prompt on a local server takes minutes
MAX_REQUESTS = 6  # for one answer, each without one parameter more


class Model(Protocol):
    """Anything that answers a request: a ChatModel, a script, a relay."""

    name: str
    context_window: int  # tokens

    def stream(self, request: Request, abort: Abort) -> Events[Completion]:
        """Yield delta events, return the Completion. Raises ModelError, or Aborted when `abort` was
        set."""
        ...


class ChatModel:
    """A model of an OpenAI-compatible server.

    `base_url`: None is OPENAI_BASE_URL or OpenAI's own server.
    `api_key`: None is OPENAI_API_KEY, but never for an address that is given here.
    `context_window`: tokens.
    `idle_timeout`: seconds without an event that carries data (comments do not); 0: no limit.
    `first_byte_timeout`: seconds to the first of them; 0: no limit.
    `headers`, `extra_body`: go out with each request.
    `profile`: overrides fields of profiles.Profile.
    `reasoning_budgets`: the tokens of each reasoning level.
    `price`: gives Usage its cost.
    `tap`: gets the bytes of each request; a Tap that it returns sees the answer.
    `redact`: takes keys out of what is read from the server.
    `client`: of the openai package; it sends the requests, by its own address and key.

    Raises ValueError for a wrong profile, an empty name, an asynchronous client, and a client with
    an address or a key besides. Without a key OpenAI's own server is not asked: the request raises
    a ModelError.
    """

    def __init__(
        self,
        name: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        context_window: int = 128_000,
        idle_timeout: float = 180.0,
        first_byte_timeout: float = FIRST_BYTE_TIMEOUT,
        headers: Mapping[str, str] | None = None,
        extra_body: Mapping[str, Any] | None = None,
        profile: Mapping[str, Any] | None = None,
        reasoning_budgets: Mapping[str, int] = REASONING_BUDGETS,
        price: Price | None = None,
        tap: Callable[[bytes], Tap | None] | None = None,
        redact: Redact | None = None,
        client: Any = None,
    ) -> None:
        if not name:
            raise ValueError("no model: give its name, such as ChatModel('gpt-5')")
        self.name = name
        self.context_window = context_window
        self.idle_timeout = idle_timeout or math.inf
        self.first_byte_timeout = first_byte_timeout or math.inf
        self.extra_body = dict(extra_body or {})
        self.reasoning_budgets = reasoning_budgets
        self.price = price
        self.tap = tap
        self.endpoint = endpoint_for(
            model=name,
            base_url=base_url,
            api_key=api_key,
            headers=headers or {},
            redact=redact,
            client=client,
        )
        address = self.endpoint.address
        self.profile = profile_of(host_of(address), name, profile)
        self.endpoint.key_header = self.profile.key_header
        self.encoder = RequestEncoder(name, self.profile, self.extra_body, reasoning_budgets)
        # Parameters that this server rejects, as each ChatModel of this address and name has seen
        self._rejected = LEARNT.setdefault((address, name), set())
        self._has_warned = False  # whether the user knows that this server drops messages

    def stream(self, request: Request, abort: Abort) -> Events[Completion]:
        """Yield the deltas of one answer, return it whole. Raises ModelError or Aborted.

        If the server rejects a parameter, and the answer can do without it, the answer is asked for
        again without the parameter.
        """
        # Parameters that are left out because this server rejected them: `dropped` for this answer,
        # `self._rejected` always. The first become the second once the server takes a request
        dropped: frozenset[str] = frozenset()
        requests = 0
        while True:
            # One request, without what the server is known to reject
            requests += 1
            body = self.encoder.encode(request, dropped | self._rejected)
            assembler = Assembler(self.profile.echoed)
            try:
                answer = yield from self._ask_once(
                    body=body,
                    api_key=request.api_key,
                    assembler=assembler,
                    abort=abort,
                )
            except ModelError as error:
                if error.kind != "bad_request":
                    # Some other failure: the server took the request without what was dropped
                    self._rejected.update(dropped)
                    raise
                # Once more, if the server names a parameter that can be left out
                parameter = droppable_param(error, json.loads(body), self.profile)
                if parameter is None or assembler.begun or requests == MAX_REQUESTS:
                    raise
                dropped |= {parameter}
                if parameter in self._wanted_by_user(request):
                    yield Notice(f"The server rejects {parameter!r}; it is no longer sent.")
                continue

            # The answer
            self._rejected.update(dropped)
            if not self._has_warned and has_dropped(answer, body):
                self._has_warned = True
                yield Notice(DROPPED.format(window=self.context_window))
            return answer

    def _ask_once(
        self, body: bytes, api_key: str | None, assembler: Assembler, abort: Abort
    ) -> Events[Completion]:
        """Send one request; yield the deltas of its answer, return it whole."""
        tap = self.tap(body) if self.tap else None
        sending = self.endpoint.request(
            data=body,
            api_key=api_key,
            abort=abort,
            seconds=self.first_byte_timeout,
        )
        try:
            with sending as response, refuse_malformed():
                # Read the server-sent events, feed their pieces to the assembler, yield what it
                # makes of them
                yield from read_answer(
                    response=response,
                    assembler=assembler,
                    idle_timeout=self.idle_timeout,
                    tap=tap,
                )
        except ModelError as error:
            if tap:
                tap.ended(error)
            raise_unless_whole(error, assembler)
        else:
            if tap:
                tap.ended(None)
        yield from assembler.flush()  # text held back, which could have begun a tag of thoughts
        return self._whole_answer(assembler, len(body))

    def _whole_answer(self, assembler: Assembler, body_size: int) -> Completion:
        """The pieces as one answer, with its tokens. Raises ModelError for one that is malformed,
        or has found no room in the context."""
        with refuse_malformed():
            answer = assembler.completion()
        if answer.usage.estimated:
            message_size = len(json.dumps(answer.message))
            answer.usage.input = body_size // CHARS_PER_TOKEN
            answer.usage.output = message_size // CHARS_PER_TOKEN
        if self.price:
            answer.usage.cost = self.price.of(answer.usage)
        check_context(answer, self.context_window)
        return answer

    def _wanted_by_user(self, request: Request) -> set[str]:
        """The parameters that the user will miss; an output limit has a second name and is kept."""
        names = set(self.extra_body) | set(request.options) | set(self.profile.reasoning)
        return names - set(OUTPUT_LIMITS)


def endpoint_for(
    model: str,
    base_url: str | None,
    api_key: str | None,
    headers: Mapping[str, str],
    redact: Redact | None,
    client: Any,
) -> Endpoint:
    """The server at an address, or the one of a client of the openai package."""
    if client is None:
        return Endpoint(base_url=base_url, api_key=api_key, headers=headers, redact=redact)
    if base_url or api_key:
        raise ValueError("client= has an address and a key of its own")
    from coder.providers.openai_client import ClientEndpoint  # late: the package takes 0.5 s

    return ClientEndpoint(client=client, model=model, headers=headers, redact=redact)


def raise_unless_whole(failure: ModelError, assembler: Assembler) -> None:
    """Raise ModelError, unless the answer was whole: some servers break the connection after it, or
    leave it open without an end."""
    if failure.kind != "network" or not assembler.ended:
        raise failure
    if not assembler.is_whole:
        raise ModelError("incomplete", CUT_OFF, retryable=True) from failure
