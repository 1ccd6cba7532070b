"""Files in an entry: `@path` attaches the file, image or folder there; Tab completes the path.

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
from coder.cli.wording import ATTACHED
from coder.events import drain
from coder.providers.text import plural
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
AFTER_PATH = ".,;:!?)]}'\""  # may follow a path
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


def attach(
    text: str, ctx: ToolContext, most: int = MAX_TEXT
) -> tuple[str, list[dict[str, Any]], list[str]]:
    """(the text with the files it names after it, images, a few words about each).

    `most`: characters of all files together.
    """
    images: list[dict[str, Any]] = []
    notes: list[str] = []
    files = ""
    paths, missing = _named_paths(text)
    for path in paths:
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
        if len(files) + len(content) > most:
            notes.append(f"not {path} (more than {most:,} characters in all)")
            continue
        files += f'{ATTACHED}path="{path}">\n{content}\n</attached>'
        lines = content.count("\n") + 1
        notes.append(f"{path} ({plural(lines, 'line')})")
    if "\n" not in text:  # a pasted text has an @ for other reasons
        notes += [f"not {name} (there is no such file)" for name in missing]
    return text + files, images, notes


def _named_paths(text: str) -> tuple[list[str], list[str]]:
    """(the paths that a text names, names of which there is no file)."""
    paths: list[str] = []
    missing: list[str] = []
    for name in dict.fromkeys(PATH.findall(text)):
        path = _existing_path(name)
        if not path:
            missing.append(name.rstrip(AFTER_PATH))
        elif path not in paths:
            paths.append(path)
    return paths, missing


def _existing_path(name: str) -> str:
    """The path that is meant, which punctuation may follow; "" if there is nothing."""
    whole = _unescaped(name)
    for path in (whole, whole.rstrip(AFTER_PATH)):
        path = os.path.expanduser(path)
        if os.path.exists(path):
            return path
    return ""


# ---- candidates --------------------------------------------------------------------------


def complete_path(before: str, word: str) -> list[str] | None:
    """What the word after `before` can become if the two end in `@` and the beginning of a path,
    else None."""
    above = BEGUN.findall(before)[0]
    begun = above + word
    if not begun.startswith("@"):
        return None
    folder = begun[: begun.rfind("/") + 1] or "@"
    paths = [folder + entry for entry in _entries(begun[1:])]
    has_name = begun != "@" and not begun.endswith("/")
    if not paths and not above and has_name:
        paths = [f"@{_escaped(path)} " for path in near_paths(begun[1:])]
    return [path[len(above) :] for path in paths[:MAX_CANDIDATES]]


def _entries(begun: str) -> list[str]:
    """The entries of a folder whose names begin like this path, each with what follows it."""
    folder, name = os.path.split(_unescaped(begun))
    entries: list[str] = []
    with contextlib.suppress(OSError):
        listed = os.scandir(os.path.expanduser(folder) or ".")
        for entry in sorted(listed, key=lambda entry: entry.name):
            is_hidden = entry.name.startswith(".") and not name
            if entry.name.startswith(name) and entry.name.isprintable() and not is_hidden:
                end = "/" if entry.is_dir() else " "
                entries.append(_escaped(entry.name) + end)
    return entries


def _escaped(path: str) -> str:
    return re.sub(r"([\s\\])", r"\\\1", path)


def _unescaped(path: str) -> str:
    return re.sub(r"\\(.)", r"\1", path)


def near_paths(begun: str) -> list[str]:
    """The files of this folder in whose path these letters come in this order, the shortest path
    first. If there are such, only those whose name begins with the letters, or has them together,
    or whose path has them together.

    Those that git ignores are left out. A folder that takes too long to be listed has none.
    """
    wanted = begun.lower()
    in_order = re.compile(".*?".join(re.escape(letter) for letter in wanted))
    abort = Abort()
    patience = threading.Timer(LIST_WITHIN, abort.set)
    patience.start()
    try:
        with contextlib.ExitStack() as stack:
            folder = Path.cwd()
            search = Search(ToolContext(folder, abort), folder, "", stack)
            names = [name for name in search.names() if name.isprintable()]
            paths = [name for name in names if in_order.search(name.lower())]
    except (OSError, ToolError, Aborted):
        return []
    finally:
        patience.cancel()
    least = min((_distance(path, wanted) for path in paths), default=0)
    nearest = [path for path in paths if _distance(path, wanted) == least]
    return sorted(nearest, key=lambda path: (len(path), path))[:MAX_NEAR]


def _distance(path: str, wanted: str) -> int:
    """How far a path is from these letters; 0 is the nearest."""
    name = os.path.basename(path).lower()
    if name.startswith(wanted):
        return 0
    if wanted in name:
        return 1
    return 2 if wanted in path.lower() else 3
