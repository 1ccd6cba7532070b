"""Plugins: what they register, what becomes of broken ones, and that nothing is loaded from the folder that is worked in."""

from __future__ import annotations

import grp
import json
import os
import pwd
import signal
import sys
from pathlib import Path

import pytest

from coder.devtools.scripted import Reply
from coder.events import RunEnd, RunStart
from coder.extend.command_hooks import HooksError, command_hooks
from coder.extend.plugins import Plugins, load_plugins
from coder.hooks import HookChain
from coder.types import Usage
from tests.harness import ask, serve
from tests.terminal import OneShot, Terminal, add_plugin, until

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
    assert (tmp_path / "weather.log").read_text() == "forecast {'city': 'Oslo'}\n" and (
        tmp_path / "weather.end"
    ).read_text() == "stop"
    assert [(each.name, each.function("Oslo"), each.help) for each in plugins.commands[:1]] == [
        ("umbrella", "yes, in Oslo", "do I need one?")
    ]


def test_there_is_nothing_where_there_is_no_folder(tmp_path: Path) -> None:
    assert load_plugins(tmp_path / "none") == Plugins()


FINE = "def fine() -> str:\n    '''F.'''\n    return ''\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import nothing_like_this", "ModuleNotFoundError: No module named 'nothing_like_this'"),
        ("def setup(", "SyntaxError"),
        ("x = 1", "AttributeError"),
        ("def setup(): pass", "TypeError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def setup(api):\n    api.add_tool(lambda x: x)", "TypeError"),
        ("def setup(api):\n    api.add_hook(print)", "a hook is a coder.Hooks"),
        ("def setup(api):\n    api.add_command('Two words', print)", "small letters"),
        (
            "def setup(api):\n    api.add_command('a', print)\n    api.add_command('a', print)",
            "the name /a is taken",
        ),
        (
            "def bash() -> str:\n    '''B.'''\n    return ''\ndef setup(api):\n    api.add_tool(bash)",
            "the name bash is taken",
        ),
        (f"{FINE}def setup(api):\n    api.add_tool(fine)\n    1 / 0", "ZeroDivisionError"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("def setup(api):\n    api.tools = None", "api.tools is no list of tools any more"),
        (
            f"{FINE}def setup(api):\n    api.add_tool(fine)\n    api.subscribers = None",
            "api.subscribers is no list of subscribers any more",
        ),
        (
            f"{FINE}def setup(api):\n    api.tools.append(fine)",
            "api.tools is no list of tools any more",
        ),
        ("def setup(api):\n    del api.tools", "AttributeError"),
    ],
)
def test_a_broken_plugin_is_told_of_and_left_out_whole(
    tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "a_broken.py").write_text(text)
    (tmp_path / "b_weather.py").write_text(WHOLE)
    plugins = load_plugins(tmp_path, taken={"bash"})
    [problem] = plugins.problems
    assert problem.startswith("The plugin a_broken.py is left out: ") and said in problem
    assert plugins.names == ["b_weather.py"] and [each.name for each in plugins.tools] == [
        "forecast"
    ]


def test_a_tool_that_another_plugin_has_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(WHOLE)
    (tmp_path / "b.py").write_text(WHOLE)
    plugins = load_plugins(tmp_path)
    assert plugins.names == ["a.py"] and "the name forecast is taken" in plugins.problems[0]


def test_a_subscriber_that_fails_is_told_of_once_and_hears_no_more(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "heard = []\ndef setup(api):\n    api.subscribe(lambda event: heard.append(event) or 1 / 0)\n"
        "    api.subscribe(heard.append)"
    )
    plugins = load_plugins(tmp_path)
    plugins.told(RunStart())
    plugins.told(RunEnd("stop", "", Usage(), 1))
    [problem] = plugins.taken_problems()
    assert "ZeroDivisionError" in problem and plugins.taken_problems() == []
    assert [event.type for event in sys.modules["coder_plugin_a"].heard] == [
        "run_start",
        "run_start",
        "run_end",
    ]


def test_a_hook_of_a_plugin_is_guarded(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "from coder import Hooks\nclass Bad(Hooks):\n    def before_tool_call(self, call, ctx): 1 / 0\n"
        "def setup(api):\n    api.add_hook(Bad())"
    )
    (tmp_path / "b.py").write_text(WHOLE)
    plugins = load_plugins(tmp_path)
    with serve(CALL, Reply("done")) as server:
        events, result = ask(server, tools=plugins.tools, hooks=HookChain(*plugins.hooks))
    assert result.stop_reason == "stop" and "rain" in server.requests[1]["messages"][-1]["content"]
    assert [event.hook for event in events if event.type == "hook_failed"] == ["a.py: Bad"]  # type: ignore[attr-defined]


