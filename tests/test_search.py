"""grep and glob. What is true of grep is true with ripgrep and with our own searcher: each test runs with both.

The engine is chosen as it is on a machine: by what is on PATH.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource  # noqa: F401 (for the lines that run in a child)
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from coder.abort import Abort
from coder.devtools.scripted import Reply
from coder.hooks import Hooks
from coder.tools import search, searcher
from coder.tools.search import _ripgrep, glob, grep
from coder.toolset import ToolContext, Toolset
from coder.types import Aborted, DeniedError, ToolCall, ToolResult
from tests.harness import ask, drive, serve
from tests.terminal import MARK, gone, promptly, running, until

RIPGREP = shutil.which("rg")
needs_ripgrep = pytest.mark.skipif(not RIPGREP, reason="no ripgrep on this machine")
is_root = os.geteuid() == 0


@pytest.fixture
def plain(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """A machine without ripgrep."""
    monkeypatch.setenv("PATH", str(tmp_path_factory.mktemp("empty")))
    _ripgrep.cache_clear()
    yield
    _ripgrep.cache_clear()


@pytest.fixture(params=[pytest.param("ripgrep", marks=needs_ripgrep), "our own"])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "our own":
        request.getfixturevalue("plain")
    _ripgrep.cache_clear()
    assert bool(_ripgrep()) == (request.param == "ripgrep")
    yield request.param
    _ripgrep.cache_clear()


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    value = os.urandom(8).hex()
    monkeypatch.setenv(MARK, value)
    yield value
    gone(value)


def tree(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Files with their contents; a name that ends in / is an empty folder."""
    for name, content in files.items():
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def call(
    folder: Path, name: str, arguments: Mapping[str, object], abort: Abort | None = None
) -> ToolResult:
    tools = Toolset([grep, glob], cwd=folder)
    asked = ToolCall("call1", name, dict(arguments))
    work = tools.run(asked, tools.context(asked, abort or Abort()))
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: ToolResult = end.value
            return result


def grepped(folder: Path, pattern: str, **arguments: object) -> list[str]:
    """The lines of a grep that goes well, without what is said beside."""
    result = call(folder, "grep", {"pattern": pattern} | arguments)
    assert not result.is_error, result
    lines = str(result.content).splitlines()
    return [] if lines[0] == "No matches." else [line for line in lines if not line.startswith("(")]


def names(folder: Path, pattern: str = "one", **arguments: object) -> list[str]:
    """The files in which something was found."""
    return list(dict.fromkeys(line.split(":")[0] for line in grepped(folder, pattern, **arguments)))


def globbed(folder: Path, pattern: str, **arguments: object) -> list[str]:
    """What a glob finds, in the order of the names."""
    result = call(folder, "glob", {"pattern": pattern} | arguments)
    assert not result.is_error, result
    return [] if result.content == "No files found." else sorted(str(result.content).splitlines())


def notes(result: ToolResult) -> str:
    return "\n".join(line for line in str(result.content).splitlines() if line.startswith("("))


# ---- grep: lines -----------------------------------------------------------------------------------------


def test_a_match_is_path_number_and_line(tmp_path: Path, engine: str) -> None:
    tree(
        tmp_path, {"a.py": "import os\n\n    x = os.sep\n", "sub/b.py": "os", "c.txt": "nothing\n"}
    )
    assert grepped(tmp_path, r"\bos\b") == [
        "a.py:1:import os",
        "a.py:3:    x = os.sep",
        "sub/b.py:1:os",
    ]


def test_no_match_is_no_error(tmp_path: Path, engine: str) -> None:
    tree(tmp_path, {"a": "x\n"})
    result = call(tmp_path, "grep", {"pattern": "absent"})
    assert (result.content, result.is_error) == ("No matches.", False)


def test_the_order_is_that_of_the_paths_name_by_name(tmp_path: Path, engine: str) -> None:
    files = ["a/x", "a.txt", "a/b/c", "B", "z", ".hidden", "a-b", "é", "a b"]
    tree(tmp_path, dict.fromkeys(files, "one\n"))
    assert names(tmp_path) == [".hidden", "B", "a/b/c", "a/x", "a b", "a-b", "a.txt", "z", "é"]


