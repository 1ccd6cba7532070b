"""Read bash command lines without running them.

    parse("ls -l 'a b' && pwd")      -> [["ls", "-l", "a b"], ["pwd"]]
    parse("ls $(touch x)")           -> None: not plain

A *plain* command line consists of words and of the separators `&&`, `||`, `;`, `|` and line end,
and bash runs exactly the simple commands that `parse` lists, or fewer (`&&`, `||`). All that bash
would expand, substitute, redirect to a file or read as a keyword is not plain. The strict lexer is
compared with real bash on random strings (tests/test_shell.py). Its time is linear.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

Argv = list[str]

PLAIN = r"A-Za-z0-9_./,:=@%+^\-"  # of a word without quotes; also a tilde in the middle (HEAD~2)
SEPARATOR = r"&&|\|\||[;|\n]"
JOINING = {"&&", "||", "|"}  # a command has to follow
# redirections that make no file
NULL = r"(?:2>&1|[2&]?>[ ]?/dev/null|</dev/null)(?=[ \t;|\n]|&&|\Z)"
# Not possessive: before Python 3.11.5 that fails (gh-106052)
WORD = rf"""(?:[{PLAIN}]|(?<=[A-Za-z0-9^])~|'[^'\t\n]*'|"[^"$`\\!\t\n]*")+(?=[ \t;|&\n]|\Z)"""
TOKEN = rf"({SEPARATOR})|{NULL}|({WORD})"  # both groups are empty for a redirection
LINE = rf"(?:[ \t]*+(?:{SEPARATOR}|{NULL}|{WORD}))*+[ \t]*+"
PIECE = r"'([^']*)'|\"([^\"]*)\"|([^'\"]+)"
# A program's name holds no blank: "ls /../x" is no call of ls.
PROGRAM = r"[A-Za-z0-9_./,:@+][A-Za-z0-9_./,:@%+^\-]*+"
# Keywords; and builtins that change what the rest of the line means, or that run or assign what is
# in their arguments.
ODD = (
    r"if|then|elif|else|fi|for|in|case|esac|select|while|until|do|done|function|time|coproc"
    r"|alias|bind|builtin|command|compgen|complete|compopt|enable|fc|getopts|hash|history|jobs|let"
    r"|mapfile|printf|read|readarray|set|shopt|unalias"
)
# These evaluate the subscript of a variable's name: test -v 'a[$(touch x)]' runs touch.
EVALUATING = r"declare|export|local|readonly|test|typeset|unset|wait"


def parse(command: str) -> list[Argv] | None:
    """Split a plain command line into its simple commands, in order; None if it is not plain.

    Redirections to and from the null device, and `2>&1`, are left out.
    """
    visible = command.replace("\n", "").replace("\t", "")
    if not visible.isprintable() or not re.fullmatch(LINE, command):
        return None
    commands = _split(command)
    if commands and all(_is_plain_call(argv) for argv in commands):
        return commands
    return None


def _split(line: str) -> list[Argv]:
    """Split a line that consists of tokens into its commands; [] if bash takes it for an error."""
    commands: list[Argv] = []
    argv: Argv = []
    needs_command = False  # after `&&`, `||` or `|`
    for separator, word in re.findall(TOKEN, f"{line}\n"):
        if word:
            argv.append(_without_quotes(word))
        elif argv and separator:
            commands.append(argv)
            argv = []
            needs_command = separator in JOINING
        elif not argv and separator != "\n":
            return []
    return [] if needs_command else commands


def _without_quotes(word: str) -> str:
    text = ""
    for single, double, bare in re.findall(PIECE, word):
        text += single or double or bare
    return text


def _is_plain_call(argv: Argv) -> bool:
    """Tell whether bash runs this program, and nothing else because of its arguments."""
    program = argv[0]
    if re.fullmatch(ODD, program) or not re.fullmatch(PROGRAM, program):
        return False
    if re.fullmatch(EVALUATING, program):
        return not re.search("[$`]", joined(argv))
    return True


def joined(argv: Sequence[str]) -> str:
    """Join an argv to the text that patterns are tried on: quotes gone, one space between words.

    A word that is empty or holds a blank or a quote keeps them, so that no two argvs have the same
    text: `git 'status x'` is no `git status`.
    """
    return " ".join(_quoted(word) for word in argv)


def _quoted(word: str) -> str:
    if word and " " not in word and "'" not in word:
        return word
    return "'" + word.replace("'", r"'\''") + "'"
