"""Every case of the reliability list is a test, and every mark names a case."""

from __future__ import annotations

from tests.cases import CASES, GROUPS, LIST, carried


def test_every_case_has_a_test_and_every_mark_names_a_case() -> None:
    excused = {*LIST["still_to_come"], *LIST["not_testable"]}
    assert [case for case in CASES if case not in carried() and case not in excused] == []
    assert {case: places for case, places in carried().items() if case not in CASES} == {}


def test_the_list_is_whole_and_in_order() -> None:
    assert len(CASES) == 159
    assert all(words.strip() for words in CASES.values())
    assert list(dict.fromkeys(case.split("-")[0] for case in CASES)) == list(GROUPS)
    assert {*LIST["still_to_come"], *LIST["not_testable"]} <= set(CASES)
    assert all(reason.strip() for reason in LIST["not_testable"].values())
