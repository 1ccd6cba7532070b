"""Answers without a call although the model meant one: a call written as text, or an announcement.

A text is never run as a call: what was meant is not certain, and it may be a quotation. The model
is asked once more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

IsTool = Callable[[str], bool]  # Is this the name of an offered tool?

TEXT_CALL = (
    "Nothing was run: your answer holds a tool call written as text. "
    "Call the tool itself ({tools}), or answer without such markup."
)
ANNOUNCEMENT = "You announced a step and called no tool. Do it now, or say that you are done."

# Marks that no prose has, of Kimi, DeepSeek, Llama and Mistral
MARKS = (
    "<|tool_call_begin",
    "<|tool_calls_begin",
    "<|tool_call_section_begin",
    "<|tool_calls_section_begin",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁calls▁begin｜>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "```tool_code",
)
# To compile the patterns below takes 0.7 ms at the end of a first answer: each is used only on a
# text that has a sign of it.
#
# What names a tool: Qwen and Hermes, GLM, Qwen3-Coder, Anthropic, harmony, ReAct. Each form begins
# with a letter or a sign, and only then looks back for the start of its line: so the search passes
# quickly over a long answer.
NAMED = (
    r'(?s)<tool_call>\s*(?:\{.*?"name"\s*:\s*")?(?:<function=)?(?P<a>[\w.-]+)'
    r"|<function=(?P<b>[\w.-]+)"
    r'|<invoke name="(?P<c>[\w.-]+)"'
    r"|to=functions\.(?P<d>[\w-]+)"
    r"|Action:(?<![^\n]Action:)\s*(?P<e>[\w-]+)[ \t]*\n+Action Input:"
    r"|<(?<![^\n]<)(?P<f>[\w-]+)>\s*<(?P<parameter>\w+)>.*?</(?P=parameter)>"
)
SIGNS = ("<", "to=functions.", "Action:")  # of NAMED
PYTHONIC = r"(?s)\[?\s*(?P<name>\w+)\((?:\s*\w+\s*=.*)?\)\s*\]?"
FENCED = r"(?s)```\w*\s*\n(?P<inside>.*?)\n?```"
QUOTED = r"(?s)```(?!tool_code).*?(?:```|\Z)|`[^`\n]+`"


def reminder(
    answer: str,
    tools: list[str],
    is_tool: IsTool,
    has_called: bool,
) -> str:
    """What the model is told after the text of an answer without a call; "" if that is all right.

    `tools`: the names of those that it can call; `is_tool` also knows their other names.
    `has_called`: in this run.
    """
    if not tools:
        return ""
    if holds_text_call(answer, is_tool):
        names = tools[:4]
        if len(tools) > 4:
            names.append("...")
        return TEXT_CALL.format(tools=", ".join(names))
    if answer.rstrip().endswith(":") and not has_called:
        return ANNOUNCEMENT
    return ""


def holds_text_call(text: str, is_tool: IsTool) -> bool:
    """Is a call of one of the tools written in the text? Text between backticks is a quotation."""
    unquoted = re.sub(QUOTED, "", text) if "`" in text else text
    has_mark = any(mark in unquoted for mark in MARKS)
    if has_mark or _names_tool(unquoted, is_tool):
        return True
    return _is_whole_call(text.strip(), is_tool)


def _names_tool(text: str, is_tool: IsTool) -> bool:
    """Is one of the tools named, as a call names it?"""
    if not any(sign in text for sign in SIGNS):
        return False
    for call in re.finditer(NAMED, text):
        for group, name in call.groupdict().items():
            if name and group != "parameter" and is_tool(name):
                return True
    return False


def _is_whole_call(text: str, is_tool: IsTool) -> bool:
    """Is the text as a whole, or its only fenced block, a call as JSON or as Python?"""
    blocks = re.findall(FENCED, text) if "```" in text else []
    if len(blocks) == 1:
        text = blocks[0].strip()
    elif text.endswith((")", "]")):  # in a block, Python is code that is shown
        pythonic = re.fullmatch(PYTHONIC, text)
        if pythonic and is_tool(pythonic["name"]):
            return True
    try:
        calls = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(calls, list):
        calls = [calls]
    return bool(calls) and all(_is_json_call(call, is_tool) for call in calls)


def _is_json_call(value: Any, is_tool: IsTool) -> bool:
    """{"name": "read", "arguments": {...}}, also inside {"function": ...}."""
    if not isinstance(value, dict):
        return False
    call = value
    if isinstance(value.get("function"), dict):
        call = value["function"]
    name = call.get("name") or call.get("tool") or call.get("tool_name")
    has_arguments = any(key in call for key in ("arguments", "parameters", "input", "args"))
    return isinstance(name, str) and is_tool(name) and has_arguments
