"""Snapshots: what a run changed is taken back exactly; nothing else of the user's is touched."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import resource
import shutil
import sqlite3
import stat
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coder import events
from coder.abort import Abort
from coder.devtools.scripted import Reply
from coder.events import Event
from coder.sessions.blobs import MAX_STORED
from coder.sessions.file_states import MAX_FILE, born_at
from coder.sessions.first_look import SHORT_ANSWER
from coder.sessions.snapshots import Snapshots, UndoResult
from coder.sessions.workspace_files import Changes, WorkspaceFiles
from coder.tools.bash import bash
from coder.tools.edit import edit
from coder.tools.files import read, write
from coder.toolset import Toolset
from coder.types import Message, RunResult, ToolResult, Usage
from tests.harness import ask, serve
from tests.terminal import until

GIT = ("git", "-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "init.defaultBranch=m")
Call = tuple[str, dict[str, Any]]
Tree = dict[str, tuple[str, int, str]]


def sh(command: str) -> Call:
    return "bash", {"command": command}


class Desk:
    """A workspace with an agent in it."""

    def __init__(self, folder: Path, data: Path, **options: Any) -> None:
        self.folder = folder
        self.data = data
        folder.mkdir(parents=True, exist_ok=True)
        self.told: list[str] = []
        self.options = {"tell": self.told.append} | options
        self.again()
        self.messages: list[Message] = []

    def again(self, session: str = "") -> None:
        """As another process."""
        # A busy machine may take longer than a tool would wait
        seconds = {"patience": 60.0, "reading": 60.0} | self.options
        self.snapshots = Snapshots(self.folder, self.data, **seconds)
        self.snapshots.open(session, resumed=bool(session))

    def put(self, files: Mapping[str, str | bytes]) -> None:
        for name, content in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())

    def run(
        self,
        *steps: Call | list[Call],
        prompt: str = "go",
        each: Callable[[Event], None] | None = None,
        abort: Abort | None = None,
    ) -> RunResult:
        """One run with these calls, one step each (a list is one step); `each` sees its events."""
        token = abort or Abort()

        def follow(event: Event) -> None:
            if isinstance(event, events.PermissionAsked):
                event.reply("once")
            self.snapshots(event, token)
            if each:
                each(event)

        replies = [Reply(calls=step if isinstance(step, list) else [step]) for step in steps]
        tools = Toolset([read, write, edit, bash], cwd=self.folder)
        with serve(*replies, Reply("done")) as server:
            _, result = ask(
                server,
                prompt,
                tools,
                self.messages,
                each=follow,
                abort=token,
            )
        return result

    def undo(self) -> UndoResult:
        return self.snapshots.undo(list(self.messages))

    def redo(self) -> UndoResult:
        return self.snapshots.redo(list(self.messages))

    def tree(self) -> Tree:
        return tree(self.folder)

    def notices(self) -> list[str]:
        told, self.told[:] = list(self.told), []
        return told

    def text(self, name: str) -> str:
        return (self.folder / name).read_text()

    def stored(self) -> int:
        return sum(path.stat().st_size for path in self.data.rglob("*") if path.is_file())


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path / "ws", tmp_path / "data")
    yield desk
    desk.snapshots.close()


def tree(folder: Path, but: str = ".git") -> Tree:
    """All files and links in a folder: kind, mode, content. Only regular files are opened."""
    found: Tree = {}
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != but]
        for name in [*folders, *files]:
            path = os.path.join(parent, name)
            info = os.lstat(path)
            if stat.S_ISDIR(info.st_mode):
                continue
            content = os.readlink(path) if stat.S_ISLNK(info.st_mode) else ""
            if stat.S_ISREG(info.st_mode):
                content = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            mode = stat.S_IMODE(info.st_mode)
            found[os.path.relpath(path, folder)] = stat.filemode(info.st_mode)[0], mode, content
    return found


def git(folder: Path, *argv: str) -> str:
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        [*GIT, *argv], cwd=folder, check=True, capture_output=True, text=True,
        env=own | {"HOME": str(folder)},
    ).stdout  # fmt: skip


def done(result: UndoResult) -> list[str]:
    assert not result.problem
    return list(result.paths)


def conflicts(result: UndoResult) -> str:
    """The paths that the problem names."""
    assert result.problem
    assert not result.paths
    return result.problem.partition("these files were changed since: ")[2]


@contextlib.contextmanager
def database(desk: Desk) -> Iterator[sqlite3.Connection]:
    """The file of undo."""
    [file] = desk.data.glob("snapshots/*.db")
    with contextlib.closing(sqlite3.connect(file)) as db, db:
        yield db


@contextlib.contextmanager
def slow_git(folder: Path, command: str = "") -> Iterator[Callable[[], int]]:
    """A git that takes 20 ms more, in the place of the one that is found; it counts how often it
    was started for a command."""
    program = folder / "bin" / "git"
    counted = folder / "started"
    program.parent.mkdir()
    real = shutil.which("git")
    program.write_text(f'#!/bin/sh\necho "$@" >> {counted}\nsleep 0.02\nexec {real} "$@"\n')
    program.chmod(0o755)
    counted.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        yield lambda: sum(command in line for line in counted.read_text().splitlines())


# ---- undo and redo -------------------------------------------------------------------------------

EVERYTHING: list[Call | list[Call]] = [
    ("read", {"path": "a.py"}),
    ("edit", {"path": "a.py", "old_string": "one", "new_string": "two"}),
    [
        ("write", {"path": "new/deep/b.txt", "content": "b"}),
        ("write", {"path": "..c", "content": "c"}),
    ],
    sh("sed -i s/old/new/ sed.txt && rm gone.txt && mv moved.txt new/elsewhere.txt"),
    sh("chmod +x plain.sh && chmod -x run.sh && rm secret && ln -s a.py link"),
    sh("rm was_link && echo file > was_link && rm to_link && ln -s sed.txt to_link"),
    sh("ln -sfn nowhere other_link && touch full/x && rm empty"),
    sh("mv folder renamed && echo more >> renamed/1 && printf '\\0\\1' > bin.dat"),
    sh("rm -r becomes_file && echo f > becomes_file"),
    sh("rm becomes_folder && mkdir becomes_folder && echo g > becomes_folder/g"),
]


def lay_out(desk: Desk) -> None:
    desk.put({"a.py": "one\n", "sed.txt": "old\r\nold\r\n", "gone.txt": "precious"})
    desk.put({"moved.txt": "m", "plain.sh": "#!/bin/sh\n", "run.sh": "x", "to_link": "t"})
    desk.put({"folder/1": "1", "folder/sub/2": "2", "bin.dat": b"\0\xff\xfe", "secret": "s"})
    desk.put({"becomes_file/x/y": "y", "becomes_folder": "z", "mine.txt": "mine", "empty": ""})
    for name in ("was_link", "other_link"):
        os.symlink("a.py", desk.folder / name)
    for name, mode in {
        "run.sh": 0o755,
        "sed.txt": 0o600,
        "secret": 0o600,
    }.items():
        (desk.folder / name).chmod(mode)
    os.utime(
        desk.folder / "mine.txt", (11_234_246_400,) * 2
    )  # in 2326, beyond 64 bits of nanoseconds
    (desk.folder / "full").mkdir()


@pytest.mark.parametrize("repository", [False, True])
def test_undo_gives_back_the_exact_tree_but_the_users_changes(desk: Desk, repository: bool) -> None:
    """Of a repository the blobs are the user's own, which are read where they are."""
    lay_out(desk)
    if repository:
        git(desk.folder, "init", "-q")
        git(desk.folder, "add", "-A")
    before = desk.tree()
    assert desk.run(*EVERYTHING).stop_reason == "stop"
    results = [str(message["content"]) for message in desk.messages if message["role"] == "tool"]
    assert not [result for result in results if "rror" in result]
    after = desk.tree()
    desk.put({"mine.txt": "changed", "my_new.txt": "new"})
    own = {name: desk.tree()[name] for name in ("mine.txt", "my_new.txt")}
    paths = done(desk.undo())
    assert desk.tree() == before | own
    assert {"a.py", "becomes_folder/g"} <= set(paths)
    assert not own.keys() & set(paths)
    done(desk.redo())
    assert desk.tree() == after | own
    done(desk.undo())
    assert desk.tree() == before | own
    assert desk.notices() == []


def test_if_the_user_changed_the_same_file_nothing_is_done(desk: Desk) -> None:
    desk.put({"a": "1", "b": "1", "c": "1", "e": "1"})
    desk.run(sh("echo 2 > a; echo 2 > b; rm c; echo 2 > d; echo 2 > e"))
    desk.put({"a": "user", "c": "user"})
    (desk.folder / "e").chmod(0o755)
    before = desk.tree()
    result = desk.undo()
    assert conflicts(result) == "a, c, e."
    assert desk.tree() == before
    desk.put({"a": "2\n", "e": "1"})  # as the agent left it, and as it was
    (desk.folder / "e").chmod(0o644)
    (desk.folder / "c").unlink()
    (desk.folder / "d").unlink()
    assert done(desk.undo()) == ["a", "b", "c"]
    desk.put({"b": "user"})
    assert conflicts(desk.redo()) == "b."
    assert desk.text("a") == "1"


@pytest.mark.parametrize(
    "asked",
    [
        events.PermissionAsked("2", "bash", "x", "x"),
        events.QuestionAsked("2", "x", []),
        events.Nested(
            "general",
            events.PermissionAsked("3", "bash", "x", "x"),
            "c",
            "2",
        ),
    ],
)
def test_what_the_user_writes_at_a_question_is_left_alone(desk: Desk, asked: Event) -> None:
    desk.put({"a": "1\n", "mine": "1\n"})
    snapshots = desk.snapshots
    snapshots(events.RunStart())
    snapshots(events.ToolStart("1", "write", {}, ""))
    desk.put({"n/b": "new\n"})
    snapshots(events.ToolEnd("1", "write", ToolResult(""), False, 0.0))
    snapshots(events.ToolStart("2", "bash", {}, ""))
    snapshots(events.ToolStart("3", "task", {}, ""))  # another one works during it
    snapshots(asked)
    desk.put({"mine": "2\n", "d/mine too": "x"})
    snapshots(events.ToolUpdate("2", "answered"))
    desk.put({"a": "2\n"})
    snapshots(events.StepEnd({}, [], "stop", Usage()))
    assert snapshots.diff().count("diff --git") == 2
    assert done(desk.undo()) == ["a", "n/b"]
    assert not (desk.folder / "n").exists()
    assert desk.text("mine") == "2\n"
    assert (desk.folder / "d/mine too").exists()
    assert done(desk.redo()) == ["a", "n/b"]


def test_what_the_user_writes_after_a_run_that_was_broken_off_at_a_question_is_left_alone(
    desk: Desk,
) -> None:
    desk.put({"mine": "1\n"})
    snapshots = desk.snapshots
    snapshots(events.RunStart())
    snapshots(events.ToolStart("1", "bash", {}, ""))
    snapshots(events.QuestionAsked("1", "x", []))
    snapshots.finish()  # no other event came
    snapshots(events.RunStart())
    desk.put({"mine": "2\n"})
    snapshots(events.ToolStart("2", "bash", {}, ""))
    desk.put({"a": "2\n"})
    snapshots(events.StepEnd({}, [], "stop", Usage()))
    assert done(desk.undo()) == ["a"]
    assert desk.text("mine") == "2\n"


