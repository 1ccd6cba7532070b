"""The shape of the package: who imports whom, what an import does, the public names."""

from __future__ import annotations

import ast
import gc
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
from typing import get_args

import pytest

import coder
import coder.events
import coder.types
from coder.cli.questions import HEADINGS
from coder.events import BaseEvent
from coder.sessions.recorder import KEPT
from coder.settings import SETTINGS, field_of
from coder.tools.built_in import PATCHING, TOOLS
from coder.types import CoderError

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "coder"
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if "demo_project" not in path.parts
}

# Imports point from right to left. What is in no folder is the core, except WORDS below it and TOP
# above all.
LAYERS = [
    *("words", "providers", "core", "tools", "permissions", "agent", "sessions", "extend"),
    *("devtools", "session", "doors", "cli", "top"),
]
WORDS = {"coder.types", "coder.events", "coder.abort", "coder.notebook"}
SESSION = {
    "coder.crew",
    "coder.parts",
    "coder.questions",
    "coder.session",
    "coder.settings",
    "coder.sources",
}
TOP = {"coder", "coder.__main__"}

# Modules that only their own subcommand imports, with their libraries
OF_A_SUBCOMMAND = {"coder.cli.batch", "coder.doors.mcp_server", "coder.doors.ray_engine"}
OF_ACP = {
    "coder.doors.acp",
    "coder.doors.acp_buffers",
    "coder.doors.acp_talk",
    "coder.doors.acp_updates",
}
OF_SERVE = {
    "coder.doors.serve",
    "coder.doors.serve_openapi",
    "coder.doors.serve_opencode",
    "coder.doors.serve_questions",
    "coder.doors.serve_routes",
    "coder.doors.serve_sessions",
}
OF_DOORS = OF_A_SUBCOMMAND | OF_ACP | OF_SERVE

LIBRARIES = {"ray", "openai", "httpx2", "httpx", "dotenv", "rich", "markdown_it", "mcp"}
LIBRARIES |= {"acp", "starlette", "uvicorn"}


def layer(module: str) -> int:
    if module in TOP:
        return LAYERS.index("top")
    if module in WORDS:
        return LAYERS.index("words")
    if module in SESSION:
        return LAYERS.index("session")
    _, folder, *inner = module.split(".")
    return LAYERS.index(folder if inner or folder in LAYERS else "core")


@dataclass(frozen=True)
class Import:
    importer: str
    name: str  # a module
    when: str  # "now", "late" (inside a function), "typing" (for type checkers only)

    def __str__(self) -> str:
        return f"{self.importer} imports {self.name} ({self.when})"


@cache
def trees() -> dict[str, ast.Module]:
    gc.collect()
    gc.disable()  # Python 3.11.7 raises SystemError if the collector runs meanwhile (gh-106905)
    try:
        return {module: ast.parse(path.read_text()) for module, path in FILES.items()}
    finally:
        gc.enable()


@cache
def imports() -> list[Import]:
    """All imports except those of the front door, which are the public names."""
    return [
        Import(module, name, when)
        for module, tree in trees().items()
        if module != "coder"
        for name, when in imported(tree, "now")
    ]


def imported(node: ast.AST, when: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, when) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            assert child.module, "imports are absolute"
            for alias in child.names:
                inner = f"{child.module}.{alias.name}"
                yield (inner if inner in FILES else child.module), when
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            yield from imported(child, "typing")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imported(child, "late")
        else:
            yield from imported(child, when)


def ours() -> list[Import]:
    return [each for each in imports() if each.name.split(".")[0] == "coder"]


def importers_of(*libraries: str) -> set[str]:
    return {each.importer for each in imports() if each.name.split(".")[0] in libraries}


# ---- who imports whom ----------------------------------------------------------------------------


def test_imports_point_one_way() -> None:
    wrong = [each for each in ours() if layer(each.name) > layer(each.importer)]
    assert [str(each) for each in wrong if each.name != "coder"] == []


def test_there_is_no_circle_of_imports() -> None:
    graph = {
        module: {each.name for each in ours() if each.importer == module and each.when != "late"}
        for module in FILES
    }
    order = list(TopologicalSorter(graph).static_order())
    assert order.index("coder.types") < order.index("coder.loop") < order.index("coder.session")


