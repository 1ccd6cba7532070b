"""Streamed Markdown as styled rows: each row is final when it is printed, and no row above is painted again.

A line is styled as it arrives. Text behind an opening mark (`**`, a backtick, `[`) is held until its end or the end of
the line decides what it is; a table until its last row, since its columns need all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from coder.cli.screen import BREAK, RowWriter, cell_count, start_of

Run = tuple[str, str]  # a text and the words of its style, such as "bold cyan"

WINDOW = 40  # lines of code that are lexed again for each of them: a longer text in quotes loses its colour
# Languages whose lines are lexed alone, but for those of a text in quotes or a comment
LINEWISE = {"bash", "c", "cpp", "diff", "go", "java", "javascript", "js", "json", "jsx", "py"}
LINEWISE |= {"python", "rs", "rust", "sh", "sql", "ts", "tsx", "typescript"}
OPEN = "Token.Literal.String", "Token.Comment.Multiline"  # at a line's end: it goes on in the next
HELD = 200  # characters behind an opening mark, after which it is taken for text
FENCE = re.compile(r"\s*(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$")
RULE = re.compile(r" {0,3}([-*_])( *\1){2,} *$")
BLOCK = re.compile(
    r"(?P<indent>\s*)(?:(?P<heading>#{1,6})\s+|(?P<quote>>)\s?|(?P<bullet>[-*+])\s+(?P<task>\[[ xX]\]\s)?"
    r"|(?P<number>\d{1,9}[.)])\s+)(?=\S)"
)
UNDECIDED = re.compile(r"#{0,6}|[-*_ ]*|\+|\d{0,9}[.)]?|>|[-*+]\s+\[[ xX]?\]?|`{0,2}|~{0,2}")
TOKEN_STYLES = (  # the first that the name of a Pygments token begins with
    ("Token.Comment", "dim"),
    ("Token.Literal.String", "green"),
    ("Token.Literal.Number", "cyan"),
    ("Token.Keyword", "blue"),
    ("Token.Name.Decorator", "yellow"),
    ("Token.Name.Builtin", "cyan"),
    ("Token.Name.Function", "bold"),
    ("Token.Name.Class", "bold"),
    ("Token.Generic.Deleted", "red"),
    ("Token.Generic.Inserted", "green"),
)


class Markdown(RowWriter):
    """Break streamed Markdown into styled rows. `paint(text, style)` puts the styles in."""

    def __init__(self, paint: Callable[[str, str], str]) -> None:
        super().__init__()
        self.paint = paint
        self._runs: list[Run] = []  # the row under way
        self._hanging: Run = ("", "")  # what the further rows of this line begin with
        self._style = ""  # of this line
        self._line = ""  # its text that is not in a row yet
        self._begun = False  # whether its kind is known
        self._fence = ""  # that ends the code under way
        self._code: list[str] | None = None
        self._language = ""
        self._table: list[str] = []
        self._width = 80
        self._rows: list[str] = []  # finished, not returned yet

    def feed(self, text: str, width: int) -> str:
        self._width = width
        for piece in re.split("(\n)", text):
            self._take(piece) if piece != "\n" else self._end_line()
        is_styled = self._begun and self._code is None
        raw = "" if is_styled else self._line.expandtabs(4)
        self.row = self._painted(self._runs) if is_styled else start_of(raw, width)
        rows, self._rows = self._rows, []
        return "".join(f"{row}\n" for row in rows)

    def finish(self) -> str:
        if self._line or self._runs:
            self._end_line()
        self._end_table()
        return self.feed("", self._width)

    # -- lines

    def _take(self, text: str) -> None:
        self._line += text
        if self._code is not None:
            return
        if not self._begun:
            line = self._line.strip()
            if not (UNDECIDED.fullmatch(line) or line.startswith(("|", "```", "~~~"))):
                self._begin_line()
        if self._begun:
            self._add_inline(is_whole=False)

    def _end_line(self) -> None:
        if self._code is not None:
            self._add_code()
        elif not self._begun and self._line.lstrip().startswith("|"):
            self._table.append(self._line.strip())
        elif not self._begun and (fence := FENCE.match(self._line)):
            self._end_table()
            self._fence, self._code, self._language = fence[1], [], fence[2]
            self._rows.append(self.paint(f"── {fence[2]} ──" if fence[2] else "──", "dim"))
        elif not self._begun and RULE.match(self._line):
            self._end_table()
            self._rows.append(self.paint("─" * min(self._width, 40), "dim"))
        else:
            if not self._begun:
                self._begin_line()
            self._add_inline(is_whole=True)
            self._rows.append(self._painted(self._runs))
        self._line, self._runs, self._begun = "", [], False

    def _begin_line(self) -> None:
        """What kind of line this is: its beginning as the reader sees it, and its style."""
        self._end_table()
        self._begun, self._style = True, ""
        found = BLOCK.match(self._line)
        blanks = len(self._line) - len(self._line.lstrip(" "))
        self._hanging = " " * min(blanks, self._width // 2), ""
        if not found:
            return
        indent = found["indent"].expandtabs(4)
        self._line = self._line[found.end() :]
        if found["heading"]:
            self._style = "bold" if len(found["heading"]) > 2 else "bold cyan"
        elif found["quote"]:
            self._style, self._hanging = "dim", (f"{indent}│ ", "dim")
            self._runs = [self._hanging]
        else:
            task = found["task"] and ("☐ " if "[ ]" in found["task"] else "☑ ")
            mark = f"{found['number']} " if found["number"] else task or "• "
            self._runs = [(indent + mark, "")]
            self._hanging = " " * cell_count(indent + mark), ""

    # -- within a line

    def _add_inline(self, is_whole: bool) -> None:
        """Add what is decided of the line to its rows."""
        parsed = Inline(self._line, self._style, is_whole)
        for text, style in parsed.runs:
            self._add(text, style)
        self._line = parsed.rest

    def _add(self, text: str, style: str) -> None:
        _append(self._runs, text.replace("\t", " " * 4), style)
        while cell_count(_plain(self._runs).rstrip(" ")) > self._width:
            self._rows.append(self._painted(self._take_runs()))

    def _take_runs(self) -> list[Run]:
        """The first row of the runs, broken between words where there is a place."""
        text, least = _plain(self._runs), len(self._hanging[0])
        end = len(start_of(text, self._width)) or 1
        breaks = [each.start() for each in re.finditer(BREAK, text[: end + 1])]
        row, rest = _split(self._runs, breaks[-1] if breaks and breaks[-1] > least else end)
        plain = _plain(rest)
        rest = _split(rest, len(plain) - len(plain.lstrip(" ")))[1]
        hangs = 0 < least < self._width - 1  # there is room for a character behind it
        self._runs = [self._hanging] if hangs else []
        for run in rest:
            _append(self._runs, *run)
        return row

    def _painted(self, runs: list[Run]) -> str:
        shown, _ = _split(runs, len(_plain(runs).rstrip(" ")))
        return "".join(self.paint(text, style) for text, style in shown)

    # -- code

    def _add_code(self) -> None:
        line, code = self._line, self._code
        assert code is not None
        if line.strip().startswith(self._fence) and not line.strip(" \t`~"):
            self._code = None
            self._rows.append(self.paint("──", "dim"))
            return
        code.append(line)
        del code[:-WINDOW]
        runs, goes_on = highlighted(code, self._language)
        self._rows.append(self._painted(runs))
        if self._language in LINEWISE and not goes_on:
            code.clear()

    # -- tables

    def _end_table(self) -> None:
        lines, self._table = self._table, []
        if len(lines) > 1 and re.fullmatch(r"[|:\s-]*-[|:\s-]*", lines[1]):
            head, marks, *rows = map(_cells, lines)
            shown = table([head, *rows], marks, self._width)
            lines = [self._painted(row) for row in shown] or lines
        self._rows += lines


# ---- inline marks ------------------------------------------------------------------------


class Inline:
    """The runs of a text, and the `rest` of it that is undecided before the line is whole."""

    PLAIN = re.compile(r"[^\\*`\[]+")
    CODE = re.compile(r"(`+)(.+?)(?<!`)\1(?!`)")
    STRONG = re.compile(r"(\*{1,3})(?=[^\s*./])(.+?)(?<=[^\s*])\1(?![\w*])")
    LINK = re.compile(r"\[([^\]\n]+)\]\(([^)\s]+)\)")

    def __init__(self, text: str, style: str, is_whole: bool) -> None:
        self.runs: list[Run] = []
        self.rest = text
        is_whole = is_whole or len(text) > HELD
        while self.rest and self._next(style, is_whole):
            pass

    def _next(self, style: str, is_whole: bool) -> bool:
        """Take one piece of the rest; False where it is undecided."""
        text, mark = self.rest, self.rest[0]
        if plain := self.PLAIN.match(text):
            # the character before a mark stays with it: `a*b` is no emphasis
            return self._took(plain.end(), (plain[0], style))
        if mark == "\\":
            if len(text) == 1 and not is_whole:
                return False
            escaped = text[1:2] if text[1:2] and not text[1:2].isalnum() else ""
            return self._took(1 + len(escaped), (escaped or mark, style))
        if mark == "`" and (code := self.CODE.match(text)):
            if code.end() < len(text) or is_whole:
                return self._took(code.end(), (code[2].strip(), f"{style} cyan".strip()))
        elif mark == "*" and not self._is_in_word() and (strong := self.STRONG.match(text)):
            if strong.end() < len(text) or is_whole:
                added = "italic" if len(strong[1]) == 1 else "bold"
                runs = Inline(strong[2], f"{style} {added}".strip(), True).runs
                return self._took(strong.end(), *runs)
        elif mark == "[" and (link := self.LINK.match(text)):
            shown = [(link[1], f"{style} underline".strip())]
            if link[1] != link[2]:
                shown.append((f" ({link[2]})", "dim"))
            return self._took(link.end(), *shown)
        if not is_whole and not (mark == "*" and self._is_in_word()):
            return False
        length = len(re.match(r"\*+|`+|.", text)[0])  # type: ignore[index]
        return self._took(length, (text[:length], style))

    def _is_in_word(self) -> bool:
        before = self.runs[-1][0][-1:] if self.runs else ""
        return before.isalnum() and before.isascii()

    def _took(self, length: int, *runs: Run) -> bool:
        self.runs += runs
        self.rest = self.rest[length:]
        return True


def _append(runs: list[Run], text: str, style: str) -> None:
    """Add a run, or to the last one where the style is the same."""
    if runs and runs[-1][1] == style:
        text = runs.pop()[0] + text
    runs.append((text, style))


def _plain(runs: list[Run]) -> str:
    return "".join(text for text, _ in runs)


def _split(runs: list[Run], at: int) -> tuple[list[Run], list[Run]]:
    """The runs before and behind this character."""
    before: list[Run] = []
    for place, (text, style) in enumerate(runs):
        if at < len(text):
            return [*before, (text[:at], style)], [(text[at:], style), *runs[place + 1 :]]
        before.append((text, style))
        at -= len(text)
    return before, []


# ---- code and tables ---------------------------------------------------------------------


def highlighted(code: list[str], language: str) -> tuple[list[Run], bool]:
    """The last line of code by the tokens of its language, if that is known; and whether a text goes on behind it."""
    from rich.syntax import Syntax  # late: 60 ms

    lexer = Syntax("", language).lexer if language else None
    if lexer is None:
        return [(code[-1], "")], False
    lines, name = list[list[Run]]([[]]), ""
    for token, text in lexer.get_tokens("\n".join([*code, ""])):
        name = str(token)
        style = next((style for start, style in TOKEN_STYLES if name.startswith(start)), "")
        first, *others = text.split("\n")
        _append(lines[-1], first, style)
        lines += [[(part, style)] for part in others]
    return lines[len(code) - 1], name.startswith(OPEN)


def _cells(line: str) -> list[str]:
    inner = line.removeprefix("|").removesuffix("|")
    return [each.replace("\\|", "|").strip() for each in re.split(r"(?<!\\)\|", inner)]


def table(rows: list[list[str]], marks: list[str], width: int) -> list[list[Run]]:
    """The rows of a table, as wide as its cells, at most `width` columns; none where that is too narrow.

    `marks`: each column's `---`, `--:` or `:-:`.
    """
    from rich import box, console, table, text  # late: 60 ms

    columns = max(map(len, rows))
    if width < 6 * columns - 3:
        return []
    grid = table.Table(box=box.MINIMAL, show_edge=False, pad_edge=False, border_style="dim")
    marks = marks + [""] * (columns - len(marks))
    for row in rows:
        runs = (Inline(cell, "", True).runs for cell in row + [""] * (columns - len(row)))
        cells = [text.Text.assemble(*each) for each in runs]
        if grid.columns:
            grid.add_row(*cells)
            continue
        for cell, mark in zip(cells, marks):
            side: console.JustifyMethod = "right" if mark.endswith(":") else "left"
            side = "center" if re.fullmatch(":-+:", mark) else side
            grid.add_column(cell, header_style="bold", justify=side, overflow="fold")
    lines = console.Console(width=width).render_lines(grid)
    return [
        [(part.text, str(part.style or "").replace("none", "")) for part in line] for line in lines
    ]
