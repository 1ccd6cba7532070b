"""Questions to the user during a run: all of what is decided on is shown, exactly, before an answer
is taken.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from coder.cli.diff import diff_rows
from coder.cli.input import Keyboard, edited
from coder.cli.render import Renderer
from coder.cli.text_rows import Parts, cell_count, one_line, wrap
from coder.cli.wording import by_number
from coder.events import DoomLoop, Event, PermissionAsked, QuestionAsked, innermost
from coder.permissions.rules import KINDS
from coder.permissions.sanitize import escape_invisible, is_invisible
from coder.permissions.shell import parse
from coder.settings import needed

if TYPE_CHECKING:
    from coder.devtools.step import Stepper
    from coder.extend.prompt_files import PromptFile, PromptFiles
    from coder.session import Session

HEADINGS = {
    "bash": "Run this command?",
    "edit": "Make this change?",
    "external_directory": "Access a path outside the folder?",
    "mcp": "Call this tool of an MCP server?",
    "unconfined": "Run this command outside the sandbox?",
}
# What the key for "always" means, if it is more than the very same once more
EXACTLY = {"mcp": "this tool", "edit": "this file", "read": "this file"}
ANSWERS = {"yes": "y", "always": "a", "pattern": "p", "no": "n"}
TRUST = {"y": "yes", "n": "no"}  # others: later
# Programs whose first word is a command of theirs
WITH_COMMANDS = {"cargo", "git", "go", "npm", "pip", "pnpm", "uv", "yarn"}
MAX_CHOICES = 12
MAX_ROWS = 40  # shown of all files together that ask for trust
MAX_CHARACTERS = 4000


def exact_diff(changes: str) -> list[Parts]:
    """All of a diff, with its styles, and with what cannot be seen made visible."""
    return [[("  ", ""), *row] for row in diff_rows(changes, escape_invisible)]


def key_of(answer: str) -> str:
    """The key that an answer means, if it is one or its word."""
    word = answer.lower()
    return ANSWERS.get(word, word)


class Prompter:
    """Answer the events that ask, from the terminal."""

    def __init__(self, render: Renderer, keyboard: Keyboard) -> None:
        self.render = render
        self.screen = render.screen
        self.keyboard = keyboard
        self.stepper: Stepper | None = None  # once the session was to stop

    def __call__(self, event: Event) -> None:
        name = self.render.name_of(event)
        asks = f"{name} asks: " if name else ""
        question = innermost(event)
        if isinstance(question, PermissionAsked):
            self._ask_permission(question, asks)
        elif isinstance(question, DoomLoop):
            self._ask_to_repeat(question, asks)
        elif isinstance(question, QuestionAsked):
            self._ask_for_model(question, asks)

    def choose(self, values: Sequence[str], rows: Iterable[tuple[str, str]], question: str) -> str:
        """The value whose number is entered, or what is entered.

        `rows`: of each a row, and what is below it.
        """
        width = self.screen.width - 1
        # The first row stays on the screen, above two rows for each, and the question
        room = shutil.get_terminal_size().lines // 2 - 2
        most = max(1, min(MAX_CHOICES, room))
        for number, (row, below) in enumerate(islice(rows, most), 1):
            self.screen.line(one_line(f"{number:>3}  {row}", width))
            if below:
                self.screen.line(one_line(f"     {below}", width), "dim")
        more = len(values) - most
        if more > 0:
            self.screen.line(f"     and {more} more", "dim")
        return by_number(values, self.keyboard.answer(question, words=question))

    def ask_plan(self) -> str:
        """Ask about the plan above: "yes", "" for not now, or what to change in it.

        It takes a line, no single key: what one says about a plan may begin with any letter.
        """
        question = "Go on with this plan? "
        prompt = self._wrap(f"{question}yes, no, or what to\xa0change:\xa0")
        answer = self.keyboard.answer(prompt, words=question)
        key = key_of(answer)
        if key == "y":
            return "yes"
        return "" if key == "n" else answer

    def _wrap(self, prompt: str) -> str:
        """A prompt in rows of the screen; what a hard blank joins stays together."""
        return wrap(prompt, self.screen.width - 1).replace("\xa0", " ")

    # -- of a run

    def _ask_to_repeat(self, question: DoomLoop, asks: str) -> None:
        repeated = f"{question.name} was called {question.count} times with the same arguments."
        self.screen.line(f"{asks}{repeated}", "yellow")
        key = key_of(self.keyboard.answer("Run it again? [y/N] ", "yn"))
        question.reply(key == "y")

    def _ask_for_model(self, question: QuestionAsked, asks: str) -> None:
        options = question.options
        self.screen.line(f"{asks}{question.question}", "bold")
        for number, option in enumerate(options, 1):
            self.screen.line(f"  {number}. {option}")
        keys = ""
        if len(options) < 10:
            keys = "123456789"[: len(options)]
        answer = self.keyboard.answer("answer: ", keys, "answer: ")
        question.reply(by_number(options, answer))

    def _ask_permission(self, question: PermissionAsked, asks: str) -> None:
        """Show all of it, what is to be done directly above the answer, and reply."""
        permission = question.permission
        self._show_permission(question, asks + HEADINGS.get(permission, f"Allow {permission}?"))
        always = always_offers(question)
        offers = [f"[{key}]{text}, " for key, (text, _) in always.items()]
        prompt = self._wrap(f"[y]es, {''.join(offers)}[n]o, or\xa0why\xa0not:\xa0")
        keys = "yn" + "".join(always)
        answer = self.keyboard.answer(prompt, keys, "why not: ")
        key = key_of(answer)
        if key == "y":
            question.reply("once")
        elif key in always:
            _, pattern = always[key]
            question.reply("always", remember=pattern)
        else:
            question.reply("no", reason_of(answer))

    def _show_permission(self, question: PermissionAsked, heading: str) -> None:
        """Show all of it; if the screen cannot, once more the beginning."""
        what = escape_invisible(question.pattern)
        rows = [[(heading, "bold")]]
        for line in what.split("\n"):
            rows.append([(f"  {line}", "bold")])
        if question.why:
            why = escape_invisible(question.why)
            rows.append([(f"  ({why})", "yellow")])
        if question.detail:
            rows += exact_diff(question.detail)
        warning = warning_of(question.pattern + question.detail)
        if warning:
            rows.append([(warning, "yellow")])
        for row in rows:
            self.screen.exact_line(*row)
        taken = sum(self._height(row) for row in rows)
        room = shutil.get_terminal_size().lines - 3
        if taken > room:
            self.screen.line(f"({taken} rows, more than the screen shows.)", "yellow")
            summary = one_line(f"{heading} {what}", self.screen.width)
            self.screen.exact_line((summary, "bold"))

    def _height(self, row: Parts) -> int:
        """How many rows of the screen a row takes."""
        text = "".join(text for text, _ in row)
        return 1 + cell_count(text) // self.screen.width

    # -- step by step

    def step(self, session: Session) -> bool:
        """Stop before each request and each tool of the session, or no longer if it does already.

        Returns whether it does from now on. Raises ConfigError.
        """
        if self.stepper:
            self.stepper.is_on = not self.stepper.is_on
            return self.stepper.is_on
        module = needed("coder.devtools.step", "--step")
        hooks = session.agent.hooks.hooks
        self.stepper = module.Stepper(
            *hooks,
            ask=self._ask_step,
            show=self._show_step,
            edit=edited,
        )
        hooks[:] = [self.stepper]
        return True

    def _ask_step(self, question: str, keys: str) -> str:
        self.screen.status()
        return self.keyboard.answer(question, keys)

    def _show_step(self, text: str) -> None:
        for line in text.split("\n"):
            self.screen.line(escape_invisible(line), "" if line.startswith("  ") else "bold")

    # -- before a run

    def ask_trust(self, known: PromptFiles, files: Sequence[PromptFile]) -> bool:
        """Show text of the project that would instruct the model, ask, keep a clear answer.

        Whether it is yes.
        """
        self.screen.line("This project brings text that would instruct the model:", "bold")
        for file in files:
            self._show_file(file, share=len(files))
        word = self.keyboard.answer("Use it? [y]es, [n]o, or Enter for not now: ", "yn")
        answer = TRUST.get(key_of(word), "later")
        known.answer(files, answer)
        return answer == "yes"

    def _show_file(self, file: PromptFile, share: int) -> None:
        """Show the beginning of a file, so much that this many files have room."""
        changed = " has changed since your answer" if file.answer == "changed" else ""
        self.screen.exact_line((f"  {os.path.relpath(file.path)}{changed}", "bold"))
        most_characters = max(400, MAX_CHARACTERS // share)
        most_rows = max(5, MAX_ROWS // share)
        rows = file.text[:most_characters].split("\n")[:most_rows]
        for row in rows:
            self.screen.exact_line((f"    {row}", ""))
        left = len(file.text) - len("\n".join(rows))
        self._show_left(left, "more characters in the file")
        if file.is_skill:
            others = file.path.parent.rglob("*")
            number = sum(path.is_file() for path in others) - 1
            self._show_left(number, "more files in its folder")

    def _show_left(self, number: int, what: str) -> None:
        if number:
            self.screen.line(f"    ({number:,} {what})", "yellow")


def warning_of(text: str) -> str:
    """A warning of what cannot be seen in a text, "" if there is nothing."""
    hidden = sum(is_invisible(character) for character in text)
    if not hidden:
        return ""
    return f"Warning: {hidden} invisible or control characters, each shown as <U+…>."


def reason_of(answer: str) -> str:
    """Why not: what follows the word no, or all words."""
    word, _, rest = answer.partition(" ")
    if key_of(word) == "n":
        return rest.strip()
    return answer


# ---- what "always" may mean ----------------------------------------------------------------------


def always_offers(question: PermissionAsked) -> dict[str, tuple[str, str]]:
    """The keys that allow more than this once: their words, and what is remembered."""
    offers: dict[str, tuple[str, str]] = {}
    if not question.remember:
        return offers
    is_path = question.permission in ("edit", "external_directory")
    if not is_path or not re.search("[*?]|, ", question.pattern):
        what = EXACTLY.get(question.permission, "exactly this")
        offers["a"] = f"lways {what}", question.pattern
    words, pattern = _wider(question)
    if pattern:
        offers["p"] = f" always {escape_invisible(words)}", pattern
    return offers


def _wider(question: PermissionAsked) -> tuple[str, str]:
    """What else can be allowed for the session, in words and as a pattern; "" if there is
    nothing.
    """
    kind = question.permission
    stored = question.remember
    if kind == "edit":
        return "edit here", stored
    if kind == "external_directory":
        folder = stored.removesuffix("/*") or "/"
        return f"read in {folder}", stored
    if kind == "mcp":
        server, _, _ = question.pattern.partition("__")
        return f"tools of {server}", f"{server}__*"
    if kind == "bash":
        pattern = _command_pattern(question.pattern)
        return pattern, pattern
    if kind not in KINDS:  # of a tool of the user's own
        return kind, "*"
    return "", ""


def _command_pattern(command: str) -> str:
    """A pattern for a plain command of a program that has commands of its own: `git diff *`."""
    plain = parse(command)
    if not plain or len(plain) > 1:
        return ""
    words = plain[0]
    if words[0] not in WITH_COMMANDS:
        return ""
    size = 3 if words[1:2] in (["run"], ["exec"]) else 2  # with the name of the script
    words = words[:size]
    is_plain = all(re.fullmatch("[a-z][a-z:-]*", word) for word in words)
    if len(words) < size or not is_plain:
        return ""
    return " ".join(words) + " *"