def test_the_libraries_have_one_place_each_and_are_imported_late() -> None:
    assert importers_of("openai", "httpx") == {"coder.providers.openai_client"}
    assert importers_of("dotenv") == {"coder.sources"}
    assert importers_of("mcp", "mcp_types") == {
        "coder.extend.mcp",
        "coder.extend.mcp_transport",
        "coder.doors.mcp_server",
    }
    assert importers_of("acp") == OF_ACP
    assert importers_of("starlette", "uvicorn") <= OF_SERVE
    assert importers_of("ray") == {"coder.doors.ray_engine"}
    assert importers_of("markdown_it") == {"coder.sessions.export"}
    assert {importer.rpartition(".")[0] for importer in importers_of("rich")} == {"coder.cli"}
    early = [
        each
        for each in imports()
        if each.when == "now"
        and each.name.split(".")[0] in LIBRARIES
        and each.importer not in OF_DOORS
    ]
    assert [str(each) for each in early] == []
    now = {
        each.name
        for each in ours()
        if each.when == "now" and each.importer not in OF_ACP | OF_SERVE
    }
    assert now.isdisjoint(OF_DOORS)


def test_what_is_imported_is_what_an_installation_brings() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    packages = list(project["dependencies"])
    for extra in ("acp", "mcp", "ray", "serve"):
        packages += extras[extra]
    declared = {re.split(r"[^\w-]", each)[0]: each for each in packages}
    modules = {each.name.split(".")[0] for each in imports()} - sys.stdlib_module_names - {"coder"}
    names = {
        "acp": "agent-client-protocol",
        "anyio": "mcp",
        "dotenv": "python-dotenv",
        "mcp_types": "mcp",
        "pydantic": "mcp",
        "typing_extensions": "openai",  # for type checkers only
        "markdown_it": "rich",
    }
    assert set(declared) == {names.get(module, module) for module in modules}
    assert declared["openai"] == "openai>=3.3,<4"  # the next major version may be another client


def test_every_module_has_a_docstring_and_every_folder_names_the_file_to_read_first() -> None:
    docs = {module: ast.get_docstring(tree) for module, tree in trees().items()}
    assert [module for module, doc in docs.items() if not doc] == []
    for module, path in FILES.items():
        if path.name == "__init__.py" and module != "coder":
            assert "Promises:" in str(docs[module]), module
            first = re.search(
                r"\b[Rr]ead (\w+\.py) first",
                " ".join(str(docs[module]).split()),
            )
            assert first, module
            assert (path.parent / first[1]).exists(), module


# ---- what an import does -------------------------------------------------------------------------

WATCH = """
import sys, os, json, threading, signal
{before}
opened, done = [], []
watched = ("subprocess.", "socket.", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.system", "os.exec",
           "os.fork", "os.posix_spawn", "os.putenv", "os.chdir", "shutil.", "tempfile.", "webbrowser.")
def hook(event, arguments):
    if event == "open":
        opened.append([str(arguments[0]), str(arguments[1])])
    elif event.startswith(watched):
        done.append(event)
def state():
    handlers = [signal.getsignal(number) for number in (2, 15, 1)]
    return dict(os.environ), list(sys.path), sys.excepthook, threading.active_count(), handlers
before = state()
sys.addaudithook(hook)
import coder
light = sorted(name for name in sys.modules if name.startswith("coder"))
for name in coder.__all__:
    getattr(coder, name)
same = state() == before
print(json.dumps(dict(opened=opened, done=done, light=light, modules=sorted(sys.modules), same=same)))
"""


