"""The tour: its checks against coder, the small agent and agents with one defect each; its pages
and commands."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from coder.cli.main import run
from coder.devtools.scripted import Reply, ScriptedServer
from coder.devtools.tour import small_agent
from coder.devtools.tour.checks import CHAPTERS, cut_anywhere
from coder.devtools.tour.full_context import OVERFLOW
from coder.devtools.tour.pages import FOLDER, LINK, page, place_of
from coder.devtools.tour.trial import NotYetError, Trial
from coder.devtools.tour.validity import RefusedError, check_request
from coder.loop import run_step
from tests.terminal import MARK, PATIENCE, OneShot, Run, bare, gone, until

ROOT = Path(__file__).parents[1]
SMALL_AGENT = Path(small_agent.__file__)
CODER = [sys.executable, "-P", "-m", "coder", "-y", "-q", "--no-session"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without settings, and coder as an import for its own process."""
    for name in ("CONFIG", "DATA", "CACHE", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / "home" / name))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CODER_RETRY_BASE", "0.01")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def verdict(number: int, command: list[str], folder: Path, patience: float = PATIENCE) -> str:
    """Why the program does not pass the chapter; "" if it does."""
    (folder / "trial").mkdir()
    with Trial(command, folder / "trial", patience) as trial:
        try:
            CHAPTERS[number].check(trial)
        except NotYetError as error:
            return str(error)
    return ""


# ---- what passes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", CHAPTERS)
def test_coder_passes(number: int, tmp_path: Path) -> None:
    assert verdict(number, CODER, tmp_path) == ""


@pytest.mark.parametrize("number", CHAPTERS)
def test_the_small_agent_passes(number: int, tmp_path: Path) -> None:
    assert verdict(number, [sys.executable, str(SMALL_AGENT)], tmp_path) == ""


KEEPING = """
[ -e begun ] && options=-c
touch begun
exec {coder} -y -q $options "$1"
"""


def test_a_kept_conversation_of_coder_is_in_order_after_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODER_TITLES", "off")
    (tmp_path / "keeping.sh").write_text(KEEPING.format(coder=f"{sys.executable} -P -m coder"))
    (tmp_path / "trial").mkdir()
    with Trial(["bash", str(tmp_path / "keeping.sh")], tmp_path / "trial") as trial:
        CHAPTERS[8].check(trial)
    assert trial.remarks == []


NODE = """
const { execSync } = require("child_process");
const { OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL } = process.env;
const parameters = { type: "object", properties: { command: { type: "string" } } };
const tools = [{ type: "function", function: { name: "bash", parameters } }];
const messages = [{ role: "user", content: process.argv.at(-1) }];

function bash({ command }) {
  try {
    return execSync(command + " 2>&1", { encoding: "utf8" }) || "(no output)";
  } catch (error) {
    return error.stdout;
  }
}

async function main() {
  for (;;) {
    const answer = await fetch(OPENAI_BASE_URL + "/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", Authorization: "Bearer " + OPENAI_API_KEY },
      body: JSON.stringify({ model: OPENAI_MODEL, messages, tools }),
    });
    const { message } = (await answer.json()).choices[0];
    messages.push(message);
    if (!message.tool_calls?.length) return console.log(message.content);
    for (const call of message.tool_calls) {
      const content = bash(JSON.parse(call.function.arguments));
      messages.push({ role: "tool", tool_call_id: call.id, content });
    }
  }
}
main();
"""


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
@pytest.mark.parametrize("number", [3, 4])
def test_a_program_in_another_language_passes(number: int, tmp_path: Path) -> None:
    (tmp_path / "mine.js").write_text(NODE)
    assert verdict(number, ["node", str(tmp_path / "mine.js")], tmp_path) == ""


# ---- what does not -------------------------------------------------------------------------------

RESULT = 'result["content"] = text'
KEEP = "messages += [answer, *results]"
BY_PIECES = """
    pieces = iter(lambda: lines.read1(99), b"")
    text = "".join(piece.decode(errors="replace") for piece in pieces)
    for line in [line.encode() for line in text.splitlines()]:"""
