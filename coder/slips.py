"""Slips of models in a tool call: names and parameters of other agents' tools, taken if the meaning
is certain.

A model that was trained with another agent calls `Bash`, or `read` with `file_path`. A call that is
recognized is asked for, shown and stored as the call of the real tool, so the model learns the
right form from its own history. The tables of the built-in tools are in tools/slips.py. Nothing is
guessed: an alias counts only if the parameter that it means is missing and no second alias is
there, and what changes the meaning of a call (another folder, a job in the background) is never
dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Arguments = dict[str, Any]

# The whole call once more, or its arguments, in an object of their own
WRAPPERS = ("input", "arguments", "parameters", "args", "kwargs")

# What models call to end a task
ENDINGS = {"attempt_completion", "finish", "final_answer", "submit", "task_done", "complete_task"}
HOW_TO_END = "The task is done when you answer without a tool call: write the answer."


@dataclass(frozen=True)
class Slips:
    """What models write for one tool.

    `names`: other names of the tool, in lower case. `parameters`: other names of its parameters,
    and the tool's own. `dropped`: parameters that mean nothing to it. `convert`: turns the renamed
    arguments into what was meant; it raises nothing. `hints`: for names of parameters and of tools
    that have no certain meaning, what to write instead.
    """

    names: tuple[str, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()
    convert: Callable[[Arguments], Arguments] | None = None
    hints: Mapping[str, str] = field(default_factory=dict)

    def mend(self, arguments: Arguments, own: Mapping[str, Any]) -> Arguments:
        """The arguments under the names of the tool's parameters, which `own` has as keys. What is
        not certain stays as it is."""
        mended = self._rename(unwrap(arguments, own), own)
        if self.convert is None:
            return mended
        return self.convert(mended)

    def _rename(self, arguments: Arguments, own: Mapping[str, Any]) -> Arguments:
        renamed: Arguments = {}
        for name, value in arguments.items():
            if name in self.dropped and name not in own:
                continue
            meant = name
            if name not in own:
                meant = self.parameters.get(name, name)
            if meant in arguments or meant in renamed:  # not certain
                meant = name
            renamed[meant] = value
        return renamed


NO_SLIPS = Slips()


def unwrap(arguments: Arguments, own: Mapping[str, Any]) -> Arguments:
    """Take arguments out of an object that holds nothing else.

    Such as {"input": {...}} and {"name": ..., "arguments": {...}}.
    """
    names = set(arguments)
    if "name" not in own:
        names.discard("name")
    if len(names) != 1:
        return arguments
    wrapper = names.pop()
    inner = arguments[wrapper]
    if wrapper in own or wrapper not in WRAPPERS or not isinstance(inner, dict):
        return arguments
    return inner