# ---- whose a file is -------------------------------------------------------------------------------------

STRANGER = 54321  # a user and a group that nobody here is
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


def said_of(folder: Path) -> list[str]:
    """What is said of the plugins in a folder and of its hooks.json."""
    said = load_plugins(folder).problems
    try:
        assert len(command_hooks(folder / "hooks.json").hooks) == 1
    except HooksError as error:
        said.append(str(error))
    return said


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with a plugin that leaves a file `ran` above it, and a hooks.json."""
    folder = tmp_path / "coder"
    folder.mkdir(mode=0o755)
    (folder / "a.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\ndef setup(api): pass"
    )
    (folder / "hooks.json").write_text('{"before_tool_call": [{"command": "true"}]}')
    for name in ("a.py", "hooks.json"):
        (folder / name).chmod(0o644)
    return folder


def test_what_only_the_user_may_write_to_is_run(own: Path) -> None:
    assert said_of(own) == [] and (own.parent / "ran").exists()


@pytest.mark.parametrize(
    ("name", "mode"),
    [("a.py", 0o646), ("hooks.json", 0o602), (".", 0o777), (".", 0o757), (".", 0o1777)],
)
def test_a_file_or_a_folder_that_others_may_write_to_is_told_in_a_line_and_not_run(
    own: Path, name: str, mode: int
) -> None:
    (own / name).chmod(mode)
    said = said_of(own)
    assert len(said) == (2 if name == "." else 1) and (own.parent / "ran").exists() == (
        name == "hooks.json"
    )
    assert all(
        f"others may write to {own / name} (chmod go-w mends that)" in line and "\n" not in line
        for line in said
    )


@as_root
@pytest.mark.parametrize("name", ["a.py", "hooks.json", "."])
def test_a_file_or_a_folder_of_somebody_else_is_told_and_not_run(own: Path, name: str) -> None:
    os.chown(own / name, STRANGER, -1)
    assert [line.endswith(f"{own / name} belongs to somebody else") for line in said_of(own)] == [
        True
    ] * (2 if name == "." else 1)
    assert (own.parent / "ran").exists() == (name == "hooks.json")


@as_root
@pytest.mark.parametrize("group", [STRANGER, 1], ids=["of nobody", "daemon"])
def test_no_group_of_others_may_write(own: Path, group: int) -> None:
    (own / "hooks.json").chmod(0o664)
    os.chown(own / "hooks.json", -1, group)
    [problem] = said_of(own)
    assert "others may write to" in problem


def test_a_group_in_which_nobody_else_is_may_write(own: Path) -> None:
    """Systems with umask 002 give each user such a group, and all that the user makes can be written to by it."""
    me, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(os.getegid())
    if {
        *group.gr_mem,
        *(user.pw_name for user in pwd.getpwall() if user.pw_gid == group.gr_gid),
    } != {me}:
        pytest.skip("the group of this process is not its user's alone")
    for place in (own, own / "a.py", own / "hooks.json"):
        place.chmod(0o775)
        os.chown(place, -1, group.gr_gid)
    assert said_of(own) == [] and (own.parent / "ran").exists()


@pytest.mark.parametrize(("mode", "trusted"), [(0o755, True), (0o777, False), (0o1777, True)])
def test_a_link_leads_to_where_nobody_can_put_another_file(
    own: Path, mode: int, trusted: bool
) -> None:
    store = own.parent / "store"
    store.mkdir()
    (own / "a.py").rename(store / "a.py")
    (own / "a.py").symlink_to(store / "a.py")
    store.chmod(mode)
    assert len(said_of(own)) == (not trusted) and (own.parent / "ran").exists() == trusted
    (store / "a.py").chmod(0o646)
    assert f"others may write to {store / 'a.py'}" in said_of(own)[0]


# ---- in the program --------------------------------------------------------------------------------------


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


def test_an_installed_package_is_a_plugin(tmp_path: Path) -> None:
    installed(tmp_path / "home" / "site", "weather_plugin", WHOLE)
    installed(tmp_path / "home" / "site", "bad_plugin", "def setup(api): 1 / 0", "bad")
    path = f"{Path(__file__).parents[1]}{os.pathsep}{tmp_path / 'home' / 'site'}"
    with (
        serve(CALL, Reply("done")) as server,
        OneShot(tmp_path, server, "hello", PYTHONPATH=path) as run,
    ):
        assert run.end() == 0
        assert "The plugin bad (bad_plugin:setup) is left out: ZeroDivisionError" in run.err
        assert server.requests[1]["messages"][-1]["content"] == "rain and a ****** in Oslo"


def test_a_file_in_the_users_folder_is_a_plugin_and_a_broken_one_is_told_of(tmp_path: Path) -> None:
    add_plugin(tmp_path, "weather.py", WHOLE)
    add_plugin(tmp_path, "wrong.py", "1 / 0")
    with (
        serve(CALL, Reply("done")) as server,
        OneShot(tmp_path, server, "hello", "--output-format", "stream-json") as run,
    ):
        assert run.end() == 0
        notices = [
            event["text"]
            for event in map(json.loads, run.out.splitlines())
            if event["type"] == "notice"
        ]
        assert notices == ["The plugin wrong.py is left out: ZeroDivisionError: division by zero"]
        assert "forecast" in {tool["function"]["name"] for tool in server.requests[0]["tools"]}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_who_ends_the_program_while_a_plugin_is_loaded_ends_it(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """A signal comes out of the plugin's code as an exception, as those of its own do."""
    add_plugin(
        tmp_path,
        "slow.py",
        f"import threading\nopen({str(tmp_path / 'home' / 'begun')!r}, 'w')\nthreading.Event().wait(60)",
    )
    with serve(Reply("never")) as server, OneShot(tmp_path, server, "hello") as run:
        until((tmp_path / "home" / "begun").exists, "the plugin is being loaded")
        run.kill(number)
        assert run.end() == code and server.requests == [] and "left out" not in run.err