IN_TURN_OF_END = """
            works = [pool.submit(run_call, call) for call in calls]
            yield from (work.result() for work in as_completed(works))"""
TIMES = "past[-1] == past[-2] and past[-1][0] == key"
TAKEN_OUT = """for result in results[:-1]:
        result["content"] = "[taken out: the conversation was too long]\""""
ONE_TAKEN_OUT = "results[0]['content'] = '[taken out]'"
SUMMARY = """question = {"role": "user", "content": "What was done so far?"}
    summary = ask([messages[0], question], [])["content"]
    messages[1:-2] = [{"role": "user", "content": f"So far: {summary}"}]"""
AGAIN = """
def again(messages):
    for message in messages:
        if message["content"].startswith("[taken out"):
            message["content"] += " twice"
    return messages

# ---- the tools"""

# A chapter; the name of a defect, what is changed in the small agent, and the reason that is given
DEFECTS: list[tuple[int, str, list[tuple[str, str]], str]] = [
    (
        1,
        "no request",
        [("print(run(messages, [BASH, TASK]))", "print('hi')")],
        "no request has come",
    ),
    (1, "no key", [('"Authorization"', '"X-Key"')], "Authorization is not: Bearer $OPENAI_API_KEY"),
    (
        1,
        "v1 twice in the address",
        [("/chat/completions", "/v1/chat/completions")],
        "request 1: its address is /v1/v1/chat/completions, not /v1/chat/completions",
    ),
    (
        1,
        "another folder in the address",
        [("/chat/completions", "/foo/chat/completions")],
        "request 1: its address is /v1/foo/chat/completions, not /v1/chat/completions",
    ),
    (
        1,
        "no type of the body",
        [('"Content-Type": "application/json", ', "")],
        "request 1: the header Content-Type is not: application/json",
    ),
    (
        1,
        "another model",
        [('os.environ["OPENAI_MODEL"]', '"gpt-5"')],
        "the model of the request is not $OPENAI_MODEL",
    ),
    (
        1,
        "another prompt",
        [("sys.argv[-1]", '"Hello."')],
        "the last message of the user does not hold the prompt",
    ),
    (
        1,
        "prints nothing",
        [("print(run(messages, [BASH, TASK]))", "run(messages, [BASH, TASK])")],
        "was not printed",
    ),
    (
        1,
        "asks twice",
        [
            (
                "print(run(messages, [BASH, TASK]))",
                "run(messages[:], [])\n        print(run(messages, [BASH, TASK]))",
            )
        ],
        "there were more requests than one",
    ),
    (
        2,
        "no stream",
        [('body | {"stream": True}', "body")],
        'the request does not ask for a stream: "stream": true',
    ),
    (
        2,
        "decodes each piece",
        [("\n    for line in lines:", BY_PIECES)],
        "a character was torn: decode whole lines",
    ),
    (
        2,
        "takes a comment for data",
        [('if not line.startswith(b"data: {"):', "if not line.strip():")],
        "the program has ended with exit code 1",
    ),
    (
        2,
        "needs a choice in each event",
        [
            (
                'for choice in json.loads(line[6:])["choices"]:',
                'for choice in [json.loads(line[6:])["choices"][0]]:',
            )
        ],
        "the program has ended with exit code 1",
    ),
    (
        3,
        "offers no tool",
        [('"tools": tools', '"tools": []')],
        "the request offers no tool with the name bash",
    ),
    (
        3,
        "ends at a call",
        [("if not calls:", "if True:")],
        "the answer had a call, and no second request has come",
    ),
    (
        3,
        "another id",
        [('"tool_call_id": call["id"]', '"tool_call_id": "call_1"')],
        "the server refuses request 2: a result has the tool_call_id 'call_1', and no open call has this id",
    ),
    (3, "no result", [(KEEP, "messages += [answer]")], "has no result right after its message"),
    (
        3,
        "no call before the result",
        [(KEEP, "messages += results")],
        "and no open call has this id",
    ),
    (
        3,
        "rewrites the beginning",
        [
            (
                "send(messages, tools))",
                'send([{"role": "system", "content": str(time.time())}, *messages], tools))',
            )
        ],
        "request 2 does not begin with request 1: the cache is lost",
    ),
    (
        3,
        "offers its tools once",
        [('"tools": tools', '"tools": tools if len(messages) == 1 else []')],
        "request 2 does not offer the tools of request 1",
    ),
    (
        3,
        "no id of the call",
        [('"tool_call_id": call["id"], ', "")],
        "request 2: a message with the role tool has no tool_call_id",
    ),
    (
        3,
        "no content of the result",
        [(', "content": "Not run: stopped."}', "}"), (RESULT, "pass")],
        "request 2: a message with the role tool has no content",
    ),
    (
        3,
        "a number as the result",
        [(RESULT, 'result["content"] = 0')],
        "request 2: the content of a message with the role tool is no text",
    ),
    (
        3,
        "no name in the call",
        [(RESULT, f"{RESULT}\n            calls[0]['function'].pop('name')")],
        "request 2: the function of a call has no name",
    ),
    (
        3,
        "arguments that are no text",
        [
            (
                RESULT,
                f"{RESULT}\n            calls[0]['function']['arguments'] = {{'command': 'ls'}}",
            )
        ],
        "are no text with JSON in it",
    ),
    (
        3,
        "no type of the tool",
        [('"type": "function", "function": {"name": name', '"function": {"name": name')],
        "request 1: a tool has no type",
    ),
    (
        3,
        "makes the result up",
        [(RESULT, 'result["content"] = "ok"')],
        "the result is not what the command prints",
    ),
    (
        4,
        "ends after one call",
        [("if not calls:", "if not calls or len(messages) > 4:")],
        "the last answer had a call, and the loop has ended: 2 requests",
    ),
    (
        4,
        "an empty result",
        [(' or "(no output)"', "")],
        "the third command prints nothing, and its result is empty",
    ),
    (
        4,
        "looks at the finish_reason",
        [("    if calls:\n", '    if finish == "tool_calls":\n')],
        'the loop has ended: 2 requests. The finish_reason of that answer is "stop"',
    ),
    (
        4,
        "asks once more",
        [('return str(answer["content"])', 'return str(ask(messages, tools)["content"])')],
        "a request came after the answer without a call",
    ),
    (
        4,
        "loses stderr",
        [("exec 2>&1", "exec 2>/dev/null")],
        "the first result does not hold what its command wrote to stderr",
    ),
    (
        4,
        "ends with a failed command",
        [("timeout=120)", "timeout=120)\n    if done.returncode:\n        sys.exit(1)")],
        "the last answer had a call, and the loop has ended: 1 request",
    ),
    (
        5,
        "does not wait",
        [('seconds = float(error.headers.get("Retry-After", seconds))', "seconds = 0.1")],
        "the server said Retry-After: 1, and you came back after 0.",
    ),
    (
        5,
        "gives up",
        [("if error.code != 429 and error.code < 500:", "if True:")],
        "the server was busy (429), and you gave up",
    ),
    (
        5,
        "does not stream",
        [('body | {"stream": True}', "body")],
        'the request does not ask for a stream: "stream": true',
    ),
    (
        5,
        "takes the half",
        [("if finish is None:", "if False:")],
        "the second answer was cut (it has no finish_reason), and was not asked for again",
    ),
    (
        5,
        "keeps the half",
        [("why = str(error)", 'messages.append({"role": "assistant", "content": "This is only"})')],
        "an attempt that failed has changed the messages of the next one",
    ),
    (
        6,
        "closes the JSON",
        [('= json.dumps({"broken": call["function"]["arguments"]})', "+= '\"}'")],
        "a call was run although its arguments are cut",
    ),
    (
        6,
        "sends broken JSON back",
        [("result_of(mend(call))", "result_of(call)")],
        "are no JSON object",
    ),
    (
        6,
        "dies of broken JSON",
        [("except ValueError:", "except ZeroDivisionError:")],
        "the program gave up after a call that it could not run",
    ),
    (
        6,
        "dies of an unknown tool",
        [
            ('if function["name"] not in FUNCTIONS:', "if False:"),
            ("except Exception", "except TypeError"),
        ],
        "the program gave up after a call that it could not run",
    ),
    (
        6,
        "does not name its tools",
        [("The tools are: {', '.join(FUNCTIONS)}", "")],
        "the result of the unknown tool does not name the tools that there are",
    ),
    (
        6,
        "does not name the argument",
        [('return f"Error: {error}"', 'return "Error"')],
        "the result of the call without its argument does not name it",
    ),
    (
        7,
        "sees no repetition",
        [(TIMES, "False")],
        "the same call with the same result was run 7 times in a row",
    ),
    (
        7,
        "refuses a poll",
        [(TIMES, "past[-1][0] == past[-2][0] == key")],
        "its result changed each time, and the call was run 2 times, not 4",
    ),
    (
        7,
        "makes no call twice",
        [(TIMES, "past[-1][0] == key"), ("len(past) > 1", "past")],
        "its result changed each time, and the call was run 1 time, not 4",
    ),
    (
        7,
        "ends at once",
        [("result = REPEATED", 'sys.exit("stopped")')],
        "the run has ended before the model was told that it repeats itself",
    ),
    (
        7,
        "says nothing new",
        [("result = REPEATED", "result = past[-1][1]")],
        "the third result does not say why the call was not run",
    ),
    (
        7,
        "says nothing at all",
        [("Not run: the same call had the same result twice. Do something else.", "")],
        "the third result does not say why the call was not run",
    ),
    (
        7,
        "counts what was not in a row",
        [(TIMES, "past.count(past[-1]) > 1 and past[-1][0] == key")],
        "the call came again after the polls, and was run 1 time, not 2",
    ),
    (
        7,
        "tells and goes on",
        [('sys.exit("stopped: the model repeats a call")', "return REPEATED")],
        "the same call came a fourth time, and the run went on",
    ),
    (
        7,
        "ends with 0",
        [('sys.exit("stopped: the model repeats a call")', "sys.exit(0)")],
        "the run was stopped, and the exit code is 0",
    ),
    (
        8,
        "another exit code",
        [("return 130", "return 1")],
        "after Ctrl+C the exit code has to be 130, not 1",
    ),
    (
        8,
        "ignores Ctrl+C",
        [
            (
                "SAVED = ",
                "__import__('signal').signal(2, __import__('signal').SIG_IGN)\nSAVED = ",
            )
        ],
        "the program has not ended within 5 seconds",
    ),
    (
        8,
        "takes Ctrl+C for an error of the tool",
        [("except Exception", "except BaseException")],
        "the program has not ended within 5 seconds",
    ),
    (
        8,
        "leaves its command",
        [('["bash", "-c",', '["setsid", "--fork", "--wait", "bash", "-c",')],
        "the program has ended, and the command that it has started still runs",
    ),
    (
        8,
        "keeps a call without its result",
        [
            (KEEP, "messages.append(answer)"),
            (RESULT, f"{RESULT}\n            messages.append(result)"),
        ],
        "the server refuses request 3: the call",
    ),
    (
        8,
        "keeps half a call",
        [
            ("send(messages, tools))", "send(messages, tools), messages)"),
            ("read_answer(lines: Iterable[bytes]) -> Message:", "read_answer(lines, messages):"),
            ("    finish = None\n", "    finish = None\n    messages.append(answer)\n"),
            (
                "add_part(calls, part)\n",
                'add_part(calls, part)\n                answer["tool_calls"] = [*calls.values()]\n',
            ),
            (KEEP, "messages += results"),
        ],
        "the server refuses request 2: the arguments of the call",
    ),
    (
        9,
        "gives up",
        [('if "context_length" in why:', "if False:")],
        "the conversation was too long, and you gave up",
    ),
    (
        9,
        "sends it again",
        [("shorten(messages), tools", "messages, tools")],
        "the conversation is too long, and is sent again and again",
    ),
    (
        9,
        "loses the task",
        [(TAKEN_OUT, f"{TAKEN_OUT}\n    messages[0]['content'] = '?'")],
        "request 5 is shorter, and has lost the task of the user",
    ),
    (
        9,
        "cuts between a call and its result",
        [(TAKEN_OUT, "del messages[1:-1]")],
        "and no open call has this id",
    ),
    (
        9,
        "cuts each output from the beginning",
        [("[:15_000]", "[:1_000]")],
        "request 2 does not hold the whole output of command 1",
    ),
    (
        9,
        "shortens at each turn",
        [
            ("answer = ask(messages, tools)\n", "answer = ask(shorten(messages), tools)\n"),
            (' < 2:\n        sys.exit("the context is full")', " < 2:\n        return messages"),
        ],
        "request 3 does not hold the whole output of command 1",
    ),
    (
        9,
        "ends after two calls",
        [("if not calls:", "if not calls or len(messages) > 4:")],
        "the program has ended before the list was too long",
    ),
    (
        9,
        "takes out the newest",
        [("results[:-1]", "results[1:]")],
        "request 5 is shorter, and has lost the newest result",
    ),
    (
        9,
        "takes out all old calls",
        [(TAKEN_OUT, "del messages[1:-2]")],
        "request 5 is shorter, and has lost old calls: no summary is in their place",
    ),
    (
        9,
        "loses the system message",
        [
            ("SAVED.exists() else []", "SAVED.exists() else [RULES]"),
            ("SAVED = ", "RULES = {'role': 'system', 'content': 'Be brief.'}\nSAVED = "),
            (TAKEN_OUT, f"{TAKEN_OUT}\n    del messages[0]"),
        ],
        "request 5 is shorter, and has lost the system message",
    ),
    (
        9,
        "shortens again at the next turn",
        [
            ("answer = ask(messages, tools)", "answer = ask(again(messages), tools)"),
            ("# ---- the tools", AGAIN),
        ],
        "request 6 does not begin with request 5: the cache is lost",
    ),
    (
        10,
        "offers no task",
        [("[BASH, TASK]", "[BASH]")],
        "the request offers no tool with the name task",
    ),
    (
        10,
        "gives all parts to the newest call",
        [('part["index"]', 'len(calls) - (not part.get("id"))')],
        "the parts of the two calls are mixed up",
    ),
    (
        10,
        "knows one call alone",
        [('part["index"]', "0")],
        "the answer had two calls, and they are not in request 2",
    ),
    (
        10,
        "results in another order",
        [(KEEP, "messages += [answer, *results[::-1]]")],
        "the results do not stand in the order of the calls",
    ),
    (
        10,
        "commands side by side",
        [('if all(call["function"]["name"] == "task" for call in calls):', "if len(calls) > 1:")],
        "the second command needs the file of the first one, and was run before its end",
    ),
    (
        10,
        "another order of the tools",
        [('"tools": tools', '"tools": tools if len(messages) == 1 else tools[::-1]')],
        "the tools of request 2 are not exactly those of request 1: the cache is lost",
    ),
    (
        10,
        "second agents without tools",
        [('"content": prompt}], [BASH])', '"content": prompt}], [])')],
        "the second agent has no bash",
    ),
    (
        10,
        "second agents with task",
        [('"content": prompt}], [BASH])', '"content": prompt}], [BASH, TASK])')],
        "the second agent has the tool task, and could go on so",
    ),
    (
        10,
        "second agents with another prompt",
        [('"content": prompt}', '"content": description}')],
        "in a new conversation is not the prompt of a task: ['say a word']",
    ),
    (
        10,
        "second agents with more than their prompt",
        [
            (
                'return run([{"role": "user"',
                'return run([{"role": "user", "content": "?"}, {"role": "user"',
            )
        ],
        "the list of a second agent begins with more than its prompt",
    ),
    (
        10,
        "second agents without the loop",
        [
            (
                'return run([{"role": "user", "content": prompt}], [BASH])',
                'return ask([{"role": "user", "content": prompt}], [BASH])["content"]',
            )
        ],
        "a second agent has ended at a call: it needs the loop, too",
    ),
    (
        10,
        "one after the other",
        [('if all(call["function"]["name"] == "task" for call in calls):', "if False:")],
        "the second task began only after the first had its answer",
    ),
    (
        10,
        "no second agent",
        [('return run([{"role": "user", "content": prompt}], [BASH])', 'return "done"')],
        "two tasks were called, and 0 new conversations came",
    ),
    (
        10,
        "makes the result of a task up",
        [("prompt}], [BASH])", 'prompt}], [BASH]) and "done"')],
        "the result of a task is not the last answer of its second agent",
    ),
    (
        10,
        "results in the order of their end",
        [
            ("\n            yield from pool.map(run_call, calls)", IN_TURN_OF_END),
            ("ThreadPoolExecutor\n", "ThreadPoolExecutor, as_completed\n"),
        ],
        "the result of a task does not have the id of its own call",
    ),
]


