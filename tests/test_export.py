"""Sessions as people read them: what is in the transcript, what is not, and that nothing in it is
more than text."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from typing import Any, get_args

import pytest

from coder.devtools.scripted import Reply
from coder.events import Compacted
from coder.history import user
from coder.sessions.export import REMOVED, Format, export, redactor
from coder.sessions.recorder import Recorder
from coder.sessions.store import Store
from coder.toolset import tool
from coder.types import ToolError, ToolResult
from tests.harness import ask, serve
from tests.test_sessions import calling, kept, result

FORMATS: tuple[Format, ...] = get_args(Format)
READABLE = [name for name in FORMATS if name != "json"]


@tool
def change(path: str) -> ToolResult:
    """Change a file.

    path: which
    """
    diff = "--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-old line\n+new <line>\n"
    return ToolResult("Changed.", details={"diff": diff})


@tool
def fail() -> str:
    """Fail."""
    raise ToolError("no luck")


@pytest.fixture
def session(store: Store) -> str:
    """A run with calls, thoughts and a diff; then a run that fails."""
    info = store.create("/ws", model="some-model", title="Change x")
    calls = [("change", {"path": "x.py"}), ("fail", {})]
    first = Reply("I change it.", calls=calls, reasoning="Hm, let me think.")
    script = [first, Reply("It is done."), Reply("no such model", status=404)]
    with serve(*script) as server, Recorder(store, info) as recorder:
        for prompt in ("Change x.py\nplease", "And now?"):
            ask(
                server,
                prompt,
                tools=[change, fail],
                messages=recorder.messages,
                each=recorder,
            )
    return info.id


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


def in_order(text: str, *pieces: str) -> bool:
    places = [text.index(each) for each in pieces]
    return places == sorted(places)


# ---- what is in it -----------------------------------------------------------------------------


@pytest.mark.parametrize("format_", READABLE)
def test_a_transcript_has_all_in_its_order(store: Store, session: str, format_: Format) -> None:
    text = words(export(store, session, format_), format_)
    head = ("Change x", session, "some-model · /ws", "User", "Change x.py", "please", "Assistant")
    first = ("Hm, let me think.", "I change it.", "change x.py · 0.0 s", "path: x.py", "Changed.")
    rest = ("-old line", "fail · 0.0 s · failed", "Error: no luck", "It is done.", "And now?")
    assert in_order(text, *head, *first, *rest, "Stopped (error): ")
    assert text.count("Changed.") == 1
    assert len(re.findall(r"User · \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", text)) == 2
    assert re.search(r"Assistant · \d{4}-\d\d-\d\d \d\d:\d\d:\d\d · \d+ in, \d+ out", text)
    assert re.search(r"[\d,]+ tokens in \(0 cached\), \d+ out", text)


@pytest.mark.parametrize("format_", READABLE)
def test_thoughts_under_two_names_stand_there_once(store: Store, format_: Format) -> None:
    """As of servers that send them under an old name and a new one."""
    answer = {"role": "assistant", "content": "It is done."}
    thoughts = {"reasoning_content": "Let me think.", "reasoning": "Let me think."}
    text = words(
        export(store, kept(store, user("go"), answer | thoughts), format_),
        format_,
    )
    assert text.count("Let me think.") == 1


def test_json_has_everything_that_is_stored(store: Store, session: str) -> None:
    with store.transaction() as db:
        db.execute("INSERT INTO todo VALUES (?, 0, 'change it', 'done')", (session,))
    whole = json.loads(export(store, session, "json", lambda text: text))
    found = [whole["session"][name] for name in ("id", "title", "directory")]
    assert found == [session, "Change x", "/ws"]
    roles = [each["role"] for each in whole["messages"]]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "user"]
    timed = [each["role"] for each in whole["messages"] if each["completed"]]
    assert timed == ["assistant", "assistant"]
    parts = [
        (part["type"], part.get("state")) for each in whole["messages"] for part in each["parts"]
    ]
    assert parts == [("tool", "completed"), ("tool", "failed")]
    answers = [each for each in whole["messages"] if each["role"] == "assistant"]
    assert [each["finish"] for each in answers] == ["tool_calls", "stop"]
    used = sum(each["tokens"]["input"] for each in answers)
    assert used == whole["session"]["usage"]["input"] > 0
    assert whole["messages"][-1]["error"]["kind"] == "not_found"
    assert whole["todos"] == [{"text": "change it", "status": "done"}]


@pytest.mark.parametrize("format_", FORMATS)
def test_what_a_compaction_replaced_is_in_it_and_marked(store: Store, format_: Format) -> None:
    old = user("first words"), {"role": "assistant", "content": "old answer"}
    session_id = kept(store, *old, user("newest words"))
    with Recorder(store, store.get(session_id)) as recorder:
        recorder.messages[:2] = [user("Goal: all of it") | {"meta": {"summary": True}}]
        counts = {"messages": 3, "tokens": 1200}, {"messages": 2, "tokens": 300}
        recorder(Compacted("manual", 1, *counts, "summary"))
    [(found, _)] = store.search("first words")
    assert found.messages == 2
    text = words(export(store, session_id, format_), format_)
    assert in_order(text, "first words", "old answer", "Goal: all of it", "newest words")
    if format_ == "json":
        flags = [each["active"] for each in json.loads(text)["messages"]]
        assert flags == [False, False, True, True]
    else:
        assert text.count("no longer sent to the model") == 2
        note = "The conversation was shortened here (manual, 3 → 2 messages, 1,200 → 300 tokens)."
        assert in_order(text, "old answer", note, "Summary", "Goal")


@pytest.mark.case("INV-03")
def test_outputs_are_shown_with_their_calls_whole_also_if_they_were_pruned(store: Store) -> None:
    """Servers exist that count the ids from zero in every answer."""
    pruned = kept(
        store,
        calling("a", name="read"),
        result("a", "the whole output"),
        user("go on"),
    )
    with Recorder(store, store.get(pruned)) as recorder:
        recorder.messages[1] = result("a", "[Old tool output removed]")
        recorder(Compacted("threshold", 1, {}, {}, "prune"))
    text = export(store, pruned, "md")
    assert "the whole output" in text
    assert "Old tool output removed" not in text
    assert text.count("shortened here") == 1
    same = export(
        store,
        kept(
            store,
            calling("a", name="f"),
            calling("a", name="f"),
            result("a", "second"),
        ),
        "md",
    )
    assert same.count("second") == 1
    assert in_order(same, "<summary>f · pending</summary>", "second")


def test_in_markdown_nothing_closes_a_fence_and_what_the_user_said_is_quoted(store: Store) -> None:
    output = "````\n</details><script>alert(1)</script>\n```\x1b[31m"
    messages = user("# not a heading\n\nof ours"), calling("a", name="read"), result("a", output)
    answer = {"role": "assistant", "content": "# heading\n- item"}
    title = "<img src=x>\nsecond line"
    text = export(store, kept(store, *messages, answer, title=title), "md")
    assert text.startswith("# <img src=x> second line\n")
    assert "\x1b" not in text
    assert "\n> # not a heading\n>\n> of ours\n" in text
    assert "\n\n# heading\n- item\n" in text
    fenced = "`````\n````\n</details><script>alert(1)</script>\n```[31m\n`````"
    assert f"<details><summary>read</summary>\n\n{fenced}\n\n</details>" in text
    hostile = export(store, kept(store, calling("a", name="</summary>&")), "md")
    assert "<summary>&lt;/summary&gt;&amp; · pending</summary>" in hostile


# ---- the page ----------------------------------------------------------------------------------


def test_the_page_needs_nothing_and_allows_nothing(store: Store, session: str) -> None:
    page = export(store, session, "html")
    outline = Outline(page)
    metas = [each for name, each in outline.tags if name == "meta"]
    [policy] = [each["content"] for each in metas if "http-equiv" in each]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert "url(" not in page
    assert "http:" not in page
    assert "https:" not in page
    assert ("span", {"class": "add"}) in outline.tags
    assert ("span", {"class": "cut"}) in outline.tags
    assert page.index("charset") < 100
    assert outline.text.count("+new <line>") == 1


def page_of(store: Store, answer: str) -> tuple[str, Outline]:
    page = export(
        store,
        kept(store, user("go"), {"role": "assistant", "content": answer}),
        "html",
    )
    return page.partition("<body>")[2], Outline(page.partition("<body>")[2])


MARKDOWN = """# A heading

