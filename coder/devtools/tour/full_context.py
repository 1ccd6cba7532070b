"""Chapter 9, a full context: a server that takes no long request, and what has to come of it."""

from __future__ import annotations

import json
import re

from coder.devtools.scripted import Body, Reply
from coder.devtools.tour.trial import (
    NO_SECOND,
    Trial,
    bash,
    expect,
    new_word,
    results_of,
    users_texts,
)
from coder.history import text_of

WINDOW = 30_000  # characters of a request that the server takes
FULL = 4  # outputs of 12,000 characters: they do not fit
TOO_OFTEN = 12  # requests that are too long, after which the server says something else

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


class FullContext:
    """The server of chapter 9. It refuses what is too long, and calls `seq` until then."""

    prompt = "Count, and then say the word."

    def __init__(self) -> None:
        self.end = f"Counted: {new_word()}."
        self.summary = f"The user counts, and all went well ({new_word()})."
        self.outputs: list[set[str]] = []  # the numbers that each command has printed
        self.whole: list[Body] = []  # requests in which nothing is to be shortened
        self.long = 0  # requests that were too long
        self.refused: Body | None = None  # the first one that was, since one was taken
        self.shorter: list[Body] = []  # requests that were taken after it

    def script(self, body: Body) -> Reply:
        if len(json.dumps(body)) > WINDOW:
            return self._refuse(body)
        if not body.get("tools"):
            return Reply(self.summary)
        if self.refused is None:
            self.whole.append(body)
            return self._go_on()
        self.shorter.append(body)
        if len(self.shorter) == 1:
            return bash("echo one more")
        return Reply(self.end)

    def _refuse(self, body: Body) -> Reply:
        self.long += 1
        if self.long > TOO_OFTEN:
            return Reply("That is enough.")
        if self.refused is None:
            self.whole.append(body)
        if self.refused is None or self.shorter:
            self.refused = body
            self.shorter = []
        headers = {"content-type": "application/json"}
        return Reply(status=400, chunks=[OVERFLOW], headers=headers)

    def _go_on(self) -> Reply:
        if len(self.outputs) == FULL:
            return Reply(self.end)
        first = 10_000 * (len(self.outputs) + 1)
        numbers = range(first, first + 2000)
        self.outputs.append({str(number) for number in numbers})
        return bash(f"seq {numbers[0]} {numbers[-1]}")


def check_a_full_context(trial: Trial) -> None:
    server = FullContext()
    trial.script = server.script
    trial.run(server.prompt)
    trial.expect_request(2, NO_SECOND)

    # Nothing is shortened before the server says so
    for calls, body in enumerate(server.whole):
        expect_whole_outputs(trial.number_of(body), server.outputs[:calls], body)
    expect(server.refused, "the program has ended before the list was too long")

    # The list becomes shorter, and is taken
    expect(server.long < TOO_OFTEN, "the conversation is too long, and is sent again and again")
    expect(server.shorter, "the conversation was too long, and you gave up")
    number = trial.number_of(server.shorter[0])
    expect_what_is_kept(server, number)
    trial.expect_chain(server.shorter)
    trial.expect_end(server.end)


def expect_whole_outputs(number: int, outputs: list[set[str]], body: Body) -> None:
    """The request with this number holds all that the commands have printed. Raises NotYetError."""
    results = results_of(body)
    for command, output in enumerate(outputs, 1):
        numbers: list[str] = []
        if len(results) >= command:
            numbers = re.findall(r"\d{5}", results[command - 1])  # also in a result that is JSON
        lost = f"request {number} does not hold the whole output of command {command}"
        too_early = f"{lost}, and the server had not yet said that the list is too long"
        expect(output <= set(numbers), too_early)


def expect_what_is_kept(server: FullContext, number: int) -> None:
    """What the rules of the chapter keep in a shorter list, that of the request with this number.
    Raises NotYetError.
    """
    assert server.refused
    longer = server.refused
    shorter = server.shorter[0]
    lost = f"request {number} is shorter, and has lost"
    expect(server.prompt in users_texts(shorter), f"{lost} the task of the user")
    roles = ("system", "developer")
    rules = [message for message in longer["messages"] if message["role"] in roles]
    has_rules = all(message in shorter["messages"] for message in rules)
    expect(has_rules, f"{lost} the system message")
    is_newest = results_of(longer)[-1:] == results_of(shorter)[-1:]
    expect(is_newest, f"{lost} the newest result, or a part of it")
    has_calls = len(results_of(shorter)) >= len(results_of(longer))
    texts = [text_of(message) for message in shorter["messages"]]
    has_summary = any(server.summary in text for text in texts)
    expect(has_calls or has_summary, f"{lost} old calls: no summary is in their place")
