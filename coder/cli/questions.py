"""Questions to the user during a run: all of what is decided on is shown, exactly, before an answer is taken."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from coder.cli.diff import diff_rows
from coder.cli.input import Keyboard
from coder.cli.render import Renderer
from coder.cli.text_rows import Parts, cell_count, one_line, wrap
from coder.cli.wording import by_number
from coder.events import DoomLoop, Event, Nested, PermissionAsked, QuestionAsked
from coder.permissions.rules import KINDS
from coder.permissions.sanitize import escape_invisible, is_invisible
from coder.permissions.shell import parse

if TYPE_CHECKING:
    from coder.extend.prompt_files import PromptFile, PromptFiles

HEADINGS = {
    "bash": "Run this command?",
    "edit": "Make this change?",
    "external_directory": "Access a path outside the folder?",
    "mcp": "Call this tool of an MCP server?",
    "unconfined": "Run this command outside the sandbox?",
}
# What the key for "always" means, where it is more than the very same once more
EXACTLY = {"mcp": "this tool", "edit": "this file", "read": "this file"}
ANSWERS = {"yes": "y", "always": "a", "pattern": "p", "no": "n"}
# Programs whose first word is a command of theirs
WITH_COMMANDS = {"cargo", "git", "go", "npm", "pip", "pnpm", "uv", "yarn"}
MAX_CHOICES = 12
MAX_ROWS, MAX_CHARACTERS = 40, 4000  # shown of all files that ask for trust together


def exact_diff(changes: str) -> list[Parts]:
    """All of a diff, with its styles, and with what cannot be seen made visible."""
    return [[("  ", ""), *row] for row in diff_rows(changes, escape_invisible)]


class Prompter:
    """Answer the events that ask, from the terminal."""

    def __init__(self, render: Renderer, keyboard: Keyboard) -> None:
        self.render, self.screen, self.keyboard = render, render.screen, keyboard

    def choose(self, values: Sequence[str], rows: Iterable[tuple[str, str]], question: str) -> str:
        """The value whose number is entered, or what is entered. `rows`: of each a row, and what stands below it."""
        width = self.screen.width - 1
        # The first row stays on the screen, above two rows for each, and the question
        most = max(1, min(MAX_CHOICES, shutil.get_terminal_size().lines // 2 - 2))
        for number, (row, below) in enumerate(islice(rows, most), 1):
            self.screen.line(one_line(f"{number:>3}  {row}", width))
            if below:
                self.screen.line(one_line(f"     {below}", width), "dim")
        if values[most:]:
            self.screen.line(f"     and {len(values) - most} more", "dim")
        return by_number(values, str(self.keyboard.answer(question, words=question)))

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
                answer = self.keyboard.answer("Run it again? [y/N] ", "yn")
                event.reply(answer.lower() in ("y", "yes"))
            case QuestionAsked(options=options):
                self.screen.line(f"{asks}{event.question}", "bold")
                for number, option in enumerate(options, 1):
                    self.screen.line(f"  {number}. {option}")
                keys = "123456789"[: len(options)] if len(options) < 10 else ""
                event.reply(by_number(options, self.keyboard.answer("answer: ", keys, "answer: ")))

    def ask_plan(self) -> str:
        """Ask about the plan that stands above: "yes", "" for not now, or what to change in it.

        It takes a line, no single key: what one says about a plan may begin with any letter.
        """
        question = "Go on with this plan? "
        prompt = wrap(f"{question}yes, no, or what to\xa0change:\xa0", self.screen.width - 1)
        answer = self.keyboard.answer(prompt.replace("\xa0", " "), words=question)
        word = ANSWERS.get(answer.lower(), answer.lower())
        return {"y": "yes", "n": ""}.get(word, answer)

    def ask_trust(self, known: PromptFiles, files: Sequence[PromptFile]) -> bool:
        """Show text of the project that would instruct the model, ask, keep a clear answer. Whether it is yes."""
        self.screen.line("This project brings text that would instruct the model:", "bold")
        for each in files:
            changed = " has changed since your answer" if each.answer == "changed" else ""
            self.screen.exact_line((f"  {os.path.relpath(each.path)}{changed}", "bold"))
            start = each.text[: max(400, MAX_CHARACTERS // len(files))]
            rows = start.split("\n")[: max(5, MAX_ROWS // len(files))]
            for row in rows:
                self.screen.exact_line((f"    {row}", ""))
            more = [(len(each.text) - len("\n".join(rows)), "more characters in the file")]
            if each.is_skill:
                others = sum(map(Path.is_file, each.path.parent.rglob("*"))) - 1
                more.append((others, "more files in its folder"))
            for number, what in more:
                if number:
                    self.screen.line(f"    ({number:,} {what})", "yellow")
        word = self.keyboard.answer("Use it? [y]es, [n]o, or Enter for not now: ", "yn").lower()
        answer = {"y": "yes", "n": "no"}.get(ANSWERS.get(word, word), "later")
        known.answer(files, answer)
        return answer == "yes"

    def _ask_permission(self, event: PermissionAsked, asks: str) -> None:
        """Show all of it, what is to be done directly above the answer, and reply."""
        heading = f"{asks}{HEADINGS.get(event.permission, f'Allow {event.permission}?')}"
        what = escape_invisible(event.pattern)
        rows = [[(heading, "bold")]]
        rows += [[(f"  {line}", "bold")] for line in what.split("\n")]
        if event.why:
            rows.append([(f"  ({escape_invisible(event.why)})", "yellow")])
        rows += exact_diff(event.detail) if event.detail else []
        if hidden := sum(map(is_invisible, event.pattern + event.detail)):
            warning = f"Warning: {hidden} invisible or control characters, each shown as <U+…>."
            rows.append([(warning, "yellow")])
        for row in rows:
            self.screen.exact_line(*row)
        texts = ("".join(text for text, _ in row) for row in rows)
        taken = sum(1 + cell_count(text) // self.screen.width for text in texts)
        if taken > shutil.get_terminal_size().lines - 3:
            self.screen.line(f"({taken} rows, more than the screen shows.)", "yellow")
            self.screen.exact_line((one_line(f"{heading} {what}", self.screen.width), "bold"))
        always = always_offers(event)
        offers = [f"[{key}]{text}, " for key, (text, _) in always.items()]
        prompt = "".join(["[y]es, ", *offers, "[n]o, or\xa0why\xa0not:\xa0"])
        prompt = wrap(prompt, self.screen.width - 1).replace("\xa0", " ")
        answer = self.keyboard.answer(prompt, "".join(["yn", *always]), "why not: ")
        word, _, rest = answer.partition(" ")
        key = ANSWERS.get(answer.lower(), answer.lower())
        if key == "y":
            event.reply("once")
        elif key in always:
            event.reply("always", remember=always[key][1])
        else:  # words are a reason
            event.reply("no", rest.strip() if word.lower() in ("n", "no") else answer)


def always_offers(event: PermissionAsked) -> dict[str, tuple[str, str]]:
    """The keys that allow more than this once: their words, and what is remembered."""
    offers: dict[str, tuple[str, str]] = {}
    if not event.remember:
        return offers
    is_path = event.permission in ("edit", "external_directory")
    if not (is_path and re.search("[*?]|, ", event.pattern)):
        what = EXACTLY.get(event.permission, "exactly this")
        offers["a"] = f"lways {what}", event.pattern
    words, pattern = _wider(event)
    if pattern:
        offers["p"] = f" always {escape_invisible(words)}", pattern
    return offers


def _wider(event: PermissionAsked) -> tuple[str, str]:
    """What else can be allowed for the session, in words and as a pattern; "" where there is nothing."""
    match event.permission:
        case "edit":
            return "edit here", event.remember
        case "external_directory":
            return f"read in {event.remember.removesuffix('/*') or '/'}", event.remember
        case "mcp":
            server = event.pattern.partition("__")[0]
            return f"tools of {server}", f"{server}__*"
        case "bash":
            pattern = _command_pattern(event.pattern)
            return pattern, pattern
        case kind if kind not in KINDS:  # of a tool of the user's own
            return kind, "*"
    return "", ""


def _command_pattern(command: str) -> str:
    """A pattern for a plain command of a program that has commands of its own: `git diff *`."""
    plain = parse(command) or []
    if len(plain) != 1 or plain[0][0] not in WITH_COMMANDS:
        return ""
    size = 3 if plain[0][1:2] in (["run"], ["exec"]) else 2
    words = plain[0][:size]
    is_plain = len(words) == size and all(re.fullmatch("[a-z][a-z:-]*", each) for each in words)
    return f"{' '.join(words)} *" if is_plain else ""
