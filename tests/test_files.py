"""Tools as such (schema, arguments, one call), and read, write and ls on real files.

Every test runs the tools as the loop does. What needs a limit, a kill or a bound on memory happens in a child process.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from coder.abort import Abort
from coder.events import Event, Notice, ToolUpdate
from coder.tools.edit import edit
from coder.tools.files import ls, read, write
from coder.tools.workspace import diff
from coder.toolset import ToolContext, Toolset, tool
from coder.types import Aborted, DeniedError, ToolCall, ToolError, ToolResult
from tests.harness import to_become_links
from tests.terminal import promptly

REPOSITORY = Path(__file__).parent.parent


class Workspace:
    """A session with the file tools in a folder; keeps what was asked and what the tools told."""

    def __init__(self, folder: Path, *tools: Any) -> None:
        self.folder = folder
        self.tools = Toolset(tools or [read, write, edit, ls], cwd=folder)
        self.abort = Abort()
        self.events: list[Event] = []
        self.asked: list[tuple[str, str]] = []
        self.when_asked: Callable[[], None] = lambda: None

    def authorize(
        self, ctx: ToolContext, permission: str, patterns: Sequence[str], detail: str
    ) -> None:
        self.asked.append((permission, ", ".join(patterns)))
        self.when_asked()

    def run(self, call: ToolCall) -> ToolResult:
        ctx = self.tools.context(call, self.abort)
        ctx.authorize = self.authorize
        work = self.tools.run(call, ctx)
        while True:
            try:
                self.events.append(next(work))
            except StopIteration as end:
                return end.value

    def __call__(self, name: str, **arguments: Any) -> str:
        """The text of a call that works."""
        result = self.run(ToolCall("call-1", name, arguments))
        assert not result.is_error, result.content
        assert isinstance(result.content, str)
        return result.content

    def fails(self, name: str, **arguments: Any) -> str:
        """The text of a call that does not."""
        result = self.run(ToolCall("call-1", name, arguments))
        assert result.is_error, result.content
        assert isinstance(result.content, str)
        return result.content

    def names(self) -> list[str]:
        return sorted(os.listdir(self.folder))


@pytest.fixture
def ws(tmp_path: Path) -> Workspace:
    folder = tmp_path / "ws"
    folder.mkdir()
    return Workspace(folder)


def within(seconds: float, work: Callable[[], str]) -> str:
    """What `work` gives; fails, rather than hangs, where it takes longer."""
    results: list[str] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, f"failed, or no answer in {seconds} s"
    return results[0]


CHILD = """
import os, resource, sys
from pathlib import Path
from coder.abort import Abort
from coder.toolset import Toolset
from coder.tools.edit import edit
from coder.tools.files import ls, read, write
from coder.types import ToolCall

tools = Toolset([read, write, edit, ls], cwd=sys.argv[1])

def run(name, **arguments):
    call = ToolCall("1", name, arguments)
    work = tools.run(call, tools.context(call, Abort()))
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value

