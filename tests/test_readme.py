"""README.md and docs/ are true: their code runs, their links lead somewhere, their tables are the
program's."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest

import coder.tools
from coder import events, types
from coder.agent.profiles import BUILT_IN, load_agents
from coder.cli.command_table import ALIASES, COMMANDS
from coder.cli.commands import Commands
from coder.cli.flags import parser
from coder.cli.main import SUBCOMMANDS, run
from coder.cli.one_shot import EXIT_CODES
from coder.cli.process import INTERRUPTED, LIMIT, TRANSIENT, USAGE
from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.extend.guard import command_hooks
from coder.extend.mcp import expand
from coder.extend.plugins import Plugins
from coder.extend.prompt_files import read_prompt_file
from coder.hooks import HOOK_NAMES
from coder.permissions.rules import rules_of
from coder.sessions.export import Format
from coder.settings import SETTINGS, window_of
from coder.sources import load
from coder.tools.built_in import PATCHING, TOOLS

ROOT = Path(__file__).parent.parent
LOCAL = {"OPENAI_BASE_URL": "http://localhost:1/v1"}  # needs no key
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
    ]
}


def blocks(language: str) -> list[str]:
    return [
        each
        for text in PAGES.values()
        for each in re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)
    ]


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table on a page whose first column has this heading."""
    table = PAGES[page].split(f"\n| {heading} |")[1].split("\n\n")[0]
    return [
        [
            cell.strip()
            for cell in re.split(
                r"(?<!\\)\|",
                line.strip("|"),
            )
        ]
        for line in table.split("\n")[2:]
    ]


def quoted(cell: str) -> list[str]:
    """The words of a cell that are code."""
    return re.findall(r"`([^`]+)`", cell)


# ---- examples in Python --------------------------------------------------------------------------


def last(body: Body) -> str:
    return str(body["messages"][-1]["content"])


def count_oslo(body: Body) -> Reply:
    if body["messages"][-1]["role"] == "user":
        city = body["tools"][0]["function"]["parameters"]["properties"]["city"]
        assert city["description"] == "its name"
        return Reply(calls=[("population", {"city": "Oslo"})])
    return Reply(f"{last(body)} people live in Oslo.")


def count_both(body: Body) -> Reply:
    assert "sk-12345" not in json.dumps(body)
    numbers = [m["content"].split()[0] for m in body["messages"] if m["role"] == "tool"]
    if last(body) in ("How many people live in Oslo?", "And Bergen?"):
        return Reply(
            calls=[("population", {"city": "Bergen" if "Bergen" in last(body) else "Oslo"})]
        )
    if "story" in last(body):
        return Reply("Once upon a time " * 100, pace=0.05)
    return Reply(f"Oslo has {numbers[0]} people, Bergen {numbers[1]}.")


def compare_cities(body: Body) -> Reply:
    topic = last(body)
    if topic == "Compare Oslo and Bergen.":
        return Reply(
            calls=[
                ("research", {"topic": "Oslo"}),
                ("research", {"topic": "Bergen"}),
            ]
        )
    if body["model"] == "gpt-5-mini":
        return Reply({"Oslo": "larger", "Bergen": "wetter"}[topic])
    found = [m["content"] for m in body["messages"] if m["role"] == "tool"]
    return Reply(f"Oslo is {found[0]}, Bergen is {found[1]}.")


def remember_ada(body: Body) -> Reply:
    said = [message["content"] for message in body["messages"][:-1]]
    return Reply("Ada." if "My name is Ada." in said else "Hello.")


def write_hello(body: Body) -> Reply:
    if "<beginning>" in last(body):
        return Reply("A greeting")  # the title
    if body["messages"][-1]["role"] == "user":
        patch = "*** Begin Patch\n*** Add File: hello.txt\n+Hello.\n*** End Patch"
        return Reply(calls=[("apply_patch", {"patch": patch})])
    return Reply("Written.")


def judge_slogans(body: Body) -> Reply:
    if body["model"] == "gpt-5":
        return Reply(
            "Bread, daily." if "shorter" in last(body) else "We bake bread every day of the year."
        )
    good = last(body) == "Bread, daily."
    return Reply(
        json.dumps({"good": good} if good else {"good": False, "advice": "Make it shorter."})
    )


def list_events(body: Body) -> Reply:
    owls = {"name": "Owls", "day": "2025-05-03", "kind": "talk"}
    choir = {"name": "Choir", "day": "2025-05-05", "kind": "concert"}
    return Reply(json.dumps({"events": [owls, choir]}))


def reset_commit(body: Body) -> Reply:
    if body["messages"][-1]["role"] == "user":
        return Reply(calls=[("bash", {"command": "git reset --hard HEAD~1"})])
    assert "Use git log or git show." in last(body)
    return Reply("I may not do that.")


