"""What README.md shows is what happens."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from coder.features.scripted import Body, Reply, ScriptedServer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


EXAMPLES = re.findall(r"```python\n(.*?)```.*?```text\n(.*?)```", README, re.S)


def printed(code: str, server: ScriptedServer) -> str:
    env = os.environ | {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "x", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_library_example_prints_what_the_readme_says() -> None:
    code, output = EXAMPLES[0]

    def script(body: Body) -> Reply:
        last = body["messages"][-1]
        if last["role"] == "user":
            assert body["tools"][0]["function"]["parameters"]["properties"]["city"]["description"] == "its name"
            return Reply(calls=[("population", {"city": "Oslo"})])
        return Reply(f"{last['content']} people live in Oslo.")

    with ScriptedServer(script) as server:
        assert printed(code, server) == output


def test_the_agent_example_prints_what_the_readme_says() -> None:
    code, output = EXAMPLES[1]
    assert len(code.splitlines()) <= 42 and len(EXAMPLES) == 2

    def script(body: Body) -> Reply:
        last = body["messages"][-1]["content"]
        numbers = [m["content"].split()[0] for m in body["messages"] if m["role"] == "tool"]
        if last in ("How many people live in Oslo?", "And Bergen?"):
            return Reply(calls=[("population", {"city": "Bergen" if "Bergen" in last else "Oslo"})])
        if "story" in last:
            return Reply("Once upon a time " * 100, pace=0.05)
        return Reply(f"Oslo has {numbers[0]} people, Bergen {numbers[1]}.")

    with ScriptedServer(script) as server:
        assert printed(code, server) == output
        assert "sk-12345" not in json.dumps(server.requests)


def test_every_file_that_the_readme_names_is_there_and_every_file_is_named() -> None:
    named = {link for link in re.findall(r"\]\((coder/[^)]+)\)", README) if (ROOT / link).exists()}
    assert named == set(re.findall(r"\]\((coder/[^)]+)\)", README))
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "coder").rglob("*.py") if "demo_project" not in path.parts}
    unnamed = {path for path in files if path not in named and not path.endswith("__init__.py")}
    assert unnamed == {"coder/__main__.py"}


def test_the_exit_codes_of_the_readme_are_those_of_the_program() -> None:
    from coder.terminal.flags import EXIT_CODES, INTERRUPTED, LIMIT, TRANSIENT, USAGE

    codes = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", README, re.M) for code in row.split(",")}
    assert codes == {*EXIT_CODES.values(), USAGE, LIMIT, TRANSIENT, INTERRUPTED, 143}
    assert json.dumps(EXIT_CODES["stop"]) == "0"
