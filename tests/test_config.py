"""Where the settings come from: flags, the environment, the user's .env, in one case the folder's .env, defaults."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from coder.cli.config import config_folder, data_folder, is_loopback, load
from coder.cli.settings import LEVELS, NAMES, ConfigError, Settings, window_of
from coder.providers.usage import Price
from coder.types import Reasoning
from tests.test_cli import ROOT, Place

HERE, THERE = "http://127.0.0.1:{}/v1", "https://{}.example/v1"
NEEDED = {"OPENAI_BASE_URL": HERE.format(9), "OPENAI_MODEL": "m"}

Sources = Callable[..., Settings]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def settings(place: Place, monkeypatch: pytest.MonkeyPatch) -> Sources:
    """Load from four sources, each given as a dict."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place.home / "config"))
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)

    def write(path: Path, values: dict[str, str]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{name}={value}\n" for name, value in values.items()))

    def loaded(
        flags: dict[str, object] | None = None,
        env: dict[str, str] | None = None,
        user: dict[str, str] | None = None,
        folder: dict[str, str] | None = None,
    ) -> Settings:
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in (env or {}).items():
            monkeypatch.setenv(name, value)
        write(place.home / "config" / "coder" / ".env", user or {})
        write(place.ws / ".env", folder or {})
        return load(place.ws, flags)

    return loaded


# ---- one source before another ---------------------------------------------------------------------------

FIELDS = {
    "OPENAI_MODEL": "model",
    "CODER_CONTEXT_WINDOW": "context_window",
    "CODER_IDLE_TIMEOUT": "idle_timeout",
    "CODER_FIRST_BYTE_TIMEOUT": "first_byte_timeout",
    "CODER_RETRY_BASE": "retry_base",
    "CODER_MAX_STEPS": "max_steps",
    "CODER_MAX_SECONDS": "max_seconds",
}
OTHERS = set(NAMES) - FIELDS.keys()


@pytest.mark.parametrize("name", FIELDS)
def test_each_setting_comes_from_the_first_source_that_has_it(settings: Sources, name: str) -> None:
    values = ["11", "22", "33", "44"]  # the last is the folder's, which does not count
    server = {key: value for key, value in NEEDED.items() if key != name}
    for first in range(3):
        given = [{name: value} if at >= first else {} for at, value in enumerate(values)]
        given[1] |= server
        got = getattr(settings(*given), FIELDS[name])
        assert str(got).removesuffix(".0") == values[first]


def test_what_no_source_has_gets_its_default(settings: Sources) -> None:
    values = {"context_window": 128_000, "idle_timeout": 180, "retry_base": 2}
    default = Settings("m", HERE.format(9), None, **values, max_steps=100, max_seconds=None)
    assert settings(env=NEEDED) == default


def test_the_folder_gives_key_server_and_model_together(settings: Sources) -> None:
    theirs = of("folder", {"url": THERE, "key": "yes"}) | {"OPENAI_MODEL": "theirs"}
    got = settings(folder=theirs)
    server = ("https://folder.example/v1", "key-of-folder", "theirs")
    assert (got.base_url, got.api_key, got.model) == server
    assert got.notes == ("Server and key come from the .env of this folder: folder.example.",)
    assert got.keys == ("key-of-folder",)
    assert settings(env={"OPENAI_MODEL": "mine"}, folder=theirs).model == "mine"


@pytest.mark.parametrize("source", ["env", "user"])
def test_a_folders_model_does_not_count_for_a_users_server(settings: Sources, source: str) -> None:
    with pytest.raises(ConfigError, match="no model: set"):
        settings(**{source: {"OPENAI_BASE_URL": HERE.format(9)}}, folder={"OPENAI_MODEL": "theirs"})


def test_nothing_else_of_a_folder_counts_and_that_is_reported(settings: Sources) -> None:
    """Neither with the folder's own server nor with the user's."""
    words = {"CODER_HEADERS": "{}", "CODER_ALLOW_HTTP": "on", "CODER_SANDBOX": "off"}
    words |= {"CODER_SANDBOX_NETWORK": "off"}
    strange = {name: words.get(name, "7") for name in NAMES if name.startswith("CODER_")}
    theirs = of("folder", {"url": HERE}) | {"OPENAI_MODEL": "m"}
    for env, folder in ({}, theirs), (NEEDED, {}):
        plain, got = settings(env=env, folder=folder), settings(env=env, folder=folder | strange)
        *notes, said = got.notes
        assert replace(got, notes=()) == replace(plain, notes=()) and tuple(notes) == plain.notes
        assert said.startswith("Ignored in this folder: ") and str(config_folder()) in said
        assert all(name in said for name in strange)
    other = settings(env=NEEDED, folder=of("folder", {"url": THERE})).notes
    assert "Ignored in this folder: OPENAI_BASE_URL" in other[0]
    # many projects have one
    assert not settings(env=NEEDED, folder={"OPENAI_API_KEY": "of-an-app"}).notes


def test_an_empty_value_is_no_value_and_zero_seconds_are_no_limit(settings: Sources) -> None:
    empty = {"CODER_MAX_STEPS": "", "OPENAI_API_KEY": ""}
    user = {"CODER_MAX_STEPS": "7", "OPENAI_API_KEY": ""}
    got = settings({"OPENAI_MODEL": None}, NEEDED | empty, user)
    assert (got.max_steps, got.api_key) == (7, None)
    got = settings({"CODER_MAX_SECONDS": 0, "CODER_IDLE_TIMEOUT": 0, "CODER_RETRY_BASE": 0}, NEEDED)
    assert (got.max_seconds, got.idle_timeout, got.retry_base) == (None, 0, 0)


# ---- a key and its server --------------------------------------------------------------------------------

WAYS: list[dict[str, str]] = [
    {},
    {"url": HERE},
    {"url": THERE},
    {"key": "yes"},
    {"url": THERE, "key": "yes"},
    {"url": HERE, "key": "yes"},
]


def of(source: str, way: dict[str, str]) -> dict[str, str]:
    """The settings of one source, with its name in them: a mix can be told."""
    port = {"env": 1001, "user": 1002, "folder": 1003}[source]
    made = {}
    if "url" in way:
        made["OPENAI_BASE_URL"] = way["url"].format(port if way["url"] == HERE else source)
    if "key" in way:
        made["OPENAI_API_KEY"] = f"key-of-{source}"
    return made


@pytest.mark.case("SEC-01", "SEC-16")
@pytest.mark.parametrize("flag", ["", HERE.format(1000), THERE.format("flag")])
def test_a_key_goes_only_to_the_server_named_beside_it(settings: Sources, flag: str) -> None:
    """All combinations: what a source can have, for each of the three, and an address as a flag or none."""
    for ways in itertools.product(WAYS, repeat=3):
        sources = {name: of(name, way) for name, way in zip(("env", "user", "folder"), ways)}
        try:
            flags = {"OPENAI_MODEL": "m", "OPENAI_BASE_URL": flag or None}
            got = settings(flags, *sources.values())
        except ConfigError as error:
            assert "OPENAI_API_KEY" in str(error) and "\n" not in str(error)
            assert "key-of" not in str(error)
            got = None
        expected = with_flag(flag, sources) if flag else without_flag(sources)
        assert (got and (got.base_url, got.api_key)) == expected, sources


def without_flag(sources: dict[str, dict[str, str]]) -> tuple[str | None, str | None] | None:
    """Both from the first source that has either; None where that would be a strange server without a key, or nothing."""
    first = next((source for source in sources.values() if source), {})
    url, key = first.get("OPENAI_BASE_URL"), first.get("OPENAI_API_KEY")
    return (url, key) if key or (url or "").startswith("http://127.") else None


def with_flag(
    flag: str, sources: dict[str, dict[str, str]]
) -> tuple[str | None, str | None] | None:
    """The flag is the person's own word: any key of theirs goes with it, never that of the folder."""
    key = sources["env"].get("OPENAI_API_KEY") or sources["user"].get("OPENAI_API_KEY")
    return (flag, key) if key or flag.startswith("http://127.") else None


LOOPBACK = """http://localhost:8000/v1 http://127.0.0.1 http://127.1.2.3:1/v1 http://[::1]:8080/v1
    HTTPS://LocalHost/v1"""
NO_LOOPBACK = """http://127.0.0.1.evil.example/v1 http://localhost.evil.example http://localhost@evil.example/
    http://evil.example/#@localhost http://evil.example?@localhost http://127.0.0.1:1@evil.example/ http://1270.0.0.1
    http://0.0.0.0 http://[::2] https://api.example/127.0.0.1"""
PLAIN = """http://192.168.1.7:8080/v1 http://api.example/v1 HTTP://0.0.0.0/v1 http://[::2]/v1
    http://127.0.0.1.evil.example/v1"""


def test_a_server_on_this_machine_needs_no_key(settings: Sources) -> None:
    for url in LOOPBACK.split():
        assert is_loopback(url)
        assert settings(env={"OPENAI_BASE_URL": url, "OPENAI_MODEL": "m"}).api_key is None
    for url in NO_LOOPBACK.split():
        assert not is_loopback(url)
        with pytest.raises(ConfigError, match="without OPENAI_API_KEY"):
            settings(env={"OPENAI_BASE_URL": url, "OPENAI_MODEL": "m"})


@pytest.mark.parametrize("url", PLAIN.split())
def test_http_to_another_machine_has_to_be_allowed_by_the_user(settings: Sources, url: str) -> None:
    env, on = dict(NEEDED, OPENAI_BASE_URL=url, OPENAI_API_KEY="k"), {"CODER_ALLOW_HTTP": "on"}
    flag = {"flags": {"OPENAI_BASE_URL": url}, "env": env}
    for sources in ({"env": env}, {"user": env}, {"folder": env}, flag):
        for refused in {}, {"folder": sources.get("folder", {}) | on}:
            with pytest.raises(ConfigError, match=r"OPENAI_BASE_URL is http.* --allow-http"):
                settings(**(sources | refused))
    for sources in ({"flags": on, "env": env}, {"env": env | on}, {"env": env, "user": on}):
        assert settings(**sources).base_url == url
    assert settings(env=env | {"OPENAI_BASE_URL": url.lower().replace("http", "https")}).base_url


def test_a_wrong_address_that_does_not_count_is_no_error(settings: Sources) -> None:
    env, user = NEEDED | {"OPENAI_API_KEY": "k"}, {"OPENAI_BASE_URL": "no address"}
    assert settings(env=env, user=user).base_url == NEEDED["OPENAI_BASE_URL"]
    env = {"OPENAI_API_KEY": "k", "OPENAI_MODEL": "m"}
    assert settings(env=env, user=user).base_url is None


def test_the_host_that_is_shown_holds_no_password(settings: Sources) -> None:
    env = {"OPENAI_API_KEY": "k", "OPENAI_MODEL": "m"}
    url = "https://me:pass@api.example:8443/v1"
    assert settings(env=env | {"OPENAI_BASE_URL": url}).host == "api.example:8443"
    assert settings(env=env).host == "api.openai.com"


# ---- the .env files --------------------------------------------------------------------------------------


@pytest.mark.case("SEC-03")
def test_other_names_in_an_env_file_do_nothing_and_nothing_is_interpolated(
    settings: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {"PATH": "/evil", "HTTPS_PROXY": "http://evil.example", "OPENAI_ORG_ID": "x"}
    others |= {"CODER_YOLO": "1", "PYTHONPATH": "/evil"}
    plain, before = settings({}, NEEDED), dict(os.environ)
    assert settings({}, NEEDED, user=others, folder=others) == plain
    assert dict(os.environ) == before
    monkeypatch.setenv("OTHER", "taken")
    model = {"OPENAI_MODEL": "a${OTHER}b$OTHER", "OPENAI_API_KEY": "${OPENAI_MODEL}"}
    got = settings(user=NEEDED | model)
    assert (got.model, got.api_key) == ("a${OTHER}b$OTHER", "${OPENAI_MODEL}")


def test_an_env_file_is_read_as_people_write_them(
    settings: Sources, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings(env=NEEDED)
    for name in NEEDED:
        monkeypatch.delenv(name)
    (config_folder() / ".env").write_bytes(
        b"\xef\xbb\xbf# mine\r\nexport OPENAI_MODEL='a b'\r\n"
        b'OPENAI_BASE_URL = "http://[::1]/v1" # here\r\n\r\nnonsense\r\nCODER_MAX_STEPS=9'
    )
    got = load(place.ws)
    assert (got.model, got.base_url, got.max_steps) == ("a b", "http://[::1]/v1", 9)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux's /proc")
def test_an_env_file_that_cannot_be_read_is_said(settings: Sources, place: Place) -> None:
    (place.ws / ".env").symlink_to(
        "/proc/self/mem"
    )  # a file whose first byte nobody can read, not even root
    with pytest.raises(ConfigError, match=r"\.env: Input/output error"):
        load(place.ws)


def test_an_env_file_of_other_bytes_or_no_end_is_read(settings: Sources, place: Place) -> None:
    for more, size in ((b"X=\xff\xfe\x00\n", 80), (b"", 1 << 40)):
        with (place.ws / ".env").open("wb") as file:
            file.write(b"OPENAI_MODEL=m\nOPENAI_BASE_URL=http://[::1]/v1\n" + more)
            file.truncate(size)
        assert load(place.ws).model == "m"


@pytest.mark.parametrize("whose", ["file", "folder"])
def test_an_env_file_that_others_can_write_does_not_count(settings: Sources, whose: str) -> None:
    settings(env={}, user=NEEDED | {"OPENAI_MODEL": "m"}, folder={})
    path = config_folder() / ".env"
    (path if whose == "file" else path.parent).chmod(0o777)
    with pytest.raises(ConfigError, match=r"\.env: other users can write to .*\(fix: chmod go-w\)"):
        load(path.parent)


def test_only_the_folder_itself_is_looked_at(settings: Sources, place: Place) -> None:
    settings(env={}, folder={}, user=NEEDED)
    (config_folder() / ".env").unlink()
    below = place.ws / "below" / "deep"
    below.mkdir(parents=True)
    for folder in (place.ws, place.ws / "below", below / "deeper"):
        folder.mkdir(exist_ok=True)
        (folder / ".env").write_text(f"OPENAI_MODEL=m\nOPENAI_BASE_URL={HERE.format(9)}\n")
    with pytest.raises(ConfigError, match="no key"):
        load(below)
    assert load(place.ws).model == "m"
    (place.ws / ".env").unlink()
    (place.ws / ".env").mkdir()  # of all things
    with pytest.raises(ConfigError, match="no key"):
        load(place.ws)


def test_env_example_has_all_names_and_sets_nothing(settings: Sources, place: Place) -> None:
    example = (ROOT / ".env.example").read_text()
    assert re.findall(r"^#?\s*([A-Z][A-Z_]+)=", example, re.M) == list(NAMES)
    plain = settings(env=NEEDED)
    (place.ws / ".env").write_text(example)
    assert load(place.ws) == plain
    assert set(FIELDS) | OTHERS == set(NAMES)


def test_a_switch_is_on_or_off(settings: Sources) -> None:
    for word in ("", "on", "TRUE", "off", "No", "0"):
        got = settings(env=NEEDED | {"CODER_TITLES": word}).titles
        assert got is (word in ("", "on", "TRUE"))
    with pytest.raises(ConfigError, match="CODER_TITLES is 'maybe', and has to be on or off"):
        settings(env=NEEDED | {"CODER_TITLES": "maybe"})


@pytest.mark.parametrize("value", [None, ".config", ".", "..", "~/c", ""])
def test_the_folders_follow_xdg(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    """Such a value is invalid and ignored: it would lie in the folder that is worked in."""
    monkeypatch.setenv("HOME", "/h")
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    assert config_folder() == Path("/h/.config/coder")
    assert data_folder() == Path("/h/.local/share/coder")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/c")
    monkeypatch.setenv("XDG_DATA_HOME", "/d")
    assert (config_folder(), data_folder()) == (Path("/c/coder"), Path("/d/coder"))


# ---- numbers ---------------------------------------------------------------------------------------------

NUMBERS = [name for name in FIELDS if name != "OPENAI_MODEL"]


@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_number_is_reported_with_its_name(settings: Sources, name: str) -> None:
    for value in ("many", "1,5", "-1", "nan", "inf", "-inf", "1e400", "0x10", "1 000"):
        for source in ({"env": NEEDED | {name: value}}, {"env": NEEDED, "user": {name: value}}):
            with pytest.raises(ConfigError, match=f"{name} is .*{re.escape(value)}"):
                settings(**source)


def test_numbers_are_read_as_people_write_them(settings: Sources) -> None:
    numbers = {"CODER_CONTEXT_WINDOW": "1e6", "CODER_IDLE_TIMEOUT": " 2.5 "}
    got = settings(env=NEEDED | numbers | {"CODER_MAX_STEPS": "1_000"})
    assert (got.context_window, got.idle_timeout, got.max_steps) == (1_000_000, 2.5, 1000)


FAMILIES = {
    400_000: "gpt-5 gpt-5-mini openai/gpt-5.1",
    1_000_000: "gpt-4.1-nano Gemini-2.5-pro",
    200_000: "claude-sonnet-4-5 anthropic/claude-opus-4",
    256_000: "kimi-k2 qwen3-coder:30b",
    128_000: "gpt-4o-mini o3 deepseek-chat script something-new my-gpt-5",
}


def test_the_context_window_follows_the_family_of_the_model(settings: Sources) -> None:
    for tokens, models in FAMILIES.items():
        assert {window_of(model) for model in models.split()} == {tokens}
    env = NEEDED | {"OPENAI_MODEL": "gpt-5"}
    assert window_of("") == 128_000 and settings(env=env).context_window == 400_000
    assert settings({"CODER_CONTEXT_WINDOW": 9000}, env).context_window == 9000


# ---- through the whole program ---------------------------------------------------------------------------


def test_a_key_without_an_address_goes_to_its_own_server(place: Place) -> None:
    """That is out of reach here: a proxy, which over https sees nothing but the name, tells where the run wanted to go."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        env = dict.fromkeys(("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY"), address)
        env |= {"OPENAI_API_KEY": "secret", "OPENAI_MODEL": "m", "CODER_RETRY_BASE": "0.01"}
        child = place.start("--max-seconds", "20", "hi", **env)
        proxy.settimeout(20)
        connection, _ = proxy.accept()
        with connection:
            connection.settimeout(20)
            asked_for = connection.recv(1000)
        child.terminate()
        child.communicate(timeout=20)
    assert asked_for.startswith(b"CONNECT api.openai.com:443 ") and b"secret" not in asked_for


# ---- how the model is asked, and what it costs -----------------------------------------------------------


def test_reasoning_is_one_of_the_levels(settings: Sources) -> None:
    assert settings(env=NEEDED).reasoning == "off"
    assert settings(env=NEEDED | {"CODER_REASONING": "High"}).reasoning == "high"
    high = NEEDED | {"CODER_REASONING": "high"}
    assert settings({"CODER_REASONING": "low"}, env=high).reasoning == "low"
    with pytest.raises(ConfigError, match=r"CODER_REASONING is 'much'.* one of off, minimal, low"):
        settings(env=NEEDED | {"CODER_REASONING": "much"})
    assert get_args(Reasoning) == LEVELS


def test_prices_come_from_a_file_of_the_users(settings: Sources, tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    gpt = {"input": 1.25, "cached": 0.125, "output": 10}
    path.write_text(json.dumps({"local-*": {"input": 0, "output": 0}, "gpt-5": gpt}))
    got = settings(env=NEEDED | {"CODER_PRICES": str(path)})
    assert got.price_of("gpt-5") == Price(1.25, 10, 0.125)
    assert got.price_of("local-7b") == Price(0, 0) and got.price_of("gpt-5-mini") is None
    assert not settings(env=NEEDED, folder={"CODER_PRICES": str(path)}).prices
    wrong = ["", "[]", '{"m": 3}', '{"m": {"input": 1}}', '{"m": {"input": "x", "output": 1}}']
    for text in (*wrong, '{"m": {"in": 1}}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"CODER_PRICES: .*prices.json has to be like .*per"):
            settings(env=NEEDED | {"CODER_PRICES": str(path)})
    with pytest.raises(ConfigError, match=r"CODER_PRICES: .*gone cannot be read: No such file"):
        settings(env=NEEDED | {"CODER_PRICES": str(tmp_path / "gone")})


def test_the_profile_and_the_body_are_json_and_not_of_a_folder(settings: Sources) -> None:
    body = {"CODER_PROFILE": '{"empty_content": "empty"}', "CODER_EXTRA_BODY": '{"top_k": 3}'}
    got = settings(env=NEEDED | body)
    assert (got.profile, got.extra_body) == ({"empty_content": "empty"}, {"top_k": 3})
    got = settings(env=NEEDED, folder=body)
    assert (got.profile, got.extra_body) == ({}, {})


HEADERS = {"x-gateway-key": "gw-0123456789", "Authorization": "Bearer other-0123456789"}


def test_headers_go_only_to_a_server_that_they_can_be_meant_for(settings: Sources) -> None:
    server = {"OPENAI_API_KEY": "k", "OPENAI_MODEL": "m"}
    more = {"CODER_HEADERS": json.dumps(HEADERS)}
    flag = {"OPENAI_BASE_URL": HERE.format(1), "OPENAI_MODEL": "m"}
    near = [{"env": server | more}, {"user": server | more}, {"env": more, "user": server}]
    for sources in (*near, {"flags": flag, "user": more}):
        got = settings(**sources)  # type: ignore[arg-type]
        assert got.headers == HEADERS and {"gw-0123456789", "other-0123456789"} <= set(got.keys)
        assert "0123456789" not in repr(replace(got, keys=()))
    other = [{"env": server, "user": more}, {"env": more, "folder": server}]
    for sources in (*other, {"folder": server | more}):
        assert settings(**sources).headers == {}  # type: ignore[arg-type]


def test_of_the_headers_only_those_are_hidden_that_are_secrets(settings: Sources) -> None:
    shown = {"X-Env": "production", "HTTP-Referer": "https://example.com"}
    hidden = {
        "X-Auth": "a-0123456789",
        "X-Gateway-Key": "k-0123456789",
        "Session-Token": "t-0123456789",
        "X-Secret": "s-0123456789",
        "Cookie": "c=0123456789",
        "X-Upstream": "Bearer b-0123456789",
        "X-Proxy": "basic b64-0123456789",
    }
    keys = settings(env=NEEDED | {"CODER_HEADERS": json.dumps(shown | hidden)}).keys
    assert set(keys) - {"k"} == {each.rpartition(" ")[2] for each in hidden.values()}


def test_headers_that_cannot_be_sent_are_reported_without_their_values(settings: Sources) -> None:
    wrong = ['{"a": 1}', '{"a b": "SECRET"}', '{"": "SECRET"}', '{"a": "SECRET\\n"}', '["SECRET"]']
    for value in (*wrong, '{"a": "SECRET\\u00e9"}', '{"a": "SECRET"'):
        with pytest.raises(ConfigError, match="CODER_HEADERS") as raised:
            settings(env=NEEDED | {"CODER_HEADERS": value})
        assert "SECRET" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("CODER_EXTRA_BODY", "{oops", "CODER_EXTRA_BODY is no JSON"),
        ("CODER_EXTRA_BODY", "[1]", "CODER_EXTRA_BODY has to be a JSON object"),
        (
            *("CODER_PROFILE", '{"colour": 1}'),
            "'colour' is no field of a profile; known: output_limit, system_role",
        ),
        ("CODER_PROFILE", '{"tool_name": 1}', "tool_name cannot be 1; it is False by default"),
        (
            *("CODER_PROFILE", '{"empty_content": "none"}'),
            "empty_content cannot be 'none'; it is 'null' by default, or null, empty, absent",
        ),
        ("CODER_PROFILE", '{"ids": "("}', "CODER_PROFILE: "),
    ],
)
def test_what_is_no_profile_is_said(settings: Sources, name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        settings(env=NEEDED | {name: value})


def test_the_sandbox_is_auto_and_its_network_is_on_unless_said(settings: Sources) -> None:
    assert (settings(env=NEEDED).sandbox, settings(env=NEEDED).network) == ("auto", True)
    given = settings(env=NEEDED | {"CODER_SANDBOX": "ON", "CODER_SANDBOX_NETWORK": "off"})
    assert (given.sandbox, given.network) == ("on", False)
    with pytest.raises(ConfigError, match="has to be one of auto, on, off"):
        settings(env=NEEDED | {"CODER_SANDBOX": "perhaps"})
