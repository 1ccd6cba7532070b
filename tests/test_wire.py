"""From bytes to an answer: events, calls, thoughts, usage, ends; and that no cut in the bytes
changes any of it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from coder.ai import ChatModel
from coder.devtools.scripted import Reply
from coder.events import Event, Notice, Retry, TextDelta
from coder.loop import run_loop
from coder.providers.assembler import Assembler
from coder.providers.call_assembler import ToolCallAssembler
from coder.providers.profiles import ECHOED, Price, read_usage
from coder.providers.sse import AFTER_FINISH, CUT_EVENT, read_answer, sse
from coder.providers.text import ThinkTag
from coder.types import Completion, ModelError, Usage
from tests.harness import FAST, all_of, ask, drive, quick, serve, types
from tests.terminal import promptly
from tests.test_quirks import CASES, reply


@quick
def look(path: str = "") -> str:
    return f"{path} seen"


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def piece(text: str) -> dict[str, Any]:
    """A piece of a call from its text: index, id, name and arguments, "-" where it has none: '0 a
    look {"x": 1}'."""
    words = zip(
        ("index", "id", "name", "arguments"),
        text.split(" ", 3),
        strict=True,
    )
    made: dict[str, Any] = {key: word.strip("'") for key, word in words if word != "-"}
    if "index" in made:
        made["index"] = int(made["index"])
    function = {key: made.pop(key) for key in ("name", "arguments") if key in made}
    return made | {"function": function}


def assemble(
    *chunks: Any, done: bool = True, echoed: Iterable[str] = ECHOED
) -> tuple[Completion, list[Event]]:
    """The answer that the chunks make, and the deltas on the way."""
    assembler = Assembler(echoed)
    events = [event for each in chunks for event in assembler.feed(each)]
    assembler.has_end_mark = done
    events += assembler.flush()
    return assembler.completion(), events


LINE = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"  # no end of a line here


def stream(*chunks: Any, done: bool = True) -> list[bytes]:
    """The events of an answer."""
    events = [b"data: %s\n\n" % json.dumps(each).encode() for each in chunks]
    return [*events, b"data: [DONE]\n\n"] if done else events


# ---- bytes -> events -----------------------------------------------------------------------------


def test_no_cut_in_the_bytes_changes_an_event() -> None:
    for case in CASES:
        data = b"".join(reply({"status": 200} | case).chunks or ())
        cut = [data[i : i + 1] for i in range(len(data))]
        assert list(sse([data])) == list(sse(cut)), case["id"]


@pytest.mark.parametrize(
    ("data", "events"),
    [
        (b"data: last", [(CUT_EVENT, "last")]),
        (b"event: error\ndata: a\n\ndata: b\n\n", [("error", "a"), ("", "b")]),
        (b"event: error\ndata: a", [("error", "a")]),
        (f"data: {LINE}\n\n".encode(), [("", LINE)]),
    ],
)
def test_events_are_found_also_if_the_body_ends_in_one(data: bytes, events: list[Any]) -> None:
    assert list(sse([data])) == events


def test_a_line_without_an_end_has_a_limit_and_a_whole_file_in_one_event_has_none() -> None:
    whole = sse([b"data: ", *[b"x" * 100_000] * 100, b"\n\n"])
    assert [len(data) for _, data in whole] == [10_000_000]
    with pytest.raises(ModelError, match="too long"):
        list(sse(b"x" * 1_000_000 for _ in range(99)))


# ---- thoughts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "thought", "rest"),
    [
        ("<think>a</think>b", "a", "b"),
        (" \n<think>\na\n</think>\n\n b c", "\na\n", "b c"),
        ("<think>a", "a", ""),
        ("<think>a</thi", "a</thi", ""),
        ("<think>a < b </b></think>c", "a < b </b>", "c"),
        (" <thin air", "", " <thin air"),
        ("a<think>b</think>", "", "a<think>b</think>"),
        ("<think>a</think>b <think>c</think>", "a", "b <think>c</think>"),
        ("<think>a</think> \n", "a", ""),
        ("<think>a<</think>b", "a<", "b"),
    ],
)
def test_thoughts_in_tags_are_split_off_at_any_cut(text: str, thought: str, rest: str) -> None:
    for place in range(len(text) + 1):
        for parts in (
            [text[:place], text[place:]],
            list(text),
        ):
            tag = ThinkTag()
            found = [
                *(tag.split(part) for part in parts),
                tag.rest(),
            ]
            assert ["".join(column) for column in zip(*found)] == [thought, rest], parts


