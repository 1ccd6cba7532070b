"""One task: a run whose answer goes to stdout, and what the shell gets for it.

In text mode stdout carries the answer and nothing else; progress, questions and errors go to stderr. A terminal gets what the
sanitiser leaves of the answer (text.py); a pipe or a file gets the answer as it is, since a program reads it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from coder import __version__
from coder.cli.app import App
from coder.cli.config import data_folder
from coder.cli.flags import EXIT_CODES, TRANSIENT
from coder.cli.input import Keyboard
from coder.cli.questions import Prompter
from coder.cli.render import Renderer
from coder.cli.screen import Screen
from coder.cli.signals import ENDING
from coder.cli.wording import STOPPED, error_text
from coder.events import Event, MessageEnd, RunEnd, RunStart
from coder.history import text_of
from coder.types import Message, Usage

# Errors that may be gone later
PASSING = {
    "rate_limit",
    "server",
    "network",
    "incomplete",
    "empty",
}


def one_shot(app: App, prompt: str, arguments: argparse.Namespace, session_id: str) -> int:
    """Run it; returns the exit code. `session_id` is "" where the conversation is not kept."""
    said = ""  # by the model, last: the text of a result may be ours

    def show(event: Event) -> None:
        nonlocal said
        if isinstance(event, MessageEnd) and event.message["role"] == "assistant":
            said = text_of(event.message) or said
        shown(event)

    app.interrupts.tells_end = arguments.output_format != "text"
    with _shown(app, arguments, session_id or None) as shown:
        result = app.run(prompt, show)
    if arguments.output_format == "text" and result.stop_reason != "aborted":
        answer = result.text if result.stop_reason == "stop" else said
        if answer and not sys.stdout.isatty():
            _print(answer)
        why = STOPPED[result.stop_reason] if answer else result.text
        if result.error:
            why = error_text(result.text, result.error)
        if arguments.quiet and result.stop_reason != "stop":  # without progress, not without errors
            sys.stderr.write(f"{why}\n")
    if result.error and result.error.kind in PASSING:
        return TRANSIENT
    return EXIT_CODES[result.stop_reason]


def refused(message: str, output_format: str) -> None:
    """The last line, which is the only one, of what could not begin."""
    end = RunEnd("error", f"Error: {message}", Usage(), 0).to_dict()
    end["error"] = {"kind": "usage", "message": message, "status": None, "request_id": None}
    _print(_json(_whole(end, None, []) if output_format == "json" else end))


def _whole(
    end: dict[str, Any], session_id: str | None, messages: Sequence[Message]
) -> dict[str, Any]:
    """The object that is a whole run, of its last event."""
    return {name: value for name, value in end.items() if name != "type"} | {
        "session_id": session_id,
        "messages": messages,
    }


@contextlib.contextmanager
def _shown(
    app: App, arguments: argparse.Namespace, session_id: str | None
) -> Iterator[Callable[[Any], None]]:
    """What is done with the events of a one-shot run."""
    if arguments.output_format == "stream-json":
        about = {
            "session_id": session_id,
            "model": app.model.name,
            "cwd": str(app.cwd),
            "version": __version__,
        }
        yield lambda event: _print(
            _json(event.to_dict() | (about if isinstance(event, RunStart) else {}))
        )
        return
    to_terminal = arguments.output_format == "text" and sys.stdout.isatty()
    null = open(os.devnull, "w") if arguments.quiet else None  # noqa: SIM115 (closed below)
    screen = Screen(null or sys.stderr, sys.stdout)
    render = Renderer(screen, show_text=to_terminal, verbose=arguments.verbose, limits=app.stalls)
    asker = (
        Prompter(screen, render.subagents, Keyboard(data_folder() / "history"))
        if arguments.can_ask
        else None
    )

    def show(event: Event) -> None:
        """What the model says before it is done is progress; only the last of it is the answer."""
        if (
            not to_terminal
            and isinstance(event, MessageEnd)
            and event.message.get("tool_calls")
            and event.message["content"]
        ):
            screen.line(event.message["content"])
        if not (isinstance(event, RunEnd) and app.interrupts.ended):
            render(event)
        if asker:
            asker(event)
        if arguments.output_format == "json" and isinstance(event, RunEnd):
            _print(_json(_whole(event.to_dict(), session_id, app.agent.messages)))

    try:
        yield show
    except SystemExit as end:
        for number in ENDING:
            if end.code == 128 + number:
                screen.line(f"stopped by {number.name}", "dim")
        raise
    finally:
        screen.status("")
        screen.finish_line()
        if null:
            null.close()


def _json(value: Any) -> str:
    """In a line; on a terminal with nothing in it but printable ASCII."""
    text = json.dumps(value, ensure_ascii=sys.stdout.isatty(), default=repr)
    return text.replace("\x7f", "\\u007f") if sys.stdout.isatty() else text


def _print(text: str) -> None:
    """A line on stdout. Raises BrokenPipeError where it cannot be written, which is said by then (main.py)."""
    sys.stdout.write(text.encode("utf-8", "replace").decode() + "\n")
    sys.stdout.flush()
