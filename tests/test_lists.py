"""The lists that protect something, row by row as docs/security.md and docs/settings.md have them.

What is in a document and not in the code fails here. A list that grows, grows in both.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coder.devtools.scripted import Reply
from coder.events import ToolEnd
from coder.permissions.permissions import Permissions
from coder.permissions.redact import HIDDEN, Redaction, Redactor, without_secrets
from coder.permissions.rules import Rule, rules_of
from coder.permissions.sanitize import escape_invisible, strip_controls
from coder.permissions.shell import parse
from coder.settings import SETTINGS
from coder.sources import load
from coder.tools.edit import edit
from coder.tools.files import ls, read, write
from coder.tools.patch import apply_patch
from coder.tools.search import glob, grep
from coder.tools.secrets import environment, holds_secrets
from coder.toolset import Tool, Toolset
from tests.harness import all_of, ask, contents, results, serve, shell
from tests.terminal import OneShot
from tests.test_readers import REPOSITORY, free
from tests.test_readme import PAGES, quoted, rows

LISTS = {name: quoted(members) for name, members in rows("docs/security.md", "list")}


def members(*names: str) -> list[Any]:
    """The members of these lists, each a test of its own."""
    return [pytest.param(each, id=f"{name}-{each}") for name in names for each in LISTS[name]]


def of_name(pattern: str) -> str:
    """A name that a pattern of the lists means."""
    return pattern.replace("*", "x")


def asks(permission: str, path: str) -> tuple[bool, bool]:
    """Whether this is asked about although a rule allows all of it, and whether -y does not answer.

    Of edits also what the user has allowed for the session counts for nothing.
    """
    given = Permissions(rules_of({permission: "allow"}))
    given.memory.append(Rule("edit", "*", "allow", "you"))
    decision = given.decide(permission, path, Path("/ws"))
    return decision.action == "ask", decision.even_with_yolo


# ---- paths ---------------------------------------------------------------------------------------

FOLDERS = "an edit in these folders asks"
EVEN_WITH_YOLO = "and even with `--yolo`"
TEXTS = "an edit of these files asks: texts for agents"
FILES = (TEXTS, "of shells and sessions", "of git, editors and the system")
SECRET_FILES = ("files that hold secrets: environments", "keys", "of programs")


@pytest.mark.parametrize("name", members(FOLDERS))
def test_an_edit_in_a_folder_that_gives_orders_asks(name: str) -> None:
    is_even_with_yolo = name in LISTS[EVEN_WITH_YOLO]
    for path in (f"{name}/x", f"sub/{name.upper()}/deep/x", f"/ws/{name}"):
        assert asks("edit", path) == (True, is_even_with_yolo), path
    assert asks("edit", f"x{name}/x") == asks("edit", f"{name}x/x") == (False, False)


@pytest.mark.parametrize("pattern", members(*FILES))
def test_an_edit_of_a_file_that_gives_orders_asks(pattern: str) -> None:
    for path in (of_name(pattern), f"sub/{of_name(pattern).upper()}"):
        assert asks("edit", path) == (True, False), path
    assert asks("edit", f"{of_name(pattern)}/x.py") == (False, False)


@pytest.mark.parametrize("pattern", members(*SECRET_FILES, "tokens and credentials"))
def test_a_file_of_secrets_is_known_by_its_name(pattern: str) -> None:
    for path in (of_name(pattern), f"sub/{of_name(pattern).upper()}"):
        assert holds_secrets(path), path
        assert asks("read", path) == (True, False), path


@pytest.mark.parametrize("folder", members("all files in these folders"))
def test_all_files_of_a_folder_of_secrets_count(folder: str) -> None:
    assert holds_secrets(f"{folder}/x")
    assert holds_secrets(f"/home/me/{folder.upper()}/deep/x")
    assert not holds_secrets(f"x{folder}/x")
    assert not holds_secrets(f"{folder}x/x")
    for name in ("x.pub", "known_hosts", "authorized_keys"):
        assert not holds_secrets(f"{folder}/{name}")


@pytest.mark.parametrize("pattern", members("but none of these"))
def test_an_example_and_a_public_key_are_no_secrets(pattern: str) -> None:
    for path in (of_name(pattern), f"sub/{of_name(pattern)}"):
        assert not holds_secrets(path)


# ---- variables -----------------------------------------------------------------------------------

ENDS = "has one of these at its end or before a `_`"
STEERING = "what steers a shell or a program"


@pytest.mark.parametrize("word", members("variables that commands do not get: a name that holds"))
def test_a_command_gets_no_variable_with_a_secrets_name(
    monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    names = [word, f"MY_{word}_1", f"my{word.lower()}"]
    for name in names:
        monkeypatch.setenv(name, "x")
    assert not environment().keys() & {*names}


@pytest.mark.parametrize("word", members(ENDS))
def test_a_command_gets_no_variable_that_ends_as_a_secrets_does(
    monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    names = [f"MY{word}", f"MY{word}_1"]
    for name in (*names, f"MY{word}X"):
        monkeypatch.setenv(name, "x")
    assert not environment().keys() & {*names}
    assert f"MY{word}X" in environment()


@pytest.mark.parametrize("name", members(STEERING))
def test_a_command_gets_no_variable_that_steers_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "x")
    monkeypatch.setenv(f"MY_{name}", "x")
    assert name not in environment()
    assert f"MY_{name}" in environment()


@pytest.mark.parametrize("name", members("variables that commands do get"))
def test_a_command_gets_what_only_looks_like_a_secret(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "x")
    assert environment()[name] == "x"


@pytest.mark.parametrize("name", members("replaced for commands, so that nothing waits"))
def test_a_command_gets_nothing_that_would_wait_for_somebody(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "mine")
    assert environment()[name] in (
        "cat",
        "true",
        "false",
        "dumb",
        "0",
        "never",
        "1",
        "noninteractive",
    )


# ---- settings that a project may not make --------------------------------------------------------

# A value of each that is valid and not the default
VALUES = {
    "CODER_CONTEXT_WINDOW": "7",
    "CODER_REASONING": "high",
    "CODER_IDLE_TIMEOUT": "7",
    "CODER_FIRST_BYTE_TIMEOUT": "7",
    "CODER_RETRY_BASE": "7",
    "CODER_MAX_STEPS": "7",
    "CODER_MAX_SECONDS": "7",
    "CODER_PRICES": "prices.json",
    "CODER_PROFILE": '{"tool_name": true}',
    "CODER_EXTRA_BODY": '{"top_k": 7}',
    "CODER_HEADERS": '{"x-key": "7"}',
    "CODER_MARKDOWN": "off",
    "CODER_BELL": "off",
    "CODER_TITLES": "off",
    "CODER_CLIENT": "openai",
    "CODER_ALLOW_HTTP": "on",
    "CODER_SANDBOX": "off",
    "CODER_SANDBOX_NETWORK": "off",
}
TABLE = [quoted(row[0])[0] for row in rows("docs/settings.md", "setting")]
OF_A_FOLDER = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_MODEL")


@pytest.fixture
def project(ws: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose .env names server, key and model."""
    for name in (*TABLE, "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    (ws / "prices.json").write_text('{"m": {"input": 1, "output": 1}}')
    (ws / ".env").write_text("OPENAI_BASE_URL=https://x/v1\nOPENAI_API_KEY=k\nOPENAI_MODEL=m\n")
    return ws


@pytest.mark.parametrize("name", [name for name in TABLE if name not in OF_A_FOLDER])
def test_a_projects_env_sets_key_server_and_model_alone(
    project: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(project)
    field = name.partition("_")[2].lower()
    before = load(project)
    with open(project / ".env", "a") as file:
        file.write(f"{name}='{VALUES[name]}'\n")
    after = load(project)
    assert getattr(after, field) == getattr(before, field)
    assert f"Ignored in this folder: {name} in .env." in " ".join(after.notes)
    server = {"OPENAI_API_KEY": "k", "OPENAI_MODEL": "m"}
    for each, value in (server | {name: VALUES[name]}).items():
        monkeypatch.setenv(each, value)
    assert getattr(load(project), field) != getattr(before, field), "the value is one"


def test_a_projects_env_may_set_what_the_document_says(project: Path) -> None:
    found = load(project)
    assert found.base_url == "https://x/v1"
    assert found.api_key == "k"
    assert found.model == "m"
    assert "(only the key, the server and the model)" in PAGES["docs/settings.md"]
    assert {*TABLE} == {*SETTINGS}, "one row each in docs/settings.md"
    assert {*VALUES} | {*OF_A_FOLDER} == {*TABLE}, "add a value to VALUES"


NOTHING = re.findall(
    "`([^`]+)`",
    PAGES["docs/settings.md"].partition("configures coder: ")[2].partition(" do nothing")[0],
)[:-1]


def test_what_lies_in_a_projects_folder_of_ours_is_reported(project: Path) -> None:
    assert len(NOTHING) == 5
    for name in NOTHING:
        (project / ".coder" / name).mkdir(parents=True)
        assert f"Ignored in this folder: .coder/{name}." in " ".join(load(project).notes)
        (project / ".coder" / name).rmdir()


# ---- keys ----------------------------------------------------------------------------------------

BODY = "Ab3dEf6hIj9lMn2pQr5tUv8x"
SAMPLES = {"AKIA": "AKIA1234567890ABCDEF", "ASIA": "ASIA1234567890ABCDEF"}
SAMPLES |= {"eyJ": f"eyJ{BODY}.eyJ{BODY}.{BODY}", "AIza": f"AIza{BODY}{BODY}"}


@pytest.mark.parametrize("prefix", members("removed from an export: what begins with"))
def test_a_key_is_known_by_its_shape(prefix: str) -> None:
    key = SAMPLES.get(prefix, prefix + BODY)
    for text in ("{}", "it is {}, you see", 'x = f("{}")\n', "a\n{}\nb"):
        assert without_secrets(text.format(key)) == text.format("[removed]"), key
    assert without_secrets(f"a{key}") == f"a{key}", "in the middle of a word"


@pytest.mark.parametrize("kind", ["", "RSA ", "EC ", "OPENSSH ", "ENCRYPTED "])
def test_a_private_key_is_known_by_its_first_line(kind: str) -> None:
    key = f"-----BEGIN {kind}PRIVATE KEY-----\n{BODY}\n"
    assert without_secrets(f"a\n{key}-----END {kind}PRIVATE KEY-----\nb") == "a\n[removed]\nb"
    assert without_secrets(f"a\n{key}cut") == "a\n[removed]"


@pytest.mark.parametrize("word", members("the value after a name with"))
def test_a_secret_is_known_by_the_name_before_it(word: str) -> None:
    for name in (word, f"my_{word}_1", word.upper()):
        for text in ('{}: "{}"', '{{"{}": "{}"}}', "{} = '{}'"):
            cleaned = without_secrets(text.format(name, "hunter2hunter2"))
            assert cleaned == text.format(name, "[removed]")


@pytest.mark.parametrize("scheme", members("the value of the header `Authorization`, after"))
def test_the_value_of_a_header_is_a_secret(scheme: str) -> None:
    for text in ("Authorization: {} {}", '"authorization": "{} {}"'):
        assert without_secrets(text.format(scheme, "abc")) == text.format(scheme, "[removed]")


def test_a_password_in_an_address_and_a_variable_of_a_secrets_name_are_removed() -> None:
    assert without_secrets("git+https://me:pw@host/x") == "git+https://me:[removed]@host/x"
    assert without_secrets("A=1 MY_TOKEN=abc B=2") == "A=1 MY_TOKEN=[removed] B=2"
    assert without_secrets("export DB_PASSWORD='a b'") == "export DB_PASSWORD=[removed]"


@pytest.mark.parametrize("key", members("keys that nobody checks, and that are shown"))
def test_what_stands_for_a_key_is_not_hidden(key: str) -> None:
    for each in (key, key.upper(), f" {key} "):
        assert Redactor(each).text(f"it is {each}") == f"it is {each}"
    assert Redactor(f"{key}-{BODY}").text(f"{key}-{BODY}") == HIDDEN


KEY = f"sk-CANARY-{BODY}"


def test_no_request_holds_the_key_wherever_it_stood(tmp_path: Path, ws: Path) -> None:
    """The instructions of a project are in the system prompt."""
    for name in ("AGENTS.md", "file"):
        (ws / name).write_text(f"The key is {KEY}.\n")
    calls = [
        ("bash", {"command": "cat file"}),
        ("read", {"path": "file"}),
    ]
    with serve(Reply(calls=calls), Reply("Done.")) as server:
        with OneShot(tmp_path, server, "-y", f"not {KEY}", OPENAI_API_KEY=KEY) as run:
            assert run.end() == 0, run.err
        first, second = (contents(body["messages"]) for body in server.requests)
        assert KEY not in json.dumps(server.requests)
    assert f"The key is {HIDDEN}." in first[0]
    assert f"not {HIDDEN}" in first[1]
    assert [HIDDEN in str(each) for each in second] == [True, True, False, True, True]


@pytest.mark.parametrize("name", ["write", "edit", "apply_patch"])
def test_what_stands_for_a_key_is_not_written_in_its_place(ws: Path, name: str) -> None:
    patch = f"*** Begin Patch\n*** Add File: new\n+{HIDDEN}\n*** End Patch"
    arguments = {
        "write": {"path": "new", "content": HIDDEN},
        "edit": {"path": "file", "old_string": "old", "new_string": HIDDEN},
        "apply_patch": {"patch": patch},
    }
    (ws / "file").write_text("old")
    toolset = Toolset([write, edit, apply_patch], cwd=ws)
    with serve(
        Reply(calls=[(name, arguments[name])]),
        Reply("Done."),
    ) as server:
        events, _ = ask(server, tools=toolset, hooks=Redaction(Redactor(KEY)))
        assert "would put it in the key's place" in results(server)[0]
    assert [event.is_error for event in all_of(ToolEnd, events)] == [True]
    assert (ws / "file").read_text() == "old"
    assert os.listdir(ws) == ["file"]


# ---- commands ------------------------------------------------------------------------------------

SHOWING = "these ask if a tracked file may hold secrets, or a rule limits reading"
SECTIONS = "what a repository's configuration may hold for git to run unasked: sections"


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """For all tests that only ask what would become of a command."""
    folder = tmp_path_factory.mktemp("lists")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
        for name in ("AUTHOR_NAME", "COMMITTER_NAME", "AUTHOR_EMAIL", "COMMITTER_EMAIL"):
            patch.setenv(f"GIT_{name}", "me@here")
        shell(folder, REPOSITORY)
        yield folder / "repo"


@pytest.mark.parametrize("command", members("commands that run unasked"))
def test_a_command_that_only_reads_runs_unasked(repo: Path, command: str) -> None:
    if command.startswith("rg") and not shutil.which("rg"):
        pytest.skip("there is no ripgrep")
    assert free(repo, command)
    assert not free(repo, f"{command} > x")
    if command.split()[0] not in ("true", "pwd", "echo"):  # which read nothing
        assert not free(repo, f"{command} /etc/passwd")


@pytest.mark.parametrize("command", members("options with which they ask"))
def test_a_command_with_an_option_that_does_more_asks(repo: Path, command: str) -> None:
    assert not free(repo, command)


@pytest.mark.parametrize("command", members(SHOWING))
def test_a_command_that_shows_files_asks_if_one_may_be_secret(
    ws: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    if command.startswith("rg") and not shutil.which("rg"):
        pytest.skip("there is no ripgrep")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    shell(ws, REPOSITORY)
    assert free(ws / "repo", command)
    assert not free(ws / "repo", command, read={"private/*": "deny"})
    shell(ws / "repo", "echo x > sub/server.pem; git add .; git commit -qm x")
    assert not free(ws / "repo", command)


@pytest.mark.parametrize("word", members("words that make a line not plain: keywords"))
def test_a_keyword_makes_a_line_not_plain(word: str) -> None:
    for line in (f"{word} a", f"a; {word} b", f"'{word}' a"):
        assert parse(line) is None
    assert parse(f"a {word}") == [["a", word]]


@pytest.mark.parametrize("word", members("builtins that change or run what follows"))
def test_a_builtin_that_runs_something_else_makes_a_line_not_plain(word: str) -> None:
    assert parse(f"{word} a") is None
    assert parse(f"a {word}") == [["a", word]]


@pytest.mark.parametrize("word", members("builtins that evaluate a name with a `$` or a backquote"))
def test_a_builtin_that_evaluates_a_name_makes_a_line_not_plain(word: str) -> None:
    for name in ("'a[$(touch x)]'", "'a[`touch x`]'"):
        assert parse(f"{word} {name}") is None
    assert parse(f"{word} a") == [[word, "a"]]


def configured(repo: Path, text: str) -> bool:
    """Whether `git status` runs unasked if this is added to the repository's configuration."""
    config = repo / ".git" / "config"
    before = config.read_text()
    try:
        config.write_text(before + text)
        return free(repo, "git status")
    finally:
        config.write_text(before)


@pytest.mark.parametrize("section", members(SECTIONS))
def test_a_harmless_section_of_a_configuration_lets_git_run(repo: Path, section: str) -> None:
    assert configured(repo, f"[{section}]\n\turl = x\n")


@pytest.mark.parametrize("name", members("names"))
def test_a_harmless_setting_of_a_repository_lets_git_run(repo: Path, name: str) -> None:
    assert configured(repo, f"[core]\n\t{name} = x\n")
    assert not configured(repo, f"[core]\n\t{name} = x\\\n")


# Settings of git that start a program or read elsewhere, by git-config(1)
STARTING = """core.fsmonitor core.sshCommand core.pager core.editor core.askPass core.gitProxy core.worktree
    core.attributesFile core.excludesFile core.alternateRefsCommand core.sparseCheckout diff.external
    diff.x.command diff.x.textconv filter.x.clean filter.x.smudge filter.x.process merge.x.driver
    include.path includeIf.x.path extensions.partialClone extensions.worktreeConfig gpg.program
    gpg.ssh.program credential.helper sequence.editor alias.status pager.status interactive.diffFilter
    remote.x.promisor remote.x.uploadpack remote.x.receivepack remote.x.vcs url.x.insteadOf uploadpack.packObjectsHook
    submodule.x.update difftool.x.cmd mergetool.x.cmd trace2.eventTarget log.showSignature status.submoduleSummary"""


@pytest.mark.parametrize("name", STARTING.split())
def test_a_setting_that_may_start_a_program_makes_git_ask(repo: Path, name: str) -> None:
    section, _, key = name.rpartition(".")
    section, dot, inner = section.partition(".")
    head = f'{section} "{inner}"' if dot else section
    assert not configured(repo, f"[{head}]\n\t{key} = true\n")


# ---- the kinds of permissions --------------------------------------------------------------------

ASKING = {
    "edit": "file",
    "bash": "make",
    "mcp": "server__tool",
    "external_directory": "/etc",
    "doom_loop": "ls",
    "unconfined": "ls",
}


@pytest.mark.parametrize("kind", ASKING)
def test_what_no_rule_allows_is_asked(kind: str) -> None:
    assert (
        Permissions()
        .decide(
            kind,
            ASKING[kind],
            Path("/ws"),
        )
        .action
        == "ask"
    )


@pytest.mark.parametrize("kind", ["read", "edit"])
@pytest.mark.parametrize(
    ("tool", "of"),
    [(each, "read") for each in (read, ls, grep, glob)]
    + [(each, "edit") for each in (edit, write, apply_patch)],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_rule_for_a_kind_is_for_all_tools_of_it(kind: str, tool: Tool, of: str) -> None:
    given = Permissions(rules_of({kind: "deny"}))
    assert (given.offered([tool]) == []) == (kind == of)


# ---- what a screen does not show -----------------------------------------------------------------

UNSEEN = {
    "controls": [
        *range(9),
        *range(0xB, 0x20),
        *range(0x7F, 0xA0),
    ],
    "directions": [*range(0x202A, 0x202F), *range(0x2066, 0x206A)],
    "without width": [0xAD, 0x180E, 0x200B, *range(0x2060, 0x2066), 0xFEFF],
    "separators": [0x2028, 0x2029],
    "deprecated formats": [*range(0x206A, 0x2070), 0xFFF9, 0xFFFA, 0xFFFB],
    "tags": [*range(0xE0000, 0xE0080)],
}
BLANK = {
    "fillers": [0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0, 0x2800],
    "variations": [
        *range(0x180B, 0x1810),
        *range(0xFE00, 0xFE10),
        *range(0xE0100, 0xE01F0),
    ],
    "objects": [0xFFFC, 0x13441, 0x13442, 0x16FE4, 0x1D159],
}


@pytest.mark.parametrize("kind", [*UNSEEN, *BLANK])
def test_what_cannot_be_seen_is_shown_as_a_code_point(kind: str) -> None:
    for number in (UNSEEN | BLANK)[kind]:
        assert escape_invisible(f"a{chr(number)}b") == f"a<U+{number:04X}>b"


@pytest.mark.parametrize("kind", UNSEEN)
def test_what_drives_or_reorders_a_terminal_is_dropped(kind: str) -> None:
    for number in UNSEEN[kind]:
        text = f"a{chr(number)} b"
        assert strip_controls(text).replace("?", "") in ("a b", "ab", "a", " b", ""), number
        assert chr(number) not in strip_controls(text), number
