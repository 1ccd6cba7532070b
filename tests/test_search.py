"""grep and glob, with what they may find on PATH: ripgrep, git, or nothing."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from coder.tools.search import glob, grep
from tests.terminal import promptly
from tests.workspace import Workspace, tree

PROGRAMS = {"ripgrep": "rg", "git": "git", "none": ""}


@pytest.fixture(params=PROGRAMS)
def engine(request: Any, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any) -> str:
    """A machine with one of the programs alone."""
    folder = tmp_path_factory.mktemp("bin")
    program = PROGRAMS[request.param]
    if program and not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    if program:
        (folder / program).symlink_to(str(shutil.which(program)))
    monkeypatch.setenv("PATH", str(folder))
    return str(request.param)


def repository(folder: Path) -> Path:
    """Make a repository of a folder."""
    subprocess.run(
        [
            shutil.which("git", path=os.defpath) or "git",
            "init",
            "-q",
            folder,
        ],
        check=True,
    )
    return folder


def text(folder: Path, tool: str, **arguments: Any) -> str:
    """The text of a call that goes well."""
    return Workspace(folder, grep, glob)(tool, **arguments)


def fails(folder: Path, tool: str, **arguments: Any) -> str:
    return Workspace(folder, grep, glob).fails(tool, **arguments)


def grepped(folder: Path, pattern: str, **arguments: Any) -> list[str]:
    """The lines of a grep that goes well, each with its file's name before it, without
    remarks."""
    found = list[str]()
    name = ""
    for line in text(folder, "grep", pattern=pattern, **arguments).splitlines():
        if line.startswith(("(", "No matches")):
            continue
        if not line:
            name = ""
        elif not name:
            name = line
        elif line != "--":
            mark = re.sub(r"\d+", "", line, count=1)[0]
            found.append(f"{name}{mark}{line}")
    return found


def names(folder: Path, pattern: str = "one", **arguments: Any) -> list[str]:
    """The files in which something was found; the order of grep's own walk is any."""
    return sorted({line.split(":")[0] for line in grepped(folder, pattern, **arguments)})


def globbed(folder: Path, pattern: str, **arguments: Any) -> list[str]:
    """What a glob finds, in the order of the names."""
    found = text(folder, "glob", pattern=pattern, **arguments)
    return [] if found.startswith("No files found") else sorted(found.splitlines())


# ---- grep: lines ----------------------------------------------------------------------------


def test_a_match_is_path_number_and_line_in_order_of_paths(tmp_path: Path, engine: str) -> None:
    files = {"a.py": "import os\n\n    x = os.sep\n", "sub/b.py": "os", "c.txt": "nothing\n"}
    tree(tmp_path, files)
    found = grepped(tmp_path, r"\bos\b")
    assert found == ["a.py:1:import os", "a.py:3:    x = os.sep", "sub/b.py:1:os"]
    shown = "a.py\n1:import os\n3:    x = os.sep\n\nsub/b.py\n1:os"
    assert text(tmp_path, "grep", pattern=r"\bos\b") == shown, "a file's name is shown once"
    nothing = "No matches (ignored and secret files are skipped)."
    assert text(tmp_path, "grep", pattern="absent") == nothing


def test_context_is_marked_and_lines_of_any_ending_and_encoding_are_found(
    tmp_path: Path, engine: str
) -> None:
    tree(
        tmp_path,
        {
            "f": "".join(f"{n}\n" for n in range(1, 13)),
            "g": "3\n",
        },
    )
    lines = ["f-2-2", "f:3:3", "f-4-4", "f:5:5", "f-6-6", "f-11-11", "f:12:12", "g:1:3"]
    assert sorted(grepped(tmp_path, "^(3|5|12)$", context=1)) == sorted(lines)
    tree(tmp_path, {"crlf": "one\r\ntwo\r\n", "latin": b"caf\xe9 one\n"})
    assert grepped(tmp_path, "^one$", context=1) == ["crlf:1:one", "crlf-2-two"]
    assert grepped(tmp_path, "caf") == ["latin:1:caf\ufffd one"]