# ---- calls ---------------------------------------------------------------------------------------

# (pieces, calls): a piece as in piece(), a call as "id name arguments", ? for an id that was made
ONE = "a look {}"
CALLS = [
    # without an index, by id at another index
    ("- a look {; - b look {; - a - }; - b '' }", "a look {}; b look {}"),
    ("0 a look {; 5 a - }", ONE),
    ("0 a look {}; 1 - look {}", "a look {}; ? look {}"),
    # another id takes the index over; what follows is its own
    ('0 a look {}; 0 b look {"x":; 0 - - 1}', 'a look {}; b look {"x": 1}'),
    # ids and names empty, repeated, growing, in pieces, late
    ("0 a lo {; 0 a ok }", ONE),
    ("0 a lo -; 0 a look -", ONE),
    ('0 - - {"x":; 0 a look -; 0 a - 1}', 'a look {"x": 1}'),
    # no ids: a name after a whole call is another call, after half of one or without arguments it
    # is not
    ('0 - look {}; 0 - look {"x": 1}', '? look {}; ? look {"x": 1}'),
    ('0 - look {"x":; 0 - look 1}', '? look {"x": 1}'),
    ("0 - - {}; 0 - look {}", "? look {}"),
    # the same id twice; at another index with a name it is another call, and what follows is the
    # newer one's
    ('0 a look {}; 1 a look {"x":; - a - 1}', 'a look {}; ? look {"x": 1}'),
    ("- a - {}; - b look {}", "a unknown {}; b look {}"),
    ('0 a\ud83d look {"x":', "a\ufffd look null"),
    (f'0 a look {{"x": {"[" * 200}{"]" * 200}}}', "a look null"),
    # each piece is the text so far, also with the name in each
    ('0 a look -; 0 - - {"x":; 0 - - {"x":1}', 'a look {"x": 1}'),
    ('0 - look {"x":; 0 - look {"x":1}; 0 - look {"x":1}', '? look {"x": 1}'),
    (
        '0 a look {"x":; 1 b look {"x":; 0 - - {"x":1}; 1 - - {"x":2}',
        'a look {"x": 1}; b look {"x": 2}',
    ),
]


def collected(pieces: Iterable[Any]) -> list[tuple[Any, Any]]:
    calls = ToolCallAssembler()
    for each in pieces:
        calls.add(each)
    return calls.finished()


@pytest.mark.parametrize(("pieces", "calls"), CALLS)
def test_each_piece_finds_its_call(pieces: str, calls: str) -> None:
    found = collected(map(piece, pieces.split("; ")))
    expected = [each.split(" ", 2) for each in calls.split("; ")]
    assert len(found) == len(expected) == len({call.id for call, _ in found})
    for (call, entry), (call_id, name, arguments) in zip(found, expected):
        assert call.id == call_id or (call_id == "?" and len(call.id) == 9)
        assert call.name == name
        assert call.arguments == (json.loads(arguments) or {})
        text = json.dumps(call.arguments, ensure_ascii=False)
        function = {"name": call.name, "arguments": text}
        assert entry == {"id": call.id, "type": "function", "function": function}


