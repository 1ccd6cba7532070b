"""One task: a run whose answer goes to stdout, and its exit code.

In text mode stdout carries the answer and nothing else; progress, questions and errors go to stderr. A terminal gets
what the sanitiser leaves of the answer (sanitize.py); a pipe or a file gets the answer as it is, since a program reads it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from coder import __version__
from coder.cli.app import App, build_app
from coder.cli.config import data_folder
from coder.cli.flags import EXIT_CODES, TRANSIENT
from coder.cli.input import Keyboard
from coder.cli.optional import needed, optional
from coder.cli.questions import Prompter
from coder.cli.render import Renderer
from coder.cli.screen import Screen
from coder.cli.settings import Settings
from coder.cli.signals import ENDING
from coder.cli.wording import STOPPED, error_text
from coder.events import Event, MessageEnd, RunEnd, RunStart
from coder.history import text_of
from coder.permissions.sanitize import strip_controls
from coder.types import Message, RunResult, Usage

if TYPE_CHECKING:
    from coder.cli.conversation import Conversation

TRANSIENT_KINDS = {"rate_limit", "server", "network", "incomplete", "empty"}
Show = Callable[[Any], None]


def one_shot(settings: Settings, arguments: argparse.Namespace, prompt: str) -> int:
    """Run one task; returns the exit code. Raises ConfigError."""
    app = build_app(settings, arguments, can_ask=arguments.can_ask)
    conversation, texts = _conversation(app, arguments), list[str]()
    app.agent.subscribe(lambda event: texts.extend(_answer_text(event)))
    try:
        session_id = conversation.session_id if conversation else ""
        with _show_events(app, arguments, session_id or None) as show:
            result = app.follow(app.stream(prompt), show)
        code = _finish(arguments, result, texts[-1] if texts else "")
        if conversation:
            conversation.settle()
        return code or int(bool(conversation and conversation.problem))
    finally:
        if conversation:
            conversation.close()
        for text in app.left_behind():
            sys.stderr.write(f"{strip_controls(text)}\n")


def _conversation(app: App, arguments: argparse.Namespace) -> Conversation | None:
    """The record of the conversation. Raises ConfigError where a flag wants one and the module was deleted."""
    wanted = "-r" if arguments.resume else "-c" if arguments.continue_ else ""
    name = "coder.cli.conversation"
    module = needed(name, wanted) if wanted else optional(name)
    found: Conversation | None = module and module.open_conversation(app, arguments, one_task=True)
    return found


def _answer_text(event: Event) -> list[str]:
    """What the model wrote, if this event ends one of its messages."""
    if isinstance(event, MessageEnd) and event.message["role"] == "assistant":
        return [text] if (text := text_of(event.message)) else []
    return []


def _finish(arguments: argparse.Namespace, result: RunResult, newest: str) -> int:
    """Print the answer for whoever reads stdout, and with -q why there is none; returns the exit code."""
    if arguments.output_format == "text" and result.stop_reason != "aborted":
        # The text of a run that did not end well may be ours
        answer = result.text if result.stop_reason == "stop" else newest
        if answer and not sys.stdout.isatty():
            _print(answer)
        why = STOPPED[result.stop_reason] if answer else result.text
        if result.error:
            why = error_text(result.text, result.error)
        if arguments.quiet and result.stop_reason != "stop":  # without progress, not without errors
            sys.stderr.write(f"{why}\n")
    if result.error and result.error.kind in TRANSIENT_KINDS:
        return TRANSIENT
    return EXIT_CODES[result.stop_reason]


def print_refusal(message: str, output_format: str) -> None:
    """Print the only line of a run that could not begin."""
    end = RunEnd("error", f"Error: {message}", Usage(), 0).to_dict()
    end["error"] = {"kind": "usage", "message": message, "status": None, "request_id": None}
    _print(_json(_whole(end, None, []) if output_format == "json" else end))


def _whole(
    end: dict[str, Any], session_id: str | None, messages: Sequence[Message]
) -> dict[str, Any]:
    """The object that is a whole run, of its last event."""
    fields = {name: value for name, value in end.items() if name != "type"}
    return fields | {"session_id": session_id, "messages": messages}


@contextlib.contextmanager
def _show_events(app: App, arguments: argparse.Namespace, session_id: str | None) -> Iterator[Show]:
    """Show the events of the run, with what this yields."""
    if arguments.output_format == "stream-json":
        facts = {"session_id": session_id, "model": app.model.name}
        facts |= {"cwd": str(app.cwd), "version": __version__}

        def print_event(event: Event) -> None:
            _print(_json(event.to_dict() | (facts if isinstance(event, RunStart) else {})))

        yield print_event
        return
    with contextlib.ExitStack() as stack:
        quiet = stack.enter_context(open(os.devnull, "w")) if arguments.quiet else None
        one_terminal = sys.stdout.isatty() and sys.stderr.isatty() and not quiet
        screen = Screen(sys.stdout if one_terminal else quiet or sys.stderr)
        try:
            yield _progress(app, arguments, session_id, screen)
        except SystemExit as end:
            for number in ENDING:
                if end.code == 128 + number:
                    screen.line(f"stopped by {number.name}", "dim")
            raise
        finally:
            screen.status()
            screen.finish_line()


def _progress(
    app: App, arguments: argparse.Namespace, session_id: str | None, screen: Screen
) -> Show:
    """Show progress on `screen`: also what the model says before it is done; only the last of it is the answer."""
    to_terminal = arguments.output_format == "text" and sys.stdout.isatty()
    answers = screen if screen.stream is sys.stdout else Screen(sys.stdout)
    shown = answers if to_terminal else None
    render = Renderer(screen, shown, verbose=arguments.verbose, limits=app.stalls)
    keyboard = Keyboard(data_folder() / "history")
    ask = Prompter(render, keyboard) if arguments.can_ask else None

    def show(event: Event) -> None:
        message = event.message if isinstance(event, MessageEnd) and not to_terminal else {}
        if message.get("tool_calls") and message["content"]:
            screen.line(message["content"])
        if not (isinstance(event, RunEnd) and app.interrupts.ended):
            render(event)
        if ask:
            ask(event)
        if arguments.output_format == "json" and isinstance(event, RunEnd):
            _print(_json(_whole(event.to_dict(), session_id, app.agent.messages)))

    return show


def _json(value: Any) -> str:
    """In a line; on a terminal with nothing in it but printable ASCII."""
    text = json.dumps(value, ensure_ascii=sys.stdout.isatty(), default=repr)
    return text.replace("\x7f", "\\u007f") if sys.stdout.isatty() else text


def _print(text: str) -> None:
    """Print a line on stdout. Raises BrokenPipeError where it cannot be written; stderr has the reason (process.py)."""
    sys.stdout.write(text.encode("utf-8", "replace").decode() + "\n")
    sys.stdout.flush()
