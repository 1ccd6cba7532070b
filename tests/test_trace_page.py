"""The page of a trace: what is in its source, and what it is in a real browser (marker `browser`)."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from coder.devtools.scripted import Reply, ScriptedServer
from coder.hooks import FunctionHooks
from coder.toolset import tool
from coder.types import Request, ToolResult
from tests.harness import serve
from tests.test_trace import recorded, shown

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


@tool
def shout(text: str) -> ToolResult:
    """Say something loudly.

    text: what
    """
    return ToolResult(
        f"{text.upper()} </pre><script>document.title = 'from a tool'</script>",
        details={"<b>": "<img src=x>"},
    )


def evil(url: str) -> str:
    """What a model may write who wants to get out of the page."""
    return (
        f"</pre></details><script>document.title = 'owned'</script><script src={url}/a.js></script><img src={url}/b.png "
        f"onerror=\"document.title='owned'\"><iframe src={url}/c></iframe><link rel=stylesheet href={url}/d.css>"
        "<style>body { display: none }</style>"
        '<svg onload="document.title=\'owned\'"></svg><a href="javascript:document.title=1">x</a>&lt;\x00\x1b[31m" onclick=\'x\''
    )


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[tuple[Path, ScriptedServer]]:
    """A page of a run in which everything that can be somebody's text is hostile, and the server that it would report to."""

    def name_the_model(request: Request) -> None:
        request.options["user"] = evil("")

    with ScriptedServer([Reply("x")]) as spy:
        bad = evil(spy.url)
        replies = [
            Reply(bad, [("shout", {"text": bad})], reasoning=bad),
            Reply("x" * 9 + bad, status=429),
            Reply("late", [("shout", {"text": "again"}), (bad, {bad: 1})], pace=0.01),
            Reply(f"The end. {bad}", finish=bad),
        ]
        file = tmp_path / "<b>run & rest.jsonl"
        with serve(*replies) as server:
            recorded(
                file,
                server,
                tools=(shout,),
                prompt=bad,
                hooks=FunctionHooks(before_llm_call=name_the_model),
            )
        done = shown(file, "--html", tmp_path / "page.html")
        assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'page.html'}\n"), done
        yield tmp_path / "page.html", spy


