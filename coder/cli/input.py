"""Lines at the prompt, answers to questions, the editor.

Nothing typed is lost, and nothing answers a question that was not on the screen: keys that came
before it are shown at the next prompt.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType

from coder.cli import keys
from coder.cli.line_editor import (
    CTRL_G,
    ESC_ENDS,
    PASTE,
    SHIFT_TAB,
    WITHOUT_WIDTH,
    LineEditor,
)
from coder.cli.process import begin_exit, handling
from coder.cli.text_rows import erasure
from coder.permissions.sanitize import strip_controls

MORE = ". "
OWN_KEY = re.compile(f"[{SHIFT_TAB}{CTRL_G}{ESC_ENDS}]")
# The entries that Shift+Tab and Esc twice stand for
MODE = "/mode"
BACK = "/back"
YOLO = re.compile(r"\byolo(?= ❯ $)")
YELLOW_YOLO = "\x01\x1b[33m\x02yolo\x01\x1b[0m\x1b[1m\x02"
# Seconds
EXIT_WITHIN = 1.5  # between two Ctrl+C that end the session
QUIET = 0.3  # without a key: so long it takes to read a question or to see a prompt
PAUSE = 1.0  # the same if something else was being typed
AT_ONCE = 0.03  # without a key after another: what comes sooner was pasted


class Leave(SystemExit):
    """Leave the session with this exit code."""


def do_nothing() -> None:
    pass


def no_label() -> str:
    return ""


class Keyboard(LineEditor):
    """Lines from the terminal as entries and answers. `history` is a file."""

    def __init__(self, history: Path) -> None:
        super().__init__(history)
        self.early: list[str] = []  # prefilled at the next prompts, one text at each
        self.paused: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self.stop_run: Callable[[], object] = do_nothing  # at Esc in place of an answer
        self.label: Callable[[], str] = no_label  # in front of the prompt's mark
        # Times (monotonic)
        self._pressed = keys.LONG_AGO  # when Ctrl+C last stopped a run or did nothing
        self._unseen_until = keys.LONG_AGO  # until then another Ctrl+C is meant for the run, too
        self._is_dumb = os.environ.get("TERM", "dumb") == "dumb"

    # -- entries

    def entries(self) -> Iterator[str]:
        """What the user enters, until Ctrl+D. Raises Leave."""
        typed = keys.waiting_keys(0) if self.readline else ""  # before the program ran
        if typed.endswith("\n"):
            keys.send(re.sub(WITHOUT_WIDTH, "", self._prompt()) + typed)
            self.remember([typed.strip()])
            yield typed.strip()
        elif typed:
            self.early.append(typed)
        # Without ICRNL, Enter before a prompt is no Ctrl+J
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
        """A line or a pasted block, or several lines: between triple quotes, or with a backslash
        at their ends."""
        text = self._line(self._prompt(), takes_early=True).rstrip(" \t\n")
        key = OWN_KEY.search(text)
        if key:
            return self._do_key(key[0], text)
        text = self.unfold(text)
        if "\n" not in text:  # no mark in what was pasted means anything
            text = self._read_on(text.strip())
        self.remember([text])
        return text

    def _do_key(self, key: str, text: str) -> str:
        """Do what the key in this line means; the line is shown at the next prompt."""
        if not self._is_dumb:
            keys.send(erasure(self._prompt() + text.replace(key, "^X") + "\n"))
        text = text.replace(key, "")
        if key == CTRL_G:
            self.edit(self.unfold(text))
            return self._entry()
        self.early.insert(0, text)
        return MODE if key == SHIFT_TAB else BACK

    def _read_on(self, text: str) -> str:
        """The entry that begins with this line, with its further lines."""
        is_quoted = text.startswith('"""')
        with contextlib.suppress(EOFError):  # Ctrl+D ends the entry
            while is_quoted and not text[3:].rstrip().endswith('"""'):
                text += "\n" + self.unfold(self._line(MORE))
            while text.endswith("\\"):
                text = text[:-1] + "\n" + self.unfold(self._line(MORE))
        text = OWN_KEY.sub("", text)
        return text.rstrip()[3:].removesuffix('"""').strip() if is_quoted else text

    def _prompt(self) -> str:
        mark = ">" if self._is_dumb else "❯"
        text = f"{self.label()} {mark} ".lstrip()
        if self._is_dumb or not self.readline:
            return text
        if not os.environ.get("NO_COLOR"):
            text = YOLO.sub(YELLOW_YOLO, text)
        return f"\x01\x1b[1m\x02{text}\x01\x1b[0m\x02"

    def _line(self, prompt: str, takes_early: bool = False) -> str:
        """One line; with `takes_early`, the first of what was typed early is prefilled.

        Raises EOFError, KeyboardInterrupt, Leave.
        """
        is_prefilled = takes_early and bool(self.early)
        if is_prefilled and not self.can_prefill:  # shown above; the others wait
            keys.send(f"{strip_controls(self.early.pop(0))}\n")
            is_prefilled = False
        self.prefill(self.early[0] if is_prefilled else "", ctrl_j="self-insert")
        try:
            with self.reading(prompt, presses=2):
                line = input(prompt).replace(PASTE, "")
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            if not self.line_so_far():
                self._leave_or_warn()
            elif is_prefilled:
                del self.early[0]
            raise
        if is_prefilled:
            del self.early[0]
        return line if OWN_KEY.search(line) else line + self._rest_of_paste()

    def _rest_of_paste(self) -> str:
        """What was there already when Enter came: a terminal may not mark a paste."""
        pasted = keys.waiting_keys(AT_ONCE)
        if not pasted:
            return ""
        sys.stdout.write(pasted.rstrip("\n") + "\n")
        return f"\n{pasted}"

    def _leave_or_warn(self) -> None:
        """Ctrl+C in an empty line: the second one soon after the first leaves. Raises Leave."""
        now = time.monotonic()
        if self._unseen_until < now < self._pressed + EXIT_WITHIN:
            begin_exit(130)
            raise Leave(130) from None
        self._pressed = now
        self._unseen_until = now
        sys.stdout.write("(Ctrl+C again or Ctrl+D exits)\n")

    def run_stopped(self) -> None:
        """Ctrl+C has stopped a run: another one exits once the user has seen the prompt."""
        self._pressed = time.monotonic()
        self._unseen_until = self._pressed + QUIET

    def edit(self, text: str) -> list[str]:
        """Let the user's editor change the text. It is shown at the next prompt, or returned if
        nothing can be prefilled."""
        text = edited(text)
        if not self.readline:
            return [text] if text else []
        self.early.insert(0, text)
        return []

    # -- questions

    def answer(self, prompt: str, letters: str = "", words: str = "") -> str:
        """One of these letters, at its press, or a line typed after the prompt `words`, if there
        is one. Only what is typed after the question was on the screen counts.

        Without letters and words, and if keys do not come one by one, it is a line. "" at Enter,
        Ctrl+D, and at Esc and Ctrl+C, which also stop the run.
        """
        interrupt = signal.getsignal(signal.SIGINT)

        def press(number: int, frame: FrameType | None) -> None:
            if callable(interrupt):
                interrupt(number, frame)
            raise KeyboardInterrupt

        with self.paused(), handling(signal.SIGINT, press), keys.tty_flags(on="ECHO"):
            try:
                self._keep_early_keys()
                if (letters or words) and self.readline and not self._is_dumb:
                    return self._answer_by_key(prompt, letters, words)
                return self._answer_line(prompt)
            except (EOFError, KeyboardInterrupt):
                sys.stdout.write("\n")
                return ""

    def _keep_early_keys(self) -> None:
        """What was typed before the user can have read the question is for the next prompt."""
        typed = keys.waiting_keys(QUIET)
        if typed:
            typed += keys.waiting_keys(PAUSE)
        text = typed.replace("\n", " ").strip()
        if text:
            self.early.append(text)

    def _answer_line(self, prompt: str, begun: str = "") -> str:
        self.prefill(begun, ctrl_j="accept-line")
        if begun and self.is_libedit:
            keys.send(prompt + begun)
            with keys.tty_flags(on="ICRNL"):
                return f"{begun}{sys.stdin.readline()}".strip()
        with self.reading(prompt, presses=1):
            text = self.unfold(input(prompt).replace(PASTE, ""))
        key = OWN_KEY.search(text)
        if not key:
            # A paste is no yes
            return f"{text} {keys.waiting_keys(AT_ONCE)}".replace("\n", " ").strip()
        if key[0] == ESC_ENDS:
            self.stop_run()
        return ""

    def _answer_by_key(self, prompt: str, letters: str, words: str) -> str:
        """Other keys than the letters begin a line after the prompt `words`."""
        with keys.single_keys() as is_terminal:
            if not is_terminal:
                return self._answer_line(prompt)
            keys.send(prompt)
            reader = keys.Keys()
            begun = ""
            with keys.drawn_again(lambda: keys.send(prompt)):
                while not words or not begun:
                    pressed = reader.read() + reader.read_all(AT_ONCE)
                    answer = self._answer_of(pressed, letters)
                    if answer is not None:
                        keys.send(f"{answer}\n")
                        return answer.lower()
                    begun = re.sub(r"\s", " ", keys.text_of(pressed))
        if is_enter(pressed[-1]):
            keys.send(f"{begun}\n")
            return begun.strip()
        keys.send(erasure(prompt))
        return self._answer_line(words, begun.lstrip())

    def _answer_of(self, pressed: list[str], letters: str) -> str | None:
        """The letter that was pressed, "" for a key that answers nothing, None for words."""
        first = pressed[0]
        if first == keys.ESC:
            self.stop_run()
        if first in (keys.ESC, keys.CTRL_D) or is_enter(first):
            return ""
        is_alone = len(pressed) == 1 or (len(pressed) == 2 and is_enter(pressed[1]))
        return first if is_alone and first.lower() in letters else None


def is_enter(key: str) -> bool:
    return key in (*keys.ENTER, "\n")


def mode(agent: str, yolo: bool) -> str:
    """What the prompt shows of who works, and of what is allowed."""
    words = [agent] if agent != "build" else []
    if yolo:
        words.append("yolo")
    return " ".join(words)


def edited(text: str) -> str:
    """What $VISUAL or $EDITOR has saved of the text; the text itself if that failed."""
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
