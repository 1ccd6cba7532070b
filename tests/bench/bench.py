"""Speed and memory, measured whole: real processes against a real server on loopback.

    python tests/bench/bench.py            all of it (about two minutes)
    python tests/bench/bench.py start step token memory

Beside each of our figures stands what it is compared with in the same run: the machine's speed drifts. No test runs this.
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
# The client's own stream, as a program of ten lines reads it
NAIVE = """
import openai, sys
messages = [{"role": "user", "content": "hi"}]
for chunk in openai.OpenAI().chat.completions.create(model="m", stream=True, messages=messages):
    for choice in chunk.choices:
        sys.stdout.write(choice.delta.content or "")
"""
PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, capture_output=True, stdin=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def environment(url: str, home: str) -> dict[str, str]:
    return os.environ | {
        "OPENAI_BASE_URL": url,
        "OPENAI_MODEL": "m",
        "HOME": home,
        "XDG_DATA_HOME": home,
        "XDG_CONFIG_HOME": home,
        "PYTHONPATH": str(ROOT),
        "TERM": "xterm-256color",
    }


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
    subprocess.run(command, env=env, stdin=null, stdout=null, stderr=null, check=True)
    return time.monotonic() - started


def prompt_time(env: dict[str, str], home: str) -> float:
    """Seconds from the start of the process to the prompt of a session."""
    began = time.monotonic()
    child = pexpect.spawn(coder()[0], coder()[1:], env=env, cwd=home)
    child.expect("> ")
    took = time.monotonic() - began
    child.sendeof()
    child.expect(pexpect.EOF)
    return took


def start(home: str) -> None:
    """From the start of the process to --help, to the prompt, to the first request of a one-shot run."""
    with ScriptedServer([Reply("hello")]) as server:
        env = environment(server.url, home)

        def times(*command: str) -> list[float]:
            return [timed([*command], env) for _ in range(REPEATS)]

        def first() -> float:
            began = time.monotonic()
            timed(coder("hi"), env)
            return server.times[-1] - began

        bare = show("python -c pass", times(sys.executable, "-c", "pass"), "s")
        show("--help", times(*coder("--help")), "s")
        show("REPL prompt", [prompt_time(env, home) for _ in range(REPEATS)], "s")
        library = show("import openai", times(sys.executable, "-c", "import openai"), "s")
        values = [first() for _ in range(REPEATS)]
        middle = show("first request of a one-shot run", values, "s", other=library)
        rest = f"{'  of it beyond import openai':<46} {middle - library:8.2f} s"
        print(f"{rest}   (a bare interpreter: {bare:.2f})")


def step(home: str) -> None:
    """From the last byte of an answer to the next request, with a real command (`true`) run in between."""

    def script(body: Body) -> Reply:
        turn = sum(message["role"] == "tool" for message in body["messages"])
        return Reply(calls=[("bash", {"command": f"true {turn}"})]) if turn < 405 else Reply("done")

    with ScriptedServer(script) as server:
        timed(coder("-y", "-q", "--max-steps", "500", "go"), environment(server.url, home))
        gaps = [after - before for before, after in zip(server.sent, server.times[1:])]
        base = 0.0
        for at in (10, 50, 400):
            name = f"our time at step {at} (with `bash -c true`)"
            middle = show(name, gaps[at - 5 : at + 5], "ms", 1000, base or None)
            base = base or middle
        command = ["bash", "--noprofile", "--norc", "-c", "true"]
        spawns = [timed(command) for _ in range(30)]
        show("  of it the command itself (subprocess.run)", spawns, "ms", 1000)
        print(f"{'connections':<46} {server.connections:8}")


def token(home: str) -> None:
    """Processor time of a run with 20,000 tokens less one with 50, per token; the same for the bare client's own stream."""

    def used(command: list[str], tokens: int) -> float:
        with ScriptedServer([Reply("word " * tokens)]) as server:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            timed(command, environment(server.url, home) | {"OPENAI_API_KEY": "x"})
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    commands = {"client": [sys.executable, "-c", NAIVE], "coder": coder("-q", "hi")}
    rows: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(3):
        for name, command in commands.items():
            rows[name].append((used(command, 20_000) - used(command, 50)) / 19_950)
    base = show("a token through the client's own stream", rows["client"], "µs", 1e6)
    show("a token through coder, one-shot", rows["coder"], "µs", 1e6, base)


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
            done = subprocess.run(command, env=env, text=True, capture_output=True, check=True)
            print(f"{name:<46} {int(done.stdout) / 1024:8.0f} MB")


if __name__ == "__main__":
    gc.disable()  # the server keeps every request: its collector would stand in our figures
    parts = {"start": start, "step": step, "token": token, "memory": memory}
    for chosen in sys.argv[1:] or parts:
        with tempfile.TemporaryDirectory() as folder:
            parts[chosen](folder)
