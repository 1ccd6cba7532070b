"""`coder export` and /export: a conversation as a file that people read. Secrets are taken out of it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from coder.cli.config import data_folder, keys_of
from coder.cli.flags import Flags, program
from coder.permissions.sanitize import strip_controls
from coder.sessions.export import Format, export, redactor
from coder.sessions.store import Store, StoreError

FORMATS = ("md", "html", "json")


def write_export(store: Store, session_id: str, name: str, *keys: str) -> Path:
    """Write the file, private and new. Its ending says its format; without a name it is called by the session's id.

    Raises StoreError, OSError (FileExistsError too), and ValueError for another ending.
    """
    path = Path(os.path.expanduser(name or f"session-{session_id}.md"))
    ending = path.suffix.removeprefix(".") or "md"
    if ending not in FORMATS:
        raise ValueError(
            f"a file of an export ends in {', '.join(f'.{each}' for each in FORMATS)}, not in .{ending}"
        )
    text = export(store, session_id, cast(Format, ending), redactor(*keys))
    with open(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600),
        "w",
        encoding="utf-8",
        errors="replace",
    ) as file:
        file.write(text)
    return path


def reason(error: Exception) -> str:
    """Why there is no file, in words."""
    return (
        f"{error.filename}: {error.strerror}"
        if isinstance(error, OSError) and error.filename
        else str(error)
    )


def main(argv: Sequence[str]) -> int:
    """Run it; returns the exit code."""
    flags = Flags(
        prog=f"{program()} export",
        description="A conversation as people read it, on stdout or in a file.",
    )
    flags.add_argument("id", help="see `coder sessions`")
    flags.add_argument("--format", choices=FORMATS, default="md")
    flags.add_argument(
        "-o", "--output", metavar="FILE", help="a new file; its ending says the format"
    )
    given = flags.parse_args(argv)
    keys = keys_of(Path.cwd())
    try:
        with contextlib.closing(Store(data_folder() / "sessions.db")) as store:
            session_id = store.find(given.id).id
            if given.output:
                sys.stderr.write(
                    f"Written to {write_export(store, session_id, given.output, *keys)}.\n"
                )
                return 0
            text = export(store, session_id, given.format, redactor(*keys))
    except (StoreError, OSError, ValueError) as error:
        sys.stderr.write(f"coder: {strip_controls(reason(error))}\n")
        return 2
    sys.stdout.write(strip_controls(text) if sys.stdout.isatty() else text)
    return 0