def given_as(arguments: Any, name: Any = "look", call_id: Any = "a") -> dict[str, Any]:
    return {"id": call_id, "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("pieces", "arguments"),
    [
        ([given_as({"x": "\ud83d"})], [{"x": "\ufffd"}]),
        (
            [given_as({}), {"function": {"arguments": '{"x": 1}'}}],
            [{"x": 1}],
        ),
        (
            [
                given_as({}, "other", None),
                given_as({"x": 1}, "look", None),
            ],
            [{}, {"x": 1}],
        ),
        (
            [
                {"index": 0, "id": None, "type": None, "function": None},
                given_as("{}"),
            ],
            [{}],
        ),
        ([{}], []),
    ],
)
def test_arguments_may_be_objects_and_members_null_or_numbers(pieces: Any, arguments: Any) -> None:
    assert [call.arguments for call, _ in collected(pieces)] == arguments


def test_unknown_members_of_a_call_go_back_with_it() -> None:
    first = piece("0 a x {}") | {"extra_content": {"s": "\ud83d"}, "cache": None}
    [(_, entry)] = collected(
        [
            first,
            {"index": 0, "type": "function", "more": 2},
        ]
    )
    assert entry["extra_content"] == {"s": "\ufffd"}
    assert entry["more"] == 2
    assert "cache" not in entry


WHOLE_ARGUMENTS: list[tuple[list[str], Any]] = [
    *(([text], {}) for text in ("", " \n", "null", '"null"', "{}", "{}{}", "{} {} junk", '""')),
    (['{"a":', "1}"], {"a": 1}),
    (['{"a": "x\ny\tz"}'], {"a": "x\ny\tz"}),
    ([json.dumps('{"a": 1}')], {"a": 1}),
    (["{}", '{"a":', "1}"], {"a": 1}),
    (['{"a": 1}', '{"a": 1}'], {"a": 1}),
    (["{", '{"a"', '{"a": 1', '{"a": 1}'], {"a": 1}),
    (
        ["", '{"a":', "", '{"a": [1', '{"a": [1]}', ""],
        {"a": [1]},
    ),
    (['{"a": "b', '{"a": "bc"}', '{"a": "bc"}'], {"a": "bc"}),
    *(([f'{{"a": 1}}{tail}'], {"a": 1}) for tail in ("{}", "}", "</tool_call>", "\n\nNow I")),
]
UNUSABLE = [
    *('{"a": 1}{"a": 2}', '{"a": 1{"b": 1}', '{"a": 1} then {', '{"a": 1}{"a', "Sure: {}"),
    *('{"a": 1} or {"b": 2} x', '{"a": "b', "[1]", "3", '"x"', '"[1]"', '{"a": NaN}'),
    *('{"a": -Infinity}', "[" * 99_999, '{"a": 1}' + '{"a": ' * 99_999, '{"a": 1e999}'),
    '{"a": ' + "9" * 5000 + "}",
]


@pytest.mark.parametrize(
    ("pieces", "arguments"),
    [
        *WHOLE_ARGUMENTS,
        *(([text], None) for text in UNUSABLE),
        (['{"a": ', '{"a": 1'], None),
        (['{"a": 1', '{"b": 1}'], None),
        (['{"a": 1', '{"a": 1}', '{"a": 12}'], None),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_arguments_are_an_object_and_nothing_is_made_up(pieces: list[str], arguments: Any) -> None:
    [(call, _)] = collected(map(given_as, pieces))
    assert call.arguments == (arguments or {})
    assert len(call.problem) < 200
    # As it follows "the arguments are"
    assert call.problem.startswith(("not ", "no ", "nested ")) == (arguments is None)


# ---- ends, text, usage ---------------------------------------------------------------------------


CALLING = chunk(tool_calls=[piece("0 i look {}")])
PARTS = [
    {"type": "text", "text": "a"},
    {"text": 3},
    "x",
    {"type": "image"},
    {"text": "b"},
]
NOTHING = [
    None,
    [],
    3,
    "x",
    {},
    {"choices": None},
    {"choices": [{"delta": None}]},
]
NOTHING += [{"choices": [{}]}]


def whole(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"content": text}} | more]}


