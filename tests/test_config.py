"""Where the settings come from: flags and the environment, the user's .env, in one case the
folder's .env, defaults."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from coder.cli.main import run
from coder.providers.profiles import Price
from coder.settings import (
    LEVELS,
    SETTINGS,
    ConfigError,
    Settings,
    config_folder,
    data_folder,
    field_of,
    window_of,
)
from coder.sources import load
from coder.types import Reasoning

HERE = "http://127.0.0.1:{}/v1"
THERE = "https://{}.example/v1"
NEEDED = {"OPENAI_BASE_URL": HERE.format(9), "OPENAI_MODEL": "m"}

Sources = Callable[..., Settings]


@pytest.fixture
def ws(tmp_path: Path) -> Path:
    (folder := tmp_path / "ws").mkdir()
    return folder


@pytest.fixture
def settings(ws: Path, monkeypatch: pytest.MonkeyPatch) -> Sources:
    """Load from four sources, each given as a dict."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(ws.parent / "config"))
    config_folder().mkdir(parents=True)

    def loaded(
        flags: dict[str, str | None] | None = None,
        env: dict[str, str] | None = None,
        user: dict[str, str] | None = None,
        folder: dict[str, str] | None = None,
    ) -> Settings:
        for name in SETTINGS:
            monkeypatch.delenv(name, raising=False)
        for name, value in (env or {}).items():
            monkeypatch.setenv(name, value)
        for place, values in (config_folder(), user), (ws, folder):
            lines = (f"{name}={value}\n" for name, value in (values or {}).items())
            (place / ".env").write_text("".join(lines))
        return load(ws, flags)

    return loaded


# ---- one source before another -------------------------------------------------------------------

NUMBERS = "CONTEXT_WINDOW IDLE_TIMEOUT FIRST_BYTE_TIMEOUT RETRY_BASE MAX_STEPS MAX_SECONDS"
NAMES = [f"CODER_{name}" for name in NUMBERS.split()]


@pytest.mark.parametrize("name", ["OPENAI_MODEL", *NAMES])
def test_each_setting_comes_from_the_first_source_that_has_it(settings: Sources, name: str) -> None:
    values = ["11", "22", "33", "44"]  # the last is the folder's, which does not count
    server = {key: value for key, value in NEEDED.items() if key != name}
    for first in range(3):
        given = [{name: value} if at >= first else {} for at, value in enumerate(values)]
        given[1] |= server
        got = getattr(settings(*given), field_of(name))
        assert str(got).removesuffix(".0") == values[first]


def test_what_no_source_has_gets_its_default(
    settings: Sources, capsys: pytest.CaptureFixture[str]
) -> None:
    default = vars(Settings(model="m", base_url=HERE.format(9)))
    assert vars(settings(env=NEEDED)) == default
    assert get_args(Reasoning) == LEVELS
    with pytest.raises(ConfigError, match="no key"):
        settings()  # no source has anything
    assert run(["config"]) == 0
    printed = capsys.readouterr().out
    start = dict(re.findall(r"^([A-Z][A-Z_]+)=(.*)$", printed, re.M))
    assert start == dict.fromkeys(SETTINGS, ""), "coder config prints a file to start from"
    assert vars(settings(env=NEEDED, user=start)) == default
    empty = {"CODER_MAX_STEPS": "", "OPENAI_API_KEY": " "}
    user = {"CODER_MAX_STEPS": "7", "OPENAI_API_KEY": ""}
    got = settings({"OPENAI_MODEL": None}, NEEDED | empty, user)
    assert got.max_steps == 7
    assert got.api_key is None


