"""Every flag, driven at a terminal that is narrow, usual and wide; the screen is read, and what the
server was sent."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from coder.cli.flags import parser
from coder.devtools.scripted import Body, Reply
from tests.harness import serve
from tests.terminal import Terminal, rendered
from tests.test_keys import PNG
from tests.test_repl import bare

CTRL_D = "\x04"

# Each start of the program: its place, its flags, each with what the screen shows of it, or with
# what the requests hold ("sent: ") or what the screen does not show ("none: "); and the entries of
# the session. None: one task.
STARTS: list[tuple[str, dict[str, str], list[str] | None]] = [
    (
        "a",
        {"--help": "usage: ... --output-format FORMAT ... exit codes: 0 done · 1 failed"},
        None,
    ),
    ("a", {"--version": "coder "}, None),
    ("a", {"-p": "You said **hello**.", "-q": "none: done"}, None),
    ("a", {"--output-format json hello": '"text": "You said **hello**."'}, None),
    ("b", {"--allow-http --base-url http://other.invalid/v1": "script at other.invalid"}, []),
    (
        "b",
        {
            "--base-url {url}": "at 127.0.0.1:",
            "-m named": "named at 127",
            "-C sub": "/ws/sub",
            "--plan": "Agent: plan. ... plan ❯ hello",
            "--sandbox off": "Commands run without the sandbox.",
            "--reasoning low": 'sent: "reasoning_effort": "low"',
            "--system-prompt Short.": 'sent: "Short.',
            "--append-system-prompt Truly.": 'sent: \\n\\nTruly."',
            "--image picture.png": "attached: picture.png (image)",
            "--context-window 1000": "% of the context left",
            "--no-compaction": "compaction is off (--no-compaction)",
            "--plain": "You said **hello**.",
            "--trace trace": "",  # read below
            "--no-session": "none: Continue this conversation",
        },
        ["hello", "/compact"],
    ),
    (
        "c",
        {
            "-y": "Commands and edits are not asked about (yolo). ... yolo ❯ run seq 9",
            "-v": "I think so. ... ● bash seq 9 1 2 3 4 5 6 7 8 9 stopped ... the user is asked]",
            "--max-steps 1": "the step limit is reached ... Enter goes on with it. ... You said continue.",
            "--idle-timeout 1": "No data for 1 s. Attempt 2 ... You said hang.",
            "--sandbox-network off": "sent: and have no network",
            "--client openai": "",  # test_openai_client.py sees what is sent
        },
        ["run seq 9", "", "hang", "run echo Permission denied; exit 1", ""],
    ),
    (
        "c",
        {
            "-c": "none: Agent build continues",
            "--agent mine": "own at 127 ... Agent: mine. ... mine ❯ run touch no",
            "--allow bash": "● bash touch yes",
            "--deny 'bash:touch no'": "✗ bash touch no",
            "-i 'run touch yes'": "❯ run touch yes ... Done.",
        },
        ["run touch no"],
    ),
    (
        "c",
        {"-r 1": "continues: Be mine. ❯ run", "--max-seconds 0.5 -y": "the time"},
        ["run sleep 30"],
    ),
]


def answer(body: Body) -> Reply:
    """What the entry asks for: a command, silence once, or an echo."""
    last = body["messages"][-1]
    asked = len(body["messages"])
    text = last["content"] if isinstance(last["content"], str) else last["content"][0]["text"]
    if text == "hang" and asked not in hung:
        hung.add(asked)
        return Reply("You", cut=1, close="hang")
    if text.startswith("run "):
        return Reply(
            reasoning="I think so.",
            calls=[("bash", {"command": text[4:]})],
        )
    return Reply("Done." if last["role"] == "tool" else f"You said **{text}**.")


hung: set[int] = set()


def drive(session: Terminal, flags: dict[str, str], entries: list[str] | None) -> None:
    """Enter the entries, leave, and wait for the end."""
    if "-p" in flags:
        session.enter("hello")
        session.ctrl_d()
    for keys in (
        []
        if entries is None
        else [
            *(f"{entry}\r" for entry in entries),
            CTRL_D,
        ]
    ):
        session.prompt()
        session.ready()
        session.type(keys)
        if "--plan" in flags and keys == "hello\r":
            session.expect("to change: ")
            session.settled()
            session.type("\r")
    assert session.exit_code() == 0, session.output


def check(flags: dict[str, str], seen: str, sent: str) -> None:
    """Each flag has done its part. Where the rows of the screen end does not matter."""
    for flag, expected in flags.items():
        kind = expected[:6] if expected[:6] in ("sent: ", "none: ") else ""
        at = 0
        where = sent if kind == "sent: " else "".join(seen.split())
        for part in expected.removeprefix(kind).split(" ... "):
            at = where.find(
                part if kind == "sent: " else "".join(part.split()),
                at,
            )
            assert (at < 0) is (kind == "none: "), f"{flag}: {part!r} in {seen}"


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("place", ["a", "b", "c"])
def test_every_flag_is_seen_in_rows_that_fit(tmp_path: Path, place: str, columns: int) -> None:
    class Resized(Terminal):
        def __enter__(self) -> Resized:
            return self

    Resized.columns = columns
    hung.clear()
    (tmp_path / "ws/sub").mkdir(parents=True)
    (tmp_path / "ws/picture.png").write_bytes(PNG)
    agent = tmp_path / "home/.config/coder/agents/mine.md"
    agent.parent.mkdir(parents=True)
    agent.write_text("---\nmodel: own\n---\nBe mine.")
    with serve(answer) as server:
        for flags, entries in (start[1:] for start in STARTS if start[0] == place):
            words = shlex.split(" ".join(flags).format(url=server.url))
            before = len(server.requests)
            with Resized(tmp_path, server, *words, TMPDIR=str(tmp_path / "ws")) as session:
                drive(session, flags, entries)
            seen = "\n".join(filter(None, rendered(session.output, columns, 300)))
            check(flags, seen, json.dumps(server.requests[before:]))
            lines = [line.strip("\r") for line in bare(session.output).split("\n")]
            wide = [line for line in lines if len(line.rpartition("\r")[2]) > columns]
            # Not broken between words: outputs and entries, JSON, and a path that is wider than a
            # row
            exact = re.compile(rf"  |\{{|.*❯|.*\S{{{columns},}}")
            assert not [line for line in wide if not exact.match(line)]
            assert "--trace trace" not in flags or "hello" in (tmp_path / "ws/trace").read_text()


def test_every_flag_is_driven() -> None:
    driven = {word for _, flags, _ in STARTS for word in shlex.split(" ".join(flags))}
    known = [action.option_strings for action in parser()._actions if action.option_strings]
    assert [names for names in known if not driven & {*names}] == [
        ["--demo"],  # test_demo.py
        ["--step"],  # test_step.py
    ], "add the flag to one of STARTS"


def test_an_agent_that_is_not_there_is_reported_in_the_place_of_the_prompt(tmp_path: Path) -> None:
    with serve(answer) as server:
        session = Terminal(tmp_path, server, "--agent", "none")
        assert session.exit_code() == 2
        assert "coder: there is no agent 'none'; known: build, plan" in session.output
        assert "/help" not in session.output
