"""Models by name, from outside: what a server has, a name that it does not have, and a first
start."""

from __future__ import annotations

import re
import shlex
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.providers.endpoint import Endpoint
from coder.types import ModelError
from tests.harness import serve
from tests.terminal import Terminal, rendered
from tests.test_cli import Place, assert_one_line

LOCAL = ["qwen3:8b", "nomic-embed-text", "llama3.2:3b"]
MANY = [f"claude-{number}" for number in range(30)] + ["gpt-5-mini", "gpt-5", "whisper-1"]
UNSET = {"OPENAI_BASE_URL": "", "OPENAI_API_KEY": "", "OPENAI_MODEL": ""}
NOBODY = {"OLLAMA_HOST": "127.0.0.1:9"}


def having(*models: str) -> ScriptedServer:
    """A server that has these models, and answers with the name of the one that was asked."""

    def script(body: Body) -> Reply:
        name = body["model"]
        absent = Reply(f"The model `{name}` does not exist", status=404)
        return Reply(f"I am {name}.") if name in models else absent

    server = serve(script)
    server.models = [*models]
    return server


def screen(session: Terminal, columns: int = 80) -> str:
    return "\n".join(rendered(session.output, columns, 60))


# ---- a name that is missing or wrong -------------------------------------------------------------

ASKED = "no model: set OPENAI_MODEL, or use -m NAME; the server has: "
WRONG = ["-m", "gpt-5-mni"]


@pytest.mark.parametrize(
    ("models", "words", "code", "said"),
    [
        (["only"], [], 0, "I am only."),
        (["only", "text-embedding-3"], [], 0, "I am only."),
        (["b", "a"], [], 2, f"{ASKED}b, a\n"),
        ([], [], 2, f"{ASKED}none"),
        (MANY, WRONG, 1, "the server has: gpt-5-mini, gpt-5, claude-"),
        (MANY, WRONG, 1, " and 17 more."),
        (["\u202eevil", "x" * 999, "fine"], ["-m", "x"], 1, "the server has: fine."),
    ],
)
def test_a_name_that_is_missing_or_wrong_is_answered_with_those_that_there_are(
    tmp_path: Path, models: list[str], words: list[str], code: int, said: str
) -> None:
    with having(*models) as server:
        done = Place(tmp_path).run(*words, "hi", server=server, OPENAI_MODEL="")
    assert done.returncode == code
    assert said in done.stdout + done.stderr


def test_a_server_that_is_not_there_is_the_reason_if_no_model_is_named(tmp_path: Path) -> None:
    with having("m") as server:
        pass
    with Terminal(tmp_path / "a", server) as session:
        assert "The server does not list its models: " in session.say("/model")
    done = Place(tmp_path / "b").run("hi", server=server, OPENAI_MODEL="")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no model" in done.stderr
    assert "Check the base URL" in done.stderr


def test_a_model_is_chosen_by_number_by_a_part_of_its_name_and_by_any_name(tmp_path: Path) -> None:
    with (
        having(*MANY) as server,
        Terminal(tmp_path, server, OPENAI_MODEL="gpt-5") as session,
    ):
        session.enter("/model")
        listed = session.expect("number or name: ")
        assert re.search(r"  1    claude-0\r.* and \d+ more", listed, re.S)
        assert "whisper" not in listed
        assert "claude-1 at 127.0.0.1" in session.say("2")
        session.enter("/model gpt")
        assert re.search(r"1 +gpt-5\r\n +2 +gpt-5-mini", session.expect("number or name: "))
        assert "claude-1 at 127.0.0.1" in session.say(""), "none was chosen"
        session.enter("/model gpt")
        session.expect("number or name: ")
        assert "gpt-5-mini at 127.0.0.1" in session.say("mini")
        assert "gpt-5-mini at 127.0.0.1" in session.say("/model mini")
        assert "gpt-5 at 127.0.0.1" in session.say("/model gpt-5"), "the name itself"
        assert "I am gpt-5." in session.say("hi")
        said = session.say("/model gpt-6")
        assert "does not list it; nearest: gpt-5" in said
        assert "gpt-6 at 127.0.0.1" in said
        said = " ".join(session.say("hi").split())
        assert "The model `gpt-6` does not exist" in said
        assert "server has: gpt-5, gpt-5-mini," in said