def test_the_folder_gives_key_server_and_model_together(settings: Sources) -> None:
    theirs = of("folder", {"url": THERE, "key": "yes"}) | {"OPENAI_MODEL": "theirs"}
    got = settings(folder=theirs)
    server = ("https://folder.example/v1", "key-of-folder", "theirs")
    assert (got.base_url, got.api_key, got.model) == server
    assert got.notes == ("Server and key come from the .env of this folder: folder.example.",)
    assert got.keys == ("key-of-folder",)
    assert settings(env={"OPENAI_MODEL": "mine"}, folder=theirs).model == "mine"
    for source in ("env", "user"):  # a folder's model does not count for a user's server
        with pytest.raises(ConfigError, match="no model: set"):
            own = {source: {"OPENAI_BASE_URL": HERE.format(9)}}
            settings(**own, folder={"OPENAI_MODEL": "theirs"})


def test_nothing_else_of_a_folder_counts_and_that_is_reported(settings: Sources) -> None:
    """Neither with the folder's own server nor with the user's."""
    words = {"CODER_HEADERS": "{}", "CODER_ALLOW_HTTP": "on", "CODER_SANDBOX": "off"}
    strange = {name: words.get(name, "7") for name in SETTINGS if name.startswith("CODER_")}
    theirs = of("folder", {"url": HERE}) | {"OPENAI_MODEL": "m"}
    for env, folder in ({}, theirs), (NEEDED, {}):
        plain = settings(env=env, folder=folder)
        got = settings(env=env, folder=folder | strange)
        *notes, said = got.notes
        got.notes = tuple(notes)
        assert vars(got) == vars(plain)
        assert said.startswith("Ignored in this folder: ")
        assert str(config_folder()) in said
        assert all(name in said for name in strange)
    # many projects have one
    assert not settings(env=NEEDED, folder={"OPENAI_API_KEY": "of-an-app"}).notes


# ---- a key and its server ------------------------------------------------------------------------

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
@pytest.mark.parametrize(
    "flag",
    ["", HERE.format(1000), THERE.format("flag")],
)
def test_a_key_goes_only_to_the_server_named_next_to_it(settings: Sources, flag: str) -> None:
    """All combinations: what a source can have, for each of the three, and an address as a flag or
    none."""
    for ways in itertools.product(WAYS, repeat=3):
        sources = {name: of(name, way) for name, way in zip(("env", "user", "folder"), ways)}
        try:
            flags = {"OPENAI_MODEL": "m", "OPENAI_BASE_URL": flag or None}
            got = settings(flags, *sources.values())
        except ConfigError as error:
            assert "OPENAI_API_KEY" in str(error)
            assert "\n" not in str(error)
            assert "key-of" not in str(error)
            got = None
        if flag:  # the user's own word, as the environment is
            sources["env"]["OPENAI_BASE_URL"] = flag
        # Both from the first source that has either; none where that is a strange server without a
        # key, or nothing
        first = next((source for source in sources.values() if source), {})
        url = first.get("OPENAI_BASE_URL")
        key = first.get("OPENAI_API_KEY")
        expected = (url, key) if key or (url or "").startswith("http://127.") else None
        assert (got and (got.base_url, got.api_key)) == expected, sources


AWAY = {"OPENAI_BASE_URL": "https://me:pass@other.example/v1", "OPENAI_MODEL": "m"}
KEY = {"OPENAI_API_KEY": "key-0123456789"}
OWN = {"OPENAI_BASE_URL": "https://mine.example/v1"}
# What the flags, the environment and the user's .env have, and what the message says of it
UNPAIRED: list[tuple[dict[str, dict[str, str]], list[str]]] = [
    (
        {"flags": AWAY, "user": KEY},
        [
            "the key in your .env belongs to api.openai.com",
            "write OPENAI_BASE_URL=https://other.example/v1 next to it in {file}",
            "export OPENAI_API_KEY=...",
        ],
    ),
    ({"env": AWAY, "user": KEY | OWN}, ["your .env belongs to mine.example", "export OPENAI_API"]),
    (
        {"env": AWAY, "folder": KEY},
        ["the folder's .env belongs to api.openai.com", "export OPENAI"],
    ),
    ({"flags": AWAY}, ["other.example", "export OPENAI_API_KEY=..."]),
    ({"user": AWAY}, ["OPENAI_API_KEY=... next to it in {file}"]),
    ({"folder": AWAY}, ["export OPENAI_API_KEY=... OPENAI_BASE_URL=https://other.example/v1"]),
]