def test_context_is_marked_and_does_not_repeat_lines(tmp_path: Path, engine: str) -> None:
    tree(tmp_path, {"f": "".join(f"{n}\n" for n in range(1, 13)), "g": "3\n"})
    assert grepped(tmp_path, "^(3|5|12)$", context=1) == [
        "f-2-2",
        "f:3:3",
        "f-4-4",
        "f:5:5",
        "f-6-6",
        "f-11-11",
        "f:12:12",
        "g:1:3",
    ]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"pattern": "A.C"}, ["f:2:A.C"]),
        ({"pattern": "a.c"}, ["f:1:abc", "f:4:xabcx"]),
        ({"pattern": "a.c", "ignore_case": True}, ["f:1:abc", "f:2:A.C", "f:4:xabcx"]),
        ({"pattern": "A.C", "literal": True}, ["f:2:A.C"]),
        ({"pattern": "a.c", "literal": True}, []),
        ({"pattern": "a.c", "literal": True, "ignore_case": True}, ["f:2:A.C"]),
        ({"pattern": "(", "literal": True}, ["f:3:f(x)"]),
        ({"pattern": r"\(x", "ignore_case": True}, ["f:3:f(x)"]),
        ({"pattern": "^abc$"}, ["f:1:abc"]),
        ({"pattern": "-x"}, ["f:5:-x"]),
        ({"pattern": "--context=3"}, []),
        ({"pattern": "x(?=a)"}, ["f:4:xabcx"]),
        ({"pattern": r"(.)abc\1"}, ["f:4:xabcx"]),
        ({"pattern": "abc\nA"}, []),
    ],
)
def test_what_a_pattern_finds(
    tmp_path: Path, engine: str, options: dict[str, object], found: list[str]
) -> None:
    tree(tmp_path, {"f": "abc\nA.C\nf(x)\nxabcx\n-x\n"})
    assert grepped(tmp_path, **options) == found  # type: ignore[arg-type]


def test_patterns_are_about_characters_not_bytes(tmp_path: Path, engine: str) -> None:
    tree(tmp_path, {"f": "café\nÉCOLE\nnaïve\n日本\n"})
    assert grepped(tmp_path, "caf.$") == ["f:1:café"]
    assert grepped(tmp_path, "école", ignore_case=True) == ["f:2:ÉCOLE"]
    assert grepped(tmp_path, r"^na\w+e$") == ["f:3:naïve"]
    assert grepped(tmp_path, "^..$") == ["f:4:日本"]


def test_line_endings_and_byte_order_marks_are_no_part_of_a_line(
    tmp_path: Path, engine: str
) -> None:
    tree(
        tmp_path,
        {
            "crlf": "one\r\ntwo\r\none",
            "bom": b"\xef\xbb\xbfone\n",
            "wide": "two\none\n".encode("utf-16"),
        },
    )
    assert grepped(tmp_path, "^one$", context=1) == [
        "bom:1:one",
        "crlf:1:one",
        "crlf-2-two",
        "crlf:3:one",
        "wide-1-two",
        "wide:2:one",
    ]


def test_text_in_another_encoding_is_found_and_can_be_sent(tmp_path: Path, engine: str) -> None:
    tree(tmp_path, {"latin": b"caf\xe9 one\nplain one\n"})
    with serve(Reply(calls=[("grep", {"pattern": "one"})]), Reply("Done.")) as server:
        ask(server, tools=Toolset([grep], cwd=tmp_path))
        assert (
            server.requests[-1]["messages"][-1]["content"]
            == "latin:1:caf\ufffd one\nlatin:2:plain one"
        )


# ---- grep: limits ----------------------------------------------------------------------------------------


def test_a_hundred_lines_are_shown_or_as_many_as_are_asked_for(tmp_path: Path, engine: str) -> None:
    tree(tmp_path, {"f": "one\n" * 100, "g": "one\n" * 50})
    more = "(100 lines shown, there are more; narrow the pattern, the path or the glob)"
    assert str(call(tmp_path, "grep", {"pattern": "one"}).content).splitlines()[99:] == [
        "f:100:one",
        more,
    ]
    assert len(grepped(tmp_path, "one", limit=120)) == 120
    assert notes(call(tmp_path, "grep", {"pattern": "one", "limit": 150})) == ""
    assert notes(call(tmp_path, "grep", {"pattern": "one", "path": "f"})) == ""
    assert len(grepped(tmp_path, "one", limit=0)) == 1


def test_a_long_line_is_cut(tmp_path: Path, engine: str) -> None:
    tree(tmp_path, {"f": "one" + "x" * 5000 + "\n" + "é" * 5000 + "one\n" + "𝄞" * 600 + "one\n"})
    lines = grepped(tmp_path, "one")
    assert [line[:6] for line in lines] == ["f:1:on", "f:2:éé", "f:3:𝄞𝄞"]
    assert all(line.endswith(" … (line cut)") and 500 <= len(line) <= 530 for line in lines)


