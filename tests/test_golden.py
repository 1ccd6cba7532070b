"""Golden orders of events: whole runs told line by line, and the state that is rebuilt from the events alone.

One line is one event with the fields that matter; a message that starts and ends at once is one line, and so are the deltas
of a kind in a row. The ids of calls are numbered as they come up. Every story is played twice, by `run_loop` and by `Agent`,
and both have to tell the same. P59 to P61 are the orders of pi-agent-core, in our words (its turn is our step).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from textwrap import dedent
from typing import Any

import pytest

from coder.abort import Abort
from coder.agent.agent import Agent
from coder.ai import ChatModel
from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.events import (
    Compacted,
    DoomLoop,
    Event,
    MessageEnd,
    MessageStart,
    Nested,
    Notice,
    PermissionAsked,
    PermissionReplied,
    ReasoningDelta,
    Retry,
    RunEnd,
    RunStart,
    Status,
    StepEnd,
    StepStart,
    TextDelta,
    ToolCallDelta,
    ToolEnd,
    ToolStart,
    ToolUpdate,
    innermost,
)
from coder.history import text_of, user
from coder.hooks import FunctionHooks, Hooks
from coder.loop import run_loop
from coder.toolset import ToolContext
from coder.types import DeniedError, Message, ToolCall, Usage
from tests.harness import FAST, ONE, Mirror, add, assert_all_valid, drive, quick, serve
from tests.terminal import promptly

# ---- telling a run ---------------------------------------------------------------------------------------


class Teller:
    """Events as lines. Knows the ids of calls that came up."""

    def __init__(self) -> None:
        self.ids: dict[str, str] = {}

    def id(self, call_id: str) -> str:
        return self.ids.setdefault(call_id, f"#{len(self.ids) + 1}")

    def message(self, message: Message) -> str:
        """Its role, the call that it answers, its text, its calls, and what is marked in its meta."""
        calls = "".join(
            f" {self.id(call['id'])}={call['function']['name']}"
            for call in message.get("tool_calls", ())
        )
        answers = f" {self.id(message['tool_call_id'])}" if "tool_call_id" in message else ""
        marks = "".join(
            f" {name}" for name in ("is_error", "aborted") if message.get("meta", {}).get(name)
        )
        text = text_of(message)
        return f"{message['role']}{answers}{f' {text!r}' if text else ''}{calls}{marks}"

    def line(self, event: Event) -> str:
        return f"{event.type} {self.fields(event)}".rstrip()

    def fields(self, event: Event) -> str:
        """The fields that matter; a kind of event that is not here fails the test."""
        match event:
            case RunStart():
                return ""
            case RunEnd(stop_reason=reason, text=text, steps=steps, error=error):
                return f"{reason} {text!r} steps={steps}{f' error={error.kind}' if error else ''}"
            case StepStart(step=step):
                return str(step)
            case StepEnd(message=message, tool_results=results, finish_reason=finish):
                answer = "assistant" if message.get("role") == "assistant" else "-"
                return " ".join(
                    [finish, answer, *(self.id(result["tool_call_id"]) for result in results)]
                )
            case MessageStart(message=message) | MessageEnd(message=message):
                return self.message(message)
            case ToolStart(id=call_id, name=name, arguments=arguments):
                return f"{self.id(call_id)} {name} {json.dumps(arguments)}"
            case ToolUpdate(id=call_id, text=text):
                return f"{self.id(call_id)} {text!r}"
            case ToolEnd(id=call_id, result=result, is_error=is_error):
                assert result.is_error is is_error
                return f"{self.id(call_id)} {result.content!r}{' is_error' if is_error else ''}"
            case Nested(agent=agent, event=inner):
                return f"{agent}: {self.line(inner)}"
        return self.rarer(event)

    def rarer(self, event: Event) -> str:
        match event:
            case Retry(attempt=attempt, error=error):
                return f"{attempt} {error.kind}"
            case Compacted(trigger=trigger, attempt=attempt, before=before, after=after):
                return f"{trigger} {attempt}: {before['messages']} -> {after['messages']}"
            case PermissionAsked(id=call_id, permission=permission, pattern=pattern):
                return f"{self.id(call_id)} {permission} {pattern}"
            case PermissionReplied(id=call_id, answer=answer):
                return f"{self.id(call_id)} {answer}"
            case DoomLoop(name=name, count=count):
                return f"{name} {count}"
            case Notice(text=words) | Status(status=words):
                return words
        raise AssertionError(f"an event that no story has yet: {event}")


def delta_of(event: Event) -> tuple[str, ...] | None:
    """(what kind of delta, its piece), also of a nested one."""
    match event:
        case TextDelta(text=text) | ReasoningDelta(text=text):
            return event.type, text
        case ToolCallDelta(id=call_id, name=name, arguments=arguments):
            return event.type, call_id, name, arguments
        case Nested(agent=agent, event=inner) if found := delta_of(inner):
            return f"nested {agent}:", *found
    return None


def coarse(events: Sequence[Event]) -> list[Event]:
    """The events without those of a status that was there before: tests/test_states.py looks at the states."""
    kept, statuses = list[Event](), dict[str, str]()
    for event in events:
        inner = innermost(event)
        if isinstance(inner, Status):
            whose = f"{event.agent}/{event.session_id}" if isinstance(event, Nested) else ""
            if statuses.get(whose) == inner.status:
                continue
            statuses[whose] = inner.status
        kept.append(event)
    return kept


def folded(events: Sequence[Event]) -> list[Event | list[tuple[str, ...]]]:
    """The events, with the deltas of a kind in a row as one list."""
    units: list[Event | list[tuple[str, ...]]] = []
    for event in events:
        delta = delta_of(event)
        if delta is None:
            units.append(event)
        elif units and isinstance(units[-1], list) and units[-1][0][:-1] == delta[:-1]:
            units[-1].append(delta)
        else:
            units.append([delta])
    return units


def story(events: Sequence[Event]) -> str:
    teller, lines = Teller(), list[str]()
    for unit in folded(coarse(events)):
        if isinstance(unit, list):
            kind = [teller.id(word) if word.startswith("call") else word for word in unit[0][:-1]]
            lines.append(f"{' '.join(kind)} {''.join(piece[-1] for piece in unit)!r}")
        elif (
            (line := teller.line(unit))
            and lines
            and "message_end" in line
            and line.replace("message_end", "message_start") == lines[-1]
        ):
            lines[-1] = lines[-1].replace("message_start", "message_start/end")
        else:
            lines.append(line)
    return "\n".join(lines)


def lines(*parts: str) -> str:
    return "\n".join(dedent(part).strip() for part in parts)


def answered(text: str, steps: int = 1) -> str:
    """How a run ends with a plain answer in its last step."""
    return lines(f"""
        message_start assistant
        text_delta {text!r}
        message_end assistant {text!r}
        step_end stop assistant
        status idle
        run_end stop {text!r} steps={steps}
        """)


def called(number: int, result: str, arguments: str = '{"a": 1, "b": 2}', between: str = "") -> str:
    """One call of `add`, from its start to the message with its result."""
    end = f"tool_end #{number} {result}\nmessage_start/end tool #{number} {result}"
    return f"tool_start #{number} add {arguments}\n{between}{end}"


# ---- playing it ------------------------------------------------------------------------------------------

Watch = Callable[[Event, Callable[[], None]], None]  # (event, what aborts the run)
Played = tuple[list[Event], list[Message]]


def by_the_loop(
    chat: ChatModel, prompt: Any, hooks: Hooks, watch: Watch, options: dict[str, Any]
) -> Played:
    abort, messages = Abort(), list[Message]()
    events, result = drive(
        run_loop(messages, chat, prompt=prompt, hooks=hooks, abort=abort, **options),
        lambda event: watch(event, abort.set),
    )
    assert result.messages is messages
    return events, messages


def by_an_agent(
    chat: ChatModel, prompt: Any, hooks: Hooks, watch: Watch, options: dict[str, Any]
) -> Played:
    agent, heard = Agent(chat, hooks=hooks, **options), list[Event]()
    agent.subscribe(heard.append)
    events, result = drive(agent.stream(prompt), lambda event: watch(event, agent.abort))
    assert [id(event) for event in heard] == [id(event) for event in events], (
        "a subscriber hears what stream() yields"
    )
    assert agent.messages == result.messages and not agent.state.is_streaming
    assert (
        str(agent.state.error) == result.text
        if result.stop_reason == "aborted"
        else agent.state.error is result.error
    )
    return events, agent.messages


def unwatched(event: Event, stop: Callable[[], None]) -> None:
    pass


# How each run of the prompt "go" begins; left out of its story.
BEGINNING = "run_start\nstatus busy\nstep_start 1\nmessage_start/end user 'go'\n"


def told(
    *script: Any,
    prompt: Any = "go",
    hooks: Callable[[], Hooks] = Hooks,
    watch: Watch = unwatched,
    window: int = 128_000,
    rebuilt: bool = True,
    **options: Any,
) -> str:
    """The story of a run, the same from run_loop and from an Agent. What is rebuilt from its events is what it left."""
    stories = []
    for play in (by_the_loop, by_an_agent):
        with serve(*script) as server, promptly(20):
            chat = ChatModel("m", base_url=server.url, context_window=window)
            tools = options.get("tools", [add])
            given = {"retry": FAST, "tools": tools(server) if callable(tools) else tools}
            events, messages = play(chat, prompt, hooks(), watch, options | given)
            assert_all_valid(server)
        if rebuilt:
            assert_rebuilt(events, messages)
        stories.append(story(events))
    assert stories[0] == stories[1]
    return stories[0].removeprefix(BEGINNING)


def assert_rebuilt(events: Sequence[Event], messages: list[Message]) -> None:
    """Who has seen nothing but the events knows the list and the end."""
    mirror, end = Mirror(), events[-1]
    for event in events:
        mirror.apply(event)
    assert isinstance(end, RunEnd) and mirror.messages == messages and mirror.error is end.error
    assert (mirror.streaming, mirror.coming, mirror.pending) == (False, False, set())


def stopping(kind: type[Event], text: str = "") -> Watch:
    """Abort at the first event of a kind that says this."""

    def watch(event: Event, stop: Callable[[], None]) -> None:
        if isinstance(event, kind) and text in getattr(event, "text", ""):
            stop()

    return watch


def saying(place: str, count: int, text: str) -> Callable[[], Hooks]:
    """Hooks that give a message when this queue is asked for the `count`th time."""

    def made() -> Hooks:
        asked = iter(range(1, 100))
        return FunctionHooks(**{place: lambda: [user(text)] if next(asked) == count else []})

    return made


@quick
def work(ctx: ToolContext) -> Generator[str, None, str]:
    yield "half way"
    ctx.abort.wait(60)
    return "never"


TWO = Reply("Let me see.", calls=[("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4})])

# ---- answers and tools -----------------------------------------------------------------------------------


def test_a_plain_answer() -> None:
    """P59."""
    assert told(Reply("Four.", reasoning="Hm, easy."), prompt="2+2=?") == lines("""
        run_start
        status busy
        step_start 1
        message_start/end user '2+2=?'
        message_start assistant
        reasoning_delta 'Hm, easy.'
        text_delta 'Four.'
        message_end assistant 'Four.'
        step_end stop assistant
        status idle
        run_end stop 'Four.' steps=1
        """)


def test_an_answer_with_a_tool() -> None:
    """P60, P33: start, end, then the result as a message; the step ends behind it."""
    assert told(Reply(calls=[("add", {"a": 2, "b": 2})]), Reply("Four.")) == lines(
        """
        message_start assistant
        tool_call_delta #1 add '{"a": 2, "b": 2}'
        message_end assistant #1=add
        tool_start #1 add {"a": 2, "b": 2}
        tool_end #1 '4'
        message_start/end tool #1 '4'
        step_end tool_calls assistant #1
        step_start 2
        """,
        answered("Four.", 2),
    )


def test_an_answer_cut_by_length_in_its_calls() -> None:
    cut = Reply("Writing.", calls=[("add", {"a": 1, "b": 2}), ("add", '{"a": 1')], finish="length")
    why = (
        "'Not run: the answer was cut at the output limit, so this call may be incomplete. "
        "Send it again in smaller pieces, for instance a long file in several edits.'"
    )
    assert told(cut, Reply("Smaller.")) == lines(
        f"""
        message_start assistant
        text_delta 'Writing.'
        tool_call_delta #1 add '{{"a": 1, "b": 2}}'
        tool_call_delta #2 add '{{"a": 1'
        message_end assistant 'Writing.' #1=add #2=add
        tool_start #1 add {{"a": 1, "b": 2}}
        tool_end #1 {why} is_error
        message_start/end tool #1 {why} is_error
        tool_start #2 add {{}}
        tool_end #2 {why} is_error
        message_start/end tool #2 {why} is_error
        step_end length assistant #1 #2
        step_start 2
        """,
        answered("Smaller.", 2),
    )


# ---- what is said meanwhile ------------------------------------------------------------------------------

STEERED = lines(
    """
    message_start assistant
    text_delta 'Let me see.'
    tool_call_delta #1 add '{"a": 1, "b": 2}'
    tool_call_delta #2 add '{"a": 3, "b": 4}'
    message_end assistant 'Let me see.' #1=add #2=add
    tool_start #1 add {"a": 1, "b": 2}
    tool_end #1 '3'
    message_start/end tool #1 '3'
    tool_start #2 add {"a": 3, "b": 4}
    tool_end #2 'Skipped due to queued user message.' is_error
    message_start/end tool #2 'Skipped due to queued user message.' is_error
    message_start/end user 'Stop.'
    step_end tool_calls assistant #1 #2
    step_start 2
    """,
    answered("Stopped.", 2),
)


def test_steering_between_two_tools() -> None:
    """P61, P36. The queue is asked at the start and behind each tool: the second time is behind the first tool."""
    assert (
        told(TWO, Reply("Stopped."), hooks=saying("get_steering_messages", 2, "Stop.")) == STEERED
    )


def test_a_follow_up() -> None:
    """P26, P41: a step of its own in the same run."""
    assert told(
        Reply("One."), Reply("Two."), hooks=saying("get_follow_up_messages", 1, "And then?")
    ) == lines(
        """
        message_start assistant
        text_delta 'One.'
        message_end assistant 'One.'
        step_end stop assistant
        step_start 2
        message_start/end user 'And then?'
        """,
        answered("Two.", 2),
    )


# ---- errors ----------------------------------------------------------------------------------------------


def test_a_retry_takes_back_the_text_of_the_failed_attempt() -> None:
    """The half answer has a start and no end: `retry` stands in its place."""
    assert told(Reply("half an", cut=3), Reply("busy", status=503), Reply("A whole one.")) == lines(
        """
        message_start assistant
        text_delta 'half an'
        retry 1 incomplete
        status retry
        status busy
        retry 1 server
        status retry
        status busy
        """,
        answered("A whole one.", 1),
    )


# ---- an abort --------------------------------------------------------------------------------------------


def test_an_abort_in_the_middle_of_the_text_keeps_what_was_said() -> None:
    """P28, P47."""
    half = Reply("alpha beta gamma", cut=3, close="hang")
    assert told(half, watch=stopping(TextDelta, "beta")) == lines("""
        message_start assistant
        text_delta 'alpha beta'
        message_end assistant 'alpha beta' aborted
        step_end aborted assistant
        status idle
        run_end aborted 'Request aborted.' steps=1
        """)


def test_an_abort_in_a_tool_gives_every_call_its_result() -> None:
    calls = Reply("Working.", calls=[("work", {}), ("add", {"a": 1, "b": 2})])
    assert told(calls, tools=[work, add], watch=stopping(ToolUpdate)) == lines(r"""
        message_start assistant
        text_delta 'Working.'
        tool_call_delta #1 work '{}'
        tool_call_delta #2 add '{"a": 1, "b": 2}'
        message_end assistant 'Working.' #1=work #2=add
        tool_start #1 work {}
        tool_update #1 'half way'
        tool_end #1 'half way\n[aborted by the user]' is_error
        message_start/end tool #1 'half way\n[aborted by the user]' is_error
        tool_start #2 add {"a": 1, "b": 2}
        tool_end #2 'Not run: aborted by the user.' is_error
        message_start/end tool #2 'Not run: aborted by the user.' is_error
        step_end tool_calls assistant #1 #2
        status idle
        run_end aborted 'Request aborted.' steps=1
        """)


# ---- limits ----------------------------------------------------------------------------------------------


def test_the_same_call_again_and_again() -> None:
    """The third is asked about and answered unrun, the fourth ends the run."""
    why = (
        "'Not run: add was called 3 times in a row with the same arguments, and the result would be the same. Do something else, "
        "or say what is in the way. The same call once more ends the run.'"
    )
    results = ["'3'", "'3'", f"{why} is_error"]
    results.append("'Not run: the run ended before this call.' is_error")
    steps = [
        lines(
            f"step_start {n}\nmessage_start assistant",
            f"""tool_call_delta #{n} add '{{"a": 1, "b": 2}}'""",
            f"message_end assistant #{n}=add",
            called(n, result, between="doom_loop add 3\n" if n == 3 else ""),
            f"step_end tool_calls assistant #{n}",
        )
        for n, result in enumerate(results, 1)
    ]
    end = "'Stopped: add was called 4 times in a row with the same arguments.' steps=4"
    whole = lines(*steps, "status idle", f"run_end doom_loop {end}")
    assert told(ONE) == whole.removeprefix("step_start 1\n")