def watched(before: str, folder: Path) -> dict[str, list[str]]:
    """What Python's audit saw in a child process that imports the package and every public name."""
    child = subprocess.run(
        [sys.executable, "-I", "-B", "-c", WATCH.format(before=before)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env={"HOME": str(folder), "OPENAI_API_KEY": "k"},
    )
    assert child.returncode == 0
    assert child.stderr == ""
    assert child.stdout.count("\n") == 1
    return dict(json.loads(child.stdout))


def test_importing_does_nothing_and_loads_no_library(tmp_path: Path) -> None:
    seen = watched(f"sys.path.insert(0, {str(ROOT)!r})", tmp_path)
    assert seen["done"] == []
    assert seen["same"] is True
    assert [*tmp_path.iterdir()] == []
    places = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    allowed = tuple(f"{place}/" for place in {str(PACKAGE), sys.base_prefix, *places})
    assert [path for path, _ in seen["opened"] if not path.startswith(allowed)] == []
    assert [path for path, mode in seen["opened"] if re.search("[wax+]", mode)] == []
    assert any(path.startswith(str(PACKAGE)) for path, _ in seen["opened"])
    assert seen["light"] == ["coder"]
    assert not {name.split(".")[0] for name in seen["modules"]} & {*LIBRARIES, "pydantic"}
    assert not [name for name in seen["modules"] if name.startswith("coder.cli")]


# ---- the public names ----------------------------------------------------------------------------


def test_type_checkers_see_the_same_names() -> None:
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text())
    typed = {
        (alias.name, node.module)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = {
        (name, f"coder.{home}") for home, names in coder.HOMES.items() for name in names.split()
    }
    assert typed == homes, "a line of __init__.pyi for each name of HOMES in __init__.py"
    assert sorted(name for name, _ in homes) == coder.__all__


def test_every_event_and_every_error_is_public() -> None:
    for module, base in (
        (coder.events, BaseEvent),
        (coder.types, CoderError),
    ):
        classes = {
            each.__name__
            for each in vars(module).values()
            if isinstance(each, type) and issubclass(each, base)
        }
        assert classes - {*coder.__all__} == set(), "goes into HOMES of coder/__init__.py"


def test_a_name_that_is_not_there_is_an_attribute_error_and_an_import_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        _ = coder.Nonsense
    with pytest.raises(ImportError):
        exec("from coder import Nonsense")
    exec("from coder import *", names := {})
    assert set(coder.__all__) <= set(names)


# ---- what belongs to a new thing -----------------------------------------------------------------


def names_in(*modules: str) -> set[str]:
    """The names and attributes that these modules use."""
    nodes = [node for module in modules for node in ast.walk(trees()[module])]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def test_every_event_is_shown_in_the_terminal_or_is_known_to_be_silent() -> None:
    silent = {"MessageEnd", "StepEnd"}  # their texts and their tools have been shown by then
    shown = names_in("coder.cli.render", "coder.cli.questions")
    every = {kind.__name__ for kind in get_args(coder.events.Event)}
    assert every - shown == silent, "show it in cli/render.py, or add it to `silent` here"


def test_an_event_is_written_to_a_session_or_is_known_to_be_left_out() -> None:
    deltas = {kind.type for kind in coder.events.DELTAS}
    changes_nothing_later = {
        "run_start",
        "step_start",
        "message_start",
        "status",
        "retry",
        "notice",
    }
    is_in_another = {"tool_update", "nested"}  # in the tool's end, in the sub-agent's own session
    questions = {"permission_asked", "permission_replied", "question_asked", "doom_loop"}
    every = {kind.type for kind in get_args(coder.events.Event)}
    left_out = deltas | changes_nothing_later | is_in_another | questions
    assert every - KEPT == left_out, "add it to `KEPT` in sessions/recorder.py, or to a set here"


def test_a_delta_is_known_to_what_leaves_out_the_pieces_of_messages() -> None:
    every = get_args(coder.events.Event)
    assert {kind for kind in every if kind.__name__.endswith("Delta")} == {*coder.events.DELTAS}


def test_every_kind_of_a_question_has_its_words() -> None:
    reads_well = {"read", "task", "doom_loop"}  # "Allow read?"; DoomLoop has a question of its own
    kinds = {tool.permission for tool in (*TOOLS, *PATCHING)}
    kinds |= {"mcp", "task", "external_directory", "unconfined", "doom_loop"}  # not of TOOLS
    assert kinds - {*HEADINGS} == reads_well, "add it to HEADINGS in cli/questions.py, or here"


def test_every_setting_is_read_by_another_module() -> None:
    inner = {"CODER_PRICES", "CODER_ALLOW_HTTP"}  # by `price_of` and `load`
    read = names_in(*(FILES.keys() - {"coder.settings", "coder.sources"}))
    assert {name for name in SETTINGS if field_of(name) not in read} == inner, (
        "use the value (`settings.NAME`) in the module that it is for"
    )
