"""One task: a run whose answer goes to stdout, and its exit code.

In text mode stdout carries the answer and nothing else; progress, questions and errors go to
stderr. A terminal gets what the sanitiser leaves of the answer (sanitize.py); a pipe or a file gets
the answer as it is, since a program reads it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, get_args

from coder import __version__
from coder.cli import process
from coder.cli.screen import Screen
from coder.cli.wording import FULL, LIMITS, error_text, has_cut_answer, is_full, why_stopped
from coder.events import Event, MessageEnd, RunEnd, RunStart
from coder.history import text_of
from coder.permissions.sanitize import strip_controls
from coder.providers.text import is_loopback
from coder.session import Session
from coder.settings import data_folder, program
from coder.types import Message, ModelError, RunResult, Transient

if TYPE_CHECKING:
    from coder.cli.questions import Prompter
    from coder.cli.render import Renderer

EXIT_CODES = {
    "stop": 0,
    "error": 1,
    "content_filter": 1,
    "aborted": process.INTERRUPTED,
}  # others: process.LIMIT
Show = Callable[[Event], None]


def one_shot(session: Session, arguments: argparse.Namespace, prompt: str) -> int:
    """Run one task; returns the exit code. Raises ConfigError."""
    report_start(session, arguments.quiet)
    process.collect_garbage()
    interrupts = process.Interrupts()
    screen = screen_of_progress()
    session_id = session.id if session.is_kept else None
    progress = make_progress(session, arguments, screen, interrupts)
    show = progress
    if arguments.output_format != "text":
        show = Printer(session, session_id, arguments.output_format, progress)
    try:
        images = [image for _, image in arguments.image]
        run = session.prompt(session.parts.fill(prompt), images)
        result = interrupts.show_all(run, session.agent.token, show)
        if arguments.quiet:  # otherwise `progress` has done it
            advise(session, result.error)
        code = finish(arguments, result)
        if session_id and not arguments.quiet:
            show_way_on(screen, result, session_id)
        session.settle()  # again: a signal may have broken it off
        # A conversation that could not be written is a failure, whatever the answer
        was_lost = session_id is not None and not session.is_kept
        return code or int(was_lost)
    finally:
        screen.status()
        screen.finish_line()
        session.notices.clear()  # shown, or of no use any more; `close` may add some
        session.close()
        for text in session.notices:
            sys.stderr.write(f"{strip_controls(text)}\n")


def report_start(session: Session, is_quiet: bool) -> None:
    """Say where the task goes to, and which skills are not used."""
    url = session.settings.base_url
    if url and not is_quiet and not is_loopback(url):
        model = f"{session.model.name} at {session.settings.host}"
        sys.stderr.write(strip_controls(f"{model}\n"))
    files = session.parts.prompt_files
    skills = files.unanswered() if files else []
    if skills:
        names = ", ".join(skill.name for skill in skills)
        notice = "Skills of this project that a session has to ask about first"
        session.notices.append(f"{notice}: {names}.")


# ---- what is shown -------------------------------------------------------------------------------


def screen_of_progress() -> Screen:
    """The screen on stderr. If stdout is a terminal as well, one screen on stdout has both the
    progress and the answer."""
    one_terminal = sys.stdout.isatty() and sys.stderr.isatty()
    return Screen(sys.stdout if one_terminal else sys.stderr)


def make_progress(
    session: Session,
    arguments: argparse.Namespace,
    screen: Screen,
    interrupts: process.Interrupts,
) -> Show:
    """What shows progress, and asks the questions of the run."""
    if arguments.quiet or arguments.output_format == "stream-json":
        return show_nothing
    from coder.cli.render import Renderer  # late: with -q there is nothing to show

    # The answer is shown as it comes only on a terminal
    answer_screen = None
    if arguments.output_format == "text" and sys.stdout.isatty():
        answer_screen = screen if screen.stream is sys.stdout else Screen(sys.stdout)
        answer_screen.markdown = session.settings.markdown
    render = Renderer(
        screen,
        answer_screen,
        verbose=arguments.verbose,
        limits=(session.model.first_byte_timeout, session.model.idle_timeout),
    )
    ask: Show = show_nothing
    if arguments.can_ask:
        prompter = make_prompter(render, interrupts)
        ask = prompter
        if arguments.step:
            prompter.step(session)
    return Progress(session, screen, render, ask, interrupts)


def advise(session: Session, error: ModelError | None) -> None:
    """If the server does not have the model, let the error name those that it has."""
    if error and error.kind == "not_found":
        from coder.cli.models import advise as name_models  # late: once

        name_models(error, session.model, session.agent.token)


def show_nothing(event: Event) -> None:
    """With -q, or for a program."""


def make_prompter(render: Renderer, interrupts: process.Interrupts) -> Prompter:
    """What answers the questions of a run, from the terminal."""
    from coder.cli.input import Keyboard
    from coder.cli.questions import Prompter

    keyboard = Keyboard(data_folder() / "history")
    keyboard.stop_run = interrupts.escape
    return Prompter(render, keyboard)


class Progress:
    """Shows what happens, on a terminal with the answer while it comes, and asks."""

    def __init__(
        self,
        session: Session,
        screen: Screen,
        render: Renderer,
        ask: Show,
        interrupts: process.Interrupts,
    ) -> None:
        self.session = session
        self.screen = screen
        self.render = render
        self.ask = ask
        self.interrupts = interrupts

    def __call__(self, event: Event) -> None:
        if isinstance(event, MessageEnd) and self.render.answer_screen is None:
            self._show_remark(event.message)
        if isinstance(event, RunEnd):
            advise(self.session, event.error)  # first: it completes the error that is shown
        if isinstance(event, RunEnd) and self.interrupts.ended:
            self.screen.line("stopped by a signal", "dim")
        else:
            self.render(event)
        self.ask(event)  # after it: the question is asked below what is shown

    def _show_remark(self, message: Message) -> None:
        """Show what the model says on the way to its answer."""
        if message.get("tool_calls") and message["content"]:
            self.screen.line(message["content"])


class Printer:
    """Prints a run for a program: each event as a line, or one object at the end."""

    def __init__(
        self,
        session: Session,
        session_id: str | None,
        form: str,
        progress: Show,
    ) -> None:
        self.session = session
        self.session_id = session_id
        self.is_stream = form == "stream-json"
        self.progress = progress

    def __call__(self, event: Event) -> None:
        self.progress(event)
        if not self.is_stream and not isinstance(event, RunEnd):
            return

        # The event, with what a program wants to know at the start and at the end
        fields = event.to_dict()
        if isinstance(event, RunStart):
            fields |= self._facts()
        if isinstance(event, RunEnd):
            if event.stop_reason == "aborted":
                fields["text"] = answer_so_far(self.session.messages) or event.text
            if event.stop_reason == "stop" and is_without_answer(self.session.messages):
                fields["text"] = ""  # the event's text is no answer of the model
            if not self.is_stream:
                del fields["type"]
                fields["session_id"] = self.session_id
                fields["messages"] = self.session.messages

        # On a terminal in ASCII: no character in it can control the terminal then
        print_line(json.dumps(fields, ensure_ascii=sys.stdout.isatty(), default=repr))

    def _facts(self) -> dict[str, str | None]:
        """What a program wants to know at the start."""
        return {
            "session_id": self.session_id,
            "model": self.session.model.name,
            "cwd": str(self.session.cwd),
            "version": __version__,
        }


# ---- the end -------------------------------------------------------------------------------------


def finish(arguments: argparse.Namespace, result: RunResult) -> int:
    """Print the answer if it was not shown, and with -q why there is none; returns the exit
    code.
    """
    if result.stop_reason == "stop" and is_without_answer(result.messages):
        # Without result.text, which is no answer of the model
        sys.stderr.write("The model answered nothing.\n")
        return process.LIMIT
    if arguments.output_format == "text" and result.stop_reason != "aborted":
        print_answer(result, arguments.quiet)
    return exit_code_of(result)


def exit_code_of(result: RunResult) -> int:
    kind = result.error.kind if result.error else ""
    if kind in get_args(Transient):
        return process.TRANSIENT
    if kind == "no_call":
        return process.LIMIT
    return EXIT_CODES.get(result.stop_reason, process.LIMIT)


def print_answer(result: RunResult, is_quiet: bool) -> None:
    """Print the answer, if no terminal has shown it; with -q also why a run did not end well."""
    ended_well = result.stop_reason == "stop"
    to_terminal = sys.stdout.isatty()
    # If the run did not end well, its text may be a sentence of this program, not of the model
    answer = result.text if ended_well else answer_so_far(result.messages)
    is_shown = to_terminal and not is_quiet  # then the Renderer has (make_progress)
    if answer and not is_shown:
        print_line(strip_controls(answer) if to_terminal else answer)
    if is_quiet and not ended_well:
        why = reason_of(result, answer)
        sys.stderr.write(f"{why}\n")


def reason_of(result: RunResult, answer: str) -> str:
    """Why a run did not end well."""
    if result.error and not has_cut_answer(result):
        return error_text(result.text, result.error)
    return why_stopped(result) if answer else result.text


def answer_so_far(messages: Sequence[Message]) -> str:
    """The newest text of the model's in the run that has ended; "" for none."""
    for message in reversed(messages):
        if message["role"] == "user":
            break
        text = text_of(message) if message["role"] == "assistant" else ""
        if text:
            return text
    return ""


def show_way_on(screen: Screen, result: RunResult, session_id: str) -> None:
    """Show how a run that a limit has stopped can go on."""
    if result.stop_reason in LIMITS:
        screen.line(f"To go on: {program()} -r {session_id} continue", "dim")
    elif is_full(result):
        screen.line(f"To go on: {program()} -r {session_id}; in the session {FULL}", "dim")


def is_without_answer(messages: Sequence[Message]) -> bool:
    """Did the model answer nothing at all, so that the newest message is still the prompt?"""
    return bool(messages) and messages[-1]["role"] == "user"


def print_line(text: str) -> None:
    """Print on stdout.

    Raises BrokenPipeError if it cannot be written; stderr has the reason (process.py).
    """
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
