"""Speed and memory, measured whole: real processes against a real server on loopback.

    python tests/bench/bench.py            all of it (a minute)
    python tests/bench/bench.py start step token memory

Next to each of our figures is what it is compared with in the same run: the machine's speed
drifts.
"""

from __future__ import annotations

import gc
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pexpect

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from coder.devtools.scripted import Body, Reply, ScriptedServer  # noqa: E402

REPEATS = 7
# The least that such a program can do: a socket, json, and the command
BARE = """
import json, os, socket, subprocess
host, port = os.environ["OPENAI_BASE_URL"].split("/")[2].split(":")
sock = socket.create_connection((host, int(port)))
file, calls = sock.makefile("rb"), [{}]
messages = [{"role": "user", "content": "go"}]
while calls:
    body = json.dumps({"model": "m", "stream": True, "messages": messages}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
    sock.sendall(head.encode() + body)
    while file.readline().strip():
        pass
    text, calls = "", []
    while size := int(file.readline(), 16):
        for line in file.read(size + 2).split(b"\\n"):
            choices = json.loads(line[6:])["choices"] if line.startswith(b"data: {") else ()
            for delta in (choice["delta"] for choice in choices):
                text += delta.get("content") or ""
                for call in delta.get("tool_calls") or ():
                    if call.get("id"):
                        calls.append(call)
                    else:
                        calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    file.readline()
    messages.append({"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})})
    for call in calls:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout})
"""
PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, capture_output=True, stdin=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


VARIABLES = 60  # of the environment, as in a usual shell; each command is given them


def environment(url: str, home: str) -> dict[str, str]:
    names = [f"SOME_SETTING_{number}" for number in range(VARIABLES - len(os.environ))]
    return (
        os.environ
        | dict.fromkeys(names, "/usr/lib/some/folder:" * 10)
        | {
            "OPENAI_BASE_URL": url,
            "OPENAI_MODEL": "m",
            "HOME": home,
            "XDG_DATA_HOME": home,
            "XDG_CONFIG_HOME": home,
            "PYTHONPATH": str(ROOT),
            "TERM": "xterm-256color",
        }
    )


def coder(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "coder", *arguments]


def show(
    name: str, values: list[float], unit: str, scale: float = 1.0, other: float | None = None
) -> float:
    """Print median, least and most; returns the median, unscaled."""
    middle = statistics.median(values)
    ratio = f"   ({middle / other:.2f} of the comparison)" if other else ""
    extent = f"({min(values) * scale:.2f} to {max(values) * scale:.2f})"
    print(f"{name:<46} {middle * scale:8.2f} {unit}   {extent}{ratio}")
    return middle


def timed(command: list[str], env: dict[str, str] | None = None) -> float:
    started = time.monotonic()
    null = subprocess.DEVNULL
    subprocess.run(
        command,
        env=env,
        stdin=null,
        stdout=null,
        stderr=null,
        check=True,
    )
    return time.monotonic() - started


def prompt_time(env: dict[str, str], home: str) -> float:
    """Seconds from the start of the process to the prompt of a session."""
    began = time.monotonic()
    child = pexpect.spawn(
        coder()[0],
        coder()[1:],
        env=env,
        cwd=home,
    )
    child.expect("\x1b\\[\\?2004h")  # directly in front of the prompt
    took = time.monotonic() - began
    child.sendeof()
    child.expect(pexpect.EOF)
    return took


def start(home: str) -> None:
    """From the start of the process to --help, to the prompt, to the first request of a one-shot
    run."""
    with ScriptedServer([Reply("hello")]) as server:
        env = environment(server.url, home)

        def times(*command: str) -> list[float]:
            return [timed([*command], env) for _ in range(REPEATS)]

        def first() -> float:
            began = time.monotonic()
            timed(coder("hi"), env)
            return server.times[-1] - began

        bare = show("python -c pass", times(sys.executable, "-c", "pass"), "s")
        show("--help", times(*coder("--help")), "s", other=bare)
        show(
            "REPL prompt",
            [prompt_time(env, home) for _ in range(REPEATS)],
            "s",
            other=bare,
        )
        values = [first() for _ in range(REPEATS)]
        show("first request of a one-shot run", values, "s", other=bare)


def step(home: str) -> None:
    """From the last byte of an answer to the next request, with a real command (`true`) run in
    between."""

    def script(body: Body) -> Reply:
        turn = sum(message["role"] == "tool" for message in body["messages"])
        return Reply(calls=[("bash", {"command": f"true {turn}"})]) if turn < 405 else Reply("done")

    commands = {"bare socket": [sys.executable, "-c", BARE]}
    commands["coder"] = coder("-y", "-q", "--max-steps", "500", "go")
    bases: dict[int, float] = {}
    for name, command in commands.items():
        with ScriptedServer(script) as server:
            timed(command, environment(server.url, home))
            gaps = [after - before for before, after in zip(server.sent, server.times[1:])]
        for at in (10, 50, 400):
            values = gaps[at - 5 : at + 5]
            middle = show(f"step {at}, {name}", values, "ms", 1000, bases.get(at))
            bases.setdefault(at, middle)


def token(home: str) -> None:
    """Processor time of a run with 20,000 tokens less one with 50, per token."""

    def used(command: list[str], tokens: int) -> float:
        with ScriptedServer([Reply("word " * tokens)]) as server:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            timed(command, environment(server.url, home))
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    commands = {
        "bare socket": [sys.executable, "-c", BARE],
        "coder": coder("-q", "hi"),
    }
    rows: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(3):
        for name, command in commands.items():
            rows[name].append((used(command, 20_000) - used(command, 50)) / 19_950)
    base = show("a token, bare socket", rows["bare socket"], "µs", 1e6)
    show("a token, coder", rows["coder"], "µs", 1e6, base)


def memory(home: str) -> None:
    """Peak memory of a whole run with 2 GB of output of one command."""
    giant = Reply(calls=[("bash", {"command": "head -c 2147483648 /dev/zero"})])
    scripts = {
        "peak memory, no tool": [Reply("hello")],
        "peak memory, 2 GB of output": [giant, Reply("done")],
    }
    for name, script in scripts.items():
        with ScriptedServer(script) as server:
            command = [sys.executable, "-c", PEAK, *coder("-y", "go")]
            env = environment(server.url, home)
            done = subprocess.run(
                command,
                env=env,
                text=True,
                capture_output=True,
                check=True,
            )
            print(f"{name:<46} {int(done.stdout) / 1024:8.0f} MB")


if __name__ == "__main__":
    gc.disable()  # the server keeps every request: its collector would stand in our figures
    parts = {"start": start, "step": step, "token": token, "memory": memory}
    for chosen in sys.argv[1:] or parts:
        with tempfile.TemporaryDirectory() as folder:
            parts[chosen](folder)
