"""The shape of the package: who imports whom, what an import does, what each module says of itself, how long functions are."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import coder

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "coder"
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if "demo_project" not in path.parts
}

# Imports point from right to left. What is in no folder is the core, but for the words below it and the front door above all.
LAYERS = [
    "words",
    "providers",
    "core",
    "tools",
    "permissions",
    "agent",
    "sessions",
    "extend",
    "devtools",
    "cli",
    "top",
]
WORDS = {"coder.types", "coder.events", "coder.abort"}
TOP = {"coder", "coder.__main__"}

# (module, imported) -> why the order does not hold there, or not yet.
ALLOWED: dict[tuple[str, str], str] = {}


def layer(module: str) -> int:
    if module in TOP:
        return LAYERS.index("top")
    if module in WORDS:
        return LAYERS.index("words")
    _, folder, *inner = module.split(".")
    return LAYERS.index(folder if inner or folder in LAYERS else "core")


@dataclass(frozen=True)
class Import:
    importer: str
    name: str  # a module
    late: bool  # inside a function

    def __str__(self) -> str:
        return f"{self.importer} imports {self.name}{' late' if self.late else ''}"


@cache
def imports() -> list[Import]:
    """All imports that happen; those for type checkers only do not."""
    return [
        Import(module, name, late)
        for module, path in FILES.items()
        for name, late in imported(ast.parse(path.read_text()), False)
    ]


def imported(node: ast.AST, late: bool) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for other in child.orelse:
                yield from imported(other, late)
        elif isinstance(child, ast.Import):
            yield from ((alias.name, late) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0 and child.module, "imports are absolute"
            for alias in child.names:
                inner = f"{child.module}.{alias.name}"
                yield (inner if inner in FILES else child.module), late
        else:
            yield from imported(
                child,
                late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda),
            )


def ours() -> list[Import]:
    return [each for each in imports() if each.name.split(".")[0] == "coder"]


def importers_of(*libraries: str) -> set[str]:
    return {
        each.importer
        for each in imports()
        if each.name.split(".")[0] in libraries and (each.importer, each.name) not in ALLOWED
    }


# ---- who imports whom ------------------------------------------------------------------------------------


def test_imports_point_one_way() -> None:
    wrong = [
        str(each)
        for each in ours()
        if layer(each.name) > layer(each.importer)
        and (each.importer, each.name) not in ALLOWED
        and each.name != "coder"
    ]
    assert wrong == []


def test_only_the_way_in_imports_the_package_itself_by_name() -> None:
    """`from coder import X` would go through the lazy front door; the version is all that is there."""
    assert {each.importer for each in ours() if each.name == "coder"} <= {
        "coder.cli.main",
        "coder.cli.flags",
        "coder.cli.one_shot",
    }


def test_there_is_no_circle_of_imports() -> None:
    graph = {
        module: {each.name for each in ours() if each.importer == module and not each.late}
        for module in FILES
    }
    order = list(TopologicalSorter(graph).static_order())
    assert order.index("coder.types") < order.index("coder.loop") < order.index("coder.cli.session")


def test_the_three_libraries_have_one_place_each_and_are_imported_late() -> None:
    assert importers_of("openai", "httpx2", "httpx") == {"coder.providers.http"}
    assert importers_of("dotenv") == {"coder.cli.config"}
    assert {importer.rpartition(".")[0] for importer in importers_of("rich")} == {"coder.cli"}
    libraries = {"openai", "httpx2", "httpx", "dotenv", "rich"}
    assert [
        str(each) for each in imports() if each.name.split(".")[0] in libraries and not each.late
    ] == []


def test_nothing_else_is_imported_but_the_standard_library() -> None:
    known = sys.stdlib_module_names | {"coder", "openai", "httpx2", "dotenv", "rich"}
    assert {str(each) for each in imports() if each.name.split(".")[0] not in known} == set()


def test_what_is_imported_is_what_an_installation_brings() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.match(r"[\w-]+", each)[0]: each for each in project["dependencies"]}  # type: ignore[index]
    modules = {each.name.split(".")[0] for each in imports()} - sys.stdlib_module_names - {"coder"}
    assert set(declared) == {{"dotenv": "python-dotenv"}.get(module, module) for module in modules}
    assert declared["openai"] == "openai>=3.3,<4"  # the next major version may be another client


def test_every_exception_to_the_rules_is_still_needed() -> None:
    assert set(ALLOWED) <= {(each.importer, each.name) for each in imports()}


# ---- what an import does ---------------------------------------------------------------------------------

WATCH = """
import sys, os, json, threading, signal
{before}
opened, done = [], []
def hook(event, arguments, watched=("subprocess.", "socket.", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.system", "os.exec",
                                    "os.fork", "os.posix_spawn", "os.putenv", "os.chdir", "shutil.", "tempfile.", "webbrowser.")):
    if event == "open":
        opened.append([str(arguments[0]), str(arguments[1]), arguments[2]])
    elif event.startswith(watched):
        done.append([event, repr(arguments)])
