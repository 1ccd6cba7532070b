"""`coder acp` as an editor meets it: the package's own client, over the program's standard
streams."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.extend.prompt_files import PromptFiles
from coder.history import text_of
from coder.sessions.file_states import MAX_FILE
from tests.editor import FILES, Editor, environment, once
from tests.harness import commands, results, sent
from tests.late import Late, needs
from tests.terminal import processes, running, until

needs("acp", extra="acp")
acp = Late("acp")
schema = Late("acp.schema")
updates = Late("coder.doors.acp_updates")

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(20)).decode()


class Script:
    """The model: the replies of a turn, in order, the last one again and again."""

    def __init__(self) -> None:
        self.replies: list[Reply] = [Reply("Done.")]

    def __call__(self, body: Body) -> Reply:
        roles = [message["role"] for message in body["messages"]]
        newest = len(roles) - 1 - roles[::-1].index("user")
        step = roles[newest:].count("assistant")
        return self.replies[min(step, len(self.replies) - 1)]


@pytest.fixture(scope="module")
def script() -> Script:
    return Script()


@pytest.fixture(scope="module")
def started(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Editor]:
    """One program for all tests, each with sessions of its own."""
    home = tmp_path_factory.mktemp("home")
    with ScriptedServer(script) as server, Editor(home, server) as editor:
        yield editor


@pytest.fixture
def editor(started: Editor, script: Script) -> Editor:
    return fresh(started, script)


@pytest.fixture(scope="module")
def started_able(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Editor]:
    home = tmp_path_factory.mktemp("home")
    with (
        ScriptedServer(script) as server,
        Editor(home, server, fs=FILES) as editor,
    ):
        yield editor


@pytest.fixture
def able(started_able: Editor, script: Script) -> Editor:
    """An editor that offers its file system."""
    return fresh(started_able, script)


def fresh(editor: Editor, script: Script) -> Editor:
    script.replies = [Reply("Done.")]
    editor.asked.clear()
    editor.choose = once
    return editor


def away(title: str, options: Any) -> str:
    """Give no answer."""
    return ""


# ---- a turn --------------------------------------------------------------------------------------


def test_a_turn_is_shown_as_it_comes(editor: Editor, script: Script, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    items = [
        {"text": "Look", "status": "done"},
        {"text": "Change", "status": "in_progress"},
    ]
    script.replies = [
        Reply(
            "I look.",
            reasoning="It is short.",
            calls=[("todo", {"items": items})],
        ),
        Reply(
            calls=[
                ("read", {"path": "a.txt", "offset": 2}),
                ("grep", {"pattern": "two"}),
            ]
        ),
        Reply(calls=commands("touch ran; echo printed")),
        Reply("All is done."),
    ]
    session = editor.open(tmp_path)
    assert editor.prompt(session, "Go.") == "end_turn"
    assert editor.said(session) == "I look.All is done."
    assert len(editor.updates(session, "agent_message_chunk")) > 2  # word by word
    assert editor.said(session, "agent_thought_chunk") == "It is short."
    [plan] = editor.updates(session, "plan")
    assert [(each.content, each.status) for each in plan.entries] == [
        ("Look", "completed"),
        ("Change", "in_progress"),
    ]
    calls = editor.updates(session, "tool_call")
    assert [(each.kind, each.title) for each in calls] == [
        ("think", "todo 1 of 2 done"),
        ("read", "read a.txt"),
        ("search", "grep two"),
        ("execute", "bash touch ran; echo printed"),
    ]
    [place] = calls[1].locations
    assert place.path == str(tmp_path / "a.txt")
    assert place.line == 2
    assert [each.status for each in editor.ended(session)] == ["completed"] * 4
    assert editor.results(session)[-1] == "```\nprinted\n```"
    assert (tmp_path / "ran").exists()


def test_output_is_shown_while_a_command_runs(
    editor: Editor, script: Script, tmp_path: Path
) -> None:
    command = "echo first; until test -e go; do sleep 0.02; done; echo second"
    script.replies = [Reply(calls=commands(command)), Reply("Done.")]
    session = editor.open(tmp_path)

    async def watch() -> None:
        turn = asyncio.create_task(editor.turn(session, "Go."))
        while not any("first" in str(each) for each in editor.updates(session, "tool_call_update")):
            await asyncio.sleep(0.01)
        (tmp_path / "go").touch()
        await turn

    editor.run(watch())
    assert editor.results(session)[-1] == "```\nfirst\nsecond\n```"


PATCH = """\
*** Begin Patch
*** Update File: old.txt
@@
-one
+1
*** Add File: sub/new.txt
+fresh
*** End Patch"""


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        pytest.param(
            ("edit", {"path": "old.txt", "old_string": "one", "new_string": "1"}),
            [("old.txt", "one\ntwo\n", "1\ntwo\n")],
            id="edit",
        ),
        pytest.param(
            ("write", {"path": "sub/new.txt", "content": "fresh\n"}),
            [("sub/new.txt", None, "fresh\n")],
            id="new file",
        ),
        pytest.param(
            ("apply_patch", {"patch": PATCH}),
            [("old.txt", "one\ntwo\n", "1\ntwo\n"), ("sub/new.txt", None, "fresh\n")],
            id="patch of two files",
        ),
    ],
)
def test_each_file_that_changes_is_a_diff(
    editor: Editor, script: Script, tmp_path: Path, call: Any, expected: list[Any]
) -> None:
    (tmp_path / "old.txt").write_text("one\ntwo\n")
    script.replies = [Reply(calls=[call]), Reply("Done.")]
    session = editor.open(tmp_path)
    editor.prompt(session, "Go.")
    diffs = [(str(tmp_path / path), old, new) for path, old, new in expected]
    [asked] = editor.updates(session, "asked")
    [ended] = editor.ended(session)
    for content in (asked.call.content, ended.content):
        assert [(each.path, each.old_text, each.new_text) for each in content] == diffs
    [began] = editor.updates(session, "tool_call")
    assert began.kind == "edit"
    assert [each.path for each in began.locations] == [path for path, _, _ in diffs]
    for path, _, new in diffs:
        assert Path(path).read_text() == new


def test_hunks_are_told_apart_by_their_sizes(tmp_path: Path) -> None:
    diff = "--- a/x\n+++ b/x\n@@ -1,2 +1 @@\n--- a/y\n-+++ b/y\n+z\n@@ -9 +8,0 @@\n-end"
    found = [
        (each.path, each.line, each.old, each.new) for each in updates.hunks_of(diff, tmp_path)
    ]
    path = str(tmp_path / "x")
    assert found == [
        (path, 1, ["-- a/y\n", "+++ b/y\n"], ["z\n"]),
        (path, 8, ["end\n"], []),
    ]


def test_what_a_sub_agent_does_is_shown_and_asked(
    editor: Editor, script: Script, tmp_path: Path
) -> None:
    task = {"description": "make it", "prompt": "Make it.", "agent": "general"}

    def model(body: Body) -> Reply:
        asked = text_of([each for each in body["messages"] if each["role"] == "user"][-1])
        last = body["messages"][-1]["role"]
        if last == "tool":
            return Reply("Done.")
        if asked.startswith("Make it."):
            return Reply(calls=[("write", {"path": "made.txt", "content": "made\n"})])
        return Reply(calls=[("task", task)])

    editor.server.script = model
    try:
        session = editor.open(tmp_path)
        editor.prompt(session, "Go.")
    finally:
        editor.server.script = script
    outer, inner = editor.updates(session, "tool_call")
    assert inner.title == "write made.txt"
    assert inner.tool_call_id.startswith(f"{outer.tool_call_id}/")
    [asked] = editor.updates(session, "asked")
    assert asked.call.tool_call_id == inner.tool_call_id
    assert (tmp_path / "made.txt").exists()


def test_what_comes_with_a_prompt_reaches_the_model(editor: Editor, tmp_path: Path) -> None:
    session = editor.open(tmp_path)
    link = acp.resource_link_block("a b.txt", f"file://{tmp_path}/a%20b.txt")
    text = acp.embedded_text_resource(f"file://{tmp_path}/c.txt", "chosen lines")
    editor.prompt(
        session,
        "See ",
        link,
        acp.resource_block(text),
        acp.image_block(PNG, "image/png"),
    )
    words, image = sent(editor.server)[-1]
    assert words["text"].startswith(f"See {tmp_path}/a b.txt\n\n<attached path=")
    assert "chosen lines" in words["text"]
    assert image["image_url"]["url"] == f"data:image/png;base64,{PNG}"


# ---- questions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "is_made", "questions"),
    [
        pytest.param("once", True, 2, id="once"),
        pytest.param("always", True, 1, id="always"),
        pytest.param("reject", False, 2, id="no"),
        pytest.param("unheard of", False, 2, id="unknown option"),
    ],
)
def test_permission_is_asked(
    editor: Editor, script: Script, tmp_path: Path, answer: str, is_made: bool, questions: int
) -> None:
    script.replies = [Reply(calls=commands("touch made")), Reply("Done.")]
    editor.choose = lambda title, options: answer
    session = editor.open(tmp_path)
    editor.prompt(session, "Go.")
    assert (tmp_path / "made").exists() == is_made
    editor.prompt(session, "Again.")
    assert len(editor.asked) == questions
    title, options = editor.asked[0]
    assert title == "bash: touch made"
    assert options == {
        "once": "Allow once",
        "always": "Always: exactly this command (touch made)",
        "reject": "No",
    }


def test_what_cannot_be_seen_is_made_visible_in_a_question(
    editor: Editor, script: Script, tmp_path: Path
) -> None:
    script.replies = [Reply(calls=commands("touch a\u202eb")), Reply("Done.")]
    editor.prompt(editor.open(tmp_path), "Go.")
    assert editor.asked[0][0] == "bash: touch a<U+202E>b"


@pytest.mark.parametrize(
    ("choices", "answer", "asked", "result"),
    [
        pytest.param(["Oslo", "Rome"], "Rome", "Which?", "Rome", id="a choice"),
        pytest.param(
            ["yes", "no"], "reject", "Which?", "answers it with the next prompt", id="no choice"
        ),
        pytest.param([], "", "", "answers it with the next prompt", id="a text"),
    ],
)
def test_the_model_asks_the_user(
    editor: Editor,
    script: Script,
    tmp_path: Path,
    choices: list[str],
    answer: str,
    asked: str,
    result: str,
) -> None:
    call = ("ask_user", {"question": "Which?", "options": choices})
    script.replies = [Reply(calls=[call]), Reply("Done.")]
    editor.choose = lambda title, options: answer
    session = editor.open(tmp_path)
    editor.prompt(session, "Go.")
    assert [title for title, _ in editor.asked] == ([asked] if asked else [])
    assert ("Which?" in editor.said(session)) == (not asked)
    assert result in results(editor.server)[-1]


def test_a_call_that_repeats_itself_is_asked_about(
    editor: Editor, script: Script, tmp_path: Path
) -> None:
    script.replies = [Reply(calls=[("ls", {})])]
    editor.choose = lambda title, options: "reject"
    session = editor.open(tmp_path)
    assert editor.prompt(session, "Go.") == "max_turn_requests"
    assert editor.asked[0][0] == "ls with the same arguments, 3 times in a row"
    assert "in a row" in editor.said(session)


# ---- modes and commands --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "is_asked", "is_made"),
    [
        pytest.param("build", True, True, id="build"),
        pytest.param("plan", False, False, id="plan"),
        pytest.param("yolo", False, True, id="yolo"),
    ],
)
def test_a_mode_says_what_is_asked(
    editor: Editor, script: Script, tmp_path: Path, mode: str, is_asked: bool, is_made: bool
) -> None:
    script.replies = [
        Reply(calls=[("write", {"path": "made.txt", "content": "made\n"})]),
        Reply("Done."),
    ]
    session = editor.open(tmp_path)
    editor.set_mode(session, mode)
    assert editor.prompt(session, "Go.") == "end_turn"
    assert bool(editor.asked) == is_asked
    assert (tmp_path / "made.txt").exists() == is_made
    modes = editor.load(tmp_path, session).modes
    assert modes
    assert [each.id for each in modes.available_modes] == ["build", "plan", "yolo"]
    assert modes.current_mode_id == ("build" if mode == "yolo" else mode)  # nobody is asked twice


def test_a_mode_stays_with_a_session_that_is_empty(editor: Editor, tmp_path: Path) -> None:
    session = editor.open(tmp_path)
    editor.set_mode(session, "plan")
    modes = editor.load(tmp_path, session).modes
    assert modes
    assert modes.current_mode_id == "plan"


def test_commands_and_skills_are_offered_and_used(editor: Editor, tmp_path: Path) -> None:
    config = editor.home / ".config" / "coder"
    skill = config / "skills" / "pdf" / "SKILL.md"
    plugin = config / "plugins" / "weather.py"
    command = config / "commands" / "hello.md"
    for path, text in {
        skill: "---\ndescription: reads PDFs\n---\nUse pdftotext.",
        plugin: "def setup(api):\n    api.add_command('rain', lambda words: 'Rain in ' + words, 'rain?')",
        command: "Say hello to $ARGUMENTS.",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    session = editor.open(tmp_path)
    until_listed(editor, session)
    [listed] = editor.updates(session, "available_commands_update")
    names = [each.name for each in listed.available_commands]
    assert names == ["pdf", "rain", "init", "review", "hello", "compact", "summary", "undo", "redo"]
    editor.prompt(session, "/hello Ann")
    assert sent(editor.server)[-1] == "Say hello to Ann."
    editor.prompt(session, "/pdf a.pdf")
    assert sent(editor.server)[-1] == f"Read {skill}, and follow it.\n\na.pdf"
    before = len(editor.server.requests)
    editor.prompt(session, "/rain Oslo")
    assert editor.said(session).endswith("Rain in Oslo")
    assert len(editor.server.requests) == before
    editor.prompt(session, "/etc/hosts has what?")
    assert sent(editor.server)[-1] == "/etc/hosts has what?"


def until_listed(editor: Editor, session: str) -> None:
    async def wait() -> None:
        while not editor.updates(session, "available_commands_update"):
            await asyncio.sleep(0.01)

    editor.run(wait())


@pytest.mark.parametrize("answer", ["yes", "no", ""])
def test_a_command_of_the_project_is_offered_if_it_is_trusted(
    editor: Editor, tmp_path: Path, answer: str
) -> None:
    path = tmp_path / ".coder" / "commands" / "deploy.md"
    path.parent.mkdir(parents=True)
    path.write_text("Deploy it.")
    answers = editor.home / ".local" / "share" / "coder" / "answers.json"
    files = PromptFiles([editor.home], [tmp_path / ".coder"], answers)
    if answer:
        files.answer([files.commands["deploy"]], answer)
    session = editor.open(tmp_path)
    if answer == "yes":
        editor.prompt(session, "/deploy")
        assert sent(editor.server)[-1] == "Deploy it."
        return
    with pytest.raises(acp.RequestError, match="a session has to ask about it first"):
        editor.prompt(session, "/deploy")


def test_a_run_is_undone_and_redone(editor: Editor, script: Script, tmp_path: Path) -> None:
    script.replies = [
        Reply(calls=[("write", {"path": "made.txt", "content": "made\n"})]),
        Reply("Done."),
    ]
    session = editor.open(tmp_path)
    editor.prompt(session, "Go.")
    editor.prompt(session, "/undo")
    assert not (tmp_path / "made.txt").exists()
    editor.prompt(session, "/redo")
    assert (tmp_path / "made.txt").exists()
    assert editor.said(session) == "Done.Undone: made.txt.Redone: made.txt."


def test_an_undo_says_what_stays_as_it_is(editor: Editor, script: Script, tmp_path: Path) -> None:
    script.replies = [Reply(calls=commands("echo > small; echo >> big")), Reply("Done.")]
    session = editor.open(tmp_path)
    (tmp_path / "big").write_bytes(b"x" * (MAX_FILE + 1))  # which is not kept
    editor.prompt(session, "Go.")
    editor.prompt(session, "/undo")
    assert editor.said(session) == (
        "Done.Undone: small.\nLeft as they are, since undo has no earlier state of them: big."
    )


def test_a_conversation_is_summed_up(editor: Editor, script: Script, tmp_path: Path) -> None:
    script.replies = [Reply("We said hello.")]
    session = editor.open(tmp_path)
    editor.prompt(session, "Hello.")
    editor.prompt(session, "/summary")
    assert editor.said(session) == "We said hello." * 2


# ---- cancelling ----------------------------------------------------------------------------------


def test_a_cancel_ends_an_answer(editor: Editor, script: Script, tmp_path: Path) -> None:
    script.replies = [Reply("word " * 10, close="hang", finish=None)]
    session = editor.open(tmp_path)
    turn = cancelled(editor, session, "Go.", lambda: "word" in editor.said(session))
    assert turn == "cancelled"
    script.replies = [Reply("Done.")]
    assert editor.prompt(session, "Next.") == "end_turn"


def test_a_cancel_ends_a_question(editor: Editor, script: Script, tmp_path: Path) -> None:
    script.replies = [Reply(calls=commands("touch made"))]
    editor.choose = away
    session = editor.open(tmp_path)
    turn = cancelled(editor, session, "Go.", lambda: bool(editor.asked))
    assert turn == "cancelled"
    assert not (tmp_path / "made").exists()


def test_a_cancel_ends_a_summary(editor: Editor, script: Script, tmp_path: Path) -> None:
    session = editor.open(tmp_path)
    editor.prompt(session, "Hello.")
    script.replies = [Reply("word " * 10, close="hang", finish=None)]
    before = len(editor.server.requests)
    turn = cancelled(
        editor,
        session,
        "/summary",
        lambda: len(editor.server.requests) > before,
    )
    assert turn == "cancelled"


def cancelled(editor: Editor, session: str, words: str, may_begin: Callable[[], bool]) -> str:
    """Why a turn stopped that is cancelled once something holds."""

    async def run() -> str:
        turn = asyncio.create_task(editor.turn(session, words))
        while not may_begin():
            await asyncio.sleep(0.01)
        await editor.connection.cancel(session_id=session)
        return await turn

    return str(editor.run(run()))


@pytest.mark.parametrize(
    "count",
    [10, pytest.param(100, marks=pytest.mark.slow)],
)
def test_no_cancel_is_lost_however_soon_it_comes(
    editor: Editor, script: Script, tmp_path: Path, count: int
) -> None:
    script.replies = [Reply("word " * 10, close="hang", finish=None)]
    session = editor.open(tmp_path)

    async def run() -> list[str]:
        stopped = []
        for number in range(count):
            turn = asyncio.create_task(editor.turn(session, "Go."))
            await asyncio.sleep(number * 0.02 / count)
            await editor.connection.cancel(session_id=session)
            stopped.append(await turn)
        return stopped

    assert editor.run(run()) == ["cancelled"] * count


# ---- sessions ------------------------------------------------------------------------------------


def test_sessions_in_two_folders_keep_their_files_apart(
    editor: Editor, script: Script, tmp_path: Path
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    sessions = [editor.open(folder) for folder in folders]
    script.replies = [
        Reply(
            calls=[
                ("write", {"path": "made.txt", "content": "made\n"}),
                *commands("pwd > where"),
            ]
        ),
        Reply("Done."),
    ]

    async def both() -> list[str]:
        return await asyncio.gather(*[editor.turn(session, "Go.") for session in sessions])

    assert editor.run(both()) == ["end_turn"] * 2
    editor.prompt(sessions[0], "/undo")
    assert sorted(os.listdir(folders[0])) == []
    assert sorted(os.listdir(folders[1])) == ["made.txt", "where"]
    assert (folders[1] / "where").read_text() == f"{folders[1]}\n"


def test_a_killed_program_goes_on_with_its_session(tmp_path: Path) -> None:
    work = tmp_path / "work"
    script = Script()
    script.replies = [
        Reply("I look.", calls=[("ls", {})]),
        Reply(calls=commands("touch begun; sleep 600")),
    ]
    with ScriptedServer(script) as server:
        with Editor(tmp_path, server) as editor:
            session = editor.open(work)

            async def kill() -> None:
                turn = asyncio.create_task(editor.turn(session, "Go."))
                await asyncio.to_thread(until, (work / "begun").exists)
                editor.process.send_signal(signal.SIGKILL)
                await editor.process.wait()
                turn.cancel()

            editor.run(kill())
        script.replies = [Reply("Done.")]
        with Editor(tmp_path, server) as editor:
            listed = editor.run(editor.connection.list_sessions(cwd=str(work))).sessions
            assert [(each.session_id, each.title) for each in listed] == [(session, "Go.")]
            editor.load(work, session)
            assert editor.said(session, "user_message_chunk") == "Go."
            assert editor.said(session) == "I look."
            titles = [each.title for each in editor.updates(session, "tool_call")]
            assert titles == ["ls", "bash touch begun; sleep 600"]
            assert [each.status for each in editor.ended(session)] == ["completed", "failed"]
            assert editor.prompt(session, "Go on.") == "end_turn"
        assert sent(server)[1] == "Go."
        assert sent(server)[-1] == "Go on."


def test_a_closed_session_can_be_loaded_again(editor: Editor, tmp_path: Path) -> None:
    session = editor.open(tmp_path)
    editor.prompt(session, "Look.", acp.image_block(PNG, "image/png"))
    editor.run(editor.connection.close_session(session_id=session))
    with pytest.raises(acp.RequestError, match="no open session"):
        editor.prompt(session, "Next.")
    editor.shown.clear()
    editor.load(tmp_path, session)
    text, image = editor.updates(session, "user_message_chunk")
    assert text.content.text == "Look."
    assert image.content.data == PNG


# ---- unsaved texts -------------------------------------------------------------------------------


def test_unsaved_text_is_read_and_edited(able: Editor, script: Script, tmp_path: Path) -> None:
    saved = tmp_path / "saved.txt"
    open_file = tmp_path / "open.txt"
    saved.write_bytes(b"one\r\n")
    open_file.write_text("one\n")
    able.unsaved = {str(open_file): "one\ntyped\n", str(saved): "one\n"}
    script.replies = [
        Reply(calls=[("read", {"path": "open.txt"})]),
        Reply(
            calls=[
                ("edit", {"path": "open.txt", "old_string": "typed", "new_string": "changed"}),
                ("edit", {"path": "saved.txt", "old_string": "one", "new_string": "two"}),
            ]
        ),
        Reply("Done."),
    ]
    session = able.open(tmp_path)
    able.prompt(session, "Go.")
    assert "typed" in able.results(session)[0]
    assert open_file.read_text() == "one\nchanged\n"
    assert saved.read_bytes() == b"two\r\n"
    assert able.written == [str(open_file)]  # the other one is only what the disk has


def test_text_that_is_typed_during_a_question_is_not_overwritten(
    able: Editor, script: Script, tmp_path: Path
) -> None:
    file = tmp_path / "open.txt"
    file.write_text("one\n")
    able.unsaved = {str(file): "one\ntyped\n"}
    edit = {"path": "open.txt", "old_string": "typed", "new_string": "changed"}
    script.replies = [
        Reply(calls=[("edit", edit)]),
        Reply("Done."),
    ]

    def type_more(title: str, options: Any) -> str:
        able.unsaved[str(file)] += "more\n"
        return "once"

    able.choose = type_more
    session = able.open(tmp_path)
    able.prompt(session, "Go.")
    assert "was changed in the editor" in able.results(session)[0]
    assert able.unsaved[str(file)] == "one\ntyped\nmore\n"
    assert file.read_text() == "one\n"


@pytest.mark.parametrize(
    ("data", "result"),
    [
        pytest.param(b"caf\xe9\n", "caf\ufffd", id="another encoding"),
        pytest.param(b"x" * 6_000_000, "line cut", id="a large file"),
    ],
)
def test_a_file_that_an_editor_may_not_hold_is_read_from_disk(
    able: Editor, script: Script, tmp_path: Path, data: bytes, result: str
) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(data)
    able.unsaved = {str(file): "typed\n"}
    script.replies = [
        Reply(calls=[("read", {"path": "a.txt"})]),
        Reply("Done."),
    ]
    session = able.open(tmp_path)
    able.prompt(session, "Go.")
    assert result in able.results(session)[0]


# ---- servers of the editor -----------------------------------------------------------------------


def test_mcp_servers_of_the_editor_are_used(editor: Editor, script: Script, tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    program = str(Path(__file__).with_name("mcp_server.py"))
    path = schema.EnvVariable(
        name="PYTHONPATH",
        value=str(Path(__file__).parents[1]),
    )
    server = schema.McpServerStdio(
        name="own",
        command=sys.executable,
        args=[program],
        env=[path],
    )
    script.replies = [
        Reply(calls=[("own__add", {"a": 1})]),
        Reply("Done."),
    ]
    session = editor.open(tmp_path, mcp_servers=[server])
    editor.prompt(session, "Go.")
    assert editor.asked[0][0] == "mcp: own__add"
    assert editor.results(session) == ["```\n11\n```"]
    editor.run(editor.connection.close_session(session_id=session))
    until(lambda: not running(str(editor.home), f"{sys.executable} {program}"), "the server ends")


# ---- what goes wrong -----------------------------------------------------------------------------


def test_each_wrong_request_is_one_line(editor: Editor, script: Script, tmp_path: Path) -> None:
    session = editor.open(tmp_path)
    connection = editor.connection
    bad = acp.image_block(base64.b64encode(b"text").decode(), "image/png")
    for request, message in [
        (connection.new_session(str(tmp_path / "none"), mcp_servers=[]), "there is no folder"),
        (connection.load_session(str(tmp_path), "x", mcp_servers=[]), "There is no session 'x'"),
        (connection.set_session_mode(session_id=session, mode_id="x"), "there is no agent 'x'"),
        (connection.prompt(session_id="x", prompt=[]), "there is no open session x"),
        (connection.prompt(session_id=session, prompt=[bad]), "the image is not taken"),
    ]:
        with pytest.raises(acp.RequestError) as raised:
            editor.run(request)
        assert message in str(raised.value)
        assert "\n" not in str(raised.value)
    assert editor.prompt(session, "Go.") == "end_turn"


def test_an_error_of_the_server_is_one_of_the_turn(
    editor: Editor, script: Script, tmp_path: Path
) -> None:
    script.replies = [Reply("bad key", status=401)]
    session = editor.open(tmp_path)
    with pytest.raises(acp.RequestError, match="the key was rejected: bad key"):
        editor.prompt(session, "Go.")
    script.replies = [Reply("Done.")]
    assert editor.prompt(session, "Again.") == "end_turn"


def test_a_second_turn_meanwhile_is_refused(editor: Editor, script: Script, tmp_path: Path) -> None:
    script.replies = [Reply(calls=commands("touch made"))]
    editor.choose = away
    session = editor.open(tmp_path)

    async def run() -> str:
        first = asyncio.create_task(editor.turn(session, "Go."))
        while not editor.asked:
            await asyncio.sleep(0.01)
        for request in (
            editor.turn(session, "Again."),
            editor.connection.set_session_mode(session_id=session, mode_id="plan"),
        ):
            with pytest.raises(acp.RequestError, match="the session is at work"):
                await request
        await editor.connection.cancel(session_id=session)
        return await first

    assert editor.run(run()) == "cancelled"


def raw(home: Path, server: ScriptedServer, *requests: Any) -> subprocess.Popen[str]:
    """The program, with these requests on its standard input, which stays open."""
    process = subprocess.Popen(
        [sys.executable, "-m", "coder", "acp"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=home,
        env=environment(home, server),
    )
    assert process.stdin
    for number, (method, params) in enumerate(requests):
        request = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    return process


INITIALIZE = ("initialize", {"protocolVersion": 1})


def test_an_older_protocol_is_one_error(tmp_path: Path) -> None:
    with ScriptedServer(Script()) as server:
        process = raw(tmp_path, server, ("initialize", {"protocolVersion": 0}))
        output, errors = process.communicate(timeout=60)
    [line] = output.splitlines()
    message = json.loads(line)["error"]["message"]
    assert (
        message == "the editor speaks version 0 of the protocol, coder speaks 1: update the editor"
    )
    assert process.returncode == 0
    assert errors == ""


NO_REQUEST = -32600
NO_JSON = -32700
# A line, and the code of its error
WRONG_LINES = {
    "a list": ("[]", NO_REQUEST),
    "a text": ('"x"', NO_REQUEST),
    "an id that is none": ('{"id": {}, "result": 1}', NO_REQUEST),
    "no JSON": ("{", NO_JSON),
    "too deep": ("[" * 100_000, NO_JSON),
}


def test_a_line_that_is_no_message_is_one_error(tmp_path: Path) -> None:
    """And the lines after it are read."""
    request = {"jsonrpc": "2.0", "id": 7, "method": INITIALIZE[0], "params": INITIALIZE[1]}
    lines = [line for line, _ in WRONG_LINES.values()]
    with ScriptedServer(Script()) as server:
        process = raw(tmp_path, server)
        written = "\n".join([*lines, json.dumps(request), ""])
        output, errors = process.communicate(written, timeout=60)
    *refused, answered = [json.loads(each) for each in output.splitlines()]
    assert [each["id"] for each in refused] == [None] * len(lines)
    codes = [each["error"]["code"] for each in refused]
    assert dict(zip(WRONG_LINES, codes)) == {name: code for name, (_, code) in WRONG_LINES.items()}
    assert answered["id"] == 7
    assert "result" in answered
    assert process.returncode == 0
    assert errors == ""


def test_nothing_else_is_written_to_standard_output(tmp_path: Path) -> None:
    plugin = tmp_path / ".config" / "coder" / "plugins" / "loud.py"
    plugin.parent.mkdir(parents=True)
    plugin.write_text(
        "import os\nprint('printed')\nos.write(1, b'written')\ndef setup(api): pass\n"
    )
    with ScriptedServer(Script()) as server:
        opening = ("session/new", {"cwd": str(tmp_path), "mcpServers": []})
        process = raw(tmp_path, server, INITIALIZE, opening)
        assert process.stdout
        lines = [process.stdout.readline() for _ in range(3)]
        output, errors = process.communicate(timeout=60)
    for line in [*lines, *output.splitlines()]:
        assert json.loads(line)["jsonrpc"] == "2.0"
    assert "printed" in errors
    assert "written" in errors


def test_the_end_of_standard_input_ends_a_run(tmp_path: Path) -> None:
    work = tmp_path / "work"
    script = Script()
    script.replies = [Reply(calls=commands("touch begun; sleep 600"))]
    with ScriptedServer(script) as server:
        editor = Editor(tmp_path, server)
        with editor:
            session = editor.open(work)

            async def begin() -> None:
                editor.loop.create_task(editor.turn(session, "Go."))
                await asyncio.to_thread(until, (work / "begun").exists)
                editor.process.stdin.close()
                await editor.process.wait()

            editor.run(begin())
        assert editor.process.returncode == 0
    until(lambda: not processes(str(tmp_path)), "the command ends")


def test_without_the_package_the_way_to_install_it_is_said() -> None:
    code = "import sys; sys.modules['acp'] = None; from coder.cli.main import main; sys.exit(main(['acp']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("coder: acp needs a package: ")
    assert "[acp]" in line