@pytest.mark.parametrize(
    ("chunks", "text"),
    [
        ([whole("whole", delta={"content": "a"})], "a"),
        ([chunk(content=PARTS)], "ab"),
        (
            [
                chunk(content={"text": "a"}),
                chunk(content=3),
                chunk(content="b"),
            ],
            "b",
        ),
        (
            [
                *NOTHING,
                {"choices": [None]},
                chunk(content="a", tool_calls=None),
            ],
            "a",
        ),
        ([chunk(content="\ud83d"), chunk(content="x")], "\ufffdx"),
        ([chunk(content="a\0b")], "a\ufffdb"),
        (
            [{"choices": [{"delta": {"content": "a"}, "finish_reason": 7}]}],
            "a",
        ),
        (
            [chunk(reasoning="t"), whole("x"), chunk(content="y")],
            "y",
        ),
        ([CALLING, whole("x")], ""),
    ],
)
def test_text_is_what_every_member_of_every_chunk_says(chunks: list[Any], text: str) -> None:
    answer, events = assemble(*chunks)
    assert answer.text == text
    assert answer.message["content"] == (text or None)
    shown = "".join(event.text for event in events if isinstance(event, TextDelta))
    assert shown.replace("\0", "\ufffd") + "\ufffd" * (len(text) - len(shown)) == text
    assert not any("\ud800" <= c <= "\udfff" for c in shown)


TWO: dict[str, Any] = {"prompt_tokens": 9, "completion_tokens": 2}
INPUT = {"input_tokens": 9, "output_tokens": 2}
DETAILED = {"completion_tokens_details": {"reasoning_tokens": 1}}
DETAILED["prompt_tokens_details"] = {"cached_tokens": 4}
XAI = {"total_tokens": 14, "completion_tokens_details": {"reasoning_tokens": 3}}
NO_COUNTS = float("nan"), float("inf"), -1, 1e30
CACHE = {"cache_read_input_tokens": 40}


@pytest.mark.parametrize(
    ("reported", "usage"),
    [
        (
            TWO | {"total_tokens": 11} | DETAILED,
            Usage(9, 2, 4, 1),
        ),  # OpenAI
        (
            TWO | {"prompt_cache_hit_tokens": 4, "prompt_cache_miss_tokens": 5},
            Usage(9, 2, 4),
        ),
        (TWO | {"cached_tokens": 4}, Usage(9, 2, 4)),  # Kimi; above: DeepSeek
        (
            INPUT | {"input_tokens_details": {"cached_tokens": 4}},
            Usage(9, 2, 4),
        ),
        (TWO | {"cache_read_input_tokens": 4}, Usage(9, 2, 4)),  # LiteLLM
        ({"prompt_eval_count": 9, "eval_count": 2}, Usage(9, 2)),  # Ollama
        (TWO | XAI, Usage(9, 5, 0, 3)),
        (TWO | {"total_tokens": 14}, Usage(9, 5, 0, 3)),  # Gemini
        (
            TWO | {"total_tokens": 99, "reasoning_tokens": 1},
            Usage(9, 2, 0, 1),
        ),
        ({"prompt_tokens": 0, "completion_tokens": 0}, None),
        (INPUT | CACHE, Usage(49, 2, 40)),  # Anthropic
        (INPUT | CACHE | {"cache_creation_input_tokens": 5}, Usage(54, 2, 40)),
        *(
            (
                TWO | {"prompt_tokens": n},
                Usage(0, 2),
            )
            for n in NO_COUNTS
        ),
    ],
)
def test_usage_is_read_in_every_shape(reported: dict[str, Any], usage: Usage | None) -> None:
    assert read_usage(reported) == usage


def test_a_price_is_of_fresh_and_cached_input_and_output() -> None:
    usage = Usage(1_000_000, 100_000, 400_000)
    assert Price(2, 10, 0.5).of(usage) == pytest.approx(1.2 + 0.2 + 1)
    assert Price(2, 10).of(usage) == pytest.approx(3.0)
    assert Price(2, 10, 0).of(Usage(1, 0, 5)) == 0.0


# ---- over the wire -------------------------------------------------------------------------------


def notices(events: list[Event]) -> list[str]:
    return [event.text for event in all_of(Notice, events)]