def test_a_file_that_the_user_changed_between_two_steps_is_a_conflict(desk: Desk) -> None:
    desk.put({"a": "1", "mine": "1"})

    def user(event: Event) -> None:
        if isinstance(event, events.StepStart) and event.step == 2:
            desk.put({"a": "user", "mine": "user"})

    desk.run(sh("echo 2 > a"), sh("echo 3 > a; echo 3 > b"), each=user)
    assert conflicts(desk.undo()) == "a."
    assert "mine" not in desk.snapshots.diff()
    desk.put({"a": "1"})
    assert done(desk.undo()) == ["b"]
    assert desk.text("mine") == "user"


def test_the_users_own_commands_stay_and_redo_comes_in_its_place(desk: Desk) -> None:
    def said() -> list[str]:
        return [each["content"] for each in desk.messages if each["role"] == "user"]

    snapshots = desk.snapshots
    messages = desk.messages
    desk.run(prompt="first")
    messages.append({"role": "user", "content": "I ran it", "meta": {"own": True}})
    desk.run(prompt="second")
    snapshots.undo(messages)
    assert snapshots.undo(messages).prompt == "first"
    assert said() == ["I ran it"]
    desk.run(prompt="other")
    assert "nothing to redo" in snapshots.redo(messages).problem
    snapshots.undo(messages)
    assert "nothing to undo" in snapshots.undo(messages).problem
    assert said() == ["I ran it"]
    snapshots.redo(messages)
    desk.run(prompt="second")
    for travel in (snapshots.undo, snapshots.undo, snapshots.redo, snapshots.redo):
        travel(messages)
    assert said() == ["I ran it", "other", "second"]


def test_an_answer_that_came_in_the_time_of_its_prompt_is_taken_back_with_it(desk: Desk) -> None:
    """A millisecond holds both if the server is near."""
    desk.run(prompt="first")
    for message in desk.messages:
        message["meta"]["timestamp"] = desk.snapshots.runs[-1].message
    assert desk.snapshots.undo(desk.messages).prompt == "first"
    assert desk.messages == []


def test_what_is_undone_after_a_summary_of_it_is_noted(desk: Desk) -> None:
    desk.run(sh("echo 1 > a"))
    desk.messages[:] = summary = [
        {
            "role": "user",
            "content": "Goal",
            "meta": {"summary": True},
        }
    ]
    assert done(desk.snapshots.undo(desk.messages)) == ["a"]
    assert desk.messages[-1]["content"].startswith("I have undone your last changes (a).")
    desk.snapshots.redo(desk.messages)
    assert desk.messages == summary
    assert desk.text("a") == "1\n"


def test_nothing_is_written_over_what_is_not_kept(desk: Desk) -> None:
    """A folder with an ignored file in it, a file in the place of a folder, a FIFO, a link that
    leads out."""
    git(desk.folder, "init", "-q")
    desk.put(
        {
            ".gitignore": "*.log\n",
            "x": "1",
            "d/e": "1",
            "f/g": "1",
            "p": "1",
        }
    )
    desk.run(sh("rm -r x d f p"))
    desk.put({"x/user.log": "keep", "d": "a file"})
    os.mkfifo(desk.folder / "p")
    outside = desk.folder.parent / "outside"
    outside.mkdir()
    os.symlink(outside, desk.folder / "f")
    assert conflicts(desk.undo()) == "p."
    (desk.folder / "p").unlink()
    for name, left in (("d", "d/e, f/g, x"), ("f", "f/g, x")):
        assert desk.undo().problem.endswith(f"are in the place of {left}.")
        (desk.folder / name).unlink()
    assert desk.undo().problem.endswith("are in the place of x.")
    assert not os.path.lexists(desk.folder / "p"), "some was done"
    assert desk.text("x/user.log") == "keep"
    assert list(outside.iterdir()) == []
    shutil.rmtree(desk.folder / "x")
    assert done(desk.undo())
    assert desk.text("x") == desk.text("f/g") == "1"


def test_a_workspace_that_is_removed_and_made_again_is_covered(desk: Desk) -> None:
    desk.put({"a": "1"})
    desk.run(sh("true"))
    shutil.rmtree(desk.folder)
    desk.put({"a": "2"})
    desk.run(sh("echo 3 > a; echo > b"))
    assert done(desk.undo()) == ["a", "b"]
    assert desk.text("a") == "2"


def watched() -> int:
    """How many descriptors of this process are of inotify."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one of the listing
            found += os.readlink(f"/proc/self/fd/{number}") == "anon_inode:inotify"
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel does not report")
def test_a_session_that_is_closed_watches_no_folder(desk: Desk) -> None:
    desk.run(sh("true"))
    before = watched()
    desk.snapshots.close()
    until(lambda: watched() < before)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel does not report")
def test_a_run_of_one_short_answer_watches_nothing(desk: Desk) -> None:
    """To end a watch takes the kernel 10 to 20 ms, which is much of such a run."""
    desk.put({"a": "1"})
    for _ in range(20):
        before = watched()
        began = time.monotonic()
        desk.snapshots(events.RunStart())
        during = watched()
        is_short = time.monotonic() - began < SHORT_ANSWER
        desk.snapshots.close()
        desk.again()
        if is_short:  # on a busy machine it may not be
            break
    assert during <= before  # the kernel may still be ending the watch of an earlier test
    desk.run(sh("echo 2 > a"))
    assert done(desk.undo()) == ["a"]


NAMES = st.sampled_from(["a", "b", "d/a", "d/b", "d/e/a", "d", "e/f", "e"])
FORMS = {
    "write": "mkdir -p $(dirname {0}); echo {1} > {0}",
    "append": "[ -f {0} ] && echo more >> {0}",
    "rm": "rm -rf {0}",
    "mv": "mv -T {0} {1}",
    "cp": "cp -a {0} {1}",
    "link": "ln -sfn {1} {0}",
    "exec": "[ -f {0} ] && chmod 755 {0}",
    "secret": "[ -f {0} ] && chmod 600 {0}",
    "mkdir": "mkdir -p {0}",
    "name": "[ -f {0} ] && ln -f {0} {1}",
}
CHANGES = st.lists(
    st.tuples(st.sampled_from(list(FORMS)), NAMES, NAMES),
    min_size=1,
    max_size=6,
)


def script(changes: list[tuple[str, str, str]]) -> str:
    """A command that changes the workspace somehow; what is impossible is passed over."""
    parts = [f"{{ {FORMS[what].format(*names)}; }} 2>/dev/null" for what, *names in changes]
    return "; ".join([*parts, "true"])


STEPS = st.one_of(
    CHANGES.map(lambda changes: sh(script(changes))),
    NAMES.map(lambda name: ("write", {"path": name, "content": "w"})),
    NAMES.map(
        lambda name: (
            "edit",
            {"path": name, "old_string": "o", "new_string": "X"},
        )
    ),
)
# Between the runs, by the user
ACTS = {
    "commit": ["add -A", "commit -qm x --allow-empty"],
    "gc": ["gc -q --prune=now"],
    "again": [],
}
RUNS = st.tuples(
    st.lists(
        st.sampled_from(list(ACTS)),
        max_size=3,
    ),
    st.lists(STEPS, min_size=1, max_size=3),
)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    repository=st.booleans(),
    first=CHANGES,
    runs=st.lists(RUNS, min_size=1, max_size=3),
)
def test_undo_and_redo_lead_back_and_there_again(
    tmp_path: Path, repository: bool, first: Any, runs: Any
) -> None:
    folder = tmp_path / os.urandom(6).hex()
    desk = Desk(folder / "ws", folder / "data")
    desk.snapshots.open("mine")
    subprocess.run(
        ["bash", "-c", script(first)],
        cwd=desk.folder,
        check=True,
    )
    if repository:
        git(desk.folder, "init", "-q")
    trees = [desk.tree()]
    for acts, steps in runs:
        for act in acts:
            for command in ACTS[act] if repository else ():
                git(desk.folder, *command.split())
            if act == "again":
                desk.snapshots.close()
                desk.again("mine")
        desk.run(*steps)
        trees.append(desk.tree())
    for travel, way in [
        (desk.undo, trees[-2::-1]),
        (desk.redo, trees[1:]),
    ] * 2:
        for expected in way:
            assert not travel().problem
            assert desk.tree() == expected
    desk.snapshots.close()


def names_of(*files: Path) -> dict[str, tuple[str, list[str]]]:
    """Contents and modes, and with which of the others a file shares its inode."""
    there = [file for file in files if file.exists()]
    return {
        file.name: (
            f"{file.stat().st_mode:o} {file.read_text()}",
            [other.name for other in there if other.samefile(file)],
        )
        for file in there
    }


LINKED = {
    "in place": "echo more >> a",
    "by another name": "echo more >> d/b",
    "by a name outside": "echo more >> ../outside",
    "mode": "chmod 600 d/b",
    "replaced": "sed -i s/x/y/ a",
    "moved": "mv d/b c",
    "removed": "rm a",
    "all removed": "rm a d/b",
    "one more": "ln a c && echo y > c",
    "new ones": "rm a d/b; echo 1 > a; ln a d/b; ln a c",
    "read-only": "chmod 400 a; sed -i s/x/y/ a",
}


@pytest.mark.parametrize(
    "again",
    [False, True],
    ids=["the same process", "another"],
)
@pytest.mark.parametrize("case", LINKED)
def test_all_names_of_a_file_are_taken_back_and_done_again(
    desk: Desk, case: str, again: bool
) -> None:
    """Also those outside of the workspace, as long as the file is one with them."""
    desk.put({"a": "x\n", "d/e": "e\n"})
    outside = desk.folder.parent / "outside"
    os.link(desk.folder / "a", desk.folder / "d/b")
    if case in ("in place", "by another name", "by a name outside", "mode", "one more"):
        os.link(desk.folder / "a", outside)
    files = [desk.folder / name for name in ("a", "c", "d/b", "d/e")] + [outside]
    before = names_of(*files)
    desk.again("mine")
    desk.run(sh(LINKED[case]))
    after = names_of(*files)
    assert before != after
    if again:
        desk.snapshots.close()
        desk.again("mine")
    for travel, way in [
        (desk.undo, before),
        (desk.redo, after),
    ] * 2:
        done(travel())
        assert names_of(*files) == way
    assert not [path for path in desk.folder.rglob(".coder-*")]


def test_what_is_written_by_a_new_name_of_a_file_is_taken_back(desk: Desk) -> None:
    """The kernel reports a change of the new name only, in the run that makes it and in later
    ones."""
    desk.put({"a": "1\n", "other": "o\n"})
    files = [desk.folder / name for name in ("a", "new", "other")]
    states = [names_of(*files)]
    for command in ("ln a new; echo 2 >> new", "echo 3 >> new", "rm new; ln other new"):
        desk.run(sh(command))
        states.append(names_of(*files))
    for travel, way in [
        (desk.undo, states[-2::-1]),
        (desk.redo, states[1:]),
    ] * 2:
        for expected in way:
            done(travel())
            assert names_of(*files) == expected


def test_a_file_that_only_has_other_names_after_a_run_has_its_own_again(desk: Desk) -> None:
    desk.put({"a": "same\n", "b": "same\n"})
    files = [desk.folder / name for name in ("a", "b")]
    before = names_of(*files)
    desk.run(sh("ln -f a b"))
    assert names_of(*files) != before
    done(desk.undo())
    assert names_of(*files) == before


def test_a_file_that_got_the_inode_of_a_removed_one_is_not_one_with_it(desk: Desk) -> None:
    """The contents are the same, so that only the number of names tells them apart."""
    desk.put({"a": "same\n", "other": "same\n"})
    os.link(desk.folder / "a", desk.folder / "b")
    files = [desk.folder / name for name in ("a", "b", "other")]
    inode = files[0].stat().st_ino
    before = names_of(*files)
    desk.run(sh("rm a b; echo same > new; mv new other; echo 1 > a; echo 2 > b"))
    if files[2].stat().st_ino != inode:
        pytest.skip("this file system gives no number again")
    done(desk.undo())
    assert names_of(*files) == before


def test_files_that_got_the_inode_of_removed_ones_are_not_one_with_them(desk: Desk) -> None:
    """Two files, each with two names and the same content; undo has made the first one anew."""
    desk.put({"a": "same\n"})
    os.link(desk.folder / "a", desk.folder / "b")
    inode = (desk.folder / "a").stat().st_ino
    desk.run(sh("rm a b"))
    desk.put({"mine": "1"})
    done(desk.undo())
    (desk.folder / "mine").unlink()
    desk.put({"c": "same\n"})
    os.link(desk.folder / "c", desk.folder / "d")
    files = [desk.folder / name for name in "abcd"]
    before = names_of(*files)
    if files[0].stat().st_ino == inode or files[2].stat().st_ino != inode:
        pytest.skip("this file system does not give the number again")
    desk.run(sh("rm c d"))
    after = names_of(*files)
    for travel, way in [
        (desk.undo, before),
        (desk.redo, after),
    ] * 2:
        done(travel())
        assert names_of(*files) == way


@pytest.mark.parametrize(
    "again",
    [False, True],
    ids=["the same process", "another"],
)
def test_a_file_that_undo_has_made_anew_is_the_one_that_earlier_runs_know(
    desk: Desk, again: bool
) -> None:
    desk.put({"a": "1\n"})
    os.link(desk.folder / "a", desk.folder / "b")
    files = [desk.folder / name for name in "ab"]
    states = [names_of(*files)]
    desk.again("mine")
    for command in ("rm a; echo 1 > a", "rm a; ln b a", "rm a b; echo 2 > mine"):
        desk.run(sh(command))
        states.append(names_of(*files))
    for expected in states[-2::-1]:
        done(desk.undo())
        assert names_of(*files) == expected
        if again:
            desk.snapshots.close()
            desk.again("mine")


def test_a_name_outside_that_a_run_gave_a_file_is_left_alone(desk: Desk) -> None:
    """Before the run the file had one name, and it has one again."""
    desk.put({"a": "1\n"})
    outside = desk.folder.parent / "outside"
    desk.run(sh(f"ln a {outside}; echo 2 > a"))
    assert done(desk.undo()) == ["a"]
    assert desk.text("a") == "1\n"
    assert outside.read_text() == "2\n"


def test_a_file_that_became_another_ones_name_is_not_filled_in_its_place(desk: Desk) -> None:
    """The file outside was never the workspace's."""
    desk.put({"a": "x\n"})
    outside = desk.folder.parent / "outside"
    outside.write_text("mine\n")
    desk.run(sh("ln -f ../outside a"))
    assert done(desk.undo()) == ["a"]
    assert desk.text("a") == "x\n"
    assert outside.read_text() == "mine\n"


