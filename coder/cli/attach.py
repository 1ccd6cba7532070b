"""Files in an entry: `@path` attaches what is there, and Tab completes the path.

The user has named it, so that nothing is asked; keys are taken out all the same.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
from pathlib import Path
from typing import Any

from coder.abort import Abort
from coder.cli.wording import ATTACHED, plural
from coder.events import drain
from coder.settings import ConfigError
from coder.tools.files import MAX_IMAGE, image_of, ls, read
from coder.tools.search_programs import Search
from coder.toolset import ToolContext
from coder.types import Aborted, ToolError

MAX_TEXT = 100_000  # characters of all files of an entry
MAX_CANDIDATES = 500
MAX_NEAR = 12  # of them that only look like what was typed
LIST_WITHIN = 2.0  # seconds for the list of all files
PATH = re.compile(r"""(?<![^\s(\[{"'])@((?:\\.|[^\s\\])+)""")
BEHIND = ".,;:!?)]}'\""  # what may follow a path
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
    given = {each: _existing_path(each) for each in PATH.findall(text)}
    for path in dict.fromkeys(filter(None, given.values())):
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
    if "\n" not in text:  # a pasted text has an @ for other reasons
        missing = (each.rstrip(BEHIND) for each, path in given.items() if not path)
        notes += [f"not {each} (there is no such file)" for each in missing]
    return made, images, notes


def _existing_path(given: str) -> str:
    """The path that is meant, which punctuation may follow; "" where there is nothing."""
    path = re.sub(r"\\(.)", r"\1", given)
    tried = (os.path.expanduser(each) for each in (path, path.rstrip(BEHIND)))
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
                found.append(begin + _escaped(entry.name) + end)
    if not found and not above and name:
        found = [f"@{_escaped(near)} " for near in near_paths(path[1:])]
    return [each[len(above) :] for each in found[:MAX_CANDIDATES]]


def _escaped(path: str) -> str:
    return re.sub(r"([\s\\])", r"\\\1", path)


def near_paths(given: str) -> list[str]:
    """The files of this folder in whose path these letters stand in this order, the shortest path first: only those
    whose name begins with them, or has them together, or whose path has, where there are such.

    Those that git ignores are left out. A folder that takes too long to be listed has none.
    """
    wanted, abort = given.lower(), Abort()
    letters = re.compile(".*?".join(map(re.escape, wanted)))

    def distance(path: str) -> tuple[int, int, str]:
        whole, name = path.lower(), os.path.basename(path).lower()
        far = [name.startswith(wanted), wanted in name, wanted in whole, True].index(True)
        return far, len(path), path

    patience = threading.Timer(LIST_WITHIN, abort.set)
    patience.start()
    try:
        with contextlib.ExitStack() as stack:
            names = Search(ToolContext(Path.cwd(), abort), Path.cwd(), "", stack).names()
            found = [each for each in names if each.isprintable() and letters.search(each.lower())]
    except (OSError, ToolError, Aborted):
        return []
    finally:
        patience.cancel()
    ranked = sorted(map(distance, found))
    return [path for far, _, path in ranked if far == ranked[0][0]][:MAX_NEAR]
