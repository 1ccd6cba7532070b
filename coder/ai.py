"""ChatModel: one streamed chat completion with tools.

`stream` asks and, if the server rejects a parameter, asks again without it. `_ask_once` sends one
request and reads its answer. What differs between servers is in providers/, where requests are made
and sent and answers are read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from coder.abort import Abort
from coder.events import Events, Notice
from coder.providers import profiles
from coder.providers.assembler import CUT_OFF, Assembler, check_context, remarks
from coder.providers.connection import Redact
from coder.providers.endpoint import Endpoint
from coder.providers.errors import well_formed
from coder.providers.profiles import CHARS_PER_TOKEN, LIMITS, Price, Profile
from coder.providers.request import BUDGETS, RequestEncoder
from coder.providers.sse import Tap, read_answer
from coder.providers.text import host_of
from coder.types import Completion, ModelError, Request

FIRST_BYTE_TIMEOUT = 300.0  # seconds: a long prompt on a local server takes minutes
MAX_REJECTIONS = 6  # requests in a row, each without one parameter more


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

    `base_url` None is OPENAI_BASE_URL or OpenAI's own server, and then a missing key is taken from
    OPENAI_API_KEY; an address given here never gets a key that was not given with it. `client` is a
    client of the openai package, which then sends the requests, by an address and a key of its own.
    `idle_timeout`: seconds without an event that carries data (comments do not count),
    `first_byte_timeout`: seconds to the first of them; 0 is no limit. `extra_body` and `headers` go
    out with every request. `profile` overrides fields of profiles.Profile, `budgets` the tokens of
    the reasoning levels; `price` gives Usage its cost. `tap` gets the bytes of each request; a Tap
    that it returns sees the answer.

    Raises ValueError for a wrong profile, an empty name and an asynchronous client. Without a key
    the first request raises a ModelError before anything is sent.
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
        budgets: Mapping[str, int] = BUDGETS,
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
        self.budgets = budgets
        self.price = price
        self.tap = tap
        if client is None:
            self.endpoint = Endpoint(base_url, api_key, headers or {}, redact)
        else:
            self.endpoint = client_endpoint(client, name, base_url or api_key, headers, redact)
        address = self.endpoint.address or ""
        self.profile: Profile = profiles.profile_of(host_of(address), name, profile)
        self.endpoint.key_header = self.profile.key_header
        self.encoder = RequestEncoder(name, self.profile, self.extra_body, budgets)
        self._rejected = profiles.LEARNT.setdefault((address, name), set())
        self._reported_remarks: set[str] = set()

    def stream(self, request: Request, abort: Abort) -> Events[Completion]:
        """Yield the deltas of one answer, return it whole. Raises ModelError or Aborted."""
        dropped: frozenset[str] = frozenset()  # members of the body that this call does without
        for _ in range(MAX_REJECTIONS):
            body = self.encoder.encode(request, dropped | self._rejected)
            assembler = Assembler(self.profile.echoed)
            try:
                answer = yield from self._ask_once(body, request.api_key, assembler, abort)
            except ModelError as error:
                if error.kind != "bad_request":
                    # the server complains about something else now: leaving these out has helped
                    self._rejected.update(dropped)
                parameter = profiles.droppable_param(error, json.loads(body), self.profile)
                if parameter is None or assembler.begun:
                    raise
                dropped |= {parameter}
                failure = error
                if parameter in self._asked_for(request):
                    yield Notice(f"The server rejects {parameter!r}; it is no longer sent.")
            else:
                self._rejected.update(dropped)
                yield from self._new_remarks(answer, body)
                return answer
        raise failure  # each of MAX_REJECTIONS requests was rejected

    def _ask_once(
        self, body: bytes, api_key: str | None, assembler: Assembler, abort: Abort
    ) -> Events[Completion]:
        """Send one request; yield the deltas of its answer, return it whole."""
        tap = self.tap(body) if self.tap else None
        failure: ModelError | None = None
        try:
            with (
                self.endpoint.post(body, api_key, abort, self.first_byte_timeout) as answer,
                well_formed(),
            ):
                yield from read_answer(answer, assembler, self.idle_timeout, tap)
        except ModelError as error:
            failure = error
        if tap:
            tap.ended(failure)
        if failure:
            raise_unless_whole(failure, assembler)
        yield from assembler.flush()
        return self._judge(assembler, len(body))

    def _judge(self, assembler: Assembler, sent: int) -> Completion:
        """The whole answer to a request of so many bytes. Raises ModelError for one that is
        malformed or does not fit."""
        with well_formed():
            answer = assembler.completion()
        if answer.usage.estimated:
            got = len(json.dumps(answer.message))
            answer.usage.input = sent // CHARS_PER_TOKEN
            answer.usage.output = got // CHARS_PER_TOKEN
        if self.price:
            answer.usage.cost = self.price.of(answer.usage)
        check_context(answer, self.context_window)
        return answer

    def _asked_for(self, request: Request) -> set[str]:
        """The members of the body that the user will miss."""
        names = set(self.extra_body) | set(request.options) | set(self.profile.reasoning)
        return names - set(LIMITS)

    def _new_remarks(self, answer: Completion, body: bytes) -> Iterator[Notice]:
        for text in remarks(answer, body, self.context_window):
            if text not in self._reported_remarks:
                self._reported_remarks.add(text)
                yield Notice(text)


def client_endpoint(
    client: Any,
    model: str,
    address_or_key: str | None,
    headers: Mapping[str, str] | None,
    redact: Redact | None,
) -> Endpoint:
    if address_or_key:
        raise ValueError("client= has an address and a key of its own")
    from coder.providers.openai_client import ClientEndpoint  # late: the package takes 0.5 s

    return ClientEndpoint(client, model, headers or {}, redact)


def raise_unless_whole(failure: ModelError, assembler: Assembler) -> None:
    """A whole answer counts although the connection stayed open or broke after it. Raises
    ModelError for any other."""
    if failure.kind != "network" or not assembler.ended:
        raise failure
    if not assembler.is_whole:
        raise ModelError("incomplete", CUT_OFF, retryable=True) from failure
