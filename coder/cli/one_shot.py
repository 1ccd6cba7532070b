"""One task: a run whose answer goes to stdout, and its exit code.

In text mode stdout carries the answer and nothing else; progress, questions and errors go to stderr. A terminal gets
what the sanitiser leaves of the answer (sanitize.py); a pipe or a file gets the answer as it is, since a program reads it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, get_args

from coder import __version__
from coder.cli import process
from coder.cli.app import App, Show
from coder.cli.screen import Screen
from coder.cli.settings import ConfigError, Settings, data_folder, program
from coder.cli.wording import FULL, LIMITS, error_text, has_cut_answer, is_full, why_stopped
from coder.events import Event, MessageEnd, RunEnd, RunStart
from coder.history import text_of
from coder.permissions.sanitize import strip_controls
from coder.providers.text import is_loopback
from coder.types import Message, RunResult, Transient

EXIT_CODES = {
    "stop": 0,
    "error": 1,
    "content_filter": 1,
    "aborted": process.INTERRUPTED,
}  # others: process.LIMIT


def one_shot(settings: Settings, arguments: argparse.Namespace, prompt: str) -> int:
    """Run one task; returns the exit code. Raises ConfigError."""
    process.raise_on_sigint()
    app = App(settings, arguments)
    if settings.base_url and not (arguments.quiet or is_loopback(settings.base_url)):
        sys.stderr.write(strip_controls(f"{app.model.name} at {settings.host}\n"))
    if skills := app.prompt_files and app.prompt_files.unanswered():
        names = ", ".join(each.name for each in skills)
        notice = "Skills of this project that a session has to ask about first"
        app.notices.append(f"{notice}: {names}.")
    name, wanted = "coder.cli.conversation", arguments.resume or arguments.continue_
    module = process.needed(name, "-c and -r") if wanted else process.optional(name)
    conversation = module and module.open_conversation(app, one_task=True)
    process.collect_garbage()
    session_id = (conversation and conversation.session_id) or None
    one_terminal = sys.stdout.isatty() and sys.stderr.isatty()
    screen = Screen(sys.stdout if one_terminal else sys.stderr)
    try:
        show = show_events(app, screen, session_id)
        result = app.follow(app.stream(fill(app, prompt)), show)
        code = finish(arguments, result)
        if session_id and not arguments.quiet:
            show_way_on(screen, result, session_id)
        if conversation:
            conversation.settle()
        return code or int(bool(conversation and conversation.recorder.problem))
    finally:
        screen.status()
        screen.finish_line()
        if conversation:
            conversation.close()
        for text in app.left_behind():
            sys.stderr.write(f"{strip_controls(text)}\n")


def fill(app: App, prompt: str) -> str:
    """A prompt that is /review or a command of a file, such as "/review HEAD", as its text. Raises ConfigError."""
    line, _, more = prompt.partition("\n")  # such as stdin
    name, *words = line.split(maxsplit=1) if line.startswith("/") else [""]
    file = app.prompt_files and app.prompt_files.commands.get(name[1:])
    if file and file.answer != "yes":
        raise ConfigError(f"{name} is this project's: a session has to ask about it first")
    if file:
        return f"{file.filled(''.join(words))}\n{more}".strip()
    if name == "/review":
        review = process.needed("coder.agent.instructions", "/review").review
        return f"{review(''.join(words))}\n{more}".strip()
    return prompt


def show_events(app: App, screen: Screen, session_id: str | None) -> Show:
    """What shows an event, as the flags want it."""
    start: dict[str, Any] = {"session_id": session_id, "model": app.model.name}
    start |= {"cwd": str(app.cwd), "version": __version__}
    form = app.arguments.output_format
    quiet = app.arguments.quiet or form == "stream-json"
    progress = (lambda event: None) if quiet else show_progress(app, screen)

    def show(event: Event) -> None:
        progress(event)
        if form == "stream-json":
            fields = event.to_dict() | (start if isinstance(event, RunStart) else {})
        elif isinstance(event, RunEnd):
            fields = {name: value for name, value in event.to_dict().items() if name != "type"}
            fields |= {"session_id": session_id, "messages": app.agent.messages}
        else:
            return
        if isinstance(event, RunEnd) and event.stop_reason == "aborted":
            fields["text"] = answer_so_far(app.agent.messages) or event.text
        # On a terminal with nothing in it that drives one
        print_line(json.dumps(fields, ensure_ascii=sys.stdout.isatty(), default=repr))

    return progress if form == "text" else show


def show_progress(app: App, screen: Screen) -> Show:
    """What shows progress on stderr, and on a terminal the answer while it comes."""
    from coder.cli.render import Renderer  # late: with -q there is nothing to show

    arguments = app.arguments
    to_terminal = arguments.output_format == "text" and sys.stdout.isatty()
    stdout = screen if screen.stream is sys.stdout else Screen(sys.stdout)
    stdout.markdown = app.settings.markdown
    answers = stdout if to_terminal else None
    render = Renderer(screen, answers, verbose=arguments.verbose, limits=app.stalls)
    ask = None
    if arguments.can_ask:
        from coder.cli.input import Keyboard
        from coder.cli.questions import Prompter

        keyboard = Keyboard(data_folder() / "history")
        keyboard.stop_run = app.interrupts.escape
        ask = Prompter(render, keyboard)

    def show(event: Event) -> None:
        message = event.message if isinstance(event, MessageEnd) and not to_terminal else {}
        if message.get("tool_calls") and message["content"]:  # written on the way to the answer
            screen.line(message["content"])
        if isinstance(event, RunEnd) and app.interrupts.ended:
            screen.line("stopped by a signal", "dim")
        else:
            render(event)
        if ask:
            ask(event)

    return show


def finish(arguments: argparse.Namespace, result: RunResult) -> int:
    """Print the answer where it was not shown, and with -q why there is none; returns the exit code."""
    ended_well, to_terminal = result.stop_reason == "stop", sys.stdout.isatty()
    if arguments.output_format == "text" and result.stop_reason != "aborted":
        # The text of a run that did not end well may be the program's
        answer = result.text if ended_well else answer_so_far(result.messages)
        if answer and (arguments.quiet or not to_terminal):
            print_line(strip_controls(answer) if to_terminal else answer)
        if arguments.quiet and not ended_well:  # without progress, not without errors
            why = why_stopped(result) if answer else result.text
            if result.error and not has_cut_answer(result):
                why = error_text(result.text, result.error)
            sys.stderr.write(f"{why}\n")
    if result.error and result.error.kind in get_args(Transient):
        return process.TRANSIENT
    if result.error and result.error.kind == "no_call":
        return process.LIMIT
    if ended_well and is_without_answer(result):
        sys.stderr.write("The model answered nothing.\n")
        return process.LIMIT
    return EXIT_CODES.get(result.stop_reason, process.LIMIT)


def answer_so_far(messages: Sequence[Message]) -> str:
    """The newest text of the model's in the run that has ended; "" for none."""
    run = takewhile(lambda each: each["role"] != "user", reversed(messages))
    texts = (text_of(each) for each in run if each["role"] == "assistant")
    return next(filter(None, texts), "")


def show_way_on(screen: Screen, result: RunResult, session_id: str) -> None:
    """Show how a run that a limit has stopped can go on."""
    if result.stop_reason in LIMITS:
        screen.line(f"To go on: {program()} -r {session_id} continue", "dim")
    elif is_full(result):
        screen.line(f"To go on: {program()} -r {session_id}; in the session {FULL}", "dim")


def is_without_answer(result: RunResult) -> bool:
    """Did the model answer nothing at all, so that the newest message is still the prompt?"""
    return bool(result.messages) and result.messages[-1]["role"] == "user"


def print_line(text: str) -> None:
    """Print on stdout. Raises BrokenPipeError where it cannot be written; stderr has the reason (process.py)."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
