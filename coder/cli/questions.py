"""Questions to the person during a run: everything is shown before the answer is taken.

A consumer of the events that ask, a sub-agent's among them.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from coder.cli.children import unwrapped
from coder.cli.keyboard import Keyboard
from coder.cli.render import Renderer, question
from coder.cli.screen import Screen
from coder.events import DoomLoop, Event, PermissionAsked, QuestionAsked
from coder.permissions.rules import fits
from coder.providers.text import visible

PAGE = 200  # rows that are shown at once: what no terminal can be scrolled back to is not shown


class Asker:
    """Answers the events that ask, from the terminal."""

    def __init__(self, screen: Screen, render: Renderer, keyboard: Keyboard) -> None:
        self.screen, self.render, self.keyboard = screen, render, keyboard

    def __call__(self, event: Event) -> None:
        inner = unwrapped(event)[2]
        if not isinstance(inner, PermissionAsked | DoomLoop | QuestionAsked):
            return
        who = self.render.children.name(event)
        if isinstance(inner, PermissionAsked):
            self._permission(inner, who)
        elif isinstance(inner, DoomLoop):
            self.screen.line(
                f"{who or 'The model'} calls {inner.name} {inner.count} times in a row with the same arguments.",
                "yellow",
            )
            inner.reply(self.keyboard.answer("Run it again? [y/N] ").lower() in ("y", "yes"))
        else:
            self.screen.line(f"{f'{who} asks: ' if who else ''}{inner.question}", "bold")
            for number, option in enumerate(inner.options, 1):
                self.screen.line(f"  {number}. {option}")
            inner.reply(self._chosen(self.keyboard.answer("answer: "), inner.options))

    def _chosen(self, answer: str, options: Sequence[str]) -> str:
        """By its number, or in one's own words."""
        return (
            options[int(answer) - 1]
            if answer.isdecimal() and 0 < int(answer) <= len(options)
            else answer
        )

    # -- leave

    def _permission(self, event: PermissionAsked, who: str) -> None:
        """Show it, and take an answer until there is one: a word that means nothing is the reason for a no."""
        refusal = self._shown(question(event, who))
        if refusal is not None:
            self._plain(event, refusal)
            return
        prompt = self._prompt(event)
        while True:
            answer = self.keyboard.answer(prompt)
            word, _, rest = answer.partition(" ")
            pattern = rest.strip() if word.lower() in ("a", "always") else ""
            if pattern and event.remember and fits(pattern, event.pattern):
                self.screen.line(
                    f"From now on, this session: {event.permission}: {visible(pattern)}", "dim"
                )
                event.reply("always", remember=pattern)
            elif pattern:
                why = "does not fit this" if event.remember else "cannot be remembered for this"
                self.screen.line(
                    f"{visible(pattern)} {why}. If it is meant as a reason, begin with `n`.",
                    "yellow",
                )
                continue
            elif word.lower() in ("a", "always") and not event.remember:
                self.screen.line("This is asked each time: y or n.", "yellow")
                continue
            else:
                self._plain(event, answer)
            return

    def _plain(self, event: PermissionAsked, answer: str) -> None:
        word, _, rest = answer.partition(" ")
        if answer.lower() in ("y", "yes"):
            event.reply("once")
        elif answer.lower() in ("a", "always"):
            event.reply("always")
        else:
            event.reply("no", rest.strip() if word.lower() in ("n", "no") else answer)

    def _prompt(self, event: PermissionAsked) -> str:
        """The choices, behind a line with what "always" would store, as it will be stored."""
        if not event.remember:
            return "[y]es, [n]o (or Enter), or why not: "
        stored = (
            "exactly this"
            if event.remember == event.pattern
            else f"{event.permission}: {visible(event.remember)}"
        )
        self.screen.line(
            f"[a]lways allows {stored} in this session, `a PATTERN` what fits it. "
            "Enter alone is no."
        )
        return "[y]es, [a]lways, [n]o, or why not: "

    def _shown(self, lines: Sequence[tuple[str, str]]) -> str | None:
        """Put all of it on the screen, page by page; a no, with its reason, where the person does not want to see the rest."""
        rows, page = 0, 0
        for place, (text, style) in enumerate(lines):
            self.screen.exactly(text, style)
            taken = self.screen.rows(text)
            rows, page = rows + taken, page + taken
            if page >= PAGE and place < len(lines) - 1:
                answer = self.keyboard.answer(
                    f"-- {len(lines) - place - 1} more lines; Enter shows them, n says no -- "
                )
                if answer or self.keyboard.given_up:
                    return "" if answer.lower() in ("y", "yes", "a", "always") else answer
                page = 0
        if rows >= shutil.get_terminal_size().lines - 1:
            self.screen.line(
                f"({rows} rows, more than the screen holds: it begins further up.)", "yellow"
            )
        return None