@pytest.mark.parametrize(
    "where", ["plugins", ".config/coder/plugins", ".coder/plugins", "coder/plugins"]
)
def test_nothing_is_loaded_from_the_folder_that_is_worked_in(tmp_path: Path, where: str) -> None:
    ws = tmp_path / "ws"
    (ws / where).mkdir(parents=True)
    evil = f"open({str(tmp_path / 'PWN')!r}, 'w')\ndef setup(api): pass"
    (ws / where / "evil.py").write_text(evil)
    installed(ws, "evil_plugin", evil)
    for environment in ({}, {"XDG_CONFIG_HOME": ".config"}, {"XDG_CONFIG_HOME": "."}):
        with (
            serve(Reply("done")) as server,
            OneShot(tmp_path, server, "hello", **environment) as run,
        ):
            assert run.end() == 0 and not (tmp_path / "PWN").exists()


def test_details_and_events_of_a_plugins_tool_do_not_break_stream_json(tmp_path: Path) -> None:
    add_plugin(
        tmp_path,
        "a.py",
        "from pathlib import Path\nfrom coder import BaseEvent, ToolResult\nclass Progress(BaseEvent): pass\n"
        'def forecast(city: str):\n    """F.\n\n    city: where\n    """\n    yield Progress()\n'
        "    return ToolResult('rain', details={'path': Path('/x'), 'set': {1}})\ndef setup(api): api.add_tool(forecast)",
    )
    with (
        serve(CALL, Reply("done")) as server,
        OneShot(tmp_path, server, "hello", "--output-format", "stream-json") as run,
    ):
        assert run.end() == 0
        events = [json.loads(line) for line in run.out.splitlines()]
        assert [event["type"] for event in events].count("progress") == 1 and "/x" in str(events)


def test_commands_of_plugins_at_the_prompt(tmp_path: Path) -> None:
    add_plugin(tmp_path, "weather.py", WHOLE)
    add_plugin(
        tmp_path,
        "zother.py",
        "def setup(api):\n    api.add_command('exit', lambda a: None)\n"
        "    api.add_command('esc', lambda a: '\\x1b[31mred', 'h\\x1b[32melp')",
    )
    with serve(Reply("done")) as server, Terminal(tmp_path, server) as session:
        listed = session.say("/help")
        assert (
            "A plugin's command /exit is left out: the name is taken." in listed
            and "do I need one?" in listed
        )
        assert "yes, in Oslo" in session.say("/umbrella Oslo")
        assert "/broken failed: ZeroDivisionError: division by zero" in session.say("/broken")
        assert "\rred\r\n" in session.say("/esc") + "\r\n" and "\x1b[31mred" not in session.output
        assert "\x1b[32m" not in session.output
        assert "There is no command /nothing" in session.say("/nothing")
