"""Read bash command lines without running them; which commands only read, and need no rule.

    parse("ls -l 'a b' && pwd")      -> [["ls", "-l", "a b"], ["pwd"]]
    parse("ls $(touch x)")           -> None: not plain

A *plain* command line consists of words and of the separators `&&`, `||`, `;`, `|` and line end,
and bash runs exactly the simple commands that `parse` lists, or fewer (`&&`, `||`). All that bash
would expand, substitute, redirect to a file or read as a keyword is not plain. The strict lexer is
compared with real bash on random strings (tests/test_shell.py). Its time is linear.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path, PurePath
from typing import Any

from coder.tools.bash import find_program
from coder.tools.secrets import environment, holds_secrets
from coder.tools.workspace import git_folders, read_small_file, real, writable_git_folders

Argv = list[str]

# ---- plain command lines -------------------------------------------------------------------------

PLAIN = r"A-Za-z0-9_./,:=@%+^\-"  # of a word without quotes; also a tilde in the middle (HEAD~2)
SEPARATOR = r"&&|\|\||[;|\n]"
# redirections that make no file
NULL = r"(?:2>&1|[2&]?>[ ]?/dev/null|</dev/null)(?=[ \t;|\n]|&&|\Z)"
# Not possessive: before Python 3.11.5 that fails (gh-106052)
WORD = rf"""(?:[{PLAIN}]|(?<=[A-Za-z0-9^])~|'[^'\t\n]*'|"[^"$`\\!\t\n]*")+(?=[ \t;|&\n]|\Z)"""
TOKEN = re.compile(rf"({SEPARATOR})|{NULL}|({WORD})")  # both groups are empty for a redirection
LINE = re.compile(rf"(?:[ \t]*+(?:{SEPARATOR}|{NULL}|{WORD}))*+[ \t]*+")
PIECE = re.compile(r"'([^']*)'|\"([^\"]*)\"|([^'\"]+)")
# A program's name holds no blank: "ls /../x" is no call of ls.
PROGRAM = re.compile(r"[A-Za-z0-9_./,:@+][A-Za-z0-9_./,:@%+^\-]*+")
# Keywords; and builtins that change what the rest of the line means, or that run or assign what is
# in their arguments.
ODD = re.compile(
    r"if|then|elif|else|fi|for|in|case|esac|select|while|until|do|done|function|time|coproc"
    r"|alias|bind|builtin|command|compgen|complete|compopt|enable|fc|getopts|hash|history|jobs|let"
    r"|mapfile|printf|read|readarray|set|shopt|unalias"
)
# These evaluate the subscript of a variable's name: test -v 'a[$(touch x)]' runs touch.
EVALUATING = re.compile(r"declare|export|local|readonly|test|typeset|unset|wait")


def parse(command: str) -> list[Argv] | None:
    """Split a plain command line into its simple commands, in order; None where it is not plain.

    Redirections to and from the null device, and `2>&1`, are left out.
    """
    if not command.replace("\n", "").replace("\t", "").isprintable() or not LINE.fullmatch(command):
        return None
    commands: list[Argv] = []
    argv: Argv = []
    waits = False  # behind `&&`, `||` or `|`, where a command has to come
    for separator, word in TOKEN.findall(command):
        if word:
            argv.append("".join(map("".join, PIECE.findall(word))))
        elif argv and separator:
            commands.append(argv)
            argv, waits = [], separator not in (";", "\n")
        elif not argv and separator != "\n":
            return None
    if argv:
        commands.append(argv)
    if not commands or (waits and not argv):
        return None
    return commands if all(map(_is_plain_call, commands)) else None


def _is_plain_call(argv: Argv) -> bool:
    """Tell whether bash runs this program, and nothing else because of its arguments."""
    if ODD.fullmatch(argv[0]) or not PROGRAM.fullmatch(argv[0]):
        return False
    return not (EVALUATING.fullmatch(argv[0]) and re.search("[$`]", joined(argv)))


