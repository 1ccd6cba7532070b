"""A quicker start: packages of the openai client that are run only when something of them is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from coder.devtools.scripted import Reply
from tests.harness import serve
from tests.terminal import OneShot, add_plugin

ROOT = Path(__file__).parents[1]


def python(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": f"{ROOT}:{folder}"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def library(folder: Path) -> None:
    """A library whose packages tell when they are run."""
    for name in ("lib", "lib/types", "lib/types/inner"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"print('ran {name}')\n")
    with (folder / "lib/__init__.py").open("a") as file:
        file.write("from . import types\nfrom .types.leaf import LEAF\n")
    with (folder / "lib/types/__init__.py").open("a") as file:
        file.write(
            "from .leaf import LEAF\nfrom .inner import deep\nNAME = 1\n__all__ = ['NAME']\n"
        )
    with (folder / "lib/types/inner/__init__.py").open("a") as file:
        file.write("from ..leaf import LEAF\ndeep = LEAF\n")
    (folder / "lib/types/leaf.py").write_text("print('ran leaf')\nLEAF = 2\n")


def test_a_package_runs_when_something_of_it_is_asked_for(tmp_path: Path) -> None:
    library(tmp_path)
    before = "from coder.cli.lazy import make_lazy; make_lazy('lib', ('types', 'types.inner', 'types.not_there', 'none.at_all'));"
    assert python(f"{before}import lib; print(lib.LEAF)", tmp_path).split("\n")[:-1] == [
        "ran lib",
        "ran leaf",
        "2",
    ]
    for use in (
        "print(lib.types.NAME)",
        "from lib.types import NAME; print(NAME)",
        "from lib.types import *; print(NAME)",
    ):
        lines = python(f"{before}import lib; {use}", tmp_path).split("\n")[:-1]
        assert lines == ["ran lib", "ran leaf", "ran lib/types", "ran lib/types/inner", "1"], use
    assert (
        python(f"{before}from lib.types.inner import deep; print(deep)", tmp_path).split("\n")[-2]
        == "2"
    )
    assert (
        python(
            f"{before}import lib; print(hasattr(lib.types, 'nope'), lib.types.NAME)", tmp_path
        ).split("\n")[-2]
        == "False 1"
    )


def test_what_is_there_already_or_not_at_all_is_left_as_it_is(tmp_path: Path) -> None:
    library(tmp_path)
    after = "import lib; from coder.cli.lazy import make_lazy; make_lazy('lib', ('types',)); print(lib.types.NAME)"
    assert python(after, tmp_path).split("\n")[-2] == "1"
    assert (
        python(
            "from coder.cli.lazy import make_lazy; make_lazy('no_such_library'); print('fine')",
            tmp_path,
        )
        == "fine\n"
    )


def test_a_run_does_not_load_the_types_that_it_does_not_use_and_a_plugin_finds_them(
    tmp_path: Path,
) -> None:
    add_plugin(
        tmp_path,
        "look.py",
        "import sys\n"
        "def setup(api):\n"
        "    api.subscribe(told)\n"
        "def told(event):\n"
        "    if event.type == 'run_end':\n"
        "        loaded = [name for name in sys.modules if name.startswith('openai.types.responses.')]\n"
        "        from openai.types.responses import Response\n"
        "        from openai.types import Batch\n"
        "        sys.stderr.write(f'{len(loaded) < 20} {Response.__name__} {Batch.__name__}\\n')\n",
    )
    with serve(Reply("Hello.")) as server, OneShot(tmp_path, server, "go") as run:
        assert run.end() == 0 and run.out == "Hello.\n"
        assert "True Response Batch\n" in run.err


@pytest.mark.parametrize(("forced", "loaded"), [({}, "False"), ({"FORCE_COLOR": "1"}, "True")])
def test_where_no_colour_is_written_what_writes_it_is_not_loaded(
    tmp_path: Path, forced: dict[str, str], loaded: str
) -> None:
    add_plugin(
        tmp_path,
        "look.py",
        "import atexit, sys\n"
        "def setup(api):\n"
        "    atexit.register(lambda: sys.stderr.write(f\"rich: {'rich' in sys.modules}\\n\"))\n",
    )
    with (
        serve(
            Reply(calls=[("bash", {"command": f"echo {'long ' * 30}"})]), Reply("Hello.")
        ) as server,
        OneShot(tmp_path, server, "-y", "go", **forced) as run,
    ):
        assert run.end() == 0 and run.out == "Hello.\n"
        assert f"rich: {loaded}\n" in run.err and ("\x1b[" in run.err) == bool(forced)
