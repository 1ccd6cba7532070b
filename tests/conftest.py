"""The checks after every reliability case, and the summary of the cases."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from coder.devtools.scripted import ScriptedServer
from coder.providers.profiles import LEARNT
from coder.sessions.store import Store
from tests.cases import CASES
from tests.cases import GROUPS as CASE_GROUPS
from tests.harness import assert_all_valid, shell
from tests.terminal import MARK, processes

for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
    if signal.getsignal(number) is signal.SIG_IGN:
        # Started in the background of a shell or with nohup: child processes would ignore it, too
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(number, default)

# Otherwise hundreds of child processes would compile the package, each for itself
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The same examples each time: a test that fails is caused by the change before it
# (docs/contributing.md)
settings.load_profile("ci")


@pytest.fixture(autouse=True, scope="session")
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put temporary files into the tests' folders: tests/terminal.py takes what is left in /tmp for
    a fault."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("temp"))
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "data" / "sessions.db") as made:
        yield made


@pytest.fixture(autouse=True)
def check_requests_of_a_case(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every request that a case sends is valid, to whichever scripted server."""
    if not request.node.get_closest_marker("case"):
        yield
        return
    servers: list[ScriptedServer] = []
    start = ScriptedServer.__enter__

    def started(server: ScriptedServer) -> ScriptedServer:
        servers.append(server)
        return start(server)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptedServer, "__enter__", started)
        yield
    for server in servers:
        assert_all_valid(server)


@pytest.fixture(autouse=True)
def forget_what_was_learnt() -> Iterator[None]:
    """What a server rejected is known by its address, and its port may be another server's soon."""
    yield
    LEARNT.clear()


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Child processes are known by it; those that a test leaves in the background are ended."""
    value = os.urandom(8).hex()
    monkeypatch.setenv(MARK, value)
    yield value
    for number in processes(value):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(number, signal.SIGKILL)


@pytest.fixture
def ws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace; next to it a home with a file, and a file and a folder to be left alone."""
    for name in ("ws", "home", "beside"):
        (tmp_path / name).mkdir()
    for name in ("home/file", "file"):
        (tmp_path / name).write_text("kept")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("AUTHOR_NAME", "COMMITTER_NAME", "AUTHOR_EMAIL", "COMMITTER_EMAIL"):
        monkeypatch.setenv(f"GIT_{name}", "me@here")
    return tmp_path / "ws"


@pytest.fixture
def repository(ws: Path) -> Path:
    """The workspace as a repository with a remote, a file and a hook."""
    shell(ws, "git init -q -b main; git remote add origin x; echo text > file.txt; git add -A")
    hook = ".git/hooks/commit-msg"
    shell(ws, f"git commit -qm first; printf '#!/bin/sh\\nexit 0\\n' > {hook}; chmod 755 {hook}")
    return ws


def pytest_xdist_auto_num_workers() -> int | None:
    """For `-n auto`: tests wait for clocks and processes half of their time, so two workers per
    core."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # xdist reads it
    return max(1, 2 * (os.cpu_count() or 1))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """The tests themselves live to the end: looking for garbage among them takes a fifth of each
    worker's collection, and then again during the tests."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if ids := [case for mark in item.iter_markers("case") for case in mark.args]:
            item.user_properties.append(("cases", ids))


# ---- summaries -----------------------------------------------------------------------------------


def share(outcomes: Iterable[bool]) -> str:
    """right/all, or "-" where there are none."""
    counted = list(outcomes)
    return f"{sum(counted)}/{len(counted)}" if counted else "-"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A case is right if all its tests that ran have passed."""
    right: dict[str, bool] = defaultdict(lambda: True)
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            for case in dict(getattr(report, "user_properties", ())).get(
                "cases",
                (),
            ):
                right[case] &= outcome == "passed"
    if not right:
        return
    terminalreporter.write_line(f"\n{'reliability cases':<25}    right/run   listed")
    for group, name in [*CASE_GROUPS.items(), ("", "all")]:
        run = share(passed for case, passed in right.items() if case.startswith(group))
        listed = sum(case.startswith(group) for case in CASES)
        terminalreporter.write_line(f"{f'{group} {name}'.strip():<25}{run:>13}{listed:>9}")
    if wrong := sorted(case for case, passed in right.items() if not passed):
        terminalreporter.write_line(f"wrong: {', '.join(wrong)}")
