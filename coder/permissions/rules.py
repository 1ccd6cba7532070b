"""Rules of the permissions: allow, ask or deny, by a kind and a pattern. The last that matches
counts.

    {"edit": "allow", "bash": {"*": "ask", "git diff *": "allow"}, "read": {"secrets/*": "deny"}}

A kind is what a tool declares as its permission (`read`, `edit`, `bash`, `mcp`, `task`), the name
of a tool that declares none, or one of `external_directory`, `doom_loop` and `unconfined`. A path
is tried relative to the workspace and absolute. In a pattern `*` is any run of characters, slashes
too, and `?` is one; the pattern must match the whole text. A pattern that ends in a blank and a
star holds without arguments as well: `git diff *` is also `git diff`. `~/` is the home.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

from coder.permissions.ownership import check_ownership
from coder.permissions.shell import joined, parse
from coder.tools.built_in import PATCHING, TOOLS
from coder.tools.workspace import read_small_file
from coder.types import CoderError

Action = Literal["allow", "ask", "deny"]
MAX_FILE = 1 << 16  # bytes of a workspace's rules that are read
FLAG = "a flag"  # the source of a rule
BUILT_IN_AGENT = "built-in agent"  # what the source begins with
BUILT_IN = {tool.name: tool for tool in (*TOOLS, *PATCHING)}
# All kinds that are not of a tool of the user's own
KINDS = {"mcp", "task", "external_directory", "doom_loop", "unconfined"}
KINDS |= {tool.kind for tool in BUILT_IN.values()}
ANYTHING = "\ue000" * 100  # instead of a star in a pattern that another is tried on


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
    expressions = []
    for pattern in patterns:
        pattern = pattern.replace("[", "[[]")  # no class of characters is meant
        expressions.append(translate(pattern))
        if pattern.endswith(" *"):
            expressions.append(translate(pattern.removesuffix(" *")))
    return re.compile("|".join(expressions) or r"(?!)")


def concerns(rule: Rule, permission: str) -> bool:
    """Tell whether a rule counts for a kind of action.

    What leaves the sandbox is allowed by no other kind. What leaves the workspace is allowed by
    `read: /x/*`, but not by `read: allow`.
    """
    if rule.permission == permission:
        return True
    is_allowing = rule.action == "allow"
    if fits(rule.permission, permission):
        return not is_allowing or permission != "unconfined"
    if permission == "external_directory" and fits(rule.permission, "read"):
        return not is_allowing or rule.pattern.startswith("/")
    return False


def last_match(permission: str, texts: Collection[str], rules: Sequence[Rule]) -> Rule | None:
    """The last rule for a kind of action that matches one of the texts, names for the same."""
    for rule in reversed(rules):
        if concerns(rule, permission) and any(_matches(rule, text) for text in texts):
            return rule
    return None


def _matches(rule: Rule, text: str) -> bool:
    if rule.is_exact:
        return rule.pattern == text
    return fits(rule.pattern, text)


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
    for index, rule in enumerate(rules):
        why = ""
        if not any(fits(rule.permission, kind) for kind in kinds):
            why = "there is no such kind"
        for later in rules[index + 1 :]:
            if later.action != rule.action and _covers(later, rule):
                why = f"{later} comes later and covers it"
        if why:
            sentences.append(f"The rule {rule} has no effect: {why}.")
    return sentences


def _covers(rule: Rule, other: Rule) -> bool:
    """Does the rule match all that the other matches?"""
    kind = other.permission.replace("*", ANYTHING)
    pattern = other.pattern.replace("*", ANYTHING)
    return fits(rule.permission, kind) and fits(rule.pattern, pattern)


# ---- decisions -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decision:
    """`always_pattern` is what "always" would store, "" if nothing can be; `reason`: why to ask.

    `even_with_yolo`: -y does not answer the question. `is_confined`: it may only be done in a place
    that it cannot change, whoever allows it.
    """

    action: Action
    always_pattern: str = ""
    reason: str = ""
    even_with_yolo: bool = False
    is_confined: bool = False


ALLOW = Decision("allow")


def strictest(decisions: Iterable[Decision]) -> Decision:
    """Deny before ask before allow; of several questions the one that -y does not answer."""

    def strictness(decision: Decision) -> tuple[int, bool, bool]:
        by_action = get_args(Action).index(decision.action)
        return by_action, decision.even_with_yolo, not decision.always_pattern

    return max(decisions, key=strictness, default=ALLOW)


# ---- what a deny is tried on ---------------------------------------------------------------------

CONTINUED = r"\\\n"
FIELD_SEPARATOR = r"\$(?:\{IFS[^}\s]{0,20}\}|IFS)(?:\$\d)?"
# `env -S` splits there; each level of quotes may double the backslash
ENV_SPACE = r"\\+_"
BRACES = r"\{([^\s{}]*+)\}"
REDIRECTION = r"(?:(?<![^\s;&|(])\d++)?(?:&>>?|>>?[|&]?|<<<?-?|<[&>]?)[ \t]*+[^\s;&|()<>`{}]*+"
QUOTE = r"\$?['\"]"
SPLIT = r"[;&|\n()`]|\{(?!\})|(?<!\{)\}"
# A program's name may begin after a blank, a slash, `=` (--command=touch), `!` (of git's aliases
# and vim) or letters (-ctouch).
START = r"(?<![^\s/=!])(?:-\w+|[^\s/=!])"


def denies_line(command: str, layers: Sequence[Sequence[Rule]]) -> bool:
    """Tell whether one of the layers denies anything that a command line may run, however long it
    is.

    No knowledge of the programs that run others (sudo, xargs, sh -c) is needed, since a deny is
    tried at every word of guesses at what may run, rather too much than too little: the text split
    at each operator, without quotes, and with quotes as operators. A pattern that begins with a
    star fits every end of a text it fits, so it is tried on whole commands only; else `{"*":
    "deny", "ls *": "allow"}` would deny the arguments of ls. All of this takes linear time.
    """
    patterns: list[str] = []
    for rules in layers:
        for rule in rules:
            if rule.action == "deny" and fits(rule.permission, "bash"):
                patterns.append(rule.pattern)
    if not patterns:
        return False
    text = re.sub(FIELD_SEPARATOR, " ", re.sub(CONTINUED, "", command))
    text = re.sub(BRACES, lambda braces: braces[0].replace(",", " "), text)
    candidates = chain(_whole_commands(command, text), _denied_ends(text, patterns))
    return any(_is_denied(candidate, layers) for candidate in candidates)


def _is_denied(text: str, layers: Sequence[Sequence[Rule]]) -> bool:
    for rules in layers:
        rule = last_match("bash", [text], rules)
        if rule and rule.action == "deny":
            return True
    return False


def _whole_commands(command: str, text: str) -> list[str]:
    """The commands of a line, each in two forms; of one that is not plain, guesses at them."""
    plain = parse(command)
    if plain is None:
        return [command.strip(), *_without_quotes(text)]
    commands = []
    for argv in plain:
        commands += [joined(argv), " ".join(argv)]
    return commands


def _denied_ends(text: str, patterns: list[str]) -> Iterator[str]:
    """The ends of guesses at commands, from each word on, that one of the patterns matches."""
    parts = _parts_of(text)
    if "\\_" in text:
        parts += _parts_of(re.sub(ENV_SPACE, " ", text))
    denied = any_of(*[pattern for pattern in patterns if not pattern.startswith("*")])
    for part in dict.fromkeys(parts):
        for start in _word_starts(part):
            if denied.fullmatch(part, start):
                yield part[start:]


def _parts_of(text: str) -> list[str]:
    """Split a text at bash's operators: as it is, without quotes, and at quotes as well."""
    at_quotes = _split(re.sub(QUOTE, "\n", text).replace("\\", ""))
    return _split(text) + _without_quotes(text) + at_quotes


