"""The session at the prompt: entries in, runs out; and what is typed while the agent works."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from coder.abort import Abort
from coder.agent.state import Queue
from coder.cli.app import App
from coder.cli.commands import Commands
from coder.cli.conversation import open_conversation
from coder.cli.input import BACK, MODE, Keyboard, Leave, mode
from coder.cli.keys import ENTER, ESC, NEWLINE, PASTED, Keys, single_keys, tty_flags
from coder.cli.process import collect_garbage, handling, optional
from coder.cli.questions import Prompter
from coder.cli.render import Renderer
from coder.cli.screen import Screen
from coder.cli.settings import Settings, program
from coder.cli.text_rows import one_line
from coder.cli.wording import LIMITS, words_of
from coder.events import Event, MessageStart, RunEnd
from coder.history import text_of, user
from coder.permissions.sanitize import strip_controls
from coder.tools.bash import read_output, shell
from coder.tools.output import Output
from coder.tools.processes import MARK, USERS
from coder.tools.secrets import is_secret
from coder.toolset import ToolContext
from coder.types import ToolError

NOTIFY_AFTER = 10.0  # seconds of a run
MAX_SHOWN = 4_000  # characters of a message in a conversation that goes on
GO_ON = "Carry out this plan."
# (name, argument). What looks like a command is never sent; /home/me/x.py does not
COMMAND = re.compile(r"/([\w?-]*)(\s.*)?")


class Repl:
    """Do what the entries of one session ask for. An entry with `!` is a command of the user's own, run unasked."""

    def __init__(
        self, settings: Settings, arguments: argparse.Namespace, screen: Screen, keyboard: Keyboard
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
            notify_after=NOTIFY_AFTER if settings.bell else math.inf,
        )
        self.prompter = Prompter(self.render, keyboard)
        self.typeahead = TypeAhead(screen, app.agent.steering, app.agent.follow_ups)
        self.typeahead.redact = keyboard.redact = app.redact
        self.typeahead.stop = keyboard.stop_run = app.interrupts.escape
        app.interrupts.at_prompt = True
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
        """Show the last question and the last answer of the conversation that goes on."""
        self.show_notices()
        messages = self.app.agent.messages[::-1]
        for role, show in (("user", self.screen.entry), ("assistant", self.screen.write)):
            texts = (words_of(text_of(each)) for each in messages if each.get("role") == role)
            if text := next(filter(None, texts), "").strip():
                show(text[-MAX_SHOWN:])
                self.screen.finish_line()
            if role == "user":
                self.screen.gap()

    # -- entries

    def take(self, text: str) -> None:
        """Do what an entry asks for, and then what was entered meanwhile. Raises Leave."""
        entries, interrupts = [text], self.app.interrupts
        try:
            while entries:
                interrupts.presses, interrupts.escaped = 0, False
                entry = entries.pop(0) or self.going_on
                if entry not in (MODE, BACK):
                    self.going_on = ""
                entries += self._do(entry)
                if entry not in ("", MODE):
                    self.screen.line()
                if interrupts.presses:
                    self.keyboard.run_stopped()
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
        text, images = text.strip(), []
        if "@" in text and (module := optional("coder.cli.attach")):
            context = ToolContext(self.app.cwd, Abort(), seen=self.app.agent.state.tools.seen)
            text, images, notes = module.attach(text, context)
            if notes:
                self.screen.line(f"attached: {', '.join(notes)}", "dim")
        with handling(signal.SIGINT, self.app.interrupts.count):
            if self.app.prompt_files:
                self.commands.trust(self.app.prompt_files.unanswered())
            # A run that had to be broken off comes back to the prompt
            with contextlib.suppress(KeyboardInterrupt), typed.listening():
                result = self.app.follow(self.app.stream(text, images), self.show)
                ended_well = result.stop_reason == "stop"
                if result.stop_reason in LIMITS:
                    self.going_on = "continue"
                    self.screen.line("Enter goes on with it.", "dim")
            self.render.pause()
            self.conversation.settle()
            self.keyboard.remember(typed.entered)
            entries = typed.take_lines()
            if not ended_well:
                self.keyboard.early += entries
            self.keyboard.early += filter(None, [typed.text])
            typed.text = ""
            if ended_well and not entries:
                entries = self._end_plan()
        return entries if ended_well else []

    def _end_plan(self) -> list[str]:
        """Where the run has ended with a plan, ask whether to go on with it; returns the entry that follows."""
        app = self.app
        has_answer = bool(app.agent.messages and text_of(app.agent.messages[-1]).strip())
        if not (app.spec.read_only and has_answer) or self.keyboard.early:  # more was typed already
            return []
        answer = self.prompter.ask_plan()
        if answer == "yes":
            self.commands.agent("build")
            return [GO_ON]
        return [answer] if answer else []

    def show(self, event: Event) -> None:
        if not (isinstance(event, RunEnd) and self.app.interrupts.ended):
            self.render(event)
        self.prompter(event)
        if isinstance(event, MessageStart):  # it may have waited in a queue
            self.typeahead.show()

    # -- commands of the user's own

    def _run_command(self, command: str, add: bool) -> None:
        """Run it with this terminal; with `add`, its output comes through a pipe, and the model reads it, too."""
        output, pipe = Output(), subprocess.PIPE if add else None
        variables = {k: v for k, v in os.environ.items() if not is_secret(k, v)}
        given: dict[str, Any] = {"cwd": self.app.cwd, "env": variables | {MARK: USERS}}
        given |= {"stdout": pipe, "stderr": pipe and subprocess.STDOUT}
        sys.stdout.flush()
        # Ctrl+C and Ctrl+\ are for the command alone
        with handling(signal.SIGINT), handling(signal.SIGQUIT), tty_flags(on="ICRNL"):
            try:
                process = subprocess.Popen([shell(), "-c", command], **given)
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
        output.close()
        if add:
            text = strip_controls(output.text())
            shown = "\n".join(filter(None, [text, note])) or "(no output)"
            message = user(self.app.redact(f"I ran `{command}` myself. Its output:\n{shown}"))
            message["meta"]["own"] = True  # of no run, and not taken back with one
            self.app.agent.messages.append(message)
            self.conversation.recorder.sync()