def test_a_search_that_has_enough_ends_at_once(tmp_path: Path, engine: str, mark: str) -> None:
    tree(tmp_path, {"f": "one\n" * 3_000_000})
    with promptly(10):
        assert len(grepped(tmp_path, "one", limit=5)) == 5


@pytest.mark.case("FIL-28")
def test_a_huge_line_needs_no_memory(tmp_path: Path, engine: str) -> None:
    """FIL-28: 300 MB in one line; measured in a process of its own, and for our searcher in its child, too."""
    with open(tmp_path / "f", "wb") as file:
        file.write(b"one")
        for _ in range(300):
            file.write(b"x" * 1_000_000)
    script = (
        "from tests.test_search import *\nlines = grepped(Path.cwd(), 'one')\nassert len(lines) == 1 and len(lines[0]) < 600\n"
        "from tests.test_processes import peak\n"
        "print(json.dumps([peak(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    ours, childs = json.loads(done.stdout)
    assert ours < 150_000
    assert (
        engine == "ripgrep" or childs < 150_000
    )  # ripgrep maps the file: the pages are not its own


# ---- grep: which files -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.py", ["a.py", "src/b.py", "src/deep/c.py"]),
        ("*.{py,ts}", ["a.py", "src/b.py", "src/d.ts", "src/deep/c.py"]),
        ("[ab].py", ["a.py", "src/b.py"]),
        ("[!ab].py", ["src/deep/c.py"]),
        ("?.py", ["a.py", "src/b.py", "src/deep/c.py"]),
        ("src/*.py", ["src/b.py"]),
        ("src/**/*.py", ["src/b.py", "src/deep/c.py"]),
        ("**/deep/*", ["src/deep/c.py"]),
        ("{a.py,src/d.ts}", ["a.py", "src/d.ts"]),
        ("src/**", ["src/b.py", "src/d.ts", "src/deep/c.py"]),
        ("./a.py", ["a.py"]),
        ("!*.py", ["-x.txt", "src/d.ts"]),
        ("!src/**", ["-x.txt", "a.py"]),
        ("-x*", ["-x.txt"]),
        ("*", ["-x.txt", "a.py", "src/b.py", "src/d.ts", "src/deep/c.py"]),
        ("**/*", ["-x.txt", "a.py", "src/b.py", "src/d.ts", "src/deep/c.py"]),
        ("*.rs", []),
        ("[", []),
    ],
)
def test_a_glob_chooses_files_and_brings_back_none_that_is_ignored(
    tmp_path: Path, engine: str, pattern: str, found: list[str]
) -> None:
    files = [
        "a.py",
        "src/b.py",
        "src/deep/c.py",
        "src/d.ts",
        "-x.txt",
        ".git/a.py",
        "node_modules/a.py",
        "src/ignored.py",
    ]
    tree(tmp_path, dict.fromkeys(files, "one\n") | {".gitignore": "node_modules/\nignored.*\n"})
    assert names(tmp_path, glob=pattern) == found


def test_a_glob_is_seen_from_the_folder_or_from_the_workspace(tmp_path: Path, engine: str) -> None:
    tree(tmp_path, dict.fromkeys(["src/a/x.py", "src/b/x.py", "a/x.py"], "one\n"))
    assert names(tmp_path, path="src", glob="a/*.py") == ["src/a/x.py"]
    assert names(tmp_path, path="src", glob="src/a/*.py") == ["src/a/x.py"]


def test_a_file_that_is_named_is_searched_whatever_is_ignored(tmp_path: Path, engine: str) -> None:
    tree(
        tmp_path,
        {
            "x.log": "one\n",
            ".gitignore": "*.log\nout/\n.venv\n",
            "out/f": "one\n",
            "out/sub/g": "one\n",
        },
    )
    assert names(tmp_path, path="x.log") == ["x.log"]
    assert names(tmp_path, path="x.log", glob="*.py") == ["x.log"]
    assert names(tmp_path, path="out") == ["out/f", "out/sub/g"]
    assert names(tmp_path, path="out/sub") == ["out/sub/g"]
    assert names(tmp_path) == []


