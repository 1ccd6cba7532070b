"""Prompt files: commands and skills as Markdown, of the user's, and of the project's after a yes.

    ~/.config/coder/commands/review.md     /review WORDS at the prompt: its text is entered
    ~/.config/coder/skills/pdf/SKILL.md    the system prompt has its name and description; the model
                                           reads the rest

What a project brings instructs nobody unseen. A yes is kept for a path and its content (of a skill:
all files of its folder), so that text that has changed is asked about again. A project's file never
replaces one of the user's with the same name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from coder.agent.profiles import split_front_matter
from coder.permissions.ownership import check_ownership
from coder.permissions.sanitize import escape_invisible
from coder.tools.workspace import escaped, read_small_file, real
from coder.types import Report, ignore

NAME = r"(?a)[a-z0-9][\w-]{0,63}"
SKILL = "SKILL.md"  # the name of a skill's file
MAX_FILES = 200  # of a project's folder
MAX_FILE = 64_000  # bytes
MAX_FOLDER = 20_000_000  # bytes of a project's skill; each file counts for some more
MAX_DESCRIPTION = 1024  # characters, as agentskills.io has it
PLACEHOLDER = r"\$(ARGUMENTS\b|[1-9](?!\d))"
# `key: value`, with | or > before a block
ENTRY = r"([\w-]+):(?:\s+(?:[|>][+-]?)?(.*))?"
QUOTED = r"\A(['\"])(.*)\1\Z"
SKILLS = (
    "Skills: files with the user's instructions. "
    "Where one fits the task, read it first and follow it."
)


@dataclass
class PromptFile:
    """A command or a skill.

    `answer` is the user's to a file of a project: "yes", "no", "later", "changed" (since the
    answer) or "". `digest` is the hash of its content; the user's own files have none, and need no
    answer.
    """

    name: str
    path: Path
    description: str
    text: str
    digest: str = ""
    answer: str = "yes"

    @property
    def is_skill(self) -> bool:
        return self.path.name == SKILL

    def filled(self, words: str) -> str:
        """The text with the user's words for $ARGUMENTS and $1 to $9, else with them at its end."""
        try:
            arguments = shlex.split(words)
        except ValueError:  # a quote without its end
            arguments = words.split()
        values = {str(number): word for number, word in enumerate(arguments, 1)}
        values["ARGUMENTS"] = words

        def value_of(placeholder: re.Match[str]) -> str:
            return values.get(placeholder[1], "")

        text, count = re.subn(PLACEHOLDER, value_of, self.text)
        if count == 0:
            text = f"{text}\n\n{words}".strip()
        # The user's own @path attaches a file unasked; in a project's file it is text
        if self.digest:
            text = re.sub(r"(?<!\S)@", r"\\@", text)
        return text


class PromptFiles:
    """All commands and skills of a session.

    `users` and `projects` are folders with `skills`, the first of each also with `commands`;
    `answers` is the file of what the user has answered. `report` gets a sentence for each file left
    out.
    """

    def __init__(
        self,
        users: Sequence[Path],
        projects: Sequence[Path],
        answers: Path,
        report: Report = ignore,
    ) -> None:
        self.answers = answers
        self.report = report
        self.commands: dict[str, PromptFile] = {}
        self.skills: dict[str, PromptFile] = {}
        with_commands = {users[0], projects[0]}
        for folder in users:
            for path in _paths_in(folder, folder in with_commands):
                self._add(path, project=None)
        # A project in the home folder may have the user's own folder
        own = {real(folder) for folder in users}
        for folder in projects:
            if real(folder) in own:
                continue
            paths = _paths_in(folder, folder in with_commands)
            if len(paths) > MAX_FILES:
                report(f"Only {MAX_FILES} files of {escaped(str(folder))} count.")
            for path in paths[:MAX_FILES]:
                self._add(path, project=folder.parent)

    def _add(self, path: Path, project: Path | None) -> None:
        """Add the command or skill of a file, unless its name is taken."""
        try:
            added = read_prompt_file(path, project)
        except (OSError, ValueError) as error:
            self.report(f"{escaped(str(path))} is ignored: {error}.")
            return
        if added.digest:
            added.answer = self._answer_to(added)
        files = self.skills if added.is_skill else self.commands
        files.setdefault(added.name, added)

    def _answer_to(self, file: PromptFile) -> str:
        """What the user has answered to this content; "changed" if the file had another."""
        word, _, digest = self._answers.get(str(file.path), "").partition(" ")
        if not digest:
            return ""
        return word if digest == file.digest else "changed"

    @cached_property
    def _answers(self) -> dict[str, str]:
        return self._read_answers()

    def _read_answers(self) -> dict[str, str]:
        """ "answer digest" by path."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            check_ownership(self.answers)
            answers = json.loads(self.answers.read_text())
            return {path: str(answer) for path, answer in answers.items()}
        return {}

    def answer(self, files: Sequence[PromptFile], answer: str) -> None:
        """Take the user's answer. A yes and a no are kept, for this session if not on disk."""
        for file in files:
            file.answer = answer
        if answer == "later":
            return
        new = {str(file.path): f"{answer} {file.digest}" for file in files}
        with contextlib.suppress(OSError):
            self.answers.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            text = json.dumps(self._read_answers() | new, indent=1)
            with open(self.answers, "w", opener=partial(os.open, mode=0o600)) as output:
                output.write(text)

    def unanswered(self) -> list[PromptFile]:
        """The skills to ask the user about."""
        return [skill for skill in self.skills.values() if skill.answer in ("", "changed")]

    @property
    def section(self) -> str:
        """The part of the system prompt about the skills; "" if there are none."""
        usable = [skill for skill in self.skills.values() if skill.answer == "yes"]
        if not usable:
            return ""
        lines = [f"- {skill.name}: {skill.description} ({skill.path})" for skill in usable]
        return "\n".join([SKILLS, *lines])


