"""The session at the prompt: entries in, runs out.

What it leaves out: the commands (commands.py), how events look (render.py), how lines come in (keyboard.py), what a run is
(session.py, loop.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from coder.abort import Abort
from coder.history import user
from coder.terminal.asking import Asker
from coder.terminal.commands import Commands
from coder.terminal.keyboard import Keyboard, Leave, silent_keys
from coder.terminal.memory import Memory
from coder.terminal.render import Renderer
from coder.terminal.replay import replay
from coder.terminal.screen import Screen, clean
from coder.terminal.session import Session
from coder.terminal.typeahead import COMMAND, TypeAhead
from coder.tools import Toolset
from coder.tools.bash import bash
from coder.types import Event, RunEnd, Status, ToolCall, ToolResult, ToolUpdate

WINDOW = {"idle": "coder: ", "busy": "coder at work: ", "retry": "coder waits: "}  # what the window is called


class Repl:
    """What becomes of the entries of one session."""

    def __init__(self, session: Session, memory: Memory, screen: Screen, keyboard: Keyboard, *, verbose: bool = False) -> None:
        self.session = session
        self.memory = memory
        self.screen = screen
        self.keyboard = keyboard
        self.render = Renderer(screen, verbose=verbose, limits=session.stalls)
        self.asker = Asker(screen, self.render, keyboard)
        self.typeahead = TypeAhead(screen)
        self.typeahead.redact = keyboard.redact = session.redactor.text
        session.hooks.hooks.append(self.typeahead)
        keyboard.paused = self.typeahead.paused
        keyboard.stopped_run = lambda: session.interrupts.last
        self.waiting: list[str] = []  # entries still to be done
        self.commands = Commands(self)
        self.tell()

    def tell(self) -> None:
        """What a person is to be told."""
        for text in self.session.told():
            self.screen.line(clean(text), "yellow")

    def replay(self) -> None:
        """Show the visible end of the conversation that goes on."""
        self.tell()
        replay(self.screen, self.session.tools, self.session.messages)

    # -- one entry

    def take(self, text: str) -> None:
        """Do what an entry says, and then what was entered meanwhile. Raises Leave."""
        self.waiting, presses = [text], self.session.interrupts
        try:
            while self.waiting:
                presses.presses = 0
                self.waiting += self._do(self.waiting.pop(0))
                if presses.presses:
                    return  # who stops one does not want the next
                if self.waiting:
                    self.screen.line(f"> {clean(self.waiting[0])}", "bold")
        finally:
            self.keyboard.early = "".join(f"{entry} " for entry in self.waiting) + self.keyboard.early
            self.waiting = []

    def _do(self, text: str) -> list[str]:
        """Do one; the entries that came of it."""
        if text.startswith("!"):
            self._shell(text.lstrip("!").strip(), add=not text.startswith("!!"))
        elif command := COMMAND.fullmatch(text):
            wanted = self.commands.run(command[1] or "help", (command[2] or "").strip())
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
        with self.session.interrupts.kept():
            with self.hard_stop(), keys.listening():
                ended_well = self.session.run(text.strip(), self.show).stop_reason == "stop"
            self.memory.settle()
            self.keyboard.remember(keys.entered)
            left = keys.left()
            if not ended_well:
                self.keyboard.early += "".join(f"{line} " for line in left)
            self.keyboard.early = (self.keyboard.early + keys.unfinished()).replace("\n", " ")
            self.waiting += left if ended_well else []

    @contextlib.contextmanager
    def hard_stop(self) -> Iterator[None]:
        """Ctrl+C twice during a run leaves; a run that had to be broken off comes back to the prompt."""
        try:
            yield
        except KeyboardInterrupt:
            self.screen.status("")
            self.screen.finish_line()
            if self.session.interrupts.presses > 1:
                raise Leave(130) from None

    def show(self, event: Event) -> None:
        self.render(event)
        self.asker(event)
        if isinstance(event, Status) and event.status != "idle":
            self.name_window(event.status)
        elif isinstance(event, RunEnd):
            self.name_window("idle")

    def name_window(self, status: str) -> None:
        """Say in the window's title what goes on; at the end only when the last line is on the screen."""
        self.screen.title(f"{WINDOW[status]}{self.memory.title or self.session.cwd.name}")

    def _shell(self, command: str, add: bool) -> None:
        """Run the person's own command; no question is asked."""
        if not command:
            return
        tools, abort = Toolset([bash], cwd=self.session.cwd), Abort()
        call = ToolCall("", "bash", {"command": command, "timeout": 600})
        with silent_keys(), self.hard_stop(), self.session.interrupts.stopping(abort):
            ctx = tools.context(call, abort)
            ctx.redact = self.session.redactor.stream()
            work = tools.run(call, ctx)
            result: ToolResult | None = None
            self.screen.status(command)
            try:
                while True:
                    event = next(work)
                    if isinstance(event, ToolUpdate):
                        self.screen.status(f"{command} │ {clean(event.text.rstrip().rpartition(chr(10))[2])}")
            except StopIteration as end:
                result = end.value
            finally:
                self.screen.status("")
                work.close()
        if result:
            output = self.session.redactor.text(str(result.content))
            self.screen.line(clean(output))
            if add:
                said = user(f"I ran `{self.session.redactor.text(command)}` myself. Its output:\n{output}")
                said["meta"]["own"] = True  # not of a run, and not taken back with one
                self.session.messages.append(said)
                self.memory.sync()
