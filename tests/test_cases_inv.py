"""What holds for every request, group INV of the reliability list; random conversations are in tests/test_random.py."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from coder.devtools.scripted import Reply
from coder.sessions.recorder import Recorder
from coder.sessions.store import Store
from coder.tools.bash import bash
from coder.tools.files import read
from coder.toolset import Toolset, tool
from tests.harness import ask, assert_all_valid, results, serve

FINE = Reply("All is well.")


@tool
def five_megabytes() -> str:
    """Say much."""
    return "much " * 1_000_000


@pytest.mark.case("INV-08")
def test_a_result_of_five_megabytes_is_cut_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a line of the file\n" * 300_000)
    calls = [("five_megabytes", {}), ("bash", {"command": "cat file"}), ("read", {"path": "file"})]
    with serve(Reply(calls=calls), FINE) as server:
        ask(server, tools=Toolset([five_megabytes, bash, read], cwd=tmp_path))
        found = results(server)
        assert_all_valid(server)
    assert all(len(each) < 60_000 for each in found)
    assert all(
        mark in each for mark, each in zip(["[truncated ", "[truncated ", "offset="], found)
    ), [each[-200:] for each in found]


ODD = "half \ud83d, \udc00 other, nul \0, none \ufffe \uffff, pair \U0001f600, line \u2028"


@tool
def odd() -> str:
    """Say what no encoder takes."""
    return ODD


@pytest.mark.case("INV-09")
def test_text_that_no_encoder_takes_is_sent_and_stays_the_same(tmp_path: Path) -> None:
    with serve(Reply("So: \ud83d\0\ufffe", calls=[("odd", {})]), FINE) as server:
        with closing(Store(tmp_path / "sessions.db")) as store:
            info = store.create("/ws")
            with Recorder(store, info) as recorder:
                ask(server, ODD, tools=[odd], messages=recorder.messages, each=recorder)
        with closing(Store(tmp_path / "sessions.db")) as store, Recorder(store, info) as recorder:
            ask(server, "and now?", tools=[odd], messages=recorder.messages, each=recorder)
        assert_all_valid(server)
        first, second = server.requests[1]["messages"], server.requests[2]["messages"]
    assert second[: len(first)] == first and len(second) == len(first) + 2
    mended = ODD.replace("\ud83d", "\ufffd").replace("\udc00", "\ufffd").replace("\0", "\ufffd")
    assert [each["content"] for each in first if each["role"] != "assistant"] == [mended] * 2
