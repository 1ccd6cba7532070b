"""The git guard: what a command changes in git's own files and in coder's is put back and reported
(SBX-03, SBX-04)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coder.permissions.git_guard import GitGuard, describe
from coder.permissions.sandbox import Sandbox, writable_git_folders
from tests.harness import shell, table


def changed(guard: GitGuard, line: str, folder: Path) -> str:
    """What the guard reports of a command, in words."""
    assert guard.begin() == {}
    shell(folder, line)
    return describe(guard.end(), folder)


def state_of(folder: Path) -> dict[str, Any]:
    """What git would run or obey in a repository."""
    names = "config config.worktree hooks/**/* commondir info/attributes remotes/* branches/*"
    paths = [path for name in names.split() for path in folder.glob(f".git/{name}")]
    files = [path for path in paths if path.is_symlink() or not path.is_dir()]
    return {str(each): facts(each) for each in files if each.suffix != ".sample"}


def facts(path: Path) -> tuple[int, object]:
    if path.is_symlink():
        return 0, os.readlink(path)
    return path.stat().st_mode, path.is_file() and path.read_bytes()


PUT_BACK = table(r"""
echo evil > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit; git config core.fsmonitor ./e ~
 => .git/config (changed), .git/hooks/pre-commit (new)
echo evil >> .git/hooks/commit-msg => .git/hooks/commit-msg (changed)
chmod 600 .git/hooks/commit-msg => .git/hooks/commit-msg (changed)
touch .git/hooks/{1..1100}.sample .git/hooks/pre-commit => .git/hooks/pre-commit (new)
rm -r .git/hooks => .git/hooks/commit-msg (removed)
ln -s ../../evil .git/hooks/post-checkout => .git/hooks/post-checkout (new)
ln -sf ../../evil .git/hooks/commit-msg => .git/hooks/commit-msg (changed)
rm .git/hooks/commit-msg; mkdir .git/hooks/commit-msg => .git/hooks/commit-msg (removed)
mkdir -p .git/hooks/x.d/a; touch .git/hooks/x.d/a/b => .git/hooks/x.d/a/b (new)
mv .git/hooks .git/h; mkdir evil; touch evil/commit-msg; ln -s ../evil .git/hooks ~
 => .git/hooks (new), .git/hooks/commit-msg (removed)