def look_up_oslo(body: Body) -> Reply:
    if body["messages"][-1]["role"] == "user":
        return Reply(calls=[("population", {"city": "Oslo"})])
    return Reply(f"{last(body)} people.")


def sum_up(body: Body) -> Reply:
    topic = "owls" if "Owls" in last(body) else "Oslo"
    return Reply(
        json.dumps(
            {
                "topic": topic,
                "words": len(last(body).split()),
            }
        )
    )


def count_tulips(body: Body) -> Reply:
    return Reply(
        re.findall(
            r"\d+",
            json.dumps(body["messages"]),
        )[0]
    )


TOSSES = count(1)

# What the example contains -> the model that it talks to.
MODELS: dict[str, Callable[[Body], Reply]] = {
    "RunEnd(text=text)": count_oslo,
    "Say hello.": lambda body: Reply("Hello."),
    "def steer(": count_both,
    "start_server(": lambda body: Reply("Hello."),
    "def approve(": reset_commit,
    "class Verdict": judge_slogans,
    "class Calendar": list_events,
    "talks.db": count_tulips,
    "test_a_busy_server": lambda body: Reply("never asked"),
    "How big is Oslo?": look_up_oslo,
    "changelog": lambda body: Reply("Yes, it is."),
    "def summarize(": sum_up,
    "class Cached": lambda body: Reply(f"Heads, number {next(TOSSES)}."),
    "def research(": compare_cities,
    "output=Person": lambda body: Reply('{"name": "Ada Lovelace", "born": 1815}'),
    "My name is Ada.": remember_ada,
    "Write hello.txt.": write_hello,
    "def deploy(": lambda body: Reply("never asked"),
}
EXAMPLES = [
    example
    for text in PAGES.values()
    for example in re.findall(r"```python\n((?:(?!```).)*)```\s*```text\n(.*?)```", text, re.S)
]


@pytest.mark.parametrize("name", MODELS)
def test_an_example_prints_what_stands_below_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [(code, output)] = [each for each in EXAMPLES if name in each[0]]
    (tmp_path / "ws").mkdir()
    monkeypatch.chdir(tmp_path / "ws")
    for kind in ("CONFIG", "DATA"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind))
    with ScriptedServer(MODELS[name]) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "x")
        module = ModuleType("example")
        monkeypatch.setitem(sys.modules, "example", module)
        exec(compile(code, name, "exec", dont_inherit=True), vars(module))
    assert capsys.readouterr().out == output


def test_a_recipe_has_at_most_40_lines() -> None:
    recipes = re.findall(r"^```python\n(.*?)^```$", PAGES["docs/cookbook.md"], re.M | re.S)
    assert len(recipes) == 10
    assert max(len(recipe.splitlines()) for recipe in recipes) <= 40


# ---- the picture ---------------------------------------------------------------------------------


def words_of(picture: Path) -> list[str]:
    """What is written in a picture, without the times that the session took."""
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", picture.read_text())
    plain = [text.replace("&#160;", " ") for text in texts]
    untimed = [re.sub(r"( · )?\d+(\.\d+)? ?s\b", "", text) for text in plain]
    return [" ".join(text.split()) for text in untimed]


def test_the_picture_shows_a_session_as_it_is_today(tmp_path: Path) -> None:
    script = ROOT / "docs" / "picture.py"
    subprocess.run(
        [sys.executable, script, tmp_path / "now.svg"],
        check=True,
        timeout=120,
    )
    kept = ROOT / "docs" / "session.svg"
    assert words_of(kept) == words_of(tmp_path / "now.svg"), "make it again: docs/picture.py"
    assert not re.search(r"url\(.?http", kept.read_text()), "it loads nothing"


# ---- files and commands --------------------------------------------------------------------------


def test_every_block_is_accepted_by_what_reads_it(tmp_path: Path) -> None:
    assert len(EXAMPLES) == len(MODELS)
    [plugin] = [each for each in blocks("python") if "def setup(" in each]
    (tmp_path / "weather.py").write_text(plugin)
    loaded = Plugins(tmp_path, report=pytest.fail)
    assert [each.name for each in loaded.tools] == ["forecast"]
    agent, cheap, command = blocks("markdown")
    (tmp_path / "review.md").write_text(command)
    assert "commit abc and" in read_prompt_file(tmp_path / "review.md").filled("abc")
    (tmp_path / "review.md").write_text(agent)
    (tmp_path / "explore.md").write_text(cheap)
    agents = load_agents(tmp_path, pytest.fail)
    assert agents["review"].mode == "subagent"
    assert agents["explore"].prompt == BUILT_IN["explore"].prompt
    assert agents["explore"].model
    for text in blocks("json"):
        data = json.loads(text)
        if "before_tool_call" in data:
            (tmp_path / "hooks.json").write_text(text)
            assert command_hooks(tmp_path / "hooks.json")
        elif "mcpServers" in data:
            assert set(expand(data, ROOT)["mcpServers"]) == {"git", "docs"}
        elif "agent_servers" in data:
            assert data["agent_servers"]["coder"]["args"] == ["acp"]
        elif "edit" in data:
            assert rules_of(data, "a file")
        else:
            (tmp_path / "prices.json").write_text(text)
            flags = {"OPENAI_MODEL": "gpt-5", "CODER_PRICES": str(tmp_path / "prices.json")}
            assert load(tmp_path, flags | LOCAL).price_of("gpt-5")