def joined(argv: Sequence[str]) -> str:
    """Join an argv to the text that patterns are tried on: quotes gone, one space between words.

    A word that is empty or holds a blank or a quote keeps them, so that no two argvs have the same
    text: `git 'status x'` is no `git status`.
    """
    return " ".join(
        "'" + word.replace("'", r"'\''") + "'" if not word or " " in word or "'" in word else word
        for word in argv
    )


# ---- commands that only read ---------------------------------------------------------------------

# An option counts only where it is listed, since programs take shortened and joined ones; every
# other word is taken for a path. A repository can make git start programs (settings, hooks,
# submodules) and read elsewhere (links), so git is free only where all that could do so is known to
# be harmless. A command that shows whole folders is not free where a file may hold secrets.

MAX_ENTRIES = 20_000  # that are looked at
LISTING_TIME = 10  # seconds for all that the rg of one line search to be listed
MAX_INDEX = 4 << 20  # bytes
MAX_SETTINGS = 1 << 16

BUILTINS = {"echo", "true", "pwd"}
# Behind `=` may be a file (wc --files0-from=, also cut short); ls -L and --dereference follow links
PATHS = r"-[A-KM-Za-z0-9]+|--(?!de|fi?l?e?s?$)[a-z-]+"
COUNT = re.compile(r"(?:head|tail) -[nc] [+-]?\d+")
FIND = r"""(?x) -(?: i?name | i?path | type | maxdepth | mindepth | not | o | or | a | and | size
    | [acm]time | [acm]min | newer | prune | empty | print0? | ls ) | [-+]?\d+[a-zA-Z]?"""
# A letter of the second class has a value: the rest of the word, or the next one
RG = r"""(?x) -[abcFHiIlnNopPqsSUvwx0]* (?:[ABCdegjmMrtT].*)? | --(?: after-context | before-context
    | color | column | context | count | count-matches | files | files-with-matches | fixed-strings
    | files-without-match | glob | heading | iglob | ignore-case | invert-match | json | line-number
    | max-columns | max-count | max-depth | multiline | no-filename | no-heading | no-line-number
    | only-matching | pcre2 | regexp | smart-case | sort | stats | trim | type | type-not | vimgrep
    | with-filename | word-regexp )(?:=.*)?"""
GLOB = re.compile(r"-\w*g|--i?glob")  # what fits one is searched though it is ignored
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
SIGNATURE = re.compile("--(?:format|pretty|sort)=.*(?:%[-+ ]?G|signature)")  # git starts gpg
LISTING = r"-l|--(?:list|contains|no-contains|merged|no-merged|points-at)(?:=.*)?"
REFS = rf"{LISTING}|--(?:all|remotes|show-current|verbose|no-color|(?:color|format|sort)=.*)"
NAMING = "describe", "ls-files", "ls-tree", "merge-base", "rev-parse", "status"
SHOWING = "git blame", "git diff", "git log", "git show", "rg"  # also files that they do not name
CHANGING = "git branch", "git remote", "git tag"  # unless without words, or with an option to list
PIPED = "cat", "head", "tail", "wc"  # these read a pipe where no file is named
OPTIONS = {
    **dict.fromkeys((*(f"git {each}" for each in NAMING), *SHOWING), GIT),
    **dict.fromkeys((*PIPED, "ls"), PATHS),
    "git status": STATUS,
    "find": FIND,
    "rg": RG,
    "git branch": rf"-[arv]+|{REFS}",
    "git remote": "-v",
    "git tag": rf"-n\d*|{REFS}",
}


