"""ChatModel: one streamed chat completion with tools, through the openai client.

The client gives the request, the credentials and Azure's ways. The body is encoded and the stream read by providers/,
for two measured reasons: the client's typed `create()` walks the whole history for every request (459 ms at 400 steps,
against 10), and its stream costs 150 µs a token and drops the connection (against 15).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from coder.abort import Abort
from coder.events import Event, Events, Notice
from coder.providers.address import host_of
from coder.providers.assembler import Assembler
from coder.providers.http import Endpoint
from coder.providers.profiles import (
    LEARNT,
    Profile,
    Rejected,
    droppable_param,
    omissions,
    profile_of,
    rejection,
)
from coder.providers.request import BUDGETS, encoded, request_body
from coder.providers.response import check_context, read_answer, remarks, well_formed
from coder.providers.usage import Price, estimate
from coder.types import Completion, ModelError, Request

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

    `base_url` None is the client's default, and then a missing key is taken from OPENAI_API_KEY; an address given here
    never gets a key that was not given with it. `idle_timeout`: seconds without an event that carries data (comments do
    not count), `first_byte_timeout`: seconds to the first of them; 0 is no limit. `extra_body` and `headers` go out with
    every request. `profile` overrides fields of profiles.Profile, `budgets` the tokens of the reasoning levels; `price`
    gives Usage its cost. `tap` (say `lambda sent: print`) gets the bytes of each request; what it returns gets the
    response, each piece of its body, and at the end the ModelError or None. Raises ValueError for a wrong profile and for an
    empty name; a missing key is a ModelError of the first request, before anything is sent.
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
        redact: Callable[[bytes], bytes] = bytes,
    ) -> None:
        if not name:
            raise ValueError("no model: give its name, such as ChatModel('gpt-5')")
        self.name, self.context_window = name, context_window
        self.idle_timeout = idle_timeout or math.inf
        self.first_byte_timeout = first_byte_timeout or math.inf
        self.extra_body, self.budgets = dict(extra_body or {}), budgets
        self.price, self.tap = price, tap
        self.endpoint = Endpoint(base_url, api_key, headers or {}, redact)
        self.profile: Profile = profile_of(host_of(self.endpoint.address), name, profile)
        self.endpoint.key_header = self.profile.key_header
        self._place = (self.endpoint.address or "", name)
        self._noticed: set[str] = set()  # once each

    def stream(self, request: Request, abort: Abort) -> Events[Completion]:
        """Yield the deltas of one answer, return it whole. Raises ModelError or Aborted."""
        tried: Rejected = frozenset()
        names = {tool["function"]["name"] for tool in request.tools if tool.get("function")}
        for _ in range(MAX_REJECTIONS):
            body = self.body(request, tried)
            options = (*self.extra_body, *request.options)
            yield from self._notices(omissions(body, options, self.profile, self._rejected(tried)))
            assembler = Assembler(names, self.profile.echoed)
            try:
                answer = yield from self._answer(encoded(body), request, assembler, abort)
            except ModelError as error:
                name = None if assembler.begun else droppable_param(error, body, self.profile)
                if error.kind != "bad_request":  # what is wrong now is something else
                    self._learn(tried)
                if name is None:
                    raise
                tried, failure = tried | {rejection(name, body.get(name))}, error
            else:
                self._learn(tried)
                yield from self._notices(remarks(answer, request, self.context_window))
                return answer
        raise failure

    def body(self, request: Request, tried: Rejected = frozenset()) -> dict[str, Any]:
        """The JSON that is sent, without what the server has rejected."""
        budgets = {**self.budgets, **request.budgets}
        rejected = self._rejected(tried)
        return request_body(self.name, request, self.profile, rejected, self.extra_body, budgets)

    def _rejected(self, tried: Rejected) -> Rejected:
        return LEARNT.get(self._place, frozenset()) | tried

    def _learn(self, tried: Rejected) -> None:
        LEARNT[self._place] = self._rejected(tried)

    def _notices(self, texts: Iterable[str]) -> Iterator[Event]:
        """Each text once in the life of this model."""
        for text in texts:
            if text not in self._noticed:
                self._noticed.add(text)
                yield Notice(text)

    def _answer(
        self, data: bytes, request: Request, assembler: Assembler, abort: Abort
    ) -> Events[Completion]:
        """One request and its answer, judged."""
        tap = self.tap(data) if self.tap else None
        post = self.endpoint.post(data, request.api_key, abort, self.first_byte_timeout)
        failure: ModelError | None = None
        try:
            with post as response, well_formed():
                yield from read_answer(response, assembler, self.idle_timeout, tap)
        except ModelError as error:
            failure = error
        if tap:
            tap(failure)
        # a whole answer counts although the connection stayed open or broke behind it
        if failure and not (failure.kind == "network" and assembler.ended):
            raise failure
        with well_formed():
            yield from assembler.flush()
            answer = assembler.completion()
        if answer.usage.estimated:
            answer.usage = estimate(len(data), len(json.dumps(answer.message)))
        if self.price:
            answer.usage.cost = self.price.of(answer.usage)
        check_context(answer, self.context_window)
        return answer
