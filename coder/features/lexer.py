r"""What a bash command line runs, without running it: a strict lexer for decisions, and a loose one for refusals.

    parse("ls -l 'a b' && pwd")      -> [["ls", "-l", "a b"], ["pwd"]]
    parse("ls $(touch x)")           -> None: not plain
    deny_forms("env t\ouch x")       -> [..., "touch x"]

A *plain* command line consists of words and of the separators `&&`, `||`, `;`, `|` and line end, and bash runs exactly the
simple commands that `parse` lists, or fewer (`&&`, `||`). All that bash would expand, substitute, redirect to a file or read
as a keyword is not plain; a pattern never allows it. The strict lexer is held against real bash by random strings
(tests/test_lexer.py). The loose one guesses towards more: what it finds is only ever refused, never allowed by it.

All of it is linear in the length of the command, and nothing recurses on what a command nests.

What it leaves out: the rules and the decision (permissions.py). The loose lexer does not know what variables, globs, scripts
on standard input, interpreters and `$'\x41'` come to; no text does.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, dropwhile, islice, takewhile

Argv = list[str]

# ---- plain command lines: the strict lexer ---------------------------------------------------------------

PLAIN = r"A-Za-z0-9_./,:=@%+^\-"  # the characters of a word without quotes
SEPARATOR = r"&&|\|\||[;|\n]"
NULL = r"(?:2>&1|[2&]?>[ ]?/dev/null|</dev/null)(?=[ \t;|\n]|&&|\Z)"  # redirections that make nothing
WORD = rf"""(?:[{PLAIN}]++|'[^'\t\n]*+'|"[^"$`\\!\t\n]*+")++(?=[ \t;|&\n]|\Z)"""
TOKEN = re.compile(rf"({SEPARATOR})|{NULL}|({WORD})")  # gives (separator, word), both empty for a redirection
LINE = re.compile(rf"(?:[ \t]*+(?:{SEPARATOR}|{NULL}|{WORD}))*+[ \t]*+")
PIECE = re.compile(r"'([^']*)'|\"([^\"]*)\"|([^'\"]+)")
SIMPLE = re.compile(rf"[{PLAIN}]++")
PROGRAM = re.compile(r"[A-Za-z0-9_./,:@+][A-Za-z0-9_./,:@%+^\-]*+")  # no blank: "ls /../x" is no call of ls
RESERVED = frozenset((
    "if", "then", "elif", "else", "fi", "for", "in", "case", "esac", "select", "while", "until", "do", "done", "function", "time",
    "coproc"))

# Builtins that change what the rest of the line means, or run and assign behind the back of whoever reads their arguments.
ODD = frozenset((
    "alias", "bind", "builtin", "compgen", "complete", "compopt", "enable", "fc", "getopts", "hash", "history", "jobs", "let", "mapfile",
    "read", "readarray", "shopt", "unalias"))
# These evaluate the subscript of a variable's name: test -v 'a[$(touch x)]' runs touch.
EVALUATING = frozenset(("declare", "export", "local", "readonly", "test", "typeset", "unset", "wait"))
SETTING = re.compile(r"[-+][euxo]++|pipefail|errexit|nounset|xtrace")  # `set -k` makes x=1 behind a command an assignment


def parse(command: str) -> list[Argv] | None:
    """The simple commands of a plain command line, in order, as argv lists; None: not plain (reliability.md 6.3).

    Redirections to and from the null device, and `2>&1`, are left out where they stand as words behind a command.
    """
    if not command.replace("\n", "").replace("\t", "").isprintable() or not LINE.fullmatch(command):
        return None
    commands: list[Argv] = []
    argv: Argv = []
    waits = False  # behind `&&`, `||` or `|`, where a command has to come
    for separator, word in TOKEN.findall(command):
        if word:
            argv.append(word)
        elif argv and separator:
            commands.append(argv)
            argv, waits = [], separator not in (";", "\n")
        elif not argv and separator != "\n":
            return None
    if argv:
        commands.append(argv)
    if not commands or (waits and not argv):
        return None
    if "'" in command or '"' in command:
        commands = [[_unquoted(word) for word in argv] for argv in commands]
    return commands if all(_is_program(name) for name in {argv[0] for argv in commands}) and all(map(_is_harmless, commands)) else None


def _unquoted(word: str) -> str:
    return "".join(single or double or bare for single, double, bare in PIECE.findall(word)) if "'" in word or '"' in word else word


