"""The slips of models that the built-in tools take, and what they say to those that they refuse.

The names are those of Claude Code, opencode, codex, gemini-cli, Cline and their like. See
coder/slips.py.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
from typing import Any, TypeGuard

from coder.slips import Arguments, Slips

# Remarks of the model on its own call, for a user interface that shows them
REMARKS = frozenset(
    {"description", "explanation", "reason", "justification", "requires_approval", "is_input"}
)
PATHS = dict.fromkeys(("file_path", "filePath", "filepath", "filename", "file"), "path")
FOLDERS = dict.fromkeys(
    ("dir", "directory", "dir_path", "folder", "relative_workspace_path"), "path"
)
OLD_AND_NEW = dict.fromkeys(("old_str", "oldString", "oldText", "old_text", "search"), "old_string")
OLD_AND_NEW |= dict.fromkeys(
    ("new_str", "newString", "newText", "new_text", "replace"), "new_string"
)

FENCE = r"(?s)\s*```[\w+-]*[ \t]*\n(.*?)\n?```\s*"
SHELLS = {"bash", "sh", "zsh", "/bin/bash", "/bin/sh", "/usr/bin/bash", "/bin/zsh"}
SHELL_OPTIONS = ("-c", "-lc")
ONE_FILE = "one file per call; several calls in one answer run side by side"


def _is_text_list(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


# ---- read, ls, grep, glob -------------------------------------------------------------------


LINE_RANGE = r"\s*(\d+)\s*-\s*(\d+)\s*"


def _take_single_path(arguments: Arguments) -> Arguments:
    """A list of one path is that path."""
    path = arguments.get("path")
    if _is_text_list(path) and len(path) == 1:
        return arguments | {"path": path[0]}
    return arguments


def _convert_read(arguments: Arguments) -> Arguments:
    """A range of lines in another form becomes offset and limit; a read harms nobody."""
    converted = _take_single_path(arguments)
    bounds = _line_range(converted)
    if bounds is None or "limit" in converted:
        return converted
    first, last = bounds
    taken = ("view_range", "start_line", "end_line", "offset")
    rest = {name: value for name, value in converted.items() if name not in taken}
    rest["offset"] = first
    if last >= first:  # -1 is the end of the file
        rest["limit"] = last - first + 1
    return rest


def _line_range(arguments: Arguments) -> tuple[int, int] | None:
    """The first and the last line, if the arguments have a range of lines."""
    bounds: Any = arguments.get("view_range")
    if bounds is None and "start_line" in arguments:
        bounds = [arguments["start_line"], arguments.get("end_line", -1)]
    if bounds is None:
        numbers = re.fullmatch(LINE_RANGE, str(arguments.get("offset")))
        return (int(numbers[1]), int(numbers[2])) if numbers else None
    if isinstance(bounds, list) and [type(bound) for bound in bounds] == [int, int]:
        return bounds[0], bounds[1]
    return None


def _take_workspace(arguments: Arguments) -> Arguments:
    """An empty path is the workspace."""
    converted = _take_single_path(arguments)
    if converted.get("path") == "":
        del converted["path"]
    return converted


READ = Slips(
    names=("read_file", "view", "view_file", "open_file", "cat"),
    parameters=PATHS | {"paths": "path", "start": "offset", "line": "offset"},
    dropped=REMARKS,
    convert=_convert_read,
    hints={"paths": ONE_FILE, "path": ONE_FILE},
)
LS = Slips(
    names=("list_dir", "list_directory", "list_files", "list"),
    parameters=PATHS | FOLDERS,
    dropped=REMARKS,
    convert=_take_workspace,
)
GREP = Slips(
    names=("search_files", "grep_search", "search_file_content", "ripgrep", "rg", "search"),
    parameters={
        **PATHS,
        **FOLDERS,
        "query": "pattern",
        "regex": "pattern",
        "include": "glob",
        "file_pattern": "glob",
        "-i": "ignore_case",
        "case_insensitive": "ignore_case",
        "-C": "context",
        "head_limit": "limit",
        "max_results": "limit",
    },
    dropped=REMARKS | {"-n", "output_mode"},
    convert=_take_workspace,
)
GLOB = Slips(
    names=("file_search", "find_files", "find"),
    parameters={**FOLDERS, "glob": "pattern", "query": "pattern", "glob_pattern": "pattern"},
    dropped=REMARKS,
    convert=_take_workspace,
)

# ---- write, edit, apply_patch ---------------------------------------------------------------


def _convert_write(arguments: Arguments) -> Arguments:
    """An object as the content of a JSON file is that JSON."""
    content = arguments.get("content")
    if isinstance(content, dict) and str(arguments.get("path")).endswith(".json"):
        return arguments | {"content": json.dumps(content, indent=2, ensure_ascii=False) + "\n"}
    return arguments


def _convert_edit(arguments: Arguments) -> Arguments:
    """A list of one change is that change; one expected replacement is what an edit makes."""
    converted = dict(arguments)
    if converted.get("expected_replacements") == 1:
        del converted["expected_replacements"]
    edits: Any = converted.get("edits", ())
    match edits:
        case None:
            del converted["edits"]
        case [dict()]:
            edit: Arguments = edits[0]
            change = {OLD_AND_NEW.get(name, name): value for name, value in edit.items()}
            rest = {name: value for name, value in converted.items() if name != "edits"}
            if not change.keys() & rest.keys():
                return rest | change
    return converted


# A command line of codex
HEREDOC = r"(?si)(?:apply_?patch\s*)?<<-?\s*['\"]?(?P<end>\w+)['\"]?\n(?P<patch>.*?)\n(?P=end)"
SECTION = r"\*\*\* (?:Add|Update|Delete) File: *\S"
REPEATED = r"(?m)^(\*\*\* \w+ File: .*)\n(?=\1$)"
# A file in a unified diff, up to the next one
FILE_OF_DIFF = (
    r"(?m)^(?:(?:diff --git|index|new file mode|deleted file mode) .*\n)*"
    r"--- (?P<old>[^\t\n]+).*\n"
    r"\+\+\+ (?P<new>[^\t\n]+).*"
    r"(?P<hunks>\n@@ -.*(?:\n(?!--- .*\n\+\+\+ |diff --git |\*\*\* ).*)*)"
)
NO_FILE = "/dev/null"


def _convert_patch(arguments: Arguments) -> Arguments:
    """codex's own tool takes a command: ["apply_patch", "*** Begin Patch..."]."""
    match arguments.get("patch"):
        case ["apply_patch", str(patch)] | str(patch):
            return arguments | {"patch": _whole_patch(patch)}
    return arguments


