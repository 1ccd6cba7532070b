"""Plugins: tools, hooks, commands and listeners of the user's, from Python files and installed packages.

    def setup(api):                                    # ~/.config/coder/plugins/weather.py, or an entry point of the
        api.add_tool(forecast)                         # group "coder.plugins" that names this function
        api.add_hook(Audit(), seconds=5)
        api.add_command("umbrella", umbrella, "do I need one?")
        api.subscribe(log)

A plugin is code of the user's with all of the user's rights. One that is broken, or that others could have written (ownership.py),
is told of and left out, whole; one whose hook fails later is told of by its guard. Nothing is loaded from the folder that is
worked in.

A plugin's tools ask for permission with `ctx.ask` like any other.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from coder.events import Event
from coder.extend.guard import Guard
from coder.hooks import Hooks
from coder.permissions.ownership import check_trusted
from coder.toolset import Tool, tool_of

GROUP = "coder.plugins"

Setup = Callable[["PluginApi"], Any]


@dataclass(frozen=True)
class Command:
    """`/name ARGUMENT` at the prompt: the function gets the argument and gives the text to show, or None."""

    name: str
    function: Callable[[str], str | None]
    help: str = ""


@dataclass
class PluginApi:
    """What one plugin registers. `taken` are names of tools and commands that are in use."""

    name: str
    taken: Collection[str] = ()
    tools: list[Tool] = field(default_factory=list)
    hooks: list[Hooks] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    subscribers: list[Callable[[Event], Any]] = field(default_factory=list)

    def add_tool(self, tool: Tool | Callable[..., Any]) -> None:
        """Offer a tool (or a function, see coder.toolset) to the model. Raises TypeError, or ValueError for a name that is taken."""
        made = tool if isinstance(tool, Tool) else tool_of(tool)
        self._new(made.name, [each.name for each in self.tools])
        self.tools.append(made)

    def add_hook(self, hook: Hooks, *, seconds: float = 30.0, closed: bool = False) -> None:
        """Put a hook in, behind a guard: it has so many seconds, and a failure is told. `closed`: then the call fails, too."""
        if not isinstance(hook, Hooks):
            raise TypeError(f"a hook is a coder.Hooks, not {type(hook).__name__}")
        self.hooks.append(
            Guard(hook, name=f"{self.name}: {type(hook).__name__}", seconds=seconds, closed=closed)
        )

    def add_command(self, name: str, function: Callable[[str], str | None], help: str = "") -> None:  # noqa: A002 (what it is)
        """Add `/name` to the prompt; small letters only. Raises ValueError for another name, or one that is taken."""
        if not (name.isascii() and name.isalpha() and name.islower()):
            raise ValueError(f"a command's name is of small letters, not {name!r}")
        self._new(f"/{name}", [f"/{each.name}" for each in self.commands])
        self.commands.append(Command(name, function, help))

    def subscribe(self, subscriber: Callable[[Event], Any]) -> None:
        """Call this with every event of every run."""
        self.subscribers.append(subscriber)

    def _new(self, name: str, own: Collection[str]) -> None:
        if name in self.taken or name in own:
            raise ValueError(f"the name {name} is taken")


@dataclass
class Plugins:
    """What all plugins registered, in their order, and a line for each that is broken."""

    tools: list[Tool] = field(default_factory=list)
    hooks: list[Hooks] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    subscribers: list[Callable[[Event], Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, api: PluginApi) -> None:
        """All that a plugin registered. Raises TypeError, and adds nothing, where it has put something else into the lists."""
        kinds: dict[str, Any] = {
            "tools": Tool,
            "hooks": Hooks,
            "commands": Command,
            "subscribers": Callable,
        }
        for name, kind in kinds.items():
            given = getattr(api, name)
            if not (isinstance(given, list) and all(isinstance(each, kind) for each in given)):
                raise TypeError(f"api.{name} is no list of {name} any more")
        for name in kinds:
            getattr(self, name).extend(getattr(api, name))
        self.names.append(api.name)

    def taken_problems(self) -> list[str]:
        """The problems that nobody was told of; they are taken by this."""
        problems, self.problems = self.problems, []
        return problems

    def told(self, event: Event) -> None:
        """Tell the subscribers; one that fails is told of once, and hears no more."""
        for subscriber in list(self.subscribers):
            try:
                subscriber(event)
            except Exception as error:  # whatever somebody's code raises must not end the run
                self.subscribers.remove(subscriber)
                self.problems.append(
                    f"a plugin's subscriber {getattr(subscriber, '__name__', subscriber)} failed: "
                    f"{type(error).__name__}: {error}"
                )


def load_plugins(folder: Path, taken: Collection[str] = ()) -> Plugins:
    """Load the files in `folder` (by name) and the installed plugins. `taken`: names of tools, and of commands with a slash."""
    loaded = Plugins()
    for name, found in [*_files(folder), *_installed()]:
        in_use = {
            *taken,
            *(tool.name for tool in loaded.tools),
            *(f"/{command.name}" for command in loaded.commands),
        }
        api = PluginApi(name, in_use)
        with _signals() as came:
            try:
                setup = found()
                setup(api)
                loaded.add(api)
            except (
                Exception,
                SystemExit,
                KeyboardInterrupt,
            ) as error:  # whatever somebody's code raises
                # It is not the plugin that wants to end
                if came and not isinstance(error, Exception):
                    raise
                loaded.problems.append(
                    f"The plugin {name} is left out: {type(error).__name__}: {error}"
                )
    return loaded


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals that come inside; they do what they did before."""
    came = list[int]()

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        before[number](number, frame)

    numbers = (
        (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if threading.current_thread() is threading.main_thread()
        else ()
    )
    before: dict[int, Any] = {
        number: handler for number in numbers if callable(handler := signal.getsignal(number))
    }
    try:
        for number in before:
            signal.signal(number, note)
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _files(folder: Path) -> Iterator[tuple[str, Callable[[], Setup]]]:
    for path in sorted(folder.glob("*.py")):
        yield path.name, lambda path=path: _setup_of(path)  # type: ignore[misc]


def _setup_of(path: Path) -> Setup:
    """Run the file as a module of its own and give its setup()."""
    check_trusted(path)
    name = f"coder_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
        found: Setup = module.setup
    except BaseException:
        del sys.modules[name]
        raise
    return found


def _installed() -> Iterator[tuple[str, Callable[[], Setup]]]:
    """Entry points of our group. The library for them is slow to import, so that we look first whether there is one."""
    listings = (
        listing for place in sys.path for listing in Path(place).glob("*.*-info/entry_points.txt")
    )
    if not any(map(_is_for_us, listings)):
        return
    from importlib.metadata import entry_points

    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        yield f"{entry.name} ({entry.value})", entry.load


def _is_for_us(listing: Path) -> bool:
    try:
        return GROUP.encode() in listing.read_bytes()
    except OSError:
        return False
