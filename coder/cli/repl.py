"""The session at the prompt: entries in, runs out. An entry with `!` is a command of the user's own, run unasked."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from subprocess import STDOUT
from typing import Any

from coder.abort import Abort
from coder.cli.app import App
from coder.cli.commands import Commands
from coder.cli.conversation import open_conversation
from coder.cli.input import MODE, Keyboard, Leave, mode
from coder.cli.keys import tty_flags
from coder.cli.process import collect_garbage, handling, optional
from coder.cli.questions import Prompter
from coder.cli.render import Renderer, print_history
from coder.cli.screen import Screen
from coder.cli.settings import Settings, program
from coder.cli.typeahead import COMMAND, TypeAhead
from coder.cli.wording import LIMITS
from coder.events import Event, RunEnd
from coder.history import user
from coder.permissions.sanitize import strip_controls
from coder.tools.bash import Output, shell
from coder.tools.process import read_output
from coder.tools.secrets import is_secret
from coder.toolset import ToolContext
from coder.types import ToolError

NOTIFY_AFTER = 10.0  # seconds of a run


class Repl:
    """Do what the entries of one session ask for."""

    def __init__(
        self,
        settings: Settings,
        arguments: argparse.Namespace,
        screen: Screen,
        keyboard: Keyboard,
    ) -> None:
        self.app = app = App(settings, arguments)
        self.conversation = open_conversation(app, titles=settings.titles)
        collect_garbage()
        self.screen, self.keyboard = screen, keyboard
        screen.markdown = settings.markdown
        self.render = Renderer(
            screen,
            screen,
            verbose=arguments.verbose,
            limits=app.stalls,
            context_used=lambda: app.context_used,
            notify_after=NOTIFY_AFTER if app.settings.bell else math.inf,
        )
        self.prompter = Prompter(self.render, keyboard)
        self.typeahead = TypeAhead(screen, app.agent.steering, app.agent.follow_ups)
        self.typeahead.redact = keyboard.redact = app.redact
        self.typeahead.stop = app.interrupts.escape
        app.agent.subscribe(self.typeahead)
        keyboard.paused = self.typeahead.paused
        # What is not the default of who works and what is allowed
        keyboard.label = lambda: mode(app.spec.name, app.permissions.yolo)
        self.commands = Commands(self)
        self.has_begun, self.going_on = False, ""  # the second: what an empty entry means

    def begin(self, first: str) -> None:
        """Show once what stands above the first entry, which the command line may have given."""
        if self.has_begun:
            return
        arguments, self.has_begun = self.app.arguments, True
        if arguments.resume == "":
            self.commands.run("resume", "")
        elif arguments.resume or arguments.continue_:
            self.replay()
        self.show_notices()
        if arguments.resume is not None or arguments.continue_:
            self.screen.line()
        if first:
            self.screen.entry(first)

    def close(self) -> None:
        """Close the conversation, and say how to continue it."""
        kept = self.conversation.close()
        for text in self.app.left_behind():
            self.screen.line(text, "yellow")
        if kept:
            self.screen.line(f"Continue this conversation: {program()} -r {kept}", "dim")

    def show_notices(self) -> None:
        while self.app.notices:
            self.screen.line(self.app.notices.pop(0), "yellow")

    def replay(self) -> None:
        """Show the end of the conversation that goes on."""
        self.show_notices()
        print_history(self.screen, self.app.agent.messages)

    # -- entries

    def take(self, text: str) -> None:
        """Do what an entry asks for, and then what was entered meanwhile. Raises Leave."""
        entries, interrupts = [text], self.app.interrupts
        try:
            while entries:
                interrupts.presses, interrupts.escaped = 0, False
                entry = entries.pop(0) or self.going_on
                if entry != MODE:
                    self.going_on = ""
                entries += self._do(entry)
                if entry not in ("", MODE):
                    self.screen.line()
                if interrupts.presses:
                    self.keyboard.pressed = time.monotonic()
                if interrupts.presses or interrupts.escaped:
                    return  # the entries behind it are stopped, too
                if entries:
                    self.screen.entry(entries[0])
        finally:
            self.keyboard.early[:0] = entries

    def _do(self, text: str) -> list[str]:
        """Do one entry; returns those that came of it."""
        if "\n" in text:  # pasted, or of several lines: no command, whatever it begins with
            return self._ask_model(text)
        if text.startswith("!"):
            if command := text.lstrip("!").strip():
                self._run_command(command, add=not text.startswith("!!"))
        elif known := COMMAND.fullmatch(text):
            entries = self.commands.run(known[1] or "help", (known[2] or "").strip())
            self.show_notices()
            return entries
        elif text in ("exit", "quit"):
            raise Leave(0)
        elif text:
            return self._ask_model(text)
        return []

    def _ask_model(self, text: str) -> list[str]:
        """One run. Returns what was entered during it; where the run did not end well, that stands at the prompt."""
        ended_well, typed = False, self.typeahead
        text, images = self._attach(text.strip())
        with handling(signal.SIGINT, self.app.interrupts.count):
            if self.app.prompt_files:
                self.commands.trust(self.app.prompt_files.unanswered())
            with self.hard_stop(), typed.listening():
                result = self.app.follow(self.app.stream(text, images), self.show)
                ended_well = result.stop_reason == "stop"
                if result.stop_reason in LIMITS:
                    self.going_on = "continue"
                    self.screen.line("Enter goes on with it.", "dim")
            self.conversation.settle()
            self.keyboard.remember(typed.entered)
            entries = typed.unsent_lines()
            if not ended_well:
                self.keyboard.early += entries
            self.keyboard.early += filter(None, [typed.partial_line()])
        return entries if ended_well else []

    def _attach(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """The entry with the files that it names, and images."""
        if "@" not in text or not (module := optional("coder.cli.attach")):
            return text, []
        seen = self.app.agent.state.tools.seen
        ctx = ToolContext(self.app.cwd, Abort(), seen=seen)
        text, images, notes = module.attach(text, ctx)
        if notes:
            self.screen.line(f"attached: {', '.join(notes)}", "dim")
        return text, images

    @contextlib.contextmanager
    def hard_stop(self) -> Iterator[None]:
        """A run that had to be broken off comes back to the prompt."""
        try:
            yield
        except KeyboardInterrupt:
            self.render.pause()

    def show(self, event: Event) -> None:
        if not (isinstance(event, RunEnd) and self.app.interrupts.ended):
            self.render(event)
        self.prompter(event)

    # -- commands of the user's own

    def _run_command(self, command: str, add: bool) -> None:
        """Run it with our terminal; with `add`, its output comes through a pipe, and the model reads it, too."""
        output, pipe = Output(), subprocess.PIPE if add else None
        variables = {k: v for k, v in os.environ.items() if not is_secret(k, v)}
        given: dict[str, Any] = {"cwd": self.app.cwd, "env": variables}
        sys.stdout.flush()
        # Ctrl+C and Ctrl+\ are for the command alone
        with handling(signal.SIGINT), handling(signal.SIGQUIT), tty_flags(on="ICRNL"):
            try:
                words = [shell(), "-c", command]
                process = subprocess.Popen(words, stdout=pipe, stderr=pipe and STDOUT, **given)
            except (OSError, ToolError) as error:
                self.screen.line(f"The command could not be started: {error}", "yellow")
                return
            data = b"\n"
            pieces = read_output(process, Abort(), math.inf) if add else ()
            for data in filter(None, pieces):
                sys.stdout.buffer.write(data)
                sys.stdout.flush()
                output.add(data)
            sys.stdout.write("" if data.endswith(b"\n") else "\n")
            code = process.wait()
        self.app.interrupts.presses = int(code in (-signal.SIGINT, 128 + signal.SIGINT))
        note = f"[killed by signal {-code}]" if code < 0 else f"[exit code {code}]" if code else ""
        if note:
            self.screen.line(note, "dim")
        if add:
            text = strip_controls(re.sub(r"[^\n]*\r(?!\n)", "", output.text()))  # written over
            shown = "\n".join(filter(None, [text, note])) or "(no output)"
            message = user(self.app.redact(f"I ran `{command}` myself. Its output:\n{shown}"))
            message["meta"]["own"] = True  # of no run, and not taken back with one
            self.app.agent.messages.append(message)
            self.conversation.recorder.sync()
        output.close()