# ---- compaction ------------------------------------------------------------------------------------------


class Newest(Hooks):
    """Compaction in five lines: only the newest message is kept."""

    def __init__(self, trigger: str) -> None:
        self.trigger, self.attempts = trigger, 0

    def on_length(
        self, messages: list[Message], trigger: Any, usage: Usage, *_: Any
    ) -> Generator[Event, None, bool]:
        before = len(messages)
        if trigger != self.trigger or before < 2:
            return False
        messages[:-1] = []
        self.attempts += 1
        sizes = {"messages": before, "tokens": 0}, {"messages": 1, "tokens": 0}
        yield Compacted(trigger, self.attempts, *sizes, "newest")
        return True


def earlier() -> list[Message]:
    return [user("one"), {"role": "assistant", "content": "1"}, user("go")]


BEGUN = """
        run_start
        status busy
        step_start 1
        message_start/end user 'one'
        message_start/end assistant '1'
        message_start/end user 'go'
"""


@pytest.mark.parametrize(
    ("trigger", "first", "between"),
    [
        ("threshold", (), "compacted threshold 1: 3 -> 1"),
        (
            "overflow",
            (Reply("maximum context length is 10 tokens", status=400),),
            "compacted overflow 1: 3 -> 1",
        ),
        (
            "length",
            (Reply("half an", finish="length"),),
            "message_start assistant\ntext_delta 'half an'\ncompacted length 1: 3 -> 1",
        ),
    ],
)
def test_compaction_and_the_same_step_again(trigger: str, first: Any, between: str) -> None:
    """K06, K19, K23: before the request, or in the place of the answer that ran into the limit. It is no step of its own."""
    window = 20 if trigger == "length" else 128_000
    assert told(
        *first,
        Reply("Ok."),
        prompt=earlier(),
        hooks=lambda: Newest(trigger),
        window=window,
        rebuilt=False,
    ) == lines(BEGUN, between, answered("Ok."))


