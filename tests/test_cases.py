"""Every case of the reliability list is a test, and every mark names a case."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import CASES, GROUPS, LIST, TESTS, carried


def test_every_case_has_a_test_and_every_mark_names_a_case() -> None:
    excused = {*LIST["still_to_come"], *LIST["not_testable"]}
    assert [case for case in CASES if case not in carried() and case not in excused] == []
    assert {case: places for case, places in carried().items() if case not in CASES} == {}


def test_the_list_is_whole_and_in_order() -> None:
    assert len(CASES) == 159 and all(words.strip() for words in CASES.values())
    assert list(dict.fromkeys(case.split("-")[0] for case in CASES)) == list(GROUPS)
    assert {*LIST["still_to_come"], *LIST["not_testable"]} <= set(CASES)
    assert all(reason.strip() for reason in LIST["not_testable"].values())


def test_marks_are_found_on_tests_and_on_parameters(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        '@pytest.mark.case("A-1", "A-2")\ndef test_x(): pass\n'
        'ROWS = [pytest.param(1, marks=[pytest.mark.slow, pytest.mark.case("A-1")])]\n'
    )
    assert carried(tmp_path) == {"A-1": ["test_x.py:1", "test_x.py:3"], "A-2": ["test_x.py:1"]}


@pytest.mark.parametrize("arguments", ["CASE", 'f"ABT-{1}"', "", 'id="ABT-01"'])
def test_a_mark_that_cannot_be_read_is_refused(tmp_path: Path, arguments: str) -> None:
    (tmp_path / "test_x.py").write_text(f"@pytest.mark.case({arguments})\ndef test_x(): pass")
    with pytest.raises(ValueError, match=r"test_x\.py:\d"):
        carried(tmp_path)


SOME_TESTS = """
import pytest
from coder.devtools.scripted import Reply, ScriptedServer

def asked(content):
    with ScriptedServer([Reply("Well.")]) as server:
        result = {"role": "tool", "tool_call_id": "a", "content": content}
        server.requests.append({"messages": [result] if content else []})

@pytest.mark.case("ABT-01", "NET-01")
def test_right():
    asked("")

@pytest.mark.case("NET-01", "NET-02")
@pytest.mark.parametrize("content", ["", "a result without its call"])
def test_wrong(content):
    asked(content)

def test_no_case():
    asked("a result without its call")
"""


def test_the_requests_of_every_case_are_checked_and_the_cases_are_counted(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(SOME_TESTS)
    options = ["-c", os.devnull, "-p", "tests.conftest", "-p", "no:cacheprovider", "-n", "0"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "pytest", "-q", *options, str(tmp_path)],
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "4 passed, 1 error" in done.stdout and "a result without its call" in done.stdout
    counted = re.findall(r"^([A-Z]{3}|all)\b.*? (\d+/\d+|-) +(\d+)$", done.stdout, re.M)
    rows = {group: (right, int(listed)) for group, right, listed in counted}
    assert list(rows) == [*GROUPS, "all"]
    assert (rows["ABT"], rows["NET"]) == (("1/1", 15), ("0/2", 13))
    assert (rows["all"], rows["SES"]) == (("1/3", 159), ("-", 14))
    assert "wrong: NET-01, NET-02" in done.stdout