class TypeAhead:
    """Typing while the agent works: a line steers it, `+line` waits until it is done, a command comes after the run.

    A worker thread reads single keys and shows them in the status row. Nothing typed is lost: what no run has taken is
    the next entry, or stands at the next prompt where the run did not end well.
    """

    def __init__(self, screen: Screen, steering: Queue, follow_ups: Queue) -> None:
        self.screen, self.steering, self.follow_ups = screen, steering, follow_ups
        self.redact: Callable[[str], str] = str  # what is sent and kept
        self.stop: Callable[[], object] = int  # the run, at Esc; called in the worker thread
        self.text = ""  # the line under way
        self.commands: list[str] = []
        self.entered: list[str] = []  # all lines of the run
        self._keys = Keys()
        self._reading, self._is_listening = contextlib.ExitStack(), False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While inside, keys are taken one by one; nothing where there is no terminal."""
        self.entered.clear()
        with contextlib.ExitStack() as self._reading:
            self._reading.enter_context(self._thread())
            yield

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While inside, a question reads the keyboard."""
        was_listening = self._is_listening
        self._reading.close()
        try:
            yield
        finally:
            if was_listening:
                self._reading.enter_context(self._thread())

    @contextlib.contextmanager
    def _thread(self) -> Iterator[None]:
        with single_keys() as is_terminal:
            if not is_terminal:
                yield
                return
            awake, wake = os.pipe()
            reader = threading.Thread(target=self._read, args=(awake,), daemon=True)
            self._is_listening, usual = True, self.screen.stop_key
            self.screen.stop_key = "Esc"
            reader.start()
            self.show()
            try:
                yield
            finally:
                self._is_listening, self.screen.stop_key = False, usual
                os.close(wake)
                reader.join()
                os.close(awake)
                self.screen.show_typed("")

    def _read(self, awake: int) -> None:
        with contextlib.suppress(EOFError):
            while keys := self._keys.read(awake):
                if entry := self.take(keys):
                    self.enter(entry)
                self.show()

    def take(self, keys: list[str]) -> str:
        """Take the keys of one read; the entry, if Enter ends them. Lines that come at once were pasted, and are one."""
        for key in keys:
            text = key.removeprefix(PASTED)
            if key == ESC:
                self.stop()
            elif key in NEWLINE:
                self.text += "\n"
            elif key in "\x7f\b":
                self.text = self.text[:-1]
            elif key == "\x15":  # Ctrl+U
                self.text = ""
            elif key == "\x17":  # Ctrl+W
                self.text = re.sub(r"\S+\s*$", "", self.text)
            elif text == "\t" or text.isprintable():
                self.text += text
        if not keys or keys[-1] not in ENTER:
            return ""
        entry, self.text = self.text.strip(), ""
        return entry

    def enter(self, entry: str) -> None:
        """Put a line where it waits for its turn."""
        self.entered.append(entry)
        is_words = "\n" in entry  # pasted, whatever it begins with
        is_command = entry[0] == "!" or entry in ("exit", "quit") or COMMAND.fullmatch(entry)
        if is_command and not is_words:
            self.commands.append(entry)
            return
        queue = self.steering
        if entry[0] == "+" and not is_words:
            queue, entry = self.follow_ups, entry[1:].strip()
        if entry:
            message = user(self.redact(entry))
            message["meta"]["queued"] = True  # the renderer shows it then
            queue.put(message)

    def waiting(self) -> list[str]:
        """The lines that Enter has ended and no run has taken."""
        return [*map(text_of, (*self.steering, *self.follow_ups)), *self.commands]

    def take_lines(self) -> list[str]:
        """Those lines, which wait no longer."""
        lines = self.waiting()
        for each in (self.steering, self.follow_ups, self.commands):
            each.clear()
        return lines

    def show(self) -> None:
        """Show the beginning of what waits, and what is typed."""
        waiting, typed = self.waiting(), f"> {self.text}" if self.text else ""
        if waiting:
            number = f" ({len(waiting)})" if len(waiting) > 1 else ""
            queued = f"queued{number}: {waiting[0]}".replace("\n", "⏎")
            typed = f"{one_line(queued, self.screen.width // 2)}  {typed}"
        self.screen.show_typed(typed.replace("\n", "⏎"))
