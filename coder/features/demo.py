"""The demo: a scripted model behind a real server repairs a small project through real tools.

No language model takes part, and the script says so. It is a program that reads the conversation it is sent, as a model
does: it lists the folder, runs the tests, finds the broken line in the traceback it gets back, edits that line by one of
a few rules, and runs the tests again. What it says depends on what the tools answer; break one, and it reports that.

What it leaves out: any understanding. A traceback that no rule fits ends in an honest report.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coder.features.scripted import Body, Reply, ScriptedServer
from coder.text import clean

PROMPT = "The tests of this project fail. Find out why and repair it."
TESTS = "python3 -m unittest 2>&1"
PACE = 0.02  # seconds between two words, so that one can watch
MAX_EDITS = 6


def script(body: Body) -> Reply:
    """The next answer to a conversation."""
    history = [message for message in body["messages"] if message["role"] != "system"]
    start = max((at for at, message in enumerate(history) if message["role"] == "user"), default=0)
    done = _turns(history[start:])
    offered = {tool["function"]["name"] for tool in body.get("tools") or ()}
    if missing := {"ls", "bash", "read", "edit"} - offered:
        return Reply(f"I am a script and no language model. I need the tools {', '.join(sorted(missing))}, which were not offered.")
    if not done:
        return Reply("I am a script, not a language model: what I say is decided by what the tools answer. "
                     "First I look at what is here.", [("ls", {})])
    name, arguments, result = done[-1]
    return AFTER[name](done, arguments, result)


Turn = tuple[str, dict[str, Any], str]  # a tool, its arguments, its result


def _turns(messages: list[Body]) -> list[Turn]:
    """The calls since the user spoke, each with its result."""
    results = {message["tool_call_id"]: str(message["content"]) for message in messages if message["role"] == "tool"}
    return [(call["function"]["name"], json.loads(call["function"]["arguments"]), results.get(call["id"], ""))
            for message in messages for call in message.get("tool_calls") or ()]


# ---- what follows on what --------------------------------------------------------------------------------


def _after_ls(done: list[Turn], arguments: dict[str, Any], result: str) -> Reply:
    tests = [line for line in result.splitlines() if re.fullmatch(r"test\w*\.py", line)]
    if not tests:
        return Reply(f"I look for files named test*.py to run, and the listing shows none:\n{_quoted(result)}\n"
                     "That is all a script like me can do here.")
    return Reply(f"There are tests in {', '.join(tests)}. I run them.", [("bash", {"command": TESTS})])


def _after_bash(done: list[Turn], arguments: dict[str, Any], result: str) -> Reply:
    edits = [turn for turn in done if turn[0] == "edit"]
    ran = re.search(r"^Ran ([1-9]\d*) tests? in .*\n\nOK$", result, re.M)  # none skipped; an OK of the tests' own is not enough
    if ran and not re.search(r"^(FAILED|\[exit code)", result, re.M):
        return Reply(_summary(edits, ran[1]))
    failure = _failure(result)
    if failure is None:
        return Reply(f"I asked for the tests and got no traceback that I can read:\n{_quoted(result)}\nI stop here.")
    if len(edits) >= MAX_EDITS:
        return Reply(f"After {len(edits)} edits the tests still fail: {failure.error}. I stop here.")
    return Reply(f"`{failure.error}` in {failure.path}, line {failure.line}. I read that file.", [("read", {"path": failure.path})])


def _after_read(done: list[Turn], arguments: dict[str, Any], result: str) -> Reply:
    failure = _failure(next(text for name, _, text in reversed(done) if name == "bash"))
    lines = dict(re.findall(r"^(\d+)\t(.*)$", result, re.M))
    if failure is None or str(failure.line) not in lines:
        return Reply(f"I wanted to read line {failure.line if failure else '?'} and got:\n{_quoted(result)}\nI stop here.")
    line = lines[str(failure.line)]
    for fits, mend, why in RULES:
        if (found := re.search(fits, failure.error)) and (mended := mend(line, found, result)) and mended != line:
            return Reply(why, [("edit", {"path": failure.path, "old_string": line, "new_string": mended})])
    return Reply(f"Line {failure.line} is `{line.strip()}`, and for `{failure.error}` I have no rule. A language model is needed here.")


def _after_edit(done: list[Turn], arguments: dict[str, Any], result: str) -> Reply:
    if not result.startswith("Edited"):
        return Reply(f"The edit tool did not make the change. It said:\n{_quoted(result)}\nSo the project is as it was, and I stop here.")
    return Reply("Changed. I run the tests again.", [("bash", {"command": TESTS})])


AFTER: dict[str, Callable[[list[Turn], dict[str, Any], str], Reply]] = {
    "ls": _after_ls, "bash": _after_bash, "read": _after_read, "edit": _after_edit}


def _summary(edits: list[Turn], tests: str) -> str:
    if not edits:
        return f"All {tests} tests pass already. There is nothing to repair."
    changes = "\n".join(f"- {a['path']}: `{a['old_string'].strip()}` is now `{a['new_string'].strip()}`" for _, a, _ in edits)
    return f"Repaired, and all {tests} tests pass now. What I changed:\n{changes}"


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.splitlines()[-8:])


# ---- reading a traceback, mending a line -----------------------------------------------------------------


class Failure:
    """The innermost line of the project's own code in the first traceback, and the error there."""

    def __init__(self, path: str, line: int, error: str) -> None:
        self.path, self.line, self.error = path, line, error


