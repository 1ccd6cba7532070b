"""The session at the prompt: entries in, runs out, commands.

What it leaves out: how events look (render.py), how lines come in (keyboard.py), what a run is (session.py, loop.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import cast, get_args

from coder.abort import Abort
from coder.history import user
from coder.terminal.asking import Asker
from coder.terminal.keyboard import Keyboard, Leave, silent_keys
from coder.terminal.render import Renderer, count, tokens
from coder.terminal.screen import Screen, clean, one_line
from coder.terminal.session import Session
from coder.terminal.typeahead import COMMAND, TypeAhead
from coder.tools import Toolset
from coder.tools.bash import bash
from coder.types import Event, Reasoning, ToolCall, ToolResult, ToolUpdate

ALIASES = {"?": "help", "quit": "exit", "q": "exit", "reset": "clear", "new": "clear", "cost": "tokens", "context": "tokens"}


class Repl:
    """What becomes of the entries of one session."""

    def __init__(self, session: Session, screen: Screen, keyboard: Keyboard, *, verbose: bool = False) -> None:
        self.session = session
        self.screen = screen
        self.keyboard = keyboard
        self.render = Renderer(screen, verbose=verbose, limits=session.stalls)
        self.asker = Asker(screen, self.render, keyboard)
        self.typeahead = TypeAhead(screen)
        session.hooks.hooks.append(self.typeahead)
        keyboard.paused = self.typeahead.paused
        keyboard.stopped_run = lambda: session.interrupts.last
        self.commands: dict[str, tuple[str, Callable[[str], None]]] = {
            "help": ("this list", self._help),
            "clear": ("forget the conversation", self._clear),
            "model": ("show the model, or go on with another: /model NAME", self._model),
            "reasoning": ("how much the model thinks (a level), show or hide it", self._reasoning),
            "tools": ("the tools the model has", self._tools),
            "tokens": ("what was used so far", self._tokens),
            "exit": ("leave (also Ctrl+D)", self._exit),
        }

    # -- one entry

    def take(self, text: str) -> None:
        """Do what an entry says, and then what was entered meanwhile. Raises Leave."""
        entries = [text]
        while entries:
            entries += self._do(entries.pop(0))
            if entries:
                self.screen.line(f"> {clean(entries[0])}", "bold")

    def _do(self, text: str) -> list[str]:
        """Do one; the entries that came of it."""
        if text.startswith("!"):
            self._shell(text.lstrip("!").strip(), add=not text.startswith("!!"))
        elif command := COMMAND.fullmatch(text):
            self._command(command[1] or "help", (command[2] or "").strip())
        elif text in ("exit", "quit"):
            raise Leave(0)
        elif text:
            return self._ask_model(text)
        return []

    def _command(self, name: str, argument: str) -> None:
        known = self.commands.get(ALIASES.get(name, name))
        if known is None:
            self.screen.line(f"There is no command /{clean(name)}; /help lists them.", "yellow")
            return
        known[1](argument)

    def _ask_model(self, text: str) -> list[str]:
        """One run. Returns what was entered during it and is to be done now; where it did not end well, that stands at the prompt."""
        ended_well, keys = False, self.typeahead
        with self._hard_stop(), keys.listening():
            ended_well = self.session.run(text.strip(), self._show).stop_reason == "stop"
        self.keyboard.remember(keys.entered)
        left = keys.left()
        if not ended_well:
            self.keyboard.early += "".join(f"{line} " for line in left)
        self.keyboard.early = (self.keyboard.early + keys.unfinished()).replace("\n", " ")
        return left if ended_well else []

    @contextlib.contextmanager
    def _hard_stop(self) -> Iterator[None]:
        """Ctrl+C twice during a run leaves; a run that had to be broken off comes back to the prompt."""
        try:
            yield
        except KeyboardInterrupt:
            self.screen.status("")
            self.screen.finish_line()
            if self.session.interrupts.presses > 1:
                raise Leave(130) from None

    def _show(self, event: Event) -> None:
        self.render(event)
        self.asker(event)

    # -- commands

    def _help(self, argument: str) -> None:
        for name, (text, _) in self.commands.items():
            self.screen.line(f"  /{name:<9} {text}")
        self.screen.line("  !command  run it here and add its output to the conversation; !!command only runs it")
        self.screen.line("  While it works: a line steers it, +line waits until it is done, a command comes after the run.")
        self.screen.line('  """       begins and ends a text of several lines; so does \\ at the end of a line')

    def _clear(self, argument: str) -> None:
        self.session.messages.clear()
        self.session.tools.seen.clear()
        self.screen.line("The conversation is empty.", "dim")

    def _model(self, argument: str) -> None:
        if argument:
            self.session.use(argument)
        self.screen.line(f"{clean(self.session.model.name)} at {clean(self.session.settings.host)}")

    def _reasoning(self, argument: str) -> None:
        """The level, and whether thoughts are shown."""
        levels, word = get_args(Reasoning), argument.lower()
        if word in levels:
            self.session.reasoning = cast(Reasoning, word)
        elif word in ("show", "hide"):
            self.render.thoughts = word == "show"
        elif word:
            self.screen.line(f"/reasoning takes {', '.join(levels)}, show or hide.", "yellow")
            return
        shown = "shown" if self.render.thoughts else "hidden"
        self.screen.line(f"reasoning: {self.session.reasoning}, {shown}")

    def _tools(self, argument: str) -> None:
        for each in self.session.tools.tools.values():
            self.screen.line(f"  {each.name:<12} {one_line(each.description, max(20, self.screen.width - 16))}")

    def _tokens(self, argument: str) -> None:
        session = self.session
        used = session.newest.input + session.newest.output
        window = session.model.context_window
        self.screen.line(f"this session: {tokens(session.usage)}")
        self.screen.line(f"context: {count(used)} of {count(window)} tokens ({100 * used / max(1, window):.0f} %), "
                         f"{len(session.messages)} messages")

    def _exit(self, argument: str) -> None:
        raise Leave(0)

    def _shell(self, command: str, add: bool) -> None:
        """Run the person's own command; no question is asked."""
        if not command:
            return
        tools, abort = Toolset([bash], cwd=self.session.cwd), Abort()
        call = ToolCall("", "bash", {"command": command, "timeout": 600})
        with silent_keys(), self._hard_stop(), self.session.interrupts.stopping(abort):
            work = tools.run(call, tools.context(call, abort))
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
            self.screen.line(clean(str(result.content)))
            if add:
                self.session.messages.append(user(f"I ran `{command}` myself. Its output:\n{result.content}"))