# ---- what was there before a run, and is not known -----------------------------------------------


def end_watch(desk: Desk) -> None:
    """Let a run see another repository first, which is removed: from then on nothing is watched."""
    git(desk.folder, "init", "-q")
    desk.run(sh("true"))
    shutil.rmtree(desk.folder)


MOVED_IN: dict[str, tuple[list[str], str]] = {
    "an ignored file": (["mv .env moved"], "moved"),
    "an ignored folder": (["mv build moved"], "moved/b"),
    "a file from outside": (["mv ../outside moved"], "moved"),
    "a file in the place of a known one": (["mv .env known"], "known"),
    "by another name": (["ln .env moved; rm .env"], "moved"),
    "by another name, in two steps": (["ln .env moved", "rm .env"], "moved"),
    "moved on in another step": (["mv .env first", "mv first moved"], "moved"),
    "changed in another step": (["mv .env moved", "echo more >> moved"], "moved"),
}


@pytest.mark.parametrize(
    "is_watched",
    [True, False],
    ids=["watched", "not watched"],
)
@pytest.mark.parametrize("case", MOVED_IN)
def test_what_was_there_before_a_run_is_left_where_it_was_moved_to(
    desk: Desk, case: str, is_watched: bool
) -> None:
    """Of what was ignored, or outside, undo has no earlier state: to remove it would be to lose
    it."""
    commands, moved = MOVED_IN[case]
    if not is_watched:
        end_watch(desk)
    desk.put({".gitignore": ".env\nbuild/\n", "known": "k"})
    for path in (".env", "build/b", "../outside"):
        desk.put({path: "precious\n"})
    git(desk.folder, "init", "-q")
    settle()
    desk.run(*[sh(command) for command in commands], sh("echo new > made"))
    content = desk.text(moved)
    assert desk.notices()[-1].startswith("Changed, and not covered by /undo: ")
    result = desk.undo()
    assert moved in result.lost
    assert "made" in result.paths
    assert desk.text(moved) == content
    assert content.startswith("precious\n")
    assert not (desk.folder / "made").exists()


def test_what_was_moved_in_is_covered_from_the_next_run_on(desk: Desk) -> None:
    desk.put({".gitignore": ".env\n", ".env": "1\n"})
    git(desk.folder, "init", "-q")
    settle()
    desk.run(sh("mv .env moved"))
    for command in ("echo 2 >> moved", "mv moved again; echo 2 >> again", "rm moved"):
        before = desk.tree()
        desk.run(sh(command))
        assert done(desk.undo())
        assert desk.tree() == before


MADE: dict[str, list[str]] = {
    "written, with an old time": ["echo 1 > made; touch -d '2001-01-01' made"],
    "unpacked, with an old time": ["tar xf ../old.tar"],
    "copied, with an old time": ["cp -a .env made; cp -a known made2"],
    "made outside and moved in": ["echo 1 > ../made; mv ../made made"],
    "made in an ignored folder": ["echo 1 > build/made; mv build/made made"],
    "made by git": ["rm known; git checkout -q known; git stash -q; git stash pop -q"],
    "moved and changed": ["mv known made; echo more >> made", "mv d made2; echo >> made2/e"],
    "moved out and in": ["mv known ../made", "mv ../made made; echo more >> made"],
    "by another name": ["ln known made", "rm known; echo more >> made"],
    "a second name of a link": ["ln -P link made", "ln -fP link known"],
}


@pytest.mark.parametrize(
    "is_watched",
    [True, False],
    ids=["watched", "not watched"],
)
@pytest.mark.parametrize("case", MADE)
def test_what_a_run_has_made_or_moved_is_taken_back_however_old_it_looks(
    desk: Desk, case: str, is_watched: bool
) -> None:
    if not is_watched:
        end_watch(desk)
    desk.put(
        {".gitignore": ".env\nbuild/\n", "known": "k", "d/e": "e", ".env": "1", "build/b": "b"}
    )
    (desk.folder / "link").symlink_to("nowhere")
    git(desk.folder, "init", "-q")
    git(desk.folder, "add", "-A")
    git(desk.folder, "commit", "-qm", "x")
    desk.put({"known": "k2", "../unpacked": "1"})
    os.utime(desk.folder / "../unpacked", (1, 1))
    subprocess.run(
        ["tar", "cf", "old.tar", "unpacked"],
        cwd=desk.folder.parent,
        check=True,
    )
    before = desk.tree()
    settle()
    desk.run(*map(sh, MADE[case]), sh("echo > new"))
    assert desk.notices() == []
    assert done(desk.undo())
    assert desk.tree() == before


def test_without_a_time_of_birth_that_of_the_last_change_counts(tmp_path: Path) -> None:
    """The file system of processes keeps none."""
    made = tmp_path / "made"
    made.touch()
    os.utime(made, (1, 1))
    assert born_at("/proc/self/status") == os.lstat("/proc/self/status").st_mtime_ns
    assert time.time_ns() - born_at(str(made)) < 60_000_000_000


# ---- what is recorded ----------------------------------------------------------------------------


def test_a_session_that_goes_on_can_undo_what_it_did_before(desk: Desk) -> None:
    desk.put({"a": "1"})
    before = desk.tree()
    desk.again("mine")
    desk.run(
        sh("echo 2 > a"),
        sh("true"),
        ("read", {"path": "a"}),
        prompt="same words",
    )
    time.sleep(0.002)  # messages of one millisecond are the same
    desk.run(prompt="same words")
    desk.again("another")
    assert desk.snapshots.runs == []
    for _ in range(2):
        desk.again("mine")
        messages = json.loads(json.dumps(desk.messages))
        done(desk.snapshots.undo(messages))
        assert messages == desk.messages[:8]
        done(desk.snapshots.redo(messages))
        assert messages == desk.messages
    done(desk.undo())
    desk.again("mine")
    assert done(desk.undo()) == ["a"]
    assert desk.tree() == before


def test_the_diff_of_a_run_and_of_the_session(desk: Desk) -> None:
    desk.put({"a.txt": "one\ntwo\n", "bin": b"\0\1", "ünï": "x\n", "m": "m\n"})
    assert desk.snapshots.diff() == ""
    desk.run(sh("sed -i s/two/2/ a.txt; echo > new; chmod +x m"))
    desk.put({"user.txt": "user\n"})
    desk.run(sh("sed -i s/one/1/ a.txt; printf '\\0\\2' > bin; rm new; echo y > ünï"))
    first, second = (desk.snapshots.diff(run) for run in desk.snapshots.runs)
    assert "--- a/a.txt\n+++ b/a.txt\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n" in first
    assert "b/new\nnew file\n" in first
    assert "old mode 100644\nnew mode 100755" in first
    assert "-one\n+1\n 2\n" in second
    assert "Binary files a/bin and b/bin differ" in second
    assert "+++ b/ünï" in second
    assert "deleted file" in second
    whole = desk.snapshots.diff()
    assert "-one\n-two\n+1\n+2\n" in whole
    assert "b/new" not in whole
    assert "user.txt" not in whole


# ---- what is left out ----------------------------------------------------------------------------


