"""The size of the house, and how far one word travels through it.

    python tests/bench/house.py            lines, files and functions by sub-package; fails where a ceiling is passed
    python tests/bench/house.py path       functions, files and frames that `coder "hi"` runs through

Lines are counted as `ruff format --line-length 100` writes them, whatever form the files have.
The ceilings below only ever go down.
"""

from __future__ import annotations

import ast
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "coder"
CORE = [
    "types",
    "events",
    "abort",
    "toolset",
    "hooks",
    "history",
    "ai",
    "run",
    "model_call",
    "tool_calls",
    "loop",
    "arguments",
]
CARD = ["types", "events", "ai", "run", "model_call", "tool_calls", "loop", "toolset"]

# name -> the most that it may have
CEILINGS = {"lines": 23_740, "files": 115, "longest file": 570, "longest function": 106}

TRACER = """
import atexit, collections, json, os, sys, threading
root, out = sys.argv.pop(1), sys.argv.pop(1)
seen, frames, deepest, stream = set(), 0, 0, 0
sent = [0, 0]  # functions seen before the request, frames from main to the bytes
def ours(code):  # a function, and no body of a module or class
    return code.co_filename.startswith(root) and code.co_flags & 1
def profile(frame, event, argument):
    global frames, stream
    if event == "call" and ours(frame.f_code):
        frames += 1
        seen.add((frame.f_code.co_filename, frame.f_code.co_qualname))
        name = frame.f_code.co_qualname
        if frame.f_code.co_flags & 0x20:  # a generator: how many of them stand on top of each other here?
            depth, at = 0, frame
            while at:
                depth += bool(ours(at.f_code) and at.f_code.co_flags & 0x20)
                at = at.f_back
            stream = max(stream, depth)
    elif event == "c_call" and "socket object" in repr(argument) and argument.__name__ in ("sendall", "send") and not sent[1]:
        depth, at = 0, frame
        while at:
            depth += ours(at.f_code)
            at = at.f_back
        if depth:
            sent[:] = len(seen), depth
def write():
    sys.setprofile(None)
    files = {name for name, _ in seen}
    json.dump(dict(functions=len(seen), files=len(files), frames=frames, before=sent[0], depth=sent[1], generators=stream),
              open(out, "w"))
atexit.register(write)
threading.setprofile(profile)
sys.argv[0] = "coder"
from coder.__main__ import main
sys.setprofile(profile)
main()
"""


def formatted(folder: Path) -> Path:
    """A copy of the package as the formatter writes it."""
    copy = folder / "coder"
    subprocess.run(["cp", "-r", str(PACKAGE), str(copy)], check=True)
    ruff = [sys.executable, "-m", "ruff", "format", "-q", "--isolated", "--line-length", "100"]
    subprocess.run([*ruff, str(copy)], check=True)
    return copy


def modules(package: Path) -> dict[str, list[str]]:
    """Lines by module, without the demonstration's broken project."""
    paths = (path for path in sorted(package.rglob("*.py")) if "demo_project" not in path.parts)
    return {
        str(path.relative_to(package).with_suffix("")): path.read_text().splitlines()
        for path in paths
    }


def functions(lines: dict[str, list[str]]) -> dict[str, int]:
    """Lines by function."""
    found = {}
    for module, text in lines.items():
        for node in ast.walk(ast.parse("\n".join(text))):
            if isinstance(node, ast.FunctionDef) and node.end_lineno:
                found[f"{module}:{node.name}:{node.lineno}"] = node.end_lineno - node.lineno + 1
    return found


def size() -> int:
    with tempfile.TemporaryDirectory() as folder:
        lines = modules(formatted(Path(folder)))
    count = {module: len(text) for module, text in lines.items()}
    rooms: dict[str, list[int]] = {}
    for module, number in count.items():
        room = (
            module.partition("/")[0] + "/"
            if "/" in module
            else "core"
            if module in CORE
            else "(top)"
        )
        rooms.setdefault(room, []).append(number)
    for room, numbers in sorted(rooms.items()):
        print(f"{room:<14}{sum(numbers):7,} lines in {len(numbers):3} files")
    card = sum(count.get(module, 0) for module in CARD)
    long = functions(lines)
    figures = {
        "lines": sum(count.values()),
        "files": len(count),
        "longest file": max(count.values()),
        "longest function": max(long.values()),
    }
    print(
        f"{'all':<14}{figures['lines']:7,} lines in {figures['files']:3} files; {card:,} of them {', '.join(CARD)}"
    )
    print(
        f"longest file {max(count, key=lambda name: count[name])}: {figures['longest file']}; longest function "
        f"{max(long, key=lambda name: long[name])}: {figures['longest function']}; median {statistics.median(long.values()):g}"
    )
    over = [
        f"{name} {figures[name]:,} > {most:,}"
        for name, most in CEILINGS.items()
        if figures[name] > most
    ]
    print("over the ceiling: " + "; ".join(over) if over else "no ceiling is passed")
    return bool(over)


def path() -> int:
    sys.path.insert(0, str(ROOT))
    from coder.devtools.scripted import Reply, ScriptedServer

    with tempfile.TemporaryDirectory() as home, ScriptedServer([Reply("hello")]) as server:
        (folder := Path(home, "folder")).mkdir()
        env = os.environ | {
            "OPENAI_BASE_URL": server.url,
            "OPENAI_MODEL": "m",
            "HOME": home,
            "XDG_DATA_HOME": home,
            "XDG_CONFIG_HOME": home,
            "PYTHONPATH": str(ROOT),
        }
        out = Path(home, "out.json")
        (script := Path(home, "trace.py")).write_text(TRACER)
        subprocess.run(
            [sys.executable, str(script), str(PACKAGE), str(out), "hi"],
            env=env,
            cwd=folder,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        found = json.loads(out.read_text())
    print(
        "one word through the one-shot: {functions} functions in {files} files, {frames:,} calls; {before} functions before the "
        "first bytes, {depth} frames from main to them; at most {generators} generators on top of each other".format(
            **found
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(path() if sys.argv[1:] == ["path"] else size())
