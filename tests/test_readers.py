"""Commands that run unasked since they only read: git, rg and find, and how a repository attacks
that."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from coder.permissions.permissions import Permissions
from coder.permissions.read_only import read_only
from coder.permissions.rules import rules_of
from tests.harness import shell

REPOSITORY = """
mkdir -p repo/sub outside; cd repo; git init -q -b main; echo one > file; echo two > sub/file
git add .; git commit -qm first; git config remote.origin.url https://example/x.git
echo three >> file; touch -d 2020-01-01 sub/file
printf '#!/bin/sh\\necho x >> "%s/PWN"; cat\\n' "$PWD" > ../pwn; chmod +x ../pwn
"""


@pytest.fixture
def repo(ws: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    shell(ws, REPOSITORY)
    return ws / "repo"


def free(repo: Path, command: str, **rules: object) -> bool:
    return Permissions(rules_of(rules)).decide("bash", command, repo).action == "allow"


def lines(text: str) -> list[str]:
    """The commands of a text, with two blanks or a new line between them."""
    return re.split(r"\n|  ", text.strip())


READING = lines("""
git status  git status --short -b  git status -uno && git diff | head -50  git diff
git --no-pager diff --stat HEAD~2..HEAD -- sub file  git diff --cached -U5 -w file
git log --oneline -n 5  git log -5 -p --since=2.weeks --author x  git log -S 'f(x)' sub
git log -L1,5:file  git log --format='%h %s' --graph --all  git show HEAD  git blame file
git show HEAD:sub/file 2>/dev/null | tail -n 3  git rev-parse --abbrev-ref HEAD  git tag
git branch  git branch -vv  git branch -a --sort=-committerdate  git branch --show-current
git branch --list 'x*'  git branch --contains HEAD  git tag -l 'v*'  git remote -v
git ls-files --others --exclude-standard  git ls-files sub  git describe --tags --always
find . -name '*.py' -type f  find sub -maxdepth 2 -mtime -3 -not -path './x/*'  find
cd sub && find . -print0  git diff -- file
""")
needs_rg = pytest.mark.skipif(not shutil.which("rg"), reason="there is no ripgrep")
SEARCHING = lines("""
rg 'a b' sub  rg -n -C3 -tpy foo  rg --files | head  git log | rg x | wc -l
rg -in -e x -- sub  rg -- --pre x
""")
DOING = lines("""
git  git commit -m x  git diff --output=x  git diff --outp=x  git -c a.b=c status
git -C sub status  git diff --ext-diff  git diff --no-index a b  git diff /etc/passwd file
git diff -O/etc/passwd  git diff -Ofile  git log --textconv  git show --ext  git log --help
git blame -S /etc/passwd file  git blame -S/etc/passwd file  git blame --contents=/etc/passwd x
git status --pathspec-from-file=/etc/passwd  git ls-files -X /etc/passwd -o  git grep -Ox y
git ls-files --recurse-submodules  git diff --submodule=diff  git log --remerge-diff
git show :/x  git show HEAD:../x  git show HEAD:.env  git diff -- ../outside  git fetch
git branch new  git branch -d x  git branch -D x  git branch -m x  git branch -u x
git branch -f --list x  git branch --sort --list x  git branch -- --list  git tag x
git branch --edit-description  git branch -v x  git tag -d x  git tag -a  git tag -n x
git remote add x y  git remote show origin  git remote -v update  git stash  git stash list
git reflog expire  git status & touch x  git status > x  GIT_DIR=x git status  x/git status
cd sub && git status  touch x; git status  git --paginate log  git log --show-signature
git log --pretty='%h %-G?'  git branch --format='%(*signature)'  git status -sv
find . -exec touch x ';'  find . -delete  find . -fprint x  find . -ok touch ';'  find -L .
find /etc  find ..  find sub/../..  find . -execdir x  find . -fls x  find -files0-from x
find . -newer /etc/passwd  find . -okdir x  find . -fprintf x y  find . -fprint0 x
rg --pre ./x y  rg --pre=./x y  rg --hostname-bin x y  rg x /etc  rg x ..  rg -f /etc/x .
rg -f/etc/passwd .  rg -nf/etc/passwd .  rg -z x  rg --search-zip x  rg -L x  rg -u x
rg --hidden x  rg --follow x  rg -. x  rg --ignore-file /etc/passwd x  rg -uu x
rg -- -e /etc/passwd  rg --no-ignore x  rg --file=/etc/passwd .
""")


def test_what_only_reads_is_free_and_nothing_else(repo: Path) -> None:
    assert [command for command in READING if not free(repo, command)] == []
    assert [command for command in DOING if free(repo, command)] == []


ATTACKS = {  # how the repository is made; the command that falls for it
    "git config core.fsmonitor ../pwn": "git status",
    "git config CORE.FSMonitor ../pwn": "git diff",
    "printf '[core] fsmonitor = ../pwn' >> .git/config": "git status",
    "printf '[core]\\n\\turl = x\\\\\\n[core] #\\n\\tfsmonitor = ../pwn\\n' >> .git/config": "git status",
    "printf '[core]\\n fsmonitor = ../pwn\\n' > x; git config include.path ../x": "git status",
    "printf '\\temail = %*s\\n' $((65526 - $(wc -c < .git/config))) x >> .git/config;"
    "printf '[core]\\n\\tfsmonitor = ../pwn\\n' >> .git/config": "git status",
    "printf '[core]\\n fsmonitor = ../pwn\\n' > .git/config.worktree; git config core.repositoryFormatVersion 1;"
    "git config extensions.worktreeConfig true": "git status",
    "git config diff.external ../pwn": "git diff",
    "git config diff.x.command ../pwn; echo '* diff=x' > .gitattributes": "git diff",
    "git config diff.x.textconv ../pwn; echo '* diff=x' > .gitattributes": "git log -p",
    "git config diff.y.textconv ../pwn; echo '* diff=y' > .git/info/attributes": "git blame file",
    "git config filter.x.clean ../pwn; echo '* filter=x' > .gitattributes": "git status",
    "mkdir -p .git/hooks; cp ../pwn .git/hooks/post-index-change": "git status",
    "mkdir h; cp ../pwn h/post-index-change; git config core.hooksPath h": "git diff",
    "git init -q m; git -C m commit -q --allow-empty -m x; git add m 2>&1 | sed d;"
    "git -C m config core.fsmonitor ../../pwn": "git status",
    "mkdir c; cp -r .git/* c; git -C c config --file config core.fsmonitor ../pwn;"
    "echo ../c > .git/commondir": "git status",
    "mkdir .git/e; cp -r .git/* .git/e 2>&1 | sed d; git config --file .git/e/config core.fsmonitor ../pwn;"
    "printf 'e\\0' > .git/commondir": "git status",
    "mkdir '.git/. '; cp -r .git/* '.git/. '; git config --file '.git/. /config' core.fsmonitor ../pwn;"
    "printf '. ' > .git/commondir": "git status",
    "cp -r .git/* .; rm -r .git; git config --file config core.fsmonitor ../pwn;"
    "git config --file config core.bare false; git config --file config core.worktree .": "git status",
    "cp -r .git/* .; rm .git/HEAD; git config --file config core.fsmonitor ../pwn;"
    "git config --file config core.bare false; git config --file config core.worktree .": "git status",
    "cp -r .git ../outside/other; git config --file ../outside/other/config core.fsmonitor ../pwn;"
    "rm -r .git; echo 'gitdir: ../outside/other' > .git; git config core.worktree $PWD": "git status",
    "git rev-parse HEAD:file > sha; git config extensions.partialClone p; git config remote.p.url $PWD;"
    "git config core.repositoryFormatVersion 1; git config remote.p.promisor true;"
    "git config remote.p.uploadpack '../pwn </dev/null;:'; rm -rf .git/objects/$(cut -c1-2 sha)*": "git show HEAD:file",
}
if os.geteuid():  # root enters all folders
    ATTACKS[
        "cp -r .git/* .; git config --file config core.fsmonitor ../pwn; chmod 600 .git/objects;"
        "git config --file config core.bare false; git config --file config core.worktree ."
    ] = "git status"


@pytest.mark.parametrize("made", ATTACKS)
def test_no_repository_starts_a_program_unasked(repo: Path, made: str) -> None:
    assert free(repo, ATTACKS[made])
    shell(repo, made)
    (repo / "PWN").unlink(missing_ok=True)
    assert not free(repo, ATTACKS[made])
    output = shell(repo, ATTACKS[made])
    assert (repo / "PWN").exists(), f"git does not do this: {output}"


LEAKS = {  # how the repository shows what is elsewhere
    "git config core.worktree ../outside": "git diff",
    "mv .git ../outside/git; ln -s ../outside/git .git": "git show",
    "mv .git/objects ../outside/o; ln -s ../../outside/o .git/objects": "git show",
    "mv .git/objects ../outside/o; mkdir -p .git/objects/info; echo $PWD/../outside/o > "
    ".git/objects/info/alternates": "git show",
    "mv .git/refs/heads/main ../outside/m; ln -s ../../../../outside/m .git/refs/heads/main": "git log",
    "echo x > secret.pem; git add .; git commit -qm x": "git show",
    "echo x > sub/.env; git add .; git commit -qm x": "git log -p",
    "git update-index --split-index": "git diff",
    "git update-index --index-version 4": "git diff",
    "head -c 50 .git/index > x; mv x .git/index": "git diff",
    "git config core.repositoryFormatVersion 9; mkdir a; echo x > sub/.env": "git diff a sub",
    "printf '\\0\\1' | dd of=.git/index bs=1 seek=72 conv=notrunc 2>&1 | sed d": "git diff",
    "ln -s ../outside out": "find out/ -name x",
}
SHOWN_BY_RG = {
    "echo x > .env": "rg x",
    "mkdir -p sub/deep; echo x > sub/deep/credentials.json": "rg x sub",
    "mkdir venv; echo x > venv/a.pem": "rg x venv",
    "mkdir -p node_modules/a; echo x > node_modules/a/.env": "rg x",
    "mkdir -p node_modules/a; echo x > node_modules/a/server.key": "cd node_modules && rg x",
    "echo x > .env; echo '.env' > .gitignore; echo '!.env' > .ignore": "rg x",
    "mkdir venv; echo x > venv/a.pem; echo venv > .gitignore": "rg -g '*' x",
    "mkdir a; ln -s a b; echo x > a/x.key; echo 'a/*' > .gitignore": "rg x b",
    "echo x > sub/.env; echo '!.env' > .ignore; echo x > x": "rg x",  # also a file's name
    "echo x > .git/credentials": "rg -g '**' x",  # last, since it stays
}


@pytest.mark.parametrize("made", LEAKS)
def test_no_repository_shows_what_is_elsewhere_or_secret_unasked(repo: Path, made: str) -> None:
    assert free(repo, LEAKS[made]) or "out/" in LEAKS[made]
    shell(repo, made)
    assert not free(repo, LEAKS[made])


@needs_rg
def test_rg_is_free_if_all_that_it_would_search_may_be_read(repo: Path) -> None:
    assert free(repo, "rg -ng '*.py' x sub")
    shell(repo, "mkdir venv; echo x | tee venv/a.pem > .env; printf '.env\\nvenv\\n' > .gitignore")
    assert [command for command in SEARCHING if not free(repo, command)] == []
    for made, command in SHOWN_BY_RG.items():
        shell(repo, f"git clean -xfdq; {made}")
        assert not free(repo, command), made


@needs_rg
def test_rg_is_not_free_if_it_counts_a_file_as_ignored_from_elsewhere_only(repo: Path) -> None:
    """Before ripgrep 15, what the .gitignore of a folder above says depends on how a folder is
    named."""
    shell(repo, "echo x > sub/secrets.json; echo /sub/secrets.json > .gitignore")
    for command in ("rg x", "rg x sub", "rg x ./sub"):
        shown = shell(repo, f"{command} < /dev/null; true")
        assert free(repo, command) == ("secrets" not in shown), command


@pytest.mark.parametrize("rg", ["printf 'file\\0'; kill -9 $$", "sleep 0.1"])
def test_rg_is_not_free_if_its_list_is_cut_or_takes_too_long(
    repo: Path, monkeypatch: pytest.MonkeyPatch, rg: str
) -> None:
    """All of a line has one time: a hundred of them do not take a hundred times as long."""
    monkeypatch.setenv("PATH", f"{repo.parent}/programs:{os.environ['PATH']}")
    (repo.parent / "programs").mkdir()
    (repo.parent / "programs/rg").write_text(f"#!/bin/sh\n{rg}\n")
    (repo.parent / "programs/rg").chmod(0o755)
    commands = [["rg", "x"]] * 10
    assert not all(read_only(commands, repo, lambda *_: False, listing_time=0.5))


def test_a_linked_worktree_is_free_and_a_folder_of_a_repository_is_not(repo: Path) -> None:
    line = "git worktree add ../linked; git config core.hooksPath .husky/_; git config pull.rebase true"
    shell(repo, f"{line}; touch .env; git add .")
    assert free(repo.parent / "linked", "git log")
    assert free(repo, "git status")
    assert not free(repo / "sub", "git status")
    assert not free(repo.parent / "outside", "git status")


def test_a_tracked_link_or_program_is_free(repo: Path) -> None:
    shell(repo, "ln -s file link; echo : > run; chmod +x run; git add .; git commit -qm x")
    assert free(repo, "git diff")


def test_a_program_of_the_folder_is_not_free(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shell(repo, "mkdir bin; cp ../pwn bin/ls; cp ../pwn bin/git; ln -s /bin/sh bin/head")
    for folder, is_free in (
        (repo.parent, True),
        (repo / "bin", False),
    ):
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        assert [free(repo, each) for each in ("ls", "git status", "head file")] == [is_free] * 3
    assert free(repo, "cat file")


def test_rules_go_before_what_is_free(repo: Path) -> None:
    assert not free(repo, "git status", bash={"git *": "ask"})
    assert not free(repo, "git diff", read={"sub/*": "deny"})
    assert not free(repo, "rg x", read="ask")
    assert not free(repo, "find", read="ask")
    assert free(repo, "git status", read={"sub/*": "deny"})
    plan = Permissions(
        agent=rules_of(
            {
                "*": "ask",
                "read": "allow",
                "edit": "deny",
            }
        )
    )
    assert plan.decide("bash", "git diff", repo).action == "allow"