@pytest.mark.parametrize("tracked", [False, True])
def test_ignored_files_are_not_touched_also_if_the_agent_changed_the_rules(
    desk: Desk, tracked: bool
) -> None:
    git(desk.folder, "init", "-q")
    desk.put({".gitignore": "*.log\nbuild/\n", "a": "1", "b.log": "1", "build/x": "1"})
    desk.put({"sub/.gitignore": "!keep.log\n", "sub/keep.log": "1", "cache/x.log": "1"})
    names = "a b.log build/x sub/keep.log c.log cache/x.log cache/new"
    desk.run(
        sh(f"for f in {names}; do echo 2 > $f; done; mkdir -p deep/build; echo 2 > deep/build/x")
    )
    assert done(desk.undo()) == ["a", "cache/new", "sub/keep.log"]
    ignored = ("b.log", "build/x", "c.log", "cache/x.log", "deep/build/x")
    assert {desk.text(name) for name in ignored} == {"2\n"}
    assert desk.notices() == []
    desk.put(
        {
            ".gitignore": "secret.env\n/out/\n",
            "secret.env": "KEY=1",
            "out/result": "precious",
            "late": "1",
        }
    )
    if tracked:
        git(desk.folder, "add", "a")
        settle()
    desk.again()
    rewrite = "rm secret.env; echo KEY=2 > secret.env"
    desk.run(sh(f"echo late > .gitignore; {rewrite}; echo 2 | tee a b late"))
    assert done(desk.undo()) == [".gitignore", "a", "b", "late"]
    assert desk.text("secret.env") == "KEY=2\n"
    assert desk.text("out/result") == "precious"


def test_a_workspace_that_a_repository_above_ignores_is_covered_by_names(desk: Desk) -> None:
    above = desk.folder.parent
    git(above, "init", "-q")
    (above / ".gitignore").write_text("ws/\n")
    desk.put({"a": "1", "d/b": "1", "node_modules/x": "1", "d/.cache": "a file may have any name"})
    desk.run(sh("for name in a d/b d/new d/.cache node_modules/x; do echo 2 > $name; done"))
    assert done(desk.undo()) == ["a", "d/.cache", "d/b", "d/new"]
    assert desk.notices() == []


def test_a_tracked_file_is_covered_although_a_rule_ignores_it(desk: Desk) -> None:
    git(desk.folder, "init", "-q")
    desk.put({".gitignore": "*.log\nout/\n", "x.log": "1", "out/y": "1"})
    git(desk.folder, "add", "-f", ".")
    desk.run(sh("for name in x.log out/y other.log out/z; do echo 2 > $name; done"))
    assert done(desk.undo()) == ["out/y", "x.log"]
    assert desk.text("out/z") == desk.text("other.log") == "2\n"


def test_any_name_is_covered_and_rules_of_a_repository_above_hold(desk: Desk) -> None:
    odd = ("-rf", "new\nline", "ünï/c ö dé", "git~1", "back\\slash", ":(top)x", "*")
    names = [*odd, os.fsdecode(b"\xff")]
    git(desk.folder.parent, "init", "-q")
    (desk.folder.parent / ".gitignore").write_text("*.tmp\n/ws/out\n")
    desk.put({name: "1" for name in names})
    before = desk.tree()
    change = """find . -type f -exec sh -c 'echo 2 >> "$1"' _ {} \\; ; touch ../x -- -n b.tmp; mkdir out; touch out/c"""
    desk.run(sh(change))
    assert done(desk.undo()) == sorted([*names, "-n"])
    assert desk.notices() == []
    assert {name: desk.tree()[name] for name in before} == before


