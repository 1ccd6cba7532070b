"""Lines at the prompt, answers to questions, the history.

Nothing typed is lost, or answers a question that was not on the screen: keys that came before it stand at the next prompt.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType

from coder.cli import keys
from coder.cli.process import begin_exit, handling, wake_up
from coder.cli.screen import MARGIN, Folded, cell_count, erasure, one_line
from coder.permissions.sanitize import strip_controls

MORE = ". "
# With these in it, readline ends the line at a key of this program; with the last, it lets the program read a paste
SHIFT_TAB, CTRL_G, ESC_ENDS, PASTE = "\x1c", "\x1d", "\x1e", "\x1a"
OWN_KEY = re.compile(f"[{SHIFT_TAB}{CTRL_G}{ESC_ENDS}]")
MODE, BACK = "/mode", "/back"  # the entries that Shift+Tab and Esc twice stand for
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
MAX_HISTORY = 1000
# In the history's file: a newline of an entry, and what stands between it and its folder
NEWLINE, FOLDER = "\x1e", "\x1f"
# Seconds
EXIT_WITHIN = 1.5  # between two Ctrl+C that end the session
QUIET = 0.3  # without a key before a question takes an answer: before, the user cannot have read it, nor seen a prompt
PAUSE = 1.0  # the same where something else was being typed
AT_ONCE = 0.03  # without a key behind another: what comes sooner was pasted


class Leave(SystemExit):
    """Leave the session with this exit code."""


class Keyboard:
    """Lines from the terminal. `history` is a file."""

    _is_libedit = False  # in the place of readline; it drops what is prefilled

    def __init__(self, history: Path) -> None:
        keys.keep_modes()
        keys.take_utf8()
        self.history, self.folder = history, str(Path.cwd())  # which a command may remove
        self.early: list[str] = []  # prefilled at the next prompts, one text at each
        self.redact: Callable[[str], str] = str  # what is saved
        self.paused: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self.stop_run: Callable[[], object] = int  # at Esc in the place of an answer
        self.label: Callable[[], str] = str  # in front of the prompt's mark
        # What a word can become, given the line before it and its beginning
        self.candidates: Callable[[str, str], Iterable[str]] = lambda before, word: ()
        self._pressed = -100.0  # when Ctrl+C last stopped a run or did nothing (monotonic)
        self._unseen_until = -100.0  # until then it is one more press for the run
        self._new: list[str] = []  # entries that the history's file does not have
        self._completions: list[str] = []  # candidates
        self._near: list[str] = []  # those that do not begin with the word
        self._folded = Folded()
        self._held_esc: keys.HeldEsc | None = None
        self._is_dumb = os.environ.get("TERM", "dumb") == "dumb"
        self.readline = self._load_readline()

    def entries(self) -> Iterator[str]:
        """What the user enters, until Ctrl+D. Raises Leave."""
        typed = keys.waiting_keys(0) if self.readline else ""  # before the program ran
        if typed.endswith("\n"):
            keys.send(re.sub("[\x01\x02]", "", self._prompt()) + typed)
            self.remember([typed.strip()])
            yield typed.strip()
        elif typed:
            self.early.append(typed)
        # Enter before a prompt is no Ctrl+J
        with keys.tty_flags(off="ICRNL" if self.readline else ""):
            while True:
                try:
                    yield self._entry()
                except KeyboardInterrupt:
                    continue  # the entry is given up
                except EOFError:
                    sys.stdout.write("\n")
                    return

    def _entry(self) -> str:
        """A line or a pasted block; several lines between triple quotes, or with a backslash at their ends."""
        text = self._line(self._prompt(), self.early).rstrip(" \t\n")
        if key := OWN_KEY.search(text):  # the line under way stands at the next prompt
            if not self._is_dumb:
                keys.send(erasure(self._prompt() + text.replace(key[0], "^X") + "\n"))
            text = text.replace(key[0], "")
            if key[0] != CTRL_G:
                self.early.insert(0, text)
                return MODE if key[0] == SHIFT_TAB else BACK
            self.edit(self._folded.unfold(text))
            return self._entry()
        text = self._folded.unfold(text)
        if "\n" not in text:  # no mark in what was pasted means anything
            text = text.strip()
            is_quoted = text.startswith('"""')
            with contextlib.suppress(EOFError):  # Ctrl+D ends the entry
                while is_quoted and not text[3:].rstrip().endswith('"""'):
                    text += "\n" + self._folded.unfold(self._line(MORE))
                while text.endswith("\\"):
                    text = text[:-1] + "\n" + self._folded.unfold(self._line(MORE))
            text = OWN_KEY.sub("", text)
            text = text.rstrip()[3:].removesuffix('"""').strip() if is_quoted else text
        self.remember([text])
        return text

    def _prompt(self) -> str:
        text = f"{self.label()} {'>' if self._is_dumb else '❯'} ".lstrip()
        if self._is_dumb or not self.readline:
            return text
        if not os.environ.get("NO_COLOR"):
            text = re.sub(r"\byolo(?= ❯ $)", "\x01\x1b[33m\x02yolo\x01\x1b[0m\x1b[1m\x02", text)
        return f"\x01\x1b[1m\x02{text}\x01\x1b[0m\x02"

    def _line(self, prompt: str, early: list[str] | None = None) -> str:
        """One line; the first of `early` is prefilled and taken. Raises EOFError, KeyboardInterrupt, Leave."""
        readline, early = self.readline, early or []
        if early and (self._is_libedit or not readline):  # where nothing can be prefilled
            keys.send(f"{strip_controls(early.pop(0))}\n")
            early = []  # the others wait
        self._prepare(early[0] if early else "", ctrl_j="self-insert")
        try:
            with self._reading(prompt, presses=2):
                line = input(prompt).replace(PASTE, "")
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            if readline and readline.get_line_buffer():
                del early[:1]
            elif self._unseen_until < time.monotonic() < self._pressed + EXIT_WITHIN:
                begin_exit(130)
                raise Leave(130) from None
            else:
                self._pressed = self._unseen_until = time.monotonic()
                sys.stdout.write("(Ctrl+C again or Ctrl+D exits)\n")
            raise
        del early[:1]
        # What was there already when Enter came is a paste, where the terminal does not mark one
        pasted = "" if OWN_KEY.search(line) else keys.waiting_keys(AT_ONCE)
        if not pasted:
            return line
        sys.stdout.write(pasted.rstrip("\n") + "\n")
        return f"{line}\n{pasted}"

    def _prepare(self, text: str, ctrl_j: str) -> None:
        """Let the next line begin with this text, and Ctrl+J, with which a program may end an answer, call a function."""
        if readline := self.readline:
            # A C function as the hook: no signal is handled, and lost, in it
            text = self._folded.fold(strip_controls(text))
            readline.set_startup_hook(partial(readline.insert_text, text) if text else None)
            readline.parse_and_bind(rf'"\C-j": {ctrl_j}')

    def run_stopped(self) -> None:
        """Ctrl+C has stopped a run, so that another one exits once the user has seen the prompt."""
        self._pressed = time.monotonic()
        self._unseen_until = self._pressed + QUIET

    @contextlib.contextmanager
    def _reading(self, prompt: str, presses: int) -> Iterator[None]:
        """Around input(): wake it for signals, let so many Esc end the line, draw it again after a stop."""
        if held := self._held_esc:
            with keys.drawn_again(held.draw_again), wake_up(held.ends(presses), keys.ESC_CHECK):
                yield
            return

        def draw() -> None:
            typed = self.readline.get_line_buffer() if self.readline else ""
            keys.send(re.sub("[\x01\x02]", "", prompt) + typed)

        with keys.drawn_again(draw), wake_up():
            yield

    def edit(self, text: str) -> list[str]:
        """Let the user's editor change the text. It stands at the next prompt, or is returned where that cannot be."""
        text = edited(text)
        if not self.readline:
            return [text] if text else []
        self.early.insert(0, text)
        return []

    # -- questions

    def answer(self, prompt: str, letters: str = "", words: str = "") -> str:
        """One of these letters, at its press, or a line typed behind the prompt `words`, if there is one.

        Without letters and words, and where keys do not come one by one, it is a line. Typed after the question was on
        the screen; "" at Enter, Ctrl+D, and at Esc and Ctrl+C, which stop the run, too.
        """
        interrupt = signal.getsignal(signal.SIGINT)

        def press(number: int, frame: FrameType | None) -> None:
            if callable(interrupt):
                interrupt(number, frame)
            raise KeyboardInterrupt

        with self.paused(), handling(signal.SIGINT, press), keys.tty_flags(on="ECHO"):
            try:
                early = keys.waiting_keys(QUIET)
                early += keys.waiting_keys(PAUSE) if early else ""
                if early := early.replace("\n", " ").strip():
                    self.early.append(early)
                by_key = (letters or words) and self.readline and not self._is_dumb
                return self._press(prompt, letters, words) if by_key else self._answer_line(prompt)
            except (EOFError, KeyboardInterrupt):
                sys.stdout.write("\n")
                return ""

    def _answer_line(self, prompt: str, begun: str = "") -> str:
        self._prepare(begun, ctrl_j="accept-line")
        if begun and self._is_libedit:
            keys.send(prompt + begun)
            with keys.tty_flags(on="ICRNL"):
                return f"{begun}{sys.stdin.readline()}".strip()
        with self._reading(prompt, presses=1):
            text = self._folded.unfold(input(prompt).replace(PASTE, ""))
        if key := OWN_KEY.search(text):
            if key[0] == ESC_ENDS:
                self.stop_run()
            return ""
        # A paste is no yes
        return f"{text} {keys.waiting_keys(AT_ONCE)}".replace("\n", " ").strip()

    def _press(self, prompt: str, letters: str, words: str) -> str:
        with keys.single_keys() as is_terminal, contextlib.ExitStack() as stack:
            if not is_terminal:
                return self._answer_line(prompt)
            keys.send(prompt)
            reader, text = keys.Keys(), ""
            stack.enter_context(keys.drawn_again(lambda: keys.send(prompt)))
            while not (words and text):
                pressed = reader.read()
                while more := reader.read(seconds=AT_ONCE):
                    pressed += more
                first, is_whole = pressed[0], pressed[-1] in (*keys.ENTER, "\n")
                if first == keys.ESC:
                    self.stop_run()
                if first in (keys.ESC, keys.CTRL_D, *keys.ENTER, "\n"):
                    first = ""
                if not first or (first.lower() in letters and len(pressed) == 1 + is_whole):
                    keys.send(f"{first}\n")
                    return first.lower()
                text = re.sub(r"\s", " ", keys.text_of(pressed))
        if is_whole:
            keys.send(f"{text}\n")
            return text.strip()
        keys.send(erasure(prompt))
        return self._answer_line(words, text.lstrip())

    # -- the history and candidates

    def remember(self, entries: list[str]) -> None:
        """Put these entries into the history, but not the newest one again."""
        if readline := self.readline:
            for entry in filter(None, entries):
                last = readline.get_history_item(readline.get_current_history_length())
                if (line := self._folded.fold(entry)) != last:
                    _add_history(readline, line)
                    self._new.append(entry)

    def close(self) -> None:
        """Add to the history's file, which is private; a read-only home is no error."""
        from coder.tools.workspace import make_private  # late: no prompt needs it

        end = FOLDER + self.folder
        lines = (self.redact(each).replace(FOLDER, "") + end for each in self._new)
        with contextlib.suppress(OSError):
            make_private(self.history.parent, close=True)
            fd = os.open(self.history, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
            with open(fd, "w", encoding="utf-8", errors="replace") as file:
                file.write("".join(line.replace("\n", NEWLINE) + "\n" for line in lines))

    def _load_readline(self) -> ModuleType | None:
        """The readline module with the program's keys and the history, this folder's entries last; None where Python has none."""
        try:
            import readline
        except ImportError:
            return None
        readline.set_auto_history(False)  # an entry is one item, and an answer is none
        self._is_libedit = "libedit" in (readline.__doc__ or "")
        if self._is_libedit:
            threading.Thread(target=keys.end_with_terminal, daemon=True).start()
        else:
            with contextlib.suppress(AttributeError, OSError, ValueError):
                self._held_esc = held = keys.HeldEsc(readline, end=f"{ESC_ENDS}\r")
                readline.set_completion_display_matches_hook(partial(self._list, held.draw_again))
        for binding in ["bind ^I rl_complete"] if self._is_libedit else BINDINGS.split("\n"):
            readline.parse_and_bind(binding)
        readline.set_completer_delims(" \t\n")
        readline.set_completer(self._candidate)
        with contextlib.suppress(OSError):
            lines = self.history.read_text("utf-8", "replace").split("\n")[-MAX_HISTORY:]
            entries = [line.replace(NEWLINE, "\n").partition(FOLDER) for line in lines if line]
            for entry, _, _ in sorted(entries, key=lambda each: each[2] == self.folder):
                _add_history(readline, self._folded.fold(entry))
        return readline

    def _candidate(self, word: str, number: int) -> str | None:
        """One of what the word can become; readline calls it for a paste, too, which is put in the place of its mark."""
        assert self.readline
        if word.endswith(PASTE):  # its beginning has been read
            if number == 0:
                pasted = self._folded.fold(strip_controls(keys.read_paste()))
                self._completions = [word.removesuffix(PASTE) + pasted]
        elif number == 0:
            before = self.readline.get_line_buffer()[: self.readline.get_begidx()]
            self._completions = list(filter(str.isprintable, self.candidates(before, word)))
            self._near = [each for each in self._completions if not each.startswith(word)]
            if self._near and self._completions[1:]:
                # What they have in common would replace the word: it is offered itself, among them
                self._completions = [word, *(f"{word}|{each}" for each in self._near)]
        return self._completions[number] if number < len(self._completions) else None

    def _list(
        self, draw_again: Callable[[], object], word: str, matches: Sequence[str], longest: int
    ) -> None:
        """Show the candidates below the line, those that only look like the word with the nearest first."""
        width, height = shutil.get_terminal_size()
        texts = self._near or sorted(map(str.rstrip, matches))
        size = max(map(cell_count, texts)) + 2
        number = 1 if self._near else max(1, width // size)
        fitting = max(1, height - MARGIN) * number
        more = f"\n… {len(texts) - fitting} more" if texts[fitting:] else ""
        texts = texts[:fitting]
        rows = math.ceil(len(texts) / number)
        for row in range(rows):
            line = "".join(each + " " * (size - cell_count(each)) for each in texts[row::rows])
            sys.stdout.write("\n" + one_line(line.rstrip(), width - 1))
        keys.send(f"{more}\n")
        draw_again()


def _add_history(readline: ModuleType, entry: str) -> None:
    with contextlib.suppress(UnicodeError):  # the encoding of the terminal lacks a character of it
        readline.add_history(entry)


def mode(agent: str, yolo: bool) -> str:
    """What the prompt shows of who works, and of what is allowed."""
    return " ".join([agent] * (agent != "build") + ["yolo"] * yolo)


def edited(text: str) -> str:
    """What $VISUAL or $EDITOR has saved of the text; the text itself where that failed."""
    import shlex  # late: 10 ms
    import subprocess
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="coder-") as folder:
        path = Path(folder) / "entry.md"
        path.write_text(text, "utf-8")
        editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
        try:
            with keys.tty_flags(on="ICRNL"), handling(signal.SIGINT), handling(signal.SIGQUIT):
                code = subprocess.run([*shlex.split(editor), path], check=False).returncode
            if code == 0:
                return path.read_text("utf-8", "replace").rstrip("\n")
            problem = f"exit code {code}"
        except (OSError, ValueError) as error:
            problem = strip_controls(str(error))
    sys.stdout.write(f"No change: {problem}. $EDITOR is {editor}.\n")
    return text
