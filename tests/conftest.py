"""A table of the replayed answers of real servers, behind the test's dots."""

from __future__ import annotations

import contextlib
import signal
from collections import Counter

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background of a shell: our children would ignore Ctrl+C, too
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)

GROUPS = {"tc": "tool calls", "fr": "finish reasons", "ch": "chunks", "ss": "event stream", "ht": "HTTP errors"}
GRADES = ("must", "should", "may")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts: Counter[tuple[str, str, str]] = Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            facts = dict(report.user_properties)
            if "quirk" in facts:
                counts[facts["quirk"].split("-")[0], facts["grade"], outcome] += 1
    if not counts:
        return
    terminalreporter.write_line("")
    terminalreporter.write_line(f"answers of real servers  {''.join(f'{grade:>9}' for grade in GRADES)}   (right/all)")
    for group, name in [*GROUPS.items(), ("", "all")]:
        cells = []
        for grade in GRADES:
            right, wrong = (sum(n for (g, r, o), n in counts.items() if g.startswith(group) and (r, o) == (grade, outcome))
                            for outcome in ("passed", "failed"))
            cells.append(f"{right}/{right + wrong}" if right + wrong else "-")
        terminalreporter.write_line(f"{name:<25}{''.join(f'{cell:>9}' for cell in cells)}")
