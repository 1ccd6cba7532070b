"""Any Model in a trace: what it is asked and answers, in the form of the chat API."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from coder.abort import Abort
from coder.ai import Model
from coder.events import Events, ReasoningDelta, Returning, TextDelta
from coder.providers.profiles import Profile
from coder.providers.request import REASONING_BUDGETS, RequestEncoder
from coder.types import Completion, ModelError, Request

if TYPE_CHECKING:
    from coder.devtools.trace import Trace, TracedAnswer

HEAD: Any = SimpleNamespace(status_code=200, headers={"content-type": "text/event-stream"})


class TracedModel:
    """The same model, whose requests and answers are recorded."""

    def __init__(self, model: Model, trace: Trace) -> None:
        self.model = model
        self.trace = trace
        self.name = model.name
        self.context_window = model.context_window
        self._encoder = RequestEncoder(model.name, Profile(), {}, REASONING_BUDGETS)

    def stream(self, request: Request, abort: Abort) -> Events[Completion]:
        self.trace.hide(request.api_key)
        answer = self.trace.tap(self._encoder.encode(request))
        answer.head(HEAD)
        try:
            with Returning(self.model.stream(request, abort)) as stream:
                for event in stream:
                    if isinstance(event, TextDelta):
                        _record(answer, {"content": event.text})
                    elif isinstance(event, ReasoningDelta):
                        _record(answer, {"reasoning_content": event.text})
                    yield event
        except ModelError as error:
            answer.ended(error)
            raise
        _record_end(answer, stream.value)
        answer.ended(None)
        return stream.value


def _record(answer: TracedAnswer, delta: dict[str, Any], **more: Any) -> None:
    choice = {"index": 0, "delta": delta, "finish_reason": None} | more
    answer.piece(b"data: %s\n\n" % json.dumps({"choices": [choice]}).encode())


def _record_end(answer: TracedAnswer, completion: Completion) -> None:
    calls = enumerate(completion.message.get("tool_calls") or ())
    delta = {"tool_calls": [{"index": index} | call for index, call in calls]}
    _record(answer, delta, finish_reason=completion.finish_reason or completion.finish)
    usage = {
        "prompt_tokens": completion.usage.input,
        "completion_tokens": completion.usage.output,
        "prompt_tokens_details": {"cached_tokens": completion.usage.cached},
    }
    answer.piece(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps({"usage": usage}).encode())
