"""Snapshots: what a run changed is taken back exactly, and nothing else is touched: no change of the user's, no git of the user's."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coder.abort import Abort
from coder.features.git import SnapshotError
from coder.features.restoring import Way, Writer
from coder.features.scripted import Reply
from coder.features.shadow import MAX_FILE
from coder.features.snapshots import Snapshots, Undone, key_of, place
from coder.tools import Toolset
from coder.tools.bash import bash
from coder.tools.edit import edit
from coder.tools.files import read, write
from coder.types import Aborted, Event, Message, MessageEnd, PermissionAsked, RunResult, RunStart, StepEnd, StepStart, ToolError, ToolStart
from tests.harness import ask, serve
from tests.terminal import promptly, until
from tests.test_files import FLIP

GIT = ("git", "-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "init.defaultBranch=main")
Call = tuple[str, dict[str, Any]]
Tree = dict[str, tuple[str, int, str]]


# ---- what the tests share --------------------------------------------------------------------------------


def sh(command: str) -> Call:
    return "bash", {"command": command}


class Desk:
    """A workspace with an agent in it."""

    def __init__(self, folder: Path, data: Path, **options: Any) -> None:
        self.folder, self.data = folder, data
        folder.mkdir(parents=True, exist_ok=True)
        self.snapshots = Snapshots(folder, data, **options)
        self.messages: list[Message] = []

    def put(self, files: dict[str, str | bytes]) -> None:
        for name, content in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())

    def run(self, *steps: Call | list[Call], prompt: str = "go", each: Callable[[Event], None] | None = None, abort: Abort | None = None,
            tell: bool = True) -> RunResult:
        """One run with these calls, one step each (a list is one step); its events go to the snapshots, then to `each`."""
        token = abort or Abort()

        def follow(event: Event) -> None:
            if isinstance(event, PermissionAsked):
                event.reply("once")
            if tell:
                self.snapshots(event, token)
            if each:
                each(event)

        replies = [Reply(calls=step if isinstance(step, list) else [step]) for step in steps]
        with serve(*replies, Reply("done")) as server:
            _, result = ask(server, prompt, Toolset([read, write, edit, bash], cwd=self.folder), self.messages, each=follow, abort=token)
        return result

    def results(self) -> list[str]:
        return [str(message["content"]) for message in self.messages if message["role"] == "tool"]

    def tree(self) -> Tree:
        return tree(self.folder)

    def notices(self) -> list[str]:
        return [notice.text for notice in self.snapshots.taken_notices()]

    @property
    def shadow(self) -> Path:
        return self.shadow_of(self)

    def shadow_of(self, desk: Desk) -> Path:
        return self.data / "snapshots" / hashlib.sha256(os.fsencode(desk.folder.resolve())).hexdigest()[:32]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path / "ws", tmp_path / "data")


def tree(folder: Path, but: str = ".git") -> Tree:
    """All that is in a folder: kind, mode, content. Nothing is opened but regular files."""
    found: Tree = {}
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != but]
        for name in [*folders, *files]:
            path = os.path.join(parent, name)
            info = os.lstat(path)
            mode = stat.S_IMODE(info.st_mode)
            content = os.readlink(path) if stat.S_ISLNK(info.st_mode) else ""
            if stat.S_ISREG(info.st_mode):
                content = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            found[os.path.relpath(path, folder)] = stat.filemode(info.st_mode)[0], mode, content
    return found


def git(folder: Path, *argv: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | {"HOME": str(folder)}
    return subprocess.run([*GIT, *argv], cwd=folder, check=True, capture_output=True, text=True, env=environment).stdout


def done(outcome: Undone) -> list[str]:
    assert (outcome.problem, list(outcome.conflicts)) == ("", [])
    return list(outcome.paths)


@contextlib.contextmanager
def elsewhere(**variables: str) -> Iterator[None]:
    """Other values in the environment."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# ---- undo and redo ---------------------------------------------------------------------------------------

EVERYTHING: list[Call | list[Call]] = [
    ("read", {"path": "a.py"}),
    ("edit", {"path": "a.py", "old_string": "one", "new_string": "two"}),
    [("write", {"path": "new/deep/b.txt", "content": "b"}), ("write", {"path": "c.txt", "content": "c"})],
    sh("sed -i s/old/new/ sed.txt && rm gone.txt && mv moved.txt new/elsewhere.txt && chmod +x plain.sh && chmod -x run.sh"),
    sh("ln -s a.py link && rm was_link && echo file > was_link && rm to_link && ln -s sed.txt to_link && ln -sfn nowhere other_link"),
    sh("mkdir -p empty/inner && rmdir hollow && touch full/x && mv folder renamed && printf '\\0\\1' > bin.dat"),
    sh("rm -r becomes_file && echo f > becomes_file && rm becomes_folder && mkdir becomes_folder && echo g > becomes_folder/g"),
]


def laid_out(desk: Desk) -> None:
    desk.put({"a.py": "one\n", "sed.txt": "old\r\nold\r\n", "gone.txt": "precious", "moved.txt": "m", "plain.sh": "#!/bin/sh\n",
              "run.sh": "x", "to_link": "t", "folder/1": "1", "folder/sub/2": "2", "bin.dat": b"\0\xff\xfe", "becomes_file/x/y": "y",
              "becomes_folder": "z", "mine.txt": "mine", "latin.txt": b"caf\xe9\n"})
    os.symlink("a.py", desk.folder / "was_link")
    os.symlink("a.py", desk.folder / "other_link")
    (desk.folder / "run.sh").chmod(0o755)
    (desk.folder / "sed.txt").chmod(0o600)
    for name in ("hollow", "full"):
        (desk.folder / name).mkdir()


def test_undo_gives_back_the_exact_tree_and_keeps_what_the_user_did_to_other_files(desk: Desk) -> None:
    """A17; the second line of what issue 5 calls done."""
    laid_out(desk)
    before = desk.tree()
    assert desk.run(*EVERYTHING).stop_reason == "stop"
    assert not [result for result in desk.results() if "rror" in result]
    after = desk.tree()
    desk.put({"mine.txt": "changed", "my_new.txt": "new"})
    own = {name: desk.tree()[name] for name in ("mine.txt", "my_new.txt")}
    paths = done(desk.snapshots.undo())
    assert desk.tree() == before | own
    assert "a.py" in paths and "becomes_folder/g" in paths and not {"mine.txt", "my_new.txt"} & set(paths)
    done(desk.snapshots.redo())
    assert desk.tree() == after | own
    done(desk.snapshots.undo())
    assert desk.tree() == before | own and desk.notices() == []