# ---- a run inside a run ----------------------------------------------------------------------------------


class Asking(Hooks):
    """A person is asked before a tool acts."""

    def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> None:
        ctx.authorize = self.authorize

    def authorize(
        self, ctx: ToolContext, permission: str, patterns: Sequence[str], detail: str
    ) -> Generator[Event, None, None]:
        asked = PermissionAsked(ctx.call_id, permission, patterns[0], patterns[0], detail)
        yield asked
        yield PermissionReplied(asked.id, asked.answer)
        if asked.answer == "no":
            raise DeniedError("the user refused")


@quick
def note(text: str, ctx: ToolContext) -> Generator[Event, None, str]:
    yield from ctx.ask("edit", "notes.txt")
    return f"noted: {text}"


def delegating(server: ScriptedServer) -> Any:
    """A tool that gives a task to another run, whose events come out as nested ones."""

    @quick
    def delegate(task: str, ctx: ToolContext) -> Generator[Event, None, str]:
        model, options = ChatModel("m", base_url=server.url), {"retry": FAST, "abort": ctx.abort}
        run = run_loop([], model, [note], prompt=task, hooks=Asking(), **options)
        while True:
            try:
                yield Nested("helper", next(run))
            except StopIteration as end:
                return str(end.value.text)

    return delegate