def read_only(
    commands: Sequence[list[str]],
    workspace: Path,
    is_closed: Callable[[str, Path], bool],
    is_limited: bool = False,
) -> list[bool]:
    """Tell which commands of a plain line only read, inside the workspace.

    The line may begin with a `cd` into a folder of it; that may fail, so what follows has to be
    free in both places. Behind a command that does more, a path may lead elsewhere (`ln -s / x`).
    `is_closed`: is a file not shown unasked? `is_limited`: a rule says so for some.
    """
    top = real(workspace)
    places, free, deadline = [top], list[bool](), time.monotonic() + LISTING_TIME
    for name, *words in commands:
        if name == "cd" and not free and len(words) == 1 and ".." not in PurePath(words[0]).parts:
            places.append(real(top / words[0]))
            is_free = places[1].is_relative_to(top) and not words[0].startswith("-")
        else:
            is_free = _is_free(name, words, top, places, is_closed, is_limited, deadline)
        if not is_free:
            places.clear()
        free.append(is_free)
    return free


def _is_free(
    name: str,
    words: list[str],
    top: Path,
    places: list[Path],
    is_closed: Callable[[str, Path], bool],
    is_limited: bool,
    deadline: float,
) -> bool:
    if name == "git" and (words := words[words[:1] == ["--no-pager"] :]):
        name, words = f"git {words[0]}", words[1:]
    if name not in OPTIONS:
        return name in BUILTINS
    program = name.partition(" ")[0]
    if find_program(program, top) != find_program(program, os.devnull):
        return False  # PATH leads to one of the workspace
    names = _paths(name, words)
    if names is None or (not places and (names or name not in PIPED)):
        return False
    for path in (real(place / each) for place in places for each in names):
        if not path.is_relative_to(top) or is_closed(str(path), top):
            return False
    if name in SHOWING and is_limited:
        return False
    if name == "rg":
        return not _may_show_secrets(top, words, places, names, deadline)
    return name[:4] != "git " or ({*places} == {top} and _is_harmless(top, name in SHOWING))


def _paths(name: str, words: list[str]) -> list[str] | None:
    """The words that may be paths; None where the command may do more than read."""
    if COUNT.fullmatch(" ".join([name, *words[:2]])):
        words = words[2:]
    end = words.index("--") if "--" in words else len(words)
    options, paths = words[:end], words[end + 1 :]
    if name[:4] == "git ":  # the value of -S, -G and -L; a file behind a revision
        options = [re.sub("^-[SGL](?=.)", "", word) for word in options]
    if any(map(SIGNATURE.match, options)):
        return None
    others = [word for word in options if not re.fullmatch(OPTIONS[name], word)]
    is_listing = any(re.fullmatch(LISTING, word) for word in options)
    if any(word[:1] == "-" for word in others) or (
        name in CHANGING and others + paths and not is_listing
    ):
        return None
    paths = others + paths or ([] if name in PIPED else ["."])
    return [part for path in paths for part in path.split(":")] if name[:4] == "git " else paths


# ---- repositories and folders ------------------------------------------------------------------

HEAD = re.compile(rb"(?:ref: refs/[^\s~^:?*\[\\]+|[0-9a-f]{40})\n")
# The lines of a configuration that start no program and name no other place. A backslash would
# continue a line.
SETTINGS = re.compile(
    rb"""(?xi) (?: (?: \[ (?: core | user | color | commit | fetch | gc | lfs | pull | push | rebase
    | (?:branch|remote)[ ]"[^"\\\n]*" ) \]
    | \t (?: filemode | bare | logallrefupdates | symlinks | ignorecase
    | precomposeunicode | autocrlf | eol | quotepath | name | email | url | pushurl | fetch | tagopt
    | prune | remote | pushremote | merge | rebase | description | vscode-merge-base | gh-resolved
    | github-pr-owner-number | auto | autostash | autosetupremote | default | ff | gpgsign | ui
    ) [ ]=[ ] [^\\\n]*
    | \trepositoryformatversion [ ]=[ ] [01] | \thookspath [ ]=[ ] [\w./-]+ ) \n )*"""
)
HOOKS = re.compile(rb"(?i)\thookspath = (.*)")
MODES = (0o100644, 0o100755, 0o120000)


