"""Rules of the permissions: allow, ask or deny, by a kind and a pattern. The last that fits counts.

    {"edit": "allow", "bash": {"*": "ask", "git diff *": "allow"}, "read": {"secrets/*": "deny"}}

A kind is what a tool declares as its permission (`read`, `edit`, `bash`, `mcp`, `task`), the name of
a tool that declares none, or one of `external_directory`, `doom_loop` and `unconfined`. A path is tried
relative to the workspace and absolute.
In a pattern `*` is any run of characters, slashes too, and `?` is one; all of the text has to fit.
A pattern that ends in a blank and a star holds without arguments as well: `git diff *` is also
`git diff`. `~/` is the home.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

from coder.permissions.shell import joined, parse
from coder.tools.bash import bash
from coder.tools.edit import edit
from coder.tools.files import ls, read, write
from coder.tools.patch import apply_patch
from coder.tools.search import glob, grep
from coder.tools.workspace import read_small_file
from coder.types import CoderError

Action = Literal["allow", "ask", "deny"]
MAX_FILE = 1 << 16  # bytes of a workspace's rules that are read
FLAG = "a flag"  # the source of a rule
BUILT_IN_AGENT = "built-in agent"  # what the source begins with
BUILT_IN = {each.name: each for each in (read, write, edit, apply_patch, bash, grep, glob, ls)}
# All kinds that are not of a tool of the user's own
KINDS = {"mcp", "task", "external_directory", "doom_loop", "unconfined"}
KINDS |= {each.kind for each in BUILT_IN.values()}
ANYTHING = "\ue000" * 100  # stands for the star of one pattern where another is tried on it


class RulesError(CoderError):
    """Rules that cannot be understood, in one line."""


@dataclass(frozen=True, slots=True)
class Rule:
    """`source`: where it comes from, for the user; `is_exact`: the pattern means itself."""

    permission: str
    pattern: str
    action: Action
    source: str = "given"
    is_exact: bool = False

    def __str__(self) -> str:
        return f"`{self.action} {self.permission}: {self.pattern}` ({self.source})"


# ---- patterns ------------------------------------------------------------------------------------


def fits(pattern: str, text: str) -> bool:
    """Tell whether all of `text` fits, in linear time whatever the pattern."""
    return bool(any_of(pattern).fullmatch(text))


@cache
def any_of(*patterns: str) -> re.Pattern[str]:
    """What fits one of several patterns."""
    forms = (form for each in patterns for form in (each, each.removesuffix(" *")))
    # No class of characters is meant
    expressions = (translate(form.replace("[", "[[]")) for form in forms)
    return re.compile("|".join(expressions) or r"(?!)")


def concerns(rule: Rule, permission: str) -> bool:
    """Tell whether a rule counts for a kind of action.

    What leaves the sandbox is allowed by no other kind. What leaves the workspace is allowed by
    `read: /x/*`, but not by `read: allow`.
    """
    is_allowing = rule.action == "allow"
    if fits(rule.permission, permission):
        return rule.permission == permission or not (is_allowing and permission == "unconfined")
    is_read = permission == "external_directory" and fits(rule.permission, "read")
    return is_read and (rule.pattern[:1] == "/" or not is_allowing)


def last_match(permission: str, texts: Collection[str], rules: Sequence[Rule]) -> Rule | None:
    """The last rule for a kind of action that fits one of the texts, names for the same."""
    for rule in reversed(rules):
        does_fit = str.__eq__ if rule.is_exact else fits
        if concerns(rule, permission) and any(does_fit(rule.pattern, text) for text in texts):
            return rule
    return None


def denies_all(kind: str, rules: Sequence[Rule]) -> bool:
    """Tell whether everything of this kind is denied, whatever the pattern."""
    for rule in reversed(rules):
        if fits(rule.permission, kind):
            if rule.action != "deny":
                return False
            if not rule.pattern.strip("*"):
                return True
    return False


def limits_reading(rules: Sequence[Rule]) -> bool:
    """Tell whether some file needs a question, or is denied."""
    for rule in reversed(rules):
        if fits(rule.permission, "read"):
            if rule.action != "allow":
                return True
            if rule.pattern == "*":
                return False
    return False


def useless_rules(rules: Sequence[Rule], kinds: Collection[str]) -> list[str]:
    """Sentences about rules that never count: a later one covers them, or there is no such kind."""
    sentences = []
    for place, rule in enumerate(rules):
        kind, pattern = (x.replace("*", ANYTHING) for x in (rule.permission, rule.pattern))
        why = "" if any(fits(rule.permission, each) for each in kinds) else "there is no such kind"
        for later in rules[place + 1 :]:
            is_covered = fits(later.permission, kind) and fits(later.pattern, pattern)
            if is_covered and later.action != rule.action:
                why = f"{later} comes later and covers it"
        sentences += [f"The rule {rule} has no effect: {why}."] if why else []
    return sentences


# ---- decisions -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decision:
    """`always_pattern` is what "always" would store, "" where nothing can be; `reason`: why to ask.

    `even_with_yolo`: -y does not answer the question. `is_confined`: it may only be done where it can
    change nothing, whoever allows it.
    """

    action: Action
    always_pattern: str = ""
    reason: str = ""
    even_with_yolo: bool = False
    is_confined: bool = False


ALLOW = Decision("allow")


def strictest(decisions: Iterable[Decision]) -> Decision:
    """Deny before ask before allow; of several questions the one that -y does not answer."""
    strict = get_args(Action).index
    return max(
        decisions,
        key=lambda each: (strict(each.action), each.even_with_yolo, not each.always_pattern),
        default=ALLOW,
    )


# ---- what a deny is tried on ---------------------------------------------------------------------

CONTINUED = re.compile(r"\\\n")
FIELD_SEPARATOR = re.compile(r"\$(?:\{IFS[^}\s]{0,20}\}|IFS)(?:\$\d)?")
ENV_SPACE = re.compile(
    r"\\+_"
)  # `env -S` splits there; each level of quotes may double the backslash
BRACES = re.compile(r"\{([^\s{}]*+)\}")
REDIRECTION = re.compile(
    r"(?:(?<![^\s;&|(])\d++)?(?:&>>?|>>?[|&]?|<<<?-?|<[&>]?)[ \t]*+[^\s;&|()<>`{}]*+"
)
QUOTE = re.compile(r"\$?['\"]")
SPLIT = re.compile(r"[;&|\n()`]|\{(?!\})|(?<!\{)\}")
# A program's name may begin behind a blank, a slash, `=` (--command=touch), `!` (of git's aliases and
# vim) or letters (-ctouch).
START = re.compile(r"(?<![^\s/=!])(?:-\w+|[^\s/=!])")


def denies_line(command: str, layers: Sequence[Sequence[Rule]]) -> bool:
    """Tell whether one of the layers denies anything that a command line may run, however long it is.

    No knowledge of the programs that run others (sudo, xargs, sh -c) is needed, since a deny is tried
    at every word of guesses at what may run, rather too much than too little: the text split at each
    operator, without quotes, and with quotes as operators. A pattern that begins with a star fits
    every end of a text it fits, so it is tried on whole commands only; else `{"*": "deny",
    "ls *": "allow"}` would deny the arguments of ls. All of this takes linear time.
    """
    rules = [rule for each in layers for rule in each if fits(rule.permission, "bash")]
    patterns = [rule.pattern for rule in rules if rule.action == "deny"]
    if not patterns:
        return False
    text = FIELD_SEPARATOR.sub(" ", CONTINUED.sub("", command))
    text = BRACES.sub(lambda braces: braces[0].replace(",", " "), text)
    inner = _parts_of(text)
    if "\\_" in text:
        inner += _parts_of(ENV_SPACE.sub(" ", text))
    plain = parse(command)
    if plain is None:
        whole = [command.strip(), *_without_quotes(text)]
    else:
        whole = [form for argv in plain for form in (joined(argv), " ".join(argv))]
    denies = any_of(*(pattern for pattern in patterns if pattern[:1] != "*"))
    places = ((part, at) for part in dict.fromkeys(inner) for at in _word_starts(part))
    ends = (part[at:] for part, at in places if denies.fullmatch(part, at))
    texts = chain(dict.fromkeys(whole), ends)
    found = (last_match("bash", [each], rules) for each in texts for rules in layers)
    return any(rule is not None and rule.action == "deny" for rule in found)


def _parts_of(text: str) -> list[str]:
    """Split a text at the operators of bash: as it is, without quotes, and with quotes as operators."""
    at_quotes = _split(QUOTE.sub("\n", text).replace("\\", ""))
    return [*_split(text), *_without_quotes(text), *at_quotes]


def _without_quotes(text: str) -> list[str]:
    return _split(QUOTE.sub("", text).replace("\\", ""))


def _split(text: str) -> list[str]:
    """Split a text at the operators of bash, without its redirections; one space between words."""
    parts = dict.fromkeys(SPLIT.split(REDIRECTION.sub(" ", text)))
    return [words for part in parts if (words := " ".join(part.split()))]


def _word_starts(text: str) -> Iterator[int]:
    """Give each place in a text where the name of a program may begin."""
    for found in START.finditer(text):
        yield found.start()
        yield from range(found.start() + 2, found.end())


# ---- reading rules -------------------------------------------------------------------------------


def rule_of(text: str, action: Action) -> Rule:
    """Read `KIND` or `KIND:PATTERN`, as flags have it. Raises RulesError."""
    permission, colon, pattern = text.partition(":")
    if not re.fullmatch(r"[\w*?-]+", permission) or (colon and not pattern.strip()):
        raise RulesError(
            f"{text!r} is no rule: it has to be KIND or KIND:PATTERN, such as edit or 'bash:git diff *'"
        )
    return _rule(permission, pattern.strip() or "*", action, FLAG)


def rules_of(data: Any, source: str = "given") -> list[Rule]:
    """Read the rules in a JSON object, in their order. Raises RulesError."""
    if not isinstance(data, dict):
        raise RulesError('rules have to be an object such as {"bash": {"git diff *": "allow"}}')
    rules = []
    for permission, entry in data.items():
        for pattern, action in (entry if isinstance(entry, dict) else {"*": entry}).items():
            if action not in get_args(Action):
                wrong = json.dumps(action)[:60]
                raise RulesError(f"{permission}: {pattern}: {wrong} is not one of allow, ask, deny")
            rules.append(_rule(permission, pattern, action, source))
    return rules


def _rule(permission: str, pattern: str, action: Action, source: str) -> Rule:
    if (tool := BUILT_IN.get(permission)) and tool.kind != permission:
        raise RulesError(f"{permission} is no kind: rules for it have the kind {tool.kind}")
    if pattern.startswith("~/"):
        pattern = os.path.realpath(os.path.expanduser("~")) + pattern[1:]
    return Rule(permission, pattern, action, source)


def _parse(text: str, source: str) -> list[Rule]:
    """Raises RulesError."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise RulesError(f"a name stands there twice: {', '.join(name for name, _ in pairs)}")
        return found

    try:
        return rules_of(json.loads(text, object_pairs_hook=once), source)
    except (ValueError, RecursionError) as error:
        raise RulesError(str(error)) from None


