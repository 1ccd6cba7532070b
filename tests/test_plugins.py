"""Plugins: what they register, what becomes of broken ones, and that nothing is loaded from the folder that is worked in."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from coder.features.hooks import HookChain
from coder.features.plugins import Plugins, load_plugins
from coder.features.scripted import Reply
from coder.types import RunEnd, RunStart, Usage
from tests.harness import ask, serve
from tests.terminal import OneShot, Terminal

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
    plugins = load_plugins(tmp_path)
    assert plugins.names == ["weather.py"] and plugins.problems == []
    with serve(CALL, Reply("done")) as server:
        ask(server, tools=plugins.tools, hooks=HookChain(*plugins.hooks), each=plugins.told)
    assert server.requests[1]["messages"][-1]["content"] == "rain and a ****** in Oslo"
    assert (tmp_path / "weather.log").read_text() == "forecast {'city': 'Oslo'}\n" and (tmp_path / "weather.end").read_text() == "stop"
    assert [(each.name, each.function("Oslo"), each.help) for each in plugins.commands[:1]] == [
        ("umbrella", "yes, in Oslo", "do I need one?")]


def test_there_is_nothing_where_there_is_no_folder(tmp_path: Path) -> None:
    assert load_plugins(tmp_path / "none") == Plugins()


@pytest.mark.parametrize(("text", "said"), [
    ("import nothing_like_this", "ModuleNotFoundError: No module named 'nothing_like_this'"), ("def setup(", "SyntaxError"),
    ("x = 1", "AttributeError"), ("def setup(): pass", "TypeError"), ("raise SystemExit(3)", "SystemExit: 3"),
    ("def setup(api):\n    api.add_tool(lambda x: x)", "TypeError"),
    ("def setup(api):\n    api.add_hook(print)", "a hook is a coder.Hooks"),
    ("def setup(api):\n    api.add_command('Two words', print)", "small letters"),
    ("def setup(api):\n    api.add_command('a', print)\n    api.add_command('a', print)", "the name /a is taken"),
    ("def bash() -> str:\n    '''B.'''\n    return ''\ndef setup(api):\n    api.add_tool(bash)", "the name bash is taken"),
    ("def fine() -> str:\n    '''F.'''\n    return ''\ndef setup(api):\n    api.add_tool(fine)\n    1 / 0", "ZeroDivisionError")])
def test_a_broken_plugin_is_told_of_and_left_out_whole(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a_broken.py").write_text(text)
    (tmp_path / "b_weather.py").write_text(WHOLE)
    plugins = load_plugins(tmp_path, taken={"bash"})
    [problem] = plugins.problems
    assert problem.startswith("The plugin a_broken.py is left out: ") and said in problem
    assert plugins.names == ["b_weather.py"] and [each.name for each in plugins.tools] == ["forecast"]


def test_a_tool_that_another_plugin_has_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(WHOLE)
    (tmp_path / "b.py").write_text(WHOLE)
    plugins = load_plugins(tmp_path)
    assert plugins.names == ["a.py"] and "the name forecast is taken" in plugins.problems[0]


def test_a_file_that_anybody_may_write_to_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import os\nopen(os.path.dirname(__file__) + '/ran', 'w')\ndef setup(api): pass")
    (tmp_path / "a.py").chmod(0o666)
    assert "anybody may write" in load_plugins(tmp_path).problems[0] and not (tmp_path / "ran").exists()


def test_a_subscriber_that_fails_is_told_of_once_and_hears_no_more(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("heard = []\ndef setup(api):\n    api.subscribe(lambda event: heard.append(event) or 1 / 0)\n"
                                   "    api.subscribe(heard.append)")
    plugins = load_plugins(tmp_path)
    plugins.told(RunStart())
    plugins.told(RunEnd("stop", "", Usage(), 1))
    [problem] = plugins.taken_problems()
    assert "ZeroDivisionError" in problem and plugins.taken_problems() == []
    assert [event.type for event in sys.modules["coder_plugin_a"].heard] == ["run_start", "run_start", "run_end"]


def test_a_hook_of_a_plugin_is_guarded(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from coder import Hooks\nclass Bad(Hooks):\n    def before_tool_call(self, call, ctx): 1 / 0\n"
                                   "def setup(api):\n    api.add_hook(Bad())")
    (tmp_path / "b.py").write_text(WHOLE)
    plugins = load_plugins(tmp_path)
    with serve(CALL, Reply("done")) as server:
        events, result = ask(server, tools=plugins.tools, hooks=HookChain(*plugins.hooks))
    assert result.stop_reason == "stop" and "rain" in server.requests[1]["messages"][-1]["content"]
    assert [event.hook for event in events if event.type == "hook_failed"] == ["a.py: Bad"]  # type: ignore[attr-defined]


# ---- in the program --------------------------------------------------------------------------------------


def installed(folder: Path, module: str, text: str, name: str = "weather") -> None:
    """A package as an installer leaves it, with an entry point for the group of plugins."""
    (folder / f"{module}-1.0.dist-info").mkdir(parents=True)
    (folder / f"{module}-1.0.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (folder / f"{module}-1.0.dist-info" / "entry_points.txt").write_text(f"[coder.plugins]\n{name} = {module}:setup\n")
    (folder / f"{module}.py").write_text(text)



def test_an_installed_package_is_a_plugin(tmp_path: Path) -> None:
    installed(tmp_path / "site", "weather_plugin", WHOLE)
    installed(tmp_path / "site", "bad_plugin", "def setup(api): 1 / 0", "bad")
    path = f"{Path(__file__).parents[1]}{os.pathsep}{tmp_path / 'site'}"
    with serve(CALL, Reply("done")) as server, OneShot(tmp_path, server, "hello", PYTHONPATH=path) as run:
        assert run.end() == 0
        assert "The plugin bad (bad_plugin:setup) is left out: ZeroDivisionError" in run.err
        assert server.requests[1]["messages"][-1]["content"] == "rain and a ****** in Oslo"


def test_a_file_in_the_users_folder_is_a_plugin_and_a_broken_one_is_told_of(tmp_path: Path) -> None:
    config = tmp_path / "home" / ".config" / "coder" / "plugins"
    config.mkdir(parents=True)
    (config / "weather.py").write_text(WHOLE)
    (config / "wrong.py").write_text("1 / 0")
    with serve(CALL, Reply("done")) as server, OneShot(tmp_path, server, "hello", "--output-format", "stream-json") as run:
        assert run.end() == 0
        notices = [event["text"] for event in map(json.loads, run.out.splitlines()) if event["type"] == "notice"]
        assert notices == ["The plugin wrong.py is left out: ZeroDivisionError: division by zero"]
        assert "forecast" in {tool["function"]["name"] for tool in server.requests[0]["tools"]}


@pytest.mark.parametrize("where", ["plugins", ".config/coder/plugins", ".coder/plugins", "coder/plugins"])
def test_nothing_is_loaded_from_the_folder_that_is_worked_in(tmp_path: Path, where: str) -> None:
    ws = tmp_path / "ws"
    (ws / where).mkdir(parents=True)
    evil = f"open({str(tmp_path / 'PWN')!r}, 'w')\ndef setup(api): pass"
    (ws / where / "evil.py").write_text(evil)
    installed(ws, "evil_plugin", evil)
    with serve(Reply("done")) as server, OneShot(tmp_path, server, "hello") as run:
        assert run.end() == 0 and not (tmp_path / "PWN").exists()


def test_details_and_events_of_a_plugins_tool_do_not_break_stream_json(tmp_path: Path) -> None:
    config = tmp_path / "home" / ".config" / "coder" / "plugins"
    config.mkdir(parents=True)
    (config / "a.py").write_text(
        "from pathlib import Path\nfrom coder import Event, ToolResult\nclass Progress(Event): pass\n"
        "def forecast(city: str):\n    \"\"\"F.\n\n    city: where\n    \"\"\"\n    yield Progress()\n"
        "    return ToolResult('rain', details={'path': Path('/x'), 'set': {1}})\ndef setup(api): api.add_tool(forecast)")
    with serve(CALL, Reply("done")) as server, OneShot(tmp_path, server, "hello", "--output-format", "stream-json") as run:
        assert run.end() == 0
        events = [json.loads(line) for line in run.out.splitlines()]
        assert [event["type"] for event in events].count("progress") == 1 and "/x" in str(events)


def test_commands_of_plugins_at_the_prompt(tmp_path: Path) -> None:
    config = tmp_path / "home" / ".config" / "coder" / "plugins"
    config.mkdir(parents=True)
    (config / "weather.py").write_text(WHOLE)
    (config / "zother.py").write_text("def setup(api):\n    api.add_command('exit', lambda a: None)\n"
                                      "    api.add_command('esc', lambda a: '\\x1b[31mred', 'h\\x1b[32melp')")
    with serve(Reply("done")) as server, Terminal(tmp_path, server) as session:
        listed = session.say("/help")
        assert "A plugin's command /exit is left out: the name is taken." in listed and "do I need one?" in listed
        assert "yes, in Oslo" in session.say("/umbrella Oslo")
        assert "/broken failed: ZeroDivisionError: division by zero" in session.say("/broken")
        assert "[31mred" in session.say("/esc") and "\x1b[31mred" not in session.output
        assert "\x1b[32m" not in session.output
        assert "There is no command /nothing" in session.say("/nothing")
