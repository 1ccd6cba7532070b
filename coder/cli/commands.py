"""The built-in commands of a session, each in one place: names, help, completion and method.

/help lists them in this order.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast, get_args

from coder.cli import wording
from coder.cli.command_table import CommandTable, Entries, command
from coder.cli.export import export, write_new
from coder.cli.input import Leave
from coder.cli.keys import silent_keys
from coder.cli.process import defer_sigint
from coder.cli.questions import exact_diff
from coder.cli.text_rows import one_line
from coder.cli.wording import by_number, count, first_of, session_line, tokens, words_of
from coder.history import text_of
from coder.providers.errors import happened
from coder.providers.text import plural
from coder.sessions.snapshots import UndoResult
from coder.settings import needed
from coder.types import Aborted, Message, ModelError, Reasoning, ignore


class Commands(CommandTable):
    """A method takes what was typed after the command."""

    _listed: list[str] | None = None  # models, as candidates

    @command("help ?", "this list")
    def help(self, argument: str) -> None:
        rows = {f"/{name}": entry.help for name, entry in self.table.items()}
        for key, text in (rows | wording.KEYS).items():
            self.screen.line(text, head=f"  {key:<12} ")
        self.screen.line(wording.WORKING)

    # -- conversations

    @command("new reset clear", "begin a new conversation; this one is kept (also /clear)")
    def new(self, argument: str) -> None:
        self.session.begin()
        self.note("A new conversation.")

    def _titles(self) -> list[str]:
        return [info.title or info.id for info in self.conversation.resumable()]

    @command(
        "resume sessions", "continue an older one: /resume [WHICH] (also /sessions)", words=_titles
    )
    def resume(self, argument: str) -> None:
        infos = self.conversation.resumable()
        ids = [info.id for info in infos]
        if argument:
            argument = by_number(ids, argument)
        elif infos:
            width = self.screen.width - 6
            rows = ((session_line(info, width=width), self._ending(info.id)) for info in infos)
            argument = self.repl.prompter.choose(ids, rows, "number, name or id: ")
        else:
            self.note("There is no older conversation in this folder.")
        if argument:
            self.session.resume(argument)
            self.screen.line()
            self.repl.replay()

    def _ending(self, session_id: str) -> str:
        """The last question and the beginning of its answer."""
        question, answer = self.conversation.store.ending(session_id)
        return f"{one_line(question, (self.screen.width - 6) // 2)} → {answer}"

    @command("name", "name this conversation: /name TITLE")
    def name(self, argument: str) -> None:
        if argument:
            self.conversation.rename(argument)
        title = self.conversation.recorder.info.title
        self.note(f"This conversation: {title or 'without a name; /name TITLE gives one'}")

    # -- who works, and what is allowed

    def _list_models(self) -> list[str]:
        self._listed = self._listed or self._models("", ignore)
        return self._listed

    @command("model", "show or change the model: /model [NAME]", words=_list_models)
    def model(self, argument: str) -> None:
        name = self._find_model(argument)
        if name:
            self.session.use(model=name)
        self.screen.line(f"{self.session.model.name} at {self.session.settings.host}")

    def _find_model(self, wanted: str) -> str:
        """The model with this name or a part of it; if several fit, the user chooses. "": none."""
        names = self._models(wanted, self.note)
        fitting = [name for name in names if wanted.lower() in name.lower()]
        if len(fitting) > 1 and wanted not in names:
            marks = {self.session.model.name: "*"}
            rows = [(f"{marks.get(name, ' ')} {name}", "") for name in fitting]
            chosen = self.repl.prompter.choose(fitting, rows, "number or name: ")
            return self._find_model(chosen) if chosen else ""  # a part of a name will do here, too
        if not wanted or not names:
            return wanted
        if not fitting:
            self.note(f"The server does not list it; nearest: {first_of(names, 3)}.")
            return wanted
        return fitting[0]

    def _models(self, near: str, report: Callable[[str], object]) -> list[str]:
        """Those that the server names, the nearest to a name first; [] if it names none."""
        from coder.cli.models import models_of  # late: for this command only

        try:
            return models_of(self.session.model.endpoint, near)
        except ModelError as error:
            report(f"The server does not list its models: {happened(error)}.")
            return []

    @command(
        "agent",
        "show or change the agent: /agent [NAME]",
        words=lambda table: table.session.parts.primary,
    )
    def agent(self, argument: str) -> None:
        agents = self.session.parts.primary
        if argument in agents:
            self.session.use(agent=argument)
            self.note(f"Agent {argument}: {self.session.spec.description}.")
        elif argument:
            self.warn(f"There is no agent {argument}; known: {', '.join(agents)}.")
        else:
            for name, spec in agents.items():
                mark = "*" if name == self.session.spec.name else " "
                self.screen.line(spec.description, head=f"{mark} {name:<12} ")

    @command("plan", "read and plan only; again: back to work")
    def plan(self, argument: str) -> Entries:
        """Between plan and build; what follows the word is entered."""
        self.agent("build" if self.session.spec.name == "plan" and not argument else "plan")
        return [argument] if argument else []

    @command("mode", "the next of build, plan and yolo (also Shift+Tab)")
    def mode(self, argument: str) -> None:
        """The prompt shows it."""
        permissions = self.session.permissions
        if self.session.spec.name == "plan":
            permissions.yolo = not permissions.yolo
            self.session.use(agent="build")
        elif permissions.yolo:
            permissions.yolo = False
            self.session.use(agent="build")
        else:
            self.session.use(agent="plan")

    @command("permissions", "list all permission rules")
    def permissions(self, argument: str) -> None:
        active = self.session.permissions
        rules = active.rules + active.agent + active.flags + active.workspace + active.memory
        self.screen.line(wording.RULES)
        for rule in rules:
            exactly = "exactly " if rule.is_exact else ""
            text = f"{rule.permission}: {exactly}{rule.pattern}  ({rule.source})"
            self.screen.line(text, head=f"  {rule.action:<6} ")
        if active.yolo:
            self.warn("  All other questions are answered yes (yolo).")

    @command("yolo", "answer all questions with yes; again: ask")
    def yolo(self, argument: str) -> None:
        permissions = self.session.permissions
        permissions.yolo = not permissions.yolo
        if permissions.yolo:
            self.warn("Commands and edits are no longer asked about; /yolo turns that off.")
        else:
            self.warn("Asking again.")

    @command("step", "stop before each request and each tool, and show what is new; again: off")
    def step(self, argument: str) -> None:
        is_on = self.repl.prompter.step(self.session)
        self.warn("The next run goes step by step." if is_on else "No more stops.")

    # -- what the model knows and how much it thinks

    @command(
        "reasoning",
        "how much the model thinks (a level), show or hide it",
        words=lambda table: (*get_args(Reasoning), "show", "hide"),
    )
    def reasoning(self, argument: str) -> None:
        levels = get_args(Reasoning)
        word = argument.lower()
        state = self.session.agent.state
        if word in levels:
            state.reasoning = cast(Reasoning, word)
        elif word in ("show", "hide"):
            self.repl.render.show_reasoning = word == "show"
        elif word:
            self.warn(f"/reasoning accepts {', '.join(levels)}, show or hide.")
            return
        visible = "shown" if self.repl.render.show_reasoning else "hidden"
        self.screen.line(f"reasoning: {state.reasoning}, {visible}")

    @command("tools", "list the model's tools")
    def tools(self, argument: str) -> None:
        for tool in self.session.agent.state.tools.tools.values():
            self.screen.line(one_line(tool.description, 200), head=f"  {tool.name:<12} ")
        pending = self.session.parts.servers.pending() if self.session.parts.servers else []
        if pending:
            self.note(f"MCP servers not in this list yet: {', '.join(pending)}.")

    @command("skills", "list the skills; asks about those of this project that are not used")
    def skills(self, argument: str) -> None:
        files = self.session.parts.prompt_files
        skills = list(files.skills.values()) if files else []
        for skill in skills:
            unused = "" if skill.answer == "yes" else " (not used)"
            self.screen.line(skill.description + unused, head=f"  {skill.name:<12} ")
        if not skills:
            self.note("There are no skills. They are folders with a SKILL.md: docs/settings.md")
        self.trust([skill for skill in skills if skill.answer != "yes"])

    @command("tokens cost context", "tokens used, and how full the context is")
    def tokens(self, argument: str) -> None:
        newest = self.session.newest_usage
        used = count(newest.input + newest.output)
        window = count(self.session.model.context_window)
        messages = plural(len(self.session.messages), "message")
        share = f"{100 * self.session.context_used:.0f} %"
        self.screen.line(f"this session: {tokens(self.session.usage)}")
        self.screen.line(f"context: {used} of {window} tokens ({share}), {messages}")

    @command("summary", "tell what happened in this conversation")
    def summary(self, argument: str) -> None:
        text = ""
        with contextlib.suppress(Aborted, KeyboardInterrupt), silent_keys():
            text = self.repl.follow(self.session.sum_up())
        self.repl.render.pause()
        self.screen.line(text or "There is no summary.")

    @command("compact compress", "shorten the conversation: /compact [FOCUS]")
    def compact(self, argument: str) -> None:
        stopped = True
        with contextlib.suppress(Aborted, KeyboardInterrupt), silent_keys():
            self.repl.follow(self.session.compact(argument))
            stopped = False
        self.repl.render.pause()
        if stopped:
            self.note("The conversation stays as it is.")

    # -- the last runs

    @command("undo", "undo the last run: its file changes and its messages")
    def undo(self, argument: str) -> None:
        self._take_back(1)

    @command("redo", "redo what was undone")
    def redo(self, argument: str) -> None:
        self._restore("Redone", self.conversation.snapshots.redo)

    @command("back", "go back to before an earlier entry (also Esc twice)")
    def back(self, argument: str) -> None:
        """Undo all runs from the one on whose entry is chosen; the newest has the number 1."""
        entries = self._entries()
        numbers = [str(number) for number in range(1, len(entries) + 1)]
        if not entries:
            self.note("There is no entry to go back to.")
        elif not argument:
            self.screen.line(wording.BACK, "bold")
            rows = [(entry or "(no longer in the conversation)", "") for entry in entries]
            argument = self.repl.prompter.choose(numbers, rows, "number: ")
        if argument in numbers:
            self._take_back(int(argument))
        elif argument:
            self.warn(f"There is no entry {argument}.")

    def _entries(self) -> list[str]:
        """What began the runs that can be undone, the newest first; "" if it is gone."""
        said: dict[object, Message] = {}  # by its time
        for message in self.session.messages:
            said[message.get("meta", {}).get("timestamp")] = message
        runs = self.conversation.snapshots.runs
        messages = [said.get(run.message, {}) for run in reversed(runs)]
        return [words_of(text_of(message)) for message in messages]

    def _take_back(self, number: int) -> None:
        """Undo so many runs, or as many as can be; the entry of the earliest is shown at the
        prompt, to be reworded."""
        prompt = ""
        snapshots = self.conversation.snapshots
        for _ in range(number):
            before = len(snapshots.runs)
            undone = self._restore("Undone", snapshots.undo)
            if len(snapshots.runs) == before:  # the reason has been shown
                break
            prompt = undone
        if prompt:
            self.repl.keyboard.early.insert(0, " ".join(words_of(prompt).split()))

    def _restore(self, done: str, how: Callable[[list[Message]], UndoResult]) -> str:
        """Undo or redo, which must not be left half done: a Ctrl+C during it changes nothing.
        Returns the run's prompt."""
        result = UndoResult(problem="Nothing was done.")
        with contextlib.suppress(KeyboardInterrupt), silent_keys(), defer_sigint():
            result = how(self.session.messages)
            self.conversation.settle()
        if result.problem:
            self.warn(result.problem)
        else:
            self.screen.line(f"{done}: {first_of(result.paths) or 'no file was changed'}.")
        for warning in result.warnings(first_of):
            self.warn(warning)
        return result.prompt

    @command(
        "diff",
        "what the last run changed; /diff all: this conversation",
        words=lambda table: ("all",),
    )
    def diff(self, argument: str) -> None:
        snapshots = self.conversation.snapshots
        changes = ""
        if snapshots.runs:
            changes = snapshots.diff(None if argument == "all" else snapshots.runs[-1])
        if not changes:
            self.note("No file was changed.")
            return
        for row in exact_diff(changes):
            self.screen.exact_line(*row)

    @command("last", "show the whole output of the last tool call; /last 3: of the third last")
    def last(self, argument: str) -> None:
        """Show the output of the call with this number, or which numbers there are."""
        calls = self.repl.render.last
        number = int(argument) if argument.isdecimal() else 0
        if not argument:
            number = 1
        if not calls:
            self.note("No tool was called yet.")
        elif 0 < number <= len(calls):
            self.repl.render.show_last(number)
        else:
            for number, (title, _) in enumerate(calls, 1):
                self.screen.line(one_line(f"{number:>3}  {title}", self.screen.width - 1))

    # -- texts that go out and come in

    @command("copy", "copy the last answer to the clipboard, or to a file: /copy [FILE]")
    def copy(self, argument: str) -> None:
        text = self.repl.newest_text("assistant")
        if not text:
            self.note("There is no answer yet.")
            return
        if argument:
            path = Path(os.path.expanduser(argument))
            write_new(path, f"{text}\n")
            self.screen.line(f"Written to {path}.")
            return
        how = needed("coder.cli.clipboard", "/copy").copy(text, self.screen)
        if how:
            self.screen.line(
                f"Copied {len(text)} characters {how}. /copy FILE writes them to a file."
            )
        else:
            self.warn(
                "This terminal has no clipboard, or one that is too small; /copy FILE writes a file."
            )

    @command("export", "write the conversation to a file: /export [FILE.md|.html|.json]")
    def export(self, argument: str) -> None:
        path = export(self.conversation, self.session.settings, argument)
        self.screen.line(f"Written to {path}.")

    @command("editor", "write the entry in $VISUAL or $EDITOR (also Ctrl+G)")
    def editor(self, argument: str) -> Entries:
        return self.repl.keyboard.edit(argument)

    @command("init", "let the model write AGENTS.md for this project")
    def init(self, argument: str) -> Entries:
        return [needed("coder.agent.instructions", "/init").INIT]

    @command("review", "let the model review what is not committed: /review [WHAT]")
    def review(self, argument: str) -> Entries:
        # Of several lines: nothing in it is taken for a command
        return [needed("coder.agent.instructions", "/review").review(argument) + "\n"]

    @command("exit quit q", "exit (also Ctrl+D)")
    def exit(self, argument: str) -> None:
        raise Leave(0)