Some **bold**, *slanted*, ~~struck~~ `code` and [a page](https://example.com/?a=1&b=2),
on two lines.

1. one
2. two
   - below

> quoted

| a | b |
|---|--:|
| 1 | 2 |

```python
if 1 < 2: pass
```
"""


RENDERED = "h1 strong em s code a ol ul li blockquote table th td pre br"


def test_an_answer_is_rendered_as_markdown_and_what_the_user_wrote_is_not(store: Store) -> None:
    page, outline = page_of(store, MARKDOWN)
    names = [name for name, _ in outline.tags]
    assert set(RENDERED.split()) <= set(names)
    assert ("a", {"href": "https://example.com/?a=1&b=2"}) in outline.tags
    assert "if 1 &lt; 2: pass" in page
    assert "**" not in page
    assert "~~" not in page
    mine = export(store, kept(store, user("**mine** <b>")), "html")
    assert "**mine** &lt;b&gt;" in mine


# What a model writes, and what the page has in the place of it
UNTRUSTED = [
    ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
    ("a <img src=x onerror=alert(1)> b", "a &lt;img src=x onerror=alert(1)&gt; b"),
    ("<div\nonclick='x'>\n\nin it\n</div>", "&lt;div"),
    ("<!-- hidden --> seen", "&lt;!-- hidden --&gt; seen"),
    ("&lt;script&gt;", "&lt;script&gt;"),
    ("[click](javascript:alert(1))", "[click](javascript:alert(1))"),
    ("[click](JaVa&#115;cript:alert(1))", "[click]("),
    ("[click](\x01javascript:alert(1))", "[click]("),
    ("[click][1]\n\n[1]: javascript:alert(1)", "[click][1]"),
    ("<javascript:alert(1)>", "&lt;javascript:alert(1)&gt;"),
    ("[click](vbscript:x) [d](data:text/html,x)", "[click](vbscript:x) [d](data:text/html,x)"),
    ("[a file](file:///etc/passwd)", "[a file](file:///etc/passwd)"),
    ("[a host](//evil.example) [a path](../x)", "[a host](//evil.example) [a path](../x)"),
    ("![far](https://evil.example/x.png)", '!<a href="https://evil.example/x.png">far</a>'),
    (
        "![far][1]\n\n[1]: https://evil.example/x.png",
        '!<a href="https://evil.example/x.png">far</a>',
    ),
    ("![near](data:image/png;base64,AAAA)", "![near](data:image/png;base64,AAAA)"),
    ("![near](x.png)", "![near](x.png)"),
    ('[t](https://a.example "x\\" onclick=\\"y")', 'title="x&quot; onclick=&quot;y"'),
    ('```x" onclick="y\ncode\n```', "language-x&quot;"),
    ("> " * 3000 + "deep", "<blockquote>"),
]


LOADED = "script img iframe object embed form link meta base style svg video audio source"


@pytest.mark.parametrize(("written", "shown"), UNTRUSTED)
def test_no_markdown_of_a_model_is_more_than_text_and_links(
    store: Store, written: str, shown: str
) -> None:
    """No HTML of its own, no link that runs or opens anything but a page, no image that is
    loaded."""
    page, outline = page_of(store, written)
    assert shown in page
    names = {name for name, _ in outline.tags}
    assert not names & set(LOADED.split())
    assert [each for name, each in outline.tags if name == "div"] == [{"class": "said"}]
    for name, attributes in outline.tags:
        assert attributes.keys() <= {"class", "href", "title", "start", "style"}, (name, attributes)
        assert re.match("https://", attributes.get("href") or "https://")


WITHOUT_RENDERER = """
import sys
sys.modules["markdown_it"] = None
from coder.sessions.export import export
from coder.sessions.store import Store
print(export(Store(sys.argv[1]), sys.argv[2], "html"))
"""


def test_without_the_renderer_an_answer_is_text(store: Store) -> None:
    """It comes with a library, whose next version may have another one."""
    session_id = kept(store, user("go"), {"role": "assistant", "content": "**bold** <b>"})
    argv = [sys.executable, "-c", WITHOUT_RENDERER, str(store.path), session_id]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert "<p>**bold** &lt;b&gt;</p>" in done.stdout, done.stderr


HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>\x00\x1b]0;owned\x07</style></pre></title>&lt;'


def everywhere(store: Store, text: str) -> str:
    """A session with this text wherever one can stand."""
    arguments = json.dumps({text: text})
    meta = {"x": [text], text: 1}
    session_id = kept(
        store,
        user([{"type": "text", "text": text}]),
        {"role": 'x" onclick="alert(1)', "content": text},
        calling(
            text,
            name=text,
            arguments=arguments,
            content=text,
            reasoning=text,
            meta=meta,
        ),
        result(text, text),
        directory=text,
        model=text,
        title=text,
    )
    with store.transaction() as db:
        details = json.dumps({"details": {"diff": f"+{text}"}})
        db.execute(
            "UPDATE part SET title = ?, data = ?, state = ? WHERE type = 'tool'",
            (text, details, text),
        )
        error = json.dumps({"stop_reason": text, "message": text})
        db.execute("UPDATE message SET error = ?", (error,))
    return session_id


def test_whatever_stands_in_a_session_is_text_on_the_page(store: Store) -> None:
    page = export(store, everywhere(store, HOSTILE), "html", lambda text: text)
    outline = Outline(page)
    assert {name for name, _ in outline.tags} & {"script", "img"} == set()
    attributes = {name for _, each in outline.tags for name in each}
    assert attributes <= {"lang", "charset", "http-equiv", "content", "name", "class"}
    assert outline.text.count("<script>alert(1)</script>") >= 12
    assert not re.search("[\x00-\x08\x0b-\x1f]", page)


@pytest.mark.parametrize(
    "details",
    [
        [1],
        "text",
        {"diff": 5},
        {"diff": ["a"]},
        {"diff": None},
    ],
)
@pytest.mark.parametrize("format_", FORMATS)
def test_a_tool_of_a_plugin_may_have_any_details(
    store: Store, details: Any, format_: Format
) -> None:
    @tool
    def odd() -> ToolResult:
        """Be odd."""
        return ToolResult("It is odd.", details=details)

    info = store.create("/ws")
    with (
        serve(
            Reply(calls=[("odd", {})]),
            Reply("done"),
        ) as server,
        Recorder(store, info) as kept,
    ):
        ask(server, "go", tools=[odd], messages=kept.messages, each=kept)
    assert "It is odd." in export(store, info.id, format_)


# ---- secrets -----------------------------------------------------------------------------------


@pytest.mark.parametrize("format_", FORMATS)
def test_no_format_shows_a_secret_wherever_it_stands(store: Store, format_: Format) -> None:
    secret = "sk-CANARY" + "0123456789abcdef" * 2
    text = export(store, everywhere(store, secret), format_)
    assert secret not in text
    assert text.count(REMOVED) >= 8


SECRETS = [
    ("my key is sk-proj-abcdEFGH1234567890 here", "my key is [removed] here"),
    ("ghp_" + "a1B2" * 9, "[removed]"),
    ("github_pat_" + "a1B2_" * 6, "[removed]"),
    ("id AKIAIOSFODNN7EXAMPLE.", "id [removed]."),
    ("xoxb-1234567890-abcdef", "[removed]"),
    ("AIza" + "x" * 35, "[removed]"),
    ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dBjftJeZ4CVP", "[removed]"),
    ("-----BEGIN RSA PRIVATE KEY-----\nMI\n-----END RSA PRIVATE KEY-----\nx", "[removed]\nx"),
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
HARMLESS = """max_tokens=100 key=lambda x: x
def token(self): return next(tokens)
SSH_AUTH_SOCK=/tmp/agent.1
PATH=/usr/bin HOME=/root
risk-averse tasks, ask-me
https://example.org:8080/a@b
key: value
a sk- prefix
AKIA
the Authorization header is missing""".splitlines()


@pytest.mark.parametrize(
    ("text", "clean"),
    [*SECRETS, *zip(HARMLESS, HARMLESS)],
)
def test_what_looks_like_a_secret_is_taken_out_and_nothing_else(text: str, clean: str) -> None:
    assert redactor()(text) == clean