def _is_program(name: str) -> bool:
    return name not in RESERVED and name not in ODD and PROGRAM.fullmatch(name) is not None


def _is_harmless(argv: Argv) -> bool:
    """Does bash run this as it stands, and nothing else because of it?"""
    name = argv[0]
    if name == "command":
        inner = argv[_starts(argv)[-1]:]
        return inner[0] == "command" or (_is_program(inner[0]) and _is_harmless(inner))
    if name == "set":
        return all(SETTING.fullmatch(word) for word in argv[1:])
    if name == "printf":
        return len(argv) == 1 or not argv[1].startswith("-v")
    return name not in EVALUATING or not any("$" in word or "`" in word for word in argv)


def joined(argv: Sequence[str]) -> str:
    """An argv as one text, for patterns: quotes gone, words joined by one space.

    Only a word that is empty or holds a blank or a single quote keeps quotes, always single ones, so that no two argvs
    have the same text: `git 'status x'` is no `git status`.
    """
    return " ".join("'" + word.replace("'", r"'\''") + "'" if not word or " " in word or "'" in word else word for word in argv)


# ---- what runs inside of what: wrappers ------------------------------------------------------------------


@dataclass(frozen=True)
class Wrapper:
    """A program that runs the command in its arguments: which of its options take the next word, operands before the command."""

    letters: str = ""
    names: tuple[str, ...] = ()
    operands: int = 0
    assigns: bool = False  # NAME=value may stand before the command


WRAPPERS = {
    "builtin": Wrapper(), "busybox": Wrapper(), "command": Wrapper(), "eval": Wrapper(), "nohup": Wrapper(), "setsid": Wrapper(),
    "toybox": Wrapper(), "trap": Wrapper(),
    "doas": Wrapper("aCu"),
    "env": Wrapper("uC", ("unset", "chdir"), assigns=True),  # -S: what follows is the command anyway
    "exec": Wrapper("a"),
    "ionice": Wrapper("cn", ("class", "classdata")),
    "nice": Wrapper("n", ("adjustment",)),
    "stdbuf": Wrapper("ioe", ("input", "output", "error")),
    "sudo": Wrapper("CDghpRrTtUu", ("close-from", "chdir", "group", "host", "prompt", "chroot", "role", "command-timeout", "type",
                                    "other-user", "user"), assigns=True),
    "time": Wrapper("fo", ("format", "output")),
    "timeout": Wrapper("ks", ("kill-after", "signal"), operands=1),
    "watch": Wrapper("n", ("interval",)),
    "xargs": Wrapper("adEILnPs", ("arg-file", "delimiter", "max-args", "max-procs", "max-chars", "process-slot-var")),
}
SHELLS = frozenset(("sh", "bash", "dash", "zsh", "ksh", "ash", "rbash", "fish"))
SHELL = Wrapper("oO", ("rcfile", "init-file"))
# Others that run what stands somewhere behind them: each later word is tried as the beginning of a command, or as its text.
LAUNCHERS = frozenset((
    "chroot", "choom", "chrt", "dbus-run-session", "fakeroot", "fd", "flock", "gtimeout", "linux32", "linux64", "ltrace", "npx", "nsenter",
    "numactl", "parallel", "perf", "pkexec", "prlimit", "proxychains", "runuser", "script", "setarch", "setpriv", "strace", "su",
    "systemd-run", "taskset", "unbuffer", "unshare", "uvx"))
MOST_TRIED = 64  # words behind a launcher
NESTING = frozenset((*WRAPPERS, *SHELLS, *LAUNCHERS, "find"))
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*+=")
SPLIT_STRING = re.compile(r"(?:-[0iv]*+S|--s[a-z-]*+=)(?=.)", re.S)  # env -S'touch x'
EXECUTING = frozenset(("-exec", "-execdir", "-ok", "-okdir"))
DEEPEST = 6  # texts and find commands inside each other that are looked into
SHOWN = 8  # wrappers around a command that get a form of their own


def _base(word: str) -> str:
    return word.rpartition("/")[2]