def test_undo_goes_back_run_by_run_and_a_new_run_forgets_what_could_be_done_again(desk: Desk) -> None:
    trees = [desk.tree()]
    for number in range(3):
        desk.run(("write", {"path": "a", "content": str(number)}), sh(f"echo {number} > only{number}"))
        trees.append(desk.tree())
    for expected in trees[2::-1]:
        done(desk.snapshots.undo())
        assert desk.tree() == expected
    assert desk.snapshots.undo().problem == "There is nothing to undo."
    for expected in trees[1:3]:
        done(desk.snapshots.redo())
        assert desk.tree() == expected
    desk.run(sh("echo other > b"))
    assert desk.snapshots.redo().problem == "There is nothing to redo."
    done(desk.snapshots.undo())
    assert desk.tree() == trees[2]


def test_where_the_user_changed_the_same_file_nothing_is_done(desk: Desk) -> None:
    desk.put({"a": "1", "b": "1", "c": "1"})
    desk.run(sh("echo 2 > a; echo 2 > b; rm c; echo 2 > d"))
    desk.put({"a": "user", "c": "user"})
    before = desk.tree()
    outcome = desk.snapshots.undo()
    assert (list(outcome.conflicts), list(outcome.paths)) == (["a", "c"], []) and "changed since" in outcome.problem
    assert desk.tree() == before
    desk.put({"a": "2\n"})
    (desk.folder / "c").unlink()
    assert done(desk.snapshots.undo()) == ["a", "b", "c", "d"], "as the agent left them, they can be undone"
    desk.put({"b": "user"})
    assert desk.snapshots.redo().conflicts == ["b"] and (desk.folder / "a").read_text() == "1"


def test_a_mode_that_the_user_changed_is_a_conflict_too(desk: Desk) -> None:
    desk.put({"a": "1"})
    desk.run(sh("echo 2 > a"))
    (desk.folder / "a").chmod(0o755)
    assert desk.snapshots.undo().conflicts == ["a"]


def during(name: str, write: Callable[[], None]) -> Callable[[Event], None]:
    """The user does something while a tool of this name runs."""
    def each(event: Event) -> None:
        if isinstance(event, ToolStart) and event.name == name:
            write()
    return each


def test_what_the_user_writes_while_a_tool_runs_that_names_its_files_is_left_alone(desk: Desk) -> None:
    desk.put({"a": "1\n", "mine": "1\n"})
    desk.run(("edit", {"path": "a", "old_string": "1", "new_string": "2"}), ("write", {"path": "b", "content": "new\n"}),
             each=during("edit", lambda: desk.put({"mine": "2\n", "d/also mine": "x"})))
    assert desk.snapshots.diff().count("diff --git") == 2
    warned: list[list[str]] = []
    outcome = desk.snapshots.undo(lambda paths: warned.append(list(paths)))
    assert (done(outcome), list(outcome.others), warned) == (["a", "b"], ["d/also mine", "mine"], [])
    assert (desk.folder / "mine").read_text() == "2\n" and (desk.folder / "d/also mine").exists() and not (desk.folder / "b").exists()
    assert done(desk.snapshots.redo()) == ["a", "b"]


def test_what_changed_while_a_command_ran_is_told_before_it_is_taken_back(desk: Desk) -> None:
    desk.put({"a": "1\n", "mine": "1\n"})
    change = ("edit", {"path": "a", "old_string": "1", "new_string": "2"})
    desk.run([change, sh("echo 2 > b")], each=during("bash", lambda: desk.put({"mine": "2\n"})))
    told: list[tuple[list[str], bool]] = []
    outcome = desk.snapshots.undo(lambda paths: told.append((list(paths), (desk.folder / "b").exists())))
    assert (done(outcome), outcome.others, told) == (["a", "b", "mine"], [], [(["b", "mine"], True)])
    assert done(desk.snapshots.redo()) == ["a", "b", "mine"] and (desk.folder / "mine").read_text() == "2\n"


def test_a_tool_that_failed_may_have_changed_anything(desk: Desk) -> None:
    desk.put({"a": "1\n"})
    desk.run(("edit", {"path": "a", "old_string": "not there", "new_string": "2"}), each=during("edit", lambda: desk.put({"mine": "2\n"})))
    assert done(desk.snapshots.undo()) == ["mine"]


def test_who_changed_what_is_kept_with_the_session_and_what_an_older_version_kept_is_taken_for_unsure(desk: Desk) -> None:
    desk.put({"a": "1\n"})
    desk.run(("edit", {"path": "a", "old_string": "1", "new_string": "2"}), each=during("edit", lambda: desk.put({"mine": "2\n"})))
    records = json.loads(json.dumps(desk.snapshots.records()))
    later = Snapshots(desk.folder, desk.data)
    later.restore(records)
    assert list(later.undo().others) == ["mine"]
    later.redo()
    for name in ("named", "open"):
        del records[0]["steps"][0][name]
    later.restore(records)
    assert later.undo().paths == ["a", "mine"]


def test_what_is_already_as_it_was_is_no_conflict(desk: Desk) -> None:
    """The agent made a file and the user removed it; or the user put back what it was."""
    desk.put({"a": "1"})
    desk.run(sh("echo 2 > a; echo 2 > made; echo 3 > other"))
    (desk.folder / "made").unlink()
    desk.put({"a": "1"})
    assert done(desk.snapshots.undo()) == ["other"] and list(desk.tree()) == ["a"]


def test_a_file_that_the_user_changed_between_two_steps_of_the_agent_is_a_conflict(desk: Desk) -> None:
    """Other files that the user changes during a run are the user's."""
    desk.put({"a": "1", "mine": "1"})

    def user(event: Event) -> None:
        if isinstance(event, StepStart) and event.step == 2:
            desk.put({"a": "user", "mine": "user"})

    desk.run(sh("echo 2 > a"), sh("echo 3 > a; echo 3 > b"), each=user)
    assert desk.snapshots.undo().conflicts == ["a"]
    assert desk.snapshots.runs[-1].steps[1].step == 2 and "mine" not in desk.snapshots.diff()
    desk.put({"a": "1"})
    assert done(desk.snapshots.undo()) == ["b"] and (desk.folder / "mine").read_text() == "user"


