"""The slash commands of an editor: what a session does without a terminal, prompts, plugins' and
files' commands, and skills.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from coder.events import Events, TextDelta
from coder.session import Session
from coder.settings import needed

if TYPE_CHECKING:
    from coder.extend.plugins import Command as PluginCommand
    from coder.extend.prompt_files import PromptFile
    from coder.sessions.snapshots import UndoResult

# Gets the session and what was typed after the name; the text of a prompt, or what is done instead
Begin = Callable[[Session, str], str | Events[object]]


@dataclass(frozen=True)
class Command:
    """`hint` says what can follow the name, if anything can. Without a `begin` it is a prompt that
    Parts.fill knows."""

    about: str
    begin: Begin | None = None
    hint: str = ""


def commands_of(session: Session) -> dict[str, Command]:
    """All commands, by name; of two with a name the later one here is used.

    Of the project's files those count that the user trusts, who is asked in a terminal.
    """
    found: dict[str, Command] = {}
    files = session.parts.prompt_files
    plugins = session.parts.plugins
    if files:
        for skill in trusted(files.skills):
            found[skill.name] = Command(
                skill.description,
                partial(use, skill),
                "task",
            )
    if plugins:
        for plugin in plugins.commands:
            found[plugin.name] = Command(
                plugin.help,
                partial(run_plugin, plugin),
                "words",
            )
    found |= PROMPTS
    if files:
        for file in trusted(files.commands):
            found[file.name] = Command(file.description, hint="words")
    return found | DONE


def trusted(files: Mapping[str, PromptFile]) -> list[PromptFile]:
    return [file for file in files.values() if file.answer == "yes"]


# ---- what is done instead of a prompt ------------------------------------------------------------


def summary(session: Session, words: str) -> Events[object]:
    # Begun here, not when the events are taken: a cancel counts from now on
    return tell(session.sum_up())


def tell(run: Events[str]) -> Events[None]:
    """The events of a run that returns a text, and then this text."""
    text = yield from run
    yield TextDelta(text)


def undo(session: Session, words: str) -> Events[None]:
    result = session.undo()
    yield TextDelta(say("Undone", result))


def redo(session: Session, words: str) -> Events[None]:
    result = session.redo()
    yield TextDelta(say("Redone", result))


def say(done: str, result: UndoResult) -> str:
    """What an undo has done."""
    if result.problem:
        return result.problem
    text = f"{done}: {', '.join(result.paths) or 'no file was changed'}."
    return "\n".join([text, *result.warnings(", ".join)])


def run_plugin(plugin: PluginCommand, session: Session, words: str) -> Events[None]:
    text = plugin.function(words)
    yield TextDelta(str(text or ""))


DONE = {
    "compact": Command("shorten the conversation", Session.compact, "what matters most"),
    "summary": Command("tell what happened in this conversation", summary),
    "undo": Command("undo the last run: its file changes and its messages", undo),
    "redo": Command("redo what was undone", redo),
}

# ---- prompts -------------------------------------------------------------------------------------


def init(session: Session, words: str) -> str:
    module = needed("coder.agent.instructions", "/init")
    return str(module.INIT)


def use(skill: PromptFile, session: Session, task: str) -> str:
    return f"Read {skill.path}, and follow it.\n\n{task}".strip()


PROMPTS = {
    "init": Command("let the model write AGENTS.md for this project", init),
    "review": Command("let the model review what is not committed", hint="what else"),
}
