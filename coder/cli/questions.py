"""Questions to the user during a run: everything is shown before an answer is taken.

A consumer of the events that ask, those of sub-agents among them. What is shown is exact: the words that the user
sees are those that are acted on.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence

from coder.cli.input import Keyboard
from coder.cli.render import DIFF_STYLES
from coder.cli.screen import Screen, cell_count
from coder.cli.wording import diff_lines
from coder.cli.workers import Subagents, unwrap
from coder.events import DoomLoop, Event, PermissionAsked, QuestionAsked
from coder.permissions.rules import fits
from coder.permissions.sanitize import escape_invisible, is_invisible

PAGE_ROWS = 200  # shown at once: no terminal can be scrolled back for ever
MAX_BLANKS = 60  # in a row
HEADINGS = {
    "bash": "Run this command?",
    "edit": "Make this change?",
    "external_directory": "Access a path outside the folder?",
    "unconfined": "Run this command outside the sandbox?",
}

Line = tuple[str, str]  # text, style


def exact_diff(changes: str) -> Iterator[Line]:
    """All of a diff, with its styles, and with what cannot be seen made visible."""
    for kind, line in diff_lines(changes):
        text = fold_blanks(escape_invisible(line.expandtabs(4)))
        yield f"  {text}", DIFF_STYLES.get(kind, "dim")


def fold_blanks(text: str) -> str:
    """With a number in the place of blanks that would push the rest out of sight."""
    text = re.sub(f"[ \t]{{{MAX_BLANKS},}}", lambda run: f" <{len(run[0])} blanks> ", text)
    return re.sub(
        r"\n(?:[ \t]*\n){4,}", lambda run: f"\n<{run[0].count(chr(10)) - 1} empty lines>\n", text
    )


class Prompter:
    """Answer the events that ask, from the terminal."""

    def __init__(self, screen: Screen, subagents: Subagents, keyboard: Keyboard) -> None:
        self.screen, self.subagents, self.keyboard = screen, subagents, keyboard

    def __call__(self, event: Event) -> None:
        worker = self.subagents.worker_of(event)
        who = worker.name if worker else ""
        match unwrap(event)[2]:
            case PermissionAsked() as asked:
                self._ask_permission(asked, f"{who} asks: " if who else "")
            case DoomLoop(name=name, count=count) as repeated:
                what = f"{who or 'The model'} calls {name} {count} times in a row"
                self.screen.line(f"{what} with the same arguments.", "yellow")
                answer = self.keyboard.answer("Run it again? [y/N] ")
                repeated.reply(answer.lower() in ("y", "yes"))
            case QuestionAsked(question=question, options=options) as asked:
                self.screen.line(f"{f'{who} asks: ' if who else ''}{question}", "bold")
                for number, option in enumerate(options, 1):
                    self.screen.line(f"  {number}. {option}")
                answer = self.keyboard.answer("answer: ")
                by_number = dict(zip(map(str, range(1, len(options) + 1)), options))
                asked.reply(by_number.get(answer, answer))

    # -- permission

    def _ask_permission(self, event: PermissionAsked, who: str) -> None:
        """Show all of it, and ask until the answer means something."""
        reason = self._show_pages(list(self._question(event, who)))
        if reason is not None:
            event.reply("no", reason)
            return
        prompt = self._choices(event)
        while problem := self._take_answer(event, self.keyboard.answer(prompt)):
            self.screen.line(problem, "yellow")

    def _question(self, event: PermissionAsked, who: str) -> Iterator[Line]:
        yield f"{who}{HEADINGS.get(event.permission, f'Allow {event.permission}?')}", "bold"
        for line in fold_blanks(escape_invisible(event.pattern)).split("\n"):
            yield f"  {line}", "bold"
        if event.why:
            yield f"  ({escape_invisible(event.why)})", "yellow"
        if event.detail:
            yield from exact_diff(event.detail)
        if hidden := sum(map(is_invisible, event.pattern + event.detail)):
            characters = f"{hidden} character{'s' if hidden != 1 else ''}"
            yield (
                f"Warning: {characters} that cannot be seen or would drive the terminal; "
                "each is shown as <U+…>.",
                "yellow",
            )

    def _choices(self, event: PermissionAsked) -> str:
        """The prompt, behind a line with what "always" would store."""
        if not event.remember:
            return "[y]es, [n]o (or Enter), or why not: "
        exactly = event.remember == event.pattern
        pattern = f"{event.permission}: {escape_invisible(event.remember)}"
        self.screen.line(
            f"[a]lways allows {'exactly this' if exactly else pattern} in this session, "
            "`a PATTERN` what fits it. Enter alone denies."
        )
        return "[y]es, [a]lways, [n]o, or why not: "

    def _take_answer(self, event: PermissionAsked, answer: str) -> str:
        """Reply with it; or why it is no answer. A word without a meaning is the reason for a denial."""
        word, _, rest = answer.partition(" ")
        pattern = rest.strip()
        match word.lower():
            case "y" | "yes" if not pattern:
                event.reply("once")
            case "a" | "always" if pattern and not (
                event.remember and fits(pattern, event.pattern)
            ):
                why = "does not match this" if event.remember else "cannot be remembered for this"
                return f"{escape_invisible(pattern)} {why}. To give it as a reason, begin with `n`."
            case "a" | "always" if not event.remember:
                return "This cannot be allowed for the session: y or n."
            case "a" | "always":
                if pattern:
                    what = f"{event.permission}: {escape_invisible(pattern)}"
                    self.screen.line(f"From now on, this session: {what}", "dim")
                event.reply("always", remember=pattern)
            case "n" | "no":
                event.reply("no", pattern)
            case _:
                event.reply("no", answer)
        return ""

    def _show_pages(self, lines: Sequence[Line]) -> str | None:
        """Show all lines, page by page; where the user does not want to see the rest, the reason of a denial."""
        rows = page = 0
        for left, (text, style) in zip(range(len(lines) - 1, -1, -1), lines):
            self.screen.exact_line(text, style)
            taken = max(1, -(-cell_count(text.expandtabs()) // self.screen.width))
            rows, page = rows + taken, page + taken
            if page >= PAGE_ROWS and left:
                prompt = f"-- {left} more lines; Enter shows them, n denies -- "
                answer = self.keyboard.answer(prompt)
                if answer or self.keyboard.given_up:
                    word, _, reason = answer.partition(" ")
                    if word.lower() in ("n", "no", "y", "yes", "a", "always"):
                        return reason.strip()
                    return answer
                page = 0
        if rows >= shutil.get_terminal_size().lines - 1:
            more = f"({rows} rows, more than the screen shows: it begins further up.)"
            self.screen.line(more, "yellow")
        return None