WRITTEN = "<tool_call>look</tool_call> <|tool_calls_section_begin|> <|tool_call_begin|> <|tool_calls_begin|>"
WRITTEN += " <function=look> <|python_tag|>look() [TOOL_CALLS][]"


@pytest.mark.parametrize("text", WRITTEN.split())
def test_a_call_written_as_text_is_reported_if_there_are_tools_and_no_calls(text: str) -> None:
    with serve(Reply(f"I look. {text}")) as server:
        [notice] = notices(ask(server, tools=[look])[0])
        assert "tool parser" in notice
        assert not notices(ask(server)[0])
    with serve(
        Reply(text, calls=[("look", {})]),
        Reply("<tool>fine</tool> [TOOLS]"),
    ) as server:
        assert not notices(ask(server, tools=[look])[0])


@pytest.mark.parametrize(
    ("read", "said"),
    [(1000, 1), (3000, 0), (0, 0)],
)
def test_a_server_that_read_far_less_than_was_sent_is_named_once(read: int, said: int) -> None:
    usage = {"prompt_tokens": read, "completion_tokens": bool(read)}
    with serve(Reply(chunks=stream(chunk("stop", content="x") | {"usage": usage}))) as server:
        chat = ChatModel("m", base_url=server.url, context_window=9999)
        found = [
            notices(
                drive(
                    run_loop(
                        [],
                        chat,
                        prompt=prompt,
                        retry=FAST,
                    )
                )[0]
            )
            for prompt in ("y" * 15_000, "y" * 30_000, "y" * 30_000)
        ]
    assert [len(each) for each in found] == [0, said, 0]
    for part in ("(9999).", "OLLAMA_CONTEXT_LENGTH", "num_ctx"):
        assert not said or part in found[1][0]


HTML = "text/html"
TEXT = "text/plain"
JSON = "application/json"
SSE = "text/event-stream"
WHOLE = whole("fine")
FINE = b"".join(stream(chunk("stop", content="fine")))
OOPS = {"object": "error", "message": "oops", "code": 500}


@pytest.mark.parametrize(
    ("kind", "body", "text"),
    [
        (JSON, json.dumps(WHOLE).encode(), "fine"),
        (JSON, json.dumps(OOPS).encode(), "again"),
        (JSON, b'{"detail": "x"}', "protocol"),
        (JSON, b"[]", "protocol"),
        (TEXT, b"{", "protocol"),
        (HTML, b"", "again"),
        (SSE, b" \n", "again"),
        (JSON, b'{"a":' * 99_999, "again"),
        *((TEXT, start + FINE, "fine") for start in (b"", b"\n", b": hello\n\n", b"id: 1\n")),
        *((TEXT, start + FINE, "fine") for start in (b"event: message\n", b"retry: 3\n\n")),
        (TEXT, b'error: {"message": "oops", "code": 500}\n\n', "again"),
        (
            TEXT,
            b"".join(stream(chunk("stop", content="fine"), done=False)),
            "fine",
        ),
        (f"{SSE}; charset=utf-8", b"".join(stream(WHOLE)), "fine"),
        (
            TEXT,
            b"".join(stream(chunk(content="half a"), done=False)),
            "again",
        ),
        (JSON, b'{"object": "chat.completion", "choices": []}', "again"),
        (
            SSE,
            json.dumps(
                {
                    "error": {
                        "message": "no engine",
                        "code": 400,
                    }
                }
            ).encode(),
            "bad_request",
        ),
        (SSE, b'\xef\xbb\xbf\n{"error": "slow"}\n\ndata: [DONE]\n\n', "again"),
        (SSE, json.dumps(WHOLE, indent=2).encode(), "fine"),
        (TEXT, b"{" + b"x" * 51_000_000, "protocol"),
        *((kind, b'{"choices": []}\n{"choices": []}\n', "protocol") for kind in (SSE, JSON)),
    ],
    ids=lambda value: repr(value)[:50],
)
def test_an_answer_of_any_type_is_read_as_what_it_is(kind: str, body: bytes, text: str) -> None:
    chunks = [
        body[:3],
        *(body[i : i + 1_000_000] for i in range(3, len(body), 1_000_000)),
    ]
    first = Reply(
        chunks=list(filter(None, chunks)),
        headers={"content-type": kind},
    )
    with serve(first, Reply("again")) as server:
        _, result = ask(server)
        assert (result.error.kind if result.error else result.text) == text
        assert server.heads[0]["accept-encoding"] == "identity"
    assert text != "protocol" or "not an API answer from" in result.text or "large" in result.text


