"""Prompt files: commands and skills as Markdown, of the user's, and of the project's after a yes.

    ~/.config/coder/commands/review.md     /review WORDS at the prompt: its text is entered
    ~/.config/coder/skills/pdf/SKILL.md    name and description stand in the system prompt; the model reads the rest

What a project brings instructs nobody unseen. A yes is kept for a path and what is there (of a skill: all files of
its folder), so that text that has changed is asked about again. It never takes a name of the user's.
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
from functools import partial
from pathlib import Path

from coder.agent.profiles import split_front_matter
from coder.permissions.rules import check_ownership
from coder.permissions.sanitize import escape_invisible
from coder.tools.workspace import escaped, read_small_file
from coder.types import Report

NAME = re.compile(r"[a-z0-9][\w-]{0,63}", re.A)
MAX_FILES = 200  # of a project's folder
MAX_FILE = 64_000  # bytes
MAX_FOLDER = 20_000_000  # bytes of a project's skill; each file counts for some more
MAX_DESCRIPTION = 1024  # characters, as agentskills.io has it
SKILLS = "Skills: files with the user's instructions. Where one fits the task, read it first and follow it."


@dataclass
class PromptFile:
    """A command or a skill. `answer` is the user's to a project's: "yes", "no", "later", "changed" (since then) or "".

    `digest` stands for the content of a project's; the user's own have none, and need no answer.
    """

    name: str
    path: Path
    description: str
    text: str
    digest: str = ""
    answer: str = "yes"

    @property
    def is_skill(self) -> bool:
        return self.path.name == "SKILL.md"

    def filled(self, words: str) -> str:
        """The text with words of the user's in the place of $ARGUMENTS and $1 to $9; without a place, behind it."""
        try:
            each = shlex.split(words)
        except ValueError:  # a quote without its end
            each = words.split()
        values = {"ARGUMENTS": words, **{str(n): word for n, word in enumerate(each, 1)}}
        place = re.compile(r"\$(ARGUMENTS\b|[1-9](?!\d))")
        text, places = place.subn(lambda found: values.get(found[1], ""), self.text)
        text = text if places else f"{text}\n\n{words}".strip()
        # An @path of the user's attaches a file unasked; one of a project's is text
        return re.sub(r"(?<!\S)@", r"\\@", text) if self.digest else text


class PromptFiles:
    """All of a session. `users` and `projects` are folders with `skills`, the first of each also with `commands`;
    `answers` is the file of what the user has answered. `report` gets a sentence for each file left out."""

    def __init__(
        self, users: Sequence[Path], projects: Sequence[Path], answers: Path, report: Report = str
    ) -> None:
        self.answers = answers
        self.commands, self.skills = dict[str, PromptFile](), dict[str, PromptFile]()
        known, real = self._read_answers(), {os.path.realpath(each) for each in users}
        own = [each for each in projects if os.path.realpath(each) not in real]
        for folder in [*users, *own]:
            paths = sorted(folder.glob("skills/*/SKILL.md"))
            if folder in (users[0], projects[0]):
                paths += sorted(folder.glob("commands/*.md"))
            if folder in own and len(paths) > MAX_FILES:
                report(f"Only {MAX_FILES} files of {escaped(str(folder))} count.")
                paths = paths[:MAX_FILES]
            for path in paths:
                try:
                    made = read_prompt_file(path, folder.parent if folder in own else None)
                except (OSError, ValueError) as error:
                    report(f"{escaped(str(path))} is ignored: {error}.")
                    continue
                if made.digest:
                    word, _, digest = known.get(str(path), "").partition(" ")
                    made.answer = word if digest == made.digest else digest and "changed"
                (self.skills if made.is_skill else self.commands).setdefault(made.name, made)

    def _read_answers(self) -> dict[str, str]:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            check_ownership(self.answers)
            return {k: str(v) for k, v in json.loads(self.answers.read_text()).items()}
        return {}

    def answer(self, files: Sequence[PromptFile], answer: str) -> None:
        """Take the user's answer. A yes and a no are kept; what cannot be written is for this session."""
        for each in files:
            each.answer = answer
        if answer == "later":
            return
        new = {str(each.path): f"{answer} {each.digest}" for each in files}
        with contextlib.suppress(OSError):
            self.answers.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            text = json.dumps(self._read_answers() | new, indent=1)
            with open(self.answers, "w", opener=partial(os.open, mode=0o600)) as file:
                file.write(text)

    def unanswered(self) -> list[PromptFile]:
        """The skills to ask the user about."""
        return [each for each in self.skills.values() if each.answer in ("", "changed")]

    @property
    def section(self) -> str:
        """The part of the system prompt about the skills; "" where there is none."""
        usable = [each for each in self.skills.values() if each.answer == "yes"]
        lines = [f"- {each.name}: {each.description} ({each.path})" for each in usable]
        return "\n".join([SKILLS, *lines]) if lines else ""


