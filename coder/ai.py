"""ChatModel: one streamed chat completion with tools.

What differs between servers is in providers/, where requests are made and sent and answers are read. The
openai client only supplies the address and the headers of OpenAI's own server: it takes 0.15 s to import,
1 ms to make a request, and 150 µs to read a token, which takes 15 µs here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from coder.abort import Abort
from coder.events import Events, Notice
from coder.providers import profiles
from coder.providers.assembler import Assembler, check_context, remarks
from coder.providers.errors import well_formed
from coder.providers.http import Endpoint, read_answer
from coder.providers.profiles import CHARS_PER_TOKEN, LIMITS, Price, Profile
from coder.providers.request import BUDGETS, RequestEncoder
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
    body, and at the end the ModelError or None.

    Raises ValueError for a wrong profile and for an empty name. Without a key the first request raises a
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
        self.profile: Profile = profiles.profile_of(host_of(self.endpoint.address), name, profile)
        self.endpoint.key_header = self.profile.key_header
        self.encoder = RequestEncoder(name, self.profile, self.extra_body, budgets)
        self._learnt = profiles.LEARNT.setdefault((self.endpoint.address or "", name), set())
        self._noticed: set[str] = set()  # remarks that were reported

    def stream(self, request: Request, abort: Abort) -> Events[Completion]:
        """Yield the deltas of one answer, return it whole. Raises ModelError or Aborted."""
        tried: frozenset[str] = frozenset()
        names = {tool["function"]["name"] for tool in request.tools if tool.get("function")}
        for _ in range(MAX_REJECTIONS):
            data = self.body(request, tried)
            assembler = Assembler(names, self.profile.echoed)
            try:
                answer = yield from self._attempt(data, request, assembler, abort)
            except ModelError as error:
                if error.kind != "bad_request":  # what is wrong now is something else
                    self._learnt |= tried
                name = profiles.droppable_param(error, json.loads(data), self.profile)
                if name is None or assembler.begun:
                    raise
                tried, failure = tried | {name}, error
                wanted = {*self.extra_body, *request.options, *self.profile.reasoning} - {*LIMITS}
                if name in wanted:
                    yield Notice(f"The server rejects {name!r}; it is no longer sent.")
            else:
                self._learnt |= tried
                for text in remarks(answer, bool(request.tools), data, self.context_window):
                    if text not in self._noticed:
                        self._noticed.add(text)
                        yield Notice(text)
                return answer
        raise failure

    def body(self, request: Request, tried: frozenset[str] = frozenset()) -> bytes:
        """The JSON that is sent. Raises ModelError where it cannot be JSON."""
        return self.encoder.encode(request, tried | self._learnt)

    def _attempt(
        self, data: bytes, request: Request, assembler: Assembler, abort: Abort
    ) -> Events[Completion]:
        """One request and its answer. Raises ModelError for one that is malformed or does not fit."""
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
            sent, got = len(data), len(json.dumps(answer.message))
            answer.usage = Usage(sent // CHARS_PER_TOKEN, got // CHARS_PER_TOKEN, estimated=True)
        if self.price:
            answer.usage.cost = self.price.of(answer.usage)
        check_context(answer, self.context_window)
        return answer