@pytest.mark.parametrize(
    ("pattern", "options", "found"),
    [
        ("A.C", "", "2:A.C"),
        ("a.c", "ignore_case", "1:abc 2:A.C 4:xabcx"),
        ("A.C", "literal", "2:A.C"),
        ("a.c", "literal ignore_case", "2:A.C"),
        ("(", "literal", "3:f(x)"),
        ("^abc$", "", "1:abc"),
        ("-x", "", "5:-x"),
        ("--context=3", "", ""),
        ("x(?=a)", "", "4:xabcx"),
        (r"(.)abc\1", "", "4:xabcx"),
        (r"\d{3}_\w", "", "6:123_é"),
        ("^caf.$", "", "7:café"),
        ("école", "ignore_case", "8:ÉCOLE"),
    ],
)
def test_what_a_pattern_finds(
    tmp_path: Path, engine: str, pattern: str, options: str, found: str
) -> None:
    tree(tmp_path, {"f": "abc\nA.C\nf(x)\nxabcx\n-x\n123_é\ncafé\nÉCOLE\n"})
    for path in (".", "f"):
        lines = grepped(
            tmp_path,
            pattern,
            path=path,
            **dict.fromkeys(options.split(), True),
        )
        assert lines == [f"f:{line}" for line in found.split()]


@pytest.mark.parametrize("pattern", ["(", "[a", r"\p{Nonsense}"])
def test_a_pattern_that_is_none_is_reported(tmp_path: Path, engine: str, pattern: str) -> None:
    tree(tmp_path, {"f": "one\n"})
    said = fails(tmp_path, "grep", pattern=pattern)
    assert re.search("regex|PCRE2|fatal|grep:", said)
    assert "Traceback" not in said
    assert len(said) < 2000
    for none in ("", "a\0b"):
        assert "empty or holds a NUL" in fails(tmp_path, "grep", pattern=none)


# ---- grep: limits ---------------------------------------------------------------------------


def test_a_hundred_lines_are_shown_or_as_many_as_are_asked_for(tmp_path: Path, engine: str) -> None:
    tree(tmp_path, {"f": "one\n" * 150})
    lines = text(tmp_path, "grep", pattern="one").splitlines()
    more = "(100 lines shown of 150 matches in 1 file; narrow the pattern, the path or the glob)"
    assert lines[0] == "f"
    assert lines[100:] == ["100:one", more]
    assert len(grepped(tmp_path, "one", limit=120)) == 120
    assert len(grepped(tmp_path, "one", limit=0)) == 1
    exact = text(tmp_path, "grep", pattern="one", limit=150, path="f")
    assert len(exact.splitlines()) == 151


def test_of_a_long_line_the_match_is_shown(tmp_path: Path, engine: str) -> None:
    lines = [
        "one" + "x" * 5000,
        "é" * 5000 + "one",
        "𝄞" * 600 + "one𝄞" * 600,
    ]
    tree(tmp_path, {"f": "\n".join(lines)})
    lines = grepped(tmp_path, "one")
    assert [line[:6] for line in lines] == ["f:1:on", "f:2:… ", "f:3:… "]
    assert all("one" in line and line.endswith(" … (line cut)") for line in lines)
    assert all(500 <= len(line) <= 530 for line in lines)


@pytest.mark.case("FIL-28")
def test_a_huge_file_is_searched_in_bounded_memory(tmp_path: Path, engine: str) -> None:
    """A search that has enough counts for a second at most; one line of 20 MB is kept in part."""
    tree(tmp_path, {"many": "one\n" * 1_000_000, "wide": b"one" + b"x" * 20_000_000 + b"\n"})
    with promptly(60):
        assert len(grepped(tmp_path, "one", path="many", limit=5)) == 5
        assert [len(line) for line in grepped(tmp_path, "one", path="wide")] == [520]


@pytest.mark.case("FIL-27")
@pytest.mark.parametrize("pattern", ["(a+)+$", r"(a+)+\1$"])
def test_a_pattern_that_would_take_for_ever_ends(tmp_path: Path, engine: str, pattern: str) -> None:
    """Each program limits it by itself; the walk is stopped with the search, after 30 s."""
    if engine == "none":
        pytest.skip("it would take 30 s")
    tree(tmp_path, {"f": "a" * 40 + "!"})
    with promptly():
        result = Workspace(tmp_path, grep).call("grep", pattern=pattern)
        assert "a!" not in str(result.content)


def test_a_cut_search_tells_the_total_and_the_files_with_most(tmp_path: Path, engine: str) -> None:
    files = {f"{name}.txt": "one\n" * count for name, count in zip("abcde", (2, 90, 4, 30, 1))}
    tree(tmp_path, files)
    *lines, note = text(
        tmp_path,
        "grep",
        pattern="one",
        limit=20,
    ).splitlines()
    assert len([line for line in lines if line.endswith(":one")]) == 20
    most = "the most: b.txt 90, d.txt 30, c.txt 4"
    narrow = "narrow the pattern, the path or the glob"
    assert note == f"(20 lines shown of 127 matches in 5 files; {most}; {narrow})"