class Elements(HTMLParser):
    """The elements of a page, and whether each is closed in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_holds_no_script_and_nothing_from_elsewhere_whatever_was_written(
    pages: tuple[Path, ScriptedServer],
) -> None:
    source = pages[0].read_text(encoding="utf-8")
    elements = Elements()
    elements.feed(source)
    assert elements.open == []
    known = {
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
        "figure",
        "svg",
        "text",
        "line",
        "a",
        "rect",
        "div",
        "table",
        "tr",
        "th",
        "td",
        "details",
        "summary",
        "b",
        "pre",
    }
    assert {name for name, _ in elements.seen} <= known
    attributes = {name for _, found in elements.seen for name in found}
    assert not {
        name
        for name in attributes
        if name.startswith("on") or name in ("src", "style", "srcset", "action")
    }
    assert all(str(found["href"]).startswith("#") for _, found in elements.seen if "href" in found)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", source)
    text = "".join(elements.text)
    assert "</pre><script>document.title = 'from a tool'" in text and "onclick='x'" in text, (
        "it is there, as text"
    )


def test_the_policy_of_the_page_allows_its_own_style_and_nothing_else(
    pages: tuple[Path, ScriptedServer],
) -> None:
    source = pages[0].read_text(encoding="utf-8")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', source)
    style = re.search("<style>(.*?)</style>", source, re.S)
    assert policy and style
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert (
        policy[1]
        == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    assert source.index("Content-Security-Policy") < source.index("<title>")
    assert "url(" not in style[1] and "@import" not in style[1]


def test_the_page_is_private_also_where_an_older_one_was_not(
    pages: tuple[Path, ScriptedServer],
) -> None:
    page = pages[0]
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    page.chmod(0o644)
    page.write_text("x" * 1_000_000)
    assert shown(page.with_name("<b>run & rest.jsonl"), "--html", page).returncode == 0
    assert stat.S_IMODE(page.stat().st_mode) == 0o600 and "xxxxxxxxxxxx" not in page.read_text(
        encoding="utf-8"
    )


def test_everything_of_the_run_is_on_the_page_and_repeated_messages_stand_once(
    tmp_path: Path,
) -> None:
    file, page = tmp_path / "run.jsonl", tmp_path / "page.html"
    replies = [
        Reply(f"answer {number}", [("shout", {"text": f"word {number}"})]) for number in range(5)
    ]
    with serve(
        *replies[:3], Reply("slow down", status=429), *replies[3:], Reply("the end")
    ) as server:
        recorded(file, server, tools=(shout,), prompt="the prompt")
    assert shown(file, "--html", page).returncode == 0
    elements = Elements()
    elements.feed(page.read_text(encoding="utf-8"))
    text = "".join(elements.text)
    for said in (
        "the prompt",
        "WORD 4",
        "the end",
        "stop: the end",
        "rate_limit: slow down",
        "text/event-stream",
        "data: [DONE]",
        "request 7",
        "The first 9 messages are those of the request before",
        "include_usage",
        "step 6",
    ):
        assert said in text, said
    assert sum(part.startswith("WORD 0 </pre>") for part in elements.text) <= 4, (
        "as a result, and in one request, each with its summary"
    )
    bars = [found["class"] for name, found in elements.seen if name == "rect"]
    assert (bars.count("first"), bars.count("model"), bars.count("tools"), bars.count("waits")) == (
        7,
        6,
        5,
        1,
    )
    assert {found["href"] for name, found in elements.seen if name == "a"} == {
        f"#r1s{number}" for number in range(1, 7)
    }
    assert {found["id"] for _, found in elements.seen if "id" in found} == {
        f"r1s{number}" for number in range(1, 7)
    }


def test_a_chunk_of_a_trace_that_was_cut_has_a_page_too(tmp_path: Path) -> None:
    file, page = tmp_path / "run.jsonl", tmp_path / "page.html"
    with serve(Reply("one two three four")) as server:
        recorded(file, server)
    whole = file.read_bytes()
    file.write_bytes(whole[: whole.index(b"three") + 20])
    assert shown(file, "--html", page).returncode == 0
    source = page.read_text(encoding="utf-8")
    assert "given up" in source and "A line was cut" in source and "no end" in source


# ---- in a browser --------------------------------------------------------------------------------


class Browser:
    """Headless Chromium, told what to do through its debugging pipe: JSON ended by a NUL byte."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM
        commands, self._out = os.pipe()
        self._in, replies = os.pipe()
        words = [
            CHROMIUM,
            "--headless=new",
            "--disable-gpu",
            "--no-first-run",
            f"--user-data-dir={folder}",
            "--remote-debugging-pipe",
            "--window-size=1000,900",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
        ]
        self.child = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{commands} 4>&{replies}', *words],
            pass_fds=(commands, replies),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": str(folder)},
        )
        os.close(commands)
        os.close(replies)
        self._rest, self._count, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            os.write(self._out, b'{"id": 0, "method": "Browser.close"}\0')
        os.close(self._out)
        try:
            self.child.wait(10)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        os.close(self._in)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        session = {"sessionId": self._session} if self._session else {}
        os.write(
            self._out,
            json.dumps({"id": self._count, "method": method, "params": params} | session).encode()
            + b"\0",
        )
        while (message := self._next()).get("id") != self._count:
            self.events.append(message)
        assert "error" not in message, message
        return dict(message["result"])

    def open(self, url: str) -> None:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Network", "Log"):
            self.ask(f"{domain}.enable")
        self.ask("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def see(self, expression: str) -> Any:
        """The value of an expression in the page, also of a promise."""
        found = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        """A real click, in the middle of an element."""
        where = self.see(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}});"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.ask(
                "Input.dispatchMouseEvent",
                type=kind,
                x=where[0],
                y=where[1],
                button="left",
                clickCount=1,
            )

    @property
    def asked_for(self) -> list[str]:
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]