IGNORING = {
    "a pattern without a slash holds at any depth": (
        "*.log",
        {"a.log": 0, "sub/b.log": 0, "a.log.txt": 1},
    ),
    "a later line brings back": (
        "*.log\n!keep.log",
        {"a.log": 0, "keep.log": 1, "sub/keep.log": 1},
    ),
    "the last line that fits decides": ("!keep.log\n*.log", {"keep.log": 0}),
    "a slash in front anchors": ("/top", {"top": 0, "sub/top": 1}),
    "a slash in the middle anchors": ("sub/f", {"sub/f": 0, "x/sub/f": 1}),
    "a slash at the end is for folders": ("build/", {"build/f": 0, "x/build/f": 0, "x/y/build": 1}),
    "what is below an ignored folder does not come back": (
        "build/\n!build/keep",
        {"build/keep": 0},
    ),
    "the content of a folder may come back": ("d/*\n!d/keep", {"d/keep": 1, "d/other": 0}),
    "two stars in front": ("**/x", {"x": 0, "a/b/x": 0}),
    "two stars in the middle": ("a/**/x", {"a/x": 0, "a/b/c/x": 0, "b/a/x": 1}),
    "two stars at the end": ("a/**", {"a/b/c": 0, "b/a/c": 1}),
    "sets and single characters": (
        "*.[oa]\nf?o",
        {"x.o": 0, "x.a": 0, "x.b": 1, "foo": 0, "fo": 1},
    ),
    "comments and empty lines": ("# x\n\n  \n", {"x": 1, "# x": 1}),
    "escapes": ("\\#x\n\\!y\nfoo\\ bar\n\\*z", {"#x": 0, "!y": 0, "foo bar": 0, "*z": 0, "az": 1}),
    "blanks at the end do not count, in front they do": ("a  \n b", {"a": 0, "b": 1, " b": 0}),
    "carriage returns": ("a\r\nb/\r\n", {"a": 0, "b/x": 0, "c": 1}),
    "a line that is no pattern spoils no other": ("[z-a]\nx", {"x": 0, "y": 1}),
    "hidden files are files": ("", {".hidden": 1, ".folder/x": 1}),
}


def test_what_is_not_searched_of_a_long_line_is_said(tmp_path: Path, plain: None) -> None:
    tree(tmp_path, {"long": "x" * 1_000_000 + " needle\n", "other": "nothing\n"})
    result = call(tmp_path, "grep", {"pattern": "needle"})
    assert str(result.content).splitlines() == [
        "No matches.",
        f"(skipped (the rest of lines of more than 1,000,000 characters): {tmp_path}/long)",
    ]
    assert "skipped" not in str(
        call(tmp_path, "grep", {"pattern": "nothing", "path": "other"}).content
    )


@pytest.mark.parametrize("case", IGNORING)
def test_what_gitignore_names_is_skipped(tmp_path: Path, engine: str, case: str) -> None:
    rules, files = IGNORING[case]
    tree(tmp_path, dict.fromkeys(files, "one\n") | {".gitignore": rules})
    wanted = sorted(name for name, found in files.items() if found)
    assert sorted(names(tmp_path)) == wanted
    assert globbed(tmp_path, "**/*") == sorted([".gitignore", *wanted])


def test_nested_gitignore_files_hold_below_their_folder(tmp_path: Path, engine: str) -> None:
    tree(
        tmp_path,
        dict.fromkeys(["a.txt", "n/a.txt", "n/b.txt", "n/m/b.txt", "n/x.log", "n/sub/own"], "one\n")
        | {".gitignore": "*.log\n", "n/.gitignore": "*.txt\n!a.txt\n!x.log\n/own\n"},
    )
    assert names(tmp_path) == ["a.txt", "n/a.txt", "n/sub/own", "n/x.log"]
    assert names(tmp_path, path="n") == ["n/a.txt", "n/sub/own", "n/x.log"]
    assert names(tmp_path, path="n/m") == []
    assert globbed(tmp_path, "*.txt", path="n") == ["n/a.txt"]


def test_gitignore_files_above_hold_up_to_the_repositorys_top(tmp_path: Path, engine: str) -> None:
    """A ~/.gitignore that names everything, for the sake of dotfiles, must not blind us in a repository below."""
    ws = tmp_path / "home" / "repo" / "sub"
    tree(
        tmp_path,
        {
            "home/.gitignore": "*\n",
            "home/repo/.gitignore": "*.log\nsub/x/\n",
            "home/repo/.git/HEAD": "",
            "home/repo/.git/info/exclude": "private\n",
            "home/repo/sub/a": "one\n",
            "home/repo/sub/b.log": "one\n",
            "home/repo/sub/x/c": "one\n",
            "home/repo/sub/private": "one\n",
        },
    )
    assert names(ws) == ["a"]
    assert globbed(ws, "*") == ["a"]
    shutil.rmtree(tmp_path / "home" / "repo" / ".git")
    assert names(ws) == [
        "a",
        "b.log",
        "private",
        "x/c",
    ]  # no repository: only what is in the workspace counts