def test_groups_of_context_are_parted(tmp_path: Path, engine: str) -> None:
    tree(
        tmp_path,
        {
            "f": "".join(f"{n}\n" for n in range(1, 13)),
            ".env": "5\n",
        },
    )
    lines = text(tmp_path, "grep", pattern="^(2|9)$", context=1).splitlines()
    assert lines == ["f", "1-1", "2:2", "3-3", "--", "8-8", "9:9", "10-10"]
    assert "--" not in text(tmp_path, "grep", pattern="^(2|9)$").splitlines()


@pytest.mark.parametrize("pattern", [r"one.*\n.*two", r"one\\\ntwo", "one\ntwo"])
def test_a_pattern_over_two_lines_gets_the_way(tmp_path: Path, engine: str, pattern: str) -> None:
    tree(tmp_path, {"f": "one\ntwo\n", "latin1": b"caf\xe9 one\n"})
    said = fails(tmp_path, "grep", pattern=pattern)
    assert said == "Error: a match lies within one line: search for one of the lines, with context"


def test_no_line_end_is_meant_by_a_set_a_backslash_or_plain_text(
    tmp_path: Path, engine: str
) -> None:
    tree(tmp_path, {"f": "one two\nC:\\new\n"})
    assert grepped(tmp_path, r"one[^\n]*two") == ["f:1:one two"]
    assert grepped(tmp_path, r"C:\\new") == ["f:2:C:\\new"]
    assert grepped(tmp_path, r"C:\new", literal=True) == ["f:2:C:\\new"]


@pytest.mark.parametrize("engine", ["ripgrep"], indirect=True)
def test_a_file_that_cannot_be_decoded_is_a_note_and_no_error(tmp_path: Path, engine: str) -> None:
    tree(tmp_path, {"latin1": b"caf\xe9 one\n", "f": "two\n"})
    note = "(latin1 was not searched: it is not UTF-8)"
    assert note in text(tmp_path, "grep", pattern="(?<=x)one")
    assert note in text(tmp_path, "grep", pattern="(?<=t)wo")


def test_what_is_searched_for_in_other_ways_gets_the_way(tmp_path: Path, engine: str) -> None:
    tree(tmp_path, {"f": "one\n"})
    nothing = text(tmp_path, "grep", pattern=r"three\|two")
    assert nothing == "No matches. Here | is written without a backslash."
    for literal in ("f(", "[a"):
        assert fails(tmp_path, "grep", pattern=literal).endswith(
            "Set literal to search for plain text."
        )


# ---- which files ----------------------------------------------------------------------------

GLOBS = [
    ("*.py", ["a.py", "src/b.py", "src/deep/er/c.py"]),
    ("src/*.py", ["src/b.py"]),
    ("src/**/*.py", ["src/b.py", "src/deep/er/c.py"]),
    ("**/er/**", ["src/deep/er/c.py"]),
    ("src/**", ["src/b.py", "src/d.ts", "src/deep/er/c.py"]),
    ("src/", ["src/b.py", "src/d.ts", "src/deep/er/c.py"]),
    ("*/deep/*", []),
    ("**/deep/**/*.py", ["src/deep/er/c.py"]),
    ("*.{ts,md}", ["-README.md", "src/d.ts"]),
    ("{src,lib}/*.{py,ts}", ["src/b.py", "src/d.ts"]),
    ("{-README.md,src/{b.py,d.ts}}", ["-README.md", "src/b.py", "src/d.ts"]),
    ("[^a].py", ["src/b.py", "src/deep/er/c.py"]),
    ("?.py", ["a.py", "src/b.py", "src/deep/er/c.py"]),
    ("!*.py", ["-README.md", ".gitignore", ".hidden", "src/d.ts"]),
    ("*.PY", []),
    ("[", []),
]


@pytest.mark.parametrize(("pattern", "found"), GLOBS)
def test_a_glob_chooses_files(tmp_path: Path, engine: str, pattern: str, found: list[str]) -> None:
    kept = "a.py src/b.py src/d.ts src/deep/er/c.py -README.md .hidden .git/a.py node_modules/a.py"
    files = dict.fromkeys(kept.split(), "one\n") | {".gitignore": "node_modules/\n# one\n"}
    repository(tree(tmp_path, files))
    assert globbed(tmp_path, pattern) == found
    assert names(tmp_path, glob=pattern) == found


