"""Imports with care: modules that may be deleted, and packages of the openai client that run only
when they are used."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from coder.devtools.scripted import Reply
from tests.harness import serve

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "coder"
# In one process, since each start costs half a second: the loop, one run, and the command lines
# that want what is missing
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
# Modules, and what asks for them on the command line. Those that nothing asks for are deleted
# together: no module that is left imports one of them, so that each can be deleted alone, too.
OPTIONAL = {
    "agent/compaction agent/subagent agent/parallel agent/titles agent/user_tools "
    "agent/instructions": "",
    "extend/prompt_files extend/mcp devtools/relay": "",
    "extend": "",
    "permissions/redact": "--trace=t hi",
    "permissions/sandbox": "--sandbox=on hi",
    "permissions/git_guard": "--sandbox=on hi",
    "sessions": "sessions|-c hi|export x",
    "sessions/snapshots": "-c hi",
    "sessions/export": "export x",
    "cli/attach": "--image=x hi",
    "devtools": "--trace=t hi|trace t|demo|--demo|tour",
    "devtools/trace": "--trace=t hi",
    "devtools/demo": "demo|--demo",
}


def test_nothing_imports_what_nothing_asks_for() -> None:
    """At once, that is; `optional` imports it where it is used."""
    silent = [name for names, asked in OPTIONAL.items() if not asked for name in names.split()]
    modules = "|".join(f"coder.{name.replace('/', '.')}" for name in silent)
    for path in PACKAGE.rglob("*.py"):
        found = re.search(rf"^(from|import) ({modules})\b", path.read_text(), re.M)
        assert not found or "extend" in path.parts, f"{path}: {found}"


@pytest.mark.parametrize("modules", OPTIONAL)
def test_everything_else_works_without_it(tmp_path: Path, modules: str) -> None:
    copy = tmp_path / "copy"
    # With what is compiled, but not what is being compiled during this test
    shutil.copytree(PACKAGE, copy / "coder", ignore=shutil.ignore_patterns("*.pyc.*"))
    for removed in (copy / "coder" / module for module in modules.split()):
        shutil.rmtree(removed) if removed.is_dir() else removed.with_suffix(".py").unlink()
    with serve(Reply("Hello.")) as server:
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROGRAM, server.url, OPTIONAL[modules]],
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
    asked = list(filter(None, OPTIONAL[modules].split("|")))
    assert done.stdout.splitlines() == ["Hello.", *(f"{each.split()[0]} 2" for each in asked)]
    lines = [line for line in done.stderr.splitlines() if line.startswith("coder: ")]
    assert len(lines) == len(asked)
    assert all("was deleted" in line for line in lines)
