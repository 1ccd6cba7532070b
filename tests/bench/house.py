"""How densely the house is written, and how far one word travels through it.

    python tests/bench/house.py         tokens, decisions and dense constructs by room; fails if a
    ceiling is passed python tests/bench/house.py path    named functions, files and frames of
    `coder "hi"` (-v: their names)

A reader pays for tokens and for decisions, not for newlines, so lines are printed and not held, but
for the longest file and the longest function. Docstrings and comments count nowhere. The ceilings
and goals are in ceilings.toml.
"""

from __future__ import annotations

import ast
import io
import sys
import tempfile
import token
import tokenize
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LIMITS = tomllib.loads((ROOT / "tests" / "bench" / "ceilings.toml").read_text())
CORE = "types events abort tool_definition toolset arguments hooks history ai run model_call tool_calls loop"
MANY_DECISIONS = 10

COUNTED_TOKENS = (token.NAME, token.NUMBER, token.STRING, token.OP)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.IfExp,
    ast.comprehension,
    ast.match_case,
)

Figures = dict[str, float]  # by the names in ceilings.toml


# ---- density -------------------------------------------------------------------------------------


@dataclass
class Density:
    """What was counted in the modules of one room."""

    files: int = 0
    code_lines: int = 0
    tokens: int = 0
    constructs: Counter[str] = field(default_factory=Counter)
    decisions: list[int] = field(default_factory=list)  # of each function
    longest_file: tuple[int, str] = (0, "")  # lines, name
    longest_function: tuple[int, str] = (0, "")

    def add(self, path: Path, name: str) -> None:
        source = path.read_text()
        tree = ast.parse(source)
        code = code_lines(source, tree)
        self.files += 1
        self.code_lines += len(code)
        for found in tokenize.generate_tokens(io.StringIO(source).readline):
            if found.type in COUNTED_TOKENS and found.start[0] in code:
                self.tokens += 1
        for node in ast.walk(tree):
            self.constructs[construct_of(node)] += 1
            if isinstance(node, FUNCTIONS):
                self.decisions.append(count_decisions(node))
                length = (node.end_lineno or 0) - node.lineno + 1
                self.longest_function = max(self.longest_function, (length, f"{name}:{node.name}"))
        self.constructs["fmt: skip"] += source.count("# fmt: skip")
        self.longest_file = max(
            self.longest_file,
            (len(source.splitlines()), name),
        )

    def include(self, room: Density) -> None:
        """Count what was counted in a room."""
        self.files += room.files
        self.code_lines += room.code_lines
        self.tokens += room.tokens
        self.constructs += room.constructs
        self.decisions += room.decisions
        self.longest_file = max(self.longest_file, room.longest_file)
        self.longest_function = max(self.longest_function, room.longest_function)

    def figures(self) -> Figures:
        return {
            "tokens": self.tokens,
            "tokens a line of code": round(self.tokens / max(1, self.code_lines), 2),
            "decisions a function": round(
                sum(self.decisions) / max(1, len(self.decisions)),
                2,
            ),
            "functions over ten decisions": sum(n > MANY_DECISIONS for n in self.decisions),
            "tuple assignments": self.constructs["tuple assignment"],
            "starred literals": self.constructs["starred literal"],
            "products with booleans": self.constructs["product with a boolean"],
            "map and filter": self.constructs["map or filter"],
            "walruses": self.constructs["walrus"],
            "fmt: skip": self.constructs["fmt: skip"],
            "longest file": self.longest_file[0],
            "longest function": self.longest_function[0],
        }


def code_lines(source: str, tree: ast.Module) -> set[int]:
    """The numbers of the lines that hold code: neither blank, nor a comment, nor a docstring."""
    prose = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            prose.update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    lines = enumerate(source.splitlines(), 1)
    written = {number for number, line in lines if line.strip() and line.strip()[0] != "#"}
    return written - prose