def _after_options(argv: Argv, start: int, wrapper: Wrapper) -> int:
    """Where the operands of the program at `start` begin."""
    at = start + 1
    while at < len(argv) and (argv[at][:1] == "-" or (wrapper.assigns and ASSIGNMENT.match(argv[at]))):
        word, at = argv[at], at + 1
        if word == "--":
            break
        if word.startswith("--"):
            at += len(word) > 2 and any(name.startswith(word[2:]) for name in wrapper.names)
        elif word[0] == "-":
            at += next((place == len(word) - 1 for place, letter in enumerate(word) if place and letter in wrapper.letters), False)
    return at


def _next(argv: Argv, start: int) -> int | None:
    """Where the command begins that the one at `start` runs; None where it is no wrapper."""
    name = _base(argv[start])
    if name in SHELLS:
        at = _after_options(argv, start, SHELL)
        has_text = any(word[:1] == "-" and word[:2] != "--" and "c" in word for word in argv[start + 1:at])
        return at if has_text and at < len(argv) else None
    wrapper = WRAPPERS.get(name)
    if wrapper is None:
        return None
    at = _after_options(argv, start, wrapper) + wrapper.operands
    looks_up = name == "command" and any(word[:1] == "-" and ("v" in word or "V" in word) for word in argv[start + 1:at])
    return at if at < len(argv) and not looks_up else None


def _starts(argv: Argv) -> list[int]:
    """Where the commands begin that lie inside each other in one argv, the outermost first."""
    starts = [0]
    while (start := _next(argv, starts[-1])) is not None:
        starts.append(start)
    return starts


def _executed(argv: Argv) -> Iterator[Argv]:
    """The commands of a find."""
    start: int | None = None
    for at, word in enumerate([*argv, ";"]):
        if start is None:
            start = at + 1 if word in EXECUTING else None
        elif word in (";", "+"):
            if start < at:
                yield argv[start:at]
            start = None


@dataclass(frozen=True)
class Found:
    """A command that runs, as far as can be told: itself or inside of others."""

    argv: Argv
    outer: tuple[str, ...] = ()  # base names of the wrappers around it
    searched: tuple[str, ...] = ()  # the folders of the find that runs it
    guessed: bool = False  # found in a text that is not plain


def _found(argv: Argv, searched: tuple[str, ...] = (), depth: int = 0) -> Iterator[Found]:
    """A command and those inside it. What holds a text of several commands gives all of them."""
    if _base(argv[0]) not in NESTING:
        yield Found(argv, (), searched)
        return
    starts = _starts(argv)
    names = tuple(dict.fromkeys(_base(argv[start]) for start in starts[:-1]))
    for start in [*starts[:SHOWN], *starts[SHOWN:][-1:]]:
        yield Found(argv[start:], names if start else (), searched)
    if depth == DEEPEST:
        return
    leaf = argv[starts[-1]:]
    if _base(leaf[0]) == "find":
        folders = _searched(leaf)
        for inner in _executed(leaf):
            yield from _found(inner, folders, depth + 1)
    if _base(leaf[0]) in LAUNCHERS:
        names = (*names, _base(leaf[0]))
        for at in range(1, min(len(leaf), MOST_TRIED)):
            yield Found(leaf[at:], names, searched)
    for text in _inner_texts(argv, leaf, names):
        plain = parse(text)
        for inner in _loose(text) if plain is None else plain:
            for each in _found(inner, searched, depth + 1):
                yield Found(each.argv, (*names, "sh", *each.outer), each.searched, plain is None or each.guessed)


def _inner_texts(argv: Argv, leaf: Argv, names: tuple[str, ...]) -> Iterator[str]:
    """The command lines in the words of a wrapper."""
    if _base(leaf[0]) in LAUNCHERS:
        yield from (word for word in leaf[1:MOST_TRIED] if " " in word)
    if (names and not PROGRAM.fullmatch(leaf[0])) or ("eval" in names and not all(map(SIMPLE.fullmatch, leaf))):
        yield " ".join(leaf)
    if "env" in names or _base(leaf[0]) == "env":
        attached = next((at for at, word in enumerate(argv) if SPLIT_STRING.match(word)), None)
        if attached is not None:
            yield " ".join([SPLIT_STRING.sub("", argv[attached], count=1), *argv[attached + 1:]])


# ---- everything else: the loose lexer --------------------------------------------------------------------