def test_the_settings_of_the_person_and_of_ripgrep_do_not_count(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ws = tree(tmp_path / "ws", {"a.txt": "one\n", ".ignore": "*", ".git/HEAD": ""})
    tree(tmp_path, {"config/git/ignore": "*", "rc": "--invert-match\n"})
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("RIPGREP_CONFIG_PATH", str(tmp_path / "rc"))
    assert names(ws) == ["a.txt"]


@pytest.mark.case("FIL-28")
def test_binary_files_are_skipped(tmp_path: Path, engine: str) -> None:
    tree(
        tmp_path,
        {
            "bin": b"one\0two\none\n",
            "late": b"one\n" + b"x\n" * 10_000 + b"\0\n",
            "text": "one\n",
            "empty": "",
            "bomb.gz": b"\x1f\x8b\x08\0\0\0\0\0\0\3one",
        },
    )
    assert names(tmp_path) == ["text"]
    result = call(tmp_path, "grep", {"pattern": "one", "path": "bin"})
    assert str(result.content).startswith("No matches.") and "binary file" in notes(result)


def test_the_git_folder_is_skipped_wherever_it_is(tmp_path: Path, engine: str) -> None:
    tree(
        tmp_path,
        dict.fromkeys(
            [".git/config", "sub/.git/config", "sub/.git/x/y", ".github/f", "worktree/f"], "one\n"
        ),
    )
    (tmp_path / "worktree" / ".git").write_text("one\n")
    assert names(tmp_path) == [".github/f", "worktree/f"]
    assert names(tmp_path, glob="**/.git/**") == []


# ---- grep: what is no file -------------------------------------------------------------------------------


@pytest.mark.case("FIL-09")
@pytest.mark.parametrize(
    ("kind", "word"),
    [("fifo", "neither a regular file nor"), ("socket", "neither"), ("nothing", "No such file")],
)
def test_what_is_no_file_is_refused_at_once(
    tmp_path: Path, engine: str, kind: str, word: str
) -> None:
    """FIL-09, FIL-10"""
    with special_files(tmp_path), promptly():
        result = call(tmp_path, "grep", {"pattern": "one", "path": kind})
    assert result.is_error and word in str(result.content)


@pytest.mark.parametrize("path", ["/dev/zero", "/proc/self/environ", "/sys/kernel"])
def test_devices_and_process_files_are_refused(tmp_path: Path, engine: str, path: str) -> None:
    """FIL-10"""
    with promptly():
        assert call(tmp_path, "grep", {"pattern": "one", "path": path}).is_error


@contextlib.contextmanager
def special_files(folder: Path) -> Iterator[None]:
    """A tree of traps: none of them holds up a search, and none leads out of the folder."""
    tree(folder, {"real": "one\n", "sub/real": "one\n"})
    os.mkfifo(folder / "fifo")
    os.mkfifo(os.fsencode(folder) + b"/fifo\xff")
    (folder / "loop").symlink_to(folder)
    (folder / "self").symlink_to("self")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "link").symlink_to("real")
    (folder / "sub" / "up").symlink_to("..")
    closed = folder / "closed"
    closed.mkdir()
    (closed / "f").write_text("one\n")
    if not is_root:
        closed.chmod(0)
    here = os.getcwd()
    with socket.socket(socket.AF_UNIX) as listening:
        os.chdir(folder)  # the address of a socket is short
        try:
            listening.bind("socket")
        finally:
            os.chdir(here)
        yield
    closed.chmod(0o700)


@pytest.mark.case("FIL-11")
def test_a_tree_of_traps_is_searched_to_its_end(tmp_path: Path, engine: str, mark: str) -> None:
    """FIL-11"""
    with special_files(tmp_path), promptly(5):
        found = names(tmp_path)
        result = call(tmp_path, "grep", {"pattern": "one"})
    assert [name for name in found if not name.startswith("closed")] == ["real", "sub/real"]
    assert "Traceback" not in str(result.content)
    if engine == "our own":
        said = notes(result)  # a long list of long paths is cut, the socket's may be behind that
        assert [
            name for name in ("fifo", "\\udcff", "self", "dangling") if name not in said
        ] == [], said


