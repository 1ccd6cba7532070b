"""The demo: a script instead of a language model repairs a small project through real tools.

No language model takes part, and the script says so. Its answers are fixed; requests, tools, files
and tests are real. Each answer names what the result before it has to match; if that differs, the
script reports the result and stops, so it claims no success that the tests did not show.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.types import Message

PROMPT = "The tests of this project fail. Find out why and repair it."
PACE = 0.02  # seconds between two words, so that one can watch
SCRIPT = "I am a script, not a language model"
READ = ("read", {"path": "stats.py"})
TESTS = ("bash", {"command": "python3 -m unittest 2>&1"})


def _edit(old: str, new: str) -> tuple[str, dict[str, str]]:
    return "edit", {"path": "stats.py", "old_string": old, "new_string": new}


MEAN = "return sum(values) / len(values)", "return sum(values) / len(values) if len(values) else 0"
SPREAD = "return ordered[-1] - ordred[0]", "return ordered[-1] - ordered[0]"
REPAIRED = f"""Repaired, and all 4 tests pass now. What I changed:
- stats.py: `{MEAN[0]}` is now `{MEAN[1]}`
- stats.py: `{SPREAD[0]}` is now `{SPREAD[1]}`"""

# (what the result before has to match, the answer)
STEPS: list[tuple[str, Reply]] = [
    ("", Reply(f"{SCRIPT}: my answers are fixed. First I look at what is here.", [("ls", {})])),
    (r"\btest_stats\.py\b", Reply("There are tests in test_stats.py. I run them.", [TESTS])),
    (r"(?s)ZeroDivisionError.*NameError.*^FAILED", Reply("Both are in stats.py.", [READ])),
    (
        r"\bordred\b",
        Reply(
            "The mean of nothing needs an answer, and `ordred` is a misspelt name.",
            [_edit(*MEAN), _edit(*SPREAD)],
        ),
    ),
    (r"\AEdited", Reply("Changed. I run the tests again.", [TESTS])),
    (r"^Ran 4 tests in .*\n\nOK\s*\Z", Reply(REPAIRED)),
]


def script(body: Body) -> Reply:
    """The next answer to a conversation, by the number of answers since the user's message."""
    messages: list[Message] = body["messages"]
    answered = 0
    for message in messages:
        if message["role"] == "user":
            answered = 0
        elif message["role"] == "assistant":
            answered += 1
    last = str(messages[-1]["content"]) if answered else ""
    offered = {tool["function"]["name"] for tool in body.get("tools") or ()}
    missing = sorted({"ls", "bash", "read", "edit"} - offered)
    if missing:
        return Reply(f"{SCRIPT}. I need the tools {', '.join(missing)}, which were not offered.")
    expected, reply = STEPS[min(answered, len(STEPS) - 1)]
    if re.search(expected, last, re.M):
        return reply
    return Reply(f"That is not what my script expects, so I stop here:\n{last[-500:]}")


def scratch_project() -> Path:
    """A copy of the broken project in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="coder-demo-"))
    project = Path(__file__).parent / "demo_project"
    shutil.copytree(
        project,
        folder,
        ignore=shutil.ignore_patterns("__*"),
        dirs_exist_ok=True,
    )
    return folder


def demo_server(port: int = 0, pace: float = PACE) -> ScriptedServer:
    """A server that answers with the script."""
    return ScriptedServer(lambda body: replace(script(body), pace=pace), port)