def test_git_is_asked_once_for_all_levels_of_a_look(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 folders in each other, with what the rules of one of them ignore and take back."""
    asked = tmp_path / "asked"
    program = shutil.which("git")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/git").write_text(f'#!/bin/sh\necho "$*" >> {asked}\nexec {program} "$@"\n')
    (tmp_path / "bin/git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    deep = "d/" * 300
    desk.put({f"{deep}f": "1", "d/d/d/.gitignore": "*.o\n!kept.o\n", "d/d/d/d/a.o": "1"})
    desk.put({f"{deep}kept": "1", "d/d/d/d/kept.o": "1", "d/d/d/d/new\nline": "1"})
    git(desk.folder, "init", "-q")
    desk.run(
        sh(f"cd d/d; for f in d/d/a.o d/d/kept.o ../../{deep}f; do echo 2 > $f; done; rm d/d/new*")
    )
    questions = [line for line in asked.read_text().splitlines() if "check-ignore" in line]
    assert len(questions) <= 3  # the first look, and at both ends of the step
    assert not desk.notices()
    assert set(done(desk.undo())) == {"d/d/d/d/new\nline", f"{deep}f", "d/d/d/d/kept.o"}
    assert desk.text(f"{deep}f") == "1"
    assert desk.text("d/d/d/d/a.o") == "2\n"


def test_rules_that_are_a_pipe_hold_nothing_up(desk: Desk) -> None:
    """git waits for it; what tools have made is left out then."""
    desk.put({"a": "1", "node_modules/x": "1"})
    git(desk.folder, "init", "-q")
    os.mkfifo(desk.folder / ".gitignore")
    desk.run(sh("echo 2 > a; echo 2 > node_modules/x"))
    assert not desk.notices()
    assert done(desk.undo()) == ["a"]
    assert desk.text("node_modules/x") == "2\n"


def test_rules_hold_many_folders_below_them(desk: Desk) -> None:
    """Git 2.39 crashes if it is to name the rule; what is deeper is asked after that."""
    half = "d/" * 60
    deep = "d/" * 100
    desk.put({"d/.gitignore": "*.o\n!kept.o\n", f"{deep}a.o": "1", f"{deep}kept.o": "1"})
    desk.put({f"{half}a.o": "1"})
    git(desk.folder, "init", "-q")
    desk.run(
        sh(f"echo 2 > {deep}a.o; echo 2 > {deep}kept.o; mkdir {deep}new; echo 2 > {deep}new/b.o")
    )
    assert done(desk.undo()) == [f"{deep}kept.o"]


def test_what_is_too_large_is_left_out_and_named(desk: Desk) -> None:
    size = MAX_FILE + 1
    desk.put(
        {
            "big": os.urandom(size),
            "same": b"y" * size,
            "grows": "1",
            "shrinks": b"z" * size,
        }
    )
    desk.put({"a": "1"})
    desk.run(sh(f"echo >> big; head -c {size} /dev/zero > grows; echo 1 > shrinks; echo 2 > a"))
    after = desk.tree()
    assert desk.notices() == ["Changed, and not covered by /undo: big, grows, shrinks."]
    assert done(desk.undo()) == ["a"]
    assert desk.stored() < 100_000
    assert {**desk.tree(), "a": ()} == {**after, "a": ()}


def test_repositories_in_the_workspace_are_left_out_and_never_changed(desk: Desk) -> None:
    desk.put({"a": "1", "with/f": "1"})
    git(desk.folder / "with", "init", "-q")
    inside = tree(desk.folder / "with/.git", but="")
    desk.run(sh("echo 2 > with/f; git init -q begins; echo 2 | tee begins/f a"))
    assert done(desk.undo()) == ["a"]
    assert desk.text("with/f") == "2\n"
    assert desk.text("begins/f") == "2\n"
    assert tree(desk.folder / "with/.git", but="") == inside


def test_git_is_asked_seldom_however_deep_a_folder_is(desk: Desk) -> None:
    """A program in git's place counts how often it is started, and takes its time."""
    git(desk.folder, "init", "-q")
    deep = "/".join(f"d{number % 10}" for number in range(300))
    desk.put({".gitignore": "*.log\n!kept.log\n", "a": "1", "kept.log": "1", f"{deep}/f": "1"})
    desk.put({f"{deep}/x.log": "mine", f"{deep}/repository/.git/HEAD": ""})
    change = f"for name in a kept.log {deep}/f {deep}/x.log {deep}/new; do echo 2 > $name; done"
    with slow_git(desk.folder.parent) as starts:
        desk.run(sh("true"))
        first = starts()
        desk.run(sh(change))
    assert desk.notices() == []
    assert max(first, starts() - first) <= 25
    assert done(desk.undo()) == ["a", f"{deep}/f", f"{deep}/new", "kept.log"]
    assert desk.text(f"{deep}/x.log") == "2\n"
    made = f"new/{deep}"  # by a command
    desk.run(
        sh(f"mkdir -p {made}/a.log; echo > {made}/f; echo > {made}/a.log/f; echo > {made}/b.log")
    )
    assert done(desk.undo()) == [f"{made}/f"]
    assert desk.notices() == []


def test_a_git_that_fails_is_not_asked_again(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for the levels of folders nor for what comes later; names decide then."""
    git(desk.folder, "init", "-q")
    desk.put({"d/e/f/g/h": "1", "node_modules/x": "1"})
    counted = tmp_path / "counted"
    program = tmp_path / "bin" / "git"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {counted}\nhead -c 1 > {counted}.1\nexit 128\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    desk.run(
        sh("true"), sh("for name in d/e/f/g/h d/e/new node_modules/x; do echo 2 > $name; done")
    )
    assert counted.read_text().count("check-ignore") == 2  # with the names of rules, and without
    assert done(desk.undo()) == ["d/e/f/g/h", "d/e/new"]
    assert desk.notices() == []


@pytest.mark.parametrize("first", [True, False])
def test_a_pipe_in_the_place_of_rules_is_not_waited_for(desk: Desk, first: bool) -> None:
    """Rules of other folders still hold. It may be there before the first look, or be made by a
    command."""
    git(desk.folder, "init", "-q")
    desk.put(
        {
            ".gitignore": "*.log\n",
            "a": "1",
            "sub/f": "1",
            "x.log": "1",
            "top/y.log": "1",
        }
    )
    if first:
        os.mkfifo(desk.folder / "sub/.gitignore")
    make = "true" if first else "mkfifo sub/.gitignore"
    names = "a sub/f sub/node_modules/g x.log top/y.log top/new.log"
    change = f"for name in {names}; do echo 2 > $name; done"
    desk.run(sh(f"mkdir -p sub/node_modules; {make}"), sh(change))
    assert done(desk.undo()) == ["a", "sub/f"]
    assert desk.notices() == []
    assert desk.text("x.log") == desk.text("top/y.log") == "2\n"


def test_a_pipe_in_the_place_of_rules_of_tracked_files_is_not_waited_for(desk: Desk) -> None:
    """Their folders are not listed. Rules of other folders still hold."""
    track(desk, {".gitignore": "*.log\n", "sub/f": "1"})
    os.mkfifo(desk.folder / "sub/.gitignore")
    desk.put({"x.log": "1", "sub/new": "1"})
    settle()
    desk.run(sh("for name in sub/f sub/new x.log; do echo 2 > $name; done"))
    assert done(desk.undo()) == ["sub/f", "sub/new"]
    assert desk.text("x.log") == "2\n"


def test_no_git_is_left_of_a_conversation_that_ends_before_it_has_answered(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(desk.folder, "init", "-q")
    desk.put({"../started": "", "../bin/git": "#!/bin/sh\necho $$ >> ../started\nexec sleep 99\n"})
    program = desk.folder.parent / "bin/git"
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    desk.snapshots(events.RunStart())
    until(lambda: len(desk.text("../started").splitlines()) == 2)
    desk.snapshots.close()
    # Nor as a process that nobody has waited for
    started = desk.text("../started").split()
    until(lambda: not any(is_there(int(pid)) for pid in started))


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_with_a_pipe_for_the_rules_of_the_workspace_git_is_not_asked(desk: Desk) -> None:
    git(desk.folder, "init", "-q")
    os.mkfifo(desk.folder / ".gitignore")
    with slow_git(desk.folder.parent, "check-ignore") as starts:
        desk.run(sh("mkdir node_modules; echo 1 > node_modules/b; echo 1 > a"))
        assert starts() == 0
    assert done(desk.undo()) == ["a"]


# ---- large worlds --------------------------------------------------------------------------------


def fill(folder: Path, files: int) -> None:
    """A hundred in each folder."""
    for number in range(files):
        path = folder / str(number // 100) / str(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(number))


@pytest.fixture
def kernel_reports() -> None:
    """Without reports of changes all files are looked at in each step."""
    start = getattr(ctypes.CDLL(None), "inotify_init1", lambda flags: -1)
    if (descriptor := start(0)) < 0:
        pytest.skip("this user's programs have all inotify instances that the kernel gives")
    os.close(descriptor)


@contextlib.contextmanager
def looks_at(folder: Path) -> Iterator[list[str]]:
    """Folders listed below this one, and git processes started. An audit hook cannot be removed,
    so it ignores every event after the block."""
    looks: list[str] = []
    ended = False

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if ended or event not in ("os.scandir", "subprocess.Popen"):
            return
        subject = str(arguments[0])  # the folder, or the program
        if subject.startswith(f"{folder}/") or Path(subject).name == "git":
            looks.append(event)

    sys.addaudithook(audit)
    try:
        yield looks
    finally:
        ended = True


@pytest.mark.parametrize(
    "files",
    [400, pytest.param(40_000, marks=pytest.mark.slow)],
)
def test_many_files_are_covered_in_the_end_and_a_step_is_cheap(
    tmp_path: Path, files: int, kernel_reports: None
) -> None:
    """What the first look has no time for comes with the next runs; steps cost the same."""
    desk = Desk(tmp_path / "ws", tmp_path / "data")
    fill(desk.folder, files)
    before = desk.tree()

    def each(event: Event) -> None:
        if isinstance(event, events.StepEnd):
            marks.append(len(looks))

    for _ in range(20):
        marks: list[int] = []
        with looks_at(desk.folder) as looks:
            desk.run(sh("true"), sh("true"), each=each)
        assert 0 < marks[0] == marks[1], "the first look, and no other"
        if complete := not any("covers only part" in notice for notice in desk.notices()):
            break
        desk.again()
    desk.run(sh("rm 0/6; echo changed > 0/5; mv 2 renamed"))
    assert complete
    assert len(done(desk.undo())) == 202
    assert desk.tree() == before
    desk.snapshots.close()


def test_if_one_file_has_changed_no_folder_is_listed(desk: Desk, kernel_reports: None) -> None:
    desk.put({"b": "1"} | {f"{number}/a": "1" for number in range(9)})
    desk.run(sh("true"))
    with looks_at(desk.folder) as looks:
        desk.run(sh("echo 2 > 3/a; echo 2 > b"))
    assert looks == []
    assert done(desk.undo()) == ["3/a", "b"]


def test_a_link_in_the_place_of_a_folder_leaves_the_reports_of_others(
    desk: Desk, kernel_reports: None
) -> None:
    track(desk, {"b": "1", "d/x/a": "1", "link/x/a": "1"})
    shutil.rmtree(desk.folder / "link")
    (desk.folder / "link").symlink_to("d")
    settle()
    desk.run(sh("true"))
    with looks_at(desk.folder) as looks:
        desk.run(sh("echo 2 > b; echo 2 > d/x/a"))
    assert looks == []
    assert done(desk.undo()) == ["b", "d/x/a"]


@pytest.mark.slow
def test_more_than_is_kept_is_left_out_and_the_rest_can_be_undone(desk: Desk) -> None:
    """Small files come first. The next session does not read what was left out again."""
    desk.put({f"data/{number}": os.urandom(MAX_FILE - 100) for number in range(60)})
    desk.put({"a": "1"})
    for _ in range(2):
        desk.again()
        desk.run(sh("echo 2 > a; echo >> data/59"))
        assert any("covers only part of this folder" in notice for notice in desk.notices())
        assert "a" in done(desk.undo())
        assert desk.text("a") == "1"
    assert desk.stored() < MAX_STORED + 20_000_000


# ---- the user's git, and hostile workspaces ------------------------------------------------------


def test_a_repository_is_the_same_byte_by_byte_after_undo_redo_and_diff(desk: Desk) -> None:
    desk.put({"a": "1", ".gitignore": "ignored\n", "ignored": "1", "excluded": "1"})
    git(desk.folder, "init", "-q")
    git(desk.folder, "add", "a")
    git(desk.folder, "commit", "-qm", "x")
    (desk.folder / ".git/info/exclude").write_text("excluded\n")
    before = tree(desk.folder / ".git", but="")
    times = {path: path.stat().st_mtime_ns for path in (desk.folder / ".git").rglob("*")}
    desk.run(sh("echo 2 > a; echo 2 > ignored; echo 2 > excluded"))
    assert done(desk.undo()) == ["a"], "its .gitignore and its info/exclude hold"
    done(desk.redo())
    desk.snapshots.diff()
    assert tree(desk.folder / ".git", but="") == before
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_no_filter_monitor_hook_or_setting_of_a_workspace_is_run_or_obeyed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    witness = desk.folder.parent / "witness"
    evil = f"touch {witness}; cat"
    git(desk.folder, "init", "-q")
    settings = [('filter "evil"', name) for name in ("clean", "smudge", "process")]
    settings += [('diff "evil"', "textconv"), ("core", "fsmonitor"), ("core", "pager")]
    config = "".join(f'[{section}]\n\t{name} = "{evil}"\n' for section, name in settings)
    config += f"[core]\n\thooksPath = {desk.folder}/hooks\n\tautocrlf = true\n"
    hooks = ("post-index-change", "fsmonitor-watchman")
    desk.put({f"hooks/{hook}": f"#!/bin/sh\n{evil}\n" for hook in hooks})
    desk.put({f".git/hooks/{hook}": f"#!/bin/sh\n{evil}\n" for hook in hooks})
    for hook in (
        *desk.folder.glob("hooks/*"),
        *desk.folder.glob(".git/hooks/*"),
    ):
        hook.chmod(0o755)
    (desk.folder / ".git/config").write_text(config)
    attributes = "* filter=evil diff=evil text eol=lf ident working-tree-encoding=UTF-16\n"
    desk.put({".gitattributes": attributes, "crlf": "a\r\nb\r\n$Id: x$\n", "sub/f": "a\r\n"})
    before = desk.tree()
    variables = {
        "GIT_DIR": str(desk.folder / ".git"), "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_VALUE_0": evil,
        "GIT_CONFIG_KEY_0": "core.fsmonitor", "GIT_EXEC_PATH": str(desk.folder / "hooks"),
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    desk.run(sh("printf 'x\\r\\ny\\r\\n' > crlf; rm sub/f"))
    desk.snapshots.diff()
    done(desk.undo())
    assert desk.tree() == before
    assert not witness.exists()
    assert desk.notices() == []


def test_a_git_that_lies_in_the_workspace_is_not_run_and_none_is_needed(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    witness = tmp_path / "witness"
    desk.put({"bin/git": f"#!/bin/sh\ntouch {witness}\n", "a": "1", "node_modules/x": "1"})
    (desk.folder / "bin/git").chmod(0o755)
    os.symlink(desk.folder / "bin/git", tmp_path / "git")
    monkeypatch.setenv("PATH", f"{desk.folder}/bin:{tmp_path}:.")
    call = "/bin/rm a; echo 1 > node_modules/y; /bin/mkdir -p s/.venv; echo 1 > s/.venv/z"
    desk.run(sh(call))
    assert done(desk.undo()) == ["a"]
    assert desk.notices() == []
    assert not witness.exists()


# ---- contents that git has -----------------------------------------------------------------------


def track(desk: Desk, files: Mapping[str, str | bytes], *options: str) -> Tree:
    """Add these files to git, as they were an hour ago. Returns the tree."""
    desk.put(files)
    for name in files:
        os.utime(
            desk.folder / name,
            (time.time() - 3600,) * 2,
        )
    git(desk.folder, "init", "-q")
    git(desk.folder, *options, "add", "-A")
    return desk.tree()


@pytest.mark.parametrize("inner", ["", "sub"])
def test_tracked_files_are_read_from_git(desk: Desk, inner: str) -> None:
    """Also after a gc, in a later process, and in a folder of the repository."""
    names = [os.path.join(inner, name) for name in ("a", "b", "d/c", "x.sh")]
    before = track(
        desk,
        {"ü": "top", **{name: f"{name} one\n" for name in names}},
    )
    here = Desk(desk.folder / inner, desk.data)
    here.again("mine")
    here.run(
        ("edit", {"path": "a", "old_string": "one", "new_string": "two"}),
        sh("echo 2 > b; rm -r d; chmod +x x.sh"),
    )
    with database(here) as db:
        assert db.execute("SELECT count(*) FROM pack, json_each(places)").fetchone() == (2,), (
            "what the run wrote"
        )
    git(desk.folder, "gc", "-q", "--prune=now")
    here.again("mine")
    assert "-" + names[0] + " one\n+" + names[0] + " two\n" in here.snapshots.diff()
    assert done(here.undo()) == ["a", "b", "d/c", "x.sh"]
    assert desk.tree() == before
    done(here.redo())
    assert here.text("b") == "2\n"
    here.snapshots.close()


def settle() -> None:
    """Until no file is so new that it is read in any case."""
    end = time.time_ns() + 50_000_000
    while time.time_ns() < end:
        time.sleep(0.01)


@contextlib.contextmanager
def opened_in(folder: Path) -> Iterator[list[str]]:
    """The files that this process opens below this folder, by their names in it, or in an opened
    folder."""
    names: list[str] = []
    ended = False

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if ended or event != "open" or not isinstance(arguments[0], str):
            return
        name = arguments[0].removeprefix(f"{folder}/")
        # "<unknown>": another thread looks for the source of a line that a warning shows
        if not os.path.isabs(name) and not name.startswith("<"):
            names.append(name)

    sys.addaudithook(audit)
    try:
        yield names
    finally:
        ended = True


def test_files_that_git_knows_to_be_unchanged_are_not_read(desk: Desk) -> None:
    """A large repository is covered from the first run on. Others are read, also what git keeps in
    another form."""
    track(desk, {"a": "1", "d/b": "1", "c": "1"})
    desk.put({"c": "2", "new": "1"})
    before = desk.tree()
    settle()
    with opened_in(desk.folder) as names:
        desk.run(sh("true"))
    assert sorted(name for name in names if not name.startswith(".git")) == ["c", "new"]
    desk.run(sh("echo 3 | tee a d/b c new"))
    assert done(desk.undo()) == ["a", "c", "d/b", "new"]
    assert desk.tree() == before


@pytest.mark.parametrize(
    ("attributes", "options", "content"),
    [
        ("a filter=swap", ("-c", "filter.swap.clean=tr ab ba"), b"aab\n"),
        ("* text eol=crlf", (), b"a\r\nb\r\n"),
        ("* ident", (), b"$Id: 0123$\n"),
        ("", ("-c", "core.autocrlf=true"), b"a\r\nb\r\n"),
    ],
)
@pytest.mark.parametrize("inner", ["", "sub"])
def test_a_file_that_git_has_in_another_form_comes_back_as_it_was(
    desk: Desk, attributes: str, options: tuple[str, ...], content: bytes, inner: str
) -> None:
    path = os.path.join(inner, "a")
    before = track(desk, {".gitattributes": attributes, path: content}, *options)
    assert git(desk.folder, "cat-file", "blob", f":{path}").encode() != content
    settle()
    here = Desk(desk.folder / inner, desk.data)
    here.run(sh("echo 3 > a"))
    assert done(here.undo()) == ["a"]
    assert desk.tree() == before
    here.snapshots.close()


def test_what_one_process_has_read_no_other_one_reads_again(desk: Desk) -> None:
    track(desk, {"other form": b"1\r\n", "plain": "1\n"}, "-c", "core.autocrlf=true")
    desk.put({"new": "1", "d/new": "1"})
    settle()
    read_by_each: list[list[str]] = []
    for _ in range(2):
        with opened_in(desk.folder) as names:
            desk.run(sh("true"))
        read_by_each.append(sorted(name for name in names if not name.startswith(".git")))
        desk.snapshots.close()
        desk.again()
    assert read_by_each == [["d", "new", "new", "other form"], ["d"]]
    desk.run(sh("echo 2 | tee 'other form' new d/new"))
    assert done(desk.undo()) == ["d/new", "new", "other form"]


@pytest.mark.parametrize("race", [False, True])
def test_a_file_changed_while_the_index_was_written_is_read(desk: Desk, race: bool) -> None:
    """The index says that `a` holds "one", with all facts of the file that holds "two"."""
    track(desk, {"a": "one"})
    desk.put({"a": "two"})
    index = desk.folder / ".git/index"
    info = (desk.folder / "a").stat()
    data = bytearray(index.read_bytes()[:-20])
    times = (
        *divmod(info.st_ctime_ns, 10**9),
        *divmod(info.st_mtime_ns, 10**9),
    )
    struct.pack_into(">4I", data, 12, *times)
    index.write_bytes(bytes(data) + hashlib.sha1(data).digest())
    written = info.st_mtime_ns + (0 if race else 10**9)
    os.utime(index, ns=(written, written))
    settle()
    desk.run(sh("echo 2 > a"))
    assert done(desk.undo()) == ["a"]
    assert desk.text("a") == ("two" if race else "one"), "without the race git is believed"


def test_a_file_at_which_git_is_told_not_to_look_is_read(desk: Desk) -> None:
    track(desk, {"a": "one", "b": "one"})
    git(desk.folder, "update-index", "--assume-unchanged", "a")
    git(desk.folder, "update-index", "--skip-worktree", "b")
    desk.put({"a": "two", "b": "two"})
    settle()
    desk.run(sh("echo 3 | tee a b"))
    assert done(desk.undo()) == ["a", "b"]
    assert desk.text("a") == desk.text("b") == "two"


def test_what_is_in_the_place_of_a_tracked_file_is_known(desk: Desk) -> None:
    """Git's listing of it says that it was a file, and the same for all."""
    names = ("changed", "removed", "linked", "folder", "moved", "sub/kept")
    track(desk, dict.fromkeys(names, "1\n"))
    desk.put({"changed": "2\n"})
    for name in ("removed", "linked", "folder"):
        (desk.folder / name).unlink()
    (desk.folder / "linked").symlink_to("changed")
    desk.put({"folder/new": "3\n"})
    before = desk.tree()
    settle()
    everything = "changed linked folder sub"
    desk.run(
        sh("mv moved elsewhere; echo 4 >> elsewhere; echo 4 > removed"), sh(f"rm -r {everything}")
    )
    assert desk.notices() == []
    assert done(desk.undo()) == [
        "changed",
        "elsewhere",
        "folder/new",
        "linked",
        "moved",
        "removed",
        "sub/kept",
    ]
    assert desk.tree() == before


def test_what_a_tool_changes_before_all_is_checked_is_known_as_far_as_git_knows_it(
    desk: Desk, kernel_reports: None
) -> None:
    """In a large repository the first tool begins before permissions and forms are looked at."""
    names = ("plain", "program", "private", "removed", "shared")
    desk.put(dict.fromkeys(names, "1\n"))
    (desk.folder / "private").chmod(0o600)
    os.link(desk.folder / "shared", desk.folder / "shared too")
    track(desk, {"other form": b"1\r\n"}, "-c", "core.autocrlf=true")
    settle()
    files = WorkspaceFiles(str(desk.folder), str(desk.data))
    files.first_look.read_index()
    files.first_look.survey()
    files.begin_step()
    for name in ("plain", "private", "shared", "other form"):
        desk.put({name: "2\n"})
    (desk.folder / "program").chmod(0o755)
    (desk.folder / "removed").unlink()
    files.first_look.check()
    changes = files.end_step()
    files.close()
    assert changes.lost == ["other form", "shared too"]  # no change of the latter is reported
    before = {path: old for path, (old, _) in changes.files.items() if old}
    assert {path: stat.S_IMODE(old.mode) for path, old in before.items()} == {
        "plain": 0o644,
        "private": 0o600,
        "program": 0o644,
        "removed": 0o644,
        "shared": 0o644,
    }
    assert len({old.blob for old in before.values()}) == 1
    assert before["shared"].link


def test_git_lists_what_it_does_not_have_before_a_tool_waits(
    desk: Desk, kernel_reports: None
) -> None:
    """Folders are listed here only if something was made in them since then, or git has nothing in
    them."""
    track(desk, {f"{name}/a": "1" for name in ("late", "inner", "still", "still/deep")})
    desk.put({"still/new": "1", "other/deep/new": "1"})
    (desk.folder / "other/empty").mkdir()
    git(desk.folder / "inner", "init", "-q")
    settle()
    files = WorkspaceFiles(str(desk.folder), str(desk.data))
    files.first_look.read_index()
    desk.put({"late/new": "1"})
    with looks_at(desk.folder) as looks:
        files.first_look.survey()
    files.first_look.read_rest()
    files.begin_step()
    names = ["late/a", "late/new", "still/a", "still/new", "other/deep/new"]
    made = ["other/empty/made", "still/made"]
    desk.put(dict.fromkeys([*names, *made, "inner/a"], "2"))
    files.first_look.check()
    changes = files.end_step()
    files.close()
    listed = ["late", "other", "other/deep", "other/empty"]
    assert looks.count("os.scandir") == len(listed)
    assert changes.lost == []
    assert sorted(changes.files) == sorted(names + made)
    assert sorted(path for path, (old, _) in changes.files.items() if old is None) == made


@pytest.mark.parametrize("inner", ["", "sub"])
def test_few_changes_of_a_step_are_known_before_all_is_checked(
    desk: Desk, kernel_reports: None, inner: str
) -> None:
    """What git had is known, although the step changes the index of git, too."""
    contents = {"plain": b"1\n", "moved": b"2\n", "other form": b"1\r\n"}
    root = desk.folder / inner
    track(
        desk,
        {os.path.join(inner, name): content for name, content in contents.items()},
        "-c",
        "core.autocrlf=true",
    )
    settle()
    files = WorkspaceFiles(str(root), str(desk.data))
    files.first_look.read_index()
    files.first_look.survey()
    files.begin_step()
    for name in ("plain", "other form"):
        (root / name).write_text("2\n")
    (root / "moved").rename(root / "elsewhere")
    git(desk.folder, "add", "-A")
    changes = files.end_step()
    files.close()
    assert changes.lost == ["other form"]
    assert sorted(changes.files) == ["elsewhere", "moved", "plain"]


def test_a_change_of_a_file_with_two_names_waits_until_all_is_checked(
    desk: Desk, kernel_reports: None
) -> None:
    """The other name is not reported, and to find it takes the inodes of all files."""
    desk.put({"a": "1"})
    os.link(desk.folder / "a", desk.folder / "b")
    track(desk, {"c": "1"})
    git(desk.folder, "add", "a", "b")
    settle()
    files = WorkspaceFiles(str(desk.folder), str(desk.data))
    files.first_look.read_index()
    files.first_look.survey()
    files.begin_step()
    desk.put({"a": "2", "c": "2"})
    steps: list[Changes] = []
    ending = threading.Thread(target=lambda: steps.append(files.end_step()))
    ending.start()
    ending.join(0.3)
    assert ending.is_alive(), "it does not wait"
    files.first_look.check()
    ending.join()
    files.close()
    [changes] = steps
    # The last search of the check may come first, and takes "b" for one that was changed before
    assert sorted([*changes.files, *changes.lost]) == ["a", "b", "c"]
    before, _ = changes.files["a"]
    assert before and before.link


@pytest.mark.parametrize("name", ["another", "new/another"])
def test_of_a_file_that_a_step_has_given_another_name_it_is_checked_what_it_was(
    desk: Desk, kernel_reports: None, name: str
) -> None:
    """Only the new name is reported, or the new folder that it is in."""
    track(desk, {"other form": b"1\r\n", "a": b"1\n"}, "-c", "core.autocrlf=true")
    settle()
    files = WorkspaceFiles(str(desk.folder), str(desk.data))
    files.first_look.read_index()
    files.first_look.survey()
    files.begin_step()
    desk.put({name: ""})
    (desk.folder / name).unlink()
    os.link(desk.folder / "other form", desk.folder / name)
    checking = threading.Thread(target=files.first_look.check)
    checking.start()
    changes = files.end_step()
    checking.join()
    files.close()
    assert changes.lost == ["other form"]
    assert list(changes.files) == [name]


def test_what_a_file_tool_writes_before_all_is_checked_is_known(desk: Desk) -> None:
    desk.put({"private": "1\n"})
    (desk.folder / "private").chmod(0o600)
    track(desk, {"other form": b"1\r\n"}, "-c", "core.autocrlf=true")
    settle()
    files = WorkspaceFiles(str(desk.folder), str(desk.data))
    files.first_look.read_index()
    files.first_look.survey()
    files.begin_step()
    for name in ("private", "other form"):
        files.keep(name)
        desk.put({name: "2\n"})
        (desk.folder / name).chmod(0o640)
        files.keep(name)  # what it is now is not what it was
    files.first_look.check()
    changes = files.end_step()
    assert changes.lost == []
    before = {path: old for path, (old, _) in changes.files.items() if old}
    assert {path: stat.S_IMODE(old.mode) for path, old in before.items()} == {
        "private": 0o600,
        "other form": 0o644,
    }
    contents = files.store.blobs({old.blob for old in before.values()})
    files.close()
    assert contents[before["private"].blob] == b"1\n"
    assert contents[before["other form"].blob] == b"1\r\n"


def test_small_files_are_read_before_what_git_has_is_checked_and_large_ones_after_it(
    desk: Desk,
) -> None:
    """The end of a step waits for the check, for as long as that takes."""
    track(desk, {"tracked": "1"})
    desk.put({"small": "1", "large": os.urandom(100_000)})
    settle()
    stages: list[str] = []
    ended = False

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if ended:
            return
        if event == "open" and arguments[0] in ("small", "large"):
            stages.append(arguments[0])
        if event == "subprocess.Popen" and "cat-file" in arguments[1]:
            stages.append("check")

    sys.addaudithook(audit)
    try:
        desk.run(sh("true"))
    finally:
        ended = True
    assert stages.index("small") < stages.index("check")
    assert stages[-1] == "large", "it was opened before, too, to see its size"


def test_a_folder_is_opened_once_for_all_of_its_files_with_other_permissions(desk: Desk) -> None:
    names = [f"{folder}/{number}" for folder in "de" for number in range(20)]
    track(desk, {"a": "its permissions are the usual ones"} | dict.fromkeys(names, "1"))
    for name in names:
        (desk.folder / name).chmod(0o600)
    settle()
    with opened_in(desk.folder) as opened:
        desk.run(sh("true"))
    assert sorted(name for name in opened if name in "de") == ["d", "e"]


@pytest.mark.parametrize("inner", ["a/x.log", "a/deep/x.log"])
def test_a_file_in_whose_place_ignored_files_are_is_named_and_nothing_is_done(
    desk: Desk, inner: str
) -> None:
    desk.put({"a": "1", "b": "1", "c/d": "1", ".gitignore": "*.log\n"})
    git(desk.folder, "init", "-q")
    desk.run(sh(f"rm -r a c; mkdir -p $(dirname {inner}); echo 2 | tee a/new b c {inner}"))
    assert desk.undo().problem.endswith("files that undo does not cover are in the place of a.")
    assert desk.text("b") == desk.text("c") == desk.text("a/new") == "2\n"
    (desk.folder / inner).rename(desk.folder / "x.log")
    assert done(desk.undo()) == ["a", "a/new", "b", "c", "c/d"]
    assert desk.text("a") == desk.text("b") == desk.text("c/d") == "1"


def test_a_link_in_the_place_of_a_folder_is_undone_whatever_is_where_it_leads(desk: Desk) -> None:
    desk.put({"a/b": "1", "c/b/d": "1"})
    git(desk.folder, "init", "-q")
    before = desk.tree()
    desk.run(sh("rm -r a; ln -s c a"))
    assert done(desk.undo()) == ["a", "a/b"]
    assert desk.tree() == before


def test_a_repository_with_other_ids_is_read(desk: Desk) -> None:
    git(desk.folder, "init", "-q", "--object-format=sha256")
    before = track(desk, {"a": "one"})
    settle()
    desk.run(sh("echo 2 > a"))
    assert done(desk.undo()) == ["a"]
    assert desk.tree() == before


def test_what_is_not_kept_any_more_is_named_and_the_rest_restored(desk: Desk) -> None:
    track(desk, {"a": "1", "b": "1"})
    desk.put({"mine": "0"})
    desk.run(sh("rm -r .git; rm a; echo 2 | tee b mine new"))
    result = desk.undo()
    assert result.problem == ""
    assert result.paths == ["mine", "new"]
    assert result.lost == ["a", "b"]
    assert desk.text("mine") == "0"
    assert desk.text("b") == "2\n"
    assert done(desk.redo()) == ["mine", "new"]
    assert desk.text("mine") == "2\n"
    assert desk.snapshots.diff().count("no longer kept") == 2


def test_what_two_processes_read_at_once_is_stored_once(desk: Desk) -> None:
    both = [WorkspaceFiles(str(desk.folder), str(desk.data)) for _ in range(2)]
    for files in both:
        files.store.saved_states()  # where each of them begins
    ahead, behind = both
    for files, data in [(ahead, b"1"), (ahead, b"2"), (behind, b"1"), (behind, b"2")]:
        files.store.add(data)
        files.store.flush()
    for files in both:
        files.close()
    with database(desk) as db:
        assert db.execute("SELECT count(*) FROM pack, json_each(places)").fetchone() == (2,)


def test_a_damaged_row_costs_its_own_contents_only(desk: Desk) -> None:
    """A power cut may leave anything in it."""
    desk.put({"a": "1", "d/b": "1", "e/c": "1"})
    desk.again("mine")
    desk.run(sh("rm a"))
    desk.run(sh("echo 2 > d/b"))
    desk.snapshots.close()
    with database(desk) as db:
        db.execute("UPDATE seen SET states = substr(states, 1, 20) WHERE folder = x'64'")
        newest = "(SELECT max(id) FROM pack)"
        db.execute(f"UPDATE pack SET places = substr(places, 1, 20) WHERE id = {newest}")
    desk.again("mine")
    desk.run(sh("echo 3 > d/b; echo 2 > e/c"))
    assert done(desk.undo()) == ["d/b", "e/c"]
    assert done(desk.undo()) == ["d/b"]
    assert done(desk.undo()) == ["a"]
    assert desk.text("a") == desk.text("d/b") == desk.text("e/c") == "1"
    assert desk.notices() == []


def test_the_first_look_goes_on_as_long_as_no_tool_waits_for_it(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "ws", tmp_path / "data", patience=0)
    desk.put({"a": "1"})
    desk.snapshots(events.RunStart())
    while not list(desk.data.glob("snapshots/*.db")) or not seen_states(desk):
        time.sleep(0.01)  # the model answers meanwhile
    desk.snapshots(events.ToolStart("1", "bash", {}, ""))
    desk.put({"a": "2"})
    desk.snapshots(events.StepEnd({}, [], "tool_calls", Usage()))
    assert done(desk.undo()) == ["a"]
    assert desk.notices() == []
    desk.snapshots.close()


def seen_states(desk: Desk) -> int:
    """How many files the first look has read, as it has written down."""
    with contextlib.suppress(sqlite3.OperationalError), database(desk) as db:
        [count] = db.execute("SELECT count(*) FROM seen").fetchone()
        return int(count)
    return 0


@pytest.fixture
def files(tmp_path: Path) -> Iterator[WorkspaceFiles]:
    """Of a folder with two files."""
    root = tmp_path / "ws"
    (root / "d").mkdir(parents=True)
    (root / "d/a").write_text("1")
    (root / "d/b").write_text("1")
    files = WorkspaceFiles(str(root), str(tmp_path / "data"))
    yield files
    files.close()


def test_a_file_that_is_not_read_yet_is_lost_if_it_changes(files: WorkspaceFiles) -> None:
    """It is not taken for a new one: to undo the making of a file is to remove it."""
    root = Path(files.root)
    files.first_look.read_index()
    files.first_look.survey()
    files.end_step()
    (root / "d/a").write_text("2")
    (root / "d/new").write_text("1")
    changes = files.end_step()
    assert changes.lost == ["d/a"]
    assert list(changes.files) == ["d/new"]
    files.first_look.read_rest()
    (root / "d/a").write_text("3")
    (root / "d/b").write_text("3")
    changes = files.end_step()
    assert sorted(changes.files) == ["d/a", "d/b"]
    assert changes.lost == []


@pytest.mark.parametrize(
    "is_surveyed",
    [True, False],
    ids=["listed", "not listed"],
)
def test_a_file_that_a_tool_names_is_kept_before_it_is_written(
    files: WorkspaceFiles, is_surveyed: bool
) -> None:
    root = Path(files.root)
    if is_surveyed:
        files.first_look.read_index()
        files.first_look.survey()
    files.end_step()
    for path in ("d/a", "d/new"):
        files.keep(path)
        (root / path).write_text("2")
        files.keep(path)  # what it is now is not what it was
        (root / path).write_text("3")
    if not is_surveyed:
        files.first_look.read_index()
        files.first_look.survey()
        files.first_look.read_rest()
    changes = files.end_step()
    before, after = changes.files["d/a"]
    assert before
    assert after
    assert before.blob == "56a6051ca2b02b04ef92d5150c9ef600403cb1de"
    assert after.blob == "e440e5c842586965a7fb77deda2eca68612b1f53"
    assert changes.files["d/new"][0] is None
    assert changes.lost == []


def test_undo_names_what_it_cannot_bring_back_also_in_a_later_process(desk: Desk) -> None:
    size = MAX_FILE + 1
    desk.put({"a": "1", "big": b"y" * size})
    desk.again("mine")
    desk.run(sh("echo 2 > a; echo 2 > big"))
    desk.again("mine")
    result = desk.undo()
    assert result.problem == ""
    assert result.paths == ["a"]
    assert result.lost == ["big"]
    assert desk.text("a") == "1"
    assert desk.text("big") == "2\n"


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        pytest.param("bash", {"command": "echo 2 > b"}, id="a command"),
        pytest.param("rename_all", {"path": "c"}, id="a tool of a plugin that names one file"),
    ],
)
def test_what_may_change_any_file_before_all_are_listed_is_said_to_be_known_in_part(
    tmp_path: Path, tool: str, arguments: dict[str, str]
) -> None:
    """What a file tool writes is undone all the same. Git waits for a pipe in the place of
    rules."""
    desk = Desk(tmp_path / "ws", tmp_path / "data", patience=0)
    desk.put({"file": "1", "b": "1"})
    os.symlink("file", desk.folder / "a")
    git(desk.folder, "init", "-q")
    (desk.folder / ".git/info/exclude").unlink()
    os.mkfifo(desk.folder / ".git/info/exclude")
    desk.snapshots(events.RunStart())
    desk.snapshots(events.ToolStart("1", "write", {"path": "a"}, ""))
    desk.put({"a": "2"})
    assert not desk.snapshots.runs[-1].is_partly_known
    desk.snapshots(events.ToolStart("2", tool, arguments, ""))
    desk.put({"b": "2"})
    desk.snapshots(events.StepEnd({}, [], "tool_calls", Usage()))
    result = desk.undo()
    assert result.paths == ["file"]
    assert result.is_partly_known is True
    assert desk.text("a") == "1"
    assert desk.text("b") == "2"
    assert "still being listed" in desk.notices()[0]
    desk.snapshots.close()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param("rm a", "echo 2 > a", id="removed, then made anew"),
        pytest.param("mv a moved", "echo 2 > a", id="moved away, then made anew"),
        pytest.param("echo 2 > a", "echo 3 > a", id="changed twice"),
        pytest.param("echo 2 > a", "rm a", id="changed, then removed"),
    ],
)
def test_nothing_is_taken_back_that_a_command_may_have_changed_before_the_files_were_listed(
    tmp_path: Path, first: str, second: str
) -> None:
    """What a later step began with need not be what the run began with."""
    desk = Desk(tmp_path / "ws", tmp_path / "data", patience=0)
    desk.put({"a": "1", "b": "1"})
    git(desk.folder, "init", "-q")
    rules = desk.folder / ".git/info/exclude"
    rules.unlink()
    os.mkfifo(rules)
    desk.snapshots(events.RunStart())
    desk.snapshots(events.ToolStart("1", "write", {"path": "b"}, ""))
    desk.put({"b": "2"})
    desk.snapshots(events.ToolStart("2", "bash", {"command": first}, ""))
    subprocess.run(["sh", "-c", first], cwd=desk.folder, check=True)
    desk.snapshots(events.StepEnd({}, [], "tool_calls", Usage()))
    # Git is let go on, and the next command waits for the list
    with rules.open("w"):
        rules.unlink()
    desk.snapshots.patience = 60
    desk.snapshots(events.ToolStart("3", "bash", {"command": second}, ""))
    subprocess.run(["sh", "-c", second], cwd=desk.folder, check=True)
    desk.snapshots(events.StepEnd({}, [], "tool_calls", Usage()))
    left = {name: facts for name, facts in desk.tree().items() if name != "b"}
    result = desk.undo()
    assert result.paths == ["b"]
    assert result.lost == ["a"]
    assert result.problem == ""
    assert desk.text("b") == "1"
    assert {name: facts for name, facts in desk.tree().items() if name != "b"} == left
    desk.snapshots.close()


