"""Files in an entry: `@path` attaches what is there, and Tab completes the path.

The user has named it, so that nothing is asked; keys are taken out all the same.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import Any

from coder.cli.settings import ConfigError
from coder.cli.wording import ATTACHED, plural
from coder.events import drain
from coder.tools.files import MAX_IMAGE, image_of, ls, read
from coder.toolset import ToolContext
from coder.types import ToolError

MAX_TEXT = 100_000  # characters of all files of an entry
MAX_CANDIDATES = 500
PATH = re.compile(r"""(?<![^\s(\[{"'])@((?:\\.|[^\s\\])+)""")
# To a blank in a name: readline's word begins there
BEGUN = re.compile(r"(?:(?<!\S)@(?:\\.|[^\s\\])*\\ )?$")
IMAGES = (".gif", ".jpeg", ".jpg", ".png", ".webp")


def image(path: str) -> dict[str, Any]:
    """An image for the Agent. Raises ConfigError."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError("it is no file")
        with open(path, "rb") as file:
            return image_of(file.read(MAX_IMAGE + 1))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', error)}") from None


def attach(text: str, ctx: ToolContext) -> tuple[str, list[dict[str, Any]], list[str]]:
    """(the text with the files it names behind it, images, a few words about each)."""
    images, notes, made = list[dict[str, Any]](), list[str](), text
    for path in dict.fromkeys(filter(None, map(_existing_path, PATH.findall(text)))):
        try:
            if Path(path).suffix.lower() in IMAGES:
                images.append(image(path))
                notes.append(f"{path} (image)")
                continue
            tool = ls if os.path.isdir(path) else read
            content = drain(tool.function(ctx, path)).content
        except (ToolError, ConfigError) as error:
            notes.append(f"not {path} ({error})")
            continue
        if len(made) - len(text) + len(content) > MAX_TEXT:
            notes.append(f"not {path} (more than {MAX_TEXT:,} characters in all)")
            continue
        made += f'{ATTACHED}path="{path}">\n{content}\n</attached>'
        number = content.count("\n") + 1
        notes.append(f"{path} ({plural(number, 'line')})")
    return made, images, notes


def _existing_path(given: str) -> str:
    """The path that is meant, which punctuation may follow; "" where there is nothing."""
    path = re.sub(r"\\(.)", r"\1", given)
    tried = (os.path.expanduser(each) for each in (path, path.rstrip(".,;:!?)]}'\"")))
    return next((each for each in tried if each and os.path.exists(each)), "")


def complete_path(before: str, word: str) -> list[str] | None:
    """What the word behind `before` can become where the two end in `@` and the beginning of a path, else None."""
    above = BEGUN.findall(before)[0]
    path = above + word
    if not path.startswith("@"):
        return None
    folder, name = os.path.split(re.sub(r"\\(.)", r"\1", path[1:]))
    begin, found = path[: path.rfind("/") + 1] or "@", list[str]()
    with contextlib.suppress(OSError):
        for entry in sorted(os.scandir(os.path.expanduser(folder) or "."), key=lambda e: e.name):
            is_hidden = entry.name.startswith(".") and not name.startswith(".")
            if entry.name.startswith(name) and entry.name.isprintable() and not is_hidden:
                end = "/" if entry.is_dir() else " "
                found.append(begin + re.sub(r"([\s\\])", r"\\\1", entry.name) + end)
    return [each[len(above) :] for each in found[:MAX_CANDIDATES]]