def _paths_in(folder: Path, with_commands: bool) -> list[Path]:
    """The files of a folder that are skills, and, `with_commands`, commands."""
    paths = sorted(folder.glob(f"skills/*/{SKILL}"))
    if with_commands:
        paths += sorted(folder.glob("commands/*.md"))
    return paths


def read_prompt_file(path: Path, project: Path | None = None) -> PromptFile:
    """The command or skill of a file of the user's, or of `project`. Raises OSError, ValueError."""
    is_skill = path.name == SKILL
    name = (path.parent.name if is_skill else path.stem).lower()
    if not re.fullmatch(NAME, name):
        raise ValueError("a name has letters, digits, - and _ only")

    data = _read_owned(path, project)
    whole = data.decode("utf-8", "replace").replace("\r\n", "\n")
    front, text = split_front_matter(whole)
    description = read_front_matter(front or "").get("description", "")
    if not text or (is_skill and not description):
        raise ValueError("it has no text, or no description in its front matter")
    if not description:  # a command may do without: its first line is taken
        description = text.partition("\n")[0].strip("# ")
    if is_skill:  # the model reads the whole file
        text = whole
    file = PromptFile(
        name=name,
        path=path,
        description=escape_invisible(" ".join(description.split()))[:MAX_DESCRIPTION],
        text=escape_invisible(text),  # as the model gets it
    )
    if project is not None:
        file.digest = _digest_of(data, real(path))
    return file


def _read_owned(path: Path, project: Path | None) -> bytes:
    """The bytes of a file of the user's, or of one inside `project`. Raises OSError, ValueError."""
    file = real(path)
    if project is None:
        check_ownership(path)
    elif file.name != path.name or not file.is_relative_to(real(project)):
        raise ValueError("it is a link that leads elsewhere")
    data = read_small_file(file, MAX_FILE + 1)
    if data is None or len(data) > MAX_FILE:
        raise ValueError(f"it is no regular file of at most {MAX_FILE:,} bytes")
    return data


def _digest_of(data: bytes, path: Path) -> str:
    """The hash of a file's bytes, and of all that is in the folder of a skill."""
    digest = hashlib.sha256(data)
    if path.name == SKILL:
        for piece in _contents(path.parent):
            digest.update(piece)
    return digest.hexdigest()


def _contents(folder: Path) -> Iterator[bytes]:
    """Names and content of all files in a folder. Raises ValueError if a reader would find more."""
    room = MAX_FOLDER
    for parent, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files + folders):
            path = Path(parent, name)
            data: bytes | None = b""
            if path.is_symlink() or not path.is_dir():
                data = read_small_file(path, room + 1)
            if data is None:
                name = escaped(path.name)
                raise ValueError(f"{name} in its folder is a link, or no file to read")
            room -= len(data) + 1000
            if room < 0:
                raise ValueError("its folder holds too much")
            yield os.fsencode(f"{path.relative_to(folder)}\0{len(data)}\0") + data


def read_front_matter(text: str) -> dict[str, str]:
    """The `key: value` lines; indented lines after one belong to its value.

    It gives no right, so what is not understood is passed over.
    """
    head: dict[str, str] = {}
    key = ""
    for line in text.splitlines():
        entry = re.fullmatch(ENTRY, line)
        if entry:
            key = entry[1]
            head[key] = entry[2] or ""
        elif key and line[:1].isspace():
            head[key] += f" {line.strip()}"
    return {key: re.sub(QUOTED, r"\2", value.strip()) for key, value in head.items()}