def _may_show_secrets(
    top: Path, words: list[str], places: Collection[Path], names: list[str], deadline: float
) -> bool:
    """Tell whether rg may search a file that holds secrets, as rg itself lists what it searches.

    It starts where the command would and gets the same paths: which of the files above count, and
    for what, depends on both. Hidden files are listed, too, since an .ignore file can bring them
    back. Where no list is had until `deadline`, one may.
    """
    most = "-uu" if any(map(GLOB.match, words)) else "--hidden"
    argv = [find_program("rg", top), most, "--files", "--null", "--"]
    for place in {*places}:
        # A word that is no path may be the pattern, and the folder is searched
        here = [".", *(name for name in names if os.path.exists(place / name))]
        seconds = deadline - time.monotonic()
        listing: Any = {"cwd": place, "env": environment(), "stdin": subprocess.DEVNULL}
        try:
            done = subprocess.run(
                [*argv, *here], capture_output=True, timeout=max(0.01, seconds), **listing
            )
        except (OSError, subprocess.TimeoutExpired):
            return True
        found = os.fsdecode(done.stdout).split("\0")[:-1]
        is_whole = done.returncode in (0, 1) and len(found) <= MAX_ENTRIES
        # The names that it shows do not begin with the place
        if not is_whole or any(holds_secrets(place / name) for name in found):
            return True
    return False


def _is_harmless(top: Path, shows: bool) -> bool:
    """Tell whether git reads in the repository of this folder alone and starts no program there.

    `shows`: the command prints files, none of which may hold secrets.
    """
    folder, shared = (git_folders(top) * 2)[:2]
    head, config = (
        read_small_file(at, MAX_SETTINGS) or b"" for at in (folder / "HEAD", shared / "config")
    )
    # Else git would pass over this repository, to one around it or to none
    is_valid = HEAD.fullmatch(head) and all(
        os.access(shared / each / ".", os.X_OK) for each in ("objects", "refs")
    )
    is_known = SETTINGS.fullmatch(config) and len(config) < MAX_SETTINGS  # else it may go on
    if not (is_valid and is_known and writable_git_folders(top) == [shared]):
        return False
    hooks = [shared / "hooks", *(top / os.fsdecode(each) for each in HOOKS.findall(config))]
    strange = [each / "post-index-change" for each in hooks] + [shared / "objects/info/alternates"]
    if any(map(os.path.lexists, strange)) or not _is_whole(shared):
        return False
    try:
        tracked = _tracked_paths(read_small_file(folder / "index", MAX_INDEX) or b"")
    except ValueError:
        return False
    return not (shows and any(map(holds_secrets, tracked)))


def _is_whole(folder: Path) -> bool:
    """Tell whether a repository is this folder alone: no link in it, and one index."""
    seen = 0
    for at, folders, files in os.walk(folder):
        seen += len(folders) + len(files)
        strange = (
            each.startswith("sharedindex.") or os.path.islink(os.path.join(at, each))
            for each in (*folders, *files)
        )
        if seen > MAX_ENTRIES or any(strange):
            return False
    return True


def _tracked_paths(index: bytes) -> list[str]:
    """The paths in an index (see gitformat-index(5)). Raises ValueError where it holds more than
    files and links, or is of another form than most."""
    if not index:
        return []
    if index[:7] != b"DIRC\0\0\0" or index[7] not in (2, 3) or len(index) == MAX_INDEX:
        raise ValueError("unknown form")
    paths, at = list[str](), 12
    for _ in range(int.from_bytes(index[8:12])):
        if int.from_bytes(index[at + 24 : at + 28]) not in MODES:  # a submodule
            raise ValueError("unknown mode")
        flags = int.from_bytes(index[at + 60 : at + 62])
        start = at + (64 if flags & 0x4000 else 62)
        end = index.index(b"\0", start)
        if min(end - start, 0xFFF) != flags & 0xFFF:
            raise ValueError("unknown length")
        paths.append(os.fsdecode(index[start:end]))
        at += (end - at + 8) & ~7
    return paths
