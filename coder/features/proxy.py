"""A relay that keeps the key: programs ask it with a token of their own, and it asks the model.

    app = relay({"gpt-5": ChatModel("gpt-5")}, tokens={"one-token-a-person"})       # on the server: any WSGI server runs it
    agent = Agent(ProxyModel("https://relay.example", "one-token-a-person", "gpt-5"))   # anywhere else

POST /api/stream takes {"model", "context": {"system_prompt", "messages", "tools"}, "options"} and answers events, one JSON
object each: deltas as they come, and at the end what no delta tells. The message itself is never sent: the other side
makes it of the deltas, so an answer crosses the wire once (pi-agent-core's streamProxy).

What it leaves out: TLS, rates and accounts, which belong to the WSGI server in front. `python -m wsgiref` is for a try only.
"""

from __future__ import annotations

import hmac
import json
import logging
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, get_args

from coder.abort import Abort
from coder.calls import parse_arguments
from coder.connection import Line
from coder.endpoint import Endpoint
from coder.errors import readable
from coder.text import mend, mend_all
from coder.types import (
    Aborted,
    Completion,
    ErrorKind,
    Event,
    Finish,
    Message,
    Model,
    ModelError,
    Notice,
    Reasoning,
    ReasoningDelta,
    Request,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from coder.usage import MOST
from coder.wire import CUT, sse

log = logging.getLogger("coder.relay")

PATH = "/api/stream"
MAX_BODY = 20_000_000  # bytes of a request
DIGITS = 12  # of a length that can be meant
BEAT = 1.0  # seconds between two comments while the model is silent, which find out whether the client is still there
OPTIONS = {"temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "stop"}  # body fields that a client may set
OURS = {"reasoning", "session_id", "budgets"}  # fields of the Request that stand beside them

StartResponse = Callable[[str, list[tuple[str, str]]], Any]
Said = TextDelta | ReasoningDelta | Notice
DELTAS: dict[str, type[Said]] = {"text": TextDelta, "reasoning": ReasoningDelta, "notice": Notice}


# ---- the server ------------------------------------------------------------------------------------------


def relay(models: Mapping[str, Model], tokens: Iterable[str], *, max_body: int = MAX_BODY) -> Callable[..., Iterable[bytes]]:
    """A WSGI application. `models`: those that may be asked, by name; `tokens`: what opens the door. Raises ValueError
    without a token."""
    known = [token.encode() for token in tokens]
    if not known or not all(known):
        raise ValueError("a relay without a token would be open to everybody")

    def application(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        try:
            model, request, left_out = _asked(environ, models, known, max_body)
        except _Refused as refused:
            body = json.dumps({"error": {"message": str(refused), "code": refused.status}}).encode()
            start_response(refused.line, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
            return [body]
        start_response("200 OK", [("Content-Type", "text/event-stream"), ("Cache-Control", "no-store"), ("X-Accel-Buffering", "no")])
        return _Answer(model, request, left_out)

    return application


class _Refused(Exception):
    """A request that is not passed on."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.line = status, f"{status} {reason}"


def _asked(environ: dict[str, Any], models: Mapping[str, Model], tokens: list[bytes],
           max_body: int) -> tuple[Model, Request, list[str]]:
    """The model and the request that a POST names, and the options that are not passed on. Raises _Refused. The token is
    looked at before anything is read."""
    if environ.get("PATH_INFO") != PATH:
        raise _Refused(404, "Not Found", f"there is nothing but {PATH}")
    if environ.get("REQUEST_METHOD") != "POST":
        raise _Refused(405, "Method Not Allowed", "POST it")
    scheme, _, token = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
    given = token.strip().encode("latin-1", "replace")
    if scheme.lower() != "bearer" or not any([hmac.compare_digest(given, each) for each in tokens]):  # each is compared
        raise _Refused(401, "Unauthorized", "the token is not known")
    size = environ.get("CONTENT_LENGTH") or ""
    if not (size.isascii() and size.isdigit()):
        raise _Refused(411, "Length Required", "say how long the request is")
    if len(size) > DIGITS or int(size) > max_body:
        raise _Refused(413, "Content Too Large", f"a request has at most {max_body} bytes")
    try:
        body = json.loads(environ["wsgi.input"].read(int(size)))
        options = body.get("options") or {}
        left_out = sorted(options.keys() - OPTIONS - OURS)
        return _found(models, body["model"]), _request(body.get("context") or {}, options), left_out
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _Refused(400, "Bad Request", f"the request is not of the right form ({type(error).__name__}: {error})"[:200]) from None


def _found(models: Mapping[str, Model], name: str) -> Model:
    if name not in models:
        raise _Refused(404, "Not Found", f"model {json.dumps(name)[:80]} not found; there are {', '.join(models)}")
    return models[name]


def _request(context: dict[str, Any], options: dict[str, Any]) -> Request:
    messages, tools = context.get("messages", []), context.get("tools") or []
    if not (isinstance(messages, list) and all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages)):
        raise ValueError("messages are a list of objects with a role")
    if not (isinstance(tools, list) and all(isinstance(tool["function"]["name"], str) for tool in tools)):
        raise ValueError("tools are a list of functions with a name")
    reasoning, budgets = options.get("reasoning", "off"), options.get("budgets") or {}
    if reasoning not in get_args(Reasoning):
        raise ValueError(f"reasoning is one of {', '.join(get_args(Reasoning))}")
    return Request(messages, tools, str(context.get("system_prompt") or ""), reasoning=reasoning,
                   budgets={level: _count(tokens) for level, tokens in budgets.items()}, session_id=str(options.get("session_id") or ""),
                   options={key: options[key] for key in OPTIONS & options.keys()})


class _Answer:
    """The events of one answer. The model is asked in a thread, so that a client that leaves is noticed while it is silent;
    `close`, which a WSGI server calls on every way out, ends the request to the model."""

    def __init__(self, model: Model, request: Request, left_out: list[str]) -> None:
        self.model, self.request, self.left_out = model, request, left_out
        self.abort = Abort()
        self.waiting: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._ask, daemon=True).start()

    def __iter__(self) -> Iterator[bytes]:
        while True:
            try:
                event = self.waiting.get(timeout=BEAT)
            except queue.Empty:
                yield b": still here\n\n"
                continue
            if event is None:
                return
            yield b"data: " + json.dumps(event).encode() + b"\n\n"

    def close(self) -> None:
        self.abort.set()

    def _ask(self) -> None:
        try:
            for event in self._events():
                self.waiting.put(event)
        except Aborted:
            pass  # nobody is there any more
        except ModelError as error:
            self.waiting.put({"type": "error", "status": error.status, "retryable": error.retryable, "retry_after": error.retry_after,
                              "loading": error.loading} | error.to_dict())
        except Exception as error:  # a bug, or a message that no model takes; what it says may not be the client's business
            log.exception("the model could not be asked")
            self.waiting.put({"type": "error", "kind": "bad_request", "message": f"the model could not be asked ({type(error).__name__})"})
        finally:
            self.waiting.put(None)

    def _events(self) -> Iterator[dict[str, Any]]:
        if self.left_out:
            yield {"type": "left_out", "options": self.left_out}
        text, arguments = "", list[str]()
        stream = self.model.stream(self.request, self.abort)
        while True:
            try:
                event = next(stream)
            except StopIteration as end:
                yield _rest(end.value, text, "".join(arguments))
                return
            for name, kind in DELTAS.items():
                if isinstance(event, kind):
                    text += event.text if name == "text" else ""
                    yield {"type": name, "text": event.text}
            if isinstance(event, ToolCallDelta):
                arguments.append(event.arguments)
                yield {"type": "call", "id": event.id, "name": event.name, "arguments": event.arguments}


def _rest(answer: Completion, text: str, arguments: str) -> dict[str, Any]:
    """What the deltas do not tell of an answer. Text and arguments are left out where they are what the deltas said."""
    message = dict(answer.message)
    calls = [dict(call) for call in message.pop("tool_calls", None) or ()]
    if message.get("content") == (text or None):
        del message["content"]
    if len(calls) == 1 and calls[0]["function"]["arguments"] == arguments:
        calls[0]["function"] = {"name": calls[0]["function"]["name"]}
    return {"type": "done", "finish": answer.finish, "finish_reason": answer.finish_reason, "message": message, "calls": calls,
            "problems": [call.problem for call in answer.calls], "usage": asdict(answer.usage)}


# ---- the client ------------------------------------------------------------------------------------------


class ProxyModel:
    """A model behind a relay: `stream` as ChatModel has it. `auth_token` is the relay's, not a provider's key."""

    def __init__(self, proxy_url: str, auth_token: str, name: str, *, context_window: int = 128_000, idle_timeout: float = 180.0,
                 first_byte_timeout: float = 300.0) -> None:
        self.name = name
        self.context_window = context_window
        self.idle_timeout, self.first_byte_timeout = idle_timeout, first_byte_timeout
        self.endpoint = Endpoint(proxy_url, auth_token, {}, path=PATH)
        self._said: set[str] = set()  # what was left out

    def stream(self, request: Request, abort: Abort) -> Generator[Event, None, Completion]:
        """Yield the deltas of one answer, return it whole; say once of each option that the relay does not take it. Raises
        ModelError or Aborted."""
        context = {"system_prompt": request.system, "messages": request.messages, "tools": request.tools}
        options = {name: value for name, value in request.options.items() if name not in OURS}
        options |= {"reasoning": request.reasoning, "session_id": request.session_id, "budgets": dict(request.budgets)}
        data = json.dumps({"model": self.name, "context": context, "options": options}).encode()
        answer = _Rebuilt(self._said)
        yield from answer.left_out(sorted(request.options.keys() & OURS))
        failure = yield from self.endpoint.exchange(data, None, abort, self.first_byte_timeout,
                                                    lambda response, line: answer.read(response, line, self.idle_timeout))
        if answer.completion:
            return answer.completion
        raise failure or ModelError("incomplete", "the answer was cut off", retryable=True)


class _Rebuilt:
    """An answer while it is made of its events."""

    def __init__(self, said: set[str]) -> None:
        self.text, self.reasoning, self.arguments = list[str](), list[str](), list[str]()
        self.completion: Completion | None = None
        self.said = said

    def left_out(self, options: Iterable[Any]) -> Iterator[Event]:
        for name in (name for name in map(_text, options) if name not in self.said):
            self.said.add(name)
            yield Notice(f"The relay does not take {name!r}, so it is left out.")

    def read(self, response: Any, line: Line, idle: float) -> Iterator[Event]:
        for name, data in sse(response.iter_raw()):
            if name == CUT:
                return
            line.within(idle)
            event = json.loads(data)
            match event["type"]:
                case "text" | "reasoning" | "notice" as kind:
                    text = _text(event["text"])
                    {"text": self.text, "reasoning": self.reasoning}.get(kind, []).append(text)
                    yield DELTAS[kind](text)
                case "call":
                    self.arguments.append(_text(event["arguments"]))
                    yield ToolCallDelta(_text(event["id"]), _text(event["name"]), self.arguments[-1])
                case "left_out":
                    yield from self.left_out(event["options"])
                case "error":
                    raise _failure(event)
                case "done":
                    self.completion = self._whole(event)

    def _whole(self, event: dict[str, Any]) -> Completion:
        """Raises one of endpoint.MALFORMED where the relay has sent something else than `_rest` makes."""
        text, calls = "".join(self.text), [_call(entry, "".join(self.arguments)) for entry in event["calls"]]
        told = {name: value for name, value in mend_all(event["message"]).items() if name not in ("role", "tool_calls", "meta")}
        content = _text(told["content"] or "") if "content" in told else text
        message: Message = {"role": "assistant"} | told | {"content": content or None}
        if calls:
            message["tool_calls"] = [entry for entry, _, _ in calls]
        if len({entry["id"] for entry, _, _ in calls}) < len(calls) or event["finish"] not in get_args(Finish):
            raise ValueError("a call's id twice, or no word for the end")
        made = [ToolCall(entry["id"], entry["function"]["name"], None if problem else arguments, _text(problem) or why)
                for (entry, arguments, why), problem in zip(calls, event["problems"], strict=True)]
        return Completion(content, made, event["finish"], message, _usage(event["usage"]), "".join(self.reasoning),
                          _text(event["finish_reason"]))


# What a relay has sent is taken for nothing but what it is; these raise one of endpoint.MALFORMED otherwise.


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return mend(value)


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < MOST:
        raise TypeError(f"{value!r:.40} is no number of tokens")
    return int(value)


def _call(entry: dict[str, Any], streamed: str) -> tuple[Message, dict[str, Any] | None, str]:
    """A call as the history has it, its arguments, and why there are none. `streamed`: the arguments that the deltas told."""
    function = entry["function"]
    call_id, name, text = _text(entry["id"]), _text(function["name"]), _text(function.get("arguments", streamed))
    if not (call_id and name):
        raise ValueError("a call without an id or a name")
    arguments, why = parse_arguments([text])
    return mend_all(entry) | {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}, arguments, why


def _usage(said: dict[str, Any]) -> Usage:
    cost = said.get("cost")
    if cost is not None and not 0 <= cost < MOST:
        raise TypeError(f"{cost!r:.40} is no cost")
    return Usage(_count(said["input"]), _count(said["output"]), _count(said["cached"]), _count(said["reasoning"]),
                 estimated=said.get("estimated") is True, cost=cost)


def _failure(event: dict[str, Any]) -> ModelError:
    """The error that the relay tells of: what it says besides the message is left out where it is of the wrong kind."""
    status, wait, request_id = event.get("status"), event.get("retry_after"), event.get("request_id")
    return ModelError(event["kind"] if event["kind"] in get_args(ErrorKind) else "server", readable(event["message"]),
                      status=status if isinstance(status, int) and 100 <= status < 600 else None,
                      request_id=readable(request_id) if isinstance(request_id, str) else None, retryable=event.get("retryable") is True,
                      retry_after=wait if isinstance(wait, int | float) and 0 <= wait < MOST else None,
                      loading=event.get("loading") is True)
