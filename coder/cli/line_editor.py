"""Readline with the program's keys: what is prefilled, folded, completed and remembered."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

from coder.cli import keys
from coder.cli.process import wake_up
from coder.cli.text_rows import cell_count, one_line
from coder.permissions.sanitize import strip_controls

# With these in it, readline ends the line at a key of this program; with PASTE, it lets the program
# read a paste
SHIFT_TAB = "\x1c"
CTRL_G = "\x1d"
ESC_ENDS = "\x1e"
PASTE = "\x1a"
BINDINGS = r"""
set enable-bracketed-paste on
set show-all-if-ambiguous on
set disable-completion off
set isearch-terminators "\e\C-j\C-g"
tab: complete
"\e\C-m": "\C-v\C-j"
"\034": self-insert
"\035": self-insert
"\036": self-insert
"\032": self-insert
"\e[200~": "\032\t"
"\e[Z": "\034\C-m"
"\C-g": "\035\C-m"
$if mode=emacs
"\e\e": "\036\C-m"
"\e/": "/"
"\e!": "!"
"\e@": "@"
"\e+": "+"
$endif
"""
LIBEDIT_BINDINGS = "bind ^I rl_complete"
WITHOUT_WIDTH = "[\x01\x02]"  # readline's marks around what has no width in a prompt
MAX_HISTORY = 1000
# In the history's file: a newline of an entry, and what is between it and its folder
NEWLINE = "\x1e"
FOLDER = "\x1f"
MARGIN = 4  # rows of the screen that stay free next to a folded text or a list of candidates


def unchanged(text: str) -> str:
    return text


def no_candidates(before: str, word: str) -> Sequence[str]:
    return ()


class LineEditor:
    """The readline module with the history, this folder's entries last. `history` is a file.

    `readline` is None if Python has none. libedit in its place drops what is prefilled.
    """

    is_libedit = False

    def __init__(self, history: Path) -> None:
        keys.keep_modes()
        keys.take_utf8()
        self.history = history
        self.folder = str(Path.cwd())  # which a command may remove
        self.redact: Callable[[str], str] = unchanged  # what is saved
        # What a word can become, by the line before it and its beginning
        self.candidates: Callable[[str, str], Iterable[str]] = no_candidates
        self._new: list[str] = []  # entries that the history's file does not have
        self._completions: list[str] = []
        self._near: list[str] = []  # candidates that do not begin with the word
        self._folded = Folded()
        self.unfold = self._folded.unfold
        self._held_esc: keys.HeldEsc | None = None
        self.readline = self._load_readline()

    @property
    def can_prefill(self) -> bool:
        return self.readline is not None and not self.is_libedit

    def prefill(self, text: str, ctrl_j: str) -> None:
        """Let the next line begin with this text, and let Ctrl+J, with which a program may end an
        answer, call a function of readline's."""
        if not self.readline:
            return
        text = self._folded.fold(strip_controls(text))
        # A C function as the hook: no signal is handled, and lost, in it
        self.readline.set_startup_hook(partial(self.readline.insert_text, text) if text else None)
        self.readline.parse_and_bind(rf'"\C-j": {ctrl_j}')

    def line_so_far(self) -> str:
        return self.readline.get_line_buffer() if self.readline else ""

    @contextlib.contextmanager
    def reading(self, prompt: str, presses: int) -> Iterator[None]:
        """Around input(): wake it for signals, let so many Esc end the line, draw it again after
        a stop."""
        if self._held_esc:
            end_line = self._held_esc.ends(presses)
            with keys.drawn_again(self._held_esc.draw_again), wake_up(end_line, keys.ESC_CHECK):
                yield
            return

        def draw() -> None:
            keys.send(re.sub(WITHOUT_WIDTH, "", prompt) + self.line_so_far())

        with keys.drawn_again(draw), wake_up():
            yield

    # -- the history

    def remember(self, entries: Sequence[str]) -> None:
        """Put these entries into the history, but not the newest one again."""
        if not self.readline:
            return
        for entry in entries:
            line = self._folded.fold(entry)
            length = self.readline.get_current_history_length()
            if entry and line != self.readline.get_history_item(length):
                _add_history(self.readline, line)
                self._new.append(entry)

    def close(self) -> None:
        """Add to the history's file, which is private; a read-only home is no error."""
        from coder.tools.workspace import make_private  # late: no prompt needs it

        text = ""
        for entry in self._new:
            line = self.redact(entry).replace(FOLDER, "") + FOLDER + self.folder
            text += line.replace("\n", NEWLINE) + "\n"
        with contextlib.suppress(OSError):
            make_private(self.history.parent, close=True)
            fd = os.open(self.history, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
            with open(
                fd,
                "w",
                encoding="utf-8",
                errors="replace",
            ) as file:
                file.write(text)

    def _load_history(self, readline: ModuleType) -> None:
        with contextlib.suppress(OSError):
            lines = self.history.read_text("utf-8", "replace").split("\n")[-MAX_HISTORY:]
            entries = [line.replace(NEWLINE, "\n").partition(FOLDER) for line in lines if line]
            for entry, _, _ in sorted(entries, key=lambda parts: parts[2] == self.folder):
                _add_history(readline, self._folded.fold(entry))

    def _load_readline(self) -> ModuleType | None:
        try:
            import readline
        except ImportError:
            return None
        readline.set_auto_history(False)  # an entry is one item, and an answer is none
        self.is_libedit = "libedit" in (readline.__doc__ or "")
        bindings = BINDINGS
        if self.is_libedit:
            bindings = LIBEDIT_BINDINGS
            threading.Thread(target=keys.end_with_terminal, daemon=True).start()
        else:
            with contextlib.suppress(AttributeError, OSError, ValueError):
                self._held_esc = keys.HeldEsc(readline, end=f"{ESC_ENDS}\r")
                readline.set_completion_display_matches_hook(self._list)
        for binding in bindings.split("\n"):
            readline.parse_and_bind(binding)
        readline.set_completer_delims(" \t\n")
        readline.set_completer(self._candidate)
        self._load_history(readline)
        return readline

    # -- candidates

    def _candidate(self, word: str, number: int) -> str | None:
        """One of what the word can become. Readline also asks it about a paste, whose text takes
        the place of its mark."""
        if number == 0 and word.endswith(PASTE):  # its beginning has been read
            pasted = self._folded.fold(strip_controls(keys.read_paste()))
            self._completions = [word.removesuffix(PASTE) + pasted]
        elif number == 0:
            self._complete(word)
        return self._completions[number] if number < len(self._completions) else None

    def _complete(self, word: str) -> None:
        assert self.readline
        before = self.line_so_far()[: self.readline.get_begidx()]
        texts = [text for text in self.candidates(before, word) if text.isprintable()]
        self._near = [text for text in texts if not text.startswith(word)]
        self._completions = texts
        if self._near and len(texts) > 1:
            # What they have in common would replace the word: it is offered itself, among them
            self._completions = [word, *(f"{word}|{text}" for text in self._near)]

    def _list(self, word: str, matches: Sequence[str], longest: int) -> None:
        """Show the candidates below the line; those that only look like the word one in a row,
        the nearest first."""
        width, height = shutil.get_terminal_size()
        texts = self._near or sorted(text.rstrip() for text in matches)
        column = max(cell_count(text) for text in texts) + 2
        columns = 1 if self._near else max(1, width // column)
        fitting = max(1, height - MARGIN) * columns
        shown = texts[:fitting]
        rows = math.ceil(len(shown) / columns)
        for row in range(rows):
            line = "".join(text + " " * (column - cell_count(text)) for text in shown[row::rows])
            sys.stdout.write("\n" + one_line(line.rstrip(), width - 1))
        left_out = len(texts) - len(shown)
        keys.send(f"\n… {left_out} more\n" if left_out else "\n")
        assert self._held_esc
        self._held_esc.draw_again()


def _add_history(readline: ModuleType, entry: str) -> None:
    with contextlib.suppress(UnicodeError):  # the encoding of the terminal lacks a character of it
        readline.add_history(entry)


class Folded:
    """Texts that are taller than the screen, which readline cannot draw, and the mark that is
    shown for each of them."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}  # by their marks

    def fold(self, text: str) -> str:
        """The text, or its mark if it is too tall; known texts in it become their marks."""
        for mark, known in self._texts.items():
            text = text.replace(known, mark)
        size = shutil.get_terminal_size()
        lines = text.split("\n")
        rows = sum(1 + cell_count(line) // size.columns for line in lines)
        if rows <= max(1, size.lines - MARGIN):
            return text
        count = len(text.rstrip("\n").split("\n"))
        mark = f"[{count} lines pasted]" if count > 1 else "[1 line pasted]"
        while self._texts.setdefault(mark, text) != text:  # another text has it
            mark = f"{mark[:-1]}']"
        return mark

    def unfold(self, line: str) -> str:
        """The line with the texts for their marks."""
        for mark, text in self._texts.items():
            line = line.replace(mark, text)
        return line
