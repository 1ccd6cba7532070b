"""The commands that deal with conversations: taking back, looking, going on with another one, naming, writing out."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coder.cli.keys import silent_keys
from coder.cli.process import defer_sigint, needed
from coder.cli.questions import exact_diff
from coder.cli.screen import one_line
from coder.cli.settings import ConfigError
from coder.cli.wording import by_number, first_of, session_line, words_of
from coder.sessions.snapshots import UndoResult

if TYPE_CHECKING:
    from coder.cli.app import App
    from coder.cli.conversation import Conversation
    from coder.cli.screen import Screen
    from coder.types import Message

MAX_CHOICES = 12


class ConversationCommands:
    """One method each, and what all commands show and ask with."""

    def __init__(self, repl: Any) -> None:  # a Repl, which imports these
        self.repl = repl
        self.app: App = repl.app
        self.screen: Screen = repl.screen
        self.conversation: Conversation = repl.conversation

    def _warn(self, text: str) -> None:
        self.screen.line(text, "yellow")

    def _note(self, text: str) -> None:
        self.screen.line(text, "dim")

    def _choose(self, values: Sequence[str], rows: Iterable[tuple[str, str]], question: str) -> str:
        """The value whose number is entered, or what is entered. `rows`: of each a row, and what stands below it."""
        width = self.screen.width - 1
        # The first row stays on the screen, above two rows for each, and the question
        most = max(1, min(MAX_CHOICES, shutil.get_terminal_size().lines // 2 - 2))
        for number, (row, below) in enumerate(islice(rows, most), 1):
            self.screen.line(one_line(f"{number:>3}  {row}", width))
            if below:
                self._note(one_line(f"     {below}", width))
        if values[most:]:
            self._note(f"     and {len(values) - most} more")
        return by_number(values, str(self.repl.keyboard.answer(question, words=question)))

    # -- the last run

    def undo(self, argument: str) -> None:
        if prompt := self._travel("Undone", self.conversation.snapshots.undo):
            words = " ".join(words_of(prompt).split())
            self.repl.keyboard.early.insert(0, words)  # to be worded in another way

    def redo(self, argument: str) -> None:
        self._travel("Redone", self.conversation.snapshots.redo)

    def _travel(self, done: str, how: Callable[[list[Message]], UndoResult]) -> str:
        """Undo or redo, which must not be left half done: a Ctrl+C meanwhile changes nothing. The run's prompt."""
        result = UndoResult(problem="Nothing was done.")
        with contextlib.suppress(KeyboardInterrupt), silent_keys(), defer_sigint():
            result = how(self.app.agent.messages)
            self.conversation.settle()
        if result.problem:
            self._warn(result.problem)
        else:
            self.screen.line(f"{done}: {first_of(result.paths) or 'no file was changed'}.")
        if result.lost:
            self._warn(f"Not restored, since the contents are gone: {first_of(result.lost)}.")
        return result.prompt

    def diff(self, argument: str) -> None:
        snapshots = self.conversation.snapshots
        run = snapshots.runs[-1] if snapshots.runs and argument != "all" else None
        changes = snapshots.diff(run) if snapshots.runs else ""
        for row in exact_diff(changes) if changes else [[("No file was changed.", "dim")]]:
            self.screen.exact_line(*row)

    def last(self, argument: str) -> None:
        if not self.repl.render.last:
            self._note("No tool was called yet.")
        self.repl.render.show_last()

    # -- conversations

    def new(self, argument: str) -> None:
        self.conversation.begin()
        self._note("A new conversation.")

    def resume(self, argument: str) -> None:
        """By its number in the list, its name, its id, or the beginning of one."""
        infos, store = self.conversation.resumable(), self.conversation.store
        ids = [info.id for info in infos]
        if argument:
            argument = by_number(ids, argument)
        elif infos:
            width = self.screen.width - 6
            lines = (session_line(info, width=width) for info in infos)
            ends = (f"{one_line(ask, width // 2)} → {text}" for ask, text in map(store.ending, ids))
            argument = self._choose(ids, zip(lines, ends), "number, name or id: ")
        else:
            self._note("There is no older conversation in this folder.")
        if argument:
            self.conversation.resume(argument)
            self.screen.line()
            self.repl.replay()

    def name(self, argument: str) -> None:
        if argument:
            self.conversation.rename(argument)
        title = self.conversation.recorder.info.title
        self._note(f"This conversation: {title or 'without a name; /name TITLE gives one'}")

    def export(self, argument: str) -> None:
        """Into the working folder, never over a file that is there. The ending says the format."""
        recorder = self.conversation.recorder
        recorder.sync()
        module = needed("coder.sessions.export", "/export")
        path = Path(os.path.expanduser(argument or f"session-{recorder.session_id}.md"))
        if (form := path.suffix.removeprefix(".") or "md") not in ("md", "html", "json"):
            raise ConfigError(f"a file of an export ends in .md, .html or .json, not in .{form}")
        redactor = module.redactor(*self.app.settings.keys)
        text = module.export(self.conversation.store, recorder.session_id, form, redactor)
        try:
            number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(number, "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        self.screen.line(f"Written to {path}.")