@pytest.mark.parametrize(
    "path",
    ["../outside", "/etc/hostname", "", "a\0b", ".", "d"],
)
def test_a_path_of_a_call_that_is_no_file_of_the_workspace_does_no_harm(
    desk: Desk, path: str
) -> None:
    desk.put({"d/a": "1"})
    desk.snapshots(events.RunStart())
    desk.snapshots(events.ToolStart("1", "write", {"path": path}, ""))
    desk.put({"d/a": "2"})
    desk.snapshots(events.StepEnd({}, [], "tool_calls", Usage()))
    assert done(desk.undo()) == ["d/a"]
    assert desk.notices() == []


def test_a_run_that_an_older_version_has_written_can_be_undone(desk: Desk) -> None:
    desk.put({"a": "1"})
    desk.again("mine")
    desk.run(sh("echo 2 > a"))
    with database(desk) as db:
        [data] = db.execute("SELECT data FROM run").fetchone()
        db.execute(
            "UPDATE run SET data = ?",
            (json.dumps(json.loads(data)[:3]),),
        )
    desk.again("mine")
    assert done(desk.undo()) == ["a"]
    assert desk.text("a") == "1"


def keep_as_version_1(desk: Desk) -> None:
    """Store the contents as that version did, each by itself."""
    with database(desk) as db:
        db.execute("CREATE TABLE blob (id TEXT PRIMARY KEY, used INTEGER, data BLOB)")
        for used, places, data in db.execute("SELECT used, places, data FROM pack").fetchall():
            contents = zlib.decompress(data)
            for blob, (start, end) in json.loads(places).items():
                kept = (blob, used, zlib.compress(contents[start:end]))
                db.execute("INSERT INTO blob VALUES (?, ?, ?)", kept)
        db.execute("DROP TABLE pack")
        db.execute("PRAGMA user_version = 1")