def count_decisions(function: ast.AST) -> int:
    """1, and one more for each branch, each further operand of and/or, and each condition of a
    comprehension."""
    count = 1
    for node in ast.walk(function):
        if isinstance(node, BRANCHES):
            count += 1
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        if isinstance(node, ast.comprehension):
            count += len(node.ifs)
    return count


def construct_of(node: ast.AST) -> str:
    """The name of a construct by which a line tells more than it seems to, "" for all others."""
    match node:
        case ast.Assign(targets=[ast.Tuple(), *_], value=ast.Tuple()):
            return "tuple assignment"
        case ast.Starred(value=ast.Tuple(elts=[_, *_]) | ast.List(elts=[_, *_])):
            return "starred literal"
        case ast.BinOp(op=ast.Mult(), left=ast.Compare() | ast.List()):
            return "product with a boolean"
        case ast.BinOp(op=ast.Mult(), right=ast.Compare() | ast.List()):
            return "product with a boolean"
        case ast.Call(func=ast.Name(id="map" | "filter")):
            return "map or filter"
        case ast.NamedExpr():
            return "walrus"
    return ""


def room_of(module: str) -> str:
    folder, slash, _ = module.partition("/")
    if slash:
        return f"{folder}/"
    return "core" if module in CORE.split() else "(top)"


def measure(folder: Path) -> tuple[Density, dict[str, Density]]:
    """The density of a package without its demonstration project: of the whole, and by room."""
    rooms = dict[str, Density]()
    for path in sorted(folder.rglob("*.py")):
        if "demo_project" in path.parts:
            continue
        module = str(path.relative_to(folder).with_suffix(""))
        rooms.setdefault(room_of(module), Density()).add(path, module)
    whole = Density()
    for room in rooms.values():
        whole.include(room)
    return whole, rooms


def density() -> int:
    whole, rooms = measure(ROOT / "coder")
    tests, _ = measure(ROOT / "tests")
    print("room           files  code lines   tokens  a line  decisions a function  over ten")
    for name, room in [
        *sorted(rooms.items()),
        ("coder", whole),
        ("tests", tests),
    ]:
        found = room.figures()
        print(
            f"{name:<14}{room.files:6}{room.code_lines:12,}{room.tokens:9,}"
            f"{found['tokens a line of code']:8.2f}{found['decisions a function']:22.2f}"
            f"{found['functions over ten decisions']:10}"
        )
    print(f"longest file: {whole.longest_file[1]}; function: {whole.longest_function[1]}")
    figures = whole.figures()
    figures["tests: tokens a line of code"] = tests.figures()["tokens a line of code"]
    return report(figures, LIMITS["density"])


def report(figures: Figures, limits: dict[str, dict[str, float]]) -> int:
    """Print each figure with its goal; 1 if one is above its ceiling."""
    is_over = False
    for name, figure in figures.items():
        goal = limits[name]["goal"]
        mark = "reached" if figure <= goal else ""
        if figure > limits[name].get("now", figure):
            mark = f"over its ceiling of {limits[name]['now']:,}!"
            is_over = True
        print(f"{name:<34}{figure:9,}   goal {goal:8,}   {mark}".rstrip())
    return int(is_over)


# ---- path ----------------------------------------------------------------------------------------


def path(verbose: bool) -> int:
    """Trace the second run of two, since the first creates the database."""
    from counts import Reply, ScriptedServer, traced

    with (
        tempfile.TemporaryDirectory() as home,
        ScriptedServer([Reply("hello")]) as server,
    ):
        traced(server, Path(home), "-q", "hi")
        counts, names = traced(server, Path(home), "-q", "hi")
    if verbose:
        for name, lines in names.items():
            print(f"{name}:", *lines, sep="\n  ")
    files = {name.split(":")[0] for name in names["functions"]}
    lengths = [
        len(each)
        for each in (
            names["functions"],
            files,
            names["frames"],
            names["climb"],
        )
    ]
    return report(
        dict(zip(LIMITS["path"], [*lengths, counts["transactions"]])),
        LIMITS["path"],
    )


if __name__ == "__main__":
    sys.exit(path("-v" in sys.argv) if "path" in sys.argv else density())
