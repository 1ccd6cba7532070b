"""Which commands only read, and need no rule.

An option counts only if it is listed, since programs take shortened and joined ones; every other
word is taken for a path. A repository can make git start programs (settings, hooks, submodules) and
read elsewhere (links), so git is free only if all that could do so is known to be harmless. A
command that shows whole folders is not free if a file may hold secrets.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from coder.permissions.shell import Argv
from coder.tools.bash import find_program
from coder.tools.repository import git_folders, writable_git_folders
from coder.tools.secrets import environment, holds_secrets
from coder.tools.workspace import read_small_file, real

MAX_ENTRIES = 20_000  # that are looked at
LISTING_TIME = 10  # seconds for all that the rg of one line search to be listed
MAX_INDEX = 4 << 20  # bytes
MAX_SETTINGS = 1 << 16

BUILTINS = {"echo", "true", "pwd"}
# After `=` may be a file (wc --files0-from=, also cut short); ls -L and --dereference follow links
PATHS = r"-[A-KM-Za-z0-9]+|--(?!de|fi?l?e?s?$)[a-z-]+"
COUNT = r"(?:head|tail) -[nc] [+-]?\d+"
FIND = r"""(?x) -(?: i?name | i?path | type | maxdepth | mindepth | not | o | or | a | and | size
    | [acm]time | [acm]min | newer | prune | empty | print0? | ls ) | [-+]?\d+[a-zA-Z]?"""
# A letter of the second class has a value: the rest of the word, or the next one
RG = r"""(?x) -[abcFHiIlnNopPqsSUvwx0]* (?:[ABCdegjmMrtT].*)? | --(?: after-context | before-context
    | color | column | context | count | count-matches | files | files-with-matches | fixed-strings
    | files-without-match | glob | heading | iglob | ignore-case | invert-match | json | line-number
    | max-columns | max-count | max-depth | multiline | no-filename | no-heading | no-line-number
    | only-matching | pcre2 | regexp | smart-case | sort | stats | trim | type | type-not | vimgrep
    | with-filename | word-regexp )(?:=.*)?"""
GLOB = r"-\w*g|--i?glob"  # what fits one is searched though it is ignored
GIT = r"""(?x) -[abcdefgiklmnpqrstuvwzABCDEFGLMPRSUW]+ \d* %? | -\d+ | -u(?:no|all|normal) | --(?:
    abbrev | abbrev-commit | abbrev-ref | after | all | always | author | before | branch | branches
    | cached | check | color | committer | date | date-order | decorate | deleted | diff-filter
    | dirty | error-unmatch | exclude-standard | find-renames | first-parent | follow | format
    | function-context | git-dir | graph | grep | ignore-all-space | ignore-space-change | ignored
    | is-ancestor | is-inside-work-tree | max-count | merge-base | merges | modified | name-only
    | name-status | no-color | no-decorate | no-ext-diff | no-merges | no-patch | no-renames
    | no-textconv | numstat | oneline | others | patch | porcelain | pretty | quiet | raw | remotes
    | reverse | short | shortstat | show-prefix | show-toplevel | since | skip | stage | staged
    | stat | summary | tags | topo-order | unified | until | untracked-files | verify | word-diff
    )(?:=.*)?"""
STATUS = GIT.replace("(?x)", r"(?x) (?! -\w*v )")  # -v shows files
SIGNATURE = "--(?:format|pretty|sort)=.*(?:%[-+ ]?G|signature)"  # git starts gpg
LISTING = r"-l|--(?:list|contains|no-contains|merged|no-merged|points-at)(?:=.*)?"
REFS = rf"{LISTING}|--(?:all|remotes|show-current|verbose|no-color|(?:color|format|sort)=.*)"
SHOWING = {"git blame", "git diff", "git log", "git show", "rg"}  # also files that they do not name
# These change something unless they have no words, or an option to list
CHANGING = {"git branch", "git remote", "git tag"}
PIPED = {"cat", "head", "tail", "wc"}  # these read a pipe if no file is named
# The options of each command that is free
OPTIONS = {
    "cat": PATHS,
    "head": PATHS,
    "tail": PATHS,
    "wc": PATHS,
    "ls": PATHS,
    "find": FIND,
    "rg": RG,
    "git blame": GIT,
    "git branch": rf"-[arv]+|{REFS}",
    "git describe": GIT,
    "git diff": GIT,
    "git log": GIT,
    "git ls-files": GIT,
    "git ls-tree": GIT,
    "git merge-base": GIT,
    "git remote": "-v",
    "git rev-parse": GIT,
    "git show": GIT,
    "git status": STATUS,
    "git tag": rf"-n\d*|{REFS}",
}


def read_only(
    commands: Sequence[Argv],
    workspace: Path,
    is_closed: Callable[[str, Path], bool],
    is_limited: bool = False,
    listing_time: float = LISTING_TIME,
) -> list[bool]:
    """Tell which commands of a plain line only read, inside the workspace.

    The line may begin with a `cd` into a folder of it; that may fail, so what follows has to be
    free in both folders. After a command that does more, a path may lead elsewhere (`ln -s / x`).
    `is_closed`: is a file not shown unasked? `is_limited`: a rule says so for some.
    """
    top = real(workspace)
    line = _Line(
        top=top,
        folders=[top],
        is_closed=is_closed,
        is_limited=is_limited,
        deadline=time.monotonic() + listing_time,
    )
    free: list[bool] = []
    for argv in commands:
        if argv[0] == "cd" and not free:
            is_free = line.enter(argv[1:])
        else:
            is_free = line.is_free(argv)
        if not is_free:
            line.folders.clear()
        free.append(is_free)
    return free


@dataclass
class _Line:
    """One command line. `folders`: where its next command may run; none: it may be anywhere."""

    top: Path
    folders: list[Path]
    is_closed: Callable[[str, Path], bool]
    is_limited: bool
    deadline: float  # of all listings for rg

    def enter(self, words: list[str]) -> bool:
        """A `cd` begins the line. Is it one into a folder of the workspace?"""
        if len(words) != 1 or words[0].startswith("-") or ".." in PurePath(words[0]).parts:
            return False
        folder = real(self.top / words[0])
        self.folders.append(folder)
        return folder.is_relative_to(self.top)

    def is_free(self, argv: Argv) -> bool:
        name, words = _name_and_words(argv)
        if name not in OPTIONS:
            return name in BUILTINS
        command = _Command.of(name, words)
        if self._is_shadowed(name) or command.may_do_more():
            return False
        paths = command.paths()
        if not self._may_be_read(name, paths):
            return False
        if name in SHOWING and self.is_limited:
            return False
        if name == "rg":
            return not self._may_show_secrets(words, paths)
        if command.is_git:
            is_at_top = set(self.folders) == {self.top}
            return is_at_top and _is_harmless(self.top, shows=name in SHOWING)
        return True

    def _is_shadowed(self, name: str) -> bool:
        """Does PATH lead to a program of the workspace?"""
        program = name.partition(" ")[0]
        return find_program(program, self.top) != find_program(program, os.devnull)

    def _may_be_read(self, name: str, paths: list[str]) -> bool:
        """Are all these paths open files and folders of the workspace, in each possible folder?"""
        if not self.folders:  # then only a pipe
            return name in PIPED and not paths
        for folder in self.folders:
            for path in paths:
                target = real(folder / path)
                if not target.is_relative_to(self.top) or self.is_closed(str(target), self.top):
                    return False
        return True

    def _may_show_secrets(self, words: list[str], paths: list[str]) -> bool:
        """Tell whether rg may search a file that holds secrets, as rg itself lists what it
        searches.

        Hidden files are listed, too, since an .ignore file can bring them back. If there is no list
        until `deadline`, it may.
        """
        includes_ignored = any(re.match(GLOB, word) for word in words)
        most = "-uu" if includes_ignored else "--hidden"
        for folder in set(self.folders):
            files = self._list_files(folder, most, paths)
            if files is None or any(holds_secrets(file) for file in files):
                return True
        return False

    def _list_files(self, folder: Path, most: str, paths: list[str]) -> list[Path] | None:
        """The files that rg searches; None if the list is not whole.

        It starts where the command would and gets the same paths: which ignore files above count,
        and for what, depends on both. `most`: the option that says which files it lists.
        """
        # A word that is no path may be the pattern, and the folder is searched
        existing = [path for path in paths if os.path.exists(folder / path)]
        program = find_program("rg", self.top)
        try:
            done = subprocess.run(
                [program, most, "--files", "--null", "--", ".", *existing],
                cwd=folder,
                env=environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=max(0.01, self.deadline - time.monotonic()),
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        names = os.fsdecode(done.stdout).split("\0")[:-1]
        if done.returncode not in (0, 1) or len(names) > MAX_ENTRIES:
            return None
        # The names that it shows do not begin with the folder
        return [folder / name for name in names]


def _name_and_words(argv: Argv) -> tuple[str, list[str]]:
    """The name of a command in OPTIONS, such as `git log`, and the words after it."""
    name = argv[0]
    words = argv[1:]
    if name == "git":
        if words[:1] == ["--no-pager"]:
            words = words[1:]
        if words:
            return f"git {words[0]}", words[1:]
    return name, words


@dataclass
class _Command:
    """A command of OPTIONS, and its words."""

    name: str
    options: list[str]  # those that are listed
    others: list[str]  # before a `--`: paths, or options that are not listed
    after_dashes: list[str]

    @classmethod
    def of(cls, name: str, words: list[str]) -> _Command:
        if re.fullmatch(COUNT, " ".join([name, *words[:2]])):
            words = words[2:]
        end = words.index("--") if "--" in words else len(words)
        before = words[:end]
        if name.startswith("git "):  # -S, -G and -L with a value, which may be a path
            before = [re.sub("^-[SGL](?=.)", "", word) for word in before]
        listed = re.compile(OPTIONS[name])
        options = [word for word in before if listed.fullmatch(word)]
        others = [word for word in before if not listed.fullmatch(word)]
        return cls(name, options, others, words[end + 1 :])

    @property
    def is_git(self) -> bool:
        return self.name.startswith("git ")

    def may_do_more(self) -> bool:
        """May the command do more than read?"""
        if any(re.match(SIGNATURE, word) for word in self.options):
            return True
        if any(word.startswith("-") for word in self.others):
            return True
        is_listing = any(re.fullmatch(LISTING, word) for word in self.options)
        has_words = bool(self.others or self.after_dashes)
        return self.name in CHANGING and has_words and not is_listing

    def paths(self) -> list[str]:
        """The words that may be paths; the present folder if there is none."""
        paths = self.others + self.after_dashes
        if not paths and self.name not in PIPED:
            paths = ["."]
        if self.is_git:  # a file may come after a revision: HEAD:file
            return [part for path in paths for part in path.split(":")]
        return paths


# ---- repositories and folders ------------------------------------------------------------------

HEAD = rb"(?:ref: refs/[^\s~^:?*\[\\]+|[0-9a-f]{40})\n"
# The lines of a configuration that start no program and name no other place. A backslash would
# continue a line.
SETTINGS = rb"""(?xi) (?: (?: \[ (?: core | user | color | commit | fetch | gc | lfs | pull | push | rebase
    | (?:branch|remote)[ ]"[^"\\\n]*" ) \]
    | \t (?: filemode | bare | logallrefupdates | symlinks | ignorecase
    | precomposeunicode | autocrlf | eol | quotepath | name | email | url | pushurl | fetch | tagopt
    | prune | remote | pushremote | merge | rebase | description | vscode-merge-base | gh-resolved
    | github-pr-owner-number | auto | autostash | autosetupremote | default | ff | gpgsign | ui
    ) [ ]=[ ] [^\\\n]*
    | \trepositoryformatversion [ ]=[ ] [01] | \thookspath [ ]=[ ] [\w./-]+ ) \n )*"""
HOOKS = rb"(?i)\thookspath = (.*)"
MODES = (0o100644, 0o100755, 0o120000)


def _is_harmless(top: Path, shows: bool) -> bool:
    """Tell whether git reads in the repository of this folder alone and starts no program there.

    `shows`: the command prints files, none of which may hold secrets.
    """
    folder, shared = git_folders(top)
    if not _is_repository(folder, shared) or writable_git_folders(top) != [shared]:
        return False
    if not _is_whole(shared) or _leads_elsewhere(top, shared):
        return False
    try:
        tracked = _tracked_paths(read_small_file(folder / "index", MAX_INDEX) or b"")
    except ValueError:
        return False
    return not shows or not any(holds_secrets(path) for path in tracked)


def _is_repository(folder: Path, shared: Path) -> bool:
    """Tell whether git takes it for one; else it would take one around it, or none."""
    head = read_small_file(folder / "HEAD", MAX_SETTINGS) or b""
    needed = (shared / name / "." for name in ("objects", "refs"))
    return bool(re.fullmatch(HEAD, head)) and all(os.access(path, os.X_OK) for path in needed)


def _leads_elsewhere(top: Path, shared: Path) -> bool:
    """Tell whether settings, hooks or borrowed objects may start a program or read elsewhere."""
    config = read_small_file(shared / "config", MAX_SETTINGS) or b""
    if len(config) == MAX_SETTINGS or not re.fullmatch(SETTINGS, config):  # a cut one may go on
        return True
    # What git starts after it has written the index, and where it reads objects of others
    hooks = [shared / "hooks"]
    hooks += [top / os.fsdecode(path) for path in re.findall(HOOKS, config)]
    strange = [folder / "post-index-change" for folder in hooks]
    strange.append(shared / "objects/info/alternates")
    return any(os.path.lexists(path) for path in strange)


def _is_whole(folder: Path) -> bool:
    """Tell whether a repository is this folder alone: no link in it, and one index."""
    seen = 0
    for parent, folders, files in os.walk(folder):
        names = folders + files
        seen += len(names)
        if seen > MAX_ENTRIES:
            return False
        for name in names:
            if name.startswith("sharedindex.") or os.path.islink(os.path.join(parent, name)):
                return False
    return True


def _tracked_paths(index: bytes) -> list[str]:
    """The paths in an index (see gitformat-index(5)).

    Raises ValueError if it holds more than files and links, or is of another form than most.
    """
    if not index:
        return []
    if index[:7] != b"DIRC\0\0\0" or index[7] not in (2, 3) or len(index) == MAX_INDEX:
        raise ValueError("unknown form")
    paths: list[str] = []
    entry = 12  # where the next entry begins, after the header
    for _ in range(int.from_bytes(index[8:12])):
        mode = int.from_bytes(index[entry + 24 : entry + 28])
        flags = int.from_bytes(index[entry + 60 : entry + 62])
        is_extended = flags & 0x4000
        length = flags & 0xFFF  # of the path, at most 0xFFF
        if mode not in MODES:  # a submodule
            raise ValueError("unknown mode")
        start = entry + (64 if is_extended else 62)
        end = index.index(b"\0", start)
        if min(end - start, 0xFFF) != length:
            raise ValueError("unknown length")
        paths.append(os.fsdecode(index[start:end]))
        entry += (end - entry + 8) & ~7
    return paths