@pytest.mark.parametrize(("sources", "said"), UNPAIRED)
def test_a_server_without_its_key_is_reported_with_the_way_to_pair_them(
    settings: Sources, sources: dict[str, Any], said: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        settings(**sources)
    text = str(raised.value)
    for each in said:
        assert each.format(file=config_folder() / ".env") in text, text
    assert "\n" not in text
    assert "key-0123456789" not in text
    assert "pass" not in text


@pytest.mark.parametrize(
    ("mode", "folder", "content", "is_told"),
    [
        (0o644, 0o755, KEY, True),
        (0o604, 0o711, KEY, True),
        (0o644, 0o700, KEY, False),  # nobody gets there
        (0o600, 0o755, KEY, False),
        (0o644, 0o755, {"CODER_HEADERS": '{"x-key":"0123456789"}'}, True),
        (0o644, 0o755, {"CODER_MAX_STEPS": "7"}, False),
    ],
)
def test_a_file_with_a_key_that_others_may_read_gets_one_notice(
    settings: Sources, mode: int, folder: int, content: dict[str, str], is_told: bool
) -> None:
    settings(env=NEEDED)
    file = config_folder() / ".env"
    for above in file.parents:
        if above.stat().st_uid == os.geteuid() and above != Path("/"):
            above.chmod(above.stat().st_mode | 0o711)
    file.parent.chmod(folder)
    file.write_text("".join(f"{name}={text}\n" for name, text in content.items()))
    file.chmod(mode)
    notes = [each for each in load(file.parent.parent).notes if "chmod 600" in each]
    assert notes == [f"Other users may read the key in {file} (fix: chmod 600)."] * is_told


NO_LOOPBACK = """https://api.example/127.0.0.1 http://127.0.0.1.evil.example/v1 http://localhost@evil.example/
    http://evil.example/#@localhost http://evil.example?@localhost http://127.0.0.1:1@evil.example/ http://0.0.0.0"""


def test_another_machine_needs_a_key_and_https_or_the_users_word(settings: Sources) -> None:
    on = {"CODER_ALLOW_HTTP": "on"}
    for url in ("http://localhost:8000/v1", "http://127.1.2.3:1/v1", "HTTPS://LocalHost/v1"):
        assert settings(env={"OPENAI_BASE_URL": url, "OPENAI_MODEL": "m"}).api_key is None
    for url in NO_LOOPBACK.split():
        with pytest.raises(ConfigError, match="no OPENAI_API_KEY"):
            settings(env={"OPENAI_BASE_URL": url, "OPENAI_MODEL": "m"})
        env = dict(NEEDED, OPENAI_BASE_URL=url, OPENAI_API_KEY="k")
        for sources in (
            {"env": env},
            {"user": env},
            {"folder": env | on},
        ):
            if url.startswith("http:"):
                with pytest.raises(ConfigError, match=r"OPENAI_BASE_URL is http.* --allow-http"):
                    settings(**sources)
        for sources in (
            {"flags": on, "env": env},
            {"env": env | on},
            {"env": env, "user": on},
        ):
            assert settings(**sources).base_url == url
    assert settings(env={"OPENAI_API_KEY": "k", "OPENAI_MODEL": "m"}).host == "api.openai.com"


HEADERS = {"x-gateway-key": "gw-0123456789", "Authorization": "Bearer other-0123456789"}


def test_headers_go_only_to_the_server_that_is_named_next_to_them(settings: Sources) -> None:
    server = {"OPENAI_API_KEY": "k", "OPENAI_MODEL": "m"}
    more = {"CODER_HEADERS": json.dumps(HEADERS)}
    flag = {"OPENAI_BASE_URL": HERE.format(1), "OPENAI_MODEL": "m"}
    for sources in (
        {"env": server | more},
        {"user": server | more},
        {"flags": flag, "env": more},
    ):
        got = settings(**sources)
        assert got.headers == HEADERS
        assert {"gw-0123456789", "other-0123456789"} <= set(got.keys)
    first = {"env": server, "user": more}
    second = {"env": more, "user": server}
    for sources in (first, second, {"folder": server | more}):
        assert settings(**sources).headers == {}


# ---- the files -----------------------------------------------------------------------------------


@pytest.mark.case("SEC-03")
def test_env_files_set_nothing_else(settings: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"PATH": "/evil", "HTTPS_PROXY": "http://evil.example", "OPENAI_ORG_ID": "x"}
    others |= {"CODER_YOLO": "1", "PYTHONPATH": "/evil"}
    plain = settings({}, NEEDED)
    before = dict(os.environ)
    assert vars(
        settings(
            {},
            NEEDED,
            user=others,
            folder=others,
        )
    ) == vars(plain)
    assert dict(os.environ) == before
    monkeypatch.setenv("OTHER", "taken")
    model = {"OPENAI_MODEL": "a${OTHER}b$OTHER", "OPENAI_API_KEY": "${OPENAI_MODEL}"}
    got = settings(user=NEEDED | model)
    assert got.model == "a${OTHER}b$OTHER"
    assert got.api_key == "${OPENAI_MODEL}"


@pytest.mark.parametrize(
    "more",
    [b"", b"X=\xff\xfe\x00\n", b"\0" * (1 << 21)],
)
def test_an_env_file_is_read_as_people_write(settings: Sources, ws: Path, more: bytes) -> None:
    settings(user=NEEDED)
    (config_folder() / ".env").write_bytes(
        b"\xef\xbb\xbf# mine\r\nexport OPENAI_MODEL='a b'\r\n"
        b'OPENAI_BASE_URL = "http://[::1]/v1" # here\r\n\r\nnonsense\r\nCODER_MAX_STEPS=9\r\n'
        + more
    )
    got = load(ws)
    assert got.model == "a b"
    assert got.base_url == "http://[::1]/v1"
    assert got.max_steps == 9


@pytest.mark.parametrize("whose", ["file", "folder"])
def test_an_env_file_that_others_can_write_does_not_count(settings: Sources, whose: str) -> None:
    settings(env={}, user=NEEDED | {"OPENAI_MODEL": "m"}, folder={})
    path = config_folder() / ".env"
    (path if whose == "file" else path.parent).chmod(0o777)
    with pytest.raises(ConfigError, match=r"\.env: other users can write to .*\(fix: chmod go-w\)"):
        load(path.parent)


def test_only_the_env_file_of_the_folder_itself_is_read(settings: Sources, ws: Path) -> None:
    settings(folder=NEEDED)
    (ws / "below/.env").mkdir(parents=True)  # a folder, of all things
    with pytest.raises(ConfigError, match="no key"):
        load(ws / "below")
    (ws / ".env").unlink()
    # Nobody can read its first byte, not even root
    (ws / ".env").symlink_to("/proc/self/mem")
    with pytest.raises(ConfigError, match=r"\.env: Input/output error|no key"):
        load(ws)


@pytest.mark.parametrize("value", [".config", ".", "..", "~/c", ""])
def test_the_folders_follow_xdg(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Such a value is invalid and ignored: it would lie in the folder that is worked in."""
    monkeypatch.setenv("HOME", "/h")
    own = ("/h/.config/coder", "/h/.local/share/coder")
    for given, expected in (value, own), ("/c", ("/c/coder", "/c/coder")):
        monkeypatch.setenv("XDG_CONFIG_HOME", given)
        monkeypatch.setenv("XDG_DATA_HOME", given)
        assert (str(config_folder()), str(data_folder())) == expected


# ---- values --------------------------------------------------------------------------------------

NOT_NUMBERS = ("many", "1,5", "-1", "nan", "inf", "1e400", "0x10", "1 000")
WRONG = [(name, value) for name in NAMES for value in NOT_NUMBERS] + [
    ("CODER_MAX_STEPS", "1.5"),
    ("CODER_REASONING", "much"),
    ("CODER_SANDBOX", "perhaps"),
    ("CODER_TITLES", "maybe"),
    *(("CODER_EXTRA_BODY", body) for body in ("{oops", "[1]", '{"messages": []}')),
    *(("CODER_PROFILE", profile) for profile in ('{"colour": 1}', '{"ids": "("}')),
    ("CODER_PRICES", "/gone"),
]


def test_what_is_no_value_is_reported_with_name_and_what_it_has_to_be(settings: Sources) -> None:
    for name, value in WRONG:
        for source in (
            {"env": NEEDED | {name: value}},
            {"env": NEEDED, "user": {name: value}},
        ):
            with pytest.raises(ConfigError) as raised:
                settings(**source)
            expected = f"{name}: {value!r} has to be {SETTINGS[name].help}"
            assert str(raised.value).startswith(expected)
            assert "\n" not in str(raised.value)


def test_secrets_that_cannot_be_sent_are_reported_without_their_values(settings: Sources) -> None:
    wrong = ['{"a b": "SECRET"}', '{"": "SECRET"}', '{"a": "SECRET\\n"}', '["SECRET"]']
    wrong += ['{"a": "SECRET\\u00e9"}', '{"a": "SECRET"']
    cases = [("CODER_HEADERS", value) for value in wrong] + [("OPENAI_API_KEY", "SECRET\u00e9")]
    for name, value in cases:
        with pytest.raises(ConfigError, match=name) as raised:
            settings(env=NEEDED | {name: value})
        assert "SECRET" not in str(raised.value)


VALUES: dict[str, tuple[str, Any]] = {
    "CODER_TITLES": ("Off", False),
    "CODER_REASONING": ("High", "high"),
    "CODER_SANDBOX": ("ON", "on"),
    "CODER_SANDBOX_NETWORK": ("off", False),
    "CODER_CLIENT": ("OpenAI", "openai"),
    "CODER_IDLE_TIMEOUT": (" 2.5 ", 2.5),
    "CODER_FIRST_BYTE_TIMEOUT": ("0", 0),
    "CODER_MAX_SECONDS": ("0", None),  # no limit
    "CODER_PROFILE": ('{"empty_content": "empty"}', {"empty_content": "empty"}),
    "CODER_EXTRA_BODY": ('{"top_k": 3}', {"top_k": 3}),
}


def test_values_are_read_by_their_kinds(settings: Sources) -> None:
    got = settings(env=NEEDED | {name: text for name, (text, _) in VALUES.items()})
    for name, (_, value) in VALUES.items():
        assert getattr(got, field_of(name)) == value


FAMILIES = {
    400_000: "gpt-5 gpt-5-mini openai/gpt-5.1",
    1_000_000: "gpt-4.1-nano Gemini-2.5-pro",
    200_000: "claude-sonnet-4-5 anthropic/claude-opus-4",
    256_000: "kimi-k2 qwen3-coder:30b",
    128_000: "gpt-4o-mini o3 deepseek-chat script something-new my-gpt-5",
}


def test_the_context_window_follows_the_family_of_the_model() -> None:
    for tokens, models in FAMILIES.items():
        assert {window_of(model) for model in models.split()} == {tokens}


def test_prices_come_from_a_file_of_the_users(settings: Sources, tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    gpt = {"input": 1.25, "cached": 0.125, "output": 10}
    path.write_text(
        json.dumps(
            {
                "local-*": {"input": 0, "output": 0},
                "gpt-5": gpt,
            }
        )
    )
    env = NEEDED | {"CODER_PRICES": str(path)}
    got = settings(env=env)
    assert got.price_of("gpt-5") == Price(1.25, 10, 0.125)
    assert got.price_of("local-7b") == Price(0, 0)
    assert got.price_of("gpt-5-mini") is None
    words = '{"m": {"input": "1", "output": "2"}}'
    for text in ("", "[]", '{"m": 3}', '{"m": {"input": 1}}', '{"m": {"in": 1}}', words):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"CODER_PRICES: .* has to be a file with prices"):
            settings(env=env)