@pytest.mark.parametrize(
    "bad",
    [
        [b"data: " + b"[" * 99_999 + b"\n\n"],
        stream({"choices": [3]}),
        stream({"choices": 3}),
        stream({"choices": [{"delta": "x"}]}),
        stream(chunk(tool_calls=[{"function": "x"}])),
        stream({"choices": {"a": 1}}),
        [b"event: error\ndata: oops\n\n"],
        [b'event: error\ndata: {"message": "oops"}\n\n'],
        [b"event: error\ndata: [1]\n\n"],
    ],
    ids=lambda value: repr(value)[:50],
)
def test_what_is_malformed_or_an_error_fails_the_attempt_and_no_more(bad: list[bytes]) -> None:
    with serve(
        Reply(
            chunks=[
                *stream(chunk(content="half"), done=False),
                *bad,
            ]
        ),
        Reply("fine"),
    ) as server:
        events, result = ask(server)
    assert result.text == "fine"
    assert types(events).count("retry") == 1
    error = all_of(Retry, events)[0].error
    assert ("oops" in error.message) == any(b"oops" in each for each in bad)
    assert "{'" not in error.message
    assert error.kind == ("server" if "oops" in error.message or b"[1]" in bad[-1] else "protocol")


PINGS = [b": ping\n\n"] * 80

# ---- waiting -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("silent", "limit"),
    [
        (Reply("late", hold=60), "first_byte_timeout"),
        (Reply(chunks=PINGS, pace=0.1), "first_byte_timeout"),
        (
            Reply(
                chunks=[*stream(chunk(content="x"), done=False), *PINGS],
                pace=0.1,
            ),
            "idle_timeout",
        ),
    ],
    ids=["no head", "no first event", "no next event"],
)
def test_silence_is_ended_though_comments_come(silent: Reply, limit: str) -> None:
    with serve(silent, Reply("fine")) as server:
        events, result = ask(server, model={limit: 0.4})
    retry = all_of(Retry, events)[0]
    assert result.text == "fine"
    assert retry.error.kind == "network"
    assert retry.error.message == "no data for 0.4 s"


def test_no_limit_is_none() -> None:
    with serve(Reply("fine", hold=0.1, pace=0.05)) as server:
        events, result = ask(server, model={"first_byte_timeout": 0, "idle_timeout": 0})
    assert result.text == "fine"
    assert "retry" not in types(events)


def test_usage_that_comes_late_and_text_that_was_held_back_are_part_of_the_answer() -> None:
    counted = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}
    late = stream(chunk("stop", content="<thi"), counted)
    with serve(Reply(chunks=late, pace=0.1)) as server:
        _, result = ask(server)
    assert result.text == "<thi"
    assert result.usage == Usage(3, 4)


@pytest.mark.parametrize("close", ["hang", "reset"])
def test_what_a_server_does_after_the_end_of_an_answer_changes_nothing(close: Any) -> None:
    after = [
        *stream(chunk(content="x")),
        *stream(chunk(content=" y"), {"error": "late"}, done=False),
        b"data: {oops\n\n",
    ]
    with serve(Reply(chunks=after, close=close)) as server, promptly():
        events, result = ask(server, model={"idle_timeout": 30})
    assert result.text == "x"
    assert "retry" not in types(events)


def test_heartbeats_after_a_finish_reason_are_not_waited_for() -> None:
    beats = stream({"id": "keep-alive", "choices": []}, done=False) * 9
    chunks = [
        *stream(chunk("stop", content="x"), done=False),
        *beats,
    ]
    waits = list[float]()
    response = SimpleNamespace(
        url="",
        set_deadline=waits.append,
        pieces=lambda: iter(chunks),
    )
    assert len(list(read_answer(response, Assembler(), 30.0, None))) == 1
    assert waits == [AFTER_FINISH]