def commands() -> list[list[str]]:
    """The words of each simple command of the shell blocks."""
    found: list[list[str]] = []
    for block in blocks("sh"):
        assert (
            subprocess.run(
                ["bash", "-n"],
                input=block,
                text=True,
            ).returncode
            == 0
        ), block
        for line in block.splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
            lexer.whitespace_split = True
            parts: list[list[str]] = [[]]
            for word in lexer:
                if re.fullmatch(r"[|&;]+", word):
                    parts.append([])
                else:
                    parts[-1].append(word)
            found += filter(None, parts)
    return found


def test_every_command_line_of_coder_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    given = [words for words in commands() if words[0].rpartition("/")[2] == "coder"]
    assert len(given) > 20
    for _, *argv in given:
        argv = argv[: argv.index(">")] if ">" in argv else argv
        if argv[:1] in (["demo"], ["serve"]):  # it would serve
            argv = [argv[0], "--help"]
        if argv and argv[0] in SUBCOMMANDS:
            with pytest.raises(SystemExit) if "--help" in argv else contextlib.nullcontext():
                run(argv)
            assert "usage:" not in capsys.readouterr().err, argv
        else:
            parser().parse_intermixed_args(argv)


def test_every_setting_that_is_exported_is_accepted(tmp_path: Path) -> None:
    given = {}
    for words in commands():
        if words[0] == "export":
            given |= dict(word.split("=", 1) for word in words[1:])
    del given["CODER_SERVE_TOKEN"]  # of one subcommand; in no file
    assert given.keys() <= set(SETTINGS)
    assert len(given) >= 5
    load(tmp_path, given | LOCAL)


def test_every_file_of_the_repository_that_is_named_exists() -> None:
    named = re.findall(
        r"(?<![\w/.~-])((?:coder|tests|docs|\.ci)/[\w./-]*\w)", "".join(PAGES.values())
    )
    assert len(named) > 30
    assert [name for name in named if not (ROOT / name).exists()] == []


# ---- links ---------------------------------------------------------------------------------------


