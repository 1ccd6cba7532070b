"""Questions to the person during a run: everything is shown before the answer is taken.

A consumer of the events that ask. What it leaves out: what needs a question (approval.py).
"""

from __future__ import annotations

from coder.terminal.keyboard import Keyboard
from coder.terminal.render import Renderer, question
from coder.terminal.screen import Screen, clean
from coder.types import DoomLoop, Event, PermissionAsked


class Asker:
    """Answers the events that ask, from the terminal."""

    def __init__(self, screen: Screen, render: Renderer, keyboard: Keyboard) -> None:
        self.screen, self.render, self.keyboard = screen, render, keyboard

    def __call__(self, event: Event) -> None:
        if isinstance(event, PermissionAsked):
            self._permission(event)
        elif isinstance(event, DoomLoop):
            self.screen.line(f"The model calls {clean(event.name)} {event.count} times in a row with the same arguments.", "yellow")
            event.reply(self.keyboard.answer("Run it again? [y/N] ").lower() in ("y", "yes"))

    def _permission(self, event: PermissionAsked) -> None:
        self.screen.line(question(event), "bold")
        if event.detail:
            self.render.whole_diff(event.detail)
        always = "all edits in this folder" if event.permission == "edit" else "exactly this"
        answer = self.keyboard.answer(f"[y]es, [a]lways ({always}, this session), [n]o, or why not: ")
        word = answer.lower()
        if word in ("y", "yes"):
            event.reply("once")
        elif word in ("a", "always"):
            event.reply("always")
        else:
            event.reply("no", "" if word in ("", "n", "no") else answer)