@pytest.mark.parametrize(
    ("number", "changes", "reason"),
    [
        pytest.param(
            row[0],
            *row[2:],
            id=f"{row[0]} {row[1]}",
        )
        for row in DEFECTS
    ],
)
def test_a_program_with_one_defect_is_told_which(
    number: int, changes: list[tuple[str, str]], reason: str, tmp_path: Path
) -> None:
    assert reason in verdict(number, changed_agent(changes, tmp_path), tmp_path)


def changed_agent(changes: list[tuple[str, str]], folder: Path) -> list[str]:
    """The command of the small agent with these changes."""
    source = SMALL_AGENT.read_text()
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    mine = folder / "mine.py"
    mine.write_text(source)
    return [sys.executable, str(mine)]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param((TAKEN_OUT, SUMMARY), id="a summary"),
        pytest.param((RESULT, 'result["content"] = json.dumps({"out": text})'), id="JSON results"),
        pytest.param((TAKEN_OUT, ONE_TAKEN_OUT), id="one result at a time"),
    ],
)
def test_other_ways_through_a_full_context_pass(change: tuple[str, str], tmp_path: Path) -> None:
    assert verdict(9, changed_agent([change], tmp_path), tmp_path) == ""


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        pytest.param("import time; time.sleep(600)", "has not ended within 2 seconds", id="hangs"),
        pytest.param("while True: print('x' * 9999)", "more than 1,000,000 bytes", id="prints on"),
        pytest.param("while True: send()", "more than 30 requests", id="asks on"),
    ],
)
def test_a_program_that_passes_a_limit_is_ended(code: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ASKING.format(code))
    patience = 2.0 if "sleep" in code else PATIENCE
    assert reason in verdict(
        1,
        [sys.executable, str(tmp_path / "mine.py")],
        tmp_path,
        patience,
    )