def limit_memory(spare):
    "No more than `spare` bytes over what is mapped now."
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + spare, mapped + spare))
"""


def child(code: str, folder: Path) -> str:
    """What a child process prints that runs `code` after CHILD, in a session of its own."""
    command = [sys.executable, "-c", CHILD + code, folder]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


needs_proc = pytest.mark.skipif(
    not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc"
)


# ---- from a function to a tool ---------------------------------------------------------------------------


@tool
def everything(
    text: str,
    whole: int,
    real: float,
    flag: bool,
    table: dict,
    names: list[str],
    choice: Literal["a", "b"],
    ctx: ToolContext,
    maybe: int | None = None,
    rows: list[list[int]] | None = None,
    size: int = 7,
) -> Any:
    """Take one of each.
    Note: this line is a part of the description.

    Args:
        text: a string
            that goes on here
        whole: an integer
        real: a number
        flag: a boolean
        table: an object
        names: strings
        choice: one of two
        maybe: an integer or nothing
        rows: lists in a list
        size: has a default
    """
    return {
        "text": text,
        "whole": whole,
        "real": real,
        "flag": flag,
        "table": table,
        "names": names,
        "choice": choice,
        "maybe": maybe,
        "rows": rows,
        "size": size,
    }


ONE_OF_EACH = {
    "text": "t",
    "whole": 1,
    "real": 1.5,
    "flag": True,
    "table": {"k": 1},
    "names": ["n"],
    "choice": "a",
}


def test_the_schema_comes_from_the_signature_and_the_docstring() -> None:
    schema = json.loads(json.dumps(everything.schema))["function"]
    assert schema["name"] == "everything"
    properties = schema["parameters"]["properties"]
    assert properties.pop("text") == {"type": "string", "description": "a string that goes on here"}
    assert {
        name: {key: value for key, value in each.items() if key != "description"}
        for name, each in properties.items()
    } == {
        "whole": {"type": "integer"},
        "real": {"type": "number"},
        "flag": {"type": "boolean"},
        "table": {"type": "object"},
        "names": {"type": "array", "items": {"type": "string"}},
        "choice": {"type": "string", "enum": ["a", "b"]},
        "maybe": {"type": "integer"},
        "rows": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
        "size": {"type": "integer"},
    }
    assert properties["choice"]["description"] == "one of two"
    assert schema["parameters"]["required"] == [
        "text",
        "whole",
        "real",
        "flag",
        "table",
        "names",
        "choice",
    ]


def test_the_context_is_hidden_from_the_model_and_filled_in_by_us(ws: Workspace) -> None:
    assert "ctx" not in everything.parameters["properties"]

    @tool
    def where(context: ToolContext) -> str:
        """Say where the tool works."""
        return f"{context.cwd} {context.call_id}"

    assert Workspace(ws.folder, where)("where") == f"{ws.folder} call-1"
    assert "no parameter context" in Workspace(ws.folder, where).fails("where", context="mine")


def test_a_hint_without_a_json_type_is_refused_when_the_tool_is_made() -> None:
    def strange(values: set[int]) -> None:
        """Take a set.

        values: the set
        """

    def several(value: int | str) -> None:
        """Take either.

        value: the value
        """

    def unhinted(value) -> None:  # type: ignore[no-untyped-def]
        """Take anything.

        value: the value
        """

    def bare(value: list) -> None:  # type: ignore[type-arg]
        """Take a list of anything.

        value: the value
        """

    for function in (strange, several, unhinted, bare):
        with pytest.raises(TypeError, match=r"hint .*: use str, int"):
            tool(function)


def test_a_parameter_without_a_description_is_refused_when_the_tool_is_made() -> None:
    def silent(said: str, unsaid: str) -> None:
        """Do something.

        said: the one that is described
        """

    with pytest.raises(TypeError, match="describe 'unsaid' in the docstring"):
        tool(silent)


def test_name_and_title_can_be_given_and_the_function_can_still_be_called() -> None:
    @tool(name="plus", title="b")
    def add(a: int, b: int) -> int:
        """Add.

        a: the first
        b: the second
        """
        return a + b

    assert (add.name, add.title_of({"a": 1, "b": 2}), add(1, 2)) == ("plus", "plus 2", 3)
    tools = Toolset([add, everything])
    assert [each["function"]["name"] for each in tools.schemas] == ["plus", "everything"]
    assert tools.title(ToolCall("1", "plus", {"b": 5})) == "plus 5"
    assert tools.title(ToolCall("1", "nothing", None, "no JSON")) == "nothing"


# ---- the arguments ---------------------------------------------------------------------------------------


def given(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """The arguments as the function saw them, for ONE_OF_EACH with `changes`."""
    result: dict[str, Any] = json.loads(
        Workspace(tmp_path, everything)("everything", **ONE_OF_EACH | changes)
    )
    return result


@pytest.mark.parametrize(
    ("name", "sent", "taken"),
    [
        ("whole", "10", 10),
        ("whole", 10.0, 10),
        ("whole", "-3", -3),
        ("real", "2.5", 2.5),
        ("real", 2, 2),
        ("flag", "true", True),
        ("names", '["a", "b"]', ["a", "b"]),
        ("table", '{"a": [1]}', {"a": [1]}),
        ("rows", '[[1, "2"]]', [[1, 2]]),
        ("rows", ["[3]"], [[3]]),
        ("text", "10", "10"),
        ("text", "[1]", "[1]"),
        ("maybe", None, None),
        ("size", None, 7),
    ],
)
def test_a_value_in_the_wrong_clothes_is_taken_where_it_is_certain(
    tmp_path: Path, name: str, sent: Any, taken: Any
) -> None:
    value = given(tmp_path, **{name: sent})[name]
    assert value == taken
    assert type(value) is type(taken)


@pytest.mark.parametrize(
    ("name", "sent", "kind"),
    [
        ("whole", True, "integer"),
        ("whole", "true", "integer"),
        ("whole", 1.5, "integer"),
        ("whole", "ten", "integer"),
        ("whole", [1], "integer"),
        ("real", False, "number"),
        ("flag", 1, "boolean"),
        ("flag", "yes", "boolean"),
        ("text", 5, "string"),
        ("text", {"a": 1}, "string"),
        ("names", "a", "array"),
        ("names[0]", [1], "string"),
        ("table", "[]", "object"),
        ("rows[0][1]", [[1, None]], "integer"),
        ("whole", "1e999", "integer"),
        ("whole", "9" * 5000, "integer"),
    ],
)
def test_a_value_of_another_type_is_refused_and_the_type_is_named(
    tmp_path: Path, name: str, sent: Any, kind: str
) -> None:
    message = Workspace(tmp_path, everything).fails(
        "everything", **ONE_OF_EACH | {name.partition("[")[0]: sent}
    )
    assert f"everything: {name} has to be of type {kind}" in message
    assert len(message) < 250


def test_a_value_outside_of_a_literal_is_refused_with_the_choices(tmp_path: Path) -> None:
    assert "choice has to be one of a, b" in Workspace(tmp_path, everything).fails(
        "everything", **ONE_OF_EACH | {"choice": "c"}
    )


def test_an_unknown_parameter_is_refused_and_the_known_ones_are_named(tmp_path: Path) -> None:
    message = Workspace(tmp_path, read).fails("read", file_path="a")
    assert message == "Error: read has no parameter file_path. Its parameters: path, offset, limit"


def test_a_missing_parameter_is_refused_also_where_it_is_null(tmp_path: Path) -> None:
    message = "Error: write needs content. Its parameters: path, content"
    assert Workspace(tmp_path, write).fails("write", path="a") == message
    assert Workspace(tmp_path, write).fails("write", path="a", content=None) == message
    assert os.listdir(tmp_path) == []


# ---- one call --------------------------------------------------------------------------------------------


def test_an_unknown_tool_is_answered_with_the_names_of_the_tools(ws: Workspace) -> None:
    assert (
        ws.fails("bash", command="ls")
        == "Error: there is no tool 'bash'. The tools are: read, write, edit, ls"
    )
    nothing = Toolset([])
    call = ToolCall("1", "bash", {})
    with pytest.raises(StopIteration) as end:
        next(nothing.run(call, nothing.context(call, Abort())))
    assert "The tools are: none" in end.value.value.content


def test_unusable_arguments_are_answered_with_what_is_wrong_with_them(ws: Workspace) -> None:
    result = ws.run(ToolCall("1", "read", None, "cut off after 12 characters"))
    assert result.is_error
    assert (
        result.content
        == "Error: the arguments are cut off after 12 characters. Send one JSON object."
    )


def failing(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        """Raise."""
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ToolError("no such thing"), "Error: no such thing"),
        (DeniedError("not here"), "Denied: not here"),
        (ZeroDivisionError("oh"), "Error: fail failed: ZeroDivisionError: oh"),
        (RecursionError("deep"), "Error: fail failed: RecursionError: deep"),
    ],
)
def test_a_tool_that_raises_gives_an_error_result(
    tmp_path: Path, error: Exception, text: str
) -> None:
    assert Workspace(tmp_path, failing(error)).fails("fail") == text


@pytest.mark.parametrize("error", [Aborted("aborted"), KeyboardInterrupt()])
def test_an_abort_and_ctrl_c_climb_out_of_a_tool(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        Workspace(tmp_path, failing(error))("fail")


@pytest.mark.parametrize(
    ("value", "content"),
    [
        ("text", "text"),
        (None, ""),
        ({"a": [1, "é"]}, '{"a": [1, "é"]}'),
        ([], "[]"),
        ([1], "[1]"),
        (Path("p"), '"p"'),
        (1.5, "1.5"),
        ([{"type": "text", "text": "block"}], [{"type": "text", "text": "block"}]),
    ],
)
def test_what_a_tool_returns_becomes_text_content_blocks_or_json(
    tmp_path: Path, value: Any, content: Any
) -> None:
    def give() -> Any:
        """Give something."""
        return value

    result = Workspace(tmp_path, give).run(ToolCall("1", "give", {}))
    assert not result.is_error
    assert result.content == content


def test_a_value_that_cannot_be_shown_is_an_error_result(tmp_path: Path) -> None:
    def circle() -> Any:
        """Give a list that holds itself."""
        endless: list[Any] = []
        endless.append(endless)
        return endless

    assert "circle failed: ValueError" in Workspace(tmp_path, circle).fails("circle")


def test_what_a_generator_tool_yields_is_passed_on_and_what_it_returns_is_the_result(
    tmp_path: Path,
) -> None:
    def work(ctx: ToolContext) -> Generator[Any, None, str]:
        """Work in steps."""
        yield "one"
        yield ctx.update("two")
        yield Notice("three")
        return "done"

    ws = Workspace(tmp_path, work)
    assert ws("work") == "done"
    assert ws.events == [ToolUpdate("call-1", "one"), ToolUpdate("call-1", "two"), Notice("three")]


def test_a_generator_tool_that_raises_gives_an_error_result_after_what_it_told(
    tmp_path: Path,
) -> None:
    def work() -> Iterator[str]:
        """Work, then fail."""
        yield "one"
        raise ToolError("broken")

    ws = Workspace(tmp_path, work)
    assert ws.fails("work") == "Error: broken"
    assert ws.events == [ToolUpdate("call-1", "one")]


def test_a_generator_tool_is_closed_when_the_run_walks_away(tmp_path: Path) -> None:
    closed = []

    def steps() -> Iterator[str]:
        try:
            while True:
                yield "more"
        finally:
            closed.append(True)

    endless = steps()  # held here, so that only closing it ends it

    def work() -> Iterator[str]:
        """Work until closed."""
        return endless

    tools = Toolset([work], cwd=tmp_path)
    call = ToolCall("1", "work", {})
    running = tools.run(call, tools.context(call, Abort()))
    next(running)
    running.close()
    assert closed == [True]


def test_a_denial_is_the_result_and_the_content_is_not_sent(ws: Workspace) -> None:
    (ws.folder / "secret").write_text("TOP SECRET")

    def deny() -> None:
        raise DeniedError("the person said no")

    ws.when_asked = deny
    assert ws.fails("read", path="secret") == "Denied: the person said no"
    assert ws.fails("write", path="new", content="x") == "Denied: the person said no"
    assert ws.asked == [("read", "secret"), ("edit", "new")]
    assert ws.names() == ["secret"]


# ---- read ------------------------------------------------------------------------------------------------


def numbered(count: int) -> str:
    return "".join(f"line {number}\n" for number in range(1, count + 1))


def test_read_numbers_the_lines(ws: Workspace) -> None:
    (ws.folder / "a").write_text("one\n\n  three\nfour")
    assert ws("read", path="a") == "1\tone\n2\t\n3\t  three\n4\tfour"
    assert ws("read", path=str(ws.folder / "a")) == ws("read", path="./a")


def test_read_gives_a_part_and_says_how_to_go_on(ws: Workspace) -> None:
    (ws.folder / "a").write_text(numbered(10))
    assert (
        ws("read", path="a", offset=3, limit=2)
        == "3\tline 3\n4\tline 4\n\n(lines 3-4 of 10; use offset=5 to go on)"
    )
    assert ws("read", path="a", offset=9, limit=2) == "9\tline 9\n10\tline 10"
    for offset, limit in ((1, 1), (0, 1), (-5, 0)):
        assert (
            ws("read", path="a", offset=offset, limit=limit)
            == "1\tline 1\n\n(lines 1-1 of 10; use offset=2 to go on)"
        )
    assert "offset 11 is past the end: the file has 10 lines" in ws.fails(
        "read", path="a", offset=11
    )


def test_going_on_as_told_gives_every_line_once(ws: Workspace) -> None:
    (ws.folder / "a").write_text(
        "".join(f"{number} {'x' * (number % 300)}\n" for number in range(1, 5001))
    )
    lines: list[str] = []
    offset: str | None = "1"
    while offset:
        text, _, rest = ws("read", path="a", offset=int(offset)).partition("\n\n(lines ")
        lines += text.split("\n")
        offset = rest.partition("use offset=")[2].partition(" ")[0]
    assert lines == [f"{number}\t{number} {'x' * (number % 300)}" for number in range(1, 5001)]


def test_read_gives_at_most_2000_lines_and_less_than_the_loop_would_cut(ws: Workspace) -> None:
    (ws.folder / "many").write_text("x\n" * 5000)
    assert ws("read", path="many", limit=99999).endswith(
        "2000\tx\n\n(lines 1-2000 of 5000; use offset=2001 to go on)"
    )
    (ws.folder / "long").write_text(("y" * 1500 + "\n") * 200)
    text = ws("read", path="long")
    assert 25_000 < len(text) < 30_000
    assert "of 200; use offset=" in text


@pytest.mark.parametrize("letter", ["x", "é", "😀"])
@pytest.mark.parametrize("length", [2001, 8001, 3_000_000])
def test_a_long_line_is_cut_and_says_so(ws: Workspace, letter: str, length: int) -> None:
    (ws.folder / "a").write_text(f"{letter * 2000}\n{letter * length}\nlast\n")
    first, second, third = ws("read", path="a").split("\n")
    assert first == "1\t" + letter * 2000
    assert second == f"2\t{letter * 2000} … (line cut)"
    assert third == "3\tlast"
    (ws.folder / "a").write_text(letter * length)
    assert ws("read", path="a") == f"1\t{letter * 2000} … (line cut)"


def test_lines_are_the_same_wherever_the_file_is_cut_into_chunks(ws: Workspace) -> None:
    (ws.folder / "a").write_bytes(
        b"x" * ((1 << 20) - 3) + "\nÄÖ\r\nnext".encode() + b"\n" + b"y" * (2 << 20) + b"\nend"
    )
    assert ws("read", path="a", offset=2, limit=2).startswith("2\tÄÖ\n3\tnext\n")
    assert ws("read", path="a", offset=5) == "5\tend"
    assert "(lines 4-4 of 5; use offset=5" in ws("read", path="a", offset=4, limit=1)


@pytest.mark.parametrize("end", [b"", b"end", b"e" * (3 << 20), b"\n", b"\r\n"])
def test_lines_that_are_not_shown_are_counted(ws: Workspace, end: bytes) -> None:
    (ws.folder / "a").write_bytes(b"x\n" * (1 << 20) + end)
    total = (1 << 20) + bool(end)
    assert ws("read", path="a", limit=1) == f"1\tx\n\n(lines 1-1 of {total}; use offset=2 to go on)"
    assert f"the file has {total} lines" in ws.fails("read", path="a", offset=total + 1)


@pytest.mark.parametrize(
    "content",
    [
        b"one\r\ntwo\r\n",
        b"one\ntwo",
        codecs.BOM_UTF8 + b"one\ntwo\n",
        "one\ntwo\n".encode("utf-16"),
        codecs.BOM_UTF16_BE + "one\r\ntwo".encode("utf-16-be"),
    ],
)
def test_line_endings_and_byte_order_marks_are_not_shown(ws: Workspace, content: bytes) -> None:
    (ws.folder / "a").write_bytes(content)
    assert ws("read", path="a") == "1\tone\n2\ttwo"


def test_bytes_that_are_no_utf8_are_shown_as_replacement_characters(ws: Workspace) -> None:
    (ws.folder / "a").write_bytes(b"caf\xe9\n")
    assert ws("read", path="a") == "1\tcaf\ufffd"


def test_an_empty_file_is_said_to_be_empty(ws: Workspace) -> None:
    (ws.folder / "a").write_bytes(b"")
    assert ws("read", path="a") == "(the file is empty)"


def test_a_binary_file_is_refused_with_its_size(ws: Workspace) -> None:
    """FIL-28"""
    (ws.folder / "a.out").write_bytes(b"\x7fELF\0\0" + bytes(4000))
    assert ws.fails("read", path="a.out") == "Error: a.out is a binary file of 4,006 bytes"


@pytest.mark.case("FIL-10")
def test_a_folder_is_refused_with_the_tool_to_use(ws: Workspace) -> None:
    """FIL-10"""
    assert "is a folder: use ls" in ws.fails("read", path=".")


def test_a_missing_file_is_answered_with_names_that_are_alike(ws: Workspace) -> None:
    (ws.folder / "config.yaml").touch()
    message = ws.fails("read", path="config.yml")
    assert message.startswith(f"Error: there is no file {ws.folder / 'config.yml'}")
    assert message.endswith(f"Did you mean {ws.folder / 'config.yaml'}?")
    assert "Did you mean" not in ws.fails("read", path="zzz")
    assert "there is no file" in ws.fails("read", path="no/such/folder")
    assert "Not a directory" in ws.fails("read", path="config.yaml/x")


@pytest.mark.parametrize("path", ["", "  ", "a\0b"])
def test_a_path_that_is_none_is_refused(ws: Workspace, path: str) -> None:
    for call in ({"name": "read"}, {"name": "write", "content": "x"}, {"name": "ls"}):
        assert "the path is empty or holds a NUL" in ws.fails(**call, path=path)


@pytest.mark.case("FIL-09")
def test_a_fifo_is_refused_at_once(ws: Workspace) -> None:
    """FIL-09"""
    os.mkfifo(ws.folder / "pipe")
    os.symlink("pipe", ws.folder / "link")
    for path in ("pipe", "link"):
        for call in (
            {"name": "read"},
            {"name": "write", "content": "x"},
            {"name": "edit", "old_string": "a", "new_string": "b"},
        ):
            assert "is not a regular file" in within(
                5, lambda call=call, path=path: ws.fails(**call, path=path)
            )
    assert ws.names() == ["link", "pipe"]


@pytest.mark.case("FIL-10")
def test_a_socket_is_refused_at_once(ws: Workspace) -> None:
    """FIL-10"""
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(ws.folder):
        server.bind("s")  # a relative name, because the length of these is limited
        server.listen()
        assert "cannot be opened" in within(5, lambda: ws.fails("read", path="s"))


@pytest.mark.case("FIL-10", "FIL-12")
@pytest.mark.parametrize(
    "path",
    [
        "/dev/zero",
        "/dev/stdin",
        "/proc/self/environ",
        "/proc/self/mem",
        "/sys/kernel/notes",
        "/dev/../proc/self/environ",
        "zero",
        "environ",
    ],
)
def test_device_and_process_files_are_refused_without_asking(ws: Workspace, path: str) -> None:
    """FIL-10, FIL-12"""
    os.symlink("/dev/zero", ws.folder / "zero")
    os.symlink("/proc/self/environ", ws.folder / "environ")
    message = within(5, lambda: ws.fails("read", path=path))
    assert "is a device or process file and is not read" in message or "there is no file" in message
    assert ws.asked == []
    assert "PATH=" not in message


@pytest.mark.case("FIL-01", "FIL-02", "FIL-03")
def test_reading_outside_of_the_workspace_asks_for_the_real_place(
    ws: Workspace, tmp_path: Path
) -> None:
    """FIL-01, FIL-02, FIL-03"""
    (tmp_path / "secret").write_text("TOP SECRET")
    (tmp_path / "ws-evil").mkdir()
    (tmp_path / "ws-evil" / "x").write_text("x")
    os.symlink("../secret", ws.folder / "link")
    for path in ("../secret", "sub/../../secret", "link", str(tmp_path / "secret")):
        ws.asked.clear()
        ws("read", path=path)
        assert ws.asked == [
            ("external_directory", str(tmp_path / "secret")),
            ("read", str(tmp_path / "secret")),
        ]
    ws("ls", path=str(tmp_path / "ws-evil"))
    assert ws.asked[-1] == ("external_directory", str(tmp_path / "ws-evil"))


def test_a_set_abort_stops_a_read(ws: Workspace) -> None:
    (ws.folder / "a").write_text("text")
    ws.abort.set()
    with pytest.raises(Aborted):
        ws("read", path="a")


@contextlib.contextmanager
def large(path: Path, block: bytes, blocks: int) -> Iterator[None]:
    """A large file, for as long as the test needs it (pytest keeps the folder)."""
    with open(path, "wb") as file:
        for _ in range(blocks):
            file.write(block)
    try:
        yield
    finally:
        path.unlink()


@pytest.mark.case("FIL-29")
@needs_proc
def test_a_log_of_300_mb_is_read_with_offset_in_little_memory(ws: Workspace) -> None:
    """FIL-29"""
    line = b"2026-01-01 00:00:00 INFO some words of a log, as logs are wont to have\n"
    each = (1 << 20) // len(line)
    total = each * 300
    started = time.monotonic()
    with large(ws.folder / "log", line * each, 300):
        said = child(
            f"limit_memory(64 << 20); print(run('read', path='log', offset={total - 1}, limit=1).content)",
            ws.folder,
        )
    assert said == (
        f"{total - 1}\t{line.decode()}\n(lines {total - 1}-{total - 1} of {total}; use offset={total} to go on)\n"
    )
    assert time.monotonic() - started < 30


@pytest.mark.case("FIL-28")
@needs_proc
def test_one_line_of_300_mb_is_read_in_little_memory(ws: Workspace) -> None:
    """FIL-28"""
    with large(ws.folder / "line", b"a" * (1 << 20), 300):
        said = child("limit_memory(64 << 20); print(run('read', path='line').content)", ws.folder)
    assert said == f"1\t{'a' * 2000} … (line cut)\n"


ODD_NAMES = [
    b"new\nline",
    b"-rf",
    b"[link=x]",
    b"caf\xe9",
    b"n" * 255,
    b"~x",
    b"~",
    b" blank ",
    b"\x1b[31mred",
    "Ä\u202e".encode(),
    b"'\"\\",
]


@pytest.mark.case("FIL-25")
@pytest.mark.parametrize("name", ODD_NAMES, ids=[repr(name[:12]) for name in ODD_NAMES])
def test_files_with_odd_names_are_listed_in_one_line_and_read_and_written(
    ws: Workspace, name: bytes
) -> None:
    """FIL-25"""
    path = os.path.join(os.fsencode(ws.folder), name)
    Path(os.fsdecode(path)).write_text("content")
    listed = ws("ls")
    assert listed.isprintable()
    assert listed.encode()
    given_name = "./~" if name == b"~" else os.fsdecode(name)
    assert ws("read", path=given_name) == "1\tcontent"
    ws("write", path=given_name, content="changed")
    assert Path(os.fsdecode(path)).read_text() == "changed"
    assert len(ws.names()) == 1


def test_an_escaped_name_names_the_file_when_it_is_sent_as_json(ws: Workspace) -> None:
    """FIL-25"""
    for name in (b"new\nline", b"tab\there", b"caf\xe9", "wide\u3000space".encode()):
        Path(os.fsdecode(os.path.join(os.fsencode(ws.folder), name))).write_bytes(name)
    for shown in ws("ls").split("\n"):
        assert not ws.run(ToolCall("1", "read", {"path": json.loads(f'"{shown}"')})).is_error


def test_a_name_that_is_too_long_or_a_link_loop_is_an_error_and_no_crash(ws: Workspace) -> None:
    """FIL-11, FIL-25"""
    os.symlink("loop", ws.folder / "loop")
    assert "File name too long" in ws.fails("read", path="n" * 300)
    assert "File name too long" in ws.fails("write", path="n" * 300, content="x")
    assert "symbolic links" in ws.fails("read", path="loop")
    assert "symbolic links" in ws.fails("write", path="loop", content="x")
    assert ws.names() == ["loop"]


# ---- write: what may be written --------------------------------------------------------------------------


def test_write_creates_a_file_and_the_folders_to_it(ws: Workspace) -> None:
    assert ws("write", path="a/b/c.txt", content="one\ntwö\n") == "Created a/b/c.txt (2 lines)."
    assert (ws.folder / "a/b/c.txt").read_bytes() == "one\ntwö\n".encode()
    assert ws.asked == [("edit", "a/b/c.txt")]


@pytest.mark.case("FIL-20")
def test_an_existing_file_that_was_not_read_is_not_overwritten(ws: Workspace) -> None:
    """FIL-20"""
    (ws.folder / "a").write_text("mine")
    (ws.folder / "empty").touch()
    assert "a exists and was not read in this session" in ws.fails("write", path="a", content="x")
    assert "was not read" in ws.fails("write", path="empty", content="x")
    assert "is a folder" in ws.fails("write", path=".", content="x")
    assert (ws.folder / "a").read_text() == "mine"
    assert ws.asked == []


def test_a_file_that_was_read_is_overwritten_with_a_diff_as_detail(ws: Workspace) -> None:
    (ws.folder / "a").write_text("one\ntwo\n")
    ws("read", path="a")
    result = ws.run(ToolCall("1", "write", {"path": "a", "content": "one\nthree\n"}))
    assert result.content == "Overwrote a (2 lines)."
    assert result.details["diff"] == "--- a/a\n+++ b/a\n@@ -1,2 +1,2 @@\n one\n-two\n+three"
    assert (ws.folder / "a").read_text() == "one\nthree\n"


@pytest.mark.case("FIL-19")
def test_a_file_that_changed_on_disk_since_it_was_read_is_not_overwritten(ws: Workspace) -> None:
    """FIL-19"""
    file = ws.folder / "a"
    file.write_text("one")
    ws("read", path="a")
    file.write_text("the user's")
    assert "a changed on disk since it was read. Read it again first." in ws.fails(
        "write", path="a", content="x"
    )
    assert "changed on disk" in ws.fails("edit", path="a", old_string="user", new_string="x")
    assert file.read_text() == "the user's"
    ws("read", path="a")
    ws("write", path="a", content="x")
    assert file.read_text() == "x"


def test_a_change_to_other_content_of_the_same_size_is_seen(ws: Workspace) -> None:
    """FIL-19"""
    file = ws.folder / "a"
    file.write_text("one")
    ws("read", path="a")
    file.write_text("two")
    os.utime(file, (1, 1))
    assert "changed on disk" in ws.fails("write", path="a", content="x")
    assert "changed on disk" in ws.fails(
        "write", path="a", content="x"
    )  # asking again does not help


@pytest.mark.case("FIL-19")
def test_own_changes_in_a_row_need_no_reading_between(ws: Workspace) -> None:
    """FIL-19"""
    ws("write", path="a", content="one")
    ws("write", path="a", content="two")
    ws("edit", path="a", old_string="two", new_string="three")
    ws("edit", path="a", old_string="three", new_string="four")
    ws("write", path="a", content="five")
    assert (ws.folder / "a").read_text() == "five"


def test_a_file_that_was_deleted_since_it_was_read_is_created_again(ws: Workspace) -> None:
    (ws.folder / "a").write_text("one")
    ws("read", path="a")
    (ws.folder / "a").unlink()
    assert ws("write", path="a", content="two") == "Created a (1 lines)."


@pytest.mark.parametrize("known", [True, False], ids=["existing", "new"])
def test_what_the_user_writes_while_being_asked_is_not_overwritten(
    ws: Workspace, known: bool
) -> None:
    """FIL-19"""
    file = ws.folder / "a"
    if known:
        file.write_text("one")
        ws("read", path="a")
    ws.when_asked = lambda: file.write_text("the user's") and None
    assert "changed on disk" in ws.fails("write", path="a", content="two")
    assert file.read_text() == "the user's"
    assert ws.names() == ["a"]


@pytest.mark.case("FIL-02", "FIL-03", "FIL-05")
def test_nothing_is_written_outside_of_the_workspace(ws: Workspace, tmp_path: Path) -> None:
    """FIL-02, FIL-03, FIL-05"""
    (tmp_path / "out").write_text("old")
    (tmp_path / "ws-evil").mkdir()
    os.symlink("../out", ws.folder / "link")
    os.symlink("../missing", ws.folder / "dangling")
    os.symlink("..", ws.folder / "folder")
    os.symlink("link", ws.folder / "chain")
    before = sorted(os.listdir(tmp_path))
    for path in (
        "../new",
        "a/../../new",
        str(tmp_path / "new"),
        "../ws-evil/new",
        str(tmp_path / "ws-evil" / "new"),
        "../out",
        "link",
        "dangling",
        "folder/new",
        "folder/ws-evil/new",
        "chain",
        "~/new-file-of-a-test",
        "/new-file-of-a-test",
    ):
        ws("read", path="../out")  # it is not a matter of having read it
        message = ws.fails("write", path=path, content="PWN")
        assert f"is outside the workspace {ws.folder}: nothing is written there" in message
        assert "outside the workspace" in ws.fails(
            "edit", path=path, old_string="old", new_string="PWN"
        )
    assert (tmp_path / "out").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == before
    assert os.listdir(tmp_path / "ws-evil") == []


def test_a_workspace_that_is_reached_through_a_link_is_still_the_workspace(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    os.symlink("real", tmp_path / "alias")
    ws = Workspace(tmp_path / "alias")
    ws("write", path=str(tmp_path / "alias" / "a"), content="x")
    ws("write", path=str(tmp_path / "real" / "b"), content="x")
    assert ws("ls") == "a\nb"


# ---- write: what stays -----------------------------------------------------------------------------------


def overwritten(ws: Workspace, before: bytes, content: str) -> bytes:
    (ws.folder / "a").write_bytes(before)
    ws("read", path="a")
    ws("write", path="a", content=content)
    return (ws.folder / "a").read_bytes()


def test_line_endings_are_kept(ws: Workspace) -> None:
    assert overwritten(ws, b"one\r\ntwo\r\n", "one\nthree\n") == b"one\r\nthree\r\n"
    assert overwritten(ws, b"one\r\ntwo\r\n", "one\r\nthree\n") == b"one\r\nthree\r\n"
    assert overwritten(ws, b"one\ntwo\n", "one\nthree\n") == b"one\nthree\n"


def test_the_byte_order_mark_and_its_encoding_are_kept(ws: Workspace) -> None:
    assert overwritten(ws, codecs.BOM_UTF8 + b"one", "zwö") == codecs.BOM_UTF8 + "zwö".encode()
    for mark, encoding in ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be")):
        assert overwritten(
            ws, mark + "one\r\n".encode(encoding), "zwö\n"
        ) == mark + "zwö\r\n".encode(encoding)


def test_text_for_a_file_that_is_not_utf8_has_to_be_ascii(ws: Workspace) -> None:
    """FIL-18"""
    assert overwritten(ws, b"caf\xe9", "coffee") == b"coffee"
    (ws.folder / "b").write_bytes(b"caf\xe9")
    ws("read", path="b")
    for content in ("café", "caf\ufffd", "caf\udcea"):
        assert "is not UTF-8: only ASCII can be added" in ws.fails(
            "write", path="b", content=content
        )
    assert (ws.folder / "b").read_bytes() == b"caf\xe9"


def test_half_a_character_is_not_written(ws: Workspace) -> None:
    assert "surrogates not allowed" in ws.fails("write", path="new", content="\ud83d")
    assert ws.names() == []
    (ws.folder / "a").write_text("text")
    ws("read", path="a")
    ws.fails("write", path="a", content="\udcff")
    assert (ws.folder / "a").read_bytes() == b"text"


@pytest.mark.case("FIL-16")
@pytest.mark.parametrize("mode", [0o755, 0o640, 0o400, 0o4750])
def test_the_mode_is_kept(ws: Workspace, mode: int) -> None:
    """FIL-16"""
    file = ws.folder / "a"
    file.write_text("one")
    file.chmod(mode)
    ws("read", path="a")
    ws("write", path="a", content="two")
    assert stat.S_IMODE(file.stat().st_mode) == mode
    ws("edit", path="a", old_string="two", new_string="three")
    assert stat.S_IMODE(file.stat().st_mode) == mode
    assert file.read_text() == "three"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_the_owner_is_kept(ws: Workspace) -> None:
    file = ws.folder / "a"
    file.write_text("one")
    os.chown(file, 12345, 12346)
    file.chmod(0o4755)
    ws("edit", path="a", old_string="one", new_string="two")
    info = file.stat()
    assert (info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode)) == (12345, 12346, 0o4755)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_follows_the_umask(ws: Workspace, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        ws("write", path="a", content="x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((ws.folder / "a").stat().st_mode) == mode


def test_a_link_inside_of_the_workspace_stays_a_link_and_its_target_is_written(
    ws: Workspace,
) -> None:
    """FIL-17"""
    (ws.folder / "target").write_text("one")
    os.symlink("target", ws.folder / "link")
    os.symlink("missing", ws.folder / "dangling")
    ws("read", path="link")
    assert ws("write", path="link", content="two") == "Overwrote target (1 lines)."
    ws("write", path="dangling", content="new")
    assert (os.readlink(ws.folder / "link"), os.readlink(ws.folder / "dangling")) == (
        "target",
        "missing",
    )
    assert ((ws.folder / "target").read_text(), (ws.folder / "missing").read_text()) == (
        "two",
        "new",
    )


def test_writing_a_file_with_hard_links_says_that_the_others_keep_the_old_content(
    ws: Workspace,
) -> None:
    """FIL-23"""
    (ws.folder / "a").write_text("one")
    os.link(ws.folder / "a", ws.folder / "b")
    ws("read", path="a")
    assert "the file had 2 hard links; the others keep the old content" in ws(
        "write", path="a", content="two"
    )
    assert (ws.folder / "b").read_text() == "one"
    assert "hard links" not in ws("write", path="a", content="three")


# ---- write: wholly old or wholly new ---------------------------------------------------------------------


def test_nothing_but_the_file_is_left_in_the_folder(ws: Workspace) -> None:
    ws("write", path="a", content="x")
    ws("write", path="a", content="y")
    assert ws.names() == ["a"]


@pytest.mark.case("FIL-22")
def test_a_failed_write_leaves_the_original_and_no_temporary_file(ws: Workspace) -> None:
    """FIL-22: a limit of 4 KiB on the size of files stands for a full disk."""
    (ws.folder / "a").write_text("x" * 3000)
    said = child(
        """
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
run("read", path="a")
for result in (run("write", path="a", content="y" * 100_000), run("edit", path="a", old_string="x" * 3000, new_string="z" * 5000),
               run("write", path="new", content="y" * 100_000), run("write", path="sub/new", content="y" * 4000)):
    print(result.is_error, result.content[:400])