def test_nothing_is_written_over_what_is_not_kept(desk: Desk) -> None:
    """An ignored file, a folder with something in it, a link: where they are in the way, it is a conflict."""
    desk.put({".gitignore": "*.log\n", "x": "1", "d/e": "1", "f/g": "1"})
    desk.run(sh("rm -r x d f"))
    desk.put({"x/user.log": "keep", "d": "a file"})
    outside = desk.folder.parent / "outside"
    outside.mkdir()
    os.symlink(outside, desk.folder / "f")
    assert list(desk.snapshots.undo().conflicts) == ["d/e", "f/g", "x"]
    assert (desk.folder / "x/user.log").read_text() == "keep" and list(outside.iterdir()) == []
    for name in ("d", "f"):
        (desk.folder / name).unlink()
    shutil.rmtree(desk.folder / "x")
    assert done(desk.snapshots.undo()) == ["d/e", "f/g", "x"]


def test_a_link_in_the_place_of_a_folder_is_taken_back_and_nothing_is_written_through_it(desk: Desk) -> None:
    desk.put({"d/a": "1", "d/b": "2"})
    outside = desk.folder.parent / "outside"
    outside.mkdir()
    (outside / "a").write_text("1")
    before = desk.tree()
    desk.run(sh("rm -r d && ln -s ../outside d"), sh("echo more > d/new"))
    after = desk.tree()
    outcome = desk.snapshots.undo()
    assert (outcome.problem, outcome.lost) == ("", [])
    assert desk.tree() == before and sorted(path.name for path in outside.iterdir()) == ["a", "new"]
    done(desk.snapshots.redo())
    assert desk.tree() == after


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RENAME_EXCHANGE is Linux's")
def test_nothing_is_written_through_a_folder_that_becomes_a_link_meanwhile(tmp_path: Path) -> None:
    workspace, outside, told = tmp_path / "ws", tmp_path / "outside", set[bool]()
    outside.mkdir()
    (outside / "old").write_text("kept")
    (workspace / "d").mkdir(parents=True)
    (workspace / "link").symlink_to("../outside")
    ways = [{"d/old": (("100644", "id"), None)}, {"d/new": (None, ("120000", "id"))}]
    with subprocess.Popen([sys.executable, "-c", FLIP, "d", "link"], cwd=workspace, stdout=subprocess.PIPE, text=True) as flip:
        try:
            assert flip.stdout and flip.stdout.readline() == "begun\n"
            for way in ways * 10_000:  # some of thousands come between a look at the path and the deed
                try:
                    Writer(workspace, Way(dict(way)), {}).write(lambda ids: [b"old"] * len(ids))
                    told.add(True)
                except (OSError, ToolError):
                    told.add(False)
            assert flip.poll() is None
        finally:
            flip.kill()
    assert [(each.name, each.read_text()) for each in outside.iterdir()] == [("old", "kept")]
    assert told == {True, False}, "some came at the right moment, some did not"


@pytest.mark.parametrize("target", ["nowhere", "d", "e"])
def test_a_link_in_the_place_of_an_empty_folder_that_was_stays(tmp_path: Path, target: str) -> None:
    (tmp_path / "d").symlink_to(target)
    (tmp_path / "e").mkdir()
    Writer(tmp_path, Way({"a": (None, ("100644", "id"))}, make={"d", "z"}), {}).write(lambda ids: [b"back"])
    assert (tmp_path / "z").is_dir() and (tmp_path / "a").read_text() == "back" and os.readlink(tmp_path / "d") == target


def test_an_empty_folder_behind_a_link_of_the_users_is_left_alone(desk: Desk) -> None:
    outside = desk.folder.parent / "outside"
    (outside / "inner").mkdir(parents=True)
    (desk.folder / "mine/inner").mkdir(parents=True)
    desk.run(sh("mkdir -p made/inner; rmdir mine/inner"))
    shutil.rmtree(desk.folder / "made")
    shutil.rmtree(desk.folder / "mine")
    os.symlink(outside, desk.folder / "made")
    os.symlink(outside, desk.folder / "mine")
    assert done(desk.snapshots.undo()) == []
    assert (outside / "inner").is_dir() and (desk.folder / "mine").is_symlink()
    (outside / "inner").rmdir()
    done(desk.snapshots.redo())
    assert list(outside.iterdir()) == []


def test_a_folder_that_is_filled_and_emptied_in_several_steps_is_as_it_was(desk: Desk) -> None:
    (desk.folder / "hollow").mkdir(mode=0o700)
    before = desk.tree()
    desk.run(sh("mkdir made; touch hollow/x"), sh("touch made/x; rm hollow/x"), sh("mkdir other; touch hollow/y"), sh("rmdir other"))
    after = desk.tree()
    done(desk.snapshots.undo())
    assert desk.tree() == before
    done(desk.snapshots.redo())
    assert desk.tree() == after


def test_names_with_new_lines_dashes_and_bytes_that_are_no_text(desk: Desk) -> None:
    names = ["-rf", "--help", "new\nline", "ünï/c ö dé", "tab\t\"quote\"", "git~1", "back\\slash", ":(top)x", "*", os.fsdecode(b"byte\xff")]
    desk.put({name: "1" for name in names})
    before = desk.tree()
    desk.run(sh("""find . -type f -exec sh -c 'echo 2 >> "$1"' _ {} \\; ; touch -- ./-n; mkdir './-p'"""))
    assert len(done(desk.snapshots.undo())) == len(names) + 1
    assert desk.tree() == before and desk.notices() == []


def test_an_undo_that_could_not_be_ended_is_ended_by_the_next(desk: Desk) -> None:
    desk.put({"a/x": "1", "b/x": "1"})
    before = desk.tree()
    desk.run(sh("echo 2 > a/x; echo 2 > b/x"))
    subprocess.run(["rm", "-r", "b"], cwd=desk.folder, check=True)
    desk.put({"a/x": "1", "b/x": "2\n"})  # as a kill in the middle would leave it
    assert done(desk.snapshots.undo()) == ["b/x"] and desk.tree() == before


NAMES = st.sampled_from(["a", "b", "d/a", "d/b", "d/e/a", "d", "e/f", "e"])
WAYS = st.sampled_from(["write", "append", "rm", "mv", "link", "exec", "mkdir"])
CHANGES = st.lists(st.tuples(WAYS, NAMES, NAMES), min_size=1, max_size=6)


