"""Imports: of modules that may be deleted, and what follows when all are there."""

from __future__ import annotations

import gc
import sys
from typing import Any

from coder.cli.settings import ConfigError


def optional(name: str) -> Any:
    """Import a module; None where it, or a module of ours that it imports, was deleted."""
    try:
        __import__(name)  # which -X importtime shows, unlike import_module
        return sys.modules[name]
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "coder":
            raise
        return None


def collect_garbage() -> None:
    """From now on, and never what was imported so far (`__main__.py` has switched the collector off)."""
    gc.freeze()
    gc.enable()


def needed(name: str, purpose: str) -> Any:
    """Import the module that `purpose`, which the user asked for, needs. Raises ConfigError."""
    if (module := optional(name)) is None:
        raise ConfigError(f"{purpose} is not available: {name} or a part of it was deleted")
    return module