def _failure(output: str) -> Failure | None:
    traceback = re.search(r"^Traceback .*?^(\w+(?:Error|Exception)\b.*?)$", output, re.M | re.S)
    if not traceback:
        return None
    frames = re.findall(r'^  File "([^"]+)", line (\d+), in ', traceback[0], re.M)
    own = [(path, line) for path, line in frames if not Path(path).name.startswith("test") and "/lib/python" not in path]
    if not own:
        return None
    return Failure(Path(own[-1][0]).name, int(own[-1][1]), traceback[1])  # the tests lie beside the code they test


def _rename(line: str, error: re.Match[str], file: str) -> str:
    """The name that is written like the unknown one and occurs elsewhere in the file."""
    names = [name for name in set(re.findall(r"[A-Za-z_]\w+", file)) if name != error[1]]
    meant = difflib.get_close_matches(error[1], sorted(names), 1, 0.7)
    return re.sub(rf"\b{re.escape(error[1])}\b", meant[0], line) if meant else ""


def _guard_division(line: str, error: re.Match[str], file: str) -> str:
    found = re.fullmatch(r"(\s*return .+ / (\S+))", line)
    return f"{found[1]} if {found[2]} else 0" if found else ""


RULES: list[tuple[str, Callable[[str, re.Match[str], str], str], str]] = [
    (r"NameError: name '(\w+)' is not defined", _rename, "A misspelt name; the file has one that is written almost like it."),
    (r"AttributeError: .*attribute '(\w+)'", _rename, "A misspelt attribute; the file has a name that is written almost like it."),
    (r"ZeroDivisionError", _guard_division, "A division by zero: the empty case needs an answer of its own."),
]


# ---- running it ------------------------------------------------------------------------------------------


def scratch_project() -> Path:
    """A copy of the broken project in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="coder-demo-"))
    for source in (Path(__file__).parent / "demo_project").iterdir():
        if source.is_file():
            shutil.copy(source, folder)
    return folder


def demo_server(port: int = 0, pace: float = PACE) -> ScriptedServer:
    """The script behind a server."""
    def paced(body: Body) -> Reply:
        reply = script(body)
        reply.pace = pace
        return reply

    return ScriptedServer(paced, port)


def main(argv: list[str]) -> int:
    """`python -m coder demo --port N`: the server alone, for any client."""
    parser = argparse.ArgumentParser(prog="python -m coder demo", description="Serve the demo's scripted model on loopback.")
    parser.add_argument("--port", type=int, default=8321, help="default 8321; 0 takes a free one")
    arguments = parser.parse_args([clean(word) for word in argv])  # an error holds what was given
    if not 0 <= arguments.port <= 65535:
        parser.error("--port has to be a number from 0 to 65535")
    try:
        server = demo_server(arguments.port)
    except OSError as error:
        sys.stderr.write(f"port {arguments.port}: {error.strerror}\n")
        return 2
    sys.stderr.write(f"A scripted model, no language model, at {server.url} (model: script). Try, in another terminal:\n"
                     f"  OPENAI_BASE_URL={server.url} OPENAI_MODEL=script python -m coder \"{PROMPT}\"\nCtrl+C ends it.\n")
    with contextlib.suppress(KeyboardInterrupt):
        server.serve()
    return 0
