"""A whole agent in about 140 lines, standard library only. It passes all chapters of the tour.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... OPENAI_MODEL=... python small_agent.py "PROMPT"

A number in a comment is the chapter that explains what follows.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

Message = dict[str, Any]
Past = list[tuple[str, str]]  # the calls of a run so far, and their results

SAVED = Path("conversation.json")
REPEATED = "Not run: the same call had the same result twice. Do something else."


def tool(name: str, *parameters: str) -> Message:
    properties = {each: {"type": "string"} for each in parameters}
    schema = {"type": "object", "properties": properties, "required": parameters}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


BASH = tool("bash", "command")
TASK = tool("task", "description", "prompt")

# ---- the model -----------------------------------------------------------------------------------


def send(messages: list[Message], tools: list[Message]) -> Any:  # 1: one request
    address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    key = os.environ["OPENAI_API_KEY"]
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": tools}
    data = json.dumps(body | {"stream": True}).encode()
    return urlopen(Request(address, data, headers), timeout=180)


def read_answer(lines: Iterable[bytes]) -> Message:  # 2: streaming
    answer: Message = {"role": "assistant", "content": ""}
    calls: dict[int, Message] = {}
    finish = None
    for line in lines:
        if not line.startswith(b"data: {"):  # an empty line, a comment, [DONE]
            continue
        for choice in json.loads(line[6:])["choices"]:
            finish = choice["finish_reason"] or finish
            answer["content"] += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls") or []:
                add_part(calls, part)
    if finish is None:  # 5: a cut stream
        raise ConnectionError("the answer was cut")
    if calls:
        answer["tool_calls"] = list(calls.values())
    return answer


def add_part(calls: dict[int, Message], part: Message) -> None:  # 10: parts of two calls
    function = {"name": "", "arguments": ""}
    new = {"id": part.get("id"), "type": "function", "function": function}
    call = calls.setdefault(part["index"], new)
    for name, piece in part["function"].items():
        call["function"][name] += piece


def ask(messages: list[Message], tools: list[Message]) -> Message:  # 5: a busy server
    why = ""
    for attempt in range(6):
        seconds = 2.0**attempt
        try:
            return read_answer(send(messages, tools))
        except HTTPError as error:
            why = error.read().decode()
            if "context_length" in why:
                return ask(shorten(messages), tools)
            if error.code != 429 and error.code < 500:
                break
            seconds = float(error.headers.get("Retry-After", seconds))
        except (OSError, HTTPException) as error:
            why = str(error)
        time.sleep(seconds)
    sys.exit(f"no answer: {why}")


def shorten(messages: list[Message]) -> list[Message]:  # 9: a full context
    results = [each for each in messages if each["role"] == "tool" and len(each["content"]) > 100]
    if len(results) < 2:
        sys.exit("the context is full")
    for result in results[:-1]:
        result["content"] = "[taken out: the conversation was too long]"
    return messages


# ---- the tools -----------------------------------------------------------------------------------


def bash(command: str) -> str:  # 3: one tool
    argv = ["bash", "-c", f"exec 2>&1\n{command}"]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=120)
    return done.stdout.decode(errors="replace")[:15_000] or "(no output)"


def task(description: str, prompt: str) -> str:
    return run([{"role": "user", "content": prompt}], [BASH])


FUNCTIONS: dict[str, Any] = {"bash": bash, "task": task}


def run_call(call: Message) -> str:  # 6: broken arguments
    function = call["function"]
    if function["name"] not in FUNCTIONS:
        return f"Error: there is no such tool. The tools are: {', '.join(FUNCTIONS)}"
    try:
        return str(FUNCTIONS[function["name"]](**json.loads(function["arguments"])))
    except Exception as error:  # the model reads it, and can do better
        return f"Error: {error}"


def run_unless_repeated(call: Message, past: Past) -> str:  # 7: a repeated call
    key = str(call["function"])
    if past and past[-1] == (key, REPEATED):
        sys.exit("stopped: the model repeats a call")
    if len(past) > 1 and past[-1] == past[-2] and past[-1][0] == key:
        result = REPEATED
    else:
        result = run_call(call)
    past.append((key, result))
    return result


def run_calls(calls: list[Message], past: Past) -> Iterator[str]:
    if all(call["function"]["name"] == "task" for call in calls):  # 10: two tools side by side
        with ThreadPoolExecutor() as pool:
            yield from pool.map(run_call, calls)
    else:
        for call in calls:
            yield run_unless_repeated(call, past)


# ---- the loop ------------------------------------------------------------------------------------


def run(messages: list[Message], tools: list[Message]) -> str:  # 4: the loop
    past: Past = []
    while True:
        answer = ask(messages, tools)
        calls = answer.get("tool_calls", [])
        # 8: a stop may come at any moment, so each call has a result from now on
        results = [result_of(mend(call)) for call in calls]
        messages += [answer, *results]
        if not calls:
            return str(answer["content"])
        for result, text in zip(results, run_calls(calls, past)):
            result["content"] = text


def mend(call: Message) -> Message:  # 6: broken arguments
    try:
        json.loads(call["function"]["arguments"])
    except ValueError:  # servers take JSON only; no tool takes this
        call["function"]["arguments"] = json.dumps({"broken": call["function"]["arguments"]})
    return call


def result_of(call: Message) -> Message:
    return {"role": "tool", "tool_call_id": call["id"], "content": "Not run: stopped."}


def main() -> int:
    messages = json.loads(SAVED.read_text()) if SAVED.exists() else []
    messages.append({"role": "user", "content": sys.argv[-1]})
    try:
        print(run(messages, [BASH, TASK]))
    except KeyboardInterrupt:  # 8: a stop
        return 130
    finally:
        SAVED.write_text(json.dumps(messages))
    return 0


if __name__ == "__main__":
    sys.exit(main())