def script(changes: list[tuple[str, str, str]]) -> str:
    """A command that changes the workspace somehow; what is impossible is passed over."""
    forms = {"write": "mkdir -p $(dirname {0}); echo {1} > {0}", "append": "[ -f {0} ] && echo more >> {0}", "rm": "rm -rf {0}",
             "mv": "mv -T {0} {1}", "link": "ln -sfn {1} {0}", "exec": "[ -f {0} ] && chmod +x {0}", "mkdir": "mkdir -p {0}"}
    return "; ".join(f"{{ {forms[what].format(one, other)}; }} 2>/dev/null" for what, one, other in changes) + "; true"


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=CHANGES, runs=st.lists(st.lists(CHANGES, min_size=1, max_size=2), min_size=1, max_size=2))
def test_whatever_a_run_does_undo_and_redo_lead_there_and_back(tmp_path: Path, first: Any, runs: Any) -> None:
    """A property over random changes. Folders that lead nowhere else but to folders are compared as well."""
    folder = tmp_path / os.urandom(6).hex()
    desk = Desk(folder / "ws", folder / "data")
    subprocess.run(["bash", "-c", script(first)], cwd=desk.folder, check=True)
    trees = [desk.tree()]
    for run in runs:
        desk.run(*[sh(script(changes)) for changes in run])
        trees.append(desk.tree())
    for expected in trees[-2::-1]:
        done(desk.snapshots.undo())
        assert desk.tree() == expected
    for expected in trees[1:]:
        done(desk.snapshots.redo())
        assert desk.tree() == expected


# ---- what is recorded, and when --------------------------------------------------------------------------


def test_each_step_with_tools_has_its_two_trees_and_one_without_has_none(desk: Desk) -> None:
    """A17. A step without a tool changes nothing."""
    desk.put({"a": "1"})
    desk.run(sh("echo 2 > a"), ("read", {"path": "a"}), sh("echo 3 > a"))
    (run,) = desk.snapshots.runs
    one, two, three = run.steps
    assert [one.step, two.step, three.step] == [1, 2, 3]
    assert one.before == run.before != one.after == two.before == two.after == three.before != three.after == run.after
    desk.run(prompt="only talk")
    assert desk.snapshots.runs[-1].steps == [] and desk.snapshots.runs[-1].before == ""
    assert done(desk.snapshots.undo()) == [] and (desk.folder / "a").read_text() == "3\n"
    assert done(desk.snapshots.undo()) == ["a"]


def test_a_run_knows_the_message_it_began_with_also_after_it_was_stored(desk: Desk) -> None:
    desk.run(sh("echo 1 > a"), prompt="same words")
    desk.run(sh("echo 2 > a"), prompt="same words")
    loaded = json.loads(json.dumps(desk.messages))
    places = [place(run, loaded) for run in desk.snapshots.runs]
    assert places == [0, 4] and [loaded[at]["content"] for at in places if at is not None] == ["same words", "same words"]
    assert place(desk.snapshots.runs[0], loaded[1:]) is None and key_of(loaded[0]) != key_of(loaded[4])
    for event in (RunStart(), MessageEnd(loaded[0]), StepStart(1), MessageEnd(loaded[4])):
        desk.snapshots(event)
    assert desk.snapshots.runs[-1].message == key_of(loaded[0]), "the first of several"
    for event in (RunStart(), StepStart(1), StepStart(2), MessageEnd(loaded[4])):
        desk.snapshots(event)
    assert desk.snapshots.runs[-1].message == "", "a message that came during the run did not begin it"


def test_a_session_that_goes_on_can_undo_what_it_did_before(desk: Desk) -> None:
    desk.put({"a": "1"})
    before = desk.tree()
    desk.run(sh("echo 2 > a; mkdir e"), prompt="x")
    records = json.loads(json.dumps(desk.snapshots.records()))
    later = Snapshots(desk.folder, desk.data)
    later.restore(records)
    assert later.records() == records and later.runs[0].message == desk.snapshots.runs[0].message
    assert done(later.undo()) == ["a"] and desk.tree() == before


@pytest.mark.parametrize("wrong", [{}, {"message": "m", "steps": [{"step": 1}]}, {"message": "m", "steps": 3},
                                   {"message": "m", "steps": [3]},
                                   {"message": "m", "steps": [{"step": 1, "before": "--help", "after": ""}]},
                                   {"message": "m", "steps": [{"step": 1, "before": "", "after": "", "made": ["../x"]}]}])
def test_a_record_that_is_none_is_refused(desk: Desk, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="it "):
        desk.snapshots.restore([wrong])
    assert desk.snapshots.runs == []


def test_trees_that_are_no_longer_there_are_a_problem_and_nothing_is_written(desk: Desk) -> None:
    desk.put({"a": "1"})
    desk.run(sh("echo 2 > a"))
    shutil.rmtree(desk.data)
    before = desk.tree()
    assert "no longer kept" in desk.snapshots.undo().problem and desk.tree() == before
    with pytest.raises(SnapshotError, match="no longer kept"):
        desk.snapshots.diff()


def test_what_can_not_be_undone_is_said_once(desk: Desk) -> None:
    for number in range(2):
        desk.run(sh(f"echo {number} > a"))
    assert "outside of the workspace" in desk.snapshots.undo().note
    assert desk.snapshots.undo().note == ""


def test_the_diff_of_a_run_and_of_the_session(desk: Desk) -> None:
    desk.put({"a.txt": "one\ntwo\n", "bin": b"\0\1", "ünï": "x\n", "m": "long enough to be known again\n" * 3})
    assert desk.snapshots.diff() == ""
    desk.run(sh("sed -i s/two/2/ a.txt; echo > new; mv m moved"))
    desk.put({"user.txt": "user\n"})
    desk.run(sh("sed -i s/one/1/ a.txt; printf '\\0\\2' > bin; rm new; echo y > ünï"))
    first, second = (desk.snapshots.diff(run) for run in desk.snapshots.runs)
    assert "--- a/a.txt\n+++ b/a.txt\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n" in first and "rename to moved" in first
    assert "-one\n+1\n 2\n" in second and "Binary files a/bin and b/bin differ" in second and "+++ b/ünï" in second
    whole = desk.snapshots.diff()
    assert "-one\n-two\n+1\n+2\n" in whole and "b/new" not in whole and "user.txt" not in whole


# ---- what is left out ------------------------------------------------------------------------------------


def test_ignored_files_are_neither_kept_nor_touched(desk: Desk) -> None:
    desk.put({".gitignore": "*.log\nbuild/\n", "a": "1", "b.log": "1", "build/x": "1",
              "sub/.gitignore": "!keep.log\n", "sub/keep.log": "1"})
    desk.run(sh("for f in a b.log build/x sub/keep.log; do echo 2 > $f; done; echo 2 > c.log"))
    assert done(desk.snapshots.undo()) == ["a", "sub/keep.log"]
    assert [(desk.folder / name).read_text() for name in ("b.log", "build/x", "c.log", "a")] == ["2\n", "2\n", "2\n", "1"]


