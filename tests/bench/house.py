"""The size of the house, and how far one word travels through it.

    python tests/bench/house.py         lines, files and functions by folder; fails where a ceiling is passed
    python tests/bench/house.py path    functions, files and frames that `coder "hi"` runs through (-v: their names)

Lines are counted as `ruff format --line-length 100` writes them. The ceilings and goals are in ceilings.toml.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "coder"
LIMITS = tomllib.loads((ROOT / "tests" / "bench" / "ceilings.toml").read_text())
CORE = "types events abort toolset arguments tool hooks history ai run model_call tool_calls loop"
CARD = "types events ai run model_call tool_calls loop toolset tool"
LONG_FILE, LONG_FUNCTION = 350, 40  # lines


# ---- size ------------------------------------------------------------------------------------------------


def modules(folder: Path) -> dict[str, str]:
    """The formatted source of each module, without the demonstration's broken project."""
    copy = folder / "coder"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("demo_project", "__pycache__"))
    ruff = [sys.executable, "-m", "ruff", "format", "-q", "--isolated", "--line-length", "100"]
    subprocess.run([*ruff, str(copy)], check=True)
    return {
        str(path.relative_to(copy).with_suffix("")): path.read_text()
        for path in sorted(copy.rglob("*.py"))
    }


def functions(sources: dict[str, str]) -> dict[str, int]:
    """Lines by function."""
    return {
        f"{module}:{node.name}": node.end_lineno - node.lineno + 1
        for module, text in sources.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.end_lineno
    }


def room(module: str) -> str:
    folder, slash, _ = module.partition("/")
    return folder + slash if slash else "core" if module in CORE.split() else "(top)"


def above(lines: dict[str, int], limit: int) -> str:
    """The names with more lines than the limit, the longest first."""
    found = sorted((number, name) for name, number in lines.items() if number > limit)
    names = [f"{name} {number}" for number, name in reversed(found)]
    return f"{len(names)}" + (f": {', '.join(names[:12])}" if names else "")


def size() -> int:
    with tempfile.TemporaryDirectory() as folder:
        sources = modules(Path(folder))
    lines = {module: len(text.splitlines()) for module, text in sources.items()}
    rooms, files = Counter[str](), Counter(map(room, lines))
    for module, number in lines.items():
        rooms[room(module)] += number
    for name, number in sorted(rooms.items()):
        print(f"{name:<14}{number:7,} lines in {files[name]:3} files")
    long = functions(sources)
    print(f"median function: {statistics.median(long.values()):g} lines")
    print(f"files over {LONG_FILE} lines: {above(lines, LONG_FILE)}")
    print(f"functions over {LONG_FUNCTION} lines: {above(long, LONG_FUNCTION)}")
    tests = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    return report(
        {
            "lines": sum(lines.values()),
            "files": len(lines),
            "card lines": sum(lines.get(name, 0) for name in CARD.split()),
            "core lines": rooms["core"],
            "longest file": max(lines.values()),
            "longest function": max(long.values()),
            "test lines": sum(len(text.splitlines()) for text in tests),
        },
        LIMITS["size"],
    )


def report(figures: dict[str, int], limits: dict[str, dict[str, int]]) -> int:
    """Print each figure with its goal; 1 where one is above its ceiling."""
    passed = [name for name in figures if figures[name] > limits[name].get("now", figures[name])]
    for name, figure in figures.items():
        goal = limits[name]["goal"]
        mark = "over its ceiling!" if name in passed else "reached" if figure <= goal else ""
        print(f"{name:<34}{figure:7,}   goal {goal:6,}   {mark}".rstrip())
    return int(bool(passed))


# ---- path ------------------------------------------------------------------------------------------------

TRACER = """
import atexit, json, sqlite3, sys, threading
root, out = sys.argv.pop(1), sys.argv.pop(1)
seen, sent, climbs, statements = set(), [], [], []

def ours(frame, flags=1):  # a function of the package's (with these flags), and no body of a module or class
    code = frame.f_code
    return code.co_filename.startswith(root) and code.co_flags & flags == flags

def stack(frame, flags=1):  # names, the innermost first
    names = []
    while frame:
        if ours(frame, flags):
            names.append(name_of(frame))
        frame = frame.f_back
    return names

def name_of(frame):
    return frame.f_code.co_filename[len(root) + 1:] + ":" + frame.f_code.co_qualname

def profile(frame, event, argument):
    if event == "call":
        if ours(frame):
            seen.add(name_of(frame))
        elif frame.f_code.co_name == "__init__" and type(frame.f_locals.get("self")).__name__ == "TextDelta":
            climbs.append(stack(frame, 0x21))
    elif event == "c_call" and argument.__name__ in ("sendall", "send") and "socket" in repr(argument):
        if frames := stack(frame):
            thread = threading.main_thread()
            here = threading.current_thread() is thread
            sent.append(frames + ([] if here else stack(sys._current_frames()[thread.ident])))

def connect(*arguments, **options):
    connection = real_connect(*arguments, **options)
    connection.set_trace_callback(lambda text: text[:2] == "--" or statements.append(" ".join(text.split())))
    return connection

def transactions():
    count, inside, wrote = 0, False, False
    for word in (text.split(None, 1)[0].upper() for text in statements if text.strip()):
        write = word in ("INSERT", "UPDATE", "DELETE", "REPLACE", "CREATE", "DROP", "ALTER")
        if word in ("COMMIT", "END", "ROLLBACK"):
            count, inside, wrote = count + wrote, False, False
        elif word == "BEGIN":
            inside, wrote = True, False
        elif write and inside:
            wrote = True
        elif write:
            count += 1
    return count

def write():
    sys.setprofile(None)
    threading.setprofile(None)
    frames, climb = (sent or [[]])[0], max(climbs, key=len, default=[])
    figures = [len(seen), len({name.split(":")[0] for name in seen}), len(frames), len(climb), transactions()]
    names = {"functions": sorted(seen), "frames": frames, "climb": climb, "statements": statements}
    json.dump([figures, names], open(out, "w"))

atexit.register(write)
real_connect, sqlite3.connect = sqlite3.connect, connect
threading.setprofile(profile)
sys.argv[0] = "coder"
from coder.__main__ import main
sys.setprofile(profile)
main()
"""


def path(verbose: bool) -> int:
    """Trace the second run of two, since the first creates the database."""
    sys.path.insert(0, str(ROOT))
    from coder.devtools.scripted import Reply, ScriptedServer

    with tempfile.TemporaryDirectory() as home, ScriptedServer([Reply("hello")] * 2) as server:
        (folder := Path(home, "folder")).mkdir()
        (tracer := Path(home, "trace.py")).write_text(TRACER)
        env = os.environ | {"OPENAI_BASE_URL": server.url, "OPENAI_MODEL": "m", "HOME": home}
        env |= {"XDG_DATA_HOME": home, "XDG_CONFIG_HOME": home, "PYTHONPATH": str(ROOT)}
        options: dict[str, Any] = {"env": env, "cwd": folder, "check": True}
        options |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        out = Path(home, "out.json")
        for _ in range(2):
            command = [sys.executable, str(tracer), str(PACKAGE), str(out), "-q", "hi"]
            subprocess.run(command, **options)
        figures, names = json.loads(out.read_text())
    if verbose:
        for name in ("frames", "climb", "statements", "functions"):
            print(f"{name}:", *names[name], sep="\n  ")
    return report(dict(zip(LIMITS["path"], figures)), LIMITS["path"])


if __name__ == "__main__":
    sys.exit(path("-v" in sys.argv) if "path" in sys.argv else size())