def links(page: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", PAGES[page])


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {
        re.sub(r"[^\w -]", "", heading.lower()).replace(
            " ",
            "-",
        )
        for heading in headings
    }


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    for link in links(page):
        if not link.startswith("https://"):
            name, _, anchor = link.partition("#")
            path = (ROOT / page).parent / name if name else ROOT / page
            assert path.exists(), link
            assert not anchor or anchor in anchors(path), link


def test_the_readme_is_short_and_leads_to_every_page_and_folder() -> None:
    lines = len(PAGES["README.md"].splitlines())
    assert lines < 250, "shorten another part of README.md, or move it to docs/"
    folders = {str(path.relative_to(ROOT)) for path in (ROOT / "coder").glob("*/__init__.py")}
    assert {*PAGES, *folders} - {"README.md"} <= set(links("README.md"))


def test_the_reading_guide_names_every_file_of_the_core_and_what_is_in_it() -> None:
    core = {f"../{path.relative_to(ROOT)}" for path in (ROOT / "coder").glob("[a-z]*.py")}
    assert core <= set(links("docs/reading-guide.md"))
    steps = [row[-2:] for row in rows("docs/reading-guide.md", "minute")]
    for files, names in [*steps, *rows("docs/reading-guide.md", "file")]:
        text = "".join(
            (ROOT / "docs" / link).read_text() for link in re.findall(r"\]\((.+?)\)", files)
        )
        for name in (
            " ".join(quoted(names))
            .replace(
                ".",
                " ",
            )
            .split()
        ):
            assert not name.isidentifier() or re.search(rf"\b{name}\b", text), (files, name)


# ---- tables --------------------------------------------------------------------------------------


def test_the_table_of_flags_is_the_parser() -> None:
    shown = {word.split()[0] for row in rows("README.md", "flag") for word in quoted(row[0])}
    known = {name for action in parser()._actions for name in action.option_strings}
    assert shown == known, "change the table of flags in README.md"


def test_the_tables_of_commands_are_the_program() -> None:
    shown = {quoted(row[0])[0].split()[0].removeprefix("/") for row in rows("README.md", "command")}
    plugins = SimpleNamespace(commands=[])
    repl: Any = SimpleNamespace(
        session=SimpleNamespace(parts=SimpleNamespace(plugins=plugins, prompt_files=None)),
        conversation=None,
        screen=None,
    )
    known = Commands(repl).table
    assert shown == set(known), "change the table of slash commands in README.md"
    second = PAGES["README.md"].split("\n| command |")[2].split("\n\n")[0]
    subcommands = set(re.findall(r"^\| `coder ([a-z-]+)", second, re.M))
    assert subcommands == set(SUBCOMMANDS), "change the table of `coder ...` in README.md"
    also = re.findall(r"`/(\w+)[^|]*\|[^|\n]*\(also `/(\w+)`\)", PAGES["README.md"])
    assert also
    assert all(ALIASES[alias] == name for name, alias in also)


def test_every_built_in_tool_and_its_kind_is_named_in_the_documents() -> None:
    folder = re.search(r"^\| \[tools/\].*", PAGES["README.md"], re.M)
    sentence = re.search(r"the built-in tools .*?\.", PAGES["docs/library.md"], re.S)
    kinds = re.search(r"The kinds are.*?In a pattern", PAGES["docs/security.md"], re.S)
    assert folder
    assert sentence
    assert kinds
    docstring = str(coder.tools.__doc__).partition("\n\n")[0]
    for tool in (*TOOLS, *PATCHING):
        assert re.search(rf"\b{tool.name}\b", folder[0]), "add it to the row of tools/ in README.md"
        assert re.search(rf"\b{tool.name}\b", docstring), (
            "add it to the docstring of tools/__init__.py"
        )
        assert f"`{tool.name}`" in sentence[0], "add it to the built-in tools in docs/library.md"
        assert f"`{tool.permission}`" in kinds[0], "add its kind to docs/security.md"


def test_every_format_of_an_export_is_named_in_the_help_and_the_table() -> None:
    table = re.search(r"^\| `/export.*", PAGES["README.md"], re.M)
    assert table
    places = [
        re.search(r"^\| `coder export.*", PAGES["README.md"], re.M),
        re.search(r"^An export is .*?;", PAGES["docs/sessions.md"], re.M | re.S),
    ]
    for form in get_args(Format):
        for place in places:
            assert place
            assert f"`{form}`" in place[0], "add the format to this row or sentence"
        assert f".{form}" in COMMANDS["export"].help, "add it to the help of /export"
        assert f"`.{form}`" in table[0], "add it to the row of /export in README.md"


def test_the_table_of_settings_is_the_program(tmp_path: Path) -> None:
    table = {quoted(row[0])[0]: row[1:3] for row in rows("docs/settings.md", "setting")}
    assert list(table) == list(SETTINGS), "one row each in docs/settings.md, in this order"
    flags = {
        action.dest: f"`{action.option_strings[-1]}`"
        for action in parser()._actions
        if action.dest in SETTINGS
    }
    assert {name: row[0] for name, row in table.items() if row[0]} == flags
    settings = load(tmp_path, {"OPENAI_MODEL": "m"} | LOCAL)
    defaults = {
        "CODER_IDLE_TIMEOUT": settings.idle_timeout,
        "CODER_RETRY_BASE": settings.retry_base,
        "CODER_MAX_STEPS": settings.max_steps,
    }
    assert {name: float(table[name][1]) for name in defaults} == defaults
    assert table["CODER_CONTEXT_WINDOW"][1].endswith(f" {window_of(settings.model)}")


LIMITS = "field of `Limits`"


def names_of(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.repr]


def columns(heading: str) -> dict[str, list[str]]:
    """The words of the second column by those of the first."""
    table = rows("docs/library.md", heading)
    return {name: quoted(row[1]) for row in table for name in quoted(row[0])}


def test_the_tables_of_the_library_are_the_program() -> None:
    assert columns("event") == {each.type: names_of(each) for each in get_args(events.Event)}, (
        "change the table of events in docs/library.md"
    )
    assert columns("word") == {
        "stop_reason": [*get_args(types.StopReason)],
        "usage": names_of(types.Usage),
        "error": [*types.ModelError("server", "").to_dict()],
        "kind": [*get_args(types.ErrorKind)],
    }
    assert [quoted(row[0])[0] for row in rows("docs/library.md", "hook")] == [*HOOK_NAMES]
    assert [*columns("field of `RunResult`")] == [*names_of(types.RunResult), "output"]
    limits = {quoted(name)[0]: value for name, value, *_ in rows("docs/library.md", LIMITS)}
    assert limits == {
        name: str(value) for name, value in dataclasses.asdict(types.Limits()).items()
    }


def test_the_exit_codes_are_those_of_the_program() -> None:
    codes = {int(code) for row in rows("README.md", "exit code") for code in row[0].split(",")}
    assert codes == {*EXIT_CODES.values(), USAGE, LIMIT, TRANSIENT, INTERRUPTED, 143}
