"""read, write and ls on real files, run as the loop runs them."""

from __future__ import annotations

import codecs
import contextlib
import os
import random
import re
import resource
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from coder.tools.files import ls, read
from coder.tools.paths import LOOK_SECONDS
from coder.tools.repository import git_folders, writable_git_folders
from coder.tools.search import glob, grep
from coder.tools.text import diff
from coder.tools.workspace import read_small_file, save
from coder.toolset import ToolContext
from tests.harness import to_become_links
from tests.terminal import ROOT, promptly, until
from tests.workspace import Workspace, in_little_memory, patch_of


@pytest.fixture
def ws(tmp_path: Path) -> Workspace:
    folder = tmp_path / "ws"
    folder.mkdir()
    return Workspace(folder)


@pytest.fixture
def unreadable() -> Iterator[str]:
    """A link that nobody can follow: to the program of a process that has ended."""
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        yield f"/proc/{ended.pid}/exe"


# ---- read -----------------------------------------------------------------------------------


TEN = "".join(f"line {number}\n" for number in range(1, 11))
LONG = "x" * ((1 << 20) - 3) + "\nÄÖ\r\nnext\n" + "y" * (2 << 20) + "\nend"
CUT = "… (line cut; {:,} characters)".format
NEXT = "\n\n(the next part of line {0}, with bash: sed -n {0}p a | cut -c 2001-4000)".format
FIRST = "x\n\n(lines 1-1 of {}; use offset=2 to go on)".format
READS: list[tuple[str | bytes, dict[str, int], str]] = [
    ("one\n\n  three\nfour", {}, "one\n\n  three\nfour"),
    ("", {}, "(the file is empty)"),
    (TEN, {"offset": 3, "limit": 1}, "3\tline 3\n\n(lines 3-3 of 10; use offset=4 to go on)"),
    (TEN, {"offset": 9, "limit": 2}, "9\tline 9\n10\tline 10"),
    (TEN, {"offset": -5, "limit": 0}, "6\tline 6\n\n(lines 6-6 of 10; use offset=7 to go on)"),
    (TEN, {"offset": -2}, "9\tline 9\n10\tline 10"),
    (TEN, {"offset": -50, "limit": 1}, "line 1\n\n(lines 1-1 of 10; use offset=2 to go on)"),
    (TEN, {"offset": 11}, "Error: offset 11 is past the end: the file has 10 lines"),
    (LONG, {"offset": 2, "limit": 2}, "2\tÄÖ\n3\tnext\n\n(lines 2-3 of 5; use offset=4 to go on)"),
    (LONG, {"offset": 4}, f"4\t{'y' * 2000} {CUT(2 << 20)}\n5\tend{NEXT(4)}"),
    (LONG, {"offset": 5}, "5\tend"),
    (
        "x\n" * (1 << 20),
        {"limit": 1},
        FIRST(1 << 20),
    ),
    (
        "x\n" * (1 << 20) + "e",
        {"limit": 1},
        FIRST((1 << 20) + 1),
    ),
    (
        f"{'😀' * 2000}\n{'é' * 2001}\n",
        {},
        f"{'😀' * 2000}\n{'é' * 2000} {CUT(2001)}{NEXT(2)}",
    ),
    (b"one\r\ntwo\r\n", {}, "one\ntwo"),
    (codecs.BOM_UTF8 + b"one\ntwo\n", {}, "one\ntwo"),
    (b"caf\xe9\n", {}, "caf\ufffd"),
    (b"\x7fELF\0\0" + bytes(4000), {}, "Error: a is a binary file of 4,006 bytes"),
]


@pytest.mark.parametrize(
    ("content", "part", "text"),
    READS,
    ids=map(str, range(len(READS))),
)
def test_read_shows(ws: Workspace, content: str | bytes, part: dict[str, int], text: str) -> None:
    (ws.folder / "a").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert ws.call("read", path="a", **part).content == text


FILES = {
    "src/app.py": "one\ntwo\nthree\n",
    "src/other/app_test.py": "",
    "docs/": "",
    "b.txt": "b\n",
}