ASKING = """
import json, os
from urllib.request import Request, urlopen
def send():
    body = {{"model": "script", "messages": [{{"role": "user", "content": "Say the word."}}]}}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    key = "Bearer " + os.environ["OPENAI_API_KEY"]
    headers = {{"Content-Type": "application/json", "Authorization": key}}
    return urlopen(Request(url, json.dumps(body).encode(), headers)).read()
{}
"""


@pytest.mark.parametrize("number", [2, 5])
def test_a_request_without_a_stream_is_told_at_once(number: int, tmp_path: Path) -> None:
    waiting = "import time\ntry: send()\nfinally: time.sleep(600)"
    (tmp_path / "mine.py").write_text(ASKING.format(waiting))
    program = [sys.executable, str(tmp_path / "mine.py")]
    reason = verdict(number, program, tmp_path, patience=20.0)
    assert reason == 'the request does not ask for a stream: "stream": true'


def test_what_a_program_leaves_running_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = os.urandom(8).hex()
    monkeypatch.setenv(MARK, mark)
    started = tmp_path / "started"
    script = f"sleep 600 & setsid sleep 600 & touch {started}; exit 1"
    assert verdict(1, ["bash", "-c", script], tmp_path)
    assert started.exists()
    gone(mark)


def test_a_program_that_ends_before_it_is_stopped_is_told_why(tmp_path: Path) -> None:
    reason = verdict(8, [sys.executable, "-c", "print('no request')"], tmp_path)
    assert reason.startswith("no request has come")