def test_a_glob_is_seen_from_the_folder_or_from_the_workspace(tmp_path: Path, engine: str) -> None:
    tree(tmp_path, dict.fromkeys(["src/a/x.py", "src/b/x.py", "a/x.py"], "one\n"))
    assert names(tmp_path, path="src", glob="a/*.py") == ["src/a/x.py"]
    assert names(tmp_path, path="src", glob="src/a/*.py") == ["src/a/x.py"]
    assert globbed(tmp_path, "a/*.py", path="src") == ["src/a/x.py"]
    for path in ("a/x.py", "absent"):
        assert "not a folder" in fails(tmp_path, "glob", pattern="*", path=path)


def test_what_gitignore_names_is_skipped_unless_it_is_named(tmp_path: Path, engine: str) -> None:
    """Also by files above, up to the repository's top and not beyond."""
    if engine == "none":
        pytest.skip("the walk leaves out what is installed, and no more")
    ignoring = {
        ".gitignore": "*\n",
        "repo/.gitignore": "*.log\nsub/x/\nout/\n",
        "repo/sub/.gitignore": "!kept.log\n",
    }
    files = ["a", "b.log", "sub/kept.log", "sub/x/c", "sub/own", "out/f"]
    tree(tmp_path, ignoring | {f"repo/{name}": "one\n" for name in files})
    repo = tree(repository(tmp_path / "repo"), {".git/info/exclude": "own\n"})
    assert names(repo) == globbed(repo, "[!.]*") == ["a", "sub/kept.log"]
    assert names(repo / "sub") == globbed(repo / "sub", "[!.]*") == ["kept.log"]
    assert names(repo, path="b.log") == ["b.log"]
    if engine == "ripgrep":
        assert names(repo, path="out") == globbed(repo, "*", path="out") == ["out/f"]