QUOTED = r"""'[^']*+'|"(?:[^"\\]|\\.)*+\""""
CONTINUED = re.compile(r"\\\n")
ASSIGNED = re.compile(rf"(?<![^\s;&|()`{{}}])[A-Za-z_]\w*+(?:\[[^\]\s]*\])?\+?=(?:[^\s'\";&|()`]|{QUOTED})*+(?=\s)", re.S)
WORD_SPLIT = re.compile(r"\$(?:\{IFS[^}\s]{0,20}\}|IFS)(?:\$\d)?")
BRACES = re.compile(r"\{([^\s{}]*+)\}")
REDIRECTION = re.compile(r"(?:(?<![^\s;&|(])\d++)?(?:&>>?|>>?[|&]?|<<<?-?|<[&>]?)[ \t]*+[^\s;&|()<>`{}]*+")
QUOTE = re.compile(r"\$?['\"]|\\")
SPLIT = re.compile(r"[;&|\n()`]|\{(?!\})|(?<!\{)\}")
LEADING = re.compile(rf"(?:\s*+(?:(?:{'|'.join(sorted(RESERVED - {'time'}))}|!)(?!\S)|[A-Za-z_]\w*+(?:\[[^\]\s]*\])?\+?=\S*+))*+")
UNBROKEN = re.compile(r"[^ \t]++")


def _loose(command: str) -> Iterator[Argv]:
    """What may run in a command line that is not plain: guessed, rather too much than too little. No argv is empty."""
    text = ASSIGNED.sub("", CONTINUED.sub("", command))
    text = QUOTE.sub("", BRACES.sub(lambda match: match[0].replace(",", " "), WORD_SPLIT.sub(" ", text)))
    return _words(REDIRECTION.sub(" ", text))


def _words(text: str) -> Iterator[Argv]:
    """The words of each part, without what may stand before a command; a part that comes again is left out."""
    for part in dict.fromkeys(SPLIT.split(text)):
        leading = LEADING.match(part)
        if words := UNBROKEN.findall(part, leading.end() if leading else 0):
            yield words


def deny_forms(command: str) -> list[str]:
    """Every text on which a pattern that denies is tried: each command, also inside of wrappers and with the bare name of its program.

    A command line that is not plain gives its raw text as well, the same without quotes and backslashes, and what may
    run in it.
    """
    forms: dict[str, None] = {}
    plain = parse(command)
    if plain is None:
        forms[command.strip()] = forms[QUOTE.sub("", CONTINUED.sub("", command)).strip()] = None
    for argv in plain or _loose(command):
        if len(argv) == 1 and argv[0] not in forms and "/" not in argv[0]:
            forms[argv[0]] = None
        elif len(argv) > 1 or argv[0] not in forms:
            forms.update((text, None) for found in _found(argv) for text in _texts(found))
    return list(forms)


def _texts(found: Found) -> Iterable[str]:
    argv, base = found.argv, _base(found.argv[0])
    text = " ".join(argv)
    yield joined(argv)
    yield text
    bare = base + text[len(argv[0]):]
    yield bare
    if "xargs" in found.outer:
        yield from (f"{text} {{}}", f"{bare} {{}}")  # it will have arguments


# ---- recursive deletes -----------------------------------------------------------------------------------

STEPS = frozenset(("cd", "pushd", "popd"))
DELETING = frozenset((*NESTING, *STEPS, "rm"))
MOST_FOLDERS = 50  # of a find, that are looked at
MOST_STEPS = 2  # changes of the folder that are followed; each may have failed
ELSEWHERE = re.compile(r"-[A-Za-z]*[CD]|--chd")  # env -C, sudo -D: another working folder
BARE = re.compile(rf"'([{PLAIN}]*+)'|\"([{PLAIN}]*+)\"")  # quotes that hide nothing
UNTOLD = "\0"  # stands for any other quote, and for where something unknown goes on
GLUED = re.compile(r"(?=[(`]|\{(?!\}))")
FORCED = re.compile(r"-[A-Za-z]*(?:[rR][A-Za-z]*f|f[A-Za-z]*[rR])[A-Za-z]*|-delete")


class Unknown(Exception):
    """A target cannot be told."""


def recursive_deletes(command: str) -> list[str] | None:
    """The targets of recursive deletes as written (rm -r, find -delete, find -exec rm; also inside of wrappers).

    [] where there is none, None where one of the targets cannot be told: a variable, a glob, a `~`, what xargs reads. A
    relative target behind a `cd` is given for each folder it may mean.
    """
    try:
        plain = parse(command)
        return list(dict.fromkeys(_loose_targets(command) if plain is None else _plain_targets(plain)))
    except Unknown:
        return None


