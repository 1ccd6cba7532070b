"""What a user sees of a realistic session, cell by cell with its styles, at three widths.

    STORE_SCREENS=1 pytest tests/test_screens.py    stores what is seen now; its diff in
    tests/data/screens is to be read

A row is its text; `‹bold red›` begins a style, and `‹›` ends it.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
from pathlib import Path

import pyte
import pytest

from coder.devtools.scripted import Body, Reply, events
from tests.harness import serve
from tests.terminal import PATIENCE, Terminal

STORED = Path(__file__).parent / "data" / "screens"
FILES = {
    "calc.py": 'def add(a, b):\n    """Add."""\n    return a - b  # the difference\n',
    "main.py": "import calc\n\nprint(calc.add(1, 2))\n",
    "check.sh": "for n in 1 2 3 4 5 6 7; do echo case $n; done\necho 'add(1, 2) is not 3' >&2\nexit 1\n",
}
ANSWER = '''# What is wrong

The function `add` **subtracts**. Two files use it, the *first* of them in [the manual](https://example.com/add):

1. `calc.py`, which has the function itself and behind it a text so long that its row is broken between words
2. `main.py`
   - 日本語の説明がここにあります。とても長いので折り返されます。改行の位置を確かめる。
   - and a party 🎉 when it is mended
- [x] found
- [ ] mended

> A quote that is long enough to be broken at forty columns, I think.

| name | what it does | 例 |
|------|--------------|----|
| `add` | adds two numbers, or should do so, but subtracts | 一 |
| `sub` | subtracts 🎉 | 二つ |

```python
def add(a: int, b: int) -> int:
    """Add two
    numbers."""
    return a - b  # this should be a plus, as anybody can see who reads it to its end
```

---
Shall I mend it?'''
SOUGHT = "the callers", "the manual", "the tests"
TASKS = [("task", {"description": f"find {each}", "prompt": f"find {each}"}) for each in SOUGHT]
LINES = "    return a - b  # the difference", "    return a + b  # the sum"
EDIT = {"path": "calc.py", "old_string": LINES[0], "new_string": LINES[1]}
ANSWERS = {
    "explain": [
        Reply("I read it first.", [("read", {"path": "calc.py"})]),
        Reply(calls=[("read", {"path": "main.py"})]),
        Reply(calls=[("ls", {})]),
        Reply(ANSWER),
    ],
    "look": [Reply(calls=TASKS), Reply("Nobody else calls it.")],
    "mend it": [
        Reply("So be it.", [("edit", EDIT)]),
        Reply(calls=[("bash", {"command": "sh check.sh"})]),
        Reply("The check **still fails**."),
    ],
    "wait": [Reply("This answer never ends, and **somebody waits** for it.")],
}
ANSWERS |= {
    f"find {each}": [Reply(calls=[("ls", {})]), Reply(f"Here are {each}.\nThat is all.")]
    for each in SOUGHT
}


class Styled(pyte.HistoryScreen):
    """A terminal with what has left it at the top. pyte knows no dim text: it is shown as one that
    blinks."""

    def select_graphic_rendition(self, *attributes: int, **more: bool) -> None:
        super().select_graphic_rendition(
            *(5 if each == 2 else each for each in attributes),
            **more,
        )

    def rows(self) -> list[str]:
        lines = [
            *self.history.top,
            *(self.buffer[row] for row in range(self.lines)),
        ]
        return [self.row([line[column] for column in range(self.columns)]) for line in lines]

    def row(self, cells: list[pyte.screens.Char]) -> str:
        row = ""
        for style, run in itertools.groupby(cells, style_of):
            text = "".join(cell.data for cell in run)
            row += f"‹{style}›{text}‹›" if style and text.strip() else text
        return row.rstrip()


def style_of(cell: pyte.screens.Char) -> str:
    names = {"bold": "bold", "blink": "dim", "italics": "italic", "underscore": "underline"}
    names |= {"reverse": "reverse"}
    words = [name for field, name in names.items() if getattr(cell, field)]
    return " ".join(
        [
            *words,
            *({cell.fg} - {"default"}),
        ]
    )


def seen(output: str, columns: int, entry: str) -> list[str]:
    """The rows from an entry on, without what differs from run to run."""
    screen = Styled(columns, 24, history=1000)
    pyte.Stream(screen).feed(output)
    text = "\n".join(screen.rows()).rstrip()
    text = text[text.index(f"‹bold›❯ ‹›{entry}") :]
    text = re.sub(r"  \d+\.\ds(?=‹)", "", re.sub(r"\d+\.\d s\b", "0.0 s", text))
    return re.sub(r"[⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏]( 3 sub-agents)( \d+s)?", r"⠋\1", text).split("\n")


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_session_as_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    may_end = {f"find {each}": threading.Event() for each in SOUGHT}
    begun = []

    def script(body: Body) -> Reply:
        run = [
            *itertools.takewhile(
                lambda each: each["role"] != "user",
                body["messages"][::-1],
            )
        ]
        words = body["messages"][-1 - len(run)]["content"]
        reply = ANSWERS[words][sum(each["role"] == "assistant" for each in run)]
        if reply.text.startswith("Here are"):
            begun.append(words)
            may_end[words].wait(PATIENCE)
        pieces = [
            re.sub(rb'_tokens": ?\d+', b'_tokens": 1234', each) for each in events(reply, body)
        ]
        hangs = words == "wait"
        return Reply(
            chunks=pieces[: -3 if hangs else None],
            close="hang" if hangs else "eof",
        )

    monkeypatch.setattr(Terminal, "columns", columns)
    flags = "--sandbox=off", "--allow=bash:sh check.sh"
    with serve(script) as server, Terminal(tmp_path, server, *flags) as session:
        for name, text in FILES.items():
            (session.ws / name).write_text(text)
        session.say("explain")
        session.enter("look")
        session.until(lambda: len(begun) == 3, "three sub-agents at work")
        session.until(
            lambda: sum("› thinking" in row for row in seen(session.output, columns, "look")) == 3
        )
        at_work = seen(session.output, columns, "look")
        for each in SOUGHT:
            may_end[f"find {each}"].set()
            session.expect(f"Here are {each}.")
        session.prompt()
        session.enter("mend it")
        session.expect("why not: ")
        session.type("y")
        session.prompt()
        session.say("/last")
        session.enter("wait")
        session.expect(" for it.")
        session.ctrl_c()
        session.prompt()
        found = [
            *seen(session.output, columns, "explain"),
            "",
            "== at work ==",
            *at_work,
            "",
        ]
    file = STORED / f"{columns}.txt"
    if os.environ.get("STORE_SCREENS"):
        file.write_text("\n".join(found))
    assert found == file.read_text().split("\n")
