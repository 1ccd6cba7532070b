"""Lazy packages: those of the openai client that define types we never use are run when something of them is asked for.

Importing the client takes most of our start, and most of that is spent on types of other interfaces than ours. All of them are
still there for a plugin that wants them: the first name that is asked of such a package runs it.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

PACKAGES = (
    "types",
    "types.chat",
    "types.responses",
    "types.shared",
    "types.shared_params",
    "types.beta",
)


def make_lazy(library: str = "openai", packages: tuple[str, ...] = PACKAGES) -> None:
    """Prepare these packages of a library, if it is there and not imported yet; in this order, the outer ones first."""
    if library in sys.modules or (found := find_spec(library)) is None:
        return
    paths = {library: list(found.submodule_search_locations or [])}
    for package in packages:
        name = f"{library}.{package}"
        above = paths.get(name.rpartition(".")[0])
        spec = PathFinder.find_spec(name, above) if above else None
        if spec is None or spec.loader is None or not spec.submodule_search_locations:
            continue  # another version of the library, which has no such package
        paths[name] = list(spec.submodule_search_locations)
        sys.modules[name] = _waiting(module_from_spec(spec))


def _waiting(module: ModuleType) -> ModuleType:
    """The module, which runs when something is asked of it that is not there (PEP 562)."""

    def missing(name: str) -> Any:
        if module.__dict__.pop("__getattr__", None) and module.__spec__ and module.__spec__.loader:
            module.__spec__.loader.exec_module(module)
        try:
            return module.__dict__[name]
        except KeyError:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}") from None

    module.__dict__["__getattr__"] = missing
    return module
