"""Imports that need care: modules that may be deleted, and packages of the openai client that seldom have to run.

Importing the client takes most of the start, and most of that goes into its own `__init__` and the types of other
interfaces. They run when a name of them is asked for, so that a plugin can use them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from coder.cli.settings import ConfigError

PACKAGES = (
    *("", "lib", "types", "types.chat", "types.responses"),  # "" is the library itself
    *("types.shared", "types.shared_params", "types.beta"),
)


def optional(name: str) -> Any:
    """Import a module; None where it, or a module of ours that it imports, was deleted."""
    try:
        __import__(name)  # which -X importtime shows, unlike import_module
        return sys.modules[name]
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "coder":
            raise
        return None


def needed(name: str, purpose: str) -> Any:
    """Import the module that `purpose`, which the user asked for, needs. Raises ConfigError."""
    if (module := optional(name)) is None:
        raise ConfigError(f"{purpose} is not available: {name} or a part of it was deleted")
    return module


def make_lazy(library: str = "openai", packages: tuple[str, ...] = PACKAGES) -> None:
    """Prepare these packages of a library, if it is there and not imported yet. Modules in them can be imported as ever."""
    spec = None if library in sys.modules else PathFinder.find_spec(library)
    for root in (spec.submodule_search_locations if spec else None) or ():
        for package in packages:
            folder = Path(root, *package.split("."))
            if (folder / "__init__.py").exists():  # not in every version of the library
                name = f"{library}.{package}".rstrip(".")
                sys.modules[name] = _lazy_package(name, folder)


def _lazy_package(name: str, folder: Path) -> ModuleType:
    """A package that runs when a name is asked of it that is no module in it (PEP 562)."""
    path = str(folder / "__init__.py")
    module, loader = ModuleType(name), SourceFileLoader(name, path)
    spec = ModuleSpec(name, loader, origin=path, is_package=True)
    spec.submodule_search_locations, spec.has_location = [str(folder)], True
    module.__spec__, module.__loader__, module.__file__ = spec, loader, path
    module.__path__, module.__package__ = [str(folder)], name

    def missing(asked: str) -> Any:
        files = (folder / f"{asked}.py", folder / asked / "__init__.py")
        if "__getattr__" in vars(module) and any(each.exists() for each in files):
            return import_module(f"{name}.{asked}")
        if vars(module).pop("__getattr__", None):
            loader.exec_module(module)
        try:
            return vars(module)[asked]
        except KeyError:
            raise AttributeError(f"module {name!r} has no attribute {asked!r}") from None

    vars(module)["__getattr__"] = missing
    return module
