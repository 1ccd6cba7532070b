"""Tokens and money: what a server reports, in every known shape; an estimate where it reports nothing; the price of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coder.types import Usage

MOST = 1e12  # tokens; what is more, or no number at all, is not counted
CHARS_PER_TOKEN = 4  # of English prose and code; an estimate is marked as one


def read_usage(usage: dict[str, Any]) -> Usage | None:
    """Tokens from every known shape (C3, C4); None where nothing is counted."""
    into = _part(usage, "prompt_tokens_details", "input_tokens_details")
    out = _part(usage, "completion_tokens_details", "output_tokens_details")
    sent = _number(usage, "prompt_tokens", "input_tokens", "prompt_eval_count")
    got = _number(usage, "completion_tokens", "output_tokens", "eval_count")
    cached = _number(into, "cached_tokens") or _number(
        usage, "prompt_cache_hit_tokens", "cached_tokens", "cache_read_input_tokens"
    )
    reasoning = _number(out, "reasoning_tokens") or _number(usage, "reasoning_tokens")
    beside = _number(usage, "total_tokens") - sent - got
    # What came from the cache is counted beside the input
    if cached > sent or (beside > 0 and beside == cached):
        sent, beside = sent + cached + _number(usage, "cache_creation_input_tokens"), 0
    # The total counts reasoning beside the output (xAI, Gemini): it is paid as output
    if beside > 0 and reasoning in (
        0,
        beside,
    ):
        got, reasoning = got + beside, beside
    if not sent + got:
        return None
    return Usage(sent, got, cached, reasoning)


def _part(usage: dict[str, Any], *names: str) -> dict[str, Any]:
    return next((usage[name] for name in names if isinstance(usage.get(name), dict)), {})


def _number(of: dict[str, Any], *names: str) -> int:
    return next(
        (
            int(of[name])
            for name in names
            if isinstance(of.get(name), int | float) and 0 <= of[name] < MOST
        ),
        0,
    )


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
        cached = self.input if self.cached is None else self.cached
        fresh = max(0, usage.input - usage.cached)
        return (fresh * self.input + usage.cached * cached + usage.output * self.output) / 1_000_000
