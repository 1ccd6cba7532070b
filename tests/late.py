"""Packages that are imported at their first use.

Each worker of pytest-xdist collects all files and runs a part of their tests: the packages of the
extras took half of the time of each collection.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest


class Late:
    """Stands for a module, and imports it when a name in it is asked for."""

    def __init__(self, module: str) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks each name of a test file for marks of its own
            raise AttributeError(name)
        return getattr(import_module(self.module), name)


def needs(*packages: str, extra: str) -> None:
    """Skip the module of tests that says so if one of these packages is not installed."""
    if not all(find_spec(each) for each in packages):
        pytest.skip(f"the extra `{extra}` is not installed", allow_module_level=True)
