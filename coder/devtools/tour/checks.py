"""The checks of the ten chapters: a script for the server, and what has to come of it.

Each check is a function of a `Trial`. It raises NotYetError with the first thing that is missing,
in the words that the learner reads.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from coder.devtools.scripted import MODEL, Body, Reply, events
from coder.devtools.tour.trial import (
    KEY,
    Trial,
    expect,
    new_word,
    offers,
    results_of,
    users_texts,
)
from coder.tools import processes

NO_SECOND = "the answer had a call, and no second request has come"
CUT = "the second answer was cut (it has no finish_reason), and was not asked for again"
NO_STREAM = 'the request does not ask for a stream: "stream": true'
LOOK = "What does tour.txt say?"
A_SECOND = 0.99  # clocks are rounded
WINDOW = 30_000  # characters of a request that the server of chapter 9 takes
TOGETHER = 5.0  # seconds in which the second of two tasks has to begin
MANY = 12  # requests after which a conversation ends that never was too long, or always is
SIZE = 7  # bytes of a piece in chapter 2


def bash(command: str) -> Reply:
    """An answer that calls bash."""
    return Reply(calls=[("bash", {"command": command})])


# ---- 1 to 4: from one request to the loop --------------------------------------------------------


def check_one_request(trial: Trial) -> None:
    prompt = "Say the word."
    word = new_word()
    trial.play(Reply(f"The word is {word}."))
    trial.run(prompt)
    body = trial.requests[0]
    expect(len(trial.requests) == 1, "there were more requests than one")
    key = trial.server.heads[0].get("authorization")
    expect(key == f"Bearer {KEY}", "the header Authorization is not: Bearer $OPENAI_API_KEY")
    expect(body.get("model") == MODEL, "the model of the request is not $OPENAI_MODEL")
    expect(prompt in users_texts(body)[-1], "the last message of the user does not hold the prompt")
    trial.expect_end(f"The word is {word}.")


def check_streaming(trial: Trial) -> None:
    word = new_word()
    text = f"Grüße aus Köln: 5 € für {word} ✓"
    trial.script = lambda body: Reply(chunks=cut_anywhere(Reply(text), body), pace=0.001)
    trial.run("Greet me.")
    body = trial.requests[0]
    expect(body.get("stream") is True, NO_STREAM)
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
    trial.expect_chain()
    expect(word in result, "the result is not what the command prints")
    trial.expect_end(f"It says {word}.")


def check_the_loop(trial: Trial) -> None:
    word = trial.hide_word("tour.txt")
    trial.play(
        bash("cat missing.txt"),
        bash("ls"),
        bash("cat tour.txt"),
        Reply(f"Found {word}."),
    )
    trial.run("Find the word.")
    too_early = (
        f"the last answer had a call, and the loop has ended: {len(trial.requests)} requests"
    )
    failed, listed, found = trial.expect_results(4, 3, too_early)
    expect(len(trial.requests) == 4, "a request came after the answer without a call")
    trial.expect_chain()
    expect(
        "No such file" in failed, "the first result does not hold what its command wrote to stderr"
    )
    expect("tour.txt" in listed, "the second result is not what ls prints")
    expect(word in found, "the third result is not what its command prints")
    trial.expect_end(f"Found {word}.")


# ---- 5 to 7: what goes wrong ---------------------------------------------------------------------


def check_a_busy_server(trial: Trial) -> None:
    word = new_word()
    busy = Reply("slow down", status=429, headers={"retry-after": "1"})
    trial.play(busy, Reply("This is only the half of an", cut=5), Reply(f"Whole: {word}."))
    trial.run("Say the word.")
    first = trial.requests[0]
    second = trial.expect_request(2, "the server was busy (429), and you gave up")
    seconds = trial.server.times[1] - trial.server.times[0]
    too_soon = f"the server said Retry-After: 1, and you came back after {seconds:.2f} s"
    expect(seconds >= A_SECOND, too_soon)
    expect(second.get("stream") is True, NO_STREAM)
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
    trial.expect_chain()
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
        if len(trial.requests) <= 4:
            return poll
        return same if len(trial.requests) <= MANY else Reply("I give up.")

    trial.script = script
    trial.run("Wait for the build.")
    polls = lines_in(trial.work / "polls.txt")
    expect(polls == 4, f"its result changed each time, and the call was run {polls} times, not 4")
    runs = lines_in(trial.work / "runs.txt")
    expect(runs <= 2, f"the same call with the same result was run {runs} times")
    told_late = "the run has ended before the model was told that it repeats itself"
    results = trial.expect_results(8, 7, told_late)
    expect(results[-1] != results[-2], "the third result does not say why the call was not run")
    expect(len(trial.requests) == 8, "the same call came a fourth time, and the run went on")
    expect(trial.code != 0, "the run was stopped, and the exit code is 0")


def lines_in(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


# ---- 8: a stop -----------------------------------------------------------------------------------


def check_a_stop(trial: Trial) -> None:
    # In the middle of an answer
    word = trial.hide_word("tour.txt")
    answer = Reply("I look into the file.", [("bash", {"command": "cat tour.txt"})])
    trial.script = lambda body: Reply(chunks=list(events(answer, body))[:-4], close="hang")
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


# ---- 9: a full context ---------------------------------------------------------------------------


def check_a_full_context(trial: Trial) -> None:
    prompt = "Count, and then say the word."
    word = new_word()
    too_long: list[int] = []  # numbers of the requests

    def script(body: Body) -> Reply:
        number = len(trial.requests)
        if len(json.dumps(body)) > WINDOW:
            too_long.append(number)
            if len(too_long) > MANY:
                return Reply("That is enough.")
            return Reply(
                status=400, chunks=[OVERFLOW], headers={"content-type": "application/json"}
            )
        if not body.get("tools"):
            return Reply("The user wants to count. All went well so far.")
        if too_long or number > MANY:
            return Reply(f"Counted: {word}.")
        return bash(f"seq {number}0000 {number}1999")

    trial.script = script
    trial.run(prompt)
    trial.expect_request(2, NO_SECOND)
    expect(len(too_long) < MANY, "the conversation is too long, and is sent again and again")
    was_refused = len(trial.requests) in too_long
    expect(not was_refused, "the conversation was too long, and you gave up")
    texts = users_texts(trial.requests[-1])
    expect(prompt in texts, "the shorter conversation has lost the task of the user")
    trial.expect_end(f"Counted: {word}.")


OVERFLOW = json.dumps(
    {
        "error": {
            "message": "This model's maximum context length is 7500 tokens. "
            "However, your messages resulted in more. Please reduce the length of the messages.",
            "type": "invalid_request_error",
            "code": "context_length_exceeded",
        }
    }
).encode()


# ---- 10: two tools side by side ------------------------------------------------------------------


class SideBySide:
    """The server of chapter 10, with two new words for the second agents."""

    prompt = "Say both words."
    tasks = ("Say the red word.", "Say the blue word.")

    def __init__(self) -> None:
        self.words = (new_word(), new_word())
        self.end = f"Both: {self.words[0]} {self.words[1]}."
        self.has_waited = False  # did a task wait for the other one in vain?
        self._meeting = threading.Barrier(2)
        self._commands = Reply(
            calls=[("bash", {"command": "echo left"}), ("bash", {"command": "echo right"})]
        )
        task = {"description": "say a word"}
        self._steps = [
            self._commands,
            Reply(calls=[("task", task | {"prompt": prompt}) for prompt in self.tasks]),
            Reply(self.end),
        ]

    def script(self, body: Body) -> Reply:
        asked = users_texts(body)[-1]
        if asked in self.tasks:
            return self._answer_task(self.tasks.index(asked))
        step = self._steps.pop(0) if len(self._steps) > 1 else self._steps[0]
        if step is self._commands and body.get("stream"):
            return Reply(chunks=list(interleaved(step, body)))
        return step

    def _answer_task(self, number: int) -> Reply:
        """Each task gets its answer when both have come; the first one a little later."""
        try:
            self._meeting.wait(TOGETHER)
        except threading.BrokenBarrierError:
            self.has_waited = True
        return Reply(f"My word is {self.words[number]}.", hold=0.0 if number else 0.3)


def check_side_by_side(trial: Trial) -> None:
    server = SideBySide()
    trial.script = server.script
    trial.run(server.prompt)
    expect(offers(trial.requests[0], "task"), "the request offers no tool with the name task")
    own = [body for body in trial.requests if server.prompt in users_texts(body)]
    others = len(trial.requests) - len(own)

    # Two commands, whose parts have come in turn
    expect(len(own) > 1, "the answer had two calls, and no second request has come")
    results = results_of(own[1])
    expect(len(results) == 2, "the answer had two calls, and they are not in request 2")
    are_whole = "left" in results[0] and "right" in results[1]
    expect(are_whole, "the parts of the two calls are mixed up")

    # Two tasks
    expect(others == 2, f"two tasks were called, and {others} new conversations have come")
    expect(not server.has_waited, "the second task began only after the first had its answer")
    expect(len(own) > 2, "the results of the two tasks were not sent")
    red, blue = results_of(own[2])[-2:]
    is_in_order = server.words[0] in red and server.words[1] in blue
    expect(is_in_order, "the result of a task does not have the id of its own call")
    trial.expect_end(server.end)


def interleaved(reply: Reply, body: Body) -> Iterator[bytes]:
    """The stream of a reply with two calls, whose pieces come in turn."""
    parts: list[list[bytes]] = [[], []]
    around: list[bytes] = []
    for event in events(reply, body):
        index = event.partition(b'"tool_calls": [{"index": ')[2][:1]
        if index:
            parts[int(index)].append(event)
        else:
            around.append(event)
    yield around[0]
    yield from filter(None, chain.from_iterable(zip_longest(*parts)))
    yield from around[1:]


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