def test_contents_that_an_older_version_has_kept_can_be_brought_back(desk: Desk) -> None:
    desk.put({"a": "1"})
    desk.again("mine")
    desk.run(sh("echo 2 > a"))
    desk.snapshots.close()
    keep_as_version_1(desk)
    desk.again("mine")
    assert done(desk.undo()) == ["a"]
    assert desk.text("a") == "1"
    assert done(desk.redo()) == ["a"]
    assert desk.text("a") == "2\n"


def test_contents_of_an_older_version_are_taken_over_once_if_that_was_broken_off(
    desk: Desk,
) -> None:
    desk.put({"a": "1"})
    desk.again("mine")
    desk.run(sh("echo 2 > a"))
    desk.snapshots.close()
    keep_as_version_1(desk)
    with database(desk) as db:
        # With this its table cannot be removed, which is the last step
        db.execute("CREATE TABLE guard (id TEXT REFERENCES blob(id))")
        db.execute("INSERT INTO guard SELECT id FROM blob")
    desk.again("mine")
    assert desk.undo().problem, "the file is not taken over yet"
    with database(desk) as db:
        db.execute("DROP TABLE guard")
    desk.again("mine")
    assert done(desk.undo()) == ["a"]
    with database(desk) as db:
        contents = db.execute("SELECT key FROM pack, json_each(places)").fetchall()
    assert len(contents) == len(set(contents))


