"""Plugins: the user's tools, hooks, commands and subscribers, from Python files and installed
packages.

    def setup(api):                       # in ~/.config/coder/plugins/weather.py, or named by an
        api.add_tool(forecast)            # entry point of the group "coder.plugins"
        api.add_hook(Audit(), seconds=5)
        api.add_command("umbrella", umbrella, "do I need one?")
        api.subscribe(log)

A plugin is code with all of the user's rights. One that fails to load, or that another user could
have written (rules.py), is reported and left out, whole. Each call of its tools asks, unless they
declare otherwise (toolset.py).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from coder import toolset
from coder.events import Event
from coder.extend.guard import Guard
from coder.hooks import Hooks
from coder.permissions.ownership import check_ownership
from coder.toolset import Tool
from coder.types import Report, ignore

GROUP = "coder.plugins"
Function = Callable[[str], str | None]
Subscriber = Callable[[Event], Any]


@dataclass
class Command:
    """`/name ARGUMENT` at the prompt: `function` returns the text to show for it, or None."""

    name: str
    function: Function
    help: str = ""


@dataclass(eq=False)
class PluginApi:
    """What a plugin's `setup` gets, and what it has registered, in order.

    `taken`: names that it cannot register.
    """

    name: str
    taken: set[str]
    tools: list[Tool] = field(default_factory=list)
    hooks: list[Guard] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    subscribers: list[Subscriber] = field(default_factory=list)

    def add_tool(self, tool: Tool | Callable[..., Any]) -> None:
        """Offer a tool (or a function, see coder.toolset) to the model.

        Raises TypeError, or ValueError for a name that is taken.
        """
        if not isinstance(tool, Tool):
            tool = toolset.tool(tool)
        self._take(tool.name)
        self.tools.append(tool)

    def add_hook(self, hook: Hooks, *, seconds: float = 30.0, closed: bool = False) -> None:
        """Add a hook, in a Guard with these options."""
        if not isinstance(hook, Hooks):
            raise TypeError(f"a hook is a coder.Hooks, not {type(hook).__name__}")
        self.hooks.append(
            Guard(
                hook,
                name=f"{self.name}: {type(hook).__name__}",
                seconds=seconds,
                closed=closed,
            )
        )

    def add_command(self, name: str, function: Function, help: str = "") -> None:  # noqa: A002
        """Add `/name` to the prompt; lower-case letters only.

        Raises ValueError for another name, or one that is taken.
        """
        if not (name.isascii() and name.isalpha() and name.islower()):
            raise ValueError(f"a command's name must consist of lower-case letters, not {name!r}")
        self._take(f"/{name}")
        self.commands.append(Command(name, function, help))

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call this with every event of every run."""
        self.subscribers.append(subscriber)

    def _take(self, name: str) -> None:
        if name in self.taken:
            raise ValueError(f"the name {name} is taken")
        self.taken.add(name)


Setup = Callable[[PluginApi], Any]


class Plugins(PluginApi):
    """What the files in `folder` (by name) and the installed plugins register.

    `taken`: names of tools, and of commands with a slash. `report` gets a sentence for each plugin
    that fails.
    """

    def __init__(self, folder: Path, taken: Collection[str] = (), report: Report = ignore) -> None:
        super().__init__("all", set(taken))
        self.report = report
        for name, load in _find_plugins(folder):
            api = PluginApi(name, set(self.taken))  # of one that fails, nothing is added
            try:
                load()(api)
            except Exception as error:
                report(f"The plugin {name} is skipped: {type(error).__name__}: {error}")
                continue
            self.taken = api.taken
            self.tools += api.tools
            self.hooks += api.hooks
            self.commands += api.commands
            self.subscribers += api.subscribers

    def notify(self, event: Event) -> None:
        """Call the subscribers; one that fails is reported and removed."""
        for subscriber in list(self.subscribers):
            try:
                subscriber(event)
            except Exception as error:
                self.subscribers.remove(subscriber)
                plugin = getattr(subscriber, "__module__", None) or "a plugin"
                self.report(
                    f"A subscriber of {plugin} failed and is removed: "
                    f"{type(error).__name__}: {error}"
                )


def _run_file(path: Path) -> Setup:
    """Run the file as a module of its own; its `setup`."""
    check_ownership(path)
    name = f"coder_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    spec.loader.exec_module(module)
    return module.setup  # type: ignore[no-any-return]


def _find_plugins(folder: Path) -> Iterator[tuple[str, Callable[[], Setup]]]:
    """(name, what returns its `setup`) of the folder's files and of the entry points of GROUP."""
    for path in sorted(folder.glob("*.py")):
        yield path.name, partial(_run_file, path)
    # The reader of entry points takes 40 ms to import, so first see whether there is one
    if _has_entry_points():
        from importlib.metadata import entry_points

        for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
            yield f"{entry.name} ({entry.value})", entry.load


def _has_entry_points() -> bool:
    """Does an installed package name GROUP?"""
    for folder in sys.path:
        for listing in Path(folder).glob("*-info/entry_points.txt"):
            if listing.is_file() and GROUP in listing.read_text("utf-8", "replace"):
                return True
    return False
