"""Tokens and money: what a server reports, in every known shape; an estimate where it reports nothing; the price."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coder.types import Usage

MAX_COUNT = 1e12  # tokens; what is more, or no number at all, is not counted
CHARS_PER_TOKEN = 4  # of English prose and code; an estimate is marked as one


def read_usage(usage: dict[str, Any]) -> Usage | None:
    """Tokens from every known shape; None where nothing is counted."""
    into = _part(usage, "prompt_tokens_details", "input_tokens_details")
    out = _part(usage, "completion_tokens_details", "output_tokens_details")
    sent = _number(usage, "prompt_tokens", "input_tokens", "prompt_eval_count")
    got = _number(usage, "completion_tokens", "output_tokens", "eval_count")
    names = ("prompt_cache_hit_tokens", "cached_tokens", "cache_read_input_tokens")
    cached = _number(into, "cached_tokens") or _number(usage, *names)
    reasoning = _number(out, "reasoning_tokens") or _number(usage, "reasoning_tokens")
    beside = _number(usage, "total_tokens") - sent - got
    if cached > sent or (beside > 0 and beside == cached):  # Anthropic: the cache beside the input
        sent, beside = sent + cached + _number(usage, "cache_creation_input_tokens"), 0
    if beside > 0 and reasoning in (0, beside):  # xAI, Gemini: reasoning beside the output
        got, reasoning = got + beside, beside
    return Usage(sent, got, cached, reasoning) if sent + got else None


def _part(usage: dict[str, Any], *names: str) -> dict[str, Any]:
    return next((usage[name] for name in names if isinstance(usage.get(name), dict)), {})


def _number(of: dict[str, Any], *names: str) -> int:
    numbers = (of[name] for name in names if isinstance(of.get(name), int | float))
    return next((int(number) for number in numbers if 0 <= number < MAX_COUNT), 0)


def estimate(sent: int, got: int) -> Usage:
    """The usage of an answer whose server reports none, from characters of JSON."""
    return Usage(sent // CHARS_PER_TOKEN, got // CHARS_PER_TOKEN, estimated=True)


@dataclass(frozen=True, slots=True)
class Price:
    """What a million tokens cost, in one currency. `cached` None: as much as other input."""

    input: float
    output: float
    cached: float | None = None

    def of(self, usage: Usage) -> float:
        """The price of these tokens."""
        cached = self.input if self.cached is None else self.cached
        fresh = max(0, usage.input - usage.cached)
        return (fresh * self.input + usage.cached * cached + usage.output * self.output) / 1_000_000
