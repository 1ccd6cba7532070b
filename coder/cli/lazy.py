"""Lazy packages: those of the openai client that the program does not use run when a name of them is asked for.

Importing the client takes most of the start, and most of that goes into its own `__init__` and the types of other interfaces.
All of them are still there for a plugin that uses them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = (
    *("", "lib", "types", "types.chat", "types.responses"),  # "" is the library itself
    *("types.shared", "types.shared_params", "types.beta"),
)


def make_lazy(library: str = "openai", packages: tuple[str, ...] = PACKAGES) -> None:
    """Prepare these packages of a library, if it is there and not imported yet. Modules in them can be imported as ever."""
    found = None if library in sys.modules else PathFinder.find_spec(library)
    for root in (found.submodule_search_locations if found else None) or ():
        for package in packages:
            folder = Path(root, *package.split("."))
            if (folder / "__init__.py").exists():  # not in every version of the library
                name = f"{library}.{package}".rstrip(".")
                sys.modules[name] = _waiting(name, folder)


def _waiting(name: str, folder: Path) -> ModuleType:
    """A package that runs when a name is asked of it that is no module in it (PEP 562)."""
    path = str(folder / "__init__.py")
    module, loader = ModuleType(name), SourceFileLoader(name, path)
    spec = ModuleSpec(name, loader, origin=path, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    spec.has_location = True
    module.__spec__, module.__loader__, module.__file__ = spec, loader, path
    module.__path__, module.__package__ = [str(folder)], name

    def missing(asked: str) -> Any:
        waiting = "__getattr__" in module.__dict__
        if waiting and any(
            (folder / each).exists() for each in (f"{asked}.py", f"{asked}/__init__.py")
        ):
            return import_module(f"{name}.{asked}")
        if module.__dict__.pop("__getattr__", None):
            loader.exec_module(module)
        try:
            return module.__dict__[asked]
        except KeyError:
            raise AttributeError(f"module {name!r} has no attribute {asked!r}") from None

    module.__dict__["__getattr__"] = missing
    return module