def test_what_changes_while_it_is_read_is_lost(files: WorkspaceFiles) -> None:
    """What was read may be what the tool has written."""
    files.first_look.read_index()
    files.first_look.survey()
    files.end_step()
    Path(files.root, "d/a").write_text("2")
    files.first_look.read_rest()
    changes = files.end_step()
    assert changes.lost == ["d/a"]
    assert not changes.files


# ---- failures, kills, company --------------------------------------------------------------------


def test_a_data_folder_that_cannot_be_written_ends_undo_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    desk = Desk(tmp_path / "ws", tmp_path / "data")
    assert desk.run(sh("echo 1 > a"), sh("echo 2 > a")).stop_reason == "stop"
    [notice] = desk.notices()
    assert "does not cover file changes in this session" in notice
    assert desk.undo().problem
    assert desk.text("a") == "2\n"


def test_the_folder_is_private_and_a_database_that_is_none_is_set_aside(desk: Desk) -> None:
    (desk.data / "snapshots").mkdir(parents=True, mode=0o755)
    desk.run(sh("echo 1 > a"))
    assert stat.S_IMODE((desk.data / "snapshots").stat().st_mode) == 0o700
    [database] = desk.data.glob("snapshots/*.db")
    desk.snapshots.close()
    database.write_bytes(b"this is no database " * 1000)
    desk.again()
    desk.run(sh("echo 2 > a"))
    [notice] = desk.notices()
    assert notice.startswith("The file of undo was damaged; a new one was begun.")
    assert done(desk.undo()) == ["a"]
    assert desk.text("a") == "1\n"


def test_an_abort_ends_the_first_look_and_nothing_counts_as_made(desk: Desk) -> None:
    """git waits for a FIFO; what was there before is not taken for the run's."""
    desk.put({"a": "1"})
    git(desk.folder, "init", "-q")
    (desk.folder / ".git/info/exclude").unlink()
    os.mkfifo(desk.folder / ".git/info/exclude")
    abort = Abort()
    abort.set()
    desk.snapshots(events.RunStart(), abort)
    desk.snapshots(events.ToolStart("1", "bash", {}, ""), abort)
    desk.snapshots(
        events.StepEnd({}, [], "aborted", Usage()),
        abort,
    )
    assert "aborted" in desk.undo().problem
    assert desk.snapshots.off == ""
    (desk.folder / ".git/info/exclude").unlink()
    desk.again()
    desk.run(sh("echo 2 > a"))
    assert done(desk.undo()) == ["a"]


CHILD = """
import os, sys
from pathlib import Path
from coder.sessions.snapshots import Snapshots
from coder.events import RunStart, StepEnd, ToolStart
from coder.types import Usage
snapshots = Snapshots(Path(sys.argv[1]), Path(sys.argv[2]))
for number in range(10_000):
    snapshots(RunStart())
    snapshots(ToolStart("1", "bash", {}, ""))
    Path(sys.argv[1], f"by-{number % 7}").write_text(str(number) * 5000)
    snapshots(StepEnd({}, [], "stop", Usage()))
    assert not snapshots.off, snapshots.off
    print(number, flush=True)
"""


def test_processes_that_are_killed_or_work_next_to_us_do_no_harm(desk: Desk) -> None:
    desk.put({f"{number}": str(number) * 2000 for number in range(300)})
    argv = [
        sys.executable,
        "-c",
        CHILD,
        str(desk.folder),
        str(desk.data),
    ]
    for number in range(2):
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
            assert process.stdout
            assert process.stdout.readline() == b"0\n"
            desk.run(("write", {"path": f"a{number}", "content": "x"}))
            process.kill()
        desk.run(sh(f"echo {number} > b; rm 1{number}"))
        assert done(desk.undo()) == [f"1{number}", "b"]
        other = desk.undo()  # what the other process wrote meanwhile may be a conflict
        assert other.problem or f"a{number}" in other.paths
        assert desk.notices() == []


def test_what_is_not_needed_any_more_is_removed(desk: Desk) -> None:
    """Contents that no file has, a month after their last use; all of a folder left for a month."""
    desk.put(
        {
            "a": os.urandom(500_000),
            "b": os.urandom(500_000),
        }
    )
    desk.again("mine")
    desk.run(sh("rm a"))
    assert desk.stored() > 1_000_000
    [file] = desk.data.glob("snapshots/*.db")
    other = file.with_name("other.db")
    with database(desk) as db:
        db.execute("UPDATE pack SET used = used - 86400 * 31")
    other.touch()
    for path in (other, file):
        os.utime(path, (1, 1))
    desk.again("mine")
    desk.run(sh("echo 2 > b"))
    assert 500_000 < desk.stored() < 900_000
    assert not other.exists()
    assert done(desk.undo()) == ["b"]
    assert desk.undo().lost == ["a"]


def test_what_is_used_stays_if_a_link_leads_to_it_and_one_that_leads_nowhere_is_passed_over(
    desk: Desk,
) -> None:
    """A file of the same folder may also be gone before it is looked at."""
    other = desk.data / "snapshots" / "other.db"
    nowhere = desk.data / "snapshots" / "nowhere.db"
    other.parent.mkdir(parents=True)
    (desk.data / "moved.db").touch()
    other.symlink_to(desk.data / "moved.db")
    nowhere.symlink_to(desk.data / "gone.db")
    os.utime(other, (1, 1), follow_symlinks=False)
    desk.run(sh("echo 1 > a"))
    assert desk.notices() == []
    assert other.exists()
    assert done(desk.undo()) == ["a"]


def test_a_database_that_cannot_be_written_stops_no_undo(desk: Desk) -> None:
    desk.again("mine")
    desk.run(sh("echo 1 > a"))
    with database(desk) as db:
        db.execute("CREATE TRIGGER full BEFORE DELETE ON run BEGIN SELECT RAISE(FAIL, ''); END")
    assert done(desk.undo()) == ["a"]
    assert desk.tree() == {}


def test_a_first_look_that_fails_holds_no_step_up(desk: Desk) -> None:
    """No room for what is not in git: what git has is not checked then."""
    track(desk, {"a": "1"})
    settle()
    desk.run(sh("true"))
    desk.snapshots.close()
    with database(desk) as db:
        db.execute("CREATE TRIGGER full BEFORE INSERT ON pack BEGIN SELECT RAISE(FAIL, ''); END")
    desk.put({"new": "mine"})
    desk.again()
    assert desk.run(sh("echo 2 > a")).stop_reason == "stop"
    [notice] = desk.notices()
    assert "does not cover file changes in this session" in notice
    assert desk.undo().problem


def test_a_look_that_fails_is_reported_once_and_the_run_goes_on(desk: Desk) -> None:
    """No room for what has changed."""
    desk.put({"a": "old"})
    desk.run(sh("true"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_the_disk(event: Event) -> None:
        if isinstance(event, events.ToolEnd):
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
        elif isinstance(event, events.StepEnd):
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    try:
        change = sh("echo new > a; head -c 1000000 /dev/urandom > b")
        assert desk.run(change, sh("echo newer > a"), each=fill_the_disk).text == "done"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    [notice] = desk.notices()
    assert notice.startswith("/undo does not cover file changes in this session. The file of undo")
    assert desk.undo().problem
    assert desk.text("a") == "newer\n"
    desk.again()
    desk.run(sh("echo newest > a"))
    assert not desk.undo().problem
    assert desk.text("a") == "newer\n"
