"""What README.md shows is what happens."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from coder.devtools.scripted import Body, Reply, ScriptedServer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


EXAMPLES = re.findall(r"```python\n(.*?)```.*?```text\n(.*?)```", README, re.S)


def printed(code: str, server: ScriptedServer, folder: Path = ROOT) -> str:
    env = os.environ | {
        "OPENAI_BASE_URL": server.url,
        "OPENAI_API_KEY": "x",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_library_example_prints_what_the_readme_says() -> None:
    code, output = EXAMPLES[0]

    def script(body: Body) -> Reply:
        last = body["messages"][-1]
        if last["role"] == "user":
            assert (
                body["tools"][0]["function"]["parameters"]["properties"]["city"]["description"]
                == "its name"
            )
            return Reply(calls=[("population", {"city": "Oslo"})])
        return Reply(f"{last['content']} people live in Oslo.")

    with ScriptedServer(script) as server:
        assert printed(code, server) == output


def test_the_agent_example_prints_what_the_readme_says() -> None:
    code, output = EXAMPLES[1]
    assert len(code.splitlines()) <= 46 and len(EXAMPLES) == 3

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


def test_the_example_of_a_kept_conversation_prints_what_the_readme_says(tmp_path: Path) -> None:
    code, output = EXAMPLES[2]

    def script(body: Body) -> Reply:
        return Reply(
            "Ada."
            if "My name is Ada." in [m["content"] for m in body["messages"][:-1]]
            else "Hello."
        )

    with ScriptedServer(script) as server:
        assert printed(code, server, tmp_path) == output


def test_every_link_leads_to_a_file_and_the_core_and_all_folders_are_named() -> None:
    links = set(re.findall(r"\]\((coder/[^)]+)\)", README))
    assert [link for link in links if not (ROOT / link).exists()] == []
    package = ROOT / "coder"
    wanted = [*package.glob("[a-z]*.py"), *package.glob("*/__init__.py")]
    assert {str(path.relative_to(ROOT)) for path in wanted} <= links


def test_on_a_package_page_no_link_leads_nowhere() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    text = README
    for each in tool["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"].replace("\\g", "\\"), text)
    assert [
        link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith("https://")
    ] == []
    assert len(text.split()) == len(README.split()) and "| loop.py | the loop:" in text


def test_the_exit_codes_of_the_readme_are_those_of_the_program() -> None:
    from coder.cli.flags import EXIT_CODES, INTERRUPTED, LIMIT, TRANSIENT, USAGE

    codes = {
        int(code)
        for row in re.findall(r"^\| ([\d, ]+) \|", README, re.M)
        for code in row.split(",")
    }
    assert codes == {*EXIT_CODES.values(), USAGE, LIMIT, TRANSIENT, INTERRUPTED, 143}
    assert json.dumps(EXIT_CODES["stop"]) == "0"


def test_the_events_of_the_readme_are_those_of_the_program() -> None:
    """Names and fields of every event, as stream-json prints it, and the words that they use."""
    from typing import get_args

    from coder import events, types

    start, end = README.index("### Formats for programs"), README.index("### Any server")
    table, words = README[start:end].split("\n`stop_reason` is ")
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (`\w+`(?:, `\w+`)*) \|", table, re.M)
    listed = {
        name: re.findall(r"\w+", fields)
        for names, fields in rows
        for name in re.findall(r"\w+", names)
    }
    known = {
        each.type: [f.name for f in dataclasses.fields(each) if f.repr]
        for each in get_args(events.Event)
    }
    known["run_start"] = ["session_id", "model", "cwd", "version"]  # test_cli.py compares
    assert listed == known
    error = types.ModelError("server", "").to_dict()
    usage = [f.name for f in dataclasses.fields(types.Usage)]
    assert re.findall(r"`(\w+)`", words) == [
        *get_args(types.StopReason),
        "usage",
        *usage,
        "error",
        *error,
        *get_args(types.ErrorKind),
        "usage",
    ]
