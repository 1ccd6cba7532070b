"""`coder tour`: the list of chapters, a chapter's page, and the check of the learner's program."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from coder.cli.flags import subcommand_flags
from coder.cli.process import raise_on_sigint
from coder.cli.screen import Screen
from coder.cli.text_rows import one_line
from coder.devtools.tour.checks import CHAPTERS
from coder.devtools.tour.pages import page, with_places
from coder.devtools.tour.trial import (
    MAX_OUTPUT,
    MAX_REQUESTS,
    PATIENCE,
    NotYetError,
    StartError,
    Trial,
)
from coder.settings import ConfigError, data_folder, program

ABOUT = f"""\
How an agent works, in {len(CHAPTERS)} chapters. Each one ends in an exercise for a program of your
own, in any language. Without N: the list of chapters, and where you are."""
CHECK = f"""\
run COMMAND as the exercise of chapter N says, with a prompt as its last argument, and OPENAI_BASE_URL,
OPENAI_API_KEY and OPENAI_MODEL set. It is run in a scratch folder, without a shell: a word that names
a file here becomes its whole path. Limits: {PATIENCE:.0f} seconds, {MAX_REQUESTS} requests and
{MAX_OUTPUT // 1000:,} KB of output for each start; after its end, all that it has started is ended"""
BELOW = "0 passed, or a page was shown · 1 not yet, with the reason · 2 usage"
FILE = re.compile(r"[\w.][\w./-]*\.\w{1,4}")  # such as mine.py
SHOWN = 12  # messages of the last request, and lines of the program's stderr
WIDTH = 160  # columns of one of them


def main(words: Sequence[str]) -> int:
    """Show the list or a page, or check a program; returns the exit code."""
    arguments = read_words(words)
    if arguments.chapter is None:
        show_list()
        return 0
    if arguments.check is None:
        show_page(arguments.chapter)
        return 0
    raise_on_sigint()
    return check(arguments.chapter, command_of(arguments.check))


def read_words(words: Sequence[str]) -> argparse.Namespace:
    """The words of the command. Raises ConfigError."""
    flags = subcommand_flags("tour", ABOUT)
    flags.add_argument(
        "chapter",
        nargs="?",
        type=int,
        metavar="N",
        help=f"a chapter, 1 to {len(CHAPTERS)}",
    )
    flags.add_argument("--check", metavar="COMMAND", help=CHECK)
    flags.add_argument_group("exit codes", BELOW)
    arguments = flags.parse_args(words)
    if arguments.chapter not in (None, *CHAPTERS):
        flags.error(f"there is no chapter {arguments.chapter}: they are 1 to {len(CHAPTERS)}")
    if arguments.chapter is None and arguments.check is not None:
        flags.error("--check needs the number of a chapter")
    return arguments


def command_of(text: str) -> list[str]:
    """The words of a command; those that name files here have their whole path, links not followed:
    the `python` of a virtual environment is a link.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--check: {error}") from None
    if not words:
        raise ConfigError("--check needs a command, such as 'python mine.py'")
    return [os.path.abspath(word) if Path(word).is_file() else word for word in words]


def missing_file(command: Sequence[str]) -> str:
    """What to say of the first word that looks like a file and is none; "" if there is none."""
    for word in command[1:]:
        if FILE.fullmatch(word) and not Path(word).exists():
            return f"no file {word} in this folder"
    return ""


# ---- what was passed -----------------------------------------------------------------------------


def passed_chapters() -> set[int]:
    """The chapters that were passed; none if the file cannot be read."""
    try:
        numbers = json.loads(notes().read_text())["passed"]
        return CHAPTERS.keys() & set(numbers)
    except (OSError, ValueError, LookupError, TypeError):
        return set()


def keep_passed(number: int) -> None:
    """Raises ConfigError if it cannot be written."""
    passed = sorted(passed_chapters() | {number})
    try:
        notes().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        notes().write_text(json.dumps({"passed": passed}) + "\n")
    except OSError as error:
        raise ConfigError(f"{notes()} cannot be written: {error.strerror}") from None


def notes() -> Path:
    return data_folder() / "tour.json"


def next_chapter(passed: set[int]) -> int:
    """The first one that was not passed; 0 if all were."""
    return min(CHAPTERS.keys() - passed, default=0)


# ---- what is shown -------------------------------------------------------------------------------


def show_list() -> None:
    passed = passed_chapters()
    here = next_chapter(passed)
    rows = [f"How an agent works. You have passed {len(passed)} of {len(CHAPTERS)} chapters.", ""]
    for number, chapter in CHAPTERS.items():
        mark = "passed" if number in passed else ""
        if number == here:
            mark = "you are here"
        rows.append(f"{number:4}  {chapter.title:26}{mark}".rstrip())
    rows += ["", way_on(here)]
    sys.stdout.write("\n".join(rows) + "\n")


def way_on(here: int) -> str:
    if not here:
        return "You have passed all of them. `coder/loop.py` is the next thing to read."
    return (
        f"To read it:   {program()} tour {here}\n"
        f'To check it:  {program()} tour {here} --check "python mine.py"'
    )


def show_page(number: int) -> None:
    """Styled on a terminal, as it is in a pipe."""
    screen = Screen(sys.stdout)
    if not screen.live:
        sys.stdout.write(page(number))
        return
    screen.markdown = True
    screen.write(with_places(page(number)))
    screen.finish_line()


def check(number: int, command: Sequence[str]) -> int:
    """Run the check of a chapter and report; returns the exit code."""
    chapter = CHAPTERS[number]
    name = f"Chapter {number}, {chapter.title}"
    screen = Screen(sys.stdout)
    with (
        tempfile.TemporaryDirectory(prefix="coder-tour-", ignore_cleanup_errors=True) as folder,
        Trial(command, Path(folder)) as trial,
    ):
        try:
            chapter.check(trial)
        except NotYetError as error:
            reason = str(error)
            if not trial.requests:
                reason = missing_file(command) or reason
            screen.line(f"{name}: not yet.", "bold")
            screen.line(f"  {reason}")
            show_facts(screen, trial)
            return 1
        except StartError as error:
            raise ConfigError(str(error)) from None
    screen.line(f"{name}: passed.", "bold")
    keep_passed(number)
    for remark in trial.remarks:
        screen.line(remark)
    screen.line()
    screen.line(way_on(next_chapter(passed_chapters())))
    return 0


def show_facts(screen: Screen, trial: Trial) -> None:
    """Show what helps to find the reason: the last request, and the last lines on stderr."""
    if trial.requests:
        screen.line(f"\nThe last request that came, number {len(trial.requests)}:")
        for message in trial.requests[-1]["messages"][-SHOWN:]:
            row = json.dumps(message, ensure_ascii=False)
            screen.line(f"  {one_line(row, WIDTH)}", "dim")
    lines = trial.errors.strip().splitlines()
    if lines:
        screen.line("\nThe last lines on the stderr of your program:")
        for line in lines[-SHOWN:]:
            screen.line(f"  {one_line(line, WIDTH)}", "dim")
