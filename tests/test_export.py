"""Sessions as people read them: what is in the transcript, what is not, and that nothing in it is more than text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from coder.devtools.scripted import Reply
from coder.events import Compacted
from coder.sessions.export import REMOVED, Format, export, redactor
from coder.sessions.recorder import Recorder
from coder.sessions.store import Store, StoreError, Todo
from coder.toolset import tool
from coder.types import Message, ToolError, ToolResult
from tests.harness import ask, serve
from tests.terminal import promptly

FORMATS: list[Format] = ["md", "json", "html"]


@tool
def change(path: str) -> ToolResult:
    """Change a file.

    path: which
    """
    return ToolResult(
        "Changed.",
        details={"diff": "--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-old line\n+new <line>\n"},
    )


@tool
def fail() -> str:
    """Fail."""
    raise ToolError("no luck")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "sessions.db")
    yield made
    made.close()


def kept(store: Store, *messages: Message, title: str = "") -> str:
    session_id = store.create("/ws", model="some-model", title=title)
    with Recorder(store, session_id, list(messages)) as recorder:
        recorder.sync()
    return session_id


@pytest.fixture
def session(store: Store) -> str:
    """A run with calls, thoughts and a diff; then a run that fails."""
    session_id = store.create("/ws", model="some-model", title="Change x")
    script = [
        Reply(
            "I change it.",
            calls=[("change", {"path": "x.py"}), ("fail", {})],
            reasoning="Hm, let me think.",
        ),
        Reply("It is done."),
        Reply("no such model", status=404),
    ]
    with serve(*script) as server, Recorder(store, session_id) as recorder:
        for prompt in ("Change x.py\nplease", "And now?"):
            ask(server, prompt, tools=[change, fail], messages=recorder.messages, each=recorder)
    store.set_todos(session_id, [Todo("change it", "done")])
    return session_id


class Outline(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attributes)))

    def handle_data(self, text: str) -> None:
        self.text += text


def words(text: str, format_: Format) -> str:
    return Outline(text).text if format_ == "html" else text


# ---- what is in it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("format_", ["md", "html"])
def test_a_transcript_has_what_was_said_and_done_in_its_order(
    store: Store, session: str, format_: Format
) -> None:
    text = words(export(store, session, format_), format_)
    places = [
        text.index(each)
        for each in (
            "Change x",
            session,
            "some-model · /ws",
            "User",
            "Change x.py",
            "please",
            "Assistant",
            "Hm, let me think.",
            "I change it.",
            "change x.py · 0.0 s",
            "path: x.py",
            "Changed.",
            "-old line",
            "fail · 0.0 s · failed",
            "Error: no luck",
            "It is done.",
            "And now?",
            "Stopped (error): ",
        )
    ]
    assert places == sorted(places) and text.count("Changed.") == 1
    assert len(re.findall(r"User · \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", text)) == 2
    assert re.search(r"Assistant · \d{4}-\d\d-\d\d \d\d:\d\d:\d\d · \d+ in, \d+ out", text)
    assert re.search(r"[\d,]+ tokens in \(0 cached\), \d+ out", text)


def test_markdown_folds_outputs_in_fences_that_nothing_in_them_closes(store: Store) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    session_id = kept(
        store,
        {"role": "user", "content": "# not a heading\nof ours"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "a",
            "content": "````\n</details><script>alert(1)</script>\n```\x1b[31m",
        },
        title="<img src=x>\nsecond line",
    )
    text = export(store, session_id, "md")
    assert (
        text.startswith("# <img src=x> second line\n")
        and "\n> # not a heading\n> of ours\n" in text
        and "\x1b" not in text
    )
    assert (
        "<details><summary>read</summary>\n\n`````\n````\n</details><script>alert(1)</script>\n```[31m\n`````\n\n</details>"
        in text
    )
    call["function"] = {"name": "</summary>&", "arguments": "{}"}
    hostile = kept(store, {"role": "assistant", "content": "", "tool_calls": [call]})
    assert "<summary>&lt;/summary&gt;&amp; · pending</summary>" in export(store, hostile, "md")


def test_json_has_everything_that_is_stored(store: Store, session: str) -> None:
    whole = json.loads(export(store, session, "json", lambda text: text))
    assert [whole["session"][name] for name in ("id", "title", "directory")] == [
        session,
        "Change x",
        "/ws",
    ]
    assert [each["message"]["role"] for each in whole["messages"]] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "user",
    ]
    parts = [
        (part["type"], part.get("state")) for each in whole["messages"] for part in each["parts"]
    ]
    assert parts[1:5] == [
        ("text", None),
        ("reasoning", None),
        ("tool", "completed"),
        ("tool", "failed"),
    ]
    answers = [each for each in whole["messages"] if each["message"]["role"] == "assistant"]
    assert [each["finish"] for each in answers] == ["tool_calls", "stop"]
    assert (
        sum(each["tokens"]["input"] for each in answers) == whole["session"]["usage"]["input"] > 0
    )
    assert whole["messages"][-1]["error"]["kind"] == "not_found" and whole["todos"] == [
        {"text": "change it", "status": "done"}
    ]


@pytest.mark.parametrize("format_", FORMATS)
def test_what_a_compaction_replaced_is_in_it_and_marked(store: Store, format_: Format) -> None:
    session_id = kept(
        store,
        {"role": "user", "content": "first words"},
        {"role": "assistant", "content": "old answer"},
        {"role": "user", "content": "newest words"},
    )
    with Recorder(store, session_id) as recorder:
        recorder.messages[:2] = [
            {"role": "user", "content": "Goal: all of it", "meta": {"summary": True}}
        ]
        recorder(
            Compacted(
                "manual",
                1,
                {"messages": 3, "tokens": 1200},
                {"messages": 2, "tokens": 300},
                "summary",
            )
        )
    text = words(export(store, session_id, format_), format_)
    assert (
        0
        < text.index("first words")
        < text.index("old answer")
        < text.index("Goal: all of it")
        < text.index("newest words")
    )
    if format_ == "json":
        assert [each["active"] for each in json.loads(text)["messages"]] == [
            False,
            False,
            True,
            True,
        ]
        return
    assert text.count("no longer sent to the model") == 2
    assert (
        "The conversation was shortened here (manual): 3 → 2 messages, 1,200 → 300 tokens." in text
    )
    assert (
        text.index("old answer")
        < text.index("shortened here")
        < text.index("Summary")
        < text.index("Goal")
    )


def test_a_result_that_was_pruned_is_shown_whole(store: Store) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    session_id = kept(
        store,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "the whole output"},
        {"role": "user", "content": "go on"},
    )
    with Recorder(store, session_id) as recorder:
        recorder.messages[1] = {
            "role": "tool",
            "tool_call_id": "a",
            "content": "[Old tool output removed]",
        }
        recorder(Compacted("threshold", 1, {}, {}, "prune"))
    text = export(store, session_id, "md")
    assert (
        "the whole output" in text
        and "Old tool output removed" not in text
        and text.count("shortened here") == 1
    )


def test_an_answer_is_markdown_and_what_the_user_said_is_quoted(store: Store) -> None:
    text = export(
        store,
        kept(
            store,
            {"role": "user", "content": "a\n\nb"},
            {"role": "assistant", "content": "# heading\n- item"},
        ),
        "md",
    )
    assert "\n> a\n>\n> b\n" in text and "\n\n# heading\n- item\n" in text


def test_calls_with_the_same_id_have_their_own_outputs(store: Store) -> None:
    """Servers exist that count from zero in every answer."""
    function = {"name": "f", "arguments": "{}"}
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "0", "type": "function", "function": function}],
    }
    session_id = kept(
        store, call, call | {}, {"role": "tool", "tool_call_id": "0", "content": "second"}
    )
    text = export(store, session_id, "md")
    assert text.count("second") == 1 and text.index("<summary>f · pending</summary>") < text.index(
        "second"
    )


@pytest.mark.parametrize("format_", ["md", "html"])
@pytest.mark.parametrize("sent", ['["rm", "-rf"]', '{"command": "ls -la', '"ls"', "7"])
def test_arguments_that_are_no_object_are_shown_as_they_were_sent(
    store: Store, format_: Format, sent: str
) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "bash", "arguments": sent}}
    session_id = kept(store, {"role": "assistant", "content": "", "tool_calls": [call]})
    assert sent in words(export(store, session_id, format_), format_)


@pytest.mark.parametrize("format_", ["md", "html"])
def test_what_is_no_text_is_named(store: Store, format_: Format) -> None:
    content = [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
        {"type": "strange"},
    ]
    text = words(export(store, kept(store, {"role": "user", "content": content}), format_), format_)
    assert "[image]" in text and "[attachment]" in text and "base64" not in text


@pytest.mark.parametrize("format_", FORMATS)
def test_odd_rows_do_not_hinder_an_export(store: Store, format_: Format) -> None:
    calls = [{"id": None}, {"id": "x", "function": {"name": "f", "arguments": "[1"}}]
    odd: Any = [
        {"role": "user"},
        {"content": "no role"},
        {"role": "artifact", "content": {"a": 1}},
        {"role": "user", "content": None},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "user", "content": "last", "meta": "no dict"},
    ]
    session_id = kept(store, *odd)
    with store.transaction() as db:
        db.execute("UPDATE message SET data = 'broken' WHERE position = 0")
    assert "last" in export(store, session_id, format_)
    with pytest.raises(StoreError, match="There is no session"):
        export(store, "nosuch", format_)


# ---- the page --------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_and_allows_nothing(store: Store, session: str) -> None:
    page = export(store, session, "html")
    outline = Outline(page)
    names = {name for name, _ in outline.tags}
    assert names <= {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "h1",
        "h2",
        "p",
        "section",
        "details",
        "summary",
        "pre",
        "span",
    }
    policy = next(
        attributes["content"]
        for _, attributes in outline.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    style = page.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert (
        policy
        == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    assert "url(" not in style and "http:" not in page and "https:" not in page
    assert ("span", {"class": "add"}) in outline.tags and ("span", {"class": "cut"}) in outline.tags
    assert page.index("charset") < 100 and outline.text.count("+new <line>") == 1


HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>\x00\x1b]0;owned\x07</style></pre></title>&lt;'


def test_whatever_stands_in_a_session_is_text_on_the_page(store: Store) -> None:
    call = {
        "id": HOSTILE,
        "type": "function",
        "function": {"name": HOSTILE, "arguments": json.dumps({HOSTILE: HOSTILE})},
    }
    session_id = store.create(HOSTILE, model=HOSTILE, title=HOSTILE)
    with Recorder(
        store,
        session_id,
        [
            {"role": "user", "content": HOSTILE},
            {"role": 'x" onclick="alert(1)', "content": HOSTILE},
            {"role": "assistant", "content": HOSTILE, "reasoning": HOSTILE, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": HOSTILE, "content": HOSTILE},
        ],
    ) as recorder:
        recorder.sync()
    with store.transaction() as db:
        db.execute(
            "UPDATE part SET data = ?, state = ? WHERE type = 'tool'",
            (json.dumps({"details": {"diff": HOSTILE}}), HOSTILE),
        )
        db.execute(
            "UPDATE message SET error = ?",
            (json.dumps({"stop_reason": HOSTILE, "message": HOSTILE}),),
        )
    page = export(store, session_id, "html", lambda text: text)
    outline = Outline(page)
    assert {name for name, _ in outline.tags} & {"script", "img"} == set()
    assert {name for _, attributes in outline.tags for name in attributes} <= {
        "lang",
        "charset",
        "http-equiv",
        "content",
        "name",
        "class",
    }
    assert outline.text.count("<script>alert(1)</script>") >= 12 and not re.search(
        "[\x00-\x08\x0b-\x1f]", page
    )


# ---- secrets ---------------------------------------------------------------------------------------------

SECRETS = [
    ("my key is sk-proj-abcdEFGH1234567890 here", "my key is [removed] here"),
    ("ghp_" + "a1B2" * 9, "[removed]"),
    ("github_pat_" + "a1B2_" * 6, "[removed]"),
    ("id AKIAIOSFODNN7EXAMPLE.", "id [removed]."),
    ("xoxb-1234567890-abcdef", "[removed]"),
    ("AIza" + "x" * 35, "[removed]"),
    ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dBjftJeZ4CVP", "[removed]"),
    (
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----\nafter",
        "[removed]\nafter",
    ),
    ("-----BEGIN PRIVATE KEY-----\nMIIE and the output was cut", "[removed]"),
    ("Authorization: Bearer abc.def-123", "Authorization: Bearer [removed]"),
    ("curl -H 'authorization: Basic dXNlcjpwdw=='", "curl -H 'authorization: Basic [removed]'"),
    ('{"Authorization": "token 123abc"}', '{"Authorization": "token [removed]"}'),
    ("DB_PASSWORD=hunter2 ./run", "DB_PASSWORD=[removed] ./run"),
    ("export API_KEY='two words' X=1", "export API_KEY=[removed] X=1"),
    ("postgres://bob:hunter2@db/x", "postgres://bob:[removed]@db/x"),
    ('{"api_key": "0123456789ab"}', '{"api_key": "[removed]"}'),
    ('{\\"client_secret\\": \\"correcthorse\\"}', '{\\"client_secret\\": \\"[removed]\\"}'),
    ("password = 'correcthorse'", "password = '[removed]'"),
]
HARMLESS = [
    "max_tokens=100 key=lambda x: x",
    "def token(self): return next(tokens)",
    "SSH_AUTH_SOCK=/tmp/agent.1",
    "PATH=/usr/bin HOME=/root",
    "risk-averse tasks, ask-me",
    "https://example.org:8080/a@b",
    "key: value",
    "a sk- prefix",
    "AKIA",
    "the Authorization header is missing",
]


@pytest.mark.parametrize(("text", "clean"), SECRETS)
def test_what_looks_like_a_secret_is_taken_out(text: str, clean: str) -> None:
    assert redactor()(text) == clean


PIECES = [
    "a-",
    "a.",
    "A_",
    "token='",
    "key-",
    "://a:",
    "-----BEGIN PRIVATE KEY-----",
    "eyJ",
    "sk-",
    "authorization: ",
    "'",
    "y",
]


@pytest.mark.parametrize("piece", PIECES)
def test_no_text_takes_long_to_redact(piece: str) -> None:
    with promptly(5):
        redactor()(piece * 50_000)


@pytest.mark.parametrize("text", HARMLESS)
def test_what_does_not_look_like_a_secret_stays(text: str) -> None:
    assert redactor()(text) == text


def test_the_key_itself_is_taken_out_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "value-of-the-environment")
    monkeypatch.setenv("SHORT_KEY", "abc")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp/agent-socket")
    redact = redactor("plain words of a key", "plain words", "")
    said = "x=plain words of a key; value-of-the-environment, abc /tmp/agent-socket"
    assert redact(said) == f"x={REMOVED}; {REMOVED}, abc /tmp/agent-socket"


@pytest.mark.parametrize("format_", FORMATS)
def test_no_format_shows_a_secret_wherever_it_stands(store: Store, format_: Format) -> None:
    secret = "sk-CANARY" + "0123456789abcdef" * 2
    function = {"name": f"read {secret}", "arguments": json.dumps({"path": secret, secret: 1})}
    call = {"id": "a", "type": "function", "function": function}
    session_id = store.create(f"/{secret}", model=secret, title=f"about {secret}")
    with Recorder(
        store,
        session_id,
        [
            {"role": "user", "content": [{"type": "text", "text": secret}]},
            {
                "role": "assistant",
                "content": secret,
                "reasoning_content": secret,
                "tool_calls": [call],
                "meta": {"x": [secret], secret: 1},
            },
            {"role": "tool", "tool_call_id": "a", "content": secret},
        ],
    ) as recorder:
        recorder.sync()
    with store.transaction() as db:
        db.execute(
            "UPDATE part SET title = ?, data = ? WHERE type = 'tool'",
            (secret, json.dumps({"details": {"diff": f"+{secret}"}})),
        )
        db.execute(
            "UPDATE message SET error = ?",
            (json.dumps({"stop_reason": "error", "message": secret}),),
        )
    text = export(store, session_id, format_)
    assert secret not in text and text.count(REMOVED) >= 8


def test_a_session_without_a_title_is_called_by_its_first_words(store: Store) -> None:
    assert export(
        store, kept(store, {"role": "user", "content": "Repair  the\nparser"}), "md"
    ).startswith("# Repair the parser\n")
    empty = store.create("/ws")
    assert export(store, empty, "md").startswith(f"# Session {empty}\n")