def test_ctrl_c_ends_the_check_and_the_program(tmp_path: Path) -> None:
    program = f"{sys.executable} -c 'import time; time.sleep(600)'"
    with (
        ScriptedServer([]) as server,
        OneShot(tmp_path / "place", server, "tour", "1", "--check", program) as place,
    ):
        until(lambda: place.running(f"{sys.executable} -c import"), "the program")
        place.kill(signal.SIGINT)
        assert place.end() == 130


# ---- the command ---------------------------------------------------------------------------------


def test_the_tour_keeps_what_was_passed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tour"]) == 0
    assert "passed 0 of 10" in capsys.readouterr().out
    shutil.copy(SMALL_AGENT, "mine.py")
    assert run(["tour", "1", "--check", f"{sys.executable} mine.py"]) == 0
    assert "Chapter 1, One request: passed." in capsys.readouterr().out
    assert run(["tour"]) == 0
    shown = capsys.readouterr().out
    assert "passed 1 of 10" in shown
    assert re.search(r"1  One request +passed\n +2  Streaming +you are here\n", shown)


def test_a_program_that_does_not_pass_is_told_why_and_what_came(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "mine.py").write_text("raise SystemExit('I stop here')")
    assert run(["tour", "1", "--check", f"{sys.executable} mine.py"]) == 1
    shown = capsys.readouterr().out
    assert "Chapter 1, One request: not yet.\n  no request has come" in shown
    assert "I stop here" in shown
    (home / "mine.py").write_text(SMALL_AGENT.read_text().replace('"Authorization"', '"X"'))
    assert run(["tour", "1", "--check", f"{sys.executable} mine.py"]) == 1
    assert '{"role": "user", "content": "Say the word."}' in capsys.readouterr().out
    assert run(["tour"]) == 0
    assert "passed 0 of 10" in capsys.readouterr().out


