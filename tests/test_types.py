"""What mypy says of code that uses the package: the examples of the documents, and typed outputs.

One run of mypy for all of it: a run without a cache takes half a minute.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.test_readme import ROOT, blocks

TYPED = """
from dataclasses import dataclass
from typing import TypedDict, assert_type
from pydantic import BaseModel
from coder import Agent, Session

class Person(BaseModel):
    name: str

@dataclass
class City:
    name: str

class Point(TypedDict):
    x: int

async def check(agent: Agent, session: Session) -> None:
    assert_type(agent.run("x", output=Person).output, Person)
    assert_type(agent.run("x", output=City).check().output.name, str)
    assert_type(session.run("x", output=Point).output["x"], int)
    assert_type((await session.arun("x", output=City)).output, City)
    agent.run("x").check()
"""


def test_the_examples_and_the_typed_outputs_pass_mypy(tmp_path: Path) -> None:
    (tmp_path / "typed_outputs.py").write_text(TYPED)
    for number, code in enumerate(blocks("python")):
        (tmp_path / f"example_{number}.py").write_text(code)
    options = ["--strict", "--config-file", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *map(str, tmp_path.glob("*.py"))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