state = lambda: (dict(os.environ), list(sys.path), sys.excepthook, threading.active_count(), [signal.getsignal(n) for n in (2, 15, 1)])
before = state()
sys.addaudithook(hook)
import coder
light = sorted(name for name in sys.modules if name.startswith("coder"))
for name in coder.__all__:
    getattr(coder, name)
same = state() == before
print(json.dumps(dict(opened=opened, done=done, light=light, modules=sorted(sys.modules), same=same)))
"""


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """A child process imports the package and every public name, in an empty folder, and tells what Python's audit saw."""
    folder = tmp_path_factory.mktemp("empty")
    (folder / "home").mkdir()
    code = WATCH.format(before=f"sys.path.insert(0, {str(ROOT)!r})")
    child = subprocess.run(
        [sys.executable, "-I", "-B", "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env={"HOME": str(folder / "home"), "OPENAI_API_KEY": "k"},
    )
    assert (child.returncode, child.stderr) == (0, "")
    assert child.stdout.count("\n") == 1, "it printed something"
    assert [path.name for path in folder.rglob("*")] == ["home"], "it made something"
    return dict(json.loads(child.stdout))


def test_importing_opens_nothing_but_python_and_the_package(watched: dict[str, list[str]]) -> None:
    allowed = {
        str(PACKAGE),
        *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
        sys.base_prefix,
    }
    strange = [
        each
        for each in watched["opened"]
        if not any(each[0].startswith(f"{place}/") for place in allowed)
    ]
    assert strange == []
    assert [each for each in watched["opened"] if re.search("[wax+]", each[1])] == []
    assert any(each[0].startswith(str(PACKAGE)) for each in watched["opened"]), (
        "the hook sees what is opened"
    )


def test_importing_starts_connects_makes_and_changes_nothing(watched: dict[str, list[str]]) -> None:
    assert watched["done"] == []
    assert watched["same"], "the environment, the path, a thread or a signal handler changed"


def test_importing_loads_no_library_and_the_package_alone_loads_nothing(
    watched: dict[str, list[str]],
) -> None:
    assert watched["light"] == ["coder"]
    assert not {name.split(".")[0] for name in watched["modules"]} & {
        "openai",
        "httpx2",
        "httpx",
        "rich",
        "dotenv",
        "pydantic",
    }
    assert not [name for name in watched["modules"] if name.startswith("coder.cli")]


def test_the_audit_would_see_it(tmp_path: Path) -> None:
    """The same child with an import that does everything it must not do."""
    (tmp_path / "coder.py").write_text(
        "import os, socket, subprocess, tempfile\n__all__ = []\nopen('made', 'w').close()\n"
        "os.mkdir('folder')\nsocket.socket().close()\nsubprocess.run(['true'])\nos.environ['X'] = '1'\n"
    )
    child = subprocess.run(
        [sys.executable, "-I", "-B", "-c", WATCH.format(before="sys.path.insert(0, '.')")],
        cwd=tmp_path,
        timeout=60,
        capture_output=True,
        text=True,
    )
    seen = json.loads(child.stdout)
    assert ["made", "w"] in [each[:2] for each in seen["opened"]] and not seen["same"]
    assert {"os.mkdir", "socket.__new__", "subprocess.Popen"} <= {
        event for event, _ in seen["done"]
    }


# ---- the public names ------------------------------------------------------------------------------------


def test_every_public_name_resolves_to_what_the_module_it_lives_in_has() -> None:
    assert sorted(coder.__all__) == coder.__all__ == list(dict.fromkeys(coder.__all__))
    for name in coder.__all__:
        value = getattr(coder, name)
        home = getattr(value, "__module__", "") if isinstance(value, type) else ""
        if home.startswith("coder"):
            assert getattr(importlib.import_module(home), name) is value


def test_all_is_complete() -> None:
    """The same names for type checkers, for the lazy loading and in __all__."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    typed = [
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.If)
        for each in ast.walk(node)
        if isinstance(each, ast.ImportFrom)
        for alias in each.names
    ]
    assert sorted(typed) == coder.__all__


def test_a_name_that_is_not_there_is_an_attribute_error_and_an_import_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        _ = coder.Nonsense
    with pytest.raises(ImportError):
        exec("from coder import Nonsense")
    exec("from coder import *", names := {})
    assert set(coder.__all__) <= set(names)


# ---- what a module says, and how long it takes to say it -------------------------------------------------


def doc(path: Path) -> str:
    return " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())


@pytest.mark.parametrize("module", FILES)
def test_every_module_says_what_it_is(module: str) -> None:
    assert doc(FILES[module])


def test_nothing_is_asynchronous() -> None:
    kinds = ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith
    nodes = [
        (module, node)
        for module, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text()))
    ]
    assert [module for module, node in nodes if isinstance(node, kinds)] == []
    assert "asyncio" not in {each.name for each in imports()}