def test_a_file_that_was_ignored_until_the_agent_changed_the_rules_is_not_removed(desk: Desk) -> None:
    """It looks new, and is not."""
    desk.put({".gitignore": "secret.env\n/out/\n", "secret.env": "KEY=1", "out/result": "precious", "a": "1"})
    desk.run(sh("echo > .gitignore; echo KEY=2 > secret.env; echo 2 > a; echo 2 > b"))
    outcome = desk.snapshots.undo()
    assert done(outcome) == [".gitignore", "a", "b"] and list(outcome.lost) == ["out/result", "secret.env"]
    assert (desk.folder / "secret.env").read_text() == "KEY=2\n" and (desk.folder / "out/result").read_text() == "precious"


def test_a_file_that_is_too_large_is_left_out_and_named(desk: Desk) -> None:
    desk.put({"big": b"x" * (MAX_FILE + 1), "same": b"y" * (MAX_FILE + 1), "grows": "1", "shrinks": b"z" * (MAX_FILE + 1), "a": "1"})
    desk.run(sh(f"echo >> big; head -c {MAX_FILE + 1} /dev/zero > grows; echo 1 > shrinks; echo 2 > a"))
    after = desk.tree()
    outcome = desk.snapshots.undo()
    assert done(outcome) == ["a"] and list(outcome.lost) == ["big", "grows", "shrinks"]
    assert {**desk.tree(), "a": ()} == {**after, "a": ()} and desk.notices() == []


def test_repositories_in_the_workspace_are_left_out_and_never_changed(desk: Desk) -> None:
    """With commits and without, with files that the agent changes, and when one is made or stops to be one."""
    desk.put({"a": "1", "with/f": "1", "without/f": "1", "ends/f": "1"})
    for name in ("with", "without", "ends"):
        git(desk.folder / name, "init", "-q")
    git(desk.folder / "with", "add", "f")
    git(desk.folder / "with", "commit", "-qm", "x")
    inside = tree(desk.folder / "with/.git", but="")
    desk.run(sh("echo 2 > with/f; echo 2 > without/f; rm -r ends/.git; git init -q begins; git init -q only; echo 2 | tee begins/f a"))
    after = desk.tree()
    outcome = desk.snapshots.undo()
    assert done(outcome) == ["a"] and list(outcome.lost) == ["begins", "ends", "ends/f", "only"]
    assert desk.snapshots.undone[0].steps[0].made == []
    assert {**desk.tree(), "a": ()} == {**after, "a": ()}
    assert tree(desk.folder / "with/.git", but="") == inside and desk.notices() == []


def test_fifos_are_never_opened_and_links_in_circles_are_only_links(desk: Desk) -> None:
    desk.put({"d/a": "1"})
    os.mkfifo(desk.folder / "pipe")
    os.symlink("loop", desk.folder / "loop")
    os.symlink("..", desk.folder / "d/up")
    with promptly(20):
        desk.run(sh("echo 2 > d/a; rm loop; mkfifo other; rm -f d/up; mkfifo d/up"))
        outcome = desk.snapshots.undo()
        assert outcome.conflicts == ["d/up"]
        (desk.folder / "d/up").unlink()
        assert done(desk.snapshots.undo()) == ["d/a", "d/up", "loop"]
    assert os.readlink(desk.folder / "loop") == "loop" and os.readlink(desk.folder / "d/up") == ".."
    assert stat.S_ISFIFO(os.lstat(desk.folder / "pipe").st_mode) and desk.notices() == []


def test_a_fifo_where_git_looks_for_rules_switches_it_off_and_does_not_hang(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "ws", tmp_path / "data", seconds=60)
    (desk.folder / "sub").mkdir()
    os.mkfifo(desk.folder / "sub/.gitignore")
    with promptly(20):
        desk.run(sh("echo 1 > a"), sh("echo 2 > a"))
        assert "sub/.gitignore is no regular file" in desk.snapshots.undo().problem
    assert "sub/.gitignore is no regular file" in desk.snapshots.off and len(desk.notices()) == 1


def test_what_takes_too_long_switches_it_off(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "ws", tmp_path / "data", seconds=0.5)
    os.mkfifo(desk.folder / ".gitignore")
    with promptly(10):
        desk.run(sh("echo 1 > a"))
    assert "takes too long" in desk.snapshots.off and len(desk.notices()) == 1


# ---- the user's git --------------------------------------------------------------------------------------


def test_a_repository_is_the_same_byte_by_byte_after_track_undo_redo_and_diff(desk: Desk) -> None:
    desk.put({"a": "1", ".gitignore": "ignored\n", "ignored": "1", "excluded": "1"})
    git(desk.folder, "init", "-q")
    git(desk.folder, "add", "a")
    git(desk.folder, "commit", "-qm", "x")
    (desk.folder / ".git/info/exclude").write_text("excluded\n")
    before = tree(desk.folder / ".git", but="")
    desk.run(sh("echo 2 > a; echo 2 > ignored; echo 2 > excluded"))
    assert done(desk.snapshots.undo()) == ["a"], "its .gitignore and its info/exclude hold"
    done(desk.snapshots.redo())
    desk.snapshots.diff()
    desk.snapshots.prune(Abort())
    assert tree(desk.folder / ".git", but="") == before


def test_in_a_folder_of_a_repository_the_rules_from_above_hold(tmp_path: Path) -> None:
    top = Desk(tmp_path / "top", tmp_path / "data")
    top.put({".gitignore": "*.tmp\n/packages/one/out\n", "other/x": "1"})
    git(top.folder, "init", "-q")
    desk = Desk(tmp_path / "top/packages/one", tmp_path / "data")
    before = top.tree()
    desk.run(sh("echo 1 > a; echo 1 > b.tmp; mkdir out e; echo 1 > out/c; echo 2 > ../../other/x"))
    assert done(desk.snapshots.undo()) == ["a"]
    others = {path: fact for path, fact in top.tree().items() if path in before and path != "other/x"}
    assert others == {path: fact for path, fact in before.items() if path != "other/x"} and (top.folder / "other/x").read_text() == "2\n"
    assert sorted(desk.tree()) == ["b.tmp", "out", "out/c"]


def test_a_workspace_that_is_ignored_as_a_whole_is_kept_all_the_same(tmp_path: Path) -> None:
    """Who works in such a folder wants to: the same rule as that of grep and glob."""
    git(tmp_path, "init", "-q")
    (tmp_path / ".gitignore").write_text("*\n")
    desk = Desk(tmp_path / "ws", tmp_path / "data")
    desk.run(sh("echo 1 > a"))
    assert done(desk.snapshots.undo()) == ["a"]


