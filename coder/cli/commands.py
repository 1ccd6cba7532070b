"""The commands of a session: /help and the others, one function each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, cast, get_args

from coder.abort import Abort
from coder.agent.instructions import INIT
from coder.agent.profiles import choices
from coder.agent.titles import summary_of
from coder.cli.input import Leave, silent_keys
from coder.cli.questions import exact_diff
from coder.cli.screen import one_line
from coder.cli.signals import defer_sigint
from coder.cli.wording import count, message_count, session_line, tokens
from coder.extend.plugins import Command as PluginCommand
from coder.providers.errors import explain
from coder.sessions.snapshot_repo import SnapshotError
from coder.sessions.snapshots import UndoResult
from coder.sessions.store import StoreError
from coder.types import Aborted, ModelError, Reasoning

if TYPE_CHECKING:
    from coder.cli.repl import Repl

ALIASES = {
    "?": "help",
    "quit": "exit",
    "q": "exit",
    "reset": "new",
    "clear": "new",
    "cost": "tokens",
    "context": "tokens",
    "sessions": "resume",
    "compress": "compact",
}
ENTRIES = {
    "!command": "give it the terminal, and add its output to the conversation",
    "!!command": "only run it",
    '"""': "begins and ends an entry of several lines; so does \\ at a line's end",
}
LISTED = 15  # sessions to choose from

Entries = list[str]  # what a command wants to be done as if it had been entered
Run = Callable[[str], Entries | None]


