"""Rules of the permissions: allow, ask or deny, by the kind of an action and a pattern. The last rule that fits counts.

    {"edit": "allow", "bash": {"*": "ask", "git diff *": "allow"}, "read": {"secrets/*": "deny"}}

A kind is what a tool asks leave for (`read`, `edit`, `bash`, `task`, `external_directory`, `doom_loop`, `unconfined`) or a tool's
name. A path is tried relative to the workspace and absolute. In a pattern `*` is any run of characters, also of slashes and
none, and `?` is one; all of the text has to fit. A pattern that ends in a blank and a star holds without arguments as well:
`git diff *` is also `git diff`. `~/` is the user's home.

What it leaves out: what is decided with them (permissions.py).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from coder.features.trust import check_trusted
from coder.tools.searcher import small_file

Action = Literal["allow", "ask", "deny"]
STRICT: dict[Action, int] = {"allow": 0, "ask": 1, "deny": 2}
LONGEST = 1 << 16  # bytes of a file of rules that are read
FLAG = "a flag"


class RulesError(Exception):
    """Rules that cannot be understood, in one line."""


@dataclass(frozen=True, slots=True)
class Rule:
    """`source` says where it comes from, for people."""

    permission: str
    pattern: str
    action: Action
    source: str = ""

    def __str__(self) -> str:
        return f"{self.action} {self.permission}: {self.pattern}"


# ---- patterns --------------------------------------------------------------------------------------------


def fits(pattern: str, text: str) -> bool:
    """Does all of `text` fit? In linear time, whatever the pattern."""
    return bool(_compiled(pattern).fullmatch(text))


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """What stands between two stars is taken where it first fits, for good: so there is no going back."""
    whole, bare = _expression(pattern), pattern.removesuffix(" *")
    return re.compile(f"(?:{whole})|(?:{_expression(bare)})" if bare != pattern else whole, re.S)


@cache
def any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """What fits one of several patterns."""
    return re.compile("|".join(f"(?:{_compiled(pattern).pattern})" for pattern in patterns) or r"(?!)", re.S)


def _expression(pattern: str, one: str = ".") -> str:
    first, *middle = ("".join(one if each == "?" else re.escape(each) for each in piece) for piece in pattern.split("*"))
    last = f".*{middle.pop()}" if middle else ""
    return first + "".join(f"(?>.*?{piece})" for piece in middle if piece) + last


def evaluate(kinds: Collection[str], texts: Collection[str], rules: Sequence[Rule]) -> Rule | None:
    """The last rule that fits one of the kinds and one of the texts, which are names for the same; None where none does."""
    return next((rule for rule in reversed(rules) if any(fits(rule.permission, kind) for kind in kinds)
                 and any(fits(rule.pattern, text) for text in texts)), None)


def denies_all(kinds: Collection[str], rules: Sequence[Rule]) -> bool:
    """Is everything of these kinds denied, whatever the pattern?"""
    for rule in reversed(rules):
        if any(fits(rule.permission, kind) for kind in kinds):
            if rule.action != "deny":
                return False
            if not rule.pattern.strip("*"):
                return True
    return False


def dead(rules: Sequence[Rule]) -> list[str]:
    """Sentences about rules that can never count, since a later one with another answer fits wherever they do."""
    found = []
    for place, rule in enumerate(rules):
        over = next((later for later in rules[place + 1:] if later.action != rule.action and _covers(later.permission, rule.permission)
                     and _covers(later.pattern, rule.pattern)), None)
        if over:
            found.append(f"The rule `{rule}` ({rule.source or 'given'}) never counts: `{over}` ({over.source or 'given'}) comes later and "
                         "covers it. The last rule that fits decides.")
    return found


def unknown(rules: Sequence[Rule], names: Collection[str]) -> list[str]:
    """Sentences about rules whose kind is none of these names."""
    return [f"The rule `{rule}` ({rule.source or 'given'}) never counts: there is no kind and no tool {rule.permission!r}."
            for rule in rules if not any(fits(rule.permission, name) for name in names)]


def _covers(wide: str, narrow: str) -> bool:
    """Does a pattern fit all that another one fits? A star of the other's is only covered by a star."""
    if not narrow.strip("*"):
        return bool(wide) and not wide.strip("*")
    return bool(re.compile(_expression(wide, one="[^\ue000]"), re.S).fullmatch(narrow.replace("*", "\ue000")))


# ---- reading rules ---------------------------------------------------------------------------------------


def rule_of(text: str, action: Action, source: str = FLAG) -> Rule:
    """`KIND` or `KIND:PATTERN`, as flags have it. Raises RulesError."""
    permission, colon, pattern = text.partition(":")
    if not re.fullmatch(r"[\w*?-]+", permission) or (colon and not pattern.strip()):
        raise RulesError(f"{text!r} is no rule: it has to be KIND or KIND:PATTERN, such as edit or 'bash:git diff *'")
    return Rule(permission, _at_home(pattern.strip()) or "*", action, source)


def rules_of(data: Any, source: str = "") -> list[Rule]:
    """The rules in a JSON object, in their order. Raises RulesError."""
    if not isinstance(data, dict):
        raise RulesError(f'rules have to be an object such as {{"bash": {{"git diff *": "allow"}}}}, not {json.dumps(data)[:60]}')
    rules = []
    for permission, said in data.items():
        patterns = said if isinstance(said, dict) else {"*": said}
        for pattern, action in patterns.items():
            if action not in get_args(Action):
                raise RulesError(f"{permission}: {pattern}: {json.dumps(action)[:60]} is not one of {', '.join(get_args(Action))}")
            rules.append(Rule(permission, _at_home(pattern), action, source))
    return rules


def _at_home(pattern: str) -> str:
    return os.path.realpath(os.path.expanduser("~")) + pattern[1:] if pattern.startswith("~/") else pattern


def load_rules(path: Path) -> list[Rule]:
    """The user's own rules; none where there is no such file. Raises RulesError, also where somebody else may have written it."""
    if not path.exists():
        return []
    try:
        check_trusted(path)
        return rules_of(_parsed(path.read_text("utf-8")), path.name)
    except (OSError, ValueError, RulesError, RecursionError) as error:
        raise RulesError(f"{path}: {error}") from None


def _parsed(text: str) -> Any:
    """JSON in which no name stands twice: of two, the first would be lost without a word. Raises ValueError."""
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"{', '.join(sorted(twice))} stands there twice")
        return dict(pairs)
    return json.loads(text, object_pairs_hook=once)


def tightening(folder: Path) -> tuple[list[Rule], list[str]]:
    """What the workspace's own .coder/permissions.json forbids or wants to be asked about, and what a person should know of it.

    An allow in there counts for nothing (SEC-05): the file may be a stranger's.
    """
    name = ".coder/permissions.json"
    data = small_file(folder / name, LONGEST)
    if data is None:
        return [], []
    try:
        rules = rules_of(_parsed(data.decode("utf-8", "replace")), name)
    except (ValueError, RulesError, RecursionError) as error:
        return [], [f"{name} is left out: {error}"]
    kept = [rule for rule in rules if rule.action != "allow"]
    notes = [f"{name} tightens the permissions ({_counted(len(kept))})."] if kept else []
    if len(kept) < len(rules):
        notes.append(f"{name} wants to allow something ({_counted(len(rules) - len(kept))}): a folder allows nothing, that is left out.")
    return kept, notes


def _counted(number: int) -> str:
    return f"{number} rule{'s' if number != 1 else ''}"
