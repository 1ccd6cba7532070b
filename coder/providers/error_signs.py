"""By which status, code or words of a server the kind of an error is known (errors.py)."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from coder.types import ErrorKind


class Words(NamedTuple):
    """A pattern for what servers say, in lower case. With words of `unless` it does not count."""

    pattern: str
    unless: str = r"(?!)"  # matches nothing

    def are_in(self, text: str) -> bool:
        return bool(re.search(self.pattern, text)) and not re.search(self.unless, text)


NONE = Words(r"(?!)")
# Overflow of the context in the words of the servers (# is a number).
OVERFLOW_WORDS = r"""context_length_exceeded|model_context_window_exceeded|exceed_context_size_error|request_too_large|prompt_too_long
model_max_prompt_tokens_exceeded|model_context_exceeded|contextwindowexceedederror
maximum context length|exceeds? the context window|input tokens exceed|token count exceeds
prompt is too long|exceed context limit|input is too long|too many input tokens|too many tokens
exceeds the maximum number of tokens|input token limit is|maximum prompt length is
reduce the length of the messages|too large for model with|exceeded model token limit
context window exceeds limit|exceeds max length|range of input length should be
input length .{0,12}exceeds|must be less than max_seq_len|prompt token count of|longer than the model's context
is longer than the maximum model length|too long to fit into the model|context length is only|for a total of at least
exceeds the available context size|greater than the context length|exceeded .{0,7}context length
tokens \+ `?max_new_tokens|current length is # while limit|length of all messages is too long
exceeds the maximum allowed input length|configured context size is|exceeds max_seq_len|context length exceeded
context too long|token limit exceeded|request entity too large|couldn't fit with truncation""".replace(
    "\n", "|"
).replace("#", r"\d+")
OVERFLOW_CODES = {"20015", "1261"}  # SiliconFlow, Zhipu
# The limit of the answer is another one
OVERFLOW = Words(OVERFLOW_WORDS, unless=r"max_(completion_)?tokens\W{0,3}.{0,40}is too large")
QUOTA_CODES = {"insufficient_quota", "exceeded_current_quota_error", "billing_not_active", "1113"}
QUOTA_WORDS = (
    r"\bbilling\b|exceeded your current quota|insufficient[ _]quota|usage limit|out of credits|"
    r"\b(insufficient|negative|not enough|no|low|account|arrears)\b.{0,20}\bbalance\b|"
    r"\bbalance\b.{0,20}(insufficient|low|not enough|depleted|exhausted|negative)"
)
AUTH_CODES = {"invalid_api_key", "authentication_error", "invalid_authentication_error"}
AUTH_CODES |= {"permission_error", "no_db_connection"}  # LiteLLM's word for a foreign key
THROTTLED = Words(r"\brate.?limit|too many requests|throttl|please wait|concurren")
EMPTY_ACCOUNT = Words(QUOTA_WORDS, unless=THROTTLED.pattern)
TRANSIENT_400 = Words(r"tool_use_failed|no models provided")
NO_MODEL = Words(
    r"model_not_found|unknown model\b|(invalid|no such|no) model\b.{0,20}(name|id|found|:)|"
    r"unable to access model|not a valid model|"
    r"\bmodels?([ /:]+[\"'`]?[\w.:/@+-]+[\"'`]?)?[ ,]+(was |is |could )?"
    r"(not found|not exist|does(n't| not) exist|not be found|not available|not supported by this server)",
    unless=TRANSIENT_400.pattern,
)
LOADING = Words(
    r"loading (the )?model|model.{0,60}\b(is )?(currently |still )?loading|warming up",
    unless=r"\b(error|failed|unable|cannot|could not|terminated)\b",  # and never will be
)


class Sign(NamedTuple):
    """How an error of this kind is known: by its status, by a code, or by its words."""

    kind: ErrorKind
    statuses: Collection[int] = ()
    codes: Collection[str] = ()
    words: Words = NONE

    def fits(self, status: int | None, codes: set[str], words: str) -> bool:
        if status in self.statuses or not codes.isdisjoint(self.codes):
            return True
        return self.words.are_in(words)


# The first that fits counts. Throttling comes before overflow, since a throttled request may speak
# of tokens, and Gemini words a limit per minute like an empty account.
SIGNS = [
    Sign("quota", statuses={402}, codes=QUOTA_CODES),
    Sign("quota", words=EMPTY_ACCOUNT),
    Sign("auth", statuses={401, 403}, codes=AUTH_CODES),
    Sign("rate_limit", statuses={429}, words=THROTTLED),
    Sign("overflow", statuses={413}, codes=OVERFLOW_CODES, words=OVERFLOW),
    Sign("not_found", statuses={404}),
    Sign("server", statuses={408, 409, 425, *range(500, 600)}),
]