@pytest.fixture
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not CHROMIUM:
        pytest.skip("no Chromium here: apt-get install chromium")
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.mark.browser
def test_in_a_browser_nothing_runs_nothing_is_fetched_and_every_message_folds(
    pages: tuple[Path, ScriptedServer], browser: Browser
) -> None:
    page, spy = pages
    browser.open(page.as_uri())
    assert browser.see("document.title") == "<b>run & rest.jsonl"
    assert (
        browser.see(
            "document.scripts.length + document.images.length + document.querySelectorAll('iframe, link, [style]').length"
        )
        == 0
    )
    assert browser.see("document.querySelectorAll('style').length") == 1
    assert browser.see("getComputedStyle(document.body).display") == "block"
    # what is folded cannot be seen until it is clicked at, and a message in it neither
    assert browser.see("document.querySelectorAll('details').length") > 20
    assert browser.see("document.querySelectorAll('details[open]').length") == 0
    inner = "#r1s1 > details:not([open]) pre"
    visible = f"document.querySelector({inner!r}).checkVisibility()"
    assert browser.see(visible) is False
    browser.click("#r1s1 > summary")
    assert (
        browser.see("document.querySelector('#r1s1').open") is True
        and browser.see(visible) is False
    )
    browser.click("#r1s1 > details > summary")
    assert browser.see("document.querySelector('#r1s1 > details pre').checkVisibility()") is True
    assert "<script>document.title = 'owned'</script>" in browser.see(
        "document.querySelector('#r1s1 > details pre').textContent"
    )
    browser.click("#r1s1 > summary")
    assert browser.see("document.querySelector('#r1s1').open") is False
    # the timeline leads to the steps, and its bars have a width
    assert (
        browser.see(
            "[...document.querySelectorAll('rect')].every(r => r.getBoundingClientRect().width > 0.4)"
        )
        is True
    )
    browser.see(
        "document.querySelector('svg a').dispatchEvent(new MouseEvent('click', {bubbles: true, cancelable: true, view: window}))"
    )
    assert browser.see("location.hash") == "#r1s1"
    assert browser.see("document.title") == "<b>run & rest.jsonl"
    assert browser.asked_for == [page.as_uri()] and spy.connections == 0


@pytest.mark.browser
def test_a_script_that_got_into_the_page_could_neither_run_nor_fetch(
    pages: tuple[Path, ScriptedServer], browser: Browser
) -> None:
    page, spy = pages
    browser.open(page.as_uri())
    browser.see(
        "(() => { const s = document.createElement('script'), b = document.createElement('b'), evil = \"document.title = 'owned'\";"
        " s.textContent = evil; b.setAttribute('onclick', evil); document.body.append(s, b); b.click(); })()"
    )
    assert browser.see("document.title") == "<b>run & rest.jsonl"
    tried = (
        "new Promise(done => { const i = new Image(); i.onload = () => done('came'); i.onerror = () => done('blocked');"
        f" i.src = '{spy.url}/x.png' }})",
        f"fetch('{spy.url}/models', {{mode: 'no-cors'}}).then(() => 'came', () => 'blocked')",
    )
    assert [browser.see(each) for each in tried] == ["blocked", "blocked"] and spy.connections == 0


@pytest.mark.browser
def test_the_page_can_be_read_in_light_and_in_dark(
    pages: tuple[Path, ScriptedServer], browser: Browser
) -> None:
    browser.open(pages[0].as_uri())
    seen = {}
    for scheme in ("light", "dark"):
        browser.ask(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        for selector in ("body", "summary", "p", "svg text"):
            colours = browser.see(
                f"(() => {{ const s = getComputedStyle(document.querySelector({selector!r})); "
                "return [s.fill, s.color, getComputedStyle(document.body).backgroundColor]; })()"
            )
            ink = colours[0] if selector == "svg text" else colours[1]
            assert contrast(ink, colours[2]) >= 4.5, (scheme, selector, colours)
        seen[scheme] = colours[2]
    assert luminance(seen["light"]) > 0.8 and luminance(seen["dark"]) < 0.1


def luminance(colour: str) -> float:
    """WCAG 2's relative luminance of rgb(...)."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
