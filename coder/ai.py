"""ChatModel: one streamed chat completion with tools, through the openai client.

The client gives the connection, the credentials and its errors. The request is encoded and the stream read by
providers/, for two measured reasons: the client's typed `create()` walks the whole history for every request
(459 ms at 400 steps, against 10), and its stream costs 200 µs a token and drops the connection (against 15).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from coder.abort import Abort
from coder.events import Event, Events, Notice
from coder.providers.address import host_of
from coder.providers.assembler import Assembler
from coder.providers.http import Endpoint
from coder.providers.profiles import (
    BUDGETS,
    LIMITS,
    Profile,
    Refusals,
    dispensable,
    profile_of,
    request_body,
)
from coder.providers.request import Shaper, encoded
from coder.providers.response import read_answer, tool_markup, truncated_context, well_formed
from coder.providers.usage import Price, estimate
from coder.types import Completion, ModelError, Request

FIRST_BYTE_TIMEOUT = 300.0  # seconds: a long prompt on a local server takes minutes
MAX_REFUSALS = 6  # requests in a row, each without one member more


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
    not count: S15), `first_byte_timeout`: seconds to the first of them; 0 is no limit. `extra_body` and `headers` go
    out with every request. `profile` overrides fields of profile.Profile, `budgets` the tokens of the reasoning levels;
    `price` gives Usage its cost. `tap` (say `lambda sent: print`) gets the bytes of each request; what it returns gets the
    response, each piece of its body as received, and at the end the ModelError or None. Raises ValueError for a wrong profile.
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
    ) -> None:
        self.name = name
        self.context_window = context_window
        self.idle_timeout = idle_timeout or math.inf
        self.first_byte_timeout = first_byte_timeout or math.inf
        self.extra_body = dict(extra_body or {})
        self.endpoint = Endpoint(base_url, api_key, headers or {})
        self.profile: Profile = profile_of(host_of(self.endpoint.address), name, profile)
        self.endpoint.key_header = self.profile.key_header
        self.refusals = Refusals(self.endpoint.address or "", name)
        self.budgets = budgets
        self.price = price
        self.tap = tap
        self._shape = Shaper()
        self._said: set[str] = set()  # what was left out
        self._cut_noticed = False

    def stream(self, request: Request, abort: Abort) -> Events[Completion]:
        """Yield the deltas of one answer, return it whole. Raises ModelError or Aborted."""
        refusals = self.refusals
        for _ in range(MAX_REFUSALS):
            asked = self.body(request, refusals)
            yield from self._left_out(asked, request, refusals)
            assembler = Assembler(
                # a tool of the provider's own has no function
                {tool["function"]["name"] for tool in request.tools if tool.get("function")},
                self.profile.echoed,
            )
            try:
                answer = yield from self._answer(encoded(asked), request, assembler, abort)
            except ModelError as error:
                error.message = self._without_key(error.message, request)
                error.request_id = error.request_id and self._without_key(error.request_id, request)
                name = None if assembler.begun else dispensable(error, asked, self.profile)
                if error.kind != "bad_request":
                    self.refusals.learn(refusals)  # what is wrong now is something else
                if name is None:
                    raise
                refusals, failure = refusals.with_one(name, asked.get(name)), error
            else:
                self.refusals.learn(refusals)
                yield from self._remarks(answer, request)
                return answer
        raise failure

    def _left_out(
        self, asked: dict[str, Any], request: Request, refusals: Refusals
    ) -> Iterator[Event]:
        """Say, once, what a person asked for and the server does not take. A limit may only have changed its name."""
        wanted = {
            *self.extra_body,
            *request.options,
            *(self.profile.reasoning if request.reasoning != "off" else ()),
        }
        wanted -= {*LIMITS} if asked.keys() & {*LIMITS} else set()
        for name in sorted(wanted & refusals.names() - asked.keys() - self._said):
            self._said.add(name)
            yield Notice(f"The server does not take {name!r}, so it is left out.")

    def body(self, request: Request, refusals: Refusals | None = None) -> dict[str, Any]:
        """The JSON that is sent."""
        return request_body(
            self.name,
            request,
            self.profile,
            refusals or self.refusals,
            self._shape,
            extra=self.extra_body,
            budgets={**self.budgets, **request.budgets},
        )

    def _without_key(self, text: str, request: Request) -> str:
        """A server's text, which may repeat the key that it was sent."""
        try:
            key = self.endpoint.key_for(request.api_key)
        except ModelError:  # one that no header can carry was never sent
            return text
        return text.replace(key, "***") if len(key) > 7 else text

    def _answer(
        self, data: bytes, request: Request, assembler: Assembler, abort: Abort
    ) -> Events[Completion]:
        """One request and its answer, judged."""
        heard = self.tap(data) if self.tap else None
        failure: ModelError | None = None
        try:
            with (
                self.endpoint.post(
                    data, request.api_key, abort, self.first_byte_timeout
                ) as response,
                well_formed(),
            ):
                yield from read_answer(response, assembler, self.idle_timeout, heard)
        except ModelError as error:
            failure = error
        if heard:
            heard(failure)
        # F14: whole, only the connection stayed open
        if failure and not (failure.kind == "network" and assembler.ended):
            raise failure
        with well_formed():
            yield from assembler.rest()
            return self._judged(assembler.completion(), len(data))

    def _judged(self, answer: Completion, sent: int) -> Completion:
        """Estimate usage that was not reported; a full window without room for a word is an overflow."""
        if answer.usage.estimated:
            answer.usage = estimate(sent, len(json.dumps(answer.message)))
        usage = answer.usage
        if self.price:
            usage.cost = self.price.of(usage)
        empty = not (answer.text or answer.calls or usage.output)
        if answer.finish == "length" and empty and usage.input >= 0.99 * self.context_window:
            raise ModelError("overflow", "the context is full")
        return answer

    def _remarks(self, answer: Completion, request: Request) -> Iterator[Event]:
        """Notices on an answer that looks right and is not."""
        if text := tool_markup(answer, request):
            yield Notice(text)
        text = truncated_context(answer.usage, request, self.context_window)
        if text and not self._cut_noticed:
            self._cut_noticed = True
            yield Notice(text)