def test_a_file_that_is_not_there_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "mine.py").touch()
    assert run(["tour", "1", "--check", f"{sys.executable} -B miine.py"]) == 1
    shown = capsys.readouterr().out
    assert "Chapter 1, One request: not yet.\n  no file miine.py in this folder\n" in shown
    assert run(["tour", "1", "--check", f"{sys.executable} -B mine.py"]) == 1
    assert "  no request has come" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        pytest.param(["0"], "there is no chapter 0: they are 1 to 10", id="no such chapter"),
        pytest.param(["x"], "invalid int value: 'x'", id="no number"),
        pytest.param(["--check", "ls"], "--check needs the number of a chapter", id="no chapter"),
        pytest.param(["1", "--check", ""], "--check needs a command", id="no command"),
        pytest.param(["1", "--check", "'a"], "--check: No closing quotation", id="a quote"),
        pytest.param(
            ["1", "--check", "no-such-program"],
            "no-such-program cannot be started: No such file or directory",
            id="no such program",
        ),
    ],
)
def test_what_is_wrong_with_the_words_is_told(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tour", *words]) == 2
    assert f"coder: {reason}" in capsys.readouterr().err.replace("argument N: ", "")


def test_a_damaged_file_of_what_was_passed_counts_as_none(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = home / "home" / "DATA" / "coder" / "tour.json"
    notes.parent.mkdir(parents=True)
    for text in ("", "[]", '{"passed": 3}', '{"passed": [99]}'):
        notes.write_text(text)
        assert run(["tour"]) == 0
        assert "passed 0 of 10" in capsys.readouterr().out


# ---- the pages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", CHAPTERS)
def test_a_page_is_short_and_plain_in_a_pipe(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tour", str(number)]) == 0
    shown = capsys.readouterr().out
    assert shown == page(number)
    lines = shown.splitlines()
    assert lines[0] == f"# {number}. {CHAPTERS[number].title}"
    assert len(lines) <= 120
    assert max(len(line) for line in lines) <= 100
    assert f'coder tour {number} --check "python mine.py"' in lines


def test_a_page_on_a_terminal_is_styled_and_names_places_in_the_code(tmp_path: Path) -> None:
    with (
        ScriptedServer([]) as server,
        Run(tmp_path / "place", server, "tour", "4") as terminal,
    ):
        assert terminal.exit_code() == 0
        shown = bare(terminal.output)
    assert "## What goes wrong" not in shown
    assert "What goes wrong" in shown
    line = inspect.getsourcelines(run_step)[1]
    assert f"run_step (coder/loop.py:{line})" in shown
    assert f"The code is in {ROOT}." in shown


@pytest.mark.parametrize("number", CHAPTERS)
def test_each_link_of_a_page_leads_to_what_it_names(number: int) -> None:
    text = page(number)
    links = list(LINK.finditer(text))
    assert links
    assert len(links) == text.count("](")
    for link in links:
        path = (FOLDER / link["target"]).resolve()
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found: Any = import_module(module)
        for part in link["name"].split("."):
            found = getattr(found, part)
        found = getattr(found, "function", found)  # of a Tool
        found = getattr(found, "fget", found)  # of a property
        assert found.__module__ == module, link[0]
        assert place_of(link) == f"{path.relative_to(ROOT)}:{def_line(found)}"


def def_line(found: Any) -> int:
    """The line of `def` or `class`, which `ast` gives, below the decorators."""
    lines, first = inspect.getsourcelines(found)
    definition = re.compile(r"\s*(async def|def|class)\b")
    [above, *_] = [index for index, line in enumerate(lines) if definition.match(line)]
    return first + above


@pytest.mark.parametrize("number", CHAPTERS)
def test_what_a_page_shows_is_what_the_program_says(number: int) -> None:
    text = " ".join(page(number).split())
    # The refusal at its end is one of those that the defects above get
    refusal = text.split(f"Chapter {number}, {CHAPTERS[number].title}: not yet. ")[1]
    reasons = [reason for chapter, _, _, reason in DEFECTS if chapter == number]
    assert any(reason in refusal for reason in reasons)
    # A request on it is taken by the server, or refused in the words that are on the page
    for block in re.findall(r"```json\n(.*?)```", page(number), re.S):
        body = json.loads(block)
        if "messages" in body:
            try:
                check_request(body)
            except RefusedError as error:
                assert str(error) in text


def test_the_failures_that_pages_show_come_from_the_servers() -> None:
    with ScriptedServer([]) as server, pytest.raises(HTTPError) as error:
        urlopen(Request(f"{server.url}/chat/completions", b'{"prompt": "Say hello."}'))
    assert error.value.code == 400
    assert error.value.read().decode() in page(1)
    busy = Reply("slow down", status=429)
    assert json.dumps(busy.error()) in page(5)
    assert OVERFLOW.decode() in " ".join(page(9).split())
    events = b"".join(cut_anywhere(Reply("Grüße aus Köln"), {}))
    pieces = [events[start : start + 7] for start in range(0, len(events), 7)]
    torn = "".join(piece.decode(errors="replace") for piece in pieces)
    [shown] = [
        line for line in page(2).splitlines() if line.startswith("Gr\N{REPLACEMENT CHARACTER}")
    ]
    assert shown.split()[0] in torn