def _without_quotes(text: str) -> list[str]:
    return _split(re.sub(QUOTE, "", text).replace("\\", ""))


def _split(text: str) -> list[str]:
    """Split a text at the operators of bash, without its redirections; one space between words."""
    parts = dict.fromkeys(re.split(SPLIT, re.sub(REDIRECTION, " ", text)))
    lines = [" ".join(part.split()) for part in parts]
    return [line for line in lines if line]


def _word_starts(text: str) -> Iterator[int]:
    """Each index in a text at which the name of a program may begin."""
    for start in re.finditer(START, text):
        yield start.start()
        yield from range(start.start() + 2, start.end())


# ---- reading rules -------------------------------------------------------------------------------


def rule_of(text: str, action: Action) -> Rule:
    """Read `KIND` or `KIND:PATTERN`, as flags have it. Raises RulesError."""
    permission, colon, pattern = text.partition(":")
    if not re.fullmatch(r"[\w*?-]+", permission) or (colon and not pattern.strip()):
        raise RulesError(
            f"{text!r} is no rule: "
            "it has to be KIND or KIND:PATTERN, such as edit or 'bash:git diff *'"
        )
    return _rule(permission, pattern.strip() or "*", action, FLAG)


def rules_of(data: Any, source: str = "given") -> list[Rule]:
    """Read the rules in a JSON object, in their order. Raises RulesError."""
    if not isinstance(data, dict):
        raise RulesError('rules have to be an object such as {"bash": {"git diff *": "allow"}}')
    rules = []
    for permission, entry in data.items():
        actions = entry if isinstance(entry, dict) else {"*": entry}
        for pattern, action in actions.items():
            if action not in get_args(Action):
                wrong = json.dumps(action)[:60]
                raise RulesError(f"{permission}: {pattern}: {wrong} is not one of allow, ask, deny")
            rules.append(_rule(permission, pattern, action, source))
    return rules


def _rule(
    permission: str,
    pattern: str,
    action: Action,
    source: str,
) -> Rule:
    tool = BUILT_IN.get(permission)
    if tool and tool.kind != permission:
        raise RulesError(f"{permission} is no kind: rules for it have the kind {tool.kind}")
    if pattern.startswith("~/"):
        pattern = os.path.realpath(os.path.expanduser("~")) + pattern[1:]
    return Rule(permission, pattern, action, source)


def _parse(text: str, source: str) -> list[Rule]:
    """Raises RulesError."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            raise RulesError(f"a name is there twice: {', '.join(name for name, _ in pairs)}")
        return entries

    try:
        return rules_of(json.loads(text, object_pairs_hook=once), source)
    except (ValueError, RecursionError) as error:
        raise RulesError(str(error)) from None


def load_rules(path: Path) -> list[Rule]:
    """Load the user's own rules; none if there is no such file.

    Raises RulesError, also if another user may have written the file.
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
    if not rules:
        return [], []
    return kept, [f"{name} can only deny and ask: {len(kept)} of its {len(rules)} rules count."]
