"""A trace as its requests, each with what is new in it: what `coder trace FILE --diff` shows."""

from __future__ import annotations

from collections.abc import Iterator

from coder.devtools.request_changes import RequestChanges, answer_lines
from coder.devtools.trace_report import Exchange, Part, Recording, one_line
from coder.permissions.sanitize import strip_controls
from coder.types import Usage


def diff(recording: Recording) -> str:
    """The requests and answers of each run. Those of sub-agents are a line each."""
    changes = RequestChanges()
    lines = []
    for number, run in enumerate(recording.runs, 1):
        if run.exchanges and not run.exchanges[0].previous:  # of another process
            changes = RequestChanges()
        lines.append(f"run {number} of {len(recording.runs)} · {run.model}")
        for step in run.steps:
            lines += _step_lines(step, changes)
        lines += [one_line(": ".join(run.end))[:300], ""]
    return "".join(f"{strip_controls(line)}\n" for line in lines or ["There is no run in it."])


def _step_lines(step: Part, changes: RequestChanges) -> Iterator[str]:
    for exchange in step.exchanges:
        if exchange.nested:
            yield f"  == Request of a sub-agent: {len(exchange.messages)} messages"
        else:
            yield from _request_lines(exchange, changes)
    for end in step.of("step_end"):
        if end["message"]:  # none after an error
            yield from answer_lines(end["message"], end["finish_reason"], Usage(**end["usage"]))


def _request_lines(exchange: Exchange, changes: RequestChanges) -> Iterator[str]:
    body = exchange.request["body"]
    messages = exchange.messages
    system = ""
    if messages and messages[0]["role"] == "system":
        system = str(messages.pop(0)["content"])
    tools = len(body.get("tools") or ())
    yield from changes.lines(messages, system, tools)
    changes.keep(messages, system, tools)
    for end in exchange.of("response_end"):
        if end["error"]:
            yield one_line(f"-- Error: {end['error']['kind']}: {end['error']['message']}")[:300]
