"""The table of a session's commands: how they are declared, found, completed and run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from coder.settings import ConfigError, optional
from coder.types import CoderError

if TYPE_CHECKING:
    from coder.cli.input import Keyboard
    from coder.cli.questions import Prompter
    from coder.cli.render import Renderer
    from coder.cli.screen import Screen
    from coder.events import Events
    from coder.extend.plugins import Command as PluginCommand
    from coder.extend.prompt_files import PromptFile
    from coder.session import Session
    from coder.sessions.conversation import Conversation
    from coder.types import T

Entries = list[str]  # what a command wants to be done as if it had been entered
Words = Callable[[Any], Iterable[str]]  # what can follow a command of this CommandTable
Run = Callable[..., Entries | None]  # takes a CommandTable and what was typed after the name


def no_words(table: CommandTable) -> Sequence[str]:
    return ()


class Host(Protocol):
    """The session at the prompt, as its commands use it. Its class imports theirs."""

    session: Session
    conversation: Conversation
    screen: Screen
    render: Renderer
    prompter: Prompter
    keyboard: Keyboard

    def follow(self, events: Events[T]) -> T: ...

    def newest_text(self, role: str) -> str: ...

    def replay(self) -> None: ...


class Command(NamedTuple):
    help: str
    run: Run
    words: Words = no_words


COMMANDS: dict[str, Command] = {}  # the built-in ones
ALIASES: dict[str, str] = {}
PROMPTS = {"init", "review"}  # only enter a text: a file of this name is used instead


def command(names: str, text: str, words: Words = no_words) -> Callable[[Run], Run]:
    """Declare a method as the command with these names (further ones are aliases) and help."""
    name, *aliases = names.split()

    def declare(method: Run) -> Run:
        COMMANDS[name] = Command(text, method, words)
        ALIASES.update(dict.fromkeys(aliases, name))
        return method

    return declare


class CommandTable:
    """The built-in commands, and after them those of plugins and files."""

    def __init__(self, repl: Host) -> None:
        self.repl = repl
        self.session = repl.session
        self.screen = repl.screen
        self.conversation = repl.conversation
        self.table = dict(COMMANDS)
        added: dict[str, Command] = {}
        prompt_files = self.session.parts.prompt_files
        plugins = self.session.parts.plugins
        for file in prompt_files.commands.values() if prompt_files else ():
            about = f"{file.description} (this project)" if file.digest else file.description
            added[file.name] = Command(about, partial(CommandTable._run_file, file=file))
            if file.name in PROMPTS:
                del self.table[file.name]
        for plugin in plugins.commands if plugins else ():
            run_plugin = partial(CommandTable._run_plugin, plugin=plugin)
            added[plugin.name] = Command(plugin.help, run_plugin)
        for name in added.keys() & {*self.table, *ALIASES}:
            self.session.notices.append(f"The added command /{name} is ignored: the name is taken.")
            del added[name]
        self.table |= added

    def run(self, name: str, argument: str) -> Entries:
        """Do it; returns entries that it wants to be done."""
        try:
            return self._find(name).run(self, argument) or []
        except (CoderError, ConfigError) as error:
            self.warn(str(error))
            return []

    def _find(self, name: str) -> Command:
        entry = self.table.get(ALIASES.get(name, name))
        if entry:
            return entry
        near = get_close_matches(name.lower(), [*self.table, *ALIASES], 1)
        hint = f"did you mean /{near[0]}?" if near else "/help lists them."
        raise ConfigError(f"There is no command /{name}; {hint}")

    def warn(self, text: str) -> None:
        self.screen.line(text, "yellow")

    def note(self, text: str) -> None:
        self.screen.line(text, "dim")

    # -- completion

    def complete(self, before: str, word: str) -> list[str]:
        """What the word after `before` on the line can become: a path after @, a command, or what
        can follow one."""
        attach = optional("coder.cli.attach")
        paths: list[str] | None = attach.complete_path(before, word) if attach else None
        if paths is not None:
            return paths
        line = re.fullmatch(r"\s*/([\w?-]+)\s+(.*)", before)
        if line:
            begun = line[2]
            entry = self.table.get(ALIASES.get(line[1], line[1]))
            words = entry.words(self) if entry else ()
            return [f"{text[len(begun) :]} " for text in beginning(words, begun + word)]
        if word.startswith("/") and not before.strip():
            return [f"/{name} " for name in beginning([*self.table, *ALIASES], word[1:])]
        return []

    # -- commands of plugins and files

    def _run_plugin(self, argument: str, plugin: PluginCommand) -> None:
        try:
            self.screen.line(str(plugin.function(argument) or ""))
        except Exception as error:
            self.warn(f"/{plugin.name} failed: {type(error).__name__}: {error}")

    def _run_file(self, argument: str, file: PromptFile) -> Entries:
        if file.answer != "yes" and not self.trust([file]):
            return []
        # Of several lines: nothing in it is taken for a command
        return [f"{file.filled(argument)}\n"]

    def trust(self, files: Sequence[PromptFile]) -> bool:
        """Ask whether these of the project may instruct the model, if there are any."""
        prompt_files = self.session.parts.prompt_files
        if not prompt_files or not files:
            return False
        allowed = self.repl.prompter.ask_trust(prompt_files, files)
        if allowed:
            self.session.crew.set_prompt()
        return allowed


def beginning(words: Iterable[str], begun: str) -> list[str]:
    """Those of the words that begin like this."""
    return [word for word in words if word.lower().startswith(begun.lower())]