def test_what_the_user_ignores_everywhere_is_ignored_here(tmp_path: Path) -> None:
    (tmp_path / "home/.config/git").mkdir(parents=True)
    (tmp_path / "home/.config/git/ignore").write_text("*.one\n")
    with elsewhere(HOME=str(tmp_path / "home"), XDG_CONFIG_HOME=""):
        desk = Desk(tmp_path / "ws", tmp_path / "data")
        desk.run(sh("touch a.one a.two"))
        assert done(desk.snapshots.undo()) == ["a.two"]
        (tmp_path / "home/mine").write_text("*.two\n")
        (tmp_path / "home/.gitconfig").write_text("[core]\n\texcludesFile = ~/mine\n")
        other = Desk(tmp_path / "other", tmp_path / "data")
        other.run(sh("touch a.one a.two"))
        assert done(other.snapshots.undo()) == ["a.one"]


def test_the_data_folder_may_lie_in_the_workspace(tmp_path: Path) -> None:
    desk = Desk(tmp_path, tmp_path / "d [a]*t!a")
    desk.run(sh("echo 1 > a"), sh("echo 2 > a"))
    assert done(desk.snapshots.undo()) == ["a"] and desk.notices() == []
    with elsewhere(GIT_DIR=str(desk.shadow)):
        assert subprocess.check_output(["git", "ls-files"], cwd=tmp_path, text=True) == "a\n"


# ---- hostile workspaces ----------------------------------------------------------------------------------


def test_no_filter_monitor_hook_or_setting_of_a_workspace_is_run_or_obeyed(desk: Desk) -> None:
    witness = desk.folder.parent / "witness"
    evil = f"touch {witness}; cat"
    git(desk.folder, "init", "-q")
    config = "".join(f"[{section}]\n\t{name} = \"{evil}\"\n" for section, name in (
        ('filter "evil"', "clean"), ('filter "evil"', "smudge"), ('filter "evil"', "process"), ("core", "fsmonitor"),
        ('diff "evil"', "textconv"), ('diff "evil"', "command"), ("diff", "external"), ("core", "pager")))
    (desk.folder / ".git/config").write_text(config + f"[core]\n\thooksPath = {desk.folder}/hooks\n\tautocrlf = true\n")
    for hook in ("post-index-change", "pre-auto-gc", "fsmonitor-watchman"):
        desk.put({f"hooks/{hook}": f"#!/bin/sh\n{evil}\n", f".git/hooks/{hook}": f"#!/bin/sh\n{evil}\n"})
        (desk.folder / "hooks" / hook).chmod(0o755)
        (desk.folder / ".git/hooks" / hook).chmod(0o755)
    desk.put({".gitattributes": "* filter=evil diff=evil text eol=lf ident working-tree-encoding=UTF-16\n[attr]text filter=evil\n",
              "crlf": "a\r\nb\r\n$Id: x$\n", "sub/.gitattributes": "* text=auto filter=evil -diff\n", "sub/f": "a\r\n"})
    shutil.copytree(desk.folder / ".git", desk.folder / "nested/.git")
    desk.put({"nested/f": "1"})
    before = desk.tree()
    shutil.copytree(desk.folder / "hooks", desk.shadow / "hooks")
    with elsewhere(GIT_DIR=str(desk.folder / ".git"), GIT_EXTERNAL_DIFF=evil, GIT_CONFIG_COUNT="1", GIT_CONFIG_KEY_0="filter.evil.clean",
                   GIT_CONFIG_VALUE_0=evil, GIT_INDEX_FILE=str(desk.folder / "index"), GIT_EXEC_PATH=str(desk.folder / "hooks")):
        desk.run(sh("printf 'x\\r\\ny\\r\\n' > crlf; rm sub/f; echo 2 > nested/f"))
        assert "-a\r\n" in desk.snapshots.diff()
        done(desk.snapshots.undo())
        desk.snapshots.prune(Abort())
    (desk.folder / "nested/f").write_text("1")
    assert desk.tree() == before and not witness.exists() and desk.notices() == []


def test_a_git_file_that_points_elsewhere_leads_nowhere(desk: Desk) -> None:
    other = desk.folder.parent / "other"
    other.mkdir()
    git(other, "init", "-q")
    before = tree(other, but="")
    desk.put({".git": f"gitdir: {other}/.git\n", "sub/.git": "gitdir: ../nowhere\n", "sub/f": "1", ".GIT/x": "1", "a": "1"})
    os.symlink("a", desk.folder / ".gitmodules")
    desk.run(sh("echo 2 > a; echo 2 > sub/f; echo 2 > .GIT/x"))
    assert done(desk.snapshots.undo()) == ["a", "sub/f"] and desk.notices() == []
    assert tree(other, but="") == before and (desk.folder / ".git").read_text() == f"gitdir: {other}/.git\n"


def test_a_git_that_lies_in_the_workspace_is_not_run(tmp_path: Path) -> None:
    desk_folder, witness = tmp_path / "ws", tmp_path / "witness"
    (desk_folder / "bin").mkdir(parents=True)
    (desk_folder / "bin/git").write_text(f"#!/bin/sh\ntouch {witness}\n")
    (desk_folder / "bin/git").chmod(0o755)
    os.symlink(desk_folder / "bin/git", tmp_path / "git")
    with elsewhere(PATH=f"{desk_folder}/bin:{tmp_path}:.::{os.environ['PATH']}"):
        linked = Desk(desk_folder, tmp_path / "data")
        assert linked.snapshots.track(Abort()) == "" and "not found" in linked.notices()[0]
        (tmp_path / "git").unlink()
        desk = Desk(desk_folder, tmp_path / "data")
        assert len(desk.snapshots.track(Abort())) == 40
    assert not witness.exists()


# ---- bounds, kills, company ------------------------------------------------------------------------------


def test_without_git_it_is_off_with_one_notice_and_undo_says_so(tmp_path: Path) -> None:
    with elsewhere(PATH=str(tmp_path)):
        desk = Desk(tmp_path / "ws", tmp_path / "data")
    assert desk.notices() == ["No snapshots in this session, so no /undo of file changes: git was not found."]
    desk.run(("write", {"path": "a", "content": "1"}))
    outcome = desk.snapshots.undo()
    assert "git was not found" in outcome.problem and (desk.folder / "a").exists() and desk.notices() == []
    with pytest.raises(SnapshotError, match="git was not found"):
        desk.snapshots.diff()
    assert not (tmp_path / "data").exists()