@pytest.mark.parametrize("engine", ["git"], indirect=True)
def test_a_repositorys_configuration_starts_and_leads_nowhere(tmp_path: Path, engine: str) -> None:
    tree(tmp_path, {"outside/private": "one\n", "run.sh": f"#!/bin/sh\n>{tmp_path}/ran\n"})
    (tmp_path / "run.sh").chmod(0o700)
    ws = repository(tree(tmp_path / "ws", {"a": "one\n"}))
    with open(ws / ".git" / "config", "a") as config:
        run = f"{tmp_path}/run.sh"
        config.write(f"worktree = {tmp_path}/outside\nfsmonitor = {run}\n[core]\npager = {run}\n")
    assert names(ws) == globbed(ws, "*") == ["a"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.case("FIL-28")
def test_binary_files_are_skipped(tmp_path: Path, engine: str) -> None:
    files = {"bin": b"one\0two\none\n", "bomb.gz": b"\x1f\x8b\x08\0\0\0\0\0\0\3one"}
    tree(tmp_path, files | {"text": "one\n", "empty": ""})
    assert names(tmp_path) == ["text"]
    assert not names(tmp_path, path="bin")


def test_without_both_the_walk_skips_venvs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    ws = tree(
        tmp_path / "ws",
        dict.fromkeys(["a", "s/b", ".venv/f", "s/node_modules/f"], "one\n"),
    )
    assert names(ws) == globbed(ws, "*") == ["a", "s/b"]


@pytest.mark.parametrize("place", [".gitignore", "ws/.gitignore", "ws/.ignore"])
def test_a_pipe_in_the_place_of_the_rules_holds_no_search_up(
    tmp_path: Path, engine: str, place: str
) -> None:
    ws = tree(
        repository(tmp_path) / "ws",
        {"a": "one\n", "s/b": "one\n", "venv/c": "one\n"},
    )
    os.mkfifo(tmp_path / place)
    with promptly(20):
        assert names(ws) == globbed(ws, "[abc]") == ["a", "s/b"]


# ---- what is no file, and what leads out ----------------------------------------------------


@pytest.mark.case("FIL-09", "FIL-10", "FIL-11")
def test_no_trap_holds_a_search_up_or_leads_out(tmp_path: Path, engine: str) -> None:
    links = {
        "loop": ".",
        "self": "self",
        "dangling": "nowhere",
        "link": "real",
        "sub/up": "..",
    }
    tree(tmp_path, {"real": "one\n", "sub/real": "one\n"}, links)
    os.mkfifo(tmp_path / "fifo")
    os.mkfifo(os.fsencode(tmp_path) + b"/fifo\xff")
    refused = {"fifo": "not a regular file", "socket": "cannot be opened", "/dev/zero": "not read"}
    with socket.socket(socket.AF_UNIX) as listening, promptly():
        with contextlib.chdir(tmp_path):  # the address of a socket is short
            listening.bind("socket")
        assert names(tmp_path) == names(tmp_path, "^") == globbed(tmp_path, "**")
        assert globbed(tmp_path, "**") == ["real", "sub/real"]
        for path, why in (refused | {"no": "there is no file"}).items():
            assert why in fails(tmp_path, "grep", pattern="one", path=path)


@pytest.mark.parametrize("tool", ["grep", "glob"])
def test_a_folder_become_a_link_is_not_searched(tmp_path: Path, engine: str, tool: str) -> None:
    def swap() -> None:
        (tmp_path / "outside").rename(tmp_path / "moved")
        (tmp_path / "outside").symlink_to("private")

    tree(tmp_path, {"ws/": "", "outside/sub/real": "one\n", "private/sub/hidden": "one\n"})
    ws = Workspace(tmp_path / "ws", grep, glob)
    ws.when_asked = swap
    assert "Not a directory" in ws.fails(tool, pattern="*", path="../outside/sub")


ODD = ["-rf", "[link=x]", "a:1:b", "*", "'\"", "\x1b[31mred"]


@pytest.mark.case("FIL-25")
def test_odd_names_come_out_in_one_line_and_can_be_named(tmp_path: Path, engine: str) -> None:
    text = "0\none\n2\n3\n4\n5\none\n"
    tree(tmp_path, dict.fromkeys([*ODD, "n" * 255], text))
    os.mkdir(os.fsencode(tmp_path) + b"/d\xff")
    with open(os.fsencode(tmp_path) + b"/d\xff/f\xfe", "w") as file:
        file.write(text)
    escaped = [name.replace("\x1b", "\\x1b") for name in ODD]
    expected = sorted([*escaped, "n" * 255, "d\\udcff/f\\udcfe"])
    for context in (0, 1):
        lines = grepped(tmp_path, "one", context=context)
        assert len(lines) == len(expected) * (5 if context else 2)
        assert sorted({re.split(r"[:-]\d[:-](?:one|\d)$", line)[0] for line in lines}) == expected
    for name in ODD:
        assert len(grepped(tmp_path, "one", path=name)) == 2
    (tmp_path / "new\nline").touch()
    assert globbed(tmp_path, "*") == sorted([*expected, "new\\nline"])


# ---- glob -----------------------------------------------------------------------------------


def test_the_newest_files_come_first_and_all_are_counted(tmp_path: Path, engine: str) -> None:
    assert text(tmp_path, "glob", pattern="*") == "No files found (ignored files are skipped)."
    for number in range(250):
        (tmp_path / f"{number:03}").touch()
        os.utime(tmp_path / f"{number:03}", (1e9 + number, 1e9 + number))
    lines = text(tmp_path, "glob", pattern="*").splitlines()
    assert lines[0] == "249"
    assert lines[199] == "050"
    assert len(lines) == 201
    assert lines[200] == "(200 of 250 files, the newest; narrow the pattern)"


def test_a_pattern_is_taken_as_seen_from_the_workspace(tmp_path: Path, engine: str) -> None:
    tree(tmp_path, {"src/a.py": "one\n", "src/deep/b.py": "one\n"})
    both = ["src/a.py", "src/deep/b.py"]
    for pattern in ("/src/**/*.py", f"{tmp_path}/src/**/*.py", "src/**/*.py"):
        assert globbed(tmp_path, pattern) == both
    assert globbed(tmp_path, "src/*.py", path="src") == ["src/a.py"]


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("src", "No files found: src is a folder. Use ls, or the pattern src/**."),
        ("termui", "The pattern is a whole name: *termui* finds parts of one."),
        ("*.rs,*.ts", "Several patterns are written {*.rs,*.ts}."),
        ("*.rs", "No files found (ignored files are skipped)."),
    ],
)
def test_a_glob_that_finds_nothing_says_why(tmp_path: Path, pattern: str, says: str) -> None:
    tree(tmp_path, {"src/termui.py": "one\n"})
    assert says in text(tmp_path, "glob", pattern=pattern)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("*a" * 30 + "*b", "a" * 255),
        ("{a,b}" * 30, "a" * 30),
        ("{a,{b,{c,{d,e}}}}" * 8, "a" * 8),
    ],
)
def test_no_glob_takes_for_ever(tmp_path: Path, pattern: str, name: str) -> None:
    tree(tmp_path, {name: "one\n"})
    with promptly():
        assert len(globbed(tmp_path, pattern)) <= 1
