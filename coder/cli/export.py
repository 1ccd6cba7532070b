"""Files that a session at the prompt writes for the user."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

from coder.sessions.conversation import Conversation
from coder.settings import ConfigError, Settings, needed


def export(conversation: Conversation, settings: Settings, file: str) -> Path:
    """Write the conversation to a file, whose ending gives the format. Raises ConfigError."""
    conversation.recorder.sync()
    module = needed("coder.sessions.export", "/export")
    session_id = conversation.recorder.session_id
    path = Path(os.path.expanduser(file or f"session-{session_id}.md"))
    form = path.suffix.removeprefix(".") or "md"
    if form not in get_args(module.Format):
        endings = ", ".join(f".{name}" for name in get_args(module.Format))
        raise ConfigError(f"a file of an export ends in one of {endings}, not in .{form}")
    redactor = module.redactor(*settings.keys)
    write_new(path, module.export(conversation.store, session_id, form, redactor))
    return path


def write_new(path: Path, text: str) -> None:
    """Write a file for the user alone, never over one that is there. Raises ConfigError."""
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(
            number,
            "w",
            encoding="utf-8",
            errors="replace",
        ) as opened:
            opened.write(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
