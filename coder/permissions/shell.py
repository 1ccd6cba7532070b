r"""Read bash command lines without running them: strictly for an allow, loosely for a deny.

    parse("ls -l 'a b' && pwd")      -> [["ls", "-l", "a b"], ["pwd"]]
    parse("ls $(touch x)")           -> None: not plain
    deny_texts("sh -c 't\ouch x'")   -> what a deny is tried on, at each of `word_starts`

A *plain* command line consists of words and of the separators `&&`, `||`, `;`, `|` and line end,
and bash runs exactly the simple commands that `parse` lists, or fewer (`&&`, `||`). All that bash
would expand, substitute, redirect to a file or read as a keyword is not plain. The strict lexer is
compared with real bash on random strings (tests/test_shell.py).

A deny needs no knowledge of the programs that run others (sudo, xargs, sh -c): it is tried at
every word of the text. All of this is linear in the length of the command.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

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


# ---- what a deny is tried on ---------------------------------------------------------------------

CONTINUED = re.compile(r"\\\n")
FIELD_SEPARATOR = re.compile(r"\$(?:\{IFS[^}\s]{0,20}\}|IFS)(?:\$\d)?")
BRACES = re.compile(r"\{([^\s{}]*+)\}")
REDIRECTION = re.compile(
    r"(?:(?<![^\s;&|(])\d++)?(?:&>>?|>>?[|&]?|<<<?-?|<[&>]?)[ \t]*+[^\s;&|()<>`{}]*+"
)
QUOTE = re.compile(r"\$?['\"]")
SPLIT = re.compile(r"[;&|\n()`]|\{(?!\})|(?<!\{)\}")
# A program's name may begin behind a blank, a slash, `=` (--command=touch), `!` (of git's aliases and
# vim) or letters (-ctouch).
START = re.compile(r"(?<![^\s/=!])(?:-\w+|[^\s/=!])")


def deny_texts(command: str) -> tuple[list[str], list[str]]:
    """Give the texts that a pattern that denies is tried on: (from their beginning, at every word).

    The first are whole commands. The others are guesses at what may run, rather too much than too
    little: the text split at each operator, without quotes, and with quotes as operators.
    """
    text = FIELD_SEPARATOR.sub(" ", CONTINUED.sub("", command))
    text = BRACES.sub(lambda braces: braces[0].replace(",", " "), text)
    unquoted = _split(QUOTE.sub("", text).replace("\\", ""))
    inner = [*_split(text), *unquoted, *_split(QUOTE.sub("\n", text).replace("\\", ""))]
    plain = parse(command)
    if plain is None:
        whole = [command.strip(), *unquoted]
    else:
        whole = [form for argv in plain for form in (joined(argv), " ".join(argv))]
    return list(dict.fromkeys(whole)), list(dict.fromkeys(inner))


def _split(text: str) -> list[str]:
    """Split a text at the operators of bash, without its redirections; one space between words."""
    parts = dict.fromkeys(SPLIT.split(REDIRECTION.sub(" ", text)))
    return [words for part in parts if (words := " ".join(part.split()))]


def word_starts(text: str) -> Iterator[int]:
    """Give each place in a text where the name of a program may begin."""
    for found in START.finditer(text):
        yield found.start()
        yield from range(found.start() + 2, found.end())
