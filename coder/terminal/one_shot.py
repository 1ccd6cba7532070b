"""One task: a run whose answer goes to stdout, and what the shell gets for it.

In text mode stdout carries the answer and nothing else; progress, questions and errors go to stderr. A terminal gets what the
sanitiser leaves of the answer (text.py); a pipe or a file gets the answer as it is, since a program reads it.

What it leaves out: where the task comes from (cli.py).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from coder.terminal.asking import Asker
from coder.terminal.config import data_folder
from coder.terminal.flags import EXIT_CODES, TRANSIENT
from coder.terminal.keyboard import Keyboard
from coder.terminal.render import Renderer, error_text
from coder.terminal.screen import Screen
from coder.terminal.session import Session
from coder.text import clean
from coder.types import Event, MessageEnd

PASSING = {"rate_limit", "server", "network", "incomplete", "empty"}  # errors that may be gone later


def one_shot(session: Session, prompt: str, arguments: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    with _shown(arguments, session.stalls) as show:
        result = session.run(prompt, show)
    if arguments.output_format == "json":
        end = {"stop_reason": result.stop_reason, "text": result.text, "usage": dataclasses.asdict(result.usage), "steps": result.steps,
               "error": result.error and result.error.to_dict(), "session_id": session.tools.session_id, "messages": result.messages}
        _print(_json(end))
    elif arguments.output_format == "text" and not sys.stdout.isatty() and result.stop_reason not in ("error", "aborted"):
        _print(result.text)
    if result.error and arguments.quiet and arguments.output_format == "text":
        sys.stderr.write(error_text(result.text, result.error) + "\n")  # quiet is without progress, not without errors
    if result.error and result.error.kind in PASSING:
        return TRANSIENT
    return EXIT_CODES[result.stop_reason]


@contextlib.contextmanager
def _shown(arguments: argparse.Namespace, limits: tuple[float, float]) -> Iterator[Callable[[Any], None]]:
    """What is done with the events of a one-shot run. `limits`: seconds to the first byte and between two."""
    if arguments.output_format == "stream-json":
        yield lambda event: _print(_json(event.to_dict()))
        return
    to_terminal = arguments.output_format == "text" and sys.stdout.isatty()
    null = open(os.devnull, "w") if arguments.quiet else None  # noqa: SIM115 (closed below)
    screen = Screen(null or sys.stderr, sys.stdout)
    render = Renderer(screen, show_text=to_terminal, verbose=arguments.verbose, limits=limits)
    asker = Asker(screen, render, Keyboard(data_folder() / "history", waiting=lambda: None)) if arguments.can_ask else None

    def show(event: Event) -> None:
        """What the model says before it is done is progress; only the last of it is the answer."""
        if not to_terminal and isinstance(event, MessageEnd) and event.message.get("tool_calls") and event.message["content"]:
            screen.line(clean(event.message["content"]))
        render(event)
        if asker:
            asker(event)

    try:
        yield show
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
    """A line on stdout. Raises BrokenPipeError, having said why where it is not the reader who left."""
    try:
        sys.stdout.write(text.encode("utf-8", "replace").decode() + "\n")
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            sys.stderr.write(f"coder: the output cannot be written: {error.strerror}\n")
        raise BrokenPipeError from None