class Commands:
    """The commands by name, with a line of help each; those of plugins behind ours."""

    def __init__(self, repl: Repl) -> None:
        self.repl, self.app, self.memory, self.screen = (
            repl,
            repl.app,
            repl.memory,
            repl.screen,
        )
        self.known: dict[str, tuple[str, Run]] = {
            "help": ("this list", self.help),
            "new": ("begin a new conversation; this one is kept (also /clear)", self.new),
            "resume": ("go on with an older one: /resume [ID] (also /sessions)", self.resume),
            "model": ("show the model, or go on with another: /model NAME", self.model),
            "agent": ("who works, or let another one go on: /agent [NAME]", self.agent),
            "plan": ("read and plan, change nothing; again: go to work", self.plan),
            "permissions": ("what is allowed, asked and denied", self.permissions),
            "yolo": ("ask no more, or again", self.yolo),
            "reasoning": ("how much the model thinks (a level), show or hide it", self.reasoning),
            "tools": ("the tools the model has", self.tools),
            "tokens": ("what was used so far", self.tokens),
            "summary": ("let the model sum up the conversation", self.summary),
            "compact": ("shorten the conversation: /compact [what matters most]", self.compact),
            "undo": (
                "take back the last run: its changes of files, and its part of the conversation",
                self.undo,
            ),
            "redo": ("do again what was undone", self.redo),
            "diff": ("what the last run changed; /diff all: this conversation", self.diff),
            "export": (
                "write the conversation to a file: /export [FILE.md|.html|.json]",
                self.export,
            ),
            "init": ("let the model write AGENTS.md for this project", lambda argument: [INIT]),
            "exit": ("leave (also Ctrl+D)", self.exit),
        }
        for command in self.app.plugins.commands if self.app.plugins else ():
            self._add(command)

    def run(self, name: str, argument: str) -> Entries:
        """Do it; returns entries that it wants to be done."""
        known = self.known.get(ALIASES.get(name, name))
        if known is None:
            near = get_close_matches(name.lower(), [*self.known, *ALIASES], 1)
            hint = f"did you mean /{near[0]}?" if near else "/help lists them."
            self.screen.line(f"There is no command /{name}; {hint}", "yellow")
            return []
        return known[1](argument) or []

    def _add(self, command: PluginCommand) -> None:
        """A plugin's command. One with a name of ours is left out."""
        if command.name in self.known or command.name in ALIASES:
            self.app.notices.append(
                f"A plugin's command /{command.name} is left out: the name is taken."
            )
            return

        def run(argument: str) -> None:
            try:
                said = command.function(argument)
            except Exception as error:  # whatever somebody's code raises
                self.screen.line(
                    f"/{command.name} failed: {type(error).__name__}: {error}",
                    "yellow",
                )
                return
            if said:
                self.screen.line(str(said))

        self.known[command.name] = command.help, run

    # -- about the program

    def help(self, argument: str) -> None:
        column = max(map(len, self.known))
        for name, (text, _) in self.known.items():
            self.screen.listed(f"  /{name:<{column}} ", text)
        for name, text in ENTRIES.items():
            self.screen.listed(f"  {name:<{column}}  ", text)
        self.screen.line(
            "While it works: a line steers it, +line waits until it is done, a command comes after "
            "the run."
        )

    def tools(self, argument: str) -> None:
        for each in self.app.agent.state.tools.tools.values():
            self.screen.listed(f"  {each.name:<12} ", each.description)

    def exit(self, argument: str) -> None:
        raise Leave(0)

    # -- the model

    def model(self, argument: str) -> None:
        if argument:
            self.app.use(argument)
        self.screen.line(f"{self.app.model.name} at {self.app.settings.host}")

    def reasoning(self, argument: str) -> None:
        """The level, and whether thoughts are shown."""
        levels, word = get_args(Reasoning), argument.lower()
        if word in levels:
            self.app.agent.state.thinking_level = cast(Reasoning, word)
        elif word in ("show", "hide"):
            self.repl.render.show_reasoning = word == "show"
        elif word:
            self.screen.line(f"/reasoning takes {', '.join(levels)}, show or hide.", "yellow")
            return
        shown = "shown" if self.repl.render.show_reasoning else "hidden"
        self.screen.line(f"reasoning: {self.app.agent.state.thinking_level}, {shown}")

    # -- who works, and what is allowed

    def agent(self, argument: str) -> None:
        known = choices(self.app.agents, "primary", "all")
        if not argument:
            for each in known:
                mark = "*" if each.name == self.app.spec.name else " "
                self.screen.listed(f"{mark} {each.name:<12} ", each.description)
        elif argument in [each.name for each in known]:
            self.app.work_as(argument)
            self.screen.line(f"{argument} goes on: {self.app.spec.description}.", "dim")
        else:
            self.screen.line(
                f"There is no agent {argument}; there are {', '.join(each.name for each in known)}.",
                "yellow",
            )

    def plan(self, argument: str) -> Entries:
        """Between plan and build; what is behind the word is entered."""
        self.agent("build" if self.app.spec.name == "plan" and not argument else "plan")
        return [argument] if argument else []

    def permissions(self, argument: str) -> None:
        permissions = self.app.permissions
        self.screen.line(
            "Of the rules that fit an action the last decides. Where none fits, "
            "reading is free in this folder, and so are plain pwd, ls, cat, head, tail, "
            "wc and echo; commands, edits and places outside are asked about."
        )
        rules = [
            *permissions.rules,
            *permissions.agent,
            *permissions.flags,
            *permissions.workspace,
            *permissions.memory.rules,
        ]
        for rule in rules:
            self.screen.listed(
                f"  {rule.action:<6} ", f"{rule.permission}: {rule.pattern}  ({rule.source})"
            )
        for kind, text in sorted(permissions.memory.exact):
            self.screen.listed("  allow  ", f"{kind}: exactly {text}  (you, this session)")
        if permissions.yolo:
            self.screen.line("  All other questions are answered yes (yolo).", "yellow")

    def yolo(self, argument: str) -> None:
        permissions = self.app.permissions
        permissions.yolo = not permissions.yolo
        said = (
            "Commands and edits are no longer asked about; /yolo turns that off."
            if permissions.yolo
            else "Asking again."
        )
        self.screen.line(said, "yellow")

    def tokens(self, argument: str) -> None:
        session = self.app
        used = session.newest.input + session.newest.output
        window = session.model.context_window
        self.screen.line(f"this session: {tokens(session.usage)}")
        self.screen.line(
            f"context: {count(used)} of {count(window)} tokens ({100 * used / max(1, window):.0f} %), "
            f"{message_count(len(session.agent.messages))}"
        )

    def summary(self, argument: str) -> None:
        abort, text = Abort(), ""
        self.screen.status("summing up")
        try:
            with silent_keys(), self.app.interrupts.stopping(abort):
                text = summary_of(
                    self.app.chat_model(self.app.model.name), self.app.agent.messages, abort
                )
        except (Aborted, KeyboardInterrupt):
            text = "stopped by you"
        except ModelError as error:
            text = f"There is no summary: {explain(error)}"
        finally:
            self.screen.status("")
        self.screen.line(text or "There is no summary: the model wrote nothing.")

    def compact(self, argument: str) -> None:
        done = False
        with contextlib.suppress(Aborted), silent_keys(), self.repl.hard_stop():
            done = self.app.compact(argument, self.repl.show)
        self.screen.status("")
        if not done:
            self.screen.line("The conversation stays as it is.", "dim")

    # -- what the last run did

    def undo(self, argument: str) -> None:
        done = self._wholly("taking back", self.memory.undo)
        self._undone(done, "Taken back")
        if not done.problem:
            # To be said in another way
            self.repl.keyboard.early.insert(0, self.memory.undone[-1].words)

    def redo(self, argument: str) -> None:
        self._undone(self._wholly("doing again", self.memory.redo), "Done again")

    def _wholly(self, what: str, work: Callable[[], UndoResult]) -> UndoResult:
        """Do what must not be left half done: a Ctrl+C meanwhile changes nothing."""
        done = UndoResult(problem="Nothing was done.")
        self.screen.status(what)
        try:
            with contextlib.suppress(KeyboardInterrupt), silent_keys(), defer_sigint():
                done = work()
        finally:
            self.screen.status("")
        return done

    def _undone(self, done: UndoResult, what: str) -> None:
        if done.problem:
            self.screen.line(" ".join([done.problem, *done.conflicts]), "yellow")
            return
        self.screen.line(f"{what}: {_listed(done.paths) or 'no file was changed'}.")
        lost = f"Not kept, and left as they are: {_listed(done.lost)}" if done.lost else ""
        for text in filter(None, [done.note, lost]):
            self.screen.line(text, "dim")

    def diff(self, argument: str) -> None:
        snapshots = self.memory.snapshots
        if not snapshots.runs:
            self.screen.line("Nothing was done yet.", "dim")
            return
        try:
            changes = snapshots.diff(None if argument == "all" else snapshots.runs[-1])
        except SnapshotError as error:
            self.screen.line(str(error), "yellow")
            return
        if changes:
            for line, style in exact_diff(changes):
                self.screen.exact_line(line, style)
        else:
            self.screen.line("No file was changed.", "dim")

    def export(self, argument: str) -> None:
        """Into the working folder, never over a file that is there."""
        from coder.cli.subcommands import reason, write_export

        if not (recorder := self.memory.recorder):
            self.screen.line(
                "This conversation is not kept, so there is nothing to export.", "yellow"
            )
            return
        self.memory.sync()
        try:
            path = write_export(
                self.memory.store, recorder.session_id, argument, *self.app.settings.keys
            )
        except (StoreError, OSError, ValueError) as error:
            self.screen.line(reason(error), "yellow")
            return
        self.screen.line(f"Written to {path}.")

    # -- conversations

    def new(self, argument: str) -> None:
        self.memory.begin()
        self.screen.line("A new conversation.", "dim")

    def resume(self, argument: str) -> None:
        """By id, or by its number in the list."""
        try:
            infos = self.memory.list()[:LISTED]
        except StoreError as error:
            self.screen.line(str(error), "yellow")
            return
        if not argument:
            if not infos:
                self.screen.line("There is no older conversation in this folder.", "dim")
                return
            for number, info in enumerate(infos, 1):
                self.screen.line(
                    one_line(f"{number:>3}  {session_line(info)}", self.screen.width - 1)
                )
            argument = self.repl.keyboard.answer("number or id: ")
        chosen = (
            infos[int(argument) - 1].id
            if argument.isdecimal() and 0 < int(argument) <= len(infos)
            else argument
        )
        if not chosen:
            return
        try:
            self.memory.resume(chosen)
        except StoreError as error:
            self.screen.line(str(error), "yellow")
            return
        self.repl.replay()


def _listed(paths: Sequence[str]) -> str:
    """The first of them."""
    return ", ".join(paths[:LISTED]) + (
        f" and {len(paths) - LISTED} more" if len(paths) > LISTED else ""
    )