def _whole_patch(argument: str) -> str:
    """The patch that a unified diff or another envelope means; anything else unchanged."""
    text = argument.strip().replace("\r\n", "\n")
    fenced = re.fullmatch(FENCE, text)
    if fenced:
        text = fenced[1].strip()
    command = re.fullmatch(HEREDOC, text)
    if command:
        text = command["patch"].strip()
    text = text.removeprefix("*** Begin Patch").removesuffix("*** End Patch").strip()
    text = re.sub(FILE_OF_DIFF, _section_of_diff, text)
    text = re.sub(REPEATED, "", text)
    if re.match(SECTION, text):
        return f"*** Begin Patch\n{text}\n*** End Patch"
    return argument


def _section_of_diff(file: re.Match[str]) -> str:
    """The section for a file of a unified diff; anything else, such as a rename, unchanged."""
    old = file["old"].strip()
    new = file["new"].strip()
    path = old.removeprefix("a/")
    if old == NO_FILE:
        added = [line for line in file["hunks"].split("\n") if not line.startswith("@@ ")]
        return f"*** Add File: {new.removeprefix('b/')}" + "\n".join(added)
    if new == NO_FILE:
        return f"*** Delete File: {path}"
    if old == new:
        return f"*** Update File: {old}{file['hunks']}"
    if path == new.removeprefix("b/"):
        return f"*** Update File: {path}{file['hunks']}"
    return file[0]


