"""The session at the prompt: entries in, runs out."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

from coder.cli.app import App
from coder.cli.commands import Commands
from coder.cli.conversation import Conversation
from coder.cli.keyboard import Keyboard, Leave
from coder.cli.questions import Asker
from coder.cli.render import Renderer
from coder.cli.replay import replay
from coder.cli.screen import Screen, clean
from coder.cli.typeahead import COMMAND, TypeAhead
from coder.events import Event, RunEnd, Status
from coder.history import user
from coder.types import ToolError

# What the window is called
WINDOW = {
    "idle": "coder: ",
    "busy": "coder at work: ",
    "retry": "coder waits: ",
}


class Repl:
    """What becomes of the entries of one session."""

    def __init__(
        self,
        app: App,
        memory: Conversation,
        screen: Screen,
        keyboard: Keyboard,
        *,
        verbose: bool = False,
    ) -> None:
        self.app = app
        self.memory = memory
        self.screen = screen
        self.keyboard = keyboard
        self.render = Renderer(screen, verbose=verbose, limits=app.stalls)
        self.asker = Asker(screen, self.render, keyboard)
        self.typeahead = TypeAhead(screen, app.agent.steering, app.agent.follow_ups)
        self.typeahead.redact = keyboard.redact = app.redactor.text
        app.agent.subscribe(self.typeahead)
        keyboard.paused = self.typeahead.paused
        keyboard.stopped_run = lambda: app.interrupts.last
        self.waiting: list[str] = []  # entries still to be done
        self.commands = Commands(self)
        self.tell()

    def tell(self) -> None:
        """What a person is to be told."""
        for text in self.app.taken_notices():
            self.screen.line(clean(text), "yellow")

    def replay(self) -> None:
        """Show the visible end of the conversation that goes on."""
        self.tell()
        replay(self.screen, self.app.agent.state.tools, self.app.agent.messages)

    # -- one entry

    def take(self, text: str) -> None:
        """Do what an entry says, and then what was entered meanwhile. Raises Leave."""
        self.waiting, presses = [text], self.app.interrupts
        try:
            while self.waiting:
                presses.presses = 0
                self.waiting += self._do(self.waiting.pop(0))
                if presses.presses:
                    return  # who stops one does not want the next
                if self.waiting:
                    self.screen.line(f"> {clean(self.waiting[0])}", "bold")
        finally:
            self.keyboard.early[:0] = self.waiting
            self.waiting = []

    def _do(self, text: str) -> list[str]:
        """Do one; the entries that came of it."""
        if "\n" in text:  # pasted, or of several lines: words, whatever they begin with
            self._ask_model(text)
        elif text.startswith("!"):
            if command := text.lstrip("!").strip():
                self._shell(command, add=not text.startswith("!!"))
        elif known := COMMAND.fullmatch(text):
            wanted = self.commands.run(known[1] or "help", (known[2] or "").strip())
            self.tell()
            return wanted
        elif text in ("exit", "quit"):
            raise Leave(0)
        elif text:
            self._ask_model(text)
        return []

    def _ask_model(self, text: str) -> None:
        """One run. What was entered during it is to be done next; where the run did not end well, it stands at the prompt."""
        ended_well, keys = False, self.typeahead
        with self.app.interrupts.kept():
            with self.hard_stop(), keys.listening():
                ended_well = self.app.run(text.strip(), self.show).stop_reason == "stop"
            self.memory.settle()
            self.keyboard.remember(keys.entered)
            (self.waiting if ended_well else self.keyboard.early).extend(keys.left())
            self.keyboard.early += filter(None, [keys.unfinished()])

    @contextlib.contextmanager
    def hard_stop(self) -> Iterator[None]:
        """Ctrl+C twice during a run leaves; a run that had to be broken off comes back to the prompt."""
        try:
            yield
        except KeyboardInterrupt:
            self.screen.status("")
            self.screen.finish_line()
            if self.app.interrupts.presses > 1:
                raise Leave(130) from None

    def show(self, event: Event) -> None:
        self.render(event)
        self.asker(event)
        if isinstance(event, Status) and event.state in ("preparing", "waiting"):
            self.name_window(event.status)
        elif isinstance(event, RunEnd):
            self.name_window("idle")

    def name_window(self, status: str) -> None:
        """Say in the window's title what goes on; at the end only when the last line is on the screen."""
        self.screen.title(f"{WINDOW[status]}{self.memory.title or self.app.cwd.name}")

    def _shell(self, command: str, add: bool) -> None:
        """Run the person's own command; no question is asked."""
        from coder.cli.own_command import direct, relayed

        redactor, output, keys = self.app.redactor, "", ""
        try:
            if not add:
                code = direct(command, self.app.cwd)
            else:
                output, code, keys = relayed(command, self.app.cwd, redactor.text)
        except (OSError, ToolError) as error:
            self.screen.line(f"The command could not be started: {error}", "yellow")
            return
        self.keyboard.early += filter(None, [keys])
        self.app.interrupts.presses = int(code in (-signal.SIGINT, 128 + signal.SIGINT))
        note = f"[killed by signal {-code}]" if code < 0 else f"[exit code {code}]" if code else ""
        if note:
            self.screen.line(note, "dim")
        if add:
            text = redactor.text("\n".join(filter(None, [output, note])) or "(no output)")
            said = user(f"I ran `{redactor.text(command)}` myself. Its output:\n{text}")
            said["meta"]["own"] = True  # not of a run, and not taken back with one
            self.app.agent.messages.append(said)
            self.memory.sync()