@pytest.mark.case("FIL-11")
def test_a_tree_of_traps_is_listed_to_its_end(tmp_path: Path) -> None:
    """FIL-11"""
    with special_files(tmp_path), promptly(5):
        result = call(tmp_path, "glob", {"pattern": "**"})
    found = [line for line in str(result.content).splitlines() if not line.startswith("(")]
    assert sorted(name for name in found if not name.startswith("closed")) == [
        "link",
        "real",
        "sub/real",
    ]
    assert all(
        f"(skipped {tmp_path}/{name}" in notes(result)
        for name in ("fifo", "socket", "self", "dangling", "loop")
    )
    assert is_root or "closed" in notes(result)


@pytest.mark.skipif(is_root, reason="nothing is closed to root")
def test_a_folder_that_is_closed_to_us_is_named(tmp_path: Path, engine: str) -> None:
    with special_files(tmp_path):
        assert "closed" in notes(call(tmp_path, "grep", {"pattern": "one"}))


def test_a_link_does_not_lead_out_of_the_workspace(tmp_path: Path, engine: str) -> None:
    ws = tree(tmp_path / "ws", {"real": "one\n"})
    tree(tmp_path, {"secret": "one secret\n", "out/secret": "one secret\n"})
    (ws / "l").symlink_to(tmp_path / "secret")
    (ws / "d").symlink_to(tmp_path / "out")
    assert names(ws) == ["real"]
    for path in ("l", "d", "..", str(tmp_path / "out")):
        hooks = Asking()
        with serve(
            Reply(calls=[("grep", {"pattern": "one", "path": path})]), Reply("Done.")
        ) as server:
            ask(server, tools=Toolset([grep], cwd=ws), hooks=hooks)
            assert "secret\n" not in server.requests[-1]["messages"][-1]["content"]
        assert hooks.asked and hooks.asked[0].startswith(str(tmp_path)), path


class Asking(Hooks):
    """Notes what leave is asked for; the answer is no."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> None:
        ctx.authorize = self.refuse

    def refuse(
        self, ctx: ToolContext, permission: str, patterns: Sequence[str], detail: str
    ) -> None:
        self.asked.append(", ".join(patterns))
        raise DeniedError("no")


ODD = [
    "new\nline",
    "new\nother\nline",
    "-rf",
    "[link=x]",
    "a:1:b",
    "n" * 255,
    "*",
    "'\"",
    "\x1b[31mred",
    "tab\there",
]


def test_odd_names_come_out_in_one_line_and_can_be_sent(tmp_path: Path, engine: str) -> None:
    """FIL-25"""
    tree(tmp_path, dict.fromkeys(ODD, "0\none\n2\n3\n4\n5\none\n"))
    os.mkdir(os.fsencode(tmp_path) + b"/d\xff")
    with open(os.fsencode(tmp_path) + b"/d\xff/f\xfe", "w") as file:
        file.write("0\none\n2\n3\n4\n5\none\n")
    shown = sorted(
        [
            *(
                name.replace("\n", "\\n").replace("\x1b", "\\x1b").replace("\t", "\\t")
                for name in ODD
            ),
            "d\\udcff/f\\udcfe",
        ]
    )
    for context in (0, 1):
        lines = grepped(tmp_path, "one", context=context)
        assert len(lines) == len(shown) * (5 if context else 2)
        assert sorted({re.split(r"[:-]\d[:-](?:one|\d)$", line)[0] for line in lines}) == shown
        assert notes(call(tmp_path, "grep", {"pattern": "one", "context": context})) == ""
    assert globbed(tmp_path, "*") == shown
    with serve(
        Reply(calls=[("grep", {"pattern": "one"}), ("glob", {"pattern": "*"})]), Reply("Done.")
    ) as server:
        ask(server, tools=Toolset([grep, glob], cwd=tmp_path))
        first, second = server.requests[-1]["messages"][-2:]
    assert (
        "d\\udcff/f\\udcfe:2:one" in first["content"] and "new\\nother\\nline" in second["content"]
    )


@pytest.mark.parametrize("name", [name for name in ODD if "*" not in name])
def test_an_odd_name_can_be_named(tmp_path: Path, engine: str, name: str) -> None:
    tree(tmp_path, {name: "one\n"})
    assert len(grepped(tmp_path, "one", path=name)) == 1


# ---- grep: patterns that are wrong or never end ----------------------------------------------------------


@pytest.mark.parametrize("pattern", ["(", "[a", "*", "a{2,1}", r"\p{Nonsense}"])
def test_a_pattern_that_is_none_is_said(tmp_path: Path, engine: str, pattern: str) -> None:
    tree(tmp_path, {"f": "one\n"})
    result = call(tmp_path, "grep", {"pattern": pattern})
    assert result.is_error and re.search("regex|PCRE2", str(result.content)), result.content
    assert "Traceback" not in str(result.content) and len(str(result.content)) < 2000


@pytest.mark.parametrize("pattern", ["", "a\0b"])
def test_an_empty_pattern_is_refused(tmp_path: Path, engine: str, pattern: str) -> None:
    result = call(tmp_path, "grep", {"pattern": pattern})
    assert result.is_error and "empty or holds a NUL" in str(result.content)


@pytest.mark.case("FIL-27")
def test_a_pattern_that_takes_for_ever_ends_at_an_abort(
    tmp_path: Path, plain: None, mark: str
) -> None:
    """FIL-27"""
    tree(tmp_path, {"f": "a" * 40 + "!"})
    abort, set_at = Abort(), list[float]()

    def set_it() -> None:
        until(lambda: running(mark, sys.executable))
        set_at.append(time.monotonic())
        abort.set()

    thread = threading.Thread(target=set_it)
    thread.start()
    with pytest.raises(Aborted):
        call(tmp_path, "grep", {"pattern": "(a+)+$"}, abort)
    ended = time.monotonic()
    thread.join()
    assert ended - set_at[0] < 2


@pytest.mark.case("FIL-27")
def test_a_pattern_that_takes_for_ever_ends_at_the_time_limit(
    tmp_path: Path, plain: None, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FIL-27; the limit is 30 s, which is not waited for here."""
    monkeypatch.setattr(search, "TIMEOUT", 1)
    tree(tmp_path, {"f": "a" * 40 + "!"})
    with promptly(5):
        result = call(tmp_path, "grep", {"pattern": "(a+)+$"})
    assert result.is_error and "took more than 1 s" in str(result.content)


