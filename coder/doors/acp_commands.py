"""The slash commands of an editor: what a session does without a terminal, those of plugins and of
files, and the skills.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """`hint` says what can follow the name. `file`: where the command is from, if it is a file."""

    about: str
    begin: Begin
    hint: str = ""
    file: PromptFile | None = None


def commands_of(session: Session) -> dict[str, Command]:
    """All commands, by name; the first with a name has it, and files replace mere prompts."""
    files = session.parts.prompt_files
    plugins = session.parts.plugins
    found = dict(DONE)
    for name, file in (files.commands if files else {}).items():
        found.setdefault(name, Command(file.description, partial(fill, file), "words", file))
    for name, command in PROMPTS.items():
        found.setdefault(name, command)
    for plugin in plugins.commands if plugins else ():
        found.setdefault(plugin.name, Command(plugin.help, partial(run_plugin, plugin), "words"))
    for name, skill in (files.skills if files else {}).items():
        found.setdefault(name, Command(skill.description, partial(use, skill), "task", skill))
    return found


# ---- what is done by the session itself ----------------------------------------------------------


def compact(session: Session, focus: str) -> Events[object]:
    return session.compact(focus)


def summary(session: Session, words: str) -> Events[object]:
    return tell(session.sum_up())


def tell(run: Events[str]) -> Events[None]:
    """The events of a run that returns a text, and then this text."""
    text = yield from run
    yield TextDelta(text)


def undo(session: Session, words: str) -> Events[None]:
    yield TextDelta(say_undone("Undone", session.undo()))


def redo(session: Session, words: str) -> Events[None]:
    yield TextDelta(say_undone("Redone", session.redo()))


def say_undone(done: str, result: UndoResult) -> str:
    if result.problem:
        return result.problem
    lines = [f"{done}: {', '.join(result.paths) or 'no file was changed'}."]
    if result.lost:
        lines.append(f"Not restored, since it is not kept: {', '.join(result.lost)}.")
    if result.is_partly_known:
        lines.append("A command of this run may have changed more files.")
    return "\n".join(lines)


DONE = {
    "compact": Command("shorten the conversation", compact, "what matters most"),
    "summary": Command("tell what happened in this conversation", summary),
    "undo": Command("undo the last run: its file changes and its messages", undo),
    "redo": Command("redo what was undone", redo),
}

# ---- prompts -------------------------------------------------------------------------------------


def init(session: Session, words: str) -> str:
    return str(needed("coder.agent.instructions", "/init").INIT)


def review(session: Session, what: str) -> str:
    return str(needed("coder.agent.instructions", "/review").review(what))


PROMPTS = {
    "init": Command("let the model write AGENTS.md for this project", init),
    "review": Command("let the model review what is not committed", review, "what else"),
}


def fill(file: PromptFile, session: Session, words: str) -> str:
    return file.filled(words)


def use(skill: PromptFile, session: Session, task: str) -> str:
    return f"Read {skill.path}, and follow it.\n\n{task}".strip()


def run_plugin(plugin: PluginCommand, session: Session, words: str) -> Events[None]:
    yield TextDelta(str(plugin.function(words) or ""))
