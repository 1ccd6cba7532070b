"""What a start, a step and a token cost in counts, which do not depend on the machine's speed.

    python tests/bench/counts.py        fails where a count is above its ceiling (ceilings.toml)

Counted in whole runs of `coder` against a server on loopback: calls of the package's functions, processes started, files
opened, connections, transactions that write, bytes sent. A step's share is the difference of two runs, early and late in a
long one; a late step that costs more than an early one grows with the history.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from coder.devtools.scripted import Body, Reply, ScriptedServer  # noqa: E402

LIMITS = tomllib.loads((ROOT / "tests" / "bench" / "ceilings.toml").read_text())["counts"]
EARLY, LATE, WIDTH = 10, 110, 20  # steps
COUNTER = """
import atexit, json, sqlite3, sys, threading
root, out = sys.argv.pop(1), sys.argv.pop(1)
counts = dict.fromkeys(["calls", "processes", "files", "connections", "transactions"], 0)
EVENTS = {"subprocess.Popen": "processes", "open": "files", "socket.connect": "connections"}

def profile(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(root):
        counts["calls"] += 1

def audit(event, arguments):
    if name := EVENTS.get(event):
        counts[name] += 1

def trace(statement):
    counts["transactions"] += statement.split(None, 1)[:1] == ["COMMIT"]

def connect(*arguments, **options):
    connection = real_connect(*arguments, **options)
    connection.set_trace_callback(trace)
    return connection

def write():
    sys.setprofile(None)
    threading.setprofile(None)
    counts["modules"] = sum(name.split(".")[0] == "coder" for name in sys.modules)
    counts["libraries"] = len({name.split(".")[0] for name in sys.modules} & {"openai", "pydantic", "rich", "dotenv"})
    json.dump(counts, open(out, "w"))

atexit.register(write)
real_connect, sqlite3.connect = sqlite3.connect, connect
sys.argv[0] = "coder"
from coder.__main__ import main
sys.addaudithook(audit)
threading.setprofile(profile)
sys.setprofile(profile)
main()
"""


def counted(steps: int, tokens: int, *arguments: str) -> dict[str, int]:
    """The counts of one run with so many steps (`true` in bash) and so many tokens in the last answer."""

    def script(body: Body) -> Reply:
        turn = sum(message["role"] == "tool" for message in body["messages"])
        command = {"command": f"true {turn}"}
        return Reply(calls=[("bash", command)]) if turn < steps else Reply("word " * tokens)

    with tempfile.TemporaryDirectory() as home, ScriptedServer(script) as server:
        (folder := Path(home, "folder")).mkdir()
        (counter := Path(home, "counter.py")).write_text(COUNTER)
        env = os.environ | {"OPENAI_BASE_URL": server.url, "OPENAI_MODEL": "m", "HOME": home}
        env |= {"XDG_DATA_HOME": home, "XDG_CONFIG_HOME": home, "PYTHONPATH": str(ROOT)}
        out = Path(home, "out.json")
        command = [sys.executable, str(counter), str(ROOT / "coder"), str(out), *arguments]
        options: dict[str, Any] = {"env": env, "cwd": folder, "check": True}
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        subprocess.run(command, **options, **quiet)
        counts: dict[str, int] = json.loads(out.read_text())
        sent = [len(json.dumps(body)) for body in server.requests]
    return counts | {"first body": sent[0] if sent else 0, "last body": sent[-1] if sent else 0}


def run(steps: int, tokens: int = 5) -> dict[str, int]:
    return counted(steps, tokens, "-y", "-q", "--max-steps", "500", "go")


def share(more: dict[str, int], less: dict[str, int], name: str, width: int) -> float:
    return round((more[name] - less[name]) / width, 1)


def figures() -> dict[str, float]:
    """Each count by its name in ceilings.toml."""
    shown, none = counted(0, 0, "--help"), run(0)
    early, early_more = run(EARLY), run(EARLY + WIDTH)
    late, late_more = run(LATE), run(LATE + WIDTH)
    token = share(run(0, 2_005), none, "calls", 2_000)
    per_step = {
        f"{name} of a step": share(early_more, early, name, WIDTH)
        for name in ("calls", "processes", "files", "transactions")
    }
    return {
        "modules of --help": shown["modules"],
        "modules of one word": none["modules"],
        "libraries of one word": none["libraries"],
        "calls of one word": none["calls"],
        "bytes of the first body": none["first body"],
        **per_step,
        "calls of a late step": share(late_more, late, "calls", WIDTH),
        "bytes of a step": share(early_more, early, "last body", WIDTH),
        "connections of a run": late_more["connections"],
        "calls of a token": token,
    }


def main() -> int:
    found = figures()
    over = [name for name, figure in found.items() if figure > LIMITS[name]]
    for name, figure in found.items():
        mark = "   over its ceiling!" if name in over else ""
        print(f"{name:<34}{figure:10,g}   at most {LIMITS[name]:8,g}{mark}")
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