@needs_ripgrep
def test_a_pattern_that_takes_others_for_ever_is_nothing_to_ripgrep(tmp_path: Path) -> None:
    tree(tmp_path, {"f": "a" * 40 + "!"})
    with promptly():
        assert grepped(tmp_path, "(a+)+$") == []
        call(tmp_path, "grep", {"pattern": r"(a+)+\1$"})  # the other engine: it gives up by itself


# ---- glob ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.py", ["a.py", "src/b.py", "src/deep/er/c.py"]),
        ("a.py", ["a.py"]),
        ("c.py", ["src/deep/er/c.py"]),
        ("src/*.py", ["src/b.py"]),
        ("src/**/*.py", ["src/b.py", "src/deep/er/c.py"]),
        ("**/*.py", ["a.py", "src/b.py", "src/deep/er/c.py"]),
        ("**/er/**", ["src/deep/er/c.py"]),
        ("src/**", ["src/b.py", "src/d.ts", "src/deep/er/c.py"]),
        ("src/*/er/*", ["src/deep/er/c.py"]),
        ("*/deep/*", []),
        ("**/deep/**/*.py", ["src/deep/er/c.py"]),
        ("*.{ts,md}", ["README.md", "src/d.ts"]),
        ("{src,lib}/*.{py,ts}", ["src/b.py", "src/d.ts"]),
        ("{README.md,src/{b.py,d.ts}}", ["README.md", "src/b.py", "src/d.ts"]),
        ("[ab].py", ["a.py", "src/b.py"]),
        ("[a-b].py", ["a.py", "src/b.py"]),
        ("[!a-b].py", ["src/deep/er/c.py"]),
        ("[^a].py", ["src/b.py", "src/deep/er/c.py"]),
        ("?.py", ["a.py", "src/b.py", "src/deep/er/c.py"]),
        ("??.py", []),
        ("*a*", ["a.py"]),
        ("*E*M*.md", ["README.md"]),
        ("./src/*.py", ["src/b.py"]),
        (".hidden", [".hidden"]),
        ("*.PY", []),
        ("[", []),
        ("README.md/", []),
        ("src", []),
    ],
)
def test_what_a_glob_finds(tmp_path: Path, pattern: str, found: list[str]) -> None:
    tree(
        tmp_path,
        dict.fromkeys(
            [
                "a.py",
                "src/b.py",
                "src/d.ts",
                "src/deep/er/c.py",
                "README.md",
                ".hidden",
                ".git/a.py",
                "empty/",
            ],
            "",
        ),
    )
    assert globbed(tmp_path, pattern) == found


