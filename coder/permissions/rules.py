"""Rules of the permissions: allow, ask or deny, by the kind of an action and a pattern. The last that fits counts.

    {"edit": "allow", "bash": {"*": "ask", "git diff *": "allow"}, "read": {"secrets/*": "deny"}}

A kind is what a tool asks permission for (`read`, `edit`, `bash`, `task`, `external_directory`, `doom_loop`,
`unconfined`) or a tool's name. A path is tried relative to the workspace and absolute. In a pattern `*` is any
run of characters, slashes too, and `?` is one; all of the text has to fit. A pattern that ends in a
blank and a star holds without arguments as well: `git diff *` is also `git diff`. `~/` is the home.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from coder.permissions.ownership import check_ownership
from coder.tools.repository import read_small_file

Action = Literal["allow", "ask", "deny"]
STRICT: dict[Action, int] = {"allow": 0, "ask": 1, "deny": 2}
MAX_FILE = 1 << 16  # bytes of a file of rules that are read
FLAG = "a flag"


class RulesError(Exception):
    """Rules that cannot be understood, in one line."""


@dataclass(frozen=True, slots=True)
class Rule:
    """`source` says where it comes from, for the user."""

    permission: str
    pattern: str
    action: Action
    source: str = ""

    def __str__(self) -> str:
        return f"{self.action} {self.permission}: {self.pattern}"

    @property
    def described(self) -> str:
        return f"`{self}` ({self.source or 'given'})"


# ---- patterns --------------------------------------------------------------------------------------------


def fits(pattern: str, text: str) -> bool:
    """Tell whether all of `text` fits, in linear time whatever the pattern."""
    return bool(_compiled(pattern).fullmatch(text))


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    whole, bare = _expression(pattern), pattern.removesuffix(" *")
    return re.compile(f"(?:{whole})|(?:{_expression(bare)})" if bare != pattern else whole, re.S)


def any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    """What fits one of several patterns."""
    compiled = (f"(?:{_compiled(pattern).pattern})" for pattern in patterns)
    return re.compile("|".join(compiled) or r"(?!)", re.S)


def _expression(pattern: str, one: str = ".") -> str:
    """A regular expression that takes what is between two stars where it first fits, for good."""
    first, *middle = (
        "".join(one if each == "?" else re.escape(each) for each in piece)
        for piece in pattern.split("*")
    )
    last = f".*{middle.pop()}" if middle else ""
    return first + "".join(f"(?>.*?{piece})" for piece in middle if piece) + last


def last_match(
    kinds: Collection[str], texts: Collection[str], rules: Sequence[Rule]
) -> Rule | None:
    """The last rule that fits one of the kinds and one of the texts, which are names for the same."""
    for rule in reversed(rules):
        is_kind = any(fits(rule.permission, kind) for kind in kinds)
        if is_kind and any(fits(rule.pattern, text) for text in texts):
            return rule
    return None


def denies_all(kinds: Collection[str], rules: Sequence[Rule]) -> bool:
    """Tell whether everything of these kinds is denied, whatever the pattern."""
    for rule in reversed(rules):
        if any(fits(rule.permission, kind) for kind in kinds):
            if rule.action != "deny":
                return False
            if not rule.pattern.strip("*"):
                return True
    return False


def shadowed_rules(rules: Sequence[Rule]) -> list[str]:
    """Sentences about rules that never count, since a later one fits wherever they do."""
    sentences = []
    for place, rule in enumerate(rules):
        later = [other for other in rules[place + 1 :] if other.action != rule.action]
        if over := next((other for other in later if _covers(other, rule)), None):
            sentences.append(
                f"The rule {rule.described} has no effect: {over.described} comes later and "
                "covers it. The last rule that fits decides."
            )
    return sentences


def unmatched_rules(rules: Sequence[Rule], names: Collection[str]) -> list[str]:
    """Sentences about rules whose kind is none of these names."""
    return [
        f"The rule {rule.described} has no effect: there is no kind and no tool {rule.permission!r}."
        for rule in rules
        if not any(fits(rule.permission, name) for name in names)
    ]


def _covers(later: Rule, rule: Rule) -> bool:
    return _is_wider(later.permission, rule.permission) and _is_wider(later.pattern, rule.pattern)


def _is_wider(wide: str, narrow: str) -> bool:
    """Tell whether a pattern fits all that another one fits; only a star covers the other's star."""
    if not narrow.strip("*"):
        return bool(wide) and not wide.strip("*")
    expression = re.compile(_expression(wide, one="[^\ue000]"), re.S)
    return bool(expression.fullmatch(narrow.replace("*", "\ue000")))


# ---- decisions -------------------------------------------------------------------------------------------

PATTERNS = ("edit", "external_directory")  # kinds for which "always" is not exactly what was asked