""",
        ws.folder,
    ).splitlines()
    failure = "could not be written, and is as it was: File too large"
    assert said[0] == f"True Error: {ws.folder / 'a'} {failure}"
    assert said[1] == f"True Error: {ws.folder / 'a'} {failure}"
    assert said[2] == f"True Error: {ws.folder / 'new'} {failure}"
    assert said[3] == "False Created sub/new (1 lines)."
    assert ws.names() == ["a", "sub"]
    assert (ws.folder / "a").read_text() == "x" * 3000
    assert os.listdir(ws.folder / "sub") == ["new"]


def test_a_folder_in_the_way_is_an_error_and_stays(ws: Workspace) -> None:
    (ws.folder / "file").write_text("x")
    assert "could not be written" in ws.fails("write", path="file/below", content="y")
    assert (ws.folder / "file").read_text() == "x"


WRITER = """
contents = ["a" * (8 << 20), "b" * (8 << 20)]
run("read", path="file", limit=1)
print("begun", flush=True)
while True:
    for content in contents:
        assert not run("write", path="file", content=content).is_error
"""


@pytest.mark.case("FIL-21")
@pytest.mark.parametrize("delay", [0.0, 0.01, 0.02, 0.03, 0.05])
def test_a_kill_leaves_the_old_or_the_new_file(ws: Workspace, delay: float) -> None:
    """Beside it at most a part of the new one, under a name of ours."""
    (ws.folder / "file").write_bytes(b"b" * (8 << 20))
    command = [sys.executable, "-c", CHILD + WRITER, ws.folder]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as writer:
        assert writer.stdout and writer.stdout.readline() == b"begun\n"
        time.sleep(delay)  # whatever it does then
        writer.kill()
    assert (ws.folder / "file").read_bytes() in (b"a" * (8 << 20), b"b" * (8 << 20))
    left = [name for name in ws.names() if name != "file"]
    assert len(left) <= 1 and all(re.fullmatch(r"\.coder-.*\.tmp", name) for name in left)


# ---- ls --------------------------------------------------------------------------------------------------


@pytest.mark.case("FIL-11")
def test_ls_marks_folders_links_and_what_is_no_regular_file(ws: Workspace, tmp_path: Path) -> None:
    """FIL-11"""
    (ws.folder / "b.txt").touch()
    (ws.folder / "a").mkdir()
    (ws.folder / ".hidden").touch()
    os.mkfifo(ws.folder / "pipe")
    os.symlink("a", ws.folder / "to-folder")
    os.symlink("missing", ws.folder / "to-nothing")
    os.symlink("loop", ws.folder / "loop")
    os.symlink("/tmp/new\nline", ws.folder / "to-odd")
    assert within(5, lambda: ws("ls")).split("\n") == [
        ".hidden",
        "a/",
        "b.txt",
        "loop -> loop",
        "pipe (not a regular file)",
        "to-folder -> a",
        "to-nothing -> missing",
        "to-odd -> /tmp/new\\nline",
    ]
    assert ws.asked == []
    assert ws("ls", path="a") == "(the folder is empty)"
    assert ws("ls", path="to-folder") == "(the folder is empty)"


def test_ls_of_what_is_no_folder_says_what_to_do(ws: Workspace) -> None:
    (ws.folder / "file").touch()
    (ws.folder / "folder").mkdir()
    os.mkfifo(ws.folder / "pipe")
    assert "file is a file: use read" in ws.fails("ls", path="file")
    assert "pipe" in within(5, lambda: ws.fails("ls", path="pipe"))
    assert ws.fails("ls", path="foldr").endswith(f"Did you mean {ws.folder / 'folder'}?")
    assert "is not read" in ws.fails("ls", path="/proc/self")


def test_ls_gives_at_most_500_entries_and_says_how_many_there_are(ws: Workspace) -> None:
    for number in range(503):
        (ws.folder / f"{number:03}").touch()
    lines = ws("ls").split("\n")
    assert lines[:2] == ["000", "001"]
    assert lines[499:] == ["499", "(500 of 503 entries; use glob with a pattern)"]


def test_ls_escapes_names_that_would_not_stay_in_their_line(ws: Workspace) -> None:
    """FIL-25"""
    for name in (b"a\nb", b"c\x1b[2J", b"d\xff", "é \u202e".encode()):
        os.close(os.open(os.path.join(os.fsencode(ws.folder), name), os.O_CREAT))
    assert ws("ls").split("\n") == ["a\\nb", "c\\x1b[2J", "d\\udcff", "é \\u202e"]


NUMBERS = [str(number) for number in range(30_000)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["a"] * 30_000, ["b"] * 30_000),
        (list("xyz") * 9_000, ["new", *list("xyz") * 9_000]),
        (list("xyz") * 9_000, [*list("xyz") * 8_000, "end"]),
        ([], ["n"] * 25_000),
        (["o"] * 25_000, []),
        (["s"] * 25_000, ["s"] * 24_000),
        (NUMBERS, [str(number // 2) for number in range(30_000)]),
    ],
)
def test_a_diff_of_many_lines_is_one_hunk_that_holds_and_takes_no_time(
    old: list[str], new: list[str]
) -> None:
    with promptly(5):
        text = diff("\n".join(old), "\n".join(new), "f")
    first, second, head, *lines = text.split("\n")
    found = re.fullmatch(r"@@ -(\d+),(\d+) \+(\d+),(\d+) @@", head)
    assert (first, second) == ("--- a/f", "+++ b/f") and found
    at, count, to, more = map(int, found.groups())
    assert [line[1:] for line in lines if line[0] in " -"] == old[at - 1 : at - 1 + count]
    assert [line[1:] for line in lines if line[0] in " +"] == new[to - 1 : to - 1 + more]
    assert old[: at - 1] == new[: to - 1] and old[at - 1 + count :] == new[to - 1 + more :]
    assert diff("\n".join(old), "\n".join(old), "f") == ""


# ---- a folder that becomes a link in the middle ----------------------------------------------------------


@pytest.mark.parametrize("path", ["sub/a", "sub/new", "sub/deep/new", "in/sub/a", "in/sub/new"])
def test_a_folder_that_becomes_a_link_while_the_person_is_asked_leads_nowhere(
    ws: Workspace, tmp_path: Path, path: str
) -> None:
    outside = tmp_path / "outside"
    meanwhile = to_become_links(ws.folder, outside, "one")
    if path.endswith("a"):
        ws("read", path=path)
    ws.asked.clear()
    ws.when_asked = meanwhile
    assert "a link has taken its place" in ws.fails("write", path=path, content="PWN")
    assert ws.asked == [("edit", path)]
    assert {str(each.relative_to(outside)) for each in outside.rglob("*")} == {
        "sub",
        "sub/a",
        "in",
        "in/sub",
        "in/sub/a",
    }
    assert (
        (outside / "sub" / "a").read_text() == (outside / "in" / "sub" / "a").read_text() == "one"
    )


@pytest.mark.parametrize("aside", ["sub", "sub/.env"])
def test_what_is_read_is_what_the_person_was_asked_about(
    ws: Workspace, tmp_path: Path, aside: str
) -> None:
    """A folder, or the file itself, becomes a link to a place that nobody was asked about."""

    def meanwhile() -> None:
        (ws.folder / aside).rename(ws.folder / "aside")
        (ws.folder / aside).symlink_to(outside / aside)

    outside = tmp_path / "outside"
    for root, text in ((ws.folder, "own"), (outside, "TOP-SECRET")):
        (root / "sub").mkdir(parents=True)
        (root / "sub" / ".env").write_text(text)
    ws.when_asked = meanwhile
    assert "TOP-SECRET" not in ws.fails("read", path="sub/.env")
    assert ws.asked == [("read", "sub/.env")]


FLIP = """
import ctypes, sys
library = ctypes.CDLL(None, use_errno=True)
names = [name.encode() for name in sys.argv[1:]]
if library.renameat2(-100, names[0], -100, names[1], 2):
    sys.exit("no RENAME_EXCHANGE")
