"""Streamed Markdown as styled rows: each row is final when it is printed, and no row above is painted again.

A line is styled as it arrives. Text behind an opening mark (`**`, a backtick, `[`) is held until its end or the end of
the line decides what it is; a table until its last row, since its columns need all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import chain, groupby

from coder.cli.screen import PROSE, PlainText, cell_count, row_end, start_of

Cells = list[tuple[str, str]]  # characters, each with the words of its style, such as "bold cyan"

WINDOW = 40  # lines of code that are lexed again for each of them: a longer text in quotes loses its colour
# Languages whose lines are lexed alone, but for those of a text in quotes or a comment
LINEWISE = {"bash", "c", "cpp", "diff", "go", "java", "javascript", "js", "json", "jsx", "py"}
LINEWISE |= {"python", "rs", "rust", "sh", "sql", "ts", "tsx", "typescript"}
OPEN = "Token.Literal.String", "Token.Comment.Multiline"  # at a line's end: it goes on in the next
PIECE = 500  # characters that are broken into rows at a time: each row goes through all of them
HELD = 200  # characters behind an opening mark, after which it is taken for text
ITEM = r"(?:[-*+]|\d{1,9}[.)])\s+"
FENCE = re.compile(
    rf"(?P<head>\s*(?P<item>{ITEM})?)(?P<fence>`{{3,}}|~{{3,}})\s*(?P<language>[\w+#.-]*)[^`]*$"
)
HELD_LINE = re.compile(rf"\||({ITEM})?(```|~~~)")  # a table's, or a fence
RULE = re.compile(r" {0,3}([-*_])( *\1){2,} *$")
BLOCK = re.compile(
    r"(?P<indent>\s*)(?:(?P<heading>#{1,6})\s+|(?P<quote>>)\s?|(?P<bullet>[-*+])\s+(?P<task>\[[ xX]\]\s)?"
    r"|(?P<number>\d{1,9}[.)])\s+)(?=\S)"
)
UNDECIDED = re.compile(
    rf"#{{0,6}}|[-*_ ]*|\+|\d{{0,9}}[.)]?|>|[-*+]\s+\[[ xX]?\]?|({ITEM})?(`{{0,2}}|~{{0,2}})"
)
TOKEN_STYLES = {  # by what the name of a Pygments token begins with
    "dim": ("Token.Comment",),
    "green": ("Token.Literal.String", "Token.Generic.Inserted"),
    "cyan": ("Token.Literal.Number", "Token.Name.Builtin"),
    "blue": ("Token.Keyword",),
    "yellow": ("Token.Name.Decorator",),
    "bold": ("Token.Name.Function", "Token.Name.Class"),
    "red": ("Token.Generic.Deleted",),
}
INLINE = re.compile(
    r"""
    (?P<plain> [^\\*`~\[]+ | (?<=[a-zA-Z0-9])\*+ | ~(?=[^~]) | \\(?=[^\W_]) )
  | \\(?P<escaped> [\W_] )
  | (?P<ticks> `+ )(?!`)(?P<code> .+? )(?<!`)(?P=ticks)(?!`)
  | (?P<stars> \*{1,3} )(?=[^\s*./])(?P<strong> .+? )(?<=[^\s*])(?P=stars)(?![\w*])
  | ~~(?=[^\s~./])(?P<struck> .+? )(?<=[^\s~])~~(?![\w~])
  | \[(?P<name> [^\]\n]+ )\]\((?P<target> [^)\s]+ )\)
  | (?P<mark> `+ | \*+ | ~+ | . )
    """,
    re.X,
)
UNCERTAIN = "mark", "code", "strong", "struck"  # what more of the line may change


class Markdown(PlainText):
    """Break streamed Markdown into styled rows. `paint` puts a style in."""

    def __init__(self, paint: Callable[[str, str], str]) -> None:
        super().__init__(paint)
        self._cells: Cells = []  # of the row under way
        self._hanging: Cells = []  # what the further rows of this line begin with
        self._style = ""  # of this line
        self._line, self._at = "", 0  # its text, of which so much is in rows
        self._is_kind_known = False  # whether its kind is known
        self._fence, self._fence_column = "", 0  # that ends the code under way; where it began
        self._code: list[str] | None = None
        self._language = ""
        self._table: list[str] = []
        self._width = 80
        self._rows: list[str] = []  # finished, not returned yet

    def feed(self, text: str, width: int) -> str:
        self._width = width
        # In pieces: the time for what follows an open mark is the square of its length
        for piece in re.findall("\n|[^\n]{1,512}", text):
            if piece == "\n":
                self._end_line()
                continue
            self._line += piece
            if self._code is None and not self._is_kind_known:
                line = self._line.strip()
                if not (UNDECIDED.fullmatch(line) or HELD_LINE.match(line)):
                    self._begin_line()
            if self._is_kind_known:
                self._add_inline(is_whole=False)
        start = "" if self._is_kind_known else start_of(self._line.expandtabs(4), width)
        self.row = start or self._paint(self._cells)
        rows, self._rows = self._rows, []
        return "".join(f"{row}\n" for row in rows)

    def finish(self) -> str:
        if self._cells or self._line[self._at :]:
            self._end_line()
        self._end_table()
        return self.feed("", self._width)

    # -- lines

    def _end_line(self) -> None:
        if self._code is not None:
            self._add_code()
        elif self._line.lstrip().startswith("|"):
            self._table.append(self._line.strip())
        elif fence := FENCE.match(self._line):
            self._end_table()
            self._begin_code(fence)
        elif RULE.match(self._line):
            self._end_table()
            self._rows.append(self.paint("─" * min(self._width, 40), "dim"))
        else:
            if not self._is_kind_known:
                self._begin_line()
            self._add_inline(is_whole=True)
            self._rows.append(self._paint(self._cells))
        self._line, self._at, self._cells, self._is_kind_known = "", 0, [], False

    def _begin_line(self) -> None:
        """What kind of line this is: its beginning as the reader sees it, and its style."""
        self._end_table()
        self._is_kind_known, self._style = True, ""
        found = BLOCK.match(self._line)
        blanks = len(self._line) - len(self._line.lstrip(" "))
        self._hanging = [(" ", "")] * min(blanks, self._width // 2)
        if not found:
            return
        indent = found["indent"].expandtabs(4)
        self._at = found.end()
        if found["heading"]:
            self._style = "bold" if len(found["heading"]) > 2 else "bold cyan"
        elif found["quote"]:
            self._style = "dim"
            self._cells = self._hanging = styled(f"{indent}│ ", "dim")
        else:
            task = found["task"] and ("☐ " if "[ ]" in found["task"] else "☑ ")
            mark = f"{found['number']} " if found["number"] else task or "• "
            self._cells = styled(indent + mark)
            self._hanging = styled(" " * cell_count(indent + mark))

    def _add_inline(self, is_whole: bool) -> None:
        """Add what is decided of the line to its rows."""
        cells, self._at = inline(self._line, self._at, self._style, is_whole)
        width, least = min(self._width, PROSE), len(self._hanging)
        has_room = least < width - 1  # for a character behind it
        for start in range(0, len(cells), PIECE):
            self._cells = self._cells + cells[start : start + PIECE]
            while cell_count((text := plain(self._cells)).rstrip(" ")) > width:
                # Between words, where there is a place
                at = row_end(text, width, least) or len(start_of(text, width)) or 1
                behind = len(text) - len(text[at:].lstrip(" "))
                self._rows.append(self._paint(self._cells[:at]))
                self._cells = self._hanging * has_room + self._cells[behind:]

    def _paint(self, cells: Cells) -> str:
        shown = cells[: len(plain(cells).rstrip(" "))]
        parts = groupby(shown, lambda cell: cell[1])
        return "".join(self.paint(plain(part), style) for style, part in parts)

    # -- code and tables

    def _begin_code(self, found: re.Match[str]) -> None:
        """Code begins, perhaps as the text of an item of a list."""
        self._fence, self._code, self._language = found["fence"], [], found["language"]
        self._fence_column = len(found["head"].expandtabs(4))
        title = f"── {self._language} ──" if self._language else "──"
        item = (found["item"] or "").strip()
        indent = found["head"].expandtabs(4).partition(item)[0] if item else ""
        mark = "•" if item in ("-", "*", "+") else item
        self._rows.append(f"{indent}{mark}{' ' if mark else ''}{self.paint(title, 'dim')}")

    def _ends_code(self, line: str) -> bool:
        """Whether a line of code is the fence that ends it, which is in no text deeper than this code."""
        mark, column = line.strip(), len(line) - len(line.lstrip())
        is_fence = mark.startswith(self._fence) and not mark.strip(self._fence[0])
        return is_fence and column <= self._fence_column + 3

    def _add_code(self) -> None:
        line, code = self._line.expandtabs(4), self._code
        assert code is not None
        if self._ends_code(line):
            self._code = None
            self._rows.append(self.paint("──", "dim"))
            return
        code.append(line)
        del code[:-WINDOW]
        cells, goes_on = highlighted(code, self._language)
        self._rows.append(self._paint(cells))
        if self._language in LINEWISE and not goes_on:
            code.clear()

    def _end_table(self) -> None:
        lines, self._table = self._table, []
        if len(lines) > 1 and re.fullmatch(r"[|:\s-]*-[|:\s-]*", lines[1]):
            head, marks, *rows = map(table_cells, lines)
            set_rows = table([head, *rows], marks, self._width)
            lines = [*map(self._paint, set_rows)] or lines
        self._rows += lines


def styled(text: str, style: str = "") -> Cells:
    return [(character, style) for character in text]


def plain(cells: Iterable[tuple[str, str]]) -> str:
    return "".join(character for character, _ in cells)


def inline(text: str, at: int, style: str, is_whole: bool) -> tuple[Cells, int]:
    """The text from `at` on, with its marks as styles, and the place from which it is undecided before it is whole."""
    cells: Cells = []
    is_whole = is_whole or len(text) - at > HELD
    while found := INLINE.match(text, at):
        kind, code, strong, struck = (
            found.lastgroup,
            found["code"],
            found["strong"],
            found["struck"],
        )
        if kind in UNCERTAIN and not is_whole and (kind == "mark" or found.end() == len(text)):
            break
        at = found.end()
        if code:
            cells += styled(code.strip(), f"{style} cyan".strip())
        elif strong:
            added = "italic" if len(found["stars"]) == 1 else "bold"
            cells += inline(strong, 0, f"{style} {added}".strip(), True)[0]
        elif struck:
            cells += inline(struck, 0, f"{style} strike".strip(), True)[0]
        elif kind == "target":
            name, target = found["name"], found["target"]
            cells += styled(name, f"{style} underline".strip())
            cells += styled(f" ({target})" if name != target else "", "dim")
        else:
            cells += styled((found["escaped"] or found[0]).replace("\t", " " * 4), style)
    return cells, at


def highlighted(code: list[str], language: str) -> tuple[Cells, bool]:
    """The last line of code by the tokens of its language, if that is known; and whether a text goes on behind it."""
    from rich.syntax import Syntax  # late: 60 ms

    lexer = Syntax("", language).lexer if language else None
    if lexer is None:
        return styled(code[-1]), False
    cells, name = Cells(), ""
    for token, text in lexer.get_tokens("\n".join([*code, ""])):
        name = str(token)
        style = next((style for style, kinds in TOKEN_STYLES.items() if name.startswith(kinds)), "")
        cells += styled(text, style)
    start = sum(len(line) + 1 for line in code[:-1])
    return cells[start : start + len(code[-1])], name.startswith(OPEN)


def table_cells(line: str) -> list[str]:
    cells = re.split(r"(?<!\\)\|", line.removeprefix("|").removesuffix("|"))
    return [each.replace("\\|", "|").strip() for each in cells]


def table(rows: list[list[str]], marks: list[str], width: int) -> list[Cells]:
    """The rows of a table, as wide as its cells, at most `width` columns; none where that is too narrow.

    `marks`: each column's `---`, `--:` or `:-:`.
    """
    from rich import box, console, table, text  # late: 60 ms

    columns = max(map(len, rows))
    if width < 6 * columns - 3:
        return []
    grid = table.Table(box=box.MINIMAL, show_edge=False, pad_edge=False, border_style="dim")
    sides: list[console.JustifyMethod] = [
        "center" if mark[:1] == mark[-1:] == ":" else "right" if mark[-1:] == ":" else "left"
        for mark in marks + [""] * (columns - len(marks))
    ]
    for row in rows:
        cells = (inline(each, 0, "", True)[0] for each in row + [""] * (columns - len(row)))
        texts = [text.Text.assemble(*each) for each in cells]
        if grid.columns:
            grid.add_row(*texts)
            continue
        for heading, side in zip(texts, sides):
            grid.add_column(heading, header_style="bold", justify=side, overflow="fold")
    lines = []
    for line in console.Console(width=width).render_lines(grid):
        parts = (styled(part.text, str(part.style or "").replace("none", "")) for part in line)
        lines.append([*chain.from_iterable(parts)])
    return lines
