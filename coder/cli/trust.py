"""The question about a project's commands and skills: their text is shown before the user lets it instruct the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from coder.cli.input import Keyboard
from coder.cli.screen import Screen
from coder.extend.prompt_files import PromptFile, PromptFiles

MAX_ROWS, MAX_CHARACTERS = 40, 4000  # of all files together


def ask_trust(
    screen: Screen, keyboard: Keyboard, known: PromptFiles, files: Sequence[PromptFile]
) -> bool:
    """Show them, ask, and keep a clear answer. Whether it is yes."""
    screen.line("This project brings text that would instruct the model:", "bold")
    for each in files:
        changed = " has changed since your answer" if each.answer == "changed" else ""
        screen.exact_line((f"  {os.path.relpath(each.path)}{changed}", "bold"))
        start = each.text[: MAX_CHARACTERS // len(files)]
        rows = start.split("\n")[: max(5, MAX_ROWS // len(files))]
        for row in rows:
            screen.exact_line((f"    {row}", ""))
        if more := len(each.text) - len("\n".join(rows)):
            screen.line(f"    ({more:,} more characters in the file)", "yellow")
        if each.is_skill and (others := sum(map(Path.is_file, each.path.parent.rglob("*"))) - 1):
            screen.line(f"    ({others} more files in its folder)", "yellow")
    answer = keyboard.answer("Use it? [y]es, [n]o, or Enter for not now: ").lower()
    if answer in ("y", "yes", "n", "no"):
        known.keep(files, "yes" if answer[0] == "y" else "no")
    return answer in ("y", "yes")
