"""The session at the prompt: entries in, runs out; and what is typed while the agent works."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
from typing import Any

from coder.abort import Abort
from coder.cli.commands import Commands
from coder.cli.input import BACK, MODE, Keyboard, Leave, mode
from coder.cli.keys import tty_flags
from coder.cli.one_shot import advise
from coder.cli.process import Interrupts, collect_garbage, handling
from coder.cli.questions import Prompter
from coder.cli.render import Renderer
from coder.cli.screen import Screen
from coder.cli.typeahead import COMMAND, TypeAhead
from coder.cli.wording import LIMITS, words_of
from coder.events import Event, Events, MessageStart, RunEnd
from coder.history import text_of, user
from coder.permissions.sanitize import strip_controls
from coder.session import Session
from coder.settings import optional, program
from coder.tools.bash import read_output, shell
from coder.tools.output import Output
from coder.tools.processes import MARK, USERS
from coder.tools.secrets import is_secret
from coder.toolset import ToolContext
from coder.types import T, ToolError

NOTIFY_AFTER = 10.0  # seconds of a run
MAX_SHOWN = 4_000  # characters of a message in a conversation that goes on
GO_ON = "Carry out this plan."


class Repl:
    """Do what the entries of one session ask for.

    An entry with `!` is a command of the user's own, run unasked.
    """

    def __init__(
        self,
        session: Session,
        arguments: argparse.Namespace,
        screen: Screen,
        keyboard: Keyboard,
    ) -> None:
        assert session.conversation  # whose module Commands needs, too
        self.session = session
        self.conversation = session.conversation
        self.arguments = arguments
        self.interrupts = Interrupts()
        self.interrupts.at_prompt = True
        collect_garbage()
        self.screen = screen
        self.keyboard = keyboard
        screen.markdown = session.settings.markdown
        self.render = Renderer(
            screen,
            screen,
            verbose=arguments.verbose,
            limits=(session.model.first_byte_timeout, session.model.idle_timeout),
            context_used=lambda: session.context_used,
            notify_after=NOTIFY_AFTER if session.settings.bell else math.inf,
        )
        self.prompter = Prompter(self.render, keyboard)
        self.typeahead = TypeAhead(screen, session.agent.steering, session.agent.follow_ups)
        self.typeahead.redact = keyboard.redact = session.parts.redact
        self.typeahead.stop = keyboard.stop_run = self.interrupts.escape
        keyboard.paused = self.typeahead.paused
        # What is not the default of who works and what is allowed
        keyboard.label = lambda: mode(session.spec.name, session.permissions.yolo)
        self.commands = Commands(self)
        if arguments.step:
            self.prompter.step(session)
        self.images = [image for _, image in arguments.image]  # of the first prompt
        self.has_begun = False
        self.going_on = ""  # what an empty entry means

    def begin(self, first: str) -> None:
        """Show once what is above the first entry, which the command line may have given."""
        if self.has_begun:
            return
        self.has_begun = True
        arguments = self.arguments
        if arguments.resume == "":
            self.commands.run("resume", "")
        elif arguments.is_resumed:
            self.replay()
        self.show_notices()
        if arguments.is_resumed:
            self.screen.line()
        if first:
            self.screen.entry(first)

    def close(self) -> None:
        """Close the session, and say how to continue the conversation."""
        self.session.close()
        self.show_notices()  # what commands have reported
        if self.session.is_kept and self.session.messages:
            self.screen.line(f"Continue this conversation: {program()} -r {self.session.id}", "dim")

    def show_notices(self) -> None:
        notices = self.session.notices
        while notices:
            self.screen.line(notices.pop(0), "yellow")

    def replay(self) -> None:
        """Show the last question and the last answer of the conversation that goes on."""
        self.show_notices()
        question = words_of(self.newest_text("user"))
        answer = self.newest_text("assistant")
        if question:
            self.screen.entry(question[-MAX_SHOWN:])
            self.screen.finish_line()
        self.screen.gap()
        if answer:
            self.screen.write(answer[-MAX_SHOWN:])
            self.screen.finish_line()

    def newest_text(self, role: str) -> str:
        """The newest text of a role, "" if there is none."""
        for message in reversed(self.session.messages):
            text = text_of(message).strip()
            if message["role"] == role and text:
                return text
        return ""

    # -- entries

    def take(self, text: str) -> None:
        """Do what an entry asks for, and then what was entered meanwhile. Raises Leave."""
        entries = [text]
        interrupts = self.interrupts
        try:
            while entries:
                interrupts.presses = 0
                interrupts.escaped = False
                entry = entries.pop(0) or self.going_on
                if entry not in (MODE, BACK):
                    self.going_on = ""
                entries += self._do(entry)
                if entry not in ("", MODE):
                    self.screen.line()
                if interrupts.presses:
                    self.keyboard.run_stopped()
                if interrupts.presses or interrupts.escaped:
                    return  # the entries after it are stopped, too
                if entries:
                    self.screen.entry(entries[0])
        finally:
            self.keyboard.early[:0] = entries

    def _do(self, text: str) -> list[str]:
        """Do one entry; returns those that came of it."""
        if not text:
            return []
        if "\n" in text:  # pasted, or of several lines: no command, whatever it begins with
            return self._ask_model(text)
        if text.startswith("!"):
            command = text.lstrip("!").strip()
            if command:
                self._run_command(command, add=not text.startswith("!!"))
            return []
        known = COMMAND.fullmatch(text)
        if known:
            argument = known[2] or ""
            entries = self.commands.run(known[1] or "help", argument.strip())
            self.show_notices()
            return entries
        if text in ("exit", "quit"):
            raise Leave(0)
        return self._ask_model(text)

    def _ask_model(self, text: str) -> list[str]:
        """Do one run.

        Returns what was entered during it; if the run did not end well, that fills the prompt.
        """
        text, images = self._attach(text.strip())
        ended_well = False
        with handling(signal.SIGINT, self.interrupts.count):
            files = self.session.parts.prompt_files
            if files:
                self.commands.trust(files.unanswered())
            # A run that had to be broken off comes back to the prompt
            with contextlib.suppress(KeyboardInterrupt), self.typeahead.listening():
                result = self.follow(self.session.prompt(text, images))
                ended_well = result.stop_reason == "stop"
                if result.stop_reason in LIMITS:
                    self.going_on = "continue"
                    self.screen.line("Enter goes on with it.", "dim")
            self.render.pause()
            self.session.settle()  # again: a signal may have broken it off
            entries = self._take_typed(ended_well)
            if ended_well and not entries:
                entries = self._end_plan()
        return entries

    def _take_typed(self, ended_well: bool) -> list[str]:
        """What was typed during a run: the lines that come next. If the run did not end well, they
        stand at the prompt, and so does a line that was not ended."""
        typed = self.typeahead
        self.keyboard.remember(typed.entered)
        entries = typed.take_lines()
        if not ended_well:
            self.keyboard.early += entries
            entries = []
        if typed.text:
            self.keyboard.early.append(typed.text)
            typed.text = ""
        return entries

    def _attach(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """The text and the images of an entry with `@path`, and those that wait for the first
        prompt.
        """
        images = self.images
        self.images = []
        module = optional("coder.cli.attach") if "@" in text else None
        if module is None:
            return text, images
        state = self.session.agent.state
        context = ToolContext(self.session.cwd, Abort(), seen=state.tools.seen)
        text, attached, notes = module.attach(text, context)
        if notes:
            self.screen.line(f"attached: {', '.join(notes)}", "dim")
        return text, images + attached

    def _end_plan(self) -> list[str]:
        """If the run has ended with a plan, ask whether to go on with it; returns the entry that
        follows.
        """
        has_typed = bool(self.keyboard.early)
        if has_typed or not self._has_plan():
            return []
        answer = self.prompter.ask_plan()
        if answer == "yes":
            self.commands.agent("build")
            return [GO_ON]
        return [answer] if answer else []

    def _has_plan(self) -> bool:
        messages = self.session.messages
        if not self.session.spec.read_only or not messages:
            return False
        return bool(text_of(messages[-1]).strip())

    def follow(self, events: Events[T]) -> T:
        """Show the events of a run to the end. Raises KeyboardInterrupt."""
        return self.interrupts.show_all(events, self.session.agent.token, self._show)

    def _show(self, event: Event) -> None:
        if isinstance(event, RunEnd):
            advise(self.session, event.error)
        is_cut_off = isinstance(event, RunEnd) and self.interrupts.ended
        if not is_cut_off:
            self.render(event)
        self.prompter(event)
        if isinstance(event, MessageStart):  # it may have waited in a queue
            self.typeahead.show()

    # -- commands of the user's own

    def _run_command(self, command: str, add: bool) -> None:
        """Run it with this terminal; with `add`, its output comes through a pipe, and the model
        reads it, too.
        """
        output = Output()
        sys.stdout.flush()
        # Ctrl+C and Ctrl+\ are for the command alone
        with handling(signal.SIGINT), handling(signal.SIGQUIT), tty_flags(on="ICRNL"):
            try:
                process = self._start_command(command, is_piped=add)
            except (OSError, ToolError) as error:
                self.screen.line(f"The command could not be started: {error}", "yellow")
                return
            if add:
                self._pass_on(process, output)
            code = process.wait()
        by_ctrl_c = (-signal.SIGINT, 128 + signal.SIGINT)
        self.interrupts.presses = 1 if code in by_ctrl_c else 0
        note = ending_of(code)
        if note:
            self.screen.line(note, "dim")
        output.close()
        if add:
            self._add_output(command, output.text(), note)

    def _pass_on(self, process: subprocess.Popen[bytes], output: Output) -> None:
        """Show what a command writes, and keep it."""
        last = b"\n"
        for data in read_output(process, Abort(), math.inf):
            if data:
                sys.stdout.buffer.write(data)
                sys.stdout.flush()
                output.add(data)
                last = data
        if not last.endswith(b"\n"):
            sys.stdout.write("\n")

    def _start_command(self, command: str, is_piped: bool) -> subprocess.Popen[bytes]:
        """Start a command, without the secrets of this process. Raises OSError and ToolError."""
        variables = {MARK: USERS}
        for name, value in os.environ.items():
            if not is_secret(name, value):
                variables.setdefault(name, value)
        return subprocess.Popen(
            [shell(), "-c", command],
            cwd=self.session.cwd,
            env=variables,
            stdout=subprocess.PIPE if is_piped else None,
            stderr=subprocess.STDOUT if is_piped else None,
        )

    def _add_output(self, command: str, output: str, note: str) -> None:
        """Add a command of the user's and its output to the conversation."""
        shown = strip_controls(output)
        if note:
            shown = f"{shown}\n{note}" if shown else note
        shown = shown or "(no output)"
        text = f"I ran `{command}` myself. Its output:\n{shown}"
        message = user(self.session.parts.redact(text))
        message["meta"]["own"] = True  # of no run, and not taken back with one
        self.session.messages.append(message)
        self.conversation.recorder.sync()


def ending_of(code: int) -> str:
    """How a command ended, "" if it did well."""
    if code < 0:
        return f"[killed by signal {-code}]"
    return f"[exit code {code}]" if code else ""
