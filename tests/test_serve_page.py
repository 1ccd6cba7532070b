"""The page of `coder serve` in a browser, at the width of a telephone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from coder.devtools.scripted import ScriptedServer
from tests.browser import CHROMIUM, Browser, Page
from tests.late import needs
from tests.serving import TOKEN, Served, reply_by_prompt
from tests.terminal import until

needs("starlette", "uvicorn", extra="serve")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed")

QUESTION = ".question"
FIRST_ANSWER = ".question button"
# Counts buttons that can be clicked when they appear
ADDED = "changes.flatMap((each) => [...each.addedNodes])"
OBSERVER = f"(changes) => {ADDED}.forEach((each) => open_at_once += each.tagName === 'BUTTON' && !each.disabled)"
DEEP = "{ childList: true, subtree: true }"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as made:
        yield made


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with (
        ScriptedServer(reply_by_prompt) as model,
        Served(tmp_path, model) as made,
    ):
        yield made


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Page]:
    opened = browser.open(f"{served.url}#token={TOKEN}")
    until(lambda: "token" not in opened.url and "#" in opened.url, "a session")
    yield opened
    opened.close()


def count(page: Page, selector: str) -> int:
    return int(page.value(f"document.querySelectorAll({json.dumps(selector)}).length"))


def prompt(page: Page, text: str) -> None:
    page.click("#entry")
    page.write(text)
    page.click("#send")


def wait_for_question(page: Page) -> None:
    until(lambda: count(page, f"{FIRST_ANSWER}:enabled"), "a question that can be answered")


def test_a_question_is_shown_with_its_diff_and_answered(page: Page, served: Served) -> None:
    prompt(page, "write")
    wait_for_question(page)
    assert "edit: made.txt" in page.text
    assert "+<b>two</b>" in page.text
    assert count(page, f"{QUESTION} .added") >= 2
    assert page.value("document.documentElement.scrollWidth") == 390
    page.click(FIRST_ANSWER)
    until(lambda: "touch by-command.txt once" in " ".join(page.text.split()), "the second question")
    wait_for_question(page)
    page.click(FIRST_ANSWER)
    until(lambda: "Done:" in page.text, "the answer")
    assert count(page, QUESTION) == 0
    assert (served.ws / "made.txt").exists()
    assert (served.ws / "by-command.txt").exists()
    assert count(page, ".answer b") == 1  # **write**

    until(lambda: count(page, "#undo:enabled"), "the end of the run")
    page.click("#undo")
    until(lambda: page.value("byId('entry').value") == "write", "the prompt to be changed")
    until(lambda: "Done:" not in page.text, "the messages are gone")
    assert not list(served.ws.glob("*.txt"))


def test_a_question_shows_all_that_will_run(page: Page) -> None:
    prompt(page, "hidden")
    wait_for_question(page)
    asked = page.value("document.querySelector('.question div').innerText")
    assert asked.startswith("bash: ls  # the files:\necho <U+202E>gnihton")
    assert "\u202e" not in page.value("document.querySelector('.question').textContent")


@pytest.mark.parametrize("fragment", ["token=evil", "../session?directory=/etc&x="])
def test_the_link_of_another_page_changes_nothing(
    browser: Browser, served: Served, page: Page, fragment: str
) -> None:
    session = served.get("/session")[0]["id"]
    other = browser.open(f"{served.url}#{fragment}")
    until(lambda: other.url.endswith(f"#{session}"), "the session that is there")
    prompt(other, "hello")
    until(lambda: "How are" in other.text, "an answer")
    assert [each["id"] for each in served.get("/session")] == [session]
    other.close()


def test_markdown_is_shown_and_html_of_the_model_is_text(page: Page) -> None:
    prompt(page, "hello")
    until(lambda: "<img src=x onerror=alert(1)>" in page.text, "the answer")
    assert page.value("document.querySelector('.answer h4').textContent") == "Hello"
    assert page.value("document.querySelector('.answer code').textContent") == "you"
    assert [count(page, f".answer {tag}") for tag in ("i", "li", "img")] == [1, 1, 0]


def test_a_double_click_answers_one_question_of_two(page: Page, served: Served) -> None:
    (served.home / ".env").write_text("NAME=value\n")
    prompt(page, "outside")
    wait_for_question(page)
    first = served.permission()
    # The second question takes the place of the first: at first it cannot be answered by a click
    page.value(f"window.open_at_once = 0, new MutationObserver({OBSERVER}).observe(shown, {DEEP})")
    page.click(FIRST_ANSWER, times=2)
    until(lambda: served.permission()["id"] != first["id"], "the second question")
    until(lambda: "read:" in page.text, "the second question on the page")
    assert page.value("window.open_at_once") == 0
    wait_for_question(page)
    second = served.permission()
    assert first["permission"] == "external_directory"
    assert second["permission"] == "read"
    assert first["callID"] == second["callID"]
    page.click(FIRST_ANSWER)
    until(lambda: "NAME=value" in page.text, "the answer")


def test_a_second_tab_and_a_reload_show_the_run_and_its_question(
    browser: Browser, page: Page, served: Served
) -> None:
    prompt(page, "write")
    wait_for_question(page)
    second = browser.open(page.url)
    for tab in (page, second):
        tab.call("Page.reload")
        wait_for_question(tab)
        assert "I write it." in tab.text
        assert "edit: made.txt" in tab.text
    second.click(FIRST_ANSWER)
    until(lambda: "bash: touch" in page.text and "edit: made" not in page.text, "answered there")
    second.close()
    served.answer()
    until(lambda: "Done:" in page.text, "the answer")


def test_a_run_is_stopped(page: Page, served: Served) -> None:
    prompt(page, "long")
    until(lambda: "word word" in page.text, "the answer grows")
    page.click("#stop")
    until(lambda: "Request aborted." in page.text, "the end")
    assert page.value("byId('stop').hidden")


def test_a_page_goes_on_after_the_server_was_killed(browser: Browser, tmp_path: Path) -> None:
    with ScriptedServer(reply_by_prompt) as model:
        with Served(tmp_path, model) as first:
            page = browser.open(f"{first.url}#token={TOKEN}")
            until(lambda: "token" not in page.url and "#" in page.url, "a session")
            prompt(page, "write")
            wait_for_question(page)
            first.crash()
        until(lambda: "connection is lost" in page.text)
        with Served(tmp_path, model, "--port", str(first.port)):
            until(lambda: count(page, QUESTION) == 0, "the messages, in which the run has ended")
            prompt(page, "hello")
            until(lambda: count(page, ".answer li") == 1, "the next answer")
        page.close()


def test_a_wrong_token_is_said(browser: Browser, served: Served) -> None:
    page = browser.open(f"{served.url}#token=wrong")
    until(lambda: "token is wrong" in page.text)
    page.close()