def both(body: Body) -> Reply:
    """What the parent's and the child's model say."""
    asked, last = body["messages"][0]["content"], body["messages"][-1]
    if asked == "write it down":
        return Reply("Noted.", calls=[("note", {"text": "x"})] if last["role"] == "user" else [])
    return (
        Reply("Done.")
        if last["role"] == "tool"
        else Reply(calls=[("delegate", {"task": "write it down"})])
    )


def nested_story(answer: Any) -> str:
    def watch(event: Event, stop: Callable[[], None]) -> None:
        if isinstance(event, Nested) and isinstance(event.event, PermissionAsked) and answer:
            event.event.reply(answer)

    tools = lambda server: [delegating(server)]  # noqa: E731
    return told(both, watch=watch, tools=tools)


DENIED = "'Denied: the user refused' is_error"


@pytest.mark.parametrize(
    ("answer", "replied", "result"),
    [("once", "once", "'noted: x'"), ("no", "no", DENIED), (None, "no", DENIED)],
)
def test_a_run_inside_a_run_whose_question_is_answered_through_its_parent(
    answer: Any, replied: str, result: str
) -> None:
    """The child's events stand between the start and the end of the parent's call; no reply is a no."""
    assert nested_story(answer) == lines(
        f"""
        message_start assistant
        tool_call_delta #1 delegate '{{"task": "write it down"}}'
        message_end assistant #1=delegate
        tool_start #1 delegate {{"task": "write it down"}}
        nested helper: run_start
        nested helper: status busy
        nested helper: step_start 1
        nested helper: message_start/end user 'write it down'
        nested helper: message_start assistant
        nested helper: text_delta 'Noted.'
        nested helper: tool_call_delta #2 note '{{"text": "x"}}'
        nested helper: message_end assistant 'Noted.' #2=note
        nested helper: tool_start #2 note {{"text": "x"}}
        nested helper: permission_asked #2 edit notes.txt
        nested helper: permission_replied #2 {replied}
        nested helper: tool_end #2 {result}
        nested helper: message_start/end tool #2 {result}
        nested helper: step_end tool_calls assistant #2
        nested helper: step_start 2
        nested helper: message_start assistant
        nested helper: text_delta 'Noted.'
        nested helper: message_end assistant 'Noted.'
        nested helper: step_end stop assistant
        nested helper: status idle
        nested helper: run_end stop 'Noted.' steps=2
        tool_end #1 'Noted.'
        message_start/end tool #1 'Noted.'
        step_end tool_calls assistant #1
        step_start 2
        """,
        answered("Done.", 2),
    )
