"""Imports with care: modules that may be deleted, and packages of the openai client that run only when they are used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from coder.devtools.scripted import Reply
from tests.harness import serve
from tests.terminal import OneShot, add_plugin

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "coder"
# In one process, since each start costs half a second: the loop, one run, and the command lines that want what is missing
PROGRAM = """
import sys
from coder import ChatModel, bash, run_loop
for event in run_loop([], ChatModel("m", base_url=sys.argv[1]), [bash], prompt="hi"):
    pass
assert event.type == "run_end" and event.text == "Hello.", event
from coder.cli.main import run
code = run(["hi"])
assert code == 0, code
for words in filter(None, sys.argv[2].split("|")):
    print(words.split()[0], run(words.split()))
"""
# The module -> what asks for it
OPTIONAL = {
    "agent/compaction": "",
    "agent/subagent": "",
    "agent/parallel": "",
    "agent/todo": "",
    "agent/titles": "",
    "agent/instructions": "",
    "permissions/redact": "--trace=t hi",
    "permissions/sandbox": "--sandbox=on hi",
    "permissions/landlock": "--sandbox=on hi",
    "permissions/git_guard": "--sandbox=on hi",
    "sessions": "sessions|-c hi|export x",
    "sessions/snapshots": "-c hi",
    "sessions/export": "export x",
    "extend": "",
    "devtools": "--trace=t hi|trace t|demo|--demo",
    "devtools/trace": "--trace=t hi",
    "devtools/demo": "demo|--demo",
    "devtools/relay": "",
}


@pytest.mark.parametrize("module", OPTIONAL)
def test_everything_else_works_without_it(tmp_path: Path, module: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(PACKAGE, copy / "coder", ignore=shutil.ignore_patterns("__pycache__"))
    removed = copy / "coder" / module
    shutil.rmtree(removed) if removed.is_dir() else removed.with_suffix(".py").unlink()
    with serve(Reply("Hello.")) as server:
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROGRAM, server.url, OPTIONAL[module]],
            cwd=tmp_path,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(tmp_path),
                "PYTHONPATH": str(copy),
                "OPENAI_BASE_URL": server.url,
                "OPENAI_MODEL": "m",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    asked = list(filter(None, OPTIONAL[module].split("|")))
    assert done.stdout.splitlines() == ["Hello.", *(f"{each.split()[0]} 2" for each in asked)]
    lines = [line for line in done.stderr.splitlines() if line.startswith("coder: ")]
    assert len(lines) == len(asked) and all("was deleted" in line for line in lines)


# ---- a quicker start -------------------------------------------------------------------------------

LIBRARY = {  # each file prints its name when it runs
    "": "from . import types\nfrom .types.leaf import LEAF",
    "types": "from .leaf import LEAF\nfrom .inner import deep\nNAME = 1\n__all__ = ['NAME']",
    "types/inner": "from ..leaf import LEAF\ndeep = LEAF",
}
LAZY = "from coder.cli.optional import make_lazy; make_lazy('lib', {}); "
WITHIN = LAZY.format(("types", "types.inner", "types.not_there", "none.at_all"))
WHOLE = LAZY.format(("", "types", "types.inner"))
RAN = "lib leaf lib/types lib/types/inner"


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        (f"{WITHIN}import lib; print(lib.LEAF)", "lib leaf 2"),
        (f"{WITHIN}import lib; print(lib.types.NAME)", f"{RAN} 1"),
        (f"{WITHIN}import lib; from lib.types import NAME; print(NAME)", f"{RAN} 1"),
        (f"{WITHIN}import lib; from lib.types import *; print(NAME)", f"{RAN} 1"),
        (f"{WITHIN}from lib.types.inner import deep; print(deep)", "lib/types/inner leaf 2"),
        (
            f"{WITHIN}import lib; print(hasattr(lib.types, 'nope'), lib.types.NAME)",
            f"{RAN} False 1",
        ),
        (f"{WHOLE}from lib.types.leaf import LEAF; print(LEAF)", "leaf 2"),
        (f"{WHOLE}import lib; print(lib.types.leaf.LEAF)", "leaf 2"),
        (f"{WHOLE}import lib; print(lib.LEAF)", "lib leaf 2"),
        (f"import lib; {WHOLE}print(lib.types.NAME)", "lib lib/types leaf lib/types/inner 1"),
        (f"{LAZY.format(())}print('fine')".replace("'lib'", "'no_such_library'"), "fine"),
    ],
)
def test_a_package_runs_when_a_name_of_it_is_asked_for(
    tmp_path: Path, code: str, printed: str
) -> None:
    for name, text in LIBRARY.items():
        folder = tmp_path / "lib" / name
        folder.mkdir()
        (folder / "__init__.py").write_text(f"print('lib/{name}'.strip('/'))\n{text}\n")
    (tmp_path / "lib/types/leaf.py").write_text("print('leaf')\nLEAF = 2\n")
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.stdout.split() == printed.split(), done.stderr


PLUGIN = """
import atexit, sys

def setup(api):
    api.subscribe(look)
    atexit.register(lambda: sys.stderr.write(f"rich: {'rich' in sys.modules}\\n"))

def look(event):
    if event.type == "run_end":
        unused = [name for name in sys.modules if name.startswith("openai.types.responses.")]
        import openai
        from openai.types.responses import Response
        from openai.types import Batch
        names = f"{openai.AzureOpenAI.__name__} {Response.__name__} {Batch.__name__}"
        sys.stderr.write(f"{len(unused) < 20} {names}\\n")
"""


@pytest.mark.parametrize(("forced", "rich"), [({}, False), ({"FORCE_COLOR": "1"}, True)])
def test_a_run_loads_only_what_it_uses_and_a_plugin_finds_the_rest(
    tmp_path: Path, forced: dict[str, str], rich: bool
) -> None:
    add_plugin(tmp_path, "look.py", PLUGIN)
    calls = Reply(calls=[("bash", {"command": f"echo {'long ' * 30}"})])
    with (
        serve(calls, Reply("Hello.")) as server,
        OneShot(tmp_path, server, "-y", "go", **forced) as run,
    ):
        assert run.end() == 0 and run.out == "Hello.\n"
        assert "True AzureOpenAI Response Batch\n" in run.err
        assert f"rich: {rich}\n" in run.err and ("\x1b[" in run.err) == rich
