"""ChatModel: one streamed chat completion with tools.

What differs between servers is in providers/, where requests are made and sent and answers are read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from coder.abort import Abort
from coder.events import Event, Events, Notice
from coder.providers import profiles
from coder.providers.assembler import CUT_OFF, Assembler, check_context, remarks
from coder.providers.endpoint import Endpoint
from coder.providers.errors import well_formed
from coder.providers.profiles import CHARS_PER_TOKEN, LIMITS, Price, Profile
from coder.providers.request import BUDGETS, RequestEncoder
from coder.providers.sse import read_answer
from coder.providers.text import host_of
from coder.types import Completion, ModelError, Request, Usage

FIRST_BYTE_TIMEOUT = 300.0  # seconds: a long prompt on a local server takes minutes
MAX_REJECTIONS = 6  # requests in a row, each without one parameter more


class Model(Protocol):
    """Anything that answers a request: a ChatModel, a script, a relay."""

    name: str
    context_window: int  # tokens

    def stream(self, request: Request, abort: Abort) -> Events[Completion]:
        """Yield delta events, return the Completion. Raises ModelError, or Aborted when `abort` was set."""
        ...


class ChatModel:
    """A model behind an OpenAI-compatible endpoint.

    `base_url` None is OPENAI_BASE_URL or OpenAI's own server, and then a missing key is taken from
    OPENAI_API_KEY; an address given here never gets a key that was not given with it. `idle_timeout`: seconds
    without an event that carries data (comments do not count), `first_byte_timeout`: seconds to the first of
    them; 0 is no limit. `extra_body` and `headers` go out with every request. `profile` overrides fields of
    profiles.Profile, `budgets` the tokens of the reasoning levels; `price` gives Usage its cost. `tap` (say
    `lambda sent: print`) gets the bytes of each request; what it returns gets the response, each piece of its
    body, and at the end the ModelError or None. `client` is a client of the openai package, which then sends
    the requests, by an address and a key of its own.

    Raises ValueError for a wrong profile, an empty name and an asynchronous client. Without a key the first request raises a
    ModelError before anything is sent.
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
        tap: Callable[[bytes], Callable[[Any], object]] | None = None,
        redact: Callable[[bytes], bytes] | None = None,
        client: Any = None,
    ) -> None:
        if not name:
            raise ValueError("no model: give its name, such as ChatModel('gpt-5')")
        if client is not None and (base_url or api_key):
            raise ValueError("client= has an address and a key of its own")
        self.name, self.context_window = name, context_window
        self.idle_timeout = idle_timeout or math.inf
        self.first_byte_timeout = first_byte_timeout or math.inf
        self.extra_body, self.budgets = dict(extra_body or {}), budgets
        self.price, self.tap = price, tap
        if client is None:
            self.endpoint = Endpoint(base_url, api_key, headers or {}, redact)
        else:
            from coder.providers.openai_client import (
                ClientEndpoint,
            )  # late: the package takes 0.5 s

            self.endpoint = ClientEndpoint(client, name, headers or {}, redact)
        self.profile: Profile = profiles.profile_of(host_of(self.endpoint.address), name, profile)
        self.endpoint.key_header = self.profile.key_header
        self.encoder = RequestEncoder(name, self.profile, self.extra_body, budgets)
        self._rejected = profiles.LEARNT.setdefault((self.endpoint.address or "", name), set())
        self._reported_remarks: set[str] = set()

    def stream(self, request: Request, abort: Abort) -> Events[Completion]:
        """Yield the deltas of one answer, return it whole. Raises ModelError or Aborted."""
        tried: frozenset[str] = frozenset()
        for _ in range(MAX_REJECTIONS):
            data = self.encoder.encode(request, tried | self._rejected)
            assembler = Assembler(self.profile.echoed)
            try:
                with self._send(data, request, assembler, abort) as deltas:
                    yield from deltas
                yield from assembler.flush()
                answer = self._judge(assembler, data)
            except ModelError as error:
                if error.kind != "bad_request":  # what is wrong now is something else
                    self._rejected.update(tried)
                parameter = profiles.droppable_param(error, json.loads(data), self.profile)
                if parameter is None or assembler.begun:
                    raise
                tried |= {parameter}
                failure = error
                wanted = {*self.extra_body, *request.options, *self.profile.reasoning} - {*LIMITS}
                if parameter in wanted:
                    yield Notice(f"The server rejects {parameter!r}; it is no longer sent.")
            else:
                self._rejected.update(tried)
                for text in remarks(answer, data, self.context_window):
                    if text not in self._reported_remarks:
                        self._reported_remarks.add(text)
                        yield Notice(text)
                return answer
        raise failure

    @contextmanager
    def _send(
        self, data: bytes, request: Request, assembler: Assembler, abort: Abort
    ) -> Iterator[Iterator[Event]]:
        """Send a request; inside, the deltas of its answer are read. Raises ModelError."""
        tap = self.tap(data) if self.tap else None
        post = self.endpoint.post(data, request.api_key, abort, self.first_byte_timeout)
        failure: ModelError | None = None
        try:
            with post as response, well_formed():
                yield read_answer(response, assembler, self.idle_timeout, tap)
        except ModelError as error:
            failure = error
        if tap:
            tap(failure)
        if failure and failure.kind == "network" and assembler.ended:
            # a whole answer counts although the connection stayed open or broke behind it
            if assembler.is_whole:
                return
            raise ModelError("incomplete", CUT_OFF, retryable=True) from failure
        if failure:
            raise failure

    def _judge(self, assembler: Assembler, data: bytes) -> Completion:
        """The whole answer. Raises ModelError for one that is malformed or does not fit."""
        with well_formed():
            answer = assembler.completion()
        if answer.usage.estimated:
            sent, got = len(data), len(json.dumps(answer.message))
            answer.usage = Usage(sent // CHARS_PER_TOKEN, got // CHARS_PER_TOKEN, estimated=True)
        if self.price:
            answer.usage.cost = self.price.of(answer.usage)
        check_context(answer, self.context_window)
        return answer