# ---- a first start -------------------------------------------------------------------------------


def test_a_server_of_this_machine_is_found_chosen_and_kept(tmp_path: Path) -> None:
    with having(*LOCAL) as server:
        found = {"OLLAMA_HOST": f"127.0.0.1:{server.port}"} | UNSET
        session = Terminal(tmp_path, server, **found)
        session.expect(".env): ")
        session.enter("yes")
        session.expect("yes is no number of the list")
        assert session.exit_code() == 2
        session = Terminal(tmp_path, server, **found)
        session.expect(".env): ")
        shown = screen(session)
        assert f"Ollama at http://127.0.0.1:{server.port}/v1" in shown
        assert "--demo" in shown
        assert f"--base-url http://127.0.0.1:{server.port}/v1 -m qwen3:8b\n" in shown
        assert "nomic" not in shown
        assert "export OPENAI_API_KEY=" in shown
        number = re.search(r"(\d+)  llama3.2:3b", shown)
        assert number
        session.enter(number[1])
        with session:
            assert "I am llama3.2:3b." in session.say("hi")
        file = session.home / ".config" / "coder" / ".env"
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.read_text().splitlines()[1] == "OPENAI_MODEL='llama3.2:3b'"
        with Terminal(tmp_path, server, **NOBODY | UNSET) as session:
            assert "llama3.2:3b at 127.0.0.1" in session.output
        assert not any("CANARY" in head.get("authorization", "") for head in server.heads)


def test_a_first_start_is_one_screen_and_for_programs_one_line(tmp_path: Path) -> None:
    with having("m") as server:
        session = Terminal(tmp_path / "a", server, "-p", "hi", **NOBODY | UNSET)
        session.until(lambda: "--demo" in session.output)
        shown = screen(session)
        for way in ("export OPENAI_API_KEY=", "coder/.env", "--base-url http", "--demo"):
            assert way in shown
        session.enter("")  # for a server that the machine has
        assert session.exit_code() == 2
    done = Place(tmp_path / "b").run("hi", **NOBODY)
    assert_one_line(done, "no key: set OPENAI_API_KEY")


def test_a_model_is_asked_for_if_a_server_has_several(tmp_path: Path) -> None:
    with having(*LOCAL) as server:
        for answer, chosen in (("2", "llama3.2:3b"), ("qwen3:8b", "qwen3:8b")):
            session = Terminal(tmp_path, server, "hi", OPENAI_MODEL="")
            assert "set OPENAI_MODEL, or use -m NAME. 127." in session.expect("number or name: ")
            session.enter(answer)
            assert session.exit_code() == 0
            assert f"I am {chosen}." in session.output
            file = session.home / ".config" / "coder" / ".env"
            assert f"OPENAI_MODEL='{chosen}'" in file.read_text().split("\n")
            assert file.stat().st_mode & 0o777 == 0o600
            assert f"Kept in {file}." in "".join(screen(session).split("\n"))
            with Terminal(tmp_path, server, OPENAI_MODEL="") as again:
                assert f"{chosen} at 127.0.0.1" in again.output
            file.write_text("CODER_MAX_STEPS=7")  # by an editor that ends no line
        # A server that a flag or the folder names is for now: its model may be none of the usual
        # server's
        for words in (["--base-url", server.url], []):
            session = Terminal(tmp_path, server, *words, "hi", **UNSET)
            session.expect("number or name: ")
            session.enter("2")
            assert session.exit_code() == 0
            assert file.read_text() == "CODER_MAX_STEPS=7"
            kept = re.search(r"To keep this choice: (echo .*?)\r\n", session.output)
            assert kept
            assert shlex.split(kept[1])[1] == "OPENAI_MODEL='llama3.2:3b'"
            (session.ws / ".env").write_text(f"OPENAI_BASE_URL={server.url}\n")


# ---- the list itself -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent", [b"<html>", b"[]", b'{"data": 3}', b'{"data": [{}]}', b"[" * 99_999]
)
def test_what_is_no_list_of_models_costs_only_the_advice(sent: bytes) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request).start()
        endpoint = Endpoint(f"http://127.0.0.1:{server.server_port}/v1", None, {})
        with pytest.raises(ModelError, match="the answer is malformed"):
            endpoint.models()