@pytest.mark.parametrize(
    "path",
    [
        *("src/app.py", "./src/app.py", "file://src/app.py", "@src/app.py", "a/src/app.py"),
        *("b/src/app.py", "'src/app.py'", '"src/app.py"', "`src/app.py`", " src/app.py "),
        "src\\app.py",
    ],
)
def test_a_path_in_other_marks_is_read_if_it_is_certain(ws: Workspace, path: str) -> None:
    ws.put(FILES)
    assert ws("read", path=path) == "one\ntwo\nthree"
    assert ws.asked == [("read", "src/app.py")]


@pytest.mark.parametrize("suffix", [":2", ":2-9", ":2:5", "#L2", "#L2-L3"])
def test_a_line_after_a_path_is_where_the_read_begins(ws: Workspace, suffix: str) -> None:
    ws.put(FILES)
    assert ws("read", path=f"src/app.py{suffix}") == "2\ttwo\n3\tthree"
    assert ws("read", path=f"src/app.py{suffix}", offset=3) == "3\tthree"


def test_a_file_that_is_there_by_an_odd_name_is_read_by_it(ws: Workspace) -> None:
    for path in ("@a", "'a'", "a:2"):
        ws.put({"a": "plain\n", path: "odd\n"})
        assert ws("read", path=path) == "odd"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("app.py", "there is no file app.py; did you mean src/app.py?"),
        ("/repo/src/app.py", "there is no file /repo/src/app.py; did you mean src/app.py?"),
        ("C:\\work\\src\\app.py", "did you mean src/app.py?"),
        ("SRC/App.py", "there is no file SRC/App.py; did you mean src/app.py?"),
        ("src/apps.py", "did you mean src/app.py"),
        ("src/application.py", "there is no file src/application.py; did you mean src/app.py?"),
        ("lib/app_test.py", "did you mean src/other/app_test.py?"),
        ("$HOME/app.py", "variables are not expanded here"),
        ("srcs", "did you mean src?"),
        ("nothing/like/it.rs", "there is no file nothing/like/it.rs"),
    ],
)
def test_a_missing_file_is_named_as_the_model_did_with_what_is_near(
    ws: Workspace, path: str, says: str
) -> None:
    ws.put(FILES)
    said = ws.fails("read", path=path)
    assert says in said
    assert str(ws.folder) not in said
    assert ("did you mean" in said) == ("did you mean" in says)