print("begun", flush=True)
while True:
    library.renameat2(-100, names[0], -100, names[1], 2)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RENAME_EXCHANGE is Linux's")
def test_a_folder_that_becomes_a_link_again_and_again_leads_nowhere(
    ws: Workspace, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (ws.folder / "sub").mkdir()
    (ws.folder / "link").symlink_to(outside)
    with subprocess.Popen(
        [sys.executable, "-c", FLIP, "sub", "link"],
        cwd=ws.folder,
        stdout=subprocess.PIPE,
        text=True,
    ) as flip:
        try:
            assert flip.stdout and flip.stdout.readline() == "begun\n"
            refused: set[bool] = set()
            for number in range(20_000):
                call = ToolCall("1", "write", {"path": f"sub/{number}", "content": "PWN"})
                refused.add(ws.run(call).is_error)
                if number >= 500 and len(refused) == 2:
                    break
        finally:
            flip.kill()
    assert list(outside.iterdir()) == []
    assert refused == {True, False}, "some came at the right moment, some did not"
    kept = next(each for each in (ws.folder / "sub", ws.folder / "link") if not each.is_symlink())
    assert not [each for each in kept.iterdir() if each.suffix == ".tmp"]


COME_AND_GO = """
import contextlib, os, sys
print("begun", flush=True)
while True:
    with contextlib.suppress(OSError):
        os.symlink(sys.argv[2], sys.argv[1])
        os.unlink(sys.argv[1])
"""


def test_a_link_that_comes_where_a_folder_is_made_leads_nowhere(
    ws: Workspace, tmp_path: Path
) -> None:
    (outside := tmp_path / "outside").mkdir()
    made, deep = 0, ws.folder / "deep"
    with subprocess.Popen(
        [sys.executable, "-c", COME_AND_GO, str(deep), str(outside)],
        stdout=subprocess.PIPE,
        text=True,
    ) as others:
        try:
            assert others.stdout and others.stdout.readline() == "begun\n"
            for _ in range(300):
                made += not ws.run(
                    ToolCall("1", "write", {"path": "deep/new", "content": "PWN"})
                ).is_error
                shutil.rmtree(deep, ignore_errors=True)  # a link stays
        finally:
            others.kill()
    assert list(outside.iterdir()) == [] and made


def test_a_file_is_written_in_a_folder_that_cannot_be_listed() -> None:
    """By an ordinary user, whom root becomes for it; pytest's own folder is closed to others."""
    code = "os.chmod(sys.argv[1] + '/closed', 0o300)\nfor name in ('new', 'sub/new'):\n run('write', path='closed/' + name, content='x')\n"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        closed = Path(folder) / "closed"
        closed.mkdir()
        if os.geteuid() == 0:
            os.chmod(folder, 0o755)
            os.chown(closed, 65534, 65534)
            code = f"os.setgroups([])\nos.setgid(65534)\nos.setuid(65534)\n{code}"
        code += "os.chmod(sys.argv[1] + '/closed', 0o700)\n"
        done = subprocess.run(
            [sys.executable, "-c", CHILD + code, folder],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert {str(path.relative_to(closed)) for path in closed.rglob("*")} == {
            "new",
            "sub",
            "sub/new",
        }, done.stderr
