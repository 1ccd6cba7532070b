"""Plugins: what they register, what becomes of broken ones, and whose files are loaded."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from coder.agent.profiles import load_agents
from coder.devtools.scripted import Reply
from coder.events import RunEnd, RunStart
from coder.extend.guard import command_hooks
from coder.extend.plugins import Plugins
from coder.extend.prompt_files import PromptFiles
from coder.hooks import HookChain
from coder.types import CoderError, Report, Usage
from tests.harness import ask, serve
from tests.terminal import OneShot, Terminal, add_plugin

WHOLE = '''
from dataclasses import dataclass
from pathlib import Path
from coder import Hooks, ToolResult

@dataclass
class Audit(Hooks):
    log: Path = Path(__file__).with_suffix(".log")

    def before_tool_call(self, call, ctx):
        with self.log.open("a") as file:
            file.write(f"{call.name} {call.arguments}\\n")

    def after_tool_call(self, call, result):
        return ToolResult(str(result.content).replace("secret", "******"))

def forecast(city: str) -> str:
    """What the weather will be.

    city: where
    """
    return f"rain and a secret in {city}"

def setup(api):
    api.add_tool(forecast)
    api.add_hook(Audit())
    api.add_command("umbrella", lambda city: f"yes, in {city}", "do I need one?")
    api.add_command("broken", lambda city: 1 / 0)
    api.subscribe(lambda event: Path(__file__).with_suffix(".end").write_text(event.stop_reason) if event.type == "run_end" else None)
'''
CALL = Reply(calls=[("forecast", {"city": "Oslo"})])


def test_a_file_registers_a_tool_a_hook_a_command_and_a_subscriber(tmp_path: Path) -> None:
    (tmp_path / "weather.py").write_text(WHOLE)
    plugins = Plugins(tmp_path, report=pytest.fail)
    with serve(CALL, Reply("done")) as server:
        ask(
            server,
            tools=plugins.tools,
            hooks=HookChain(*plugins.hooks),
            each=plugins.notify,
        )
    assert server.requests[1]["messages"][-1]["content"] == "rain and a ****** in Oslo"
    assert (tmp_path / "weather.log").read_text() == "forecast {'city': 'Oslo'}\n"
    assert (tmp_path / "weather.end").read_text() == "stop"
    assert [(each.name, each.function("Oslo"), each.help) for each in plugins.commands[:1]] == [
        ("umbrella", "yes, in Oslo", "do I need one?")
    ]


FINE = "def fine() -> str:\n    '''F.'''\n    return ''\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import nothing_like_this", "ModuleNotFoundError: No module named 'nothing_like_this'"),
        ("def setup(", "SyntaxError"),
        ("x = 1", "AttributeError"),
        ("def setup(): pass", "TypeError"),
        ("def setup(api):\n    api.add_tool(lambda x: x)", "TypeError"),
        ("def setup(api):\n    api.add_hook(print)", "a hook is a coder.Hooks"),
        ("def setup(api):\n    api.add_command('Two words', print)", "lower-case letters"),
        ("def setup(api):\n    for _ in 'ab': api.add_command('a', print)", "the name /a is taken"),
        (f"{FINE.replace('fine', 'bash')}def setup(api):\n    api.add_tool(bash)", "name bash is"),
        (f"{FINE}def setup(api):\n    api.add_tool(fine)\n    1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_broken_plugin_is_reported_and_left_out(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "a_broken.py").write_text(text)
    (tmp_path / "b_weather.py").write_text(WHOLE)
    problems = list[str]()
    plugins = Plugins(tmp_path, {"bash"}, problems.append)
    [line] = problems
    assert line.startswith("The plugin a_broken.py is skipped: ")
    assert problem in line
    assert [each.name for each in plugins.tools] == ["forecast"]


def test_a_subscriber_that_fails_is_told_of_once_and_hears_no_more(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "heard = []\ndef setup(api):\n    api.subscribe(lambda event: heard.append(event) or 1 / 0)\n"
        "    api.subscribe(heard.append)"
    )
    problems = list[str]()
    plugins = Plugins(tmp_path, report=problems.append)
    plugins.notify(RunStart())
    plugins.notify(RunEnd("stop", "", Usage(), 1))
    [problem] = problems
    assert problem.startswith("A subscriber of coder_plugin_a failed and is removed: ZeroDiv")
    heard = [event.type for event in sys.modules["coder_plugin_a"].heard]
    assert heard == ["run_start", "run_start", "run_end"]


# ---- whose a file is -----------------------------------------------------------------------------


def plugin_by_link(own: Path, mode: int) -> Path:
    """The plugin is a link into a folder with this mode."""
    store = own.parent / "store"
    store.mkdir()
    (own / "a.py").rename(store / "a.py")
    (own / "a.py").symlink_to(store / "a.py")
    store.chmod(mode)
    return store / "a.py"


WRITABLE, STRANGER = "other users can write to", 54321  # a user and a group that nobody here is
OWNERS: list[tuple[Callable[[Path], object], str]] = [
    (lambda own: None, ""),
    (lambda own: plugin_by_link(own, 0o755), ""),
    (lambda own: plugin_by_link(own, 0o1777), ""),
    (lambda own: plugin_by_link(own, 0o777), f"{WRITABLE} OWN/../store (fix: chmod go-w)"),
    (lambda own: plugin_by_link(own, 0o755).chmod(0o646), f"{WRITABLE} OWN/../store/a.py (fix"),
    (lambda own: (own / "a.py").chmod(0o646), f"{WRITABLE} OWN/a.py (fix: chmod go-w)"),
    (lambda own: own.chmod(0o1777), f"{WRITABLE} OWN (fix: chmod go-w)"),
]
if os.geteuid() == 0:
    OWNERS += [
        (lambda own: os.chown(own / "a.py", STRANGER, -1), "OWN/a.py belongs to another user"),
        (
            lambda own: (
                os.chown(own, -1, STRANGER),
                own.chmod(0o775),
            ),
            f"{WRITABLE} OWN (fix",
        ),
    ]


@pytest.mark.parametrize(("change", "problem"), OWNERS)
def test_what_others_may_write_to_is_reported_and_not_run(
    tmp_path: Path, change: Callable[[Path], object], problem: str
) -> None:
    own = tmp_path / "coder"
    ran = tmp_path / "ran"
    own.mkdir(mode=0o755)
    code = f"from pathlib import Path\nPath({str(ran)!r}).touch()\ndef setup(api): pass"
    (own / "a.py").write_text(code)
    (own / "a.py").chmod(0o644)
    change(own)
    problem = problem.replace("OWN/..", str(tmp_path)).replace(
        "OWN",
        str(own),
    )
    problems = list[str]()
    Plugins(own, report=problems.append)
    assert ran.exists() == (not problem)
    assert len(problems) == bool(problem)
    assert all(problem in line and "\n" not in line for line in problems)


def skills_of(folder: Path, report: Report) -> None:
    assert not PromptFiles([folder], [folder], folder / "answers.json", report).skills


OTHERS: dict[str, Callable[[Path, Report], object]] = {
    "hooks.json": lambda folder, report: command_hooks(folder / "hooks.json"),
    "x.md": load_agents,
    "skills/a/SKILL.md": skills_of,
}


@pytest.mark.parametrize("name", OTHERS)
def test_nor_are_hooks_agents_and_skills_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("{}")
    (tmp_path / name).chmod(0o602)
    reports = list[str]()
    try:
        OTHERS[name](tmp_path, reports.append)
    except CoderError as error:
        reports.append(str(error))
    [line] = reports
    assert WRITABLE in line


# ---- in the program ------------------------------------------------------------------------------


def installed(folder: Path, module: str, text: str, name: str = "weather") -> None:
    """A package as an installer leaves it, with an entry point for the group of plugins."""
    (folder / f"{module}-1.0.dist-info").mkdir(parents=True)
    (folder / f"{module}-1.0.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n"
    )
    (folder / f"{module}-1.0.dist-info" / "entry_points.txt").write_text(
        f"[coder.plugins]\n{name} = {module}:setup\n"
    )
    (folder / f"{module}.py").write_text(text)


def test_files_and_installed_packages_are_plugins_of_the_program(tmp_path: Path) -> None:
    """One that fails is a notice; what a plugin's tool yields and returns does not break
    stream-json."""
    site = tmp_path / "home" / "site"
    installed(site, "weather_plugin", WHOLE)
    installed(site, "bad_plugin", "def setup(api): 1 / 0", "bad")
    (site / "odd-1.0.dist-info" / "entry_points.txt").mkdir(parents=True)  # cannot be read
    add_plugin(tmp_path, "wrong.py", "1 / 0")
    add_plugin(
        tmp_path,
        "progress.py",
        "from dataclasses import dataclass\nfrom pathlib import Path\nfrom coder import BaseEvent\n"
        "@dataclass\nclass Progress(BaseEvent):\n    path: Path = Path('/x')\n"
        'def look():\n    """L."""\n    yield Progress()\n    return "rain"\n'
        "def setup(api): api.add_tool(look)",
    )
    path = f"{Path(__file__).parents[1]}{os.pathsep}{site}"
    calls = [("forecast", {"city": "Oslo"}), ("look", {})]
    with (
        serve(Reply(calls=calls), Reply("done")) as server,
        OneShot(tmp_path, server, "go", PYTHONPATH=path) as run,
    ):
        assert run.end() == 0
        denied = [each["content"] for each in server.requests[1]["messages"][-2:]]
        assert denied[0].startswith("Denied: forecast needs permission")
        assert "--allow 'look:*'" in denied[1], "a tool that declares nothing asks"
    allowed = "--allow", "forecast", "--allow", "look"
    with (
        serve(Reply(calls=calls), Reply("done")) as server,
        OneShot(
            tmp_path, server, "hello", *allowed, "--output-format", "stream-json", PYTHONPATH=path
        ) as run,
    ):
        assert run.end() == 0
        sent = [each["content"] for each in server.requests[1]["messages"][-2:]]
        assert sent == ["rain and a ****** in Oslo", "rain"]
        events = [json.loads(line) for line in run.out.splitlines()]
    assert [event["text"] for event in events if event["type"] == "notice"] == [
        "The plugin wrong.py is skipped: ZeroDivisionError: division by zero",
        "The plugin bad (bad_plugin:setup) is skipped: ZeroDivisionError: division by zero",
    ]
    assert [event["type"] for event in events].count("progress") == 1
    assert "/x" in str(events)


def test_commands_of_plugins_at_the_prompt(tmp_path: Path) -> None:
    """One that is taken is reported; controls in what it returns are taken out."""
    add_plugin(tmp_path, "weather.py", WHOLE)
    add_plugin(
        tmp_path,
        "zother.py",
        "def setup(api):\n    api.add_command('exit', lambda a: None)\n"
        "    api.add_command('esc', lambda a: '\\x1b[31mred', 'h\\x1b[32melp')",
    )
    with serve(Reply("done")) as server, Terminal(tmp_path, server) as session:
        listed = session.say("/help")
        assert "The added command /exit is ignored: the name is taken." in listed
        assert "do I need one?" in listed
        assert "yes, in Oslo" in session.say("/umbrella Oslo")
        assert "/broken failed: ZeroDivisionError: division by zero" in session.say("/broken")
        assert "\rred\r\n" in session.say("/esc") + "\r\n"
        assert "\x1b[31mred" not in session.output
        assert "\x1b[32m" not in session.output
        assert "There is no command /nothing" in session.say("/nothing")
