"""What models of other agents write for a call: taken where it is certain, else refused with one way out.

Each row goes over the wire: a server answers with the call as the model wrote it, and the next request shows what the
model reads of it, the call under its real name and the result.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from coder.agent.profiles import AgentSpec
from coder.agent.subagent import Subagents
from coder.agent.user_tools import todo
from coder.devtools.scripted import Reply
from coder.events import ToolStart
from coder.tools.bash import bash
from coder.tools.edit import edit
from coder.tools.files import ls, read, write
from coder.tools.patch import apply_patch
from coder.tools.search import glob, grep
from coder.toolset import Tool, Toolset, tool
from tests.harness import all_of, ask, serve
from tests.workspace import tree

APP = "".join(f"line {number}\n" for number in range(1, 31))
TOOLS = (read, write, edit, bash, grep, glob, ls, todo, apply_patch)


@dataclass
class Slip:
    """A call as the model writes it (arguments may be text), the call that it becomes, and words of its result."""

    name: str
    given: Any
    becomes: tuple[str, dict[str, Any]]
    says: str = ""

    @property
    def id(self) -> str:
        return f"{self.name} {self.given}"[:60]


@dataclass
class Seen:
    """What the next request shows of a call, and what was announced while it ran."""

    name: str
    arguments: dict[str, Any]
    result: str
    started: ToolStart
    is_error: bool


def play(folder: Path, name: str, given: Any) -> Seen:
    tree(folder, {"src/app.py": APP, "notes.txt": "a note\n"})
    with serve(Reply(calls=[(name, given)]), Reply("done")) as server:
        events, result = ask(server, tools=Toolset(TOOLS, cwd=folder))
        _, answer, message = server.requests[-1]["messages"]
    function = answer["tool_calls"][0]["function"]
    is_error = bool(result.messages[-2]["meta"].get("is_error"))
    started = all_of(ToolStart, events)[0]
    arguments = json.loads(function["arguments"])
    return Seen(function["name"], arguments, message["content"], started, is_error)


READ_APP = ("read", {"path": "src/app.py"})
LIST = ("bash", {"command": "ls src"})
EDIT = ("edit", {"path": "notes.txt", "old_string": "a note", "new_string": "b"})
NEW = ("write", {"path": "new.txt", "content": "x\n"})

NAMES = [
    *(Slip(name, {"command": "ls src"}, LIST, "app.py") for name in ("Bash", "BASH", "shell")),
    *(
        Slip(name, {"command": "ls src"}, LIST, "app.py")
        for name in (
            "run_shell",
            "run_shell_command",
            "execute_command",
            "terminal",
            "exec_command",
        )
    ),
    *(Slip(name, READ_APP[1], READ_APP, "line 30") for name in ("Read", "read_file", "view")),
    *(Slip(name, NEW[1], NEW, "Created") for name in ("Write", "write_file", "create_file")),
    *(
        Slip(name, {"path": "src"}, ("ls", {"path": "src"}), "app.py")
        for name in ("LS", "list_dir")
    ),
    Slip("search_files", {"pattern": "note"}, ("grep", {"pattern": "note"}), "1:a note"),
    Slip("file_search", {"pattern": "*.py"}, ("glob", {"pattern": "*.py"}), "src/app.py"),
    *(
        Slip(name, READ_APP[1], READ_APP, "line 30")
        for name in ("functions.read", "default_api:read")
    ),
    Slip("default_api.Bash", {"command": "ls src"}, LIST, "app.py"),
]

PARAMETERS = [
    *(
        Slip("read", {name: "src/app.py"}, READ_APP, "line 30")
        for name in ("file_path", "filePath", "filename", "file")
    ),
    Slip("read", {"path": ["src/app.py"]}, READ_APP, "line 30"),
    Slip("read", {"paths": ["src/app.py"]}, READ_APP, "line 30"),
    *(
        Slip(
            "read",
            READ_APP[1] | given,
            ("read", READ_APP[1] | {"offset": 3, "limit": 2}),
            "4\tline 4",
        )
        for given in ({"start_line": 3, "end_line": 4}, {"view_range": [3, 4]}, {"offset": "3-4"})
    ),
    Slip(
        "read",
        READ_APP[1] | {"view_range": [29, -1]},
        ("read", READ_APP[1] | {"offset": 29}),
        "30\tline",
    ),
    *(
        Slip("edit", {"path": "notes.txt", old: "a note", new: "b"}, EDIT, "Edited")
        for old, new in (
            ("old_str", "new_str"),
            ("oldString", "newString"),
            ("oldText", "newText"),
            ("search", "replace"),
        )
    ),
    Slip(
        "edit",
        {"path": "notes.txt", "edits": [{"oldText": "a note", "newText": "b"}]},
        EDIT,
        "Edited",
    ),
    Slip("edit", EDIT[1] | {"expected_replacements": 1}, EDIT, "Edited"),
    *(
        Slip(
            "edit",
            EDIT[1] | {"replace_all": given},
            ("edit", EDIT[1] | {"replace_all": given}),
            "Edited",
        )
        for given in ("True", "false", 1, 0)
    ),
    Slip("write", {"file_path": "new.txt", "text": "x\n"}, NEW, "Created"),
    Slip(
        "write",
        {"path": "new.json", "content": {"a": 1}},
        ("write", {"path": "new.json", "content": '{\n  "a": 1\n}\n'}),
        "Created",
    ),
    *(
        Slip("bash", LIST[1] | {remark: "list the sources"}, LIST, "app.py")
        for remark in ("description", "explanation", "reason", "justification")
    ),
    Slip("bash", LIST[1] | {"requires_approval": False, "is_input": False}, LIST, "app.py"),
    Slip("bash", {"cmd": "ls src"}, LIST, "app.py"),
    Slip("bash", {"command": ["bash", "-lc", "ls src"]}, LIST, "app.py"),
    Slip("bash", {"command": '["bash", "-lc", "ls src"]'}, LIST, "app.py"),
    Slip("bash", {"command": ["ls", "src"]}, LIST, "app.py"),
    Slip("bash", {"command": ["ls", "a b"]}, ("bash", {"command": "ls 'a b'"}), "a b"),
    Slip("bash", {"command": "```bash\nls src\n```"}, LIST, "app.py"),
    Slip("bash", {"command": "$ ls src"}, LIST, "app.py"),
    Slip("bash", LIST[1] | {"timeout": 30.5}, ("bash", LIST[1] | {"timeout": 31}), "app.py"),
    Slip("bash", {"input": LIST[1]}, LIST, "app.py"),
    Slip("bash", {"name": "bash", "arguments": LIST[1]}, LIST, "app.py"),
    Slip(
        "grep",
        {"query": "NOTE", "include": "*.txt", "-i": True, "-n": True, "output_mode": "content"},
        ("grep", {"pattern": "NOTE", "glob": "*.txt", "ignore_case": True}),
        "notes.txt\n1:a note",
    ),
    Slip("ls", {"path": ""}, ("ls", {}), "notes.txt"),
    Slip(
        "todo",
        {"todos": ["one", "two"]},
        (
            "todo",
            {"items": [{"text": "one", "status": "pending"}, {"text": "two", "status": "pending"}]},
        ),
        "[ ] two",
    ),
    Slip(
        "apply_patch",
        {"input": "*** Begin Patch\n*** Add File: n\n+x\n*** End Patch"},
        ("apply_patch", {"patch": "*** Begin Patch\n*** Add File: n\n+x\n*** End Patch"}),
        "n",
    ),
]

HUNK = "@@ -1 +1 @@\n-a note\n+b"
SECTION = f"*** Update File: notes.txt\n{HUNK}"
DIFF = f"--- a/notes.txt\n+++ b/notes.txt\n{HUNK}"
BOTH = f"{SECTION}\n*** Delete File: src/app.py\n*** Add File: b/n\n+x\n+y"
GIT = f"""diff --git a/notes.txt b/notes.txt
index 1..2 100644
{DIFF}
diff --git a/src/app.py b/src/app.py
deleted file mode 100644
--- a/src/app.py
+++ /dev/null
@@ -1,2 +0,0 @@
-line 1
-line 2
diff --git a/b/n b/b/n
new file mode 100644
--- /dev/null
+++ b/b/n
@@ -0,0 +1,2 @@
+x
+y
"""


def whole(sections: str) -> str:
    return f"*** Begin Patch\n{sections}\n*** End Patch"


PATCHES = [
    Slip(
        "apply_patch", {"patch": given}, ("apply_patch", {"patch": whole(sections)}), "M notes.txt"
    )
    for given, sections in (
        *(
            (given, SECTION)
            for given in (SECTION, f"*** Begin Patch\n{SECTION}", f"{SECTION}\n*** End Patch")
        ),
        *((given, SECTION) for given in (f"```diff\n{DIFF}\n```", f"```\n{whole(SECTION)}\n```")),
        *(
            (f"apply_patch <<{word}\n{whole(SECTION)}\nEOF", SECTION)
            for word in ("'EOF'", "EOF", '"EOF"')
        ),
        *(
            (given, SECTION)
            for given in (DIFF, whole(DIFF), f"{DIFF}\n", DIFF.replace("\n", "\r\n"))
        ),
        (DIFF.replace("a/", "").replace("b/", ""), SECTION),
        (DIFF.replace("notes.txt\n", "notes.txt\t2026-01-01\n"), SECTION),
        (whole(f"*** Update File: notes.txt\n{DIFF}"), SECTION),
        (GIT, BOTH),
    )
]

JSON = [
    *(
        Slip("bash", text, LIST, "app.py")
        for text in (
            '{"command": "ls src",}',
            "{'command': 'ls src'}",
            '```json\n{"command": "ls src"}\n```',
            '[{"command": "ls src"}]',
            '"{\\"command\\": \\"ls src\\"}"',
            '{"command": "ls src"}}',
            '{"command": "ls src", "timeout": None,}',
        )
    ),
    Slip("edit", '{"path": "notes.txt", "old_string": "a note", "new_string": "b", "replace_all": True}',
         ("edit", EDIT[1] | {"replace_all": True}), "Edited"),
    Slip("grep", r'{"pattern": "n\w+e"}', ("grep", {"pattern": r"n\w+e"}), "1:a note"),
    Slip("bash", r'{"command": "echo \$HOME"}', ("bash", {"command": r"echo \$HOME"}), "$HOME"),
    Slip("bash", '{"command": "echo \'None, True,}\'"}', ("bash", {"command": "echo 'None, True,}'"}), "None, True,}"),
    Slip("apply_patch", "*** Begin Patch\n*** Add File: n\n+x\n*** End Patch",
         ("apply_patch", {"patch": "*** Begin Patch\n*** Add File: n\n+x\n*** End Patch"}), "n"),
]  # fmt: skip


def without_nothing(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


@pytest.mark.parametrize("slip", [*NAMES, *PARAMETERS, *PATCHES, *JSON], ids=lambda slip: slip.id)
def test_a_slip_is_asked_for_shown_and_stored_as_the_real_call(tmp_path: Path, slip: Slip) -> None:
    seen = play(tmp_path, slip.name, slip.given)
    assert (seen.name, without_nothing(seen.arguments)) == slip.becomes
    assert seen.started.name == slip.becomes[0]
    assert slip.says in seen.result
    if "a b" not in slip.says:
        assert not seen.is_error, seen.result


@dataclass
class Refusal:
    """A call that is not certain: nothing is run, and the result says this."""

    name: str
    given: Any
    says: str

    @property
    def id(self) -> str:
        return f"{self.name} {self.given}"[:60]


EDIT_HERE = "here it is edit(path, old_string, new_string)"
REFUSED = [
    Refusal("bash", {"command": "touch PWN", "cwd": "src"}, "no parameter cwd; write it into the command: cd DIR && COMMAND"),
    Refusal("bash", {"command": "touch PWN", "workdir": "src"}, "no parameter workdir; write it into"),
    Refusal("bash", {"command": "touch PWN", "run_in_background": True}, "put & at the end of the command"),
    Refusal("bash", {"cmd": "touch PWN", "script": "touch PWN2"}, "no parameter script"),
    Refusal("bash", {"command": "touch PWN", "cmd": "ls"}, "no parameter cmd"),
    Refusal("read", {"path": ["src/app.py", "notes.txt"]}, "one file per call; several calls in one answer"),
    Refusal("edit", {"path": "notes.txt", "edits": [{}, {}]}, "one change per call: edit(path, old_string, new_string)"),
    Refusal("edit", EDIT[1] | {"expected_replacements": 2}, "no parameter expected_replacements"),
    Refusal("write", {"path": "PWN", "content": ["a", "b"]}, "content has to be of type string"),
    Refusal("write", {"path": "PWN", "content": {"a": 1}}, "content has to be of type string"),
    Refusal("apply_patch", {"patch": f"-a\n{SECTION}"}, "the first line of the patch has to be *** Begin Patch"),
    Refusal("apply_patch", {"patch": DIFF.replace("b/notes", "b/other")}, "has to be *** Begin Patch"),
    Refusal("apply_patch", {"patch": "rename from notes.txt\nrename to n"}, "has to be *** Begin Patch"),
    Refusal("apply_patch", {"patch": "*** Add File: n.md\n+```\n+x\n```"}, "no place there: '```'"),
    Refusal("apply_patch", {"patch": f"{DIFF}\n\\ No newline at end of file"}, "no place there: '\\\\ No newline"),
    Refusal("multi_edit", {}, f"there is no tool 'multi_edit'; {EDIT_HERE}"),
    Refusal("str_replace_based_edit_tool", {}, EDIT_HERE),
    Refusal("apply_diff", {}, EDIT_HERE),
    Refusal("python", {"code": "1"}, "run it with bash: python3 -c '...'"),
    Refusal("web_search", {"query": "x"}, "there is no web tool here; bash has curl"),
    Refusal("attempt_completion", {"result": "x"}, "The task is done when you answer without a tool call"),
    Refusal("finish", {}, "write the answer"),
    Refusal("", {"command": "touch PWN"}, "the call had no name. The tools are: read"),
    Refusal("fly", {}, "there is no tool 'fly'. The tools are: read"),
    Refusal("bash", '{"command": "touch PWN', 'begins at "touch PWN has no end'),
    Refusal("bash", '{"command": "touch PWN"', 'they end too early, at …{"command": "touch PWN"'),
    Refusal("bash", '{"command": "touch "PWN""}', r'a " inside a string is written \"'),
    Refusal("bash", "{'command': 'touch PWN' '2'}", "not valid JSON near {'command'"),
    Refusal("bash", '{"command": "touch PWN" "2"}', "not valid JSON"),
    Refusal("bash", "{command: 'touch PWN'}", "not valid JSON near {command: 'touch"),
    Refusal("bash", '{"command": "touch \\\'PWN\\\'"}', "not valid JSON"),
    Refusal("bash", '{"command": "touch PWN", "timeout": 1e999}', "not usable"),
    Refusal("bash", "touch PWN", "not valid JSON near touch PWN"),
]  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: refusal.id)
def test_what_is_not_certain_is_refused_with_one_way(tmp_path: Path, refusal: Refusal) -> None:
    seen = play(tmp_path, refusal.name, refusal.given)
    assert seen.is_error and refusal.says in seen.result, seen.result
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "src"]


@pytest.mark.parametrize(
    ("offered", "called"),
    [
        (replace(edit, twin=apply_patch), PATCHES[0].becomes),
        (replace(apply_patch, twin=edit), EDIT),
        (replace(apply_patch, twin=edit), ("str_replace", EDIT[1])),
    ],
)
def test_of_two_tools_for_the_same_work_one_is_offered_and_both_run(
    tmp_path: Path, offered: Tool, called: tuple[str, dict[str, Any]]
) -> None:
    tree(tmp_path, {"notes.txt": "a note\n"})
    with serve(Reply(calls=[called]), Reply("done")) as server:
        events, _ = ask(server, tools=Toolset([read, offered], cwd=tmp_path))
        names = [each["function"]["name"] for each in server.requests[0]["tools"]]
    assert names == ["read", offered.name] and (tmp_path / "notes.txt").read_text() == "b\n"
    assert "notes.txt" in all_of(ToolStart, events)[0].title


def test_a_remark_is_kept_if_it_is_a_parameter_of_the_tool() -> None:
    specs = [AgentSpec("general", "does all")]
    task = Subagents(specs, equip=lambda spec, session_id: pytest.fail()).tool
    given = {"description": "d", "instructions": "p", "subagent_type": "general", "reason": "r"}
    mended = task.slips.mend(given, task.parameters["properties"])
    assert mended == {"description": "d", "prompt": "p", "agent": "general"}


def test_a_tool_of_ones_own_gets_its_arguments_as_they_came(tmp_path: Path) -> None:
    @tool
    def note(file_path: str, description: str, reason: str = "") -> str:
        """Take a note.

        file_path: where
        description: what
        reason: why
        """
        return f"{file_path}: {description} {reason}"

    given = {"file_path": "a", "description": "b", "reason": "c"}
    with serve(
        Reply(calls=[("note", given)]), Reply(calls=[("Note", given)]), Reply("done")
    ) as server:
        ask(server, tools=[note])
        answers = [each for each in server.requests[-1]["messages"] if each["role"] == "tool"]
    assert [answer["content"] for answer in answers] == ["a: b c", "a: b c"]
