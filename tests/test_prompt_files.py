"""Commands and skills as Markdown files: of the user's, and of a project's after a yes for exactly
this content."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coder.agent.profiles import split_front_matter
from coder.devtools.scripted import Body, Reply
from coder.extend.prompt_files import (
    MAX_FILE,
    MAX_FOLDER,
    PromptFile,
    PromptFiles,
    read_front_matter,
    read_prompt_file,
)
from tests.harness import results, serve
from tests.terminal import OneShot, Terminal

ASKED = "Enter for not now: "
SKILL = "---\ndescription: How it is deployed\n---\nRun it twice.\n"
USERS = "home/.config/coder"
PROJECTS = "ws/.coder"


def put(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def system(body: Body) -> Any:
    return body["messages"][0]["content"]


def entered(server: Any) -> list[Any]:
    return [body["messages"][-1]["content"] for body in server.requests]


# ---- what a file says ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words", "filled"),
    [
        ("Fix $1 of $ARGUMENTS.", "a 'b c'", "Fix a of a 'b c'."),
        ("$2, $9, $10, $ARGUMENTSX", "a 'b c'", "b c, , $10, $ARGUMENTSX"),
        ("$1", "$ARGUMENTS $2", "$ARGUMENTS"),  # once, not what came of it
        ("$1", "it's", "it's"),
        ("Fix it.", "all of it", "Fix it.\n\nall of it"),
        ("Fix it.", "", "Fix it."),
    ],
)
def test_the_words_of_the_user_take_their_places(text: str, words: str, filled: str) -> None:
    assert PromptFile("fix", Path(), "", text).filled(words) == filled


@pytest.mark.parametrize(
    ("text", "head", "body"),
    [
        ("Do it.\n", {}, "Do it."),
        ("---\na: b: c\nd-e: 'f'\n---\n\nDo it.\n", {"a": "b: c", "d-e": "f"}, "Do it."),
        ("---\na: b 'c' d\n---\nDo it.\n", {"a": "b 'c' d"}, "Do it."),
        ("---\na: >-\n  b\n\n  c\nt:\n  - d\n---\nDo", {"a": "b c", "t": "- d"}, "Do"),
        ('\ufeff--- \na: "b\n?! x\n: y\n---', {"a": '"b'}, ""),
        ("---\na: b\nDo it.", {}, "---\na: b\nDo it."),  # no end
        ("Do it.\n---\na: b\n---", {}, "Do it.\n---\na: b\n---"),
    ],
)
def test_odd_front_matter_is_passed_over(text: str, head: dict[str, str], body: str) -> None:
    front, found = split_front_matter(text)
    assert read_front_matter(front or "") == head
    assert found == body


def test_what_is_unseen_is_made_visible_and_no_byte_does_harm(tmp_path: Path) -> None:
    data = b"---\r\ndescription: a\x1b[2J\r\n---\r\nDo\xff \xe2\x80\xaeit.\r\n"
    made = read_prompt_file(put(tmp_path, "x.md", data))
    assert made.description == "a<U+001B>[2J"
    assert made.text == "Do� <U+202E>it."


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def grow(path: Path, size: int) -> None:
    path.touch()
    os.truncate(path, size)


COMMAND = "commands/a.md"
A_SKILL = "skills/a/SKILL.md"
LEFT_OUT: list[tuple[str, Callable[[Path], object], str]] = [
    ("commands/a b.md", Path.touch, "letters, digits"),
    ("commands/a\x1b[2J\n.md", Path.touch, "letters, digits"),
    (COMMAND, lambda path: path.write_text("---\na: b\n---\n"), "no text"),
    (COMMAND, lambda path: grow(path, MAX_FILE + 1), "at most"),
    (COMMAND, fifo, "no regular file"),
    (
        COMMAND,
        lambda path: (path.unlink(), path.mkdir()),
        "no regular file",
    ),
    (COMMAND, lambda path: link(path, "none/a.md"), "no regular file"),
    (COMMAND, lambda path: link(path, "../../../a.md"), "leads elsewhere"),
    (COMMAND, lambda path: link(path, "../../.env"), "leads elsewhere"),
    (A_SKILL, lambda path: path.write_text("Do it."), "no description"),
    (A_SKILL, lambda path: (path.parent / "x").symlink_to("/etc"), "x in its folder is a link"),
    (A_SKILL, lambda path: grow(path.parent / "x", MAX_FOLDER), "too much"),
]


def loaded(place: Path, users: Path) -> tuple[PromptFiles, list[str]]:
    """The user's files and a project's, and what is reported."""
    problems = list[str]()
    answers = place / "answers.json"
    return PromptFiles([users], [place / PROJECTS], answers, problems.append), problems


@pytest.mark.parametrize(("name", "change", "reason"), LEFT_OUT)
def test_what_cannot_be_judged_is_left_out_with_a_sentence(
    tmp_path: Path, name: str, change: Callable[[Path], object], reason: str
) -> None:
    put(tmp_path, "a.md", SKILL), put(tmp_path, "ws/.env", "K=1")
    change(put(tmp_path / PROJECTS, name, SKILL))
    files, [problem] = loaded(tmp_path, tmp_path / "none")
    assert not files.commands
    assert not files.skills
    assert reason in problem
    assert problem.isprintable()


def test_of_a_project_only_so_many_files_count(tmp_path: Path) -> None:
    """Each that is left out is a line at the start."""
    for number in range(250):
        put(tmp_path, f"commands/own{number}.md", "Do it.")
        put(tmp_path / PROJECTS, f"commands/other{number}.md", "Do it.")
    files, [problem] = loaded(tmp_path, tmp_path)
    assert len(files.commands) == 250 + 200
    assert problem.startswith("Only 200 files of ")


@pytest.mark.parametrize("change", ["SKILL.md", "scripts/run", "new", ".hidden/x"])
def test_an_answer_is_for_all_files_of_a_skill(tmp_path: Path, change: str) -> None:
    def load() -> PromptFiles:
        return PromptFiles([tmp_path / "none"], [tmp_path / "ws"], answers)

    answers = tmp_path / "a/answers.json"
    put(tmp_path, "ws/skills/a/SKILL.md", SKILL), put(tmp_path, "ws/skills/a/scripts/run", "ls")
    assert [each.answer for each in load().unanswered()] == [""]
    assert not load().section
    for answer in ("no", "yes"):
        load().answer([*load().skills.values()], answer)
        assert not load().unanswered()
        assert bool(load().section) == (answer == "yes")
    assert answers.stat().st_mode & 0o777 == 0o600
    put(tmp_path / "ws/skills/a", change, SKILL + "x")
    assert [each.answer for each in load().unanswered()] == ["changed"]
    assert not load().section
    answers.write_text("[broken")
    assert load().unanswered()


# ---- commands at the prompt ------------------------------------------------------------------


def test_a_command_is_entered_as_words_and_takes_no_name_that_is_taken(tmp_path: Path) -> None:
    put(tmp_path / USERS, "commands/fix.md", "---\ndescription: mend it\n---\n!touch $1")
    put(tmp_path / USERS, "commands/Exit.md", "no")
    put(tmp_path / PROJECTS, "commands/fix.md", "another")
    with serve(Reply("done")) as server, Terminal(tmp_path, server) as session:
        listed = session.say("/help")
        assert "The added command /exit is ignored" in listed
        assert "mend it" in listed
        session.say("/fix 'it now'")
        assert entered(server) == ["!touch it now"]
        assert not (session.ws / "it now").exists()


def test_one_task_can_be_a_command(tmp_path: Path) -> None:
    put(tmp_path / USERS, "commands/fix.md", "Fix $1 now.")
    put(tmp_path / PROJECTS, "commands/theirs.md", "no")
    with serve(Reply("done")) as server:
        for prompt in ("/fix 'it'\n\nMore.", "/etc/fix it", "/theirs"):
            with OneShot(tmp_path, server, prompt) as session:
                error = session.child.communicate()[1]
        assert entered(server) == ["Fix it now.\n\nMore.", "/etc/fix it"]
        assert b"/theirs is this project's: a session has to ask" in error


def test_a_projects_command_is_shown_and_entered_after_a_yes_for_it(tmp_path: Path) -> None:
    text = "Fix $1.\nThe rest is <hidden>\u202e $9@/etc/passwd.\n"
    file = put(tmp_path / PROJECTS, "commands/fix.md", text)
    with serve(Reply("done")) as server:
        with Terminal(tmp_path, server) as session:
            assert re.search(r"/fix +Fix \$1\. \(this project\)", session.say("/help"))
            for answer, times in (
                ("\r", 0),
                ("n", 0),
                ("y", 1),
            ):
                session.enter("/fix it")
                shown = session.expect(ASKED)
                assert ".coder/commands/fix.md" in shown
                assert "is <hidden><U+202E>" in shown
                session.settled()
                session.type(answer)
                session.prompt()
                assert len(server.requests) == times
            session.say("/fix this")
        assert entered(server)[1] == "Fix this.\nThe rest is <hidden><U+202E> \\@/etc/passwd."
        file.write_text("Fix nothing.\n" + "more\n" * 100)
        with Terminal(tmp_path, server) as session:
            session.enter("/fix it")
            shown = session.expect(ASKED)
            assert "has changed since your answer" in shown
            assert "more characters" in shown
            session.ctrl_c()
            session.prompt()
            assert len(server.requests) == 2


# ---- skills ----------------------------------------------------------------------------------


def test_a_skill_is_named_in_each_prompt_and_read_without_a_question(tmp_path: Path) -> None:
    path = put(tmp_path / "home", ".agents/skills/deploy/SKILL.md", SKILL)
    put(tmp_path, "outside.md", "secret")
    (path.parent / "link.md").symlink_to(tmp_path / "outside.md")
    read = [
        ("read", {"path": str(path)}),
        ("read", {"path": str(path.parent / "link.md")}),
    ]
    task = [("task", {"description": "d", "prompt": "p"})]
    with serve(
        Reply(calls=read),
        Reply(calls=task),
        Reply("done"),
    ) as server:
        with OneShot(tmp_path, server, "go") as session:
            session.child.communicate()
        first, second, child, last = map(system, server.requests)
        assert first == second == last != child
        assert all(f"\n- deploy: How it is deployed ({path})" in each for each in (first, child))
        assert "Run it twice." in results(server)[0]
        assert "needs permission" in results(server)[1]
        with OneShot(tmp_path, server, "go", "--system-prompt", "Be brief.") as session:
            session.child.communicate()
        assert system(server.requests[-1]) == "Be brief."


def test_a_projects_skill_counts_after_a_yes_and_is_asked_about_once(tmp_path: Path) -> None:
    skill = put(tmp_path, "ws/.claude/skills/deploy/SKILL.md", SKILL)
    put(skill.parent, "x", "")

    def is_used() -> bool:
        return f"- deploy: How it is deployed ({skill})" in system(server.requests[-1])

    with serve(Reply("done")) as server:
        with OneShot(tmp_path, server, "go") as one_shot:
            assert b"session has to ask about first: deploy" in one_shot.child.communicate()[1]
        with Terminal(tmp_path, server) as session:
            for entry, answer in (("go", "\x03"), ("/skills", "y")):
                session.enter(entry)
                shown = session.expect(ASKED)
                assert "Run it twice." in shown
                assert "1 more files" in shown
                assert ("(not used)" in shown) == (entry == "/skills")
                session.settled()
                session.type(answer)
                session.prompt()
                assert len(server.requests) == 1 + (answer == "y"), "the entry is dropped"
                session.say("go")
                assert is_used() == (answer == "y")
        with OneShot(tmp_path, server, "go") as one_shot:
            assert b"deploy" not in one_shot.child.communicate()[1]
        assert is_used()