EARLY = chunk("tool_calls", tool_calls=[piece("0 i look -")])
PART = chunk(tool_calls=[piece('0 - - {"path":')])
REST = chunk(tool_calls=[piece('0 - - "a"}')])
NULL = chunk("null", content="")
STOP = chunk("stop", content="x")


# Chunks without an end mark, and a text of the answer or of its result; "again": it is asked again
UNENDED: dict[str, tuple[list[Any], str]] = {
    "a call without arguments": ([EARLY], "again"),
    "a part of the arguments": ([EARLY, PART], "again"),
    "all of the arguments": ([EARLY, PART, REST], "a seen"),
    "a text, and null as a word": ([chunk("null", content="x"), NULL], "again"),
    "null in capitals": ([chunk("NULL", content="half")], "again"),
    "null, and a finish": ([NULL, STOP], "x"),
    "a finish between two nulls": ([NULL, STOP, NULL], "x"),
    "the output limit": (
        [chunk("length", tool_calls=[piece('0 i look {"pa')])],
        "the output limit",
    ),
}
Ended = dict[str, tuple[list[Any], Any]]  # the events and the result of each


@pytest.fixture(scope="module", params=["hang", "reset"])
def ended(request: pytest.FixtureRequest) -> Ended:
    """The connection stays open, or breaks. All at once: most wait for AFTER_FINISH."""

    def talk(chunks: list[Any]) -> tuple[list[Any], Any]:
        first = Reply(chunks=stream(*chunks, done=False), close=request.param)
        with serve(first, Reply("again")) as server:
            return ask(server, tools=[look], model={"idle_timeout": 0.5})

    with promptly(), ThreadPoolExecutor(len(UNENDED)) as pool:
        runs = pool.map(talk, [chunks for chunks, _ in UNENDED.values()])
        return dict(zip(UNENDED, runs))


@pytest.mark.parametrize("name", UNENDED)
def test_a_finish_before_the_end_is_none(name: str, ended: Ended) -> None:
    chunks, text = UNENDED[name]
    events, result = ended[name]
    retries = [event.error.kind for event in all_of(Retry, events)]
    results = str([each["content"] for each in result.messages if each["role"] == "tool"])
    if text == "again":
        assert result.text == "again"
        assert results == "[]"
        assert retries == (["incomplete"] if chunks[0] is EARLY else ["network"])
    else:
        assert text in (result.text + results)
        assert retries == []


@pytest.mark.parametrize(
    "tail",
    [True, False],
    ids=["end mark", "end of the body"],
)
def test_null_as_a_word_is_no_end_and_arguments_may_come_after_one(tail: bool) -> None:
    later = stream(EARLY, PART, REST, done=tail)
    whole_text = stream(chunk("null", content="x"), NULL, done=tail)
    with serve(
        Reply(chunks=later),
        Reply(chunks=whole_text),
        Reply("again"),
    ) as server:
        events, result = ask(server, tools=[look])
    assert result.text == ("x" if tail else "again")
    kinds = [event.error.kind for event in all_of(Retry, events)]
    assert kinds == ([] if tail else ["incomplete"])
    assert [each["content"] for each in result.messages if each["role"] == "tool"] == ["a seen"]


def test_a_body_that_ends_in_an_event_is_asked_for_again() -> None:
    """Also after a finish reason, since text may follow it."""
    more = stream(
        chunk(content=" three"),
        done=False,
    )[0][:-20]
    chunks = [
        *stream(chunk("stop", content="one two"), done=False),
        b"event: message\n" + more,
    ]
    with serve(Reply(chunks=chunks), Reply("all three")) as server:
        events, result = ask(server)
        assert result.text == "all three"
        assert len(server.requests) == 2
        assert [event.error.kind for event in all_of(Retry, events)] == ["incomplete"]