@dataclass(frozen=True, slots=True)
class Decision:
    """`always_pattern` is what "always" would store, "" where nothing can be; `reason`: why to ask.

    `even_with_yolo`: -y does not answer the question.
    """

    action: Action
    always_pattern: str = ""
    reason: str = ""
    even_with_yolo: bool = False


ALLOW = Decision("allow")


def strictest(decisions: Iterable[Decision]) -> Decision:
    """Deny before ask before allow; of several questions the one that -y does not answer."""
    return max(
        decisions,
        key=lambda each: (STRICT[each.action], each.even_with_yolo, not each.always_pattern),
        default=ALLOW,
    )


@dataclass
class Memory:
    """What the user has allowed for this session. It is not saved with the session."""

    exact: set[tuple[str, str]] = field(default_factory=set)  # (kind, text)
    rules: list[Rule] = field(default_factory=list)

    def __contains__(self, asked: tuple[str, str]) -> bool:
        return asked in self.exact or last_match((asked[0],), (asked[1],), self.rules) is not None

    def clear(self) -> None:
        """Forget all, for another conversation or another agent."""
        self.exact.clear()
        self.rules.clear()

    def add(self, permission: str, remember: str, own: bool) -> None:
        """Store what was shown: all edits, a folder, or exactly a text; `own`: a pattern of the user's."""
        if own or permission in PATTERNS:
            self.rules.append(Rule(permission, remember, "allow", "you"))
        else:
            self.exact.add((permission, remember))


# ---- reading rules ---------------------------------------------------------------------------------------


def rule_of(text: str, action: Action, source: str = FLAG) -> Rule:
    """Read `KIND` or `KIND:PATTERN`, as flags have it. Raises RulesError."""
    permission, colon, pattern = text.partition(":")
    if not re.fullmatch(r"[\w*?-]+", permission) or (colon and not pattern.strip()):
        raise RulesError(
            f"{text!r} is no rule: it has to be KIND or KIND:PATTERN, such as edit or 'bash:git diff *'"
        )
    return Rule(permission, _expand_home(pattern.strip()) or "*", action, source)


def rules_of(data: Any, source: str = "") -> list[Rule]:
    """Read the rules in a JSON object, in their order. Raises RulesError."""
    if not isinstance(data, dict):
        example = '{"bash": {"git diff *": "allow"}}'
        raise RulesError(
            f"rules have to be an object such as {example}, not {json.dumps(data)[:60]}"
        )
    rules = []
    for permission, entry in data.items():
        patterns = entry if isinstance(entry, dict) else {"*": entry}
        for pattern, action in patterns.items():
            if action not in get_args(Action):
                wrong, known = json.dumps(action)[:60], ", ".join(get_args(Action))
                raise RulesError(f"{permission}: {pattern}: {wrong} is not one of {known}")
            rules.append(Rule(permission, _expand_home(pattern), action, source))
    return rules


def _expand_home(pattern: str) -> str:
    home = os.path.realpath(os.path.expanduser("~"))
    return home + pattern[1:] if pattern.startswith("~/") else pattern


def load_rules(path: Path) -> list[Rule]:
    """Load the user's own rules; none where there is no such file.

    Raises RulesError, also where another user may have written the file.
    """
    if not path.exists():
        return []
    try:
        check_ownership(path)
        return rules_of(_parse_json(path.read_text("utf-8")), path.name)
    except (OSError, ValueError, RulesError, RecursionError) as error:
        raise RulesError(f"{path}: {error}") from None


def _parse_json(text: str) -> Any:
    """Read JSON in which no name stands twice: the first of two would be lost. Raises ValueError."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"{', '.join(sorted(twice))} stands there twice")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=once)


def load_workspace_rules(folder: Path) -> tuple[list[Rule], list[str]]:
    """Load what the workspace's .coder/permissions.json denies or asks about, and notices about it.

    An allow in it does not count: the file may be a stranger's.
    """
    name = ".coder/permissions.json"
    data = read_small_file(folder / name, MAX_FILE)
    if data is None:
        return [], []
    try:
        rules = rules_of(_parse_json(data.decode("utf-8", "replace")), name)
    except (ValueError, RulesError, RecursionError) as error:
        return [], [f"{name} is ignored: {error}"]
    kept = [rule for rule in rules if rule.action != "allow"]
    notes = [f"{name} restricts the permissions ({_count_rules(len(kept))})."] if kept else []
    if allowed := len(rules) - len(kept):
        notes.append(
            f"{name} has {_count_rules(allowed)} that would allow something, ignored: "
            "a folder can only deny and ask."
        )
    return kept, notes


def _count_rules(number: int) -> str:
    return f"{number} rule{'s' if number != 1 else ''}"
