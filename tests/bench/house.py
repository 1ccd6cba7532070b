"""The size of the house, and how far one word travels through it.

    python tests/bench/house.py         lines, files and functions by folder; fails where a ceiling is passed
    python tests/bench/house.py path    named functions, files and frames of `coder "hi"` (-v: their names)

Lines are counted as `ruff format --line-length 100` writes them. The ceilings and goals are in ceilings.toml.
"""

from __future__ import annotations

import ast
import shutil
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path

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


def path(verbose: bool) -> int:
    """Trace the second run of two, since the first creates the database."""
    from counts import Reply, ScriptedServer, traced

    with tempfile.TemporaryDirectory() as home, ScriptedServer([Reply("hello")]) as server:
        traced(server, Path(home), "-q", "hi")
        counts, names = traced(server, Path(home), "-q", "hi")
    if verbose:
        for name, lines in names.items():
            print(f"{name}:", *lines, sep="\n  ")
    files = {name.split(":")[0] for name in names["functions"]}
    lengths = [len(each) for each in (names["functions"], files, names["frames"], names["climb"])]
    return report(dict(zip(LIMITS["path"], [*lengths, counts["transactions"]])), LIMITS["path"])


if __name__ == "__main__":
    sys.exit(path("-v" in sys.argv) if "path" in sys.argv else size())