def load_rules(path: Path) -> list[Rule]:
    """Load the user's own rules; none where there is no such file.

    Raises RulesError, also where another user may have written the file.
    """
    if not path.exists():
        return []
    try:
        check_ownership(path)
        return _parse(path.read_text("utf-8"), path.name)
    except (OSError, ValueError, RulesError) as error:
        raise RulesError(f"{path}: {error}") from None


def load_workspace_rules(folder: Path) -> tuple[list[Rule], list[str]]:
    """Load what the workspace's .coder/permissions.json denies or asks about, and notices about it.

    An allow in it does not count: the file may come from anyone.
    """
    name = ".coder/permissions.json"
    data = read_small_file(folder / name, MAX_FILE)
    if data is None:
        return [], []
    try:
        rules = _parse(data.decode("utf-8", "replace"), name)
    except RulesError as error:
        return [], [f"{name} is ignored: {error}"]
    kept = [rule for rule in rules if rule.action != "allow"]
    note = f"{name} can only deny and ask: {len(kept)} of its {len(rules)} rules count."
    return kept, [note] if rules else []


# ---- whose file it is ----------------------------------------------------------------------------


def check_ownership(path: Path) -> None:
    """Raise PermissionError where another user may have written or replaced this file.

    OSError where there is none. A link may lead into a folder that all share, if users can replace
    only their own files there (the sticky bit).
    """
    target = path.resolve(strict=True)
    for place in (path.parent, target, target.parent):
        status = place.stat()
        if status.st_uid not in (os.geteuid(), 0):
            raise PermissionError(f"{place} belongs to another user")
        by_group = status.st_mode & stat.S_IWGRP and not _is_ours_alone(status.st_gid)
        is_shared = place != path.parent and status.st_mode & stat.S_ISVTX
        if (by_group or status.st_mode & stat.S_IWOTH) and not is_shared:
            raise PermissionError(f"other users can write to {place} (fix: chmod go-w)")


def is_readable_by_others(path: Path) -> bool:
    """Whether other users may read this file and enter the folders above it. Raises OSError."""
    target = path.resolve(strict=True)
    for place, bits in (target, 0o444), *((each, 0o111) for each in target.parents):
        status = place.stat()
        by_group = 0 if _is_ours_alone(status.st_gid) else 0o070
        if not status.st_mode & bits & (by_group | 0o007):
            return False
    return True


def _is_ours_alone(number: int) -> bool:
    """Tell whether this is the user's own group, as systems with umask 002 have it."""
    try:
        name, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(number)
    except KeyError:
        return False
    return group.gr_name == name and {*group.gr_mem} <= {name}