# They take several changes, or commands of their own
OTHER_EDITORS = (
    "str_replace_editor",
    "str_replace_based_edit_tool",
    "multi_edit",
    "multiedit",
    "apply_diff",
)
WRITE = Slips(
    names=("write_file", "create_file", "write_to_file", "save_file", "create"),
    parameters=PATHS | dict.fromkeys(("text", "contents", "file_text", "file_content"), "content"),
    dropped=REMARKS,
    convert=_convert_write,
    hints={"content": "send one string with newlines"},
)
EDIT = Slips(
    names=("edit_file", "replace", "str_replace", "replace_in_file"),
    parameters=PATHS | OLD_AND_NEW | {"replaceAll": "replace_all"},
    dropped=REMARKS | {"instruction"},
    convert=_convert_edit,
    hints={"edits": "one change per call: edit(path, old_string, new_string)"}
    | dict.fromkeys(OTHER_EDITORS, "here it is edit(path, old_string, new_string)"),
)
# It is offered without write
APPLY_PATCH = Slips(
    names=("applypatch",),
    parameters={"input": "patch", "diff": "patch", "patchText": "patch", "command": "patch"},
    dropped=REMARKS,
    convert=_convert_patch,
    hints=dict.fromkeys((*OTHER_EDITORS, "write", *WRITE.names), "here it is apply_patch(patch)"),
)

# ---- bash -----------------------------------------------------------------------------------


def _command_text(command: Any) -> Any:
    """The command line that a list of words, also as JSON, or a fenced block means."""
    if isinstance(command, str):
        return _command_in_text(command)
    if not _is_text_list(command):
        return command
    if _is_shell_call(command):
        return command[2]
    return shlex.join(command)


def _command_in_text(command: str) -> str:
    stripped = command.strip()
    text = stripped
    fenced = re.fullmatch(FENCE, command)
    if fenced:
        text = fenced[1]
    if text.startswith("$ ") and "\n" not in text:
        text = text[2:]
    if text.startswith("["):
        with contextlib.suppress(ValueError):
            words = json.loads(text)
            if _is_shell_call(words):
                return str(words[2])
    return command if text == stripped else text


def _is_shell_call(words: Any) -> bool:
    """Is it a list like ["bash", "-lc", "ls"]?"""
    if not _is_text_list(words) or len(words) != 3:
        return False
    return words[0] in SHELLS and words[1] in SHELL_OPTIONS


def _convert_bash(arguments: Arguments) -> Arguments:
    converted = dict(arguments)
    if "command" in converted:
        converted["command"] = _command_text(converted["command"])
    timeout = converted.get("timeout")
    if isinstance(timeout, float) and math.isfinite(timeout):
        converted["timeout"] = math.ceil(timeout)
    return converted


OTHER_FOLDER = "write it into the command: cd DIR && COMMAND"
BACKGROUND = "put & at the end of the command and its output in a file"
NO_WEB = "there is no web tool here; bash has curl if the network is on"
BASH = Slips(
    names=(
        "run_shell",
        "run_shell_command",
        "execute_command",
        "run_command",
        "run_terminal_cmd",
        "terminal",
        "shell",
        "local_shell",
        "exec_command",
        "exec",
        "sh",
    ),
    parameters={"cmd": "command", "script": "command", "timeout_seconds": "timeout"},
    dropped=REMARKS,
    convert=_convert_bash,
    hints={
        "cwd": OTHER_FOLDER,
        "workdir": OTHER_FOLDER,
        "working_directory": OTHER_FOLDER,
        "dir": OTHER_FOLDER,
        "run_in_background": BACKGROUND,
        "background": BACKGROUND,
        "is_background": BACKGROUND,
        "python": "run it with bash: python3 -c '...'",
        "execute_python": "run it with bash: python3 -c '...'",
        "web_search": NO_WEB,
        "web_fetch": NO_WEB,
        "webfetch": NO_WEB,
    },
)

# ---- todo, task -----------------------------------------------------------------------------


def _convert_todo(arguments: Arguments) -> Arguments:
    """A list of texts is a checklist of which nothing has begun; a single item is a list of one."""
    items = arguments.get("items")
    if isinstance(items, dict):
        return arguments | {"items": [items]}
    if not _is_text_list(items):
        return arguments
    return arguments | {"items": [{"text": text, "status": "pending"} for text in items]}


TODO = Slips(
    names=("todo_write", "todowrite", "update_plan", "write_todos", "update_todo_list"),
    parameters={"todos": "items", "plan": "items", "tasks": "items"},
    dropped=REMARKS,
    convert=_convert_todo,
)
TASK = Slips(
    names=("agent", "subagent", "dispatch_agent", "delegate"),
    parameters={"subagent_type": "agent", "agent_type": "agent", "instructions": "prompt"},
    dropped=REMARKS - {"description"},
)
