"""Patches as models of other agents write them, twin tools, and arguments of tools of one's own.

Each row goes over the wire: a server answers with the call as the model wrote it, and the next
request shows what the model reads of it: the call and the result. All other slips of names,
parameters and JSON are in tests/data/model_cases.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from coder.agent.profiles import AgentSpec
from coder.agent.subagent import Subagents
from coder.devtools.scripted import Reply
from coder.events import ToolStart
from coder.tools.edit import edit
from coder.tools.files import read
from coder.tools.patch import apply_patch
from coder.toolset import Tool, Toolset, tool
from tests.harness import all_of, ask, serve
from tests.workspace import tree


@dataclass
class Seen:
    """What the next request shows of the patch and of its result, and if it failed."""

    patch: str
    result: str
    is_error: bool


def play(folder: Path, patch: str) -> Seen:
    tree(folder, {"src/app.py": "line 1\nline 2\n", "notes.txt": "a note\n"})
    with serve(
        Reply(calls=[("apply_patch", {"patch": patch})]),
        Reply("done"),
    ) as server:
        _, result = ask(server, tools=Toolset([apply_patch], cwd=folder))
        _, answer, message = server.requests[-1]["messages"]
    arguments = json.loads(answer["tool_calls"][0]["function"]["arguments"])
    is_error = bool(result.messages[-2]["meta"].get("is_error"))
    return Seen(arguments["patch"], message["content"], is_error)


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


@dataclass
class Patch:
    """A patch as the model writes it, and the sections that it becomes."""

    name: str
    written: str
    becomes: str = SECTION


PATCHES = [
    Patch("a diff in a fence", f"```diff\n{DIFF}\n```"),
    Patch("a here-document", f"apply_patch <<EOF\n{whole(SECTION)}\nEOF"),
    Patch("a here-document with double quotes", f'apply_patch <<"EOF"\n{whole(SECTION)}\nEOF'),
    Patch("a diff with CRLF", DIFF.replace("\n", "\r\n")),
    Patch("a diff without a/ and b/", DIFF.replace("a/", "").replace("b/", "")),
    Patch("a diff with a date", DIFF.replace("notes.txt\n", "notes.txt\t2026-01-01\n")),
    Patch("a diff in a section", whole(f"*** Update File: notes.txt\n{DIFF}")),
    Patch("git's diff of three files", GIT, becomes=BOTH),
]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_patch_in_another_form_is_shown_and_applied_as_a_whole_one(
    tmp_path: Path, patch: Patch
) -> None:
    seen = play(tmp_path, patch.written)
    assert seen.patch == whole(patch.becomes)
    assert not seen.is_error
    assert "M notes.txt" in seen.result


@dataclass
class Refusal:
    """A patch that is not certain: nothing is changed, and the result says this."""

    name: str
    written: str
    says: str


REFUSED = [
    Refusal(
        "text before a section",
        f"-a\n{SECTION}",
        "the first line of the patch has to be *** Begin Patch",
    ),
    Refusal("a renaming diff", DIFF.replace("b/notes", "b/other"), "has to be *** Begin Patch"),
    Refusal("a rename", "rename from notes.txt\nrename to n", "has to be *** Begin Patch"),
    Refusal("a fence in a section", "*** Add File: n.md\n+```\n+x\n```", "no place there: '```'"),
    Refusal(
        "git's remark on the last line",
        f"{DIFF}\n\\ No newline at end of file",
        "no place there: '\\\\ No newline",
    ),
]


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: refusal.name)
def test_a_patch_that_is_not_certain_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    seen = play(tmp_path, refusal.written)
    assert seen.is_error, seen.result
    assert refusal.says in seen.result, seen.result
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "src"]


EDIT = ("edit", {"path": "notes.txt", "old_string": "a note", "new_string": "b"})
PATCH = ("apply_patch", {"patch": whole(SECTION)})


@pytest.mark.parametrize(
    ("offered", "called"),
    [
        (replace(edit, twin=apply_patch), PATCH),
        (replace(apply_patch, twin=edit), EDIT),
        (replace(apply_patch, twin=edit), ("str_replace", EDIT[1])),
    ],
)
def test_of_two_tools_for_the_same_work_one_is_offered_and_both_run(
    tmp_path: Path, offered: Tool, called: tuple[str, dict[str, Any]]
) -> None:
    tree(tmp_path, {"notes.txt": "a note\n"})
    with serve(Reply(calls=[called]), Reply("done")) as server:
        events, _ = ask(
            server,
            tools=Toolset([read, offered], cwd=tmp_path),
        )
        names = [each["function"]["name"] for each in server.requests[0]["tools"]]
    assert names == ["read", offered.name]
    assert (tmp_path / "notes.txt").read_text() == "b\n"
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