def _plain_targets(commands: list[Argv]) -> Iterator[str]:
    steps: list[str] = []
    for argv in commands:
        if _base(argv[0]) not in DELETING:
            continue
        for found in _found(argv):
            targets = _targets(found, argv) or []
            yield from targets
            if steps and (relative := [target for target in targets if not target.startswith("/")]):
                yield from (f"{folder}/{target}" for folder in _folders(steps) for target in relative)
            if _base(found.argv[0]) in STEPS:
                steps.append(found.argv[1] if len(found.argv) == 2 and not found.outer else "")


def _folders(steps: list[str]) -> list[str]:
    """Where changes of the folder may lead, of which each may have failed. Raises Unknown."""
    if len(steps) > MOST_STEPS or any(not step or step[0] in "-~" for step in steps):
        raise Unknown
    taken = [posixpath.join(*some) for count in range(1, len(steps) + 1) for some in combinations(steps, count)]
    return list(dict.fromkeys([*taken, *map(posixpath.normpath, taken)]))  # cd takes `link/..` by its letters


def _targets(found: Found, whole: Argv) -> list[str] | None:
    """The targets of one command, None where it deletes nothing recursively. Raises Unknown."""
    argv, name = found.argv, _base(found.argv[0])
    if name == "find" and "-delete" in argv:
        targets = list(_searched(argv))
    elif name == "rm" and (found.searched or _is_recursive(argv)):
        targets = [word for word in _operands(argv) if word != "{}" or not found.searched] + list(found.searched)
    else:
        return None
    elsewhere = not {"env", "sudo"}.isdisjoint(found.outer) and any(map(ELSEWHERE.match, whole))
    if found.guessed or elsewhere or "xargs" in found.outer or any("{}" in word or word == UNTOLD for word in targets):
        raise Unknown
    return targets


def _is_recursive(argv: Argv) -> bool:
    options = argv[1:argv.index("--")] if "--" in argv else argv[1:]
    return any(word.startswith("--r") if word[:2] == "--" else word[:1] == "-" and ("r" in word or "R" in word) for word in options)


def _operands(argv: Argv) -> list[str]:
    end = argv.index("--") if "--" in argv else len(argv)
    return [word for word in argv[1:end] if word == "-" or not word.startswith("-")] + argv[end + 1:]


def _searched(argv: Argv) -> tuple[str, ...]:
    """The folders that a find begins with; untold where it follows links out of them, reads their names, or has too many."""
    words = (word for word in argv[1:] if word not in ("-H", "-P") and not word.startswith(("-O", "-D")))
    folders = tuple(islice(takewhile(lambda word: not word.startswith(("-", "(", "!")), words), MOST_FOLDERS + 1))
    if len(folders) > MOST_FOLDERS or not {"-L", "-follow", "-files0-from"}.isdisjoint(argv):
        return (UNTOLD,)
    return folders or (".",)


def _loose_targets(command: str) -> Iterator[str]:
    """The same for a command line that is not plain. Raises Unknown where a target is not a plain word of its own."""
    text = BARE.sub(lambda match: match[1] or match[2] or "", CONTINUED.sub("", command))
    text = QUOTE.sub(UNTOLD, ASSIGNED.sub(f"x={UNTOLD}", text))
    steps = False
    for marked in _words(GLUED.sub(UNTOLD, REDIRECTION.sub(" ", text))):
        words = list(dropwhile(lambda word: not word.strip(UNTOLD), marked))
        argv = [word.replace(UNTOLD, "") for word in words]
        if not argv:
            continue
        if not PROGRAM.fullmatch(argv[0]) and any(map(FORCED.fullmatch, argv)):
            raise Unknown
        if _base(argv[0]) not in DELETING:
            continue
        is_find = _base(argv[0]) == "find"
        if is_find and not argv[-1]:
            argv.pop()  # what ends -exec
        odd = {clean for clean, word in zip(argv, words) if not SIMPLE.fullmatch(word)}
        found = list(_found(argv))
        steps = steps or any(_base(each.argv[0]) in STEPS for each in found)
        for targets in (targets for each in found if (targets := _targets(each, argv)) is not None):
            if not odd.isdisjoint(targets if is_find else argv) or (steps and not all(target.startswith("/") for target in targets)):
                raise Unknown
            yield from targets