def test_a_file_that_is_near_is_found_however_busy_the_machine_is(ws: Workspace) -> None:
    """In a small folder, in which the time does not count."""
    ws.put(FILES)

    def stand_still(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is os.walk.__code__:
            sys.setprofile(None)
            time.sleep(2 * LOOK_SECONDS)

    sys.setprofile(stand_still)
    try:
        assert "did you mean src/app.py?" in ws.fails("read", path="app.py")
    finally:
        sys.setprofile(None)


def test_a_folder_is_listed_by_read_and_files_of_other_kinds_name_the_way(ws: Workspace) -> None:
    ws.put(FILES | {"a.png": b"\x89PNG\r\n\x1a\n\0", "a.pdf": "%PDF-1.7\n"})
    assert ws("read", path="src") == ws("ls", path="src") == "app.py\nother/"
    assert "a.png is an image of 9 bytes: it cannot be shown here" in ws.fails("read", path="a.png")
    assert "a.pdf is a PDF: run pdftotext a.pdf - with bash" in ws.fails("read", path="a.pdf")
    for call in CALLS[1:]:
        for path in ("src", "src/"):
            assert ws.fails(**call, path=path) == "Error: src is a folder: name a file in it"


@pytest.mark.parametrize(
    "path", ["file://src/app.py", "@src/app.py", "a/src/app.py", "src/app.py:2", "src\\app.py"]
)
def test_nothing_is_written_to_a_name_in_other_marks(ws: Workspace, path: str) -> None:
    ws.put(FILES)
    before = ws.files()
    for call in CALLS[1:]:
        said = f"there is no file {path}; did you mean src/app.py?"
        assert ws.fails(**call, path=path) == f"Error: {said}"
    assert ws.files() == before


def test_a_place_outside_names_its_place_inside(ws: Workspace) -> None:
    ws.put(FILES)
    said = ws.fails("write", path="/repo/src/new.py", content="x")
    assert "nothing is written there. Inside it this is src/new.py." in said
    assert "Inside it" not in ws.fails("write", path="/elsewhere/new.py", content="x")


@pytest.mark.parametrize(
    "line",
    ["# ... rest of the code unchanged ...", "// ... existing code ...", "    ... (unchanged)"],
)
def test_a_content_that_leaves_lines_out_overwrites_nothing(ws: Workspace, line: str) -> None:
    ws.put(FILES)
    ws("read", path="src/app.py")
    said = ws.fails("write", path="src/app.py", content=f"one\n{line}\n")
    assert "write takes the whole file; to change a part use edit" in said
    ws("write", path="new.py", content=f"{line}\n")
    ws("write", path="new.py", content=f"{line}\nand more\n")


def test_going_on_as_told_gives_every_line_once(ws: Workspace) -> None:
    """At most 2000 lines at a time, and less than the loop would cut."""
    whole = [f"{number} {'x' * (number % 300)}" for number in range(1, 5001)]
    (ws.folder / "a").write_text("\n".join(whole))
    lines = list[str]()
    offset = "1"
    while offset:
        text, _, rest = ws("read", path="a", offset=int(offset)).partition("\n\n(lines ")
        assert len(text) < 30_000
        for number, line in enumerate(text.split("\n"), int(offset)):
            lines.append(line.removeprefix(f"{number}\t") if offset != "1" else line)
        offset = rest.partition("use offset=")[2].partition(" ")[0]
    assert lines == whole
    (ws.folder / "a").write_text("x\n" * 5000)
    assert "(lines 1-2000 of 5000;" in ws("read", path="a", limit=9999)


CALLS: tuple[dict[str, Any], ...] = (
    {"name": "read"},
    {"name": "write", "content": "x"},
    {"name": "edit", "old_string": "a", "new_string": "b"},
)


@pytest.mark.case("FIL-09", "FIL-10", "FIL-12")
@pytest.mark.parametrize(
    ("path", "why"),
    [
        *((path, "the path is empty or holds a NUL") for path in ("", "  ", "a\0b")),
        *((path, "is not a regular file") for path in ("pipe", "to-pipe")),
        *((path, "symbolic links") for path in ("loop", "to-ended")),
        ("socket", "cannot be opened"),
        ("n" * 300, "File name too long"),
    ],
)
def test_what_is_no_file_is_refused_at_once(
    ws: Workspace, unreadable: str, path: str, why: str
) -> None:
    os.mkfifo(
        ws.put(
            {},
            to_pipe="pipe",
            loop="loop",
            to_ended=unreadable,
        )
        / "pipe"
    )
    with (
        socket.socket(socket.AF_UNIX) as server,
        contextlib.chdir(ws.folder),
        promptly(),
    ):
        server.bind("socket")  # a relative name, because the length of these is limited
        for call in CALLS:
            assert why in ws.fails(**call, path=path)
    assert ws.names() == ["loop", "pipe", "socket", "to-ended", "to-pipe"]


def test_a_repository_may_be_a_link_that_nobody_can_read(ws: Workspace, unreadable: str) -> None:
    ws.put({".git": f"gitdir: {unreadable}\n"})
    assert git_folders(ws.folder) == (Path(unreadable), Path(unreadable))
    assert not writable_git_folders(ws.folder)
    assert "is not read" in ws.fails("read", path=f"..{'/..' * 20}{unreadable}")
    assert not ws.asked


@pytest.mark.skipif(sys.platform != "linux", reason="lists the open files in /proc")
def test_a_folder_in_the_place_of_a_small_file_leaves_nothing_open(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in (".", "pipe", "missing"):
        assert read_small_file(tmp_path / name) is None
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            assert not os.readlink(f"/proc/self/fd/{number}").startswith(str(tmp_path))


@pytest.mark.case("FIL-10", "FIL-12")
def test_device_and_process_files_are_refused_without_asking(ws: Workspace) -> None:
    ws.put({}, zero="/dev/zero")
    paths = ["/dev/zero", "/proc/self/environ", "/proc/1/mem", "/dev/../proc/self/environ", "zero"]
    with promptly():
        for path in paths:
            assert "is a device or process file and is not read" in ws.fails("read", path=path)
    assert ws.asked == []


@pytest.mark.case("FIL-01", "FIL-02", "FIL-03")
def test_reading_outside_the_workspace_asks_for_the_place(
    ws: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    ws.put({"../secret": "TOP SECRET", "../ws-evil/x": "x"}, link="../secret")
    for path in ("../secret", "~/secret", "sub/../../secret", "link", str(tmp_path / "secret")):
        ws.asked.clear()
        ws("read", path=path)
        assert ws.asked == [
            ("external_directory", str(tmp_path / "secret")),
            ("read", str(tmp_path / "secret")),
        ]
    neighbour = tmp_path / "ws-evil"
    tools = Workspace(ws.folder, read, ls, grep, glob)
    for name, arguments in (
        ("read", {"path": "../ws-evil/x"}),
        ("ls", {"path": str(neighbour)}),
        ("glob", {"pattern": "*", "path": "../ws-evil"}),
        ("grep", {"pattern": "x", "path": str(neighbour)}),
    ):
        tools.asked.clear()
        tools(name, **arguments)
        place = neighbour / "x" if name == "read" else neighbour
        assert ("external_directory", str(place)) in tools.asked, name


@pytest.mark.case("FIL-28", "FIL-29")
@pytest.mark.parametrize(
    "block",
    [b"the words of a log\n" * (1 << 16), b"a" * (1 << 20)],
)
def test_a_large_file_is_read_in_little_memory(ws: Workspace, block: bytes) -> None:
    with open(ws.folder / "a", "wb") as file:
        file.writelines([block] * 100)
    last = max(1, 100 * block.count(b"\n"))
    with in_little_memory():
        said = ws("read", path="a", offset=last, limit=1)
    (ws.folder / "a").unlink()  # pytest keeps the folder
    whole = f"{'a' * 2000} {CUT(100 << 20)}{NEXT(1)}"
    if last > 1:
        whole = f"{last}\tthe words of a log"
    assert said == whole


ODD_NAMES = {
    b"new\nline": "new\\nline",
    b"-rf": "-rf",
    b"caf\xe9": "caf\\udce9",
    b"\x1b[2J": "\\x1b[2J",
    "é \u202e".encode(): "é \\u202e",
}


@pytest.mark.case("FIL-25")
def test_files_with_odd_names_are_listed_read_and_written(ws: Workspace) -> None:
    for name, shown in ODD_NAMES.items():
        path = os.fsdecode(name)
        ws("write", path=path, content="content")
        assert ws("ls") == shown
        assert ws("read", path=path) == "content"
        (ws.folder / path).unlink()


# ---- write: what may be written -------------------------------------------------------------


@pytest.mark.case("FIL-19", "FIL-20")
def test_a_file_is_created_and_overwritten_if_it_is_as_it_was_read(ws: Workspace) -> None:
    assert ws("write", path="a/b/c.txt", content="one\ntwö\n") == "Created a/b/c.txt (2 lines)."
    assert ws.asked == [("edit", "a/b/c.txt")]
    file = ws.folder / "a"
    file.rename(ws.folder / "folder")
    assert "is a folder" in ws.fails("write", path="folder", content="x")
    file.write_text("one\ntwo\n")
    assert "a exists and was not read as it is now" in ws.fails("write", path="a", content="x")
    ws("read", path="a")
    result = ws.call("write", path="a", content="one\nthree\n")
    assert result.content == "Overwrote a: 2 lines, was 2."
    assert result.details["diff"] == "--- a/a\n+++ b/a\n@@ -1,2 +1,2 @@\n one\n-two\n+three"
    ws("edit", path="a", old_string="three", new_string="four")
    ws("write", path="a", content="own changes need no reading")
    file.write_text("own changes need no READING")  # of the same size
    for _ in range(2):  # asking again does not help
        said = ws.fails("write", path="a", content="x")
        assert "a changed on disk since it was read. Read it again first." in said
    assert file.read_text() == "own changes need no READING"
    ws("read", path="a")
    ws("write", path="a", content="x")
    assert file.read_text() == "x"
    assert ws.names() == ["a", "folder"]


@pytest.mark.case("FIL-02", "FIL-03", "FIL-05")
def test_nothing_is_written_outside_the_workspace(ws: Workspace, tmp_path: Path) -> None:
    links = {"link": "../out", "dangling": "../missing", "folder": "..", "chain": "link"}
    ws.put({"../out": "old", "../ws-evil/": ""}, **links)
    before = sorted(tmp_path.rglob("*"))
    ws("read", path="../out")  # it is not a matter of having read it
    paths = "../new a/../../new ../ws-evil/new ../out link dangling folder/new chain ~/new /new"
    for path in [*paths.split(), f"{tmp_path}/new", f"{tmp_path}/ws-evil/new"]:
        message = ws.fails("write", path=path, content="PWN")
        assert f"is outside the workspace {ws.folder}: nothing is written there" in message
        message = ws.fails("edit", path=path, old_string="old", new_string="PWN")
        assert "outside the workspace" in message
    assert (tmp_path / "out").read_text() == "old"
    assert sorted(tmp_path.rglob("*")) == before


# ---- write: what stays ----------------------------------------------------------------------


@pytest.mark.case("FIL-18")
@pytest.mark.parametrize(
    ("before", "content", "after"),
    [
        (b"one\r\ntwo\r\n", "one\r\nthree\n", b"one\r\nthree\r\n"),
        (b"one\ntwo\n", "one\nthree\n", b"one\nthree\n"),
        (codecs.BOM_UTF8 + b"one", "zwö", codecs.BOM_UTF8 + "zwö".encode()),
        (b"caf\xe9", "coffee", b"coffee"),
        (b"caf\xe9", "café", "is not UTF-8: only ASCII can be added"),
        (b"text", "\ud83d", "surrogates not allowed"),
    ],
)
def test_endings_and_encoding_stay(
    ws: Workspace, before: bytes, content: str, after: bytes | str
) -> None:
    file = ws.put({"a": before}) / "a"
    ws("read", path="a")
    result = ws.call("write", path="a", content=content)
    if isinstance(after, str):
        assert after in result.content
        assert file.read_bytes() == before
    else:
        assert file.read_bytes() == after


@pytest.mark.case("FIL-16")
@pytest.mark.parametrize("mode", [0o755, 0o400, 0o4750])
def test_mode_and_owner_stay(ws: Workspace, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    def seen(fd: int, mode: int, change: Any = os.fchmod) -> None:
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600, "others can read the temporary file"
        change(fd, mode)

    monkeypatch.setattr(os, "fchmod", seen)
    file = ws.folder / "a"
    file.write_text("one")
    if os.geteuid() == 0:
        os.chown(file, 12345, 12346)
    file.chmod(mode)
    before = file.stat()
    ws("read", path="a")
    ws("write", path="a", content="two")
    ws("edit", path="a", old_string="two", new_string="three")
    after = file.stat()
    assert stat.S_IMODE(after.st_mode) == mode
    assert file.read_text() == "three"
    assert after.st_uid == before.st_uid
    assert after.st_gid == before.st_gid


@pytest.mark.case("FIL-17", "FIL-23")
def test_links_stay_and_what_they_lead_to_is_written(ws: Workspace) -> None:
    target = ws.folder / "target"
    other = ws.folder / "other"
    links = {"link": "target", "dangling": "missing"}
    ws.put({"target": "one"}, **links)
    ws("read", path="link")
    edited = ws("edit", path="link", old_string="one", new_string="1")
    assert edited == "Edited target, line 1."
    assert ws("write", path="link", content="two") == "Overwrote target: 1 lines, was 1."
    ws("write", path="dangling", content="new")
    assert {name: os.readlink(ws.folder / name) for name in links} == links
    assert target.read_text() == "two"
    assert (ws.folder / "missing").read_text() == "new"
    os.link(target, other)
    note = "the file had 2 hard links; the others keep the old content"
    assert note in ws("write", path="target", content="three")
    assert other.read_text() == "two"
    assert "hard links" not in ws("write", path="target", content="four")


def test_a_power_cut_loses_no_edit(ws: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = list[int]()
    monkeypatch.setattr(os, "fsync", synced.append)
    (
        ws("write", path="a", content="one"),
        ws(
            "edit",
            path="a",
            old_string="one",
            new_string="two",
        ),
    )
    assert len(synced) == 2


def test_a_file_takes_the_place_of_a_link_that_a_command_put_there_meanwhile(ws: Workspace) -> None:
    ws.put({}, a="elsewhere")
    save(ToolContext(ws.folder, ws.abort), ws.folder / "a", b"text")
    assert (ws.folder / "a").is_file()
    assert ws.names() == ["a"]
    assert (ws.folder / "a").read_text() == "text"
    assert not (ws.folder / "a").is_symlink()


def test_a_folder_that_another_makes_at_the_same_time_is_taken(
    ws: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(*args: Any, mkdir: Any = os.mkdir, **more: Any) -> None:
        mkdir(*args, **more)
        mkdir(*args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "mkdir", twice)
        ws("write", path="new/folder/a", content="text")
    assert (ws.folder / "new/folder/a").read_text() == "text"


# ---- write: wholly old or wholly new --------------------------------------------------------


@pytest.fixture
def full_disk() -> Iterator[None]:
    """A limit of 4 KiB on the size of files is used in its place."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.case("FIL-22")
def test_a_failed_write_leaves_the_original_and_no_temporary_file(
    ws: Workspace, full_disk: None
) -> None:
    ws.put({"a": "x" * 3000})
    ws("read", path="a")
    why = "could not be written, and is as it was: File too large"
    for path in ("a", "new"):
        said = ws.fails("write", path=path, content="y" * 100_000)
        assert said == f"Error: {path} {why}"
    assert why in ws.fails(
        "edit",
        path="a",
        old_string="x" * 3000,
        new_string="z" * 5000,
    )
    assert "a/below could not be written" in ws.fails("write", path="a/below", content="y")
    ws("write", path="sub/new", content="y" * 4000)
    assert ws.names() == ["a", "sub"]
    assert os.listdir(ws.folder / "sub") == ["new"]
    assert (ws.folder / "a").read_text() == "x" * 3000


WRITER = """
import sys
from pathlib import Path
from tests.workspace import Workspace
ws = Workspace(Path(sys.argv[1]))
ws("read", path="file", limit=1)
while True:
    for letter in "ab":
        ws("write", path="file", content=letter * int(sys.argv[2]))
"""


@pytest.mark.case("FIL-21")
@pytest.mark.parametrize(
    ("size", "times"),
    [
        (8 << 20, 3),
        pytest.param(48 << 20, 30, marks=pytest.mark.slow),
    ],
)
def test_a_kill_leaves_the_old_or_the_new_file(ws: Workspace, size: int, times: int) -> None:
    """Beside it at most a part of the new one, under a name of ours."""
    chance = random.Random(size)
    (ws.folder / "file").write_bytes(b"b" * size)
    for _ in range(times):
        argv = [sys.executable, "-c", WRITER, ws.folder, str(size)]
        with subprocess.Popen(argv, cwd=ROOT) as writer:
            until(lambda: len(ws.names()) > 1, "a temporary file")
            time.sleep(chance.random() * size / 1e9)  # somewhere in the writing, or after it
            writer.kill()
        assert (ws.folder / "file").read_bytes() in (b"a" * size, b"b" * size)
        left = [name for name in ws.names() if name != "file"]
        assert len(left) <= 1
        assert all(re.fullmatch(r"\.coder-.*\.tmp", name) for name in left)
        for name in left:
            (ws.folder / name).unlink()


# ---- ls -------------------------------------------------------------------------------------


@pytest.mark.case("FIL-11")
def test_ls_marks_folders_links_and_what_is_no_regular_file(ws: Workspace) -> None:
    links = {"to_a": "a", "to_nothing": "missing", "loop": "loop", "to_odd": "/tmp/new\nline"}
    os.mkfifo(
        ws.put(
            {"a/": "", ".hidden": "", "b.txt": ""},
            **links,
        )
        / "pipe"
    )
    assert ws("ls").split("\n") == [
        *(".hidden", "a/", "b.txt", "loop -> loop", "pipe (not a regular file)"),
        *("to-a -> a", "to-nothing -> missing", "to-odd -> /tmp/new\\nline"),
    ]
    assert ws.asked == []
    assert ws("ls", path="to-a") == "(the folder is empty)"
    refused = {"b.txt": "is a file: use read", "pipe": "is a file", "/proc/self": "is not read"}
    for path, why in (refused | {"absent": "there is no folder absent"}).items():
        assert why in ws.fails("ls", path=path)
    ws.put({f"many/{number:03}": "" for number in range(503)})
    *lines, last = ws("ls", path="many").split("\n")
    assert lines == [f"{number:03}" for number in range(500)]
    assert last == "(500 of 503 entries; use glob with a pattern)"


MANY = [str(number) for number in range(8_000)]
FEW = st.lists(st.sampled_from("abc"), max_size=30)


@settings(max_examples=200, deadline=None)
@given(FEW, FEW)
@example(["a"] * 6_000, ["b"] * 6_000)
@example(MANY, ["new", *MANY])
@example(MANY, [])
@example(MANY, [str(number // 2) for number in range(8_000)])
def test_a_diff_turns_the_old_lines_into_the_new_ones(old: list[str], new: list[str]) -> None:
    assume(old != new)
    with promptly():
        first, second, *lines = diff(
            "\n".join(old),
            "\n".join(new),
            "f",
        ).split("\n")
    assert first == "--- a/f"
    assert second == "+++ b/f"
    result = list[str]()
    at = 0
    for line in lines:
        if found := re.fullmatch(r"@@ -(\d+)(,0)?(?:,\d+)? \+(\d+)(,0)?(?:,\d+)? @@", line):
            start = int(found[1]) - (not found[2])
            result = result + old[at:start]
            at = start
            assert len(result) == int(found[3]) - (not found[4])
        elif line[0] in " -":
            assert old[at] == line[1:]
            at += 1
        result += [line[1:]] if line[0] in " +" else []
    assert result + old[at:] == new


# ---- what happens while permission is asked -------------------------------------------------

WRITE = CALLS[1]
EDIT = {"name": "edit", "path": "a", "old_string": "o", "new_string": "0"}
ADD = "*** Add File: c\n+x"


@pytest.mark.parametrize(
    ("call", "name", "content"),
    [
        *((WRITE | {"path": name}, name, "the user's\n") for name in "ab"),
        *((EDIT, "a", content) for content in ("one\nthe user's\n", None)),
        (patch_of(ADD, "*** Update File: a\n-one\n+1"), "a", "one\nmore\n"),
        (patch_of(ADD, "*** Update File: a\n*** Move to: b"), "b", "x\n"),
        (patch_of(ADD, "*** Add File: b\n+x"), "b", "x\n"),
        (patch_of(ADD, "*** Delete File: a"), "a", None),
    ],
)
def test_the_users_own_change_stays(
    ws: Workspace, call: dict[str, Any], name: str, content: str | None
) -> None:
    def meanwhile() -> None:
        (ws.folder / name).write_text(content) if content else (ws.folder / name).unlink()
        before.update(ws.files())

    before = dict[str, Any]()
    (ws.folder / "a").write_text("one\n")
    if call["name"] == "write":
        ws("read", path="a")
    ws.when_asked = meanwhile
    assert f"{name} changed on disk" in ws.fails(**call)
    assert ws.files() == before


@pytest.mark.parametrize(
    "call",
    [
        {"name": "read", "path": "sub/a"},
        *(WRITE | {"path": path} for path in ("sub/a", "sub/deep/new", "in/sub/a", "in/sub/new")),
        patch_of("*** Add File: sub/deep/new\n+x"),
        *(patch_of(f"*** Update File: {path}\n-one\n+PWN") for path in ("sub/a", "in/sub/a")),
        patch_of("*** Delete File: sub/a"),
        patch_of("*** Update File: sub/a\n*** Move to: b"),
        patch_of("*** Update File: a\n*** Move to: sub/b"),
    ],
    ids=str,
)
def test_a_folder_become_a_link_leads_nowhere(
    ws: Workspace, tmp_path: Path, call: dict[str, Any]
) -> None:
    outside = Workspace(tmp_path / "outside")
    meanwhile = to_become_links(ws.folder, outside.folder, "one\n")
    for folder in (ws.folder, outside.folder):
        (folder / "a").write_text("one\n")
        (folder / "sub" / "a").chmod(0o640)
    if call["name"] == "write":
        ws("read", path="sub/a"), ws("read", path="in/sub/a")
    before = outside.files()
    ws.when_asked = meanwhile
    assert re.search("Not a directory|changed on disk", ws.fails(**call))
    assert outside.files() == before
    kept = [ws.folder / name for name in ("a", "sub-aside/a", "in-aside/sub/a")]
    assert [each.read_text() for each in kept] == ["one\n"] * 3
