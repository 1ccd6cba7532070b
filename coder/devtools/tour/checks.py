"""The checks of the ten chapters: a script for the server, and what has to come of it.

Each check is a function of a `Trial`. It raises NotYetError with the first thing that is missing,
in the words that the learner reads.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from coder.devtools.scripted import MODEL, Body, Reply, events
from coder.devtools.tour.full_context import check_a_full_context
from coder.devtools.tour.side_by_side import check_side_by_side
from coder.devtools.tour.trial import (
    NO_SECOND,
    Trial,
    bash,
    expect,
    new_word,
    offers,
    users_texts,
)
from coder.providers.text import plural
from coder.tools import processes

STOP = 'The finish_reason of that answer is "stop": look for calls, not for it'
CUT = "the second answer was cut (it has no finish_reason), and was not asked for again"
LOOK = "What does tour.txt say?"
A_SECOND = 0.99  # clocks are rounded
MANY = 12  # requests after which the model of chapter 7 gives up
SIZE = 7  # bytes of a piece in chapter 2


# ---- 1 to 4: from one request to the loop --------------------------------------------------------


def check_one_request(trial: Trial) -> None:
    prompt = "Say the word."
    word = new_word()
    trial.play(Reply(f"The word is {word}."))
    trial.run(prompt)
    body = trial.requests[0]
    expect(len(trial.requests) == 1, "there were more requests than one")
    expect(body.get("model") == MODEL, "the model of the request is not $OPENAI_MODEL")
    expect(prompt in users_texts(body)[-1], "the last message of the user does not hold the prompt")
    trial.expect_end(f"The word is {word}.")


def check_streaming(trial: Trial) -> None:
    word = new_word()
    trial.needs_stream = True
    text = f"Grüße aus Köln: 5 € für {word} ✓"
    trial.script = lambda body: Reply(
        chunks=cut_anywhere(Reply(text), body),
        pace=0.001,
    )
    trial.run("Greet me.")
    expect(
        "\N{REPLACEMENT CHARACTER}" not in trial.output, "a character was torn: decode whole lines"
    )
    trial.expect_end(text)


def cut_anywhere(reply: Reply, body: Body) -> list[bytes]:
    """The stream of a reply at its worst: a comment first, an event without choices last, and cut
    every few bytes, also inside a character.
    """
    data = b": the server is thinking\n\n"
    for event in events(reply, body | {"stream_options": {"include_usage": True}}):
        payload = event.decode().removeprefix("data: ").strip()
        if payload != "[DONE]":
            payload = json.dumps(json.loads(payload), ensure_ascii=False)
        data += f"data: {payload}\n\n".encode()
    return [data[start : start + SIZE] for start in range(0, len(data), SIZE)]


def check_one_tool(trial: Trial) -> None:
    word = trial.hide_word("tour.txt")
    trial.play(bash("cat tour.txt"), Reply(f"It says {word}."))
    trial.run(LOOK)
    first = trial.requests[0]
    expect(offers(first, "bash"), "the request offers no tool with the name bash")
    [result] = trial.expect_results(2, 1, NO_SECOND)
    trial.expect_chain(trial.requests)
    expect(word in result, "the result is not what the command prints")
    trial.expect_end(f"It says {word}.")


def check_the_loop(trial: Trial) -> None:
    word = trial.hide_word("tour.txt")
    trial.play(
        bash("cat missing.txt"),
        replace(bash("ls"), finish="stop"),
        bash("touch seen.txt"),
        bash("cat tour.txt"),
        Reply(f"Found {word}."),
    )
    trial.run("Find the word.")
    made = plural(len(trial.requests), "request")
    too_early = f"the last answer had a call, and the loop has ended: {made}"
    if len(trial.requests) == 2:
        too_early += f". {STOP}"
    failed, listed, silent, found = trial.expect_results(5, 4, too_early)
    expect(len(trial.requests) == 5, "a request came after the answer without a call")
    trial.expect_chain(trial.requests)
    expect(
        "No such file" in failed, "the first result does not hold what its command wrote to stderr"
    )
    expect("tour.txt" in listed, "the second result is not what ls prints")
    expect(silent.strip(), "the third command prints nothing, and its result is empty")
    expect(word in found, "the fourth result is not what its command prints")
    trial.expect_end(f"Found {word}.")


# ---- 5 to 7: what goes wrong ---------------------------------------------------------------------


def check_a_busy_server(trial: Trial) -> None:
    word = new_word()
    trial.needs_stream = True
    busy = Reply("slow down", status=429, headers={"retry-after": "1"})
    trial.play(busy, Reply("This is only the half of an", cut=5), Reply(f"Whole: {word}."))
    trial.run("Say the word.")
    first = trial.requests[0]
    second = trial.expect_request(2, "the server was busy (429), and you gave up")
    seconds = trial.server.times[1] - trial.server.times[0]
    too_soon = f"the server said Retry-After: 1, and you came back after {seconds:.2f} s"
    expect(seconds >= A_SECOND, too_soon)
    third = trial.expect_request(3, CUT)
    for body in (second, third):
        is_same = body["messages"] == first["messages"]
        expect(is_same, "an attempt that failed has changed the messages of the next one")
    trial.expect_end(f"Whole: {word}.")


def check_broken_arguments(trial: Trial) -> None:
    word = trial.hide_word("tour.txt")
    trial.play(
        Reply(calls=[("bash", '{"command": "cat tour.txt')]),
        Reply(calls=[("open_the_door", {"key": "small"})]),
        Reply(calls=[("bash", {})]),
        bash("cat tour.txt"),
        Reply(f"It says {word}."),
    )
    trial.run(LOOK)
    gave_up = "the program gave up after a call that it could not run"
    cut, unknown, missing, good = trial.expect_results(5, 4, gave_up)
    trial.expect_chain(trial.requests)
    expect(word not in cut, "a call was run although its arguments are cut")
    expect(cut.strip(), "the result of the call with cut arguments is empty")
    expect(
        "bash" in unknown, "the result of the unknown tool does not name the tools that there are"
    )
    expect("command" in missing, "the result of the call without its argument does not name it")
    expect(word in good, "the good call at the end was not run")
    trial.expect_end(f"It says {word}.")


def check_a_repeated_call(trial: Trial) -> None:
    poll = bash("echo x >> polls.txt; wc -l < polls.txt")
    same = bash("echo x >> runs.txt; echo nothing new")

    def script(body: Body) -> Reply:
        if 1 < len(trial.requests) <= 5:
            return poll
        return same if len(trial.requests) <= MANY else Reply("I give up.")

    trial.script = script
    trial.run("Wait for the build.")
    polls = lines_in(trial.work / "polls.txt")
    was_run = f"the call was run {plural(polls, 'time')}, not 4"
    expect(polls == 4, f"its result changed each time, and {was_run}")
    in_a_row = lines_in(trial.work / "runs.txt") - 1  # the first one came before the polls
    expect(in_a_row <= 2, f"the same call with the same result was run {in_a_row} times in a row")
    too_few = f"the call came again after the polls, and was run {plural(in_a_row, 'time')}, not 2"
    expect(in_a_row == 2, too_few)
    told_late = "the run has ended before the model was told that it repeats itself"
    results = trial.expect_results(9, 8, told_late)
    says_why = results[-1].strip() and results[-1] != results[-2]
    expect(says_why, "the third result does not say why the call was not run")
    expect(len(trial.requests) == 9, "the same call came a fourth time, and the run went on")
    expect(trial.code != 0, "the run was stopped, and the exit code is 0")


def lines_in(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


# ---- 8: a stop -----------------------------------------------------------------------------------


def check_a_stop(trial: Trial) -> None:
    # In the middle of an answer
    word = trial.hide_word("tour.txt")
    answer = Reply("I look into the file.", [("bash", {"command": "cat tour.txt"})])
    trial.script = lambda body: Reply(
        chunks=list(events(answer, body))[:-4],
        close="hang",
    )
    trial.start(LOOK)
    trial.interrupt_when(lambda: has_begun(trial), "the first request")

    # In the middle of the first of two calls
    number = trial.work / "number.txt"
    commands = "echo $$ > number.txt; exec sleep 60", "touch second.txt"
    trial.play(Reply(calls=[("bash", {"command": command}) for command in commands]))
    trial.start("Once more.")
    trial.interrupt_when(lambda: lines_in(number), "the first command")
    is_gone = ends(int(number.read_text()))
    expect(is_gone, "the program has ended, and the command that it has started still runs")
    was_run = (trial.work / "second.txt").exists()
    expect(not was_run, "the second call was run after the stop")

    # What is sent next has to be in order, else the server refuses it
    trial.play(Reply(f"It says {word}."))
    trial.run("Go on.")
    trial.expect_end(f"It says {word}.")
    if LOOK not in users_texts(trial.requests[-1]):
        trial.remarks.append(
            "Your program keeps no conversation: only the stop itself was checked."
        )


def has_begun(trial: Trial) -> bool:
    """Did the first answer begin half a second ago?"""
    times = trial.server.times
    return bool(times) and time.monotonic() - times[0] > 0.5


def ends(number: int) -> bool:
    """Does this process end within a second? Without /proc (macOS) it cannot be seen."""
    for _ in range(50):
        if not processes.is_alive(number):
            return True
        time.sleep(0.02)
    return False


# ---- the chapters --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chapter:
    """`check` raises NotYetError."""

    title: str
    check: Callable[[Trial], None]


CHAPTERS = {
    1: Chapter("One request", check_one_request),
    2: Chapter("Streaming", check_streaming),
    3: Chapter("One tool", check_one_tool),
    4: Chapter("The loop", check_the_loop),
    5: Chapter("A busy server", check_a_busy_server),
    6: Chapter("Broken arguments", check_broken_arguments),
    7: Chapter("A repeated call", check_a_repeated_call),
    8: Chapter("A stop", check_a_stop),
    9: Chapter("A full context", check_a_full_context),
    10: Chapter("Two tools side by side", check_side_by_side),
}
