"""Questions to the user during a run: everything is shown before an answer is taken.

A consumer of the events that ask, those of sub-agents among them. What is shown is exact: the words that the user
sees are those that are acted on.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

from coder.cli.input import Keyboard
from coder.cli.render import Renderer, Row, diff_rows
from coder.cli.screen import cell_count
from coder.events import DoomLoop, Event, Nested, PermissionAsked, QuestionAsked
from coder.permissions.rules import fits
from coder.permissions.sanitize import escape_invisible, is_invisible

PAGE_ROWS = 200  # shown at once: no terminal can be scrolled back for ever
HEADINGS = {
    "bash": "Run this command?",
    "edit": "Make this change?",
    "external_directory": "Access a path outside the folder?",
    "unconfined": "Run this command outside the sandbox?",
}


def exact_diff(changes: str) -> Iterator[Row]:
    """All of a diff, with its styles, and with what cannot be seen made visible."""
    for line, style in diff_rows(changes):
        yield f"  {fold_blanks(escape_invisible(line))}", style


def fold_blanks(text: str) -> str:
    """With a number in the place of blanks that would push the rest out of sight."""
    text = re.sub("[ \t]{60,}", lambda run: f" <{len(run[0])} blanks> ", text)
    return re.sub(
        r"\n(?:[ \t]*\n){4,}", lambda run: f"\n<{run[0].count(chr(10)) - 1} empty lines>\n", text
    )


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
            case PermissionAsked() as asked:
                rows = list(_question(asked))
                self.screen.line(
                    f"{asks}{HEADINGS.get(asked.permission) or asked.permission}", "bold"
                )
                if self._show(rows):
                    prompt = self._choices(asked)
                    while problem := _reply(asked, self.keyboard.answer(prompt)):
                        self.screen.line(problem, "yellow")
            case DoomLoop(name=name, count=count):
                what = f"{asks}{name} was called {count} times in a row with the same arguments."
                self.screen.line(what, "yellow")
                event.reply(self.keyboard.answer("Run it again? [y/N] ").lower() in ("y", "yes"))
            case QuestionAsked(question=question, options=options):
                self.screen.line(f"{asks}{question}", "bold")
                for number, option in enumerate(options, 1):
                    self.screen.line(f"  {number}. {option}")
                answer = self.keyboard.answer("answer: ")
                by_number = dict(zip(map(str, range(1, len(options) + 1)), options))
                event.reply(by_number.get(answer, answer))

    def _show(self, rows: list[Row]) -> bool:
        """Show all of it, page by page; False where the user does not want to see the rest."""
        shown = page = 0
        for place, row in enumerate(rows):
            self.screen.exact_line(row)
            taken = 1 + cell_count(row[0]) // self.screen.width
            shown, page = shown + taken, page + taken
            if page >= PAGE_ROWS and (left := len(rows) - place - 1):
                if (
                    self.keyboard.answer(f"-- {left} more lines: m shows them, Enter denies -- ")
                    != "m"
                ):
                    return False
                page = 0
        if shown >= shutil.get_terminal_size().lines - 2:
            self.screen.line(f"({shown} rows, more than the screen shows.)", "yellow")
        return True

    def _choices(self, event: PermissionAsked) -> str:
        """The prompt, behind a line with what "always" would store."""
        if not event.remember:
            return "[y]es, [n]o (or Enter), or why not: "
        pattern = f"{event.permission}: {escape_invisible(event.remember)}"
        what = "exactly this" if event.remember == event.pattern else pattern
        self.screen.line(
            f"[a]lways allows {what} in this session, `a PATTERN` what fits it. Enter alone denies."
        )
        return "[y]es, [a]lways, [n]o, or why not: "


def _question(event: PermissionAsked) -> Iterator[Row]:
    for line in fold_blanks(escape_invisible(event.pattern)).split("\n"):
        yield f"  {line}", "bold"
    if event.why:
        yield f"  ({escape_invisible(event.why)})", "yellow"
    if event.detail:
        yield from exact_diff(event.detail)
    if hidden := sum(map(is_invisible, event.pattern + event.detail)):
        yield f"Warning: {hidden} invisible or control characters, each shown as <U+…>.", "yellow"


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
