"""Questions of a run that can be answered from anywhere: from any thread, at any time, by their
ids.

    questions = Questions(timeout=60)
    questions.put(event)                    # the run's thread
    questions.wait(event, abort)
    questions.answer(event.id, "once")      # any thread

The `reply` of the event works as well. The first answer counts, whoever gives it.
"""

from __future__ import annotations

import math
import threading
import time
from typing import get_args

from coder.abort import TICK, Abort
from coder.events import Answer, DoomLoop, Event, Question, QuestionAsked, innermost

# Types of events that ask, or may carry a question of a sub-agent
ASKING = {"permission_asked", "question_asked", "doom_loop", "nested"}


def question_in(event: Event) -> Question | None:
    """The question that an event is or carries."""
    inner = innermost(event)
    return inner if isinstance(inner, Question) else None


class Questions:
    """Those that wait for an answer.

    `timeout`: seconds after which the answer is no; None: no limit.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self.timeout = timeout
        self._waiting: dict[str, Question] = {}
        self._changed = threading.Condition()

    def waiting(self) -> list[Question]:
        """The open ones, the oldest first."""
        with self._changed:
            return [question for question in self._waiting.values() if not question.is_answered]

    def put(self, question: Question) -> None:
        """List a question, so that it can be answered."""
        with self._changed:
            self._waiting[question.id] = question

    def wait(self, question: Question, abort: Abort) -> None:
        """Wait for the answer to a question, until the run is aborted or the time is over."""
        deadline = math.inf if self.timeout is None else time.monotonic() + self.timeout
        with self._changed:
            # In slices: `reply` and an abort wake nobody
            while not question.is_answered and not abort.is_set() and time.monotonic() < deadline:
                self._changed.wait(TICK)
            del self._waiting[question.id]
            if not question.is_answered and not abort.is_set():
                no = "" if isinstance(question, QuestionAsked) else "no"
                _reply(question, no, reason=f"no answer within {self.timeout:g} s")

    def drop(self, question: Question) -> None:
        """Take a question off the list, since its run was left."""
        with self._changed:
            self._waiting.pop(question.id, None)

    def answer(
        self,
        question_id: str,
        answer: str,
        reason: str = "",
        remember: str = "",
    ) -> bool:
        """Answer a question, as Session.answer does."""
        with self._changed:
            question = self._waiting.get(question_id)
            if question is None or question.is_answered:
                return False
            _reply(question, answer, reason, remember)
            self._changed.notify_all()
            return True


def _reply(question: Question, answer: str, reason: str, remember: str = "") -> None:
    """Give a question its answer. Raises ValueError for a word that it does not take."""
    if isinstance(question, QuestionAsked):
        question.reply(answer)  # the model's, which takes any text
        return
    words = get_args(Answer)
    if answer not in words:
        raise ValueError(f"the answer is one of {', '.join(words)}, not {answer!r}")
    if isinstance(question, DoomLoop):
        question.reply(answer != "no")
    else:
        question.reply(answer, reason, remember)  # type: ignore[arg-type]