def test_a_data_folder_that_cannot_be_written_switches_it_off_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    desk = Desk(tmp_path / "ws", tmp_path / "data")
    assert desk.run(sh("echo 1 > a"), sh("echo 2 > a")).stop_reason == "stop"
    assert len(desk.notices()) == 1 and "no snapshot" not in desk.snapshots.off and desk.snapshots.undo().problem


def test_a_bare_folder_of_20_000_files_is_kept(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "ws", tmp_path / "data", seconds=120)
    for number in range(20_000):
        folder = desk.folder / str(number // 1000)
        if number % 1000 == 0:
            folder.mkdir()
        os.close(os.open(folder / str(number), os.O_CREAT | os.O_WRONLY, 0o644))
    before = desk.snapshots.track(Abort())
    desk.run(sh("echo changed > 1/1005; rm 1/1006; mv 2 renamed"))
    assert len(done(desk.snapshots.undo())) == 2002
    assert desk.snapshots.track(Abort()) == before != "" and desk.notices() == []


def test_a_tree_of_too_many_files_switches_it_off_also_when_it_grows(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "ws", tmp_path / "data", max_files=20)
    desk.put({str(number): "" for number in range(20)})
    assert desk.snapshots.track(Abort())
    desk.run(sh("touch one_more"), sh("touch another"))
    assert len(desk.notices()) == 1 and "more than 20 files" in desk.snapshots.undo().problem


def test_tools_that_change_nothing_cost_nothing(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "ws", tmp_path / "data", harmless={"read"})
    desk.put({"a": "1"})
    desk.run(("read", {"path": "a"}))
    assert desk.snapshots.runs[0].steps == [] and not desk.data.exists()
    desk.run([("read", {"path": "a"}), sh("echo 2 > a")])
    assert done(desk.snapshots.undo()) == ["a"]


def test_the_folder_is_private_and_old_rights_are_tightened(desk: Desk) -> None:
    desk.snapshots.track(Abort())
    assert stat.S_IMODE(desk.shadow.stat().st_mode) == stat.S_IMODE(desk.shadow.parent.stat().st_mode) == 0o700
    desk.shadow.chmod(0o755)
    Snapshots(desk.folder, desk.data).track(Abort())
    assert stat.S_IMODE(desk.shadow.stat().st_mode) == 0o700


def test_a_run_that_was_aborted_can_be_undone(desk: Desk) -> None:
    desk.put({"a": "1"})
    abort = Abort()

    def stop(event: Event) -> None:
        if isinstance(event, ToolStart):
            threading.Thread(target=lambda: (until((desk.folder / "b").exists), abort.set()), daemon=True).start()

    assert desk.run(sh("echo 2 > a; echo 2 > b; sleep 30"), abort=abort, each=stop).stop_reason == "aborted"
    assert done(desk.snapshots.undo()) == ["a", "b"]


def test_after_an_abort_the_state_is_had_even_where_the_first_try_has_to_be_given_up(desk: Desk) -> None:
    """Another process has the repository when the step ends, and gives it back soon."""
    desk.put({"a": "1"})
    desk.snapshots.track(Abort())
    abort = Abort()

    def stop(event: Event) -> None:
        if isinstance(event, StepEnd):
            abort.set()
            held = contextlib.ExitStack()
            held.enter_context(holding(desk.shadow / "lock"))
            threading.Timer(0.1, held.close).start()
        if not isinstance(event, PermissionAsked):
            desk.snapshots(event, abort)

    desk.run(sh("echo 2 > a"), abort=abort, each=stop, tell=False)
    assert done(desk.snapshots.undo()) == ["a"]


def test_a_run_that_was_left_is_ended_by_finish(desk: Desk) -> None:
    desk.put({"a": "1"})

    def leave(event: Event) -> None:
        if isinstance(event, StepEnd):
            raise KeyboardInterrupt

    class Deaf(Snapshots):
        """One that is not told of the end of a step."""

        def __call__(self, event: Event, abort: Abort | None = None) -> None:
            if not isinstance(event, StepEnd):
                super().__call__(event, abort)

    desk.snapshots = Deaf(desk.folder, desk.data)
    with pytest.raises(KeyboardInterrupt):
        desk.run(sh("echo 2 > a"), each=leave)
    assert "during a run" in desk.snapshots.undo().problem
    desk.snapshots.finish()
    desk.put({"mine": "1"})
    assert done(desk.snapshots.undo()) == ["a"]


def test_an_abort_ends_a_git_that_is_at_work(desk: Desk) -> None:
    with slow_git(desk, "exec sleep 60") as begun, promptly():
        abort = Abort()
        threading.Thread(target=lambda: (until(begun.exists), abort.set()), daemon=True).start()
        with pytest.raises(Aborted):
            desk.snapshots.track(abort)
    assert not Path("/proc", begun.read_text().strip()).exists()


@contextlib.contextmanager
def slow_git(desk: Desk, then: str) -> Iterator[Path]:
    """For new snapshots: a git that writes its process id to the file that is given, and then does that."""
    folder = desk.folder.parent / "slow"
    folder.mkdir()
    (folder / "git").write_text(f"#!/bin/sh\necho $$ > {folder}/new && mv {folder}/new {folder}/begun\n{then}\n")
    (folder / "git").chmod(0o755)
    with elsewhere(PATH=f"{folder}:{os.environ['PATH']}"):
        desk.snapshots = Snapshots(desk.folder, desk.data)
        yield folder / "begun"


def test_a_state_that_is_not_had_in_the_hurry_after_an_abort_does_not_switch_it_off(desk: Desk) -> None:
    desk.put({"a": "1"})
    desk.snapshots.track(Abort())
    abort = Abort()

    def stop(event: Event) -> None:
        if isinstance(event, StepEnd):
            abort.set()
            with holding(desk.shadow / "lock"), promptly():
                desk.snapshots(event, abort)
        elif not isinstance(event, PermissionAsked):
            desk.snapshots(event, abort)

    desk.run(sh("echo 2 > a"), abort=abort, each=stop, tell=False)
    assert desk.snapshots.off == "" and "no snapshot could be taken" in desk.snapshots.undo().problem


def test_an_abort_reaches_a_snapshot_that_waits(desk: Desk) -> None:
    """Another process holds the repository; so it is a wait that only ends with the abort."""
    desk.snapshots.track(Abort())
    with holding(desk.shadow / "lock"), promptly():
        abort = Abort()
        abort.set()
        with pytest.raises(Aborted):
            desk.snapshots.track(abort)
    assert desk.snapshots.off == "" and desk.snapshots.track(Abort())


def test_a_run_whose_first_state_is_not_known_is_not_undone(desk: Desk) -> None:
    desk.put({"a": "1"})
    desk.snapshots.track(Abort())
    abort = Abort()

    def stop(event: Event) -> None:
        """Ctrl+C while the first snapshot waits for another process."""
        if isinstance(event, ToolStart):
            with holding(desk.shadow / "lock"):
                abort.set()
                desk.snapshots(event, abort)

    desk.snapshots(RunStart())
    desk.run(sh("echo 2 > a"), abort=abort, each=stop, tell=False)
    desk.snapshots.finish(abort)
    assert "no snapshot could be taken" in desk.snapshots.undo().problem and desk.snapshots.off == ""


@contextlib.contextmanager
def holding(lock: Path) -> Iterator[None]:
    with open(lock, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


CHILD = """
import sys
from pathlib import Path
from coder.abort import Abort
from coder.features.snapshots import Snapshots
snapshots = Snapshots(Path(sys.argv[1]), Path(sys.argv[2]), seconds=60)
print("ready", flush=True)
for number in range(int(sys.argv[3])):
    Path(sys.argv[1], f"by-{sys.argv[4]}-{number % 7}").write_text(str(number) * 5000)
    assert snapshots.track(Abort()), snapshots.off
"""


def child(desk: Desk, rounds: int, name: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", CHILD, str(desk.folder), str(desk.data), str(rounds), name], stdout=subprocess.PIPE)


def test_a_kill_during_a_snapshot_leaves_a_repository_that_can_be_used(desk: Desk) -> None:
    desk.put({f"{number}": str(number) * 2000 for number in range(300)})
    for number in range(6):
        with child(desk, 10_000, "x") as process:
            assert process.stdout and process.stdout.readline() == b"ready\n"
            until(lambda: list(desk.data.glob("snapshots/*/*.lock")), "git at work")
            process.kill()
        snapshots = Snapshots(desk.folder, desk.data, seconds=60)
        tracked = snapshots.track(Abort())
        fresh = Snapshots(desk.folder, desk.folder.parent / f"fresh{number}", seconds=60)
        assert fresh.track(Abort()) == tracked != "" and snapshots.taken_notices() == [], "it keeps the workspace as it is"


def test_locks_that_a_killed_git_left_are_removed(desk: Desk) -> None:
    tracked = desk.snapshots.track(Abort())
    for name in ("index.lock", "index.diff.lock"):
        (desk.shadow / name).write_bytes(b"half")
    desk.run(sh("echo 1 > a"))
    assert "+1" in desk.snapshots.diff() and done(desk.snapshots.undo()) == ["a"]
    assert desk.snapshots.track(Abort()) == tracked and not list(desk.shadow.glob("*.lock"))


def test_a_git_that_outlives_us_keeps_the_repository_to_itself(desk: Desk) -> None:
    """A kill hits us and not git: its lock must not be taken for one that was left."""
    go = desk.folder.parent / "go"
    with slow_git(desk, f"while ! [ -e {go} ]; do sleep 0.01; done") as begun, child(desk, 1, "x") as process:
        until(begun.exists)
        process.kill()
    impatient = Snapshots(desk.folder, desk.data, seconds=0.3)
    assert impatient.track(Abort()) == "" and "another process" in impatient.off
    go.touch()
    assert Snapshots(desk.folder, desk.data).track(Abort())


@pytest.mark.parametrize("damage", ["index", "objects", "HEAD", "config"])
def test_a_repository_that_was_damaged_is_mended(desk: Desk, damage: str) -> None:
    desk.put({"a": "1", "b/c": "2"})
    tracked = desk.snapshots.track(Abort())
    path = desk.shadow / damage
    shutil.rmtree(path) if path.is_dir() else path.write_bytes(b"DIRC\0\0\0\2\0\0\0\5garbage" if damage == "index" else b"[core")
    later = Snapshots(desk.folder, desk.data)
    assert later.track(Abort()) == tracked and later.taken_notices() == []
    desk.put({"a": "2"})
    assert later.track(Abort()) != tracked


def test_what_another_process_has_recorded_is_seen(desk: Desk) -> None:
    desk.put({"a": "1"})
    first = desk.snapshots.track(Abort())
    desk.put({"a": "2"})
    assert first != Snapshots(desk.folder, desk.data).track(Abort()) == desk.snapshots.track(Abort())


def test_two_processes_in_a_workspace_do_not_disturb_each_other(desk: Desk) -> None:
    desk.put({"a": "1"})
    with child(desk, 25, "one") as one, child(desk, 25, "two") as two:
        desk.run(sh("echo 2 > a"))
        assert (one.wait(), two.wait()) == (0, 0)
    outcome = desk.snapshots.undo()
    assert outcome.problem == "" or set(outcome.conflicts) <= {path for path in desk.tree() if path.startswith("by-")}
    assert Snapshots(desk.folder, desk.data).track(Abort()) == Snapshots(desk.folder, desk.folder.parent / "fresh").track(Abort())


# ---- pruning ---------------------------------------------------------------------------------------------


def aged(folder: Path, days: float) -> None:
    for path in [folder, *folder.rglob("*")]:
        info = path.stat()
        os.utime(path, (info.st_atime - 86_400 * days, info.st_mtime - 86_400 * days))


def test_pruning_keeps_what_is_needed_and_throws_away_what_is_old(desk: Desk) -> None:
    desk.put({"a": "unchanged", "b": "1"})
    desk.run(sh("echo old > b"))
    old = desk.snapshots.runs[0]
    desk.snapshots.prune(Abort())
    aged(desk.shadow, 30)
    later = Desk(desk.folder, desk.data)
    later.run(sh("echo new > b"))
    other = Desk(desk.folder.parent / "other", desk.data)
    other.snapshots.track(Abort())
    third = Desk(desk.folder.parent / "third", desk.data)
    third.snapshots.track(Abort())
    idle = desk.shadow_of(other)
    aged(idle, 90)
    aged(desk.shadow_of(third), 90)
    third.snapshots.track(Abort())
    later.snapshots.prune(Abort())
    assert not idle.exists() and desk.shadow_of(third).exists() and later.notices() == []
    expired = Snapshots(desk.folder, desk.data)
    expired.restore([old.to_dict()])
    done(later.snapshots.undo())
    assert (desk.folder / "b").read_text() == "old\n" and "no longer kept" in expired.undo().problem
