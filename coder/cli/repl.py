"""The session at the prompt: entries in, runs out."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

from coder.cli.app import App
from coder.cli.commands import Commands
from coder.cli.conversation import Conversation
from coder.cli.input import Keyboard, Leave
from coder.cli.questions import Prompter
from coder.cli.render import Renderer, print_history
from coder.cli.screen import Screen
from coder.cli.typeahead import COMMAND, TypeAhead
from coder.events import Event, RunEnd
from coder.history import user
from coder.types import ToolError


class Repl:
    """Do what the entries of one session ask for."""

    def __init__(
        self,
        app: App,
        conversation: Conversation,
        screen: Screen,
        keyboard: Keyboard,
        *,
        verbose: bool = False,
    ) -> None:
        self.app, self.conversation, self.screen, self.keyboard = (
            app,
            conversation,
            screen,
            keyboard,
        )
        self.render = Renderer(screen, screen, verbose=verbose, limits=app.stalls)
        self.prompter = Prompter(self.render, keyboard)
        self.typeahead = TypeAhead(screen, app.agent.steering, app.agent.follow_ups)
        self.typeahead.redact = keyboard.redact = app.redact
        app.agent.subscribe(self.typeahead)
        keyboard.paused = self.typeahead.paused
        keyboard.stopped_run = lambda: app.interrupts.last
        self._entries: list[str] = []  # still to be done
        self.commands = Commands(self)
        self.show_notices()

    def show_notices(self) -> None:
        for text in self.app.taken_notices():
            self.screen.line(text, "yellow")

    def replay(self) -> None:
        """Show the end of the conversation that goes on."""
        self.show_notices()
        print_history(self.screen, self.app.agent.state.tools, self.app.agent.messages)

    # -- one entry

    def take(self, text: str) -> None:
        """Do what an entry asks for, and then what was entered meanwhile. Raises Leave."""
        self._entries, interrupts = [text], self.app.interrupts
        try:
            while self._entries:
                interrupts.presses = 0
                self._entries += self._do(self._entries.pop(0))
                if interrupts.presses:
                    return  # Ctrl+C stops the entries behind it, too
                if self._entries:
                    self.screen.line(f"> {self._entries[0]}", "bold")
        finally:
            self.keyboard.early[:0] = self._entries
            self._entries = []

    def _do(self, text: str) -> list[str]:
        """Do one entry; returns those that came of it."""
        if "\n" in text:  # pasted, or of several lines: no command, whatever it begins with
            self._ask_model(text)
        elif text.startswith("!"):
            if command := text.lstrip("!").strip():
                self._run_command(command, add=not text.startswith("!!"))
        elif known := COMMAND.fullmatch(text):
            entries = self.commands.run(known[1] or "help", (known[2] or "").strip())
            self.show_notices()
            return entries
        elif text in ("exit", "quit"):
            raise Leave(0)
        elif text:
            self._ask_model(text)
        return []

    def _ask_model(self, text: str) -> None:
        """One run. What was entered during it is done next; where the run did not end well, it stands at the prompt."""
        ended_well, typed = False, self.typeahead
        with self.app.interrupts.deferred_behind_run():
            with self.hard_stop(), typed.listening():
                result = self.app.follow(self.app.stream(text.strip()), self.show)
                ended_well = result.stop_reason == "stop"
            self.conversation.settle()
            self.keyboard.remember(typed.entered)
            (self._entries if ended_well else self.keyboard.early).extend(typed.unsent_lines())
            self.keyboard.early += filter(None, [typed.partial_line()])

    @contextlib.contextmanager
    def hard_stop(self) -> Iterator[None]:
        """Ctrl+C twice during a run leaves; a run that had to be broken off comes back to the prompt."""
        try:
            yield
        except KeyboardInterrupt:
            self.screen.status()
            self.screen.finish_line()
            if self.app.interrupts.presses > 1:
                raise Leave(130) from None

    def show(self, event: Event) -> None:
        if not (isinstance(event, RunEnd) and self.app.interrupts.ended):
            self.render(event)
        self.prompter(event)

    def _run_command(self, command: str, add: bool) -> None:
        """Run the user's own command; no question is asked."""
        from coder.cli.own_command import run_directly, run_relayed

        redact, output, keys = self.app.redact, "", ""
        try:
            if not add:
                code = run_directly(command, self.app.cwd)
            else:
                output, code, keys = run_relayed(command, self.app.cwd, redact)
        except (OSError, ToolError) as error:
            self.screen.line(f"The command could not be started: {error}", "yellow")
            return
        self.keyboard.early += filter(None, [keys])
        self.app.interrupts.presses = int(code in (-signal.SIGINT, 128 + signal.SIGINT))
        note = f"[killed by signal {-code}]" if code < 0 else f"[exit code {code}]" if code else ""
        if note:
            self.screen.line(note, "dim")
        if add:
            text = redact("\n".join(filter(None, [output, note])) or "(no output)")
            message = user(f"I ran `{redact(command)}` myself. Its output:\n{text}")
            message["meta"]["own"] = True  # of no run, and not taken back with one
            self.app.agent.messages.append(message)
            self.conversation.sync()