def read_prompt_file(path: Path, project: Path | None = None) -> PromptFile:
    """The command or skill of a file; the user's, or one of `project`. Raises OSError and ValueError."""
    is_skill, real = path.name == "SKILL.md", Path(os.path.realpath(path))
    name = (path.parent.name if is_skill else path.stem).lower()
    if not NAME.fullmatch(name):
        raise ValueError("a name has letters, digits, - and _ only")
    if not project:
        check_ownership(path)
    elif real.name != path.name or not real.is_relative_to(os.path.realpath(project)):
        raise ValueError("it is a link that leads elsewhere")
    if (data := read_small_file(real, MAX_FILE + 1)) is None or len(data) > MAX_FILE:
        raise ValueError(f"it is no regular file of at most {MAX_FILE:,} bytes")
    whole = data.decode("utf-8", "replace").replace("\r\n", "\n")
    front, text = split_front_matter(whole)
    head = read_front_matter(front or "")
    if not text or (is_skill and not head.get("description")):
        raise ValueError("it has no text, or no description in its front matter")
    said = " ".join((head.get("description") or text.partition("\n")[0].strip("# ")).split())
    said = escape_invisible(said)[:MAX_DESCRIPTION]
    text = escape_invisible(whole if is_skill else text)  # as the model gets it
    if not project:
        return PromptFile(name, path, said, text)
    digest = hashlib.sha256(data)
    for piece in _contents(real.parent) if is_skill else ():
        digest.update(piece)
    return PromptFile(name, path, said, text, digest.hexdigest())


def _contents(folder: Path) -> Iterator[bytes]:
    """Names and content of all files in a folder. Raises ValueError where that is not all that a reader would find."""
    room = MAX_FOLDER
    for place, folders, files in os.walk(folder):
        folders.sort()
        for path in (Path(place, name) for name in sorted(files + folders)):
            is_folder = path.is_dir() and not path.is_symlink()
            if (data := b"" if is_folder else read_small_file(path, room + 1)) is None:
                raise ValueError(
                    f"{escaped(path.name)} in its folder is a link, or no file to read"
                )
            room -= len(data) + 1000
            if room < 0:
                raise ValueError("its folder holds too much")
            yield os.fsencode(f"{path.relative_to(folder)}\0{len(data)}\0") + data


def read_front_matter(text: str) -> dict[str, str]:
    """Its `key: value` lines; what is deeper in a key belongs to its value. It gives no right, so what is not understood is
    passed over."""
    head, key = dict[str, str](), ""
    for line in text.splitlines():
        if entry := re.fullmatch(r"([\w-]+):(?:\s+(?:[|>][+-]?)?(.*))?", line):
            key, head[entry[1]] = entry[1], entry[2] or ""
        elif key and line[:1].isspace():
            head[key] += f" {line.strip()}"
    quotes = re.compile(r"\A(['\"])(.*)\1\Z")
    return {key: quotes.sub(r"\2", value.strip()) for key, value in head.items()}
