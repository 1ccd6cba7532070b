"""The checks behind every case of the reliability list, and tables behind the dots: those cases, and real servers' answers."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest
from hypothesis import settings

from coder.devtools.scripted import ScriptedServer
from tests.cases import CASES
from tests.cases import GROUPS as CASE_GROUPS
from tests.harness import assert_all_valid

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # started in the background of a shell: our children would ignore Ctrl+C, too
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)

settings.load_profile(
    "ci"
)  # the same examples each time: a test that fails says something about the change before it (README)

GROUPS = {
    "tc": "tool calls",
    "fr": "finish reasons",
    "ch": "chunks",
    "ss": "event stream",
    "ht": "HTTP errors",
}
GRADES = ("must", "should", "may")


@pytest.fixture(autouse=True, scope="session")
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Those of the tests' own process go with the tests' folders: what is named like ours in /tmp is a fault (tests/terminal.py)."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = tempfile.tempdir = str(tmp_path_factory.mktemp("temp"))
    yield
    tempfile.tempdir = None
    if before is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before


@pytest.fixture(autouse=True)
def always_on(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a case is about, every request of it is valid: of every server that was started in its test."""
    if not request.node.get_closest_marker("case"):
        yield
        return
    servers: list[ScriptedServer] = []
    start = ScriptedServer.start

    def noted(server: ScriptedServer) -> ScriptedServer:
        servers.append(server)
        return start(server)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptedServer, "start", noted)
        yield
    for server in servers:
        assert_all_valid(server)


def pytest_xdist_auto_num_workers() -> int | None:
    """For `-n auto`: a quarter of the tests' time is waiting for clocks and other processes, so more than one a core."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # xdist reads it
    return max(1, (os.cpu_count() or 1) * 3 // 2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if ids := [case for mark in item.iter_markers("case") for case in mark.args]:
            item.user_properties.append(("cases", ids))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    servers_answers(terminalreporter)
    reliability(terminalreporter)


def reliability(terminalreporter: pytest.TerminalReporter) -> None:
    """A case is right where all its tests are that ran."""
    outcomes: dict[str, set[str]] = defaultdict(set)
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            for case in dict(getattr(report, "user_properties", ())).get("cases", ()):
                outcomes[case].add(outcome)
    if not outcomes:
        return
    terminalreporter.write_line("")
    terminalreporter.write_line(f"{'reliability cases':<25}    right/run   listed")
    for group, name in [*CASE_GROUPS.items(), ("", "all")]:
        run = [case for case in outcomes if case.startswith(group)]
        right = sum(outcomes[case] == {"passed"} for case in run)
        listed = sum(case.startswith(group) for case in CASES)
        terminalreporter.write_line(
            f"{f'{group} {name}'.strip():<25}{f'{right}/{len(run)}' if run else '-':>13}{listed:>9}"
        )
    if wrong := sorted(case for case, seen in outcomes.items() if seen != {"passed"}):
        terminalreporter.write_line(f"wrong: {', '.join(wrong)}")


def servers_answers(terminalreporter: pytest.TerminalReporter) -> None:
    counts: Counter[tuple[str, str, str]] = Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            facts = dict(report.user_properties)
            if "quirk" in facts:
                counts[facts["quirk"].split("-")[0], facts["grade"], outcome] += 1
    if not counts:
        return
    terminalreporter.write_line("")
    terminalreporter.write_line(
        f"answers of real servers  {''.join(f'{grade:>9}' for grade in GRADES)}   (right/all)"
    )
    for group, name in [*GROUPS.items(), ("", "all")]:
        cells = []
        for grade in GRADES:
            right, wrong = (
                sum(
                    n
                    for (g, r, o), n in counts.items()
                    if g.startswith(group) and (r, o) == (grade, outcome)
                )
                for outcome in ("passed", "failed")
            )
            cells.append(f"{right}/{right + wrong}" if right + wrong else "-")
        terminalreporter.write_line(f"{name:<25}{''.join(f'{cell:>9}' for cell in cells)}")
