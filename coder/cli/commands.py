"""The commands of a session: their table, and one method each."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from coder.cli import wording
from coder.cli.export import export, write_new
from coder.cli.input import Leave
from coder.cli.keys import silent_keys
from coder.cli.process import defer_sigint
from coder.cli.questions import exact_diff
from coder.cli.screen import one_line
from coder.cli.wording import by_number, count, first_of, plural, session_line, tokens, words_of
from coder.history import text_of
from coder.providers.errors import happened
from coder.sessions.snapshots import UndoResult
from coder.settings import ConfigError, needed, optional
from coder.types import Aborted, CoderError, Message, ModelError, Reasoning

if TYPE_CHECKING:
    from coder.cli.repl import Repl
    from coder.extend.plugins import Command as PluginCommand
    from coder.extend.prompt_files import PromptFile

# Names, the first of them that of a method of Commands, and help
COMMANDS = {
    "help ?": "this list",
    "new reset clear": "begin a new conversation; this one is kept (also /clear)",
    "resume sessions": "continue an older one: /resume [WHICH] (also /sessions)",
    "name": "name this conversation: /name TITLE",
    "model": "show or change the model: /model [NAME]",
    "agent": "show or change the agent: /agent [NAME]",
    "plan": "read and plan only; again: back to work",
    "mode": "the next of build, plan and yolo (also Shift+Tab)",
    "permissions": "list all permission rules",
    "yolo": "answer all questions with yes; again: ask",
    "reasoning": "how much the model thinks (a level), show or hide it",
    "tools": "list the model's tools",
    "skills": "list the skills; asks about those of this project that are not used",
    "tokens cost context": "tokens used, and how full the context is",
    "summary": "tell what happened in this conversation",
    "compact compress": "shorten the conversation: /compact [FOCUS]",
    "undo": "undo the last run: its file changes and its messages",
    "redo": "redo what was undone",
    "back": "go back to before an earlier entry (also Esc twice)",
    "diff": "what the last run changed; /diff all: this conversation",
    "last": "show the whole output of the last tool call; /last 3: of the third last",
    "copy": "copy the last answer to the clipboard, or to a file: /copy [FILE]",
    "export": "write the conversation to a file: /export [FILE.md|.html|.json]",
    "editor": "write the entry in $VISUAL or $EDITOR (also Ctrl+G)",
    "init": "let the model write AGENTS.md for this project",
    "review": "let the model review what is not committed: /review [WHAT]",
    "exit quit q": "exit (also Ctrl+D)",
}
PROMPTS = {"init", "review"}  # only enter a text: a file of this name is used instead
ALIASES = {alias: names.split()[0] for names in COMMANDS for alias in names.split()[1:]}

Entries = list[str]  # what a command wants to be done as if it had been entered
Run = Callable[[str], Entries | None]


class Commands:
    """The commands by name, with a line of help each; those of plugins and files behind the built-in ones."""

    def __init__(self, repl: Repl) -> None:
        self.repl, self.session, self.screen = repl, repl.session, repl.screen
        self.conversation = repl.conversation
        self.listed: list[str] = []  # models, as candidates
        self.known: dict[str, tuple[str, Run]] = {
            (name := names.split()[0]): (text, getattr(self, name))
            for names, text in COMMANDS.items()
        }
        added: dict[str, tuple[str, Run]] = {}
        for file in (
            self.session.parts.prompt_files.commands.values()
            if self.session.parts.prompt_files
            else ()
        ):
            if file.name in PROMPTS:
                del self.known[file.name]
            text = f"{file.description} (this project)" if file.digest else file.description
            added[file.name] = text, partial(self._run_file, file)
        for command in self.session.parts.plugins.commands if self.session.parts.plugins else ():
            added[command.name] = command.help, partial(self._run_plugin, command)
        for name in added.keys() & {*self.known, *ALIASES}:
            self.session.notices.append(f"The added command /{name} is ignored: the name is taken.")
            del added[name]
        self.known |= added

    def run(self, name: str, argument: str) -> Entries:
        """Do it; returns entries that it wants to be done."""
        known = self.known.get(ALIASES.get(name, name))
        try:
            if not known:
                near = get_close_matches(name.lower(), [*self.known, *ALIASES], 1)
                hint = f"did you mean /{near[0]}?" if near else "/help lists them."
                raise ConfigError(f"There is no command /{name}; {hint}")
            return known[1](argument) or []
        except (CoderError, ConfigError) as error:
            self._warn(str(error))
            return []

    def candidates(self, name: str, prefix: str) -> list[str]:
        """What begins like this and can stand behind a command; without a name, the commands themselves."""
        name = ALIASES.get(name, name)
        words: Iterable[str] = ()
        match name:
            case "":
                words = (*self.known, *ALIASES)
            case "model":
                words = self.listed = self.listed or self._models("")
            case "agent":
                words = self.session.parts.primary
            case "reasoning":
                words = (*get_args(Reasoning), "show", "hide")
            case "resume":
                words = (info.title or info.id for info in self.conversation.resumable())
            case "diff":
                words = ("all",)
        return [word for word in words if word.lower().startswith(prefix.lower())]

    def complete(self, before: str, word: str) -> list[str]:
        """What the word behind `before` on the line can become: a path behind @, a command, or what can follow one."""
        attach = optional("coder.cli.attach")
        if attach and (paths := attach.complete_path(before, word)) is not None:
            return list(paths)
        if known := re.fullmatch(r"\s*/([\w?-]+)\s+(.*)", before):
            begun = known[2]
            return [f"{each[len(begun) :]} " for each in self.candidates(known[1], begun + word)]
        is_command = word.startswith("/") and not before.strip()
        return [f"/{each} " for each in self.candidates("", word[1:])] if is_command else []

    def _warn(self, text: str) -> None:
        self.screen.line(text, "yellow")

    def _note(self, text: str) -> None:
        self.screen.line(text, "dim")

    def _run_plugin(self, command: PluginCommand, argument: str) -> None:
        try:
            self.screen.line(str(command.function(argument) or ""))
        except Exception as error:
            self._warn(f"/{command.name} failed: {type(error).__name__}: {error}")

    def _run_file(self, file: PromptFile, argument: str) -> Entries:
        if file.answer != "yes" and not self.trust([file]):
            return []
        # Of several lines: nothing in it is taken for a command
        return [f"{file.filled(argument)}\n"]

    def trust(self, files: Sequence[PromptFile]) -> bool:
        """Ask whether these of the project may instruct the model, if there are any."""
        known = self.session.parts.prompt_files
        allowed = bool(known and files and self.repl.prompter.ask_trust(known, files))
        if allowed:
            self.session.crew.set_prompt()
        return allowed

    def help(self, argument: str) -> None:
        for key, text in [
            *((f"/{name}", text) for name, (text, _) in self.known.items()),
            *wording.KEYS.items(),
        ]:
            self.screen.line(text, head=f"  {key:<12} ")
        self.screen.line(wording.WORKING)

    def tools(self, argument: str) -> None:
        for each in self.session.agent.state.tools.tools.values():
            self.screen.line(one_line(each.description, 200), head=f"  {each.name:<12} ")
        if self.session.parts.servers and (pending := self.session.parts.servers.pending()):
            self._note(f"MCP servers not in this list yet: {', '.join(pending)}.")

    def skills(self, argument: str) -> None:
        """List them, and ask about those of this project that are not used."""
        known = (
            list(self.session.parts.prompt_files.skills.values())
            if self.session.parts.prompt_files
            else []
        )
        for each in known:
            unused = "" if each.answer == "yes" else " (not used)"
            self.screen.line(each.description + unused, head=f"  {each.name:<12} ")
        if not known:
            self._note("There are no skills. They are folders with a SKILL.md: docs/settings.md")
        self.trust([each for each in known if each.answer != "yes"])

    def init(self, argument: str) -> Entries:
        return [needed("coder.agent.instructions", "/init").INIT]

    def review(self, argument: str) -> Entries:
        # Of several lines: nothing in it is taken for a command
        return [needed("coder.agent.instructions", "/review").review(argument) + "\n"]

    def editor(self, argument: str) -> Entries:
        return [*self.repl.keyboard.edit(argument)]

    def exit(self, argument: str) -> None:
        raise Leave(0)

    # -- the model

    def model(self, argument: str) -> None:
        """Show or change it: a name, a part of one, or what is chosen of those that fit."""
        names, now = self._models(argument, self._note), self.session.model.name
        near = [name for name in names if argument.lower() in name.lower()]
        if argument and names and not near:
            self._note(f"The server does not list it; nearest: {first_of(names, 3)}.")
        elif near[1:] and argument not in names:
            rows = ((f"{'*' if name == now else ' '} {name}", "") for name in near)
            if chosen := self.repl.prompter.choose(near, rows, "number or name: "):
                self.model(chosen)  # a part of a name will do here, too
                return
            argument = ""
        elif argument and near:
            argument = near[0]
        if argument:
            self.session.use(model=argument)
        self.screen.line(f"{self.session.model.name} at {self.session.settings.host}")

    def _models(self, near: str, report: Callable[[str], object] = str) -> list[str]:
        """Those that the server names, the nearest to a name first; none where it names none."""
        from coder.cli.models import models_of  # late: for this command only

        try:
            return models_of(self.session.model.endpoint, near)
        except ModelError as error:
            report(f"The server does not list its models: {happened(error)}.")
            return []

    def reasoning(self, argument: str) -> None:
        levels, word, state = get_args(Reasoning), argument.lower(), self.session.agent.state
        if word in levels:
            state.reasoning = cast(Reasoning, word)
        elif word in ("show", "hide"):
            self.repl.render.show_reasoning = word == "show"
        elif word:
            self._warn(f"/reasoning accepts {', '.join(levels)}, show or hide.")
            return
        visible = "shown" if self.repl.render.show_reasoning else "hidden"
        self.screen.line(f"reasoning: {state.reasoning}, {visible}")

    def tokens(self, argument: str) -> None:
        used, window = (
            self.session.newest.input + self.session.newest.output,
            self.session.model.context_window,
        )
        full = f"{count(used)} of {count(window)} tokens ({100 * self.session.context_used:.0f} %)"
        self.screen.line(f"this session: {tokens(self.session.usage)}")
        self.screen.line(f"context: {full}, {plural(len(self.session.messages), 'message')}")

    def summary(self, argument: str) -> None:
        text = "There is no summary."
        with contextlib.suppress(Aborted, KeyboardInterrupt), silent_keys():
            text = self.repl.follow(self.session.sum_up()) or text
        self.repl.render.pause()
        self.screen.line(text)

    def compact(self, argument: str) -> None:
        stopped = True
        with contextlib.suppress(Aborted, KeyboardInterrupt), silent_keys():
            self.repl.follow(self.session.compact(argument))
            stopped = False
        self.repl.render.pause()
        if stopped:
            self._note("The conversation stays as it is.")

    # -- who works, and what is allowed

    def agent(self, argument: str) -> None:
        known = self.session.parts.primary
        if not argument:
            for name, each in known.items():
                mark = "*" if name == self.session.spec.name else " "
                self.screen.line(each.description, head=f"{mark} {name:<12} ")
        elif argument in known:
            self.session.use(agent=argument)
            self._note(f"Agent {argument}: {self.session.spec.description}.")
        else:
            self._warn(f"There is no agent {argument}; known: {', '.join(known)}.")

    def plan(self, argument: str) -> Entries:
        """Between plan and build; what is behind the word is entered."""
        self.agent("build" if self.session.spec.name == "plan" and not argument else "plan")
        return [argument] if argument else []

    def permissions(self, argument: str) -> None:
        given = self.session.permissions
        self.screen.line(wording.RULES)
        for rule in [*given.rules, *given.agent, *given.flags, *given.workspace, *given.memory]:
            exactly = "exactly " if rule.is_exact else ""
            text = f"{rule.permission}: {exactly}{rule.pattern}  ({rule.source})"
            self.screen.line(text, head=f"  {rule.action:<6} ")
        if given.yolo:
            self._warn("  All other questions are answered yes (yolo).")

    def mode(self, argument: str) -> None:
        """The next of build, plan and yolo; the prompt shows it."""
        was_yolo = self.session.permissions.yolo
        was_plan = self.session.spec.name == "plan"
        self.session.permissions.yolo = was_plan and not was_yolo
        self.session.use(agent="build" if was_plan or was_yolo else "plan")

    def yolo(self, argument: str) -> None:
        permissions = self.session.permissions
        permissions.yolo = not permissions.yolo
        off = "Commands and edits are no longer asked about; /yolo turns that off."
        self._warn(off if permissions.yolo else "Asking again.")

    # -- the last run

    def undo(self, argument: str) -> None:
        self._take_back(1)

    def _take_back(self, number: int) -> None:
        """Undo so many runs, or as many as can be; the entry of the earliest stands at the prompt, to be reworded."""
        prompt, snapshots = "", self.conversation.snapshots
        for left in range(len(snapshots.runs), len(snapshots.runs) - number, -1):
            undone = self._travel("Undone", snapshots.undo)
            if len(snapshots.runs) == left:  # the reason has been shown
                break
            prompt = undone
        if prompt:
            self.repl.keyboard.early.insert(0, " ".join(words_of(prompt).split()))

    def back(self, argument: str) -> None:
        """Undo all runs from the one on whose entry is chosen; the newest has the number 1."""
        runs = self.conversation.snapshots.runs
        said = {each.get("meta", {}).get("timestamp"): each for each in self.session.messages}
        entries = (words_of(text_of(said.get(run.message, {}))) for run in reversed(runs))
        rows = ((entry or "(no longer in the conversation)", "") for entry in entries)
        numbers = [str(number) for number in range(1, len(runs) + 1)]
        if not runs:
            self._note("There is no entry to go back to.")
        elif not argument:
            self.screen.line(wording.BACK, "bold")
            argument = self.repl.prompter.choose(numbers, rows, "number: ")
        if argument in numbers:
            self._take_back(int(argument))
        elif argument:
            self._warn(f"There is no entry {argument}.")

    def redo(self, argument: str) -> None:
        self._travel("Redone", self.conversation.snapshots.redo)

    def _travel(self, done: str, how: Callable[[list[Message]], UndoResult]) -> str:
        """Undo or redo, which must not be left half done: a Ctrl+C meanwhile changes nothing. The run's prompt."""
        result = UndoResult(problem="Nothing was done.")
        with contextlib.suppress(KeyboardInterrupt), silent_keys(), defer_sigint():
            result = how(self.session.messages)
            self.conversation.settle()
        if result.problem:
            self._warn(result.problem)
        else:
            self.screen.line(f"{done}: {first_of(result.paths) or 'no file was changed'}.")
        if result.lost:
            self._warn(f"Not restored, since the contents are gone: {first_of(result.lost)}.")
        return result.prompt

    def diff(self, argument: str) -> None:
        snapshots = self.conversation.snapshots
        run = snapshots.runs[-1] if snapshots.runs and argument != "all" else None
        changes = snapshots.diff(run) if snapshots.runs else ""
        for row in exact_diff(changes) if changes else [[("No file was changed.", "dim")]]:
            self.screen.exact_line(*row)

    def last(self, argument: str) -> None:
        """Show the output of the call with this number, or which numbers there are."""
        known = self.repl.render.last
        number = int(argument) if argument.isdecimal() else int(not argument)
        if not known:
            self._note("No tool was called yet.")
        elif 0 < number <= len(known):
            self.repl.render.show_last(number)
        else:
            for number, (title, _) in enumerate(known, 1):
                self.screen.line(one_line(f"{number:>3}  {title}", self.screen.width - 1))

    def copy(self, argument: str) -> None:
        answers = (each for each in self.session.messages[::-1] if each["role"] == "assistant")
        text = next(filter(None, (text_of(each).strip() for each in answers)), "")
        if not text:
            self._note("There is no answer yet.")
        elif argument:
            write_new(path := Path(os.path.expanduser(argument)), f"{text}\n")
            self.screen.line(f"Written to {path}.")
        elif how := needed("coder.cli.clipboard", "/copy").copy(text, self.screen):
            self.screen.line(
                f"Copied {len(text)} characters {how}. /copy FILE writes them to a file."
            )
        else:
            self._warn(
                "This terminal has no clipboard, or one that is too small; /copy FILE writes a file."
            )

    # -- conversations

    def new(self, argument: str) -> None:
        self.session.begin()
        self._note("A new conversation.")

    def resume(self, argument: str) -> None:
        infos, store = self.conversation.resumable(), self.conversation.store
        ids = [info.id for info in infos]
        if argument:
            argument = by_number(ids, argument)
        elif infos:
            width = self.screen.width - 6
            lines = (session_line(info, width=width) for info in infos)
            ends = (f"{one_line(ask, width // 2)} → {text}" for ask, text in map(store.ending, ids))
            argument = self.repl.prompter.choose(ids, zip(lines, ends), "number, name or id: ")
        else:
            self._note("There is no older conversation in this folder.")
        if argument:
            self.session.resume(argument)
            self.screen.line()
            self.repl.replay()

    def name(self, argument: str) -> None:
        if argument:
            self.conversation.rename(argument)
        title = self.conversation.recorder.info.title
        self._note(f"This conversation: {title or 'without a name; /name TITLE gives one'}")

    def export(self, argument: str) -> None:
        path = export(self.conversation, self.session.settings, argument)
        self.screen.line(f"Written to {path}.")
