"""What a start, a step and a token cost in counts, which do not depend on the machine's speed.

    python tests/bench/counts.py        fails where a count is above its ceiling (ceilings.toml)

Counted in whole runs of `coder` against a server on loopback: calls of the package's functions,
processes started, files opened, connections, transactions that write, bytes sent. A step's share is
the difference of two runs, early and late in a long one; a late step that costs more than an early
one grows with the history.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from coder.devtools.scripted import Body, Reply, ScriptedServer  # noqa: E402

LIMITS = tomllib.loads((ROOT / "tests" / "bench" / "ceilings.toml").read_text())["counts"]
EARLY, LATE, WIDTH = 10, 110, 20  # steps
TRACER = """
import atexit, json, sqlite3, sys, threading
root, out = sys.argv.pop(1), sys.argv.pop(1)
counts = dict.fromkeys(["calls", "processes", "files", "connections", "transactions"], 0)
EVENTS = {"subprocess.Popen": "processes", "open": "files", "socket.connect": "connections"}
seen, sent, climb, statements = set(), [], [], []

def stack(frame, flags=1):  # names of the package's functions (with these flags), the innermost first
    names = []
    while frame:
        if frame.f_code.co_filename.startswith(root) and frame.f_code.co_flags & flags == flags:
            names.append(name_of(frame.f_code))
        frame = frame.f_back
    return names

def name_of(code):
    return code.co_filename[len(root) + 1:] + ":" + code.co_qualname

def profile(frame, event, argument):
    global climb
    if event == "call":
        if frame.f_code.co_filename.startswith(root):
            counts["calls"] += 1
            seen.add(frame.f_code)
        elif frame.f_code.co_name == "__init__" and type(frame.f_locals.get("self")).__name__ == "TextDelta":
            climb = max(climb, stack(frame, 0x21), key=len)
    elif event == "c_call" and not sent and argument.__name__ == "send" and is_socket(argument.__self__):
        main, here = threading.main_thread(), threading.current_thread()
        sent.extend(stack(frame) + ([] if here is main else stack(sys._current_frames()[main.ident])))

def is_socket(thing):  # a generator has a `send`, too
    return type(thing).__name__ in ("socket", "SSLSocket")

def audit(event, arguments):
    if name := EVENTS.get(event):
        counts[name] += 1

def trace(statement):
    statements.append(" ".join(statement.split()))
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
    named = [code for code in seen if code.co_flags & 1 and not code.co_name.startswith("<")]  # no comprehensions, modules, classes
    functions = sorted({*map(name_of, named)})
    names = {"frames": sent, "climb": climb, "statements": statements, "functions": functions}
    json.dump([counts, names], open(out, "w"))

atexit.register(write)
real_connect, sqlite3.connect = sqlite3.connect, connect
sys.argv[0] = "coder"
from coder.__main__ import main
sys.addaudithook(audit)
threading.setprofile(profile)
sys.setprofile(profile)
main()
"""


def traced(
    server: ScriptedServer, home: Path, *arguments: str
) -> tuple[dict[str, int], dict[str, list[str]]]:
    """(counts, names) of one run of `coder` with these arguments, in an empty folder."""
    (folder := home / "folder").mkdir(exist_ok=True)
    (tracer := home / "tracer.py").write_text(TRACER)
    env = os.environ | {
        "OPENAI_BASE_URL": server.url,
        "OPENAI_MODEL": "m",
        "HOME": str(home),
    }
    env |= dict.fromkeys(("XDG_DATA_HOME", "XDG_CONFIG_HOME"), str(home)) | {
        "PYTHONPATH": str(ROOT)
    }
    out = home / "out.json"
    null = subprocess.DEVNULL
    command = [
        sys.executable,
        str(tracer),
        str(ROOT / "coder"),
        str(out),
        *arguments,
    ]
    subprocess.run(
        command,
        env=env,
        cwd=folder,
        stdin=null,
        stdout=null,
        check=True,
    )
    counts, names = json.loads(out.read_text())
    return counts, names


def counted(steps: int, tokens: int, *arguments: str) -> dict[str, int]:
    """The counts of one run with so many steps (`true` in bash) and so many tokens in the last
    answer."""

    def script(body: Body) -> Reply:
        turn = sum(message["role"] == "tool" for message in body["messages"])
        command = {"command": f"true {turn}"}
        return Reply(calls=[("bash", command)]) if turn < steps else Reply("word " * tokens)

    with tempfile.TemporaryDirectory() as home, ScriptedServer(script) as server:
        counts, _ = traced(server, Path(home), *arguments)
        sent = [len(json.dumps(body)) for body in server.requests]
    return counts | {
        "first body": sent[0] if sent else 0,
        "last body": sent[-1] if sent else 0,
    }


def run(steps: int, tokens: int = 5) -> dict[str, int]:
    return counted(steps, tokens, "-y", "-q", "--max-steps", "500", "go")


def share(more: dict[str, int], less: dict[str, int], name: str, width: int) -> float:
    return round((more[name] - less[name]) / width, 1)


def figures() -> dict[str, float]:
    """Each count by its name in ceilings.toml."""
    shown = counted(0, 0, "--help")
    none = run(0)
    early = run(EARLY)
    early_more = run(EARLY + WIDTH)
    late = run(LATE)
    late_more = run(LATE + WIDTH)
    token = share(run(0, 2_005), none, "calls", 2_000)
    # Over many steps: a run has a transaction or two more where undo's first look is slow
    per_step = {
        f"{name} of a step": share(late, early, name, LATE - EARLY)
        for name in ("processes", "files", "transactions")
    }
    return {
        "modules of --help": shown["modules"],
        "modules of one word": none["modules"],
        "libraries of one word": none["libraries"],
        "calls of one word": none["calls"],
        "bytes of the first body": none["first body"],
        "calls of a step": share(early_more, early, "calls", WIDTH),
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
