"""Chapter 10, two tools side by side: a server for an agent and two second agents, and what has to
come of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest

from coder.devtools.scripted import Body, Reply, events, in_order
from coder.devtools.tour.trial import (
    Trial,
    are_in_order,
    bash,
    expect,
    new_word,
    offers,
    results_of,
    users_texts,
)
from coder.providers.text import plural

TOGETHER = 5.0  # seconds in which the second of two tasks has to begin
# The second command needs what the first one has done
COMMANDS = ("sleep 0.3; echo left | tee side.txt", "cat side.txt; echo right")
STRANGE = "the message of the user in a new conversation is not the prompt of a task:"
NO_ORDER = "the results do not stand in the order of the calls"


class SideBySide:
    """The server of chapter 10, with two new words for the second agents."""

    prompt = "Say both words."
    tasks = ("Say the red word.", "Say the blue word.")

    def __init__(self) -> None:
        self.words = (new_word(), new_word())
        self.end = f"Both: {self.words[0]} {self.words[1]}."
        self.has_waited = False  # did a task wait for the other one in vain?
        self.strange: list[str] = []  # what nobody has told the program to ask
        self._meeting = threading.Barrier(2)
        self._commands = Reply(calls=[("bash", {"command": command}) for command in COMMANDS])
        task = {"description": "say a word"}
        calls = [("task", task | {"prompt": prompt}) for prompt in self.tasks]
        self._next_step = in_order([self._commands, Reply(calls=calls), Reply(self.end)])

    def script(self, body: Body) -> Reply:
        asked = users_texts(body)[-1]
        if asked in self.tasks:
            return self._answer_task(self.tasks.index(asked), body)
        if self.prompt not in users_texts(body):
            self.strange.append(asked)
            return Reply("Who are you?")
        step = self._next_step(body)
        if step is self._commands and body.get("stream"):
            return Reply(chunks=list(interleaved(step, body)))
        return step

    def _answer_task(self, number: int, body: Body) -> Reply:
        """Each task gets a call when both have come. The first one has its end a little later."""
        if results_of(body):
            return Reply(f"My word is {self.words[number]}.", hold=0.0 if number else 0.3)
        try:
            self._meeting.wait(TOGETHER)
        except threading.BrokenBarrierError:
            self.has_waited = True
        return bash("echo a call of a second agent")


def check_side_by_side(trial: Trial) -> None:
    server = SideBySide()
    trial.script = server.script
    trial.run(server.prompt)
    expect(offers(trial.requests[0], "task"), "the request offers no tool with the name task")
    expect(not server.strange, f"{STRANGE} {server.strange[:1]}")
    own = [body for body in trial.requests if users_texts(body)[-1] not in server.tasks]
    others = [body for body in trial.requests if users_texts(body)[-1] in server.tasks]
    trial.expect_chain(own)

    # Two commands, whose parts have come in turn
    expect(len(own) > 1, "the answer had two calls, and no second request has come")
    results = results_of(own[1])
    expect(len(results) == 2, "the answer had two calls, and they are not in request 2")
    expect(are_in_order(own[1]), NO_ORDER)
    are_whole = "left" in results[0] and "right" in results[1]
    expect(are_whole, "the parts of the two calls are mixed up")
    too_early = "the second command needs the file of the first one, and was run before its end"
    expect("left" in results[1], too_early)

    # Two tasks, and their results
    expect_second_agents(server, others)
    expect(len(own) > 2, "the results of the two tasks were not sent")
    expect(are_in_order(own[2]), NO_ORDER)
    red, blue = results_of(own[2])[-2:]
    are_answers = all(word in red + blue for word in server.words)
    expect(are_answers, "the result of a task is not the last answer of its second agent")
    is_in_order = server.words[0] in red and server.words[1] in blue
    expect(is_in_order, "the result of a task does not have the id of its own call")
    trial.expect_end(server.end)


def expect_second_agents(server: SideBySide, others: Sequence[Body]) -> None:
    """What each task has to start. Raises NotYetError."""
    begun = [body for body in others if body["messages"][-1]["role"] == "user"]
    came = f"two tasks were called, and {plural(len(begun), 'new conversation')} came"
    expect(len(begun) == 2, came)
    expect(not server.has_waited, "the second task began only after the first had its answer")
    for body in begun:
        is_alone = len(users_texts(body)) == 1
        expect(is_alone, "the list of a second agent begins with more than its prompt")
        expect(offers(body, "bash"), "the second agent has no bash")
        expect(not offers(body, "task"), "the second agent has the tool task, and could go on so")
    expect(len(others) > 3, "a second agent has ended at a call: it needs the loop, too")


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
