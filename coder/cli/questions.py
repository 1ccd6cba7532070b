"""Questions to the user during a run: all of what is decided on is shown, exactly, before an answer is taken."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from coder.cli.calls import Parts, diff_rows
from coder.cli.input import Keyboard
from coder.cli.render import Renderer
from coder.cli.screen import cell_count
from coder.events import DoomLoop, Event, Nested, PermissionAsked, QuestionAsked
from coder.permissions.rules import fits
from coder.permissions.sanitize import escape_invisible, is_invisible

HEADINGS = {
    "bash": "Run this command?",
    "edit": "Make this change?",
    "external_directory": "Access a path outside the folder?",
    "unconfined": "Run this command outside the sandbox?",
}


def exact_diff(changes: str) -> list[Parts]:
    """All of a diff, with its styles, and with what cannot be seen made visible."""
    return [[("  ", ""), *row] for row in diff_rows(changes, escape_invisible)]


class Prompter:
    """Answer the events that ask, from the terminal."""

    def __init__(self, render: Renderer, keyboard: Keyboard) -> None:
        self.render, self.screen, self.keyboard = render, render.screen, keyboard

    def __call__(self, event: Event) -> None:
        name = self.render.name_of(event)
        asks = f"{name} asks: " if name else ""
        while isinstance(event, Nested):
            event = event.event
        match event:
            case PermissionAsked():
                self._ask_permission(event, asks)
            case DoomLoop():
                repeated = f"{event.name} was called {event.count} times with the same arguments."
                self.screen.line(f"{asks}{repeated}", "yellow")
                event.reply(self.keyboard.answer("Run it again? [y/N] ").lower() in ("y", "yes"))
            case QuestionAsked():
                self.screen.line(f"{asks}{event.question}", "bold")
                for number, option in enumerate(event.options, 1):
                    self.screen.line(f"  {number}. {option}")
                answer = self.keyboard.answer("answer: ")
                by_number = {str(n): option for n, option in enumerate(event.options, 1)}
                event.reply(by_number.get(answer, answer))

    def _ask_permission(self, event: PermissionAsked, asks: str) -> None:
        """Show all of it, and ask until the answer means something."""
        heading = HEADINGS.get(event.permission, f"Allow {event.permission}?")
        rows = [[(f"{asks}{heading}", "bold")], *_question(event)]
        for row in rows:
            self.screen.exact_line(*row)
        texts = ("".join(text for text, _ in row) for row in rows)
        taken = sum(1 + cell_count(text) // self.screen.width for text in texts)
        if taken > shutil.get_terminal_size().lines - 3:
            self.screen.line(f"({taken} rows, more than the screen shows.)", "yellow")
        prompt = "[y]es, [n]o (or Enter), or why not: "
        if event.remember:
            pattern = f"{event.permission}: {escape_invisible(event.remember)}"
            what = "exactly this" if event.remember == event.pattern else pattern
            always = f"[a]lways allows {what} in this session, `a PATTERN` what fits it."
            self.screen.line(f"{always} Enter alone denies.")
            prompt = "[y]es, [a]lways, [n]o, or why not: "
        while problem := _reply(event, self.keyboard.answer(prompt)):
            self.screen.line(problem, "yellow")


def _question(event: PermissionAsked) -> Iterator[Parts]:
    for line in escape_invisible(event.pattern).split("\n"):
        yield [(f"  {line}", "bold")]
    if event.why:
        yield [(f"  ({escape_invisible(event.why)})", "yellow")]
    if event.detail:
        yield from exact_diff(event.detail)
    if hidden := sum(map(is_invisible, event.pattern + event.detail)):
        warning = f"Warning: {hidden} invisible or control characters, each shown as <U+…>."
        yield [(warning, "yellow")]


def _reply(event: PermissionAsked, answer: str) -> str:
    """Reply with it; or why it is no answer. Words without a meaning are the reason of a denial."""
    word, _, rest = answer.partition(" ")
    rest = rest.strip()
    match word.lower():
        case "y" | "yes" if not rest:
            event.reply("once")
        case "a" | "always" if not event.remember:
            return "This cannot be allowed for the session: y or n."
        case "a" | "always" if rest and not fits(rest, event.pattern):
            return f"{escape_invisible(rest)} does not match this. A reason begins with `n`."
        case "a" | "always":
            event.reply("always", remember=rest)
        case "n" | "no":
            event.reply("no", rest)
        case _:
            event.reply("no", answer)
    return ""
