"""Make docs/session.svg, the picture at the beginning of the README: a real session in a terminal.

    .venv/bin/python docs/picture.py [FILE]

A script plays the model (coder/devtools/demo.py). The program, its terminal, its requests and what
the tools do are real.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import tempfile
from itertools import groupby
from pathlib import Path

import pexpect
import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

import coder
from coder.devtools.demo import PROMPT, demo_server

COLUMNS = 84
ROWS = 200  # of the terminal: more than the session has
TITLE = "coder"
AT_PROMPT = "❯ \x1b\\[0m$"  # the program waits for a line
QUESTION = r"\[y\]es"
FILE = Path(__file__).parent / "session.svg"


def record_session() -> str:
    """What the program writes to its terminal while it repairs the demonstration's project."""
    package = Path(coder.__file__).parent
    # A short path, so that no row with it is broken
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, demo_server(pace=0) as server:
        project = Path(folder, "stats")
        compiled = shutil.ignore_patterns("__*")
        shutil.copytree(package / "devtools" / "demo_project", project, ignore=compiled)
        environment = {
            "HOME": folder,
            "PATH": os.environ["PATH"],
            "TERM": "xterm-256color",
            "COLORTERM": "truecolor",
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(package.parent),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OPENAI_BASE_URL": server.url,
            "OPENAI_MODEL": "script",
        }
        output = io.StringIO()
        program = pexpect.spawn(
            sys.executable,
            ["-m", "coder"],
            cwd=project,
            env=environment,
            dimensions=(ROWS, COLUMNS),
            encoding="utf-8",
            timeout=60,
        )
        program.logfile_read = output
        program.expect(AT_PROMPT)
        program.send(f"{PROMPT}\r")
        while program.expect([QUESTION, AT_PROMPT]) == 0:
            program.send("a")  # always: one question for each kind
        recorded = output.getvalue()
        program.close(force=True)
    return re.sub(r"127\.0\.0\.1:\d+", "localhost", recorded.replace(folder, "~"))


def rows_of(output: str) -> list[Text]:
    """The rows of the screen after this output, with their styles."""
    screen = pyte.Screen(COLUMNS, ROWS)
    pyte.Stream(screen).feed(output)
    rows = []
    for line in range(ROWS):
        cells = [screen.buffer[line][column] for column in range(COLUMNS)]
        row = Text()
        for style, alike in groupby(cells, style_of):
            row.append("".join(cell.data for cell in alike), style)
        row.rstrip()
        rows.append(row)
    while rows and not rows[-1].plain:
        rows.pop()
    return rows


def style_of(cell: pyte.screens.Char) -> Style:
    """A cell's style as rich has it."""
    return Style(
        color=color_of(cell.fg),
        bgcolor=color_of(cell.bg),
        bold=cell.bold,
        italic=cell.italics,
        underline=cell.underscore,
        reverse=cell.reverse,
    )


def color_of(name: str) -> str | None:
    """A colour of the terminal by the name that rich has for it."""
    if name == "default":
        return None
    if re.fullmatch(r"[0-9a-f]{6}", name):
        return f"#{name}"
    return name.replace("bright", "bright_").replace("brown", "yellow")


def main(file: str = "") -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for row in rows_of(record_session()):
        console.print(row)
    # Without the fonts that the page would load from the network
    picture = console.export_svg(title=TITLE, unique_id="session")
    Path(file or FILE).write_text(re.sub(r"@font-face \{[^}]*\}\s*", "", picture))


if __name__ == "__main__":
    main(*sys.argv[1:])