def test_a_glob_in_a_folder_is_seen_from_there(tmp_path: Path) -> None:
    tree(tmp_path, dict.fromkeys(["src/a.py", "src/sub/b.py", "c.py"], ""))
    assert globbed(tmp_path, "*.py", path="src") == ["src/a.py", "src/sub/b.py"]
    assert globbed(tmp_path, "sub/*.py", path="src") == ["src/sub/b.py"]
    assert "is not a folder" in str(
        call(tmp_path, "glob", {"pattern": "*", "path": "c.py"}).content
    )
    assert "is not a folder" in str(
        call(tmp_path, "glob", {"pattern": "*", "path": "absent"}).content
    )


def test_the_newest_comes_first(tmp_path: Path) -> None:
    tree(tmp_path, dict.fromkeys(["old", "new", "middle"], ""))
    for age, name in enumerate(["new", "middle", "old"]):
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    assert call(tmp_path, "glob", {"pattern": "*"}).content == "new\nmiddle\nold"


def test_two_hundred_files_are_shown_and_all_are_counted(tmp_path: Path) -> None:
    for number in range(250):
        (tmp_path / f"{number:03}").touch()
        os.utime(tmp_path / f"{number:03}", (1e9 + number, 1e9 + number))
    lines = str(call(tmp_path, "glob", {"pattern": "*"}).content).splitlines()
    assert (lines[0], lines[199], len(lines)) == ("249", "050", 201)
    assert lines[200] == "(200 of 250 files, the newest; narrow the pattern)"


def test_no_file_is_no_error(tmp_path: Path) -> None:
    assert call(tmp_path, "glob", {"pattern": "*"}).content == "No files found."


def test_a_glob_that_is_none_is_said(tmp_path: Path, engine: str) -> None:
    tree(tmp_path, {"f": "one\n"})
    assert "is no pattern" in str(call(tmp_path, "glob", {"pattern": "[z-a]"}).content)
    assert "is no glob" in str(call(tmp_path, "grep", {"pattern": "one", "glob": "[z-a]"}).content)


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("*a" * 30 + "*b", "a" * 255),
        ("**/a/" * 12 + "b", "a/" * 2000 + "c"),
        ("**/" * 60 + "x", "a/" * 2000 + "c"),
        ("{a,b}" * 30, "a" * 30),
        ("{a,{b,{c,{d,e}}}}" * 8, "a" * 8),
    ],
)
def test_no_glob_takes_for_ever(pattern: str, path: str) -> None:
    """They come from models, and from the .gitignore files of strangers; nothing could stop them in our own process."""
    with promptly():
        searcher.Glob(pattern).match(path)


def test_an_abort_ends_a_glob(tmp_path: Path) -> None:
    tree(tmp_path, {"f": ""})
    abort = Abort()
    abort.set()
    with pytest.raises(Aborted):
        call(tmp_path, "glob", {"pattern": "*"}, abort)


def test_a_deep_tree_is_walked(tmp_path: Path, engine: str) -> None:
    """Deeper than Python's recursion goes."""
    here = os.getcwd()
    try:
        os.chdir(tmp_path)
        for _ in range(1200):
            os.mkdir("d")
            os.chdir("d")
        Path("f").write_text("one\n")
        os.chdir(here)
        assert globbed(tmp_path, "f") == ["d/" * 1200 + "f"]
        assert names(tmp_path) == ["d/" * 1200 + "f"]
    finally:
        os.chdir(here)
        subprocess.run(["/bin/rm", "-rf", str(tmp_path / "d")], check=True)


@pytest.mark.parametrize("kind", ["a pipe", "a link to a device", "one endless rule"])
def test_a_strangers_gitignore_holds_nothing_up(tmp_path: Path, kind: str) -> None:
    (tmp_path / "f.py").write_text("one\n")
    ignore = tmp_path / ".gitignore"
    if kind == "a pipe":
        os.mkfifo(ignore)
    elif kind == "a link to a device":
        ignore.symlink_to("/dev/zero")
    else:
        ignore.write_text("{a}" * 100_000 + "\n*.log\n")
        (tmp_path / "x.log").write_text("one\n")
    toolset = Toolset([glob], cwd=tmp_path)
    call = ToolCall("1", "glob", {"pattern": "*"})
    with promptly(10):
        _, result = drive(toolset.run(call, toolset.context(call, Abort())))
    assert "f.py" in result.content and "x.log" not in result.content