rm .git/config; mkfifo .git/config => .git/config (changed)
printf '[core]\n\tpager = evil\n' > .git/config.worktree => .git/config.worktree (new)
mkdir e; cp -r .git/* e; echo ../e > .git/commondir => .git/commondir (new)
echo '* filter=evil' >> .git/info/attributes => .git/info/attributes (new)
mkdir .git/remotes; echo URL: evil > .git/remotes/origin => .git/remotes/origin (new)
head -c 9M /dev/zero >> .git/config => .git/config (changed)
git config alias.st 'grep --open-fil=evil x' => .git/config (changed)
git remote set-url origin ./evil.git; git remote add other x; git branch -qu main side => .git/config (changed)
rm .git/config; ln -s $'[core]\n\tbare = false\n' .git/config => .git/config (changed)
touch $'.git/hooks/a\nb' => .git/hooks/a\nb (new)
cd .git/hooks; touch f{1..1100}; cd ../.. => .git/hooks (new), .git/hooks/commit-msg (removed)
mkdir .coder; echo evil > .coder/permissions.json => .coder/permissions.json (new)
git init -q --bare x; mv x/* . => HEAD (new)
""")


@pytest.mark.case("SBX-04")
def test_any_change_of_what_git_would_run_or_obey_is_put_back(repository: Path) -> None:
    before = state_of(repository)
    guard = GitGuard(repository)
    for line, names in PUT_BACK:
        found = changed(guard, line, repository)
        assert names in found, (line, found)
        assert "not put back" not in found, (line, found)
        assert state_of(repository) == before, line


LINKS = table(r"""
rm .git/hooks/pre-push => .git/hooks/pre-push (removed)
ln -sfn ../../evil .git/hooks/pre-push => .git/hooks/pre-push (changed)
rm .git/hooks/pre-push; echo evil > .git/hooks/pre-push => .git/hooks/pre-push (changed)
rm .git/hooks/pre-push; mkdir .git/hooks/pre-push => .git/hooks/pre-push (removed)
rm -r .git/hooks => .git/hooks/commit-msg (removed), .git/hooks/pre-push (removed)
""")


@pytest.mark.parametrize("target", ["../../tools/hook", "/nowhere/at/all"])
def test_a_link_is_put_back_as_a_link(repository: Path, target: str) -> None:
    """To where it led, whether something is there or not; and what it led to stays as it is."""
    (repository / "tools").mkdir()
    (repository / "tools" / "hook").write_text("mine")
    (repository / ".git/hooks/pre-push").symlink_to(target)
    before = state_of(repository)
    guard = GitGuard(repository)
    for line, names in LINKS:
        assert changed(guard, line, repository) == names, line
        assert os.readlink(repository / ".git/hooks/pre-push") == target, line
        assert state_of(repository) == before, line
    assert (repository / "tools" / "hook").read_text() == "mine"


DAILY = table("""
git init -q n && cd n && git add -A && git commit -qm x --allow-empty && git log --format=%s => x
git checkout -qb side && git stash -q; git switch -q main; git rebase -q side && echo yes => yes
git clone -q . copy && git -C copy remote -v | wc -l => 2
git worktree add -q tree && cd tree && git commit -qm t --allow-empty && git log -1 --format=%s => t
git gc -q && git tag v1 && git notes add -m n && git tag => v1
mv .git away; echo ok => ok
mv away .git; git tag => v1
rm -rf .git && echo gone => gone
""")


def test_the_daily_work_of_git_passes(repository: Path) -> None:
    guard = GitGuard(repository)
    for line, output in DAILY:
        assert guard.begin() == {}
        assert shell(repository, line) == output, line
        assert guard.end() == {}, line


def test_a_repository_that_a_command_makes_stays_without_what_would_run(ws: Path) -> None:
    made = "git init -q && git commit -qm x --allow-empty"
    assert changed(GitGuard(ws), made, ws) == ""
    assert shell(ws, "git log --format=%s") == "x"
    shutil.rmtree(ws / ".git")
    line = f"{made}; git config core.pager evil; touch .git/hooks/pre-push"
    assert changed(GitGuard(ws), line, ws) == ".git/config (new), .git/hooks/pre-push (new)"
    assert shell(ws, "git log --format=%s") == "x"
    assert "evil" not in shell(ws, "git config --list")


def test_putting_back_leaves_other_places_as_they_are(repository: Path) -> None:
    target = repository.parent / "beside"
    other = repository / "other"
    guard = GitGuard(repository)
    (target / "pre-push").write_text("the user's")
    shell(repository, "git init -q other; echo theirs > other/.git/hooks/pre-push")
    before = state_of(other)
    for line, name in (
        (f"rm -r .git/hooks; ln -s {target} .git/hooks", ".git/hooks (new)"),
        (f"mv .git old; ln -s {target} .git", ".git (new)"),
        ("mv old .git; mv .git old; echo gitdir: other/.git > .git", ".git (new)"),
    ):
        assert name in changed(guard, line, repository)
    assert not os.path.lexists(repository / ".git")
    assert state_of(other) == before
    assert [each.name for each in target.iterdir()] == ["pre-push"]


def test_what_is_too_large_is_reported_at_the_start_and_left_alone(repository: Path) -> None:
    hooks = repository / ".git" / "hooks"
    (hooks / "pre-push").write_bytes(b"#" * (9 << 20))
    notice = Sandbox(repository).notices[-1]
    assert notice.startswith("Not guarded")
    assert notice.endswith(": .git/hooks (too much).")
    assert changed(GitGuard(repository), "rm .git/hooks/pre-push", repository) == ""
    assert (hooks / "commit-msg").exists()


def test_commands_side_by_side_are_compared_with_the_state_before_both(repository: Path) -> None:
    """The second begins after the first has made its change, and ends before it."""
    guard = GitGuard(repository)
    config = repository / ".git" / "config"
    expected = {str(config): "changed"}
    guard.begin()
    shell(repository, "git config core.pager evil")
    assert guard.begin() == {}
    assert guard.end() == expected
    shell(repository, "git config core.editor evil")
    assert guard.begin() == guard.end(undo=False) == guard.since() == {}, "it may be the other's"
    assert guard.end() == expected
    assert "evil" not in config.read_text()


@pytest.mark.case("SBX-03")
def test_our_own_folders_are_put_back_as_they_were(ws: Path) -> None:
    config = ws / ".config" / "coder"
    git = ws / ".local" / "snapshots" / "git" / "config"
    files = [config / name for name in ("plugins/own.py", ".env", "hooks.json")]
    for path in [*files, ws / ".coder" / "permissions.json"]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
        path.chmod(0o600)

    def state() -> dict[Path, object]:
        return {each: facts(each) for each in ws.rglob("*") if not each.is_dir()}

    before = state()
    guard = GitGuard(ws, [config, git])
    line = (
        f"echo evil >> .coder/permissions.json; mkdir -p {git.parent}; echo evil > {git}; "
        "cd .config/coder; echo evil >> .env; rm hooks.json; chmod 666 plugins/own.py; "
        "ln -s /etc/passwd plugins/b.py"
    )
    found = changed(guard, line, ws)
    assert state() == before
    expected = "/.env (changed)", "hooks.json (removed)", "plugins/own.py (changed)", "b.py (new)"
    for name in (*expected, "git/config (new)", ".coder/permissions.json (changed)"):
        assert name in found


def test_what_coder_itself_writes_next_to_its_configuration_is_no_change_of_a_command(
    ws: Path,
) -> None:
    """With one folder for data and configuration, both in the workspace."""
    folder = ws / "coder"
    (folder / "snapshots").mkdir(parents=True)
    (folder / "hooks.json").write_text("{}")
    names = ("sessions.db", "sessions.db-wal", "snapshots/1.db", "history")
    for name in names:
        (folder / name).write_bytes(b"0" * 4_000_000)
    guard = GitGuard(ws, [folder], folder)
    assert guard.unguarded == []
    line = (
        f"cd coder; for name in {' '.join(names)}; do echo 2 > $name; done; echo evil > hooks.json"
    )
    assert changed(guard, line, ws) == "coder/hooks.json (changed)"
    assert (folder / "hooks.json").read_text() == "{}"
    assert [(folder / name).read_text() for name in names] == ["2\n"] * 4
    guard.close()


# ---- folders of git elsewhere, and folders made to break the comparison --------------------------


@pytest.mark.parametrize("planted", ["gitdir", "commondir", "link", "submodule"])
def test_a_git_file_is_not_believed_alone(ws: Path, planted: str) -> None:
    """What is in the workspace came from anybody, and must not open another folder for writing."""
    home = ws.parent / "beside" / "repo"
    shell(ws, f"git init -q {home}")
    if planted == "gitdir":
        (ws / ".git").write_text(f"gitdir: {home}/.git\n")
    elif planted == "link":
        (ws / ".git").symlink_to(home / ".git")
    else:
        inner = ws / "inner" / "worktrees" / "x" if planted == "commondir" else ws / "inner"
        inner.mkdir(parents=True)
        (inner / "HEAD").write_text("ref: refs/heads/main\n")
        (inner / "gitdir").write_text(str(ws / ".git"))
        (inner / "config").write_text(f"[core]\n\tworktree = {ws}\n")
        (inner / "commondir").write_text(str(home / ".git"))
        (ws / ".git").write_text(f"gitdir: {inner}\n")
    assert all(folder.is_relative_to(ws) for folder in writable_git_folders(ws))


STRANGE = [
    "mkdir .git; ln -s $(printf a%.0s {1..300}) .git/HEAD",  # too long a name
    "echo gitdir: $(printf a%.0s {1..5000}) > .git",
    "printf 'gitdir: a\\0b' > .git",
    "ln -s .git .git",
    "git init -q; printf 'a\\0b' > .git/commondir",
    "mkdir g; echo x > g/HEAD; printf '[core]\\n\\tworktree = a\\0b\\n' > g/config;"
    "echo gitdir: g > .git",
    "mkdir .git; chmod 000 .git",
    "mkfifo .git",
]


def test_no_folder_breaks_the_guard(ws: Path) -> None:
    for number, line in enumerate(STRANGE):
        place = ws / str(number)
        place.mkdir()
        shell(place, line)
        assert changed(GitGuard(place), "true", place) == "", line
        assert all(each.is_relative_to(ws) for each in writable_git_folders(place)), line


@pytest.mark.parametrize("line", ["chmod 311 .git/hooks", "chmod 000 .git/hooks .git/info .git"])
@pytest.mark.skipif(
    os.geteuid() == 0 and not shutil.which("setpriv"),
    reason="needs setpriv",
)
def test_a_hook_does_not_hide_in_a_closed_folder(tmp_path: Path, line: str) -> None:
    """In a process for which modes count, root or not."""
    script = f"""
import os, subprocess
from pathlib import Path
from coder.permissions.git_guard import GitGuard
ws = Path(os.getcwd())
guard = GitGuard(ws)
guard.begin()
subprocess.run(["bash", "-c", "touch .git/hooks/pre-commit; {line}"])
changes = guard.end()
assert changes and guard.since() == {{}}, changes
print(sorted(each.name for each in (ws / ".git/hooks").iterdir()))
"""
    ws = tmp_path / "ws"
    shell(tmp_path, "git init -q --template= ws; mkdir ws/.git/hooks; touch ws/.git/hooks/mine")
    drop = ["--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]
    prefix = ["setpriv", *drop] if os.geteuid() == 0 else []
    argv = [*prefix, sys.executable, "-c", script]
    done = subprocess.run(
        argv,
        cwd=ws,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['mine']\n", done.stderr
