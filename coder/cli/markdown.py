"""Streamed Markdown as styled rows: each row is final when it is printed, and none is repainted.

A line is styled as it arrives. Text after an opening mark (`**`, a backtick, `[`) is held until its
end or the end of the line decides what it is; a table until its last row, since its columns need
all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import groupby, repeat
from operator import itemgetter
from typing import TYPE_CHECKING

from coder.cli.text_rows import PROSE, PlainText, cell_count, row_end, start_of

if TYPE_CHECKING:
    from rich.console import JustifyMethod
    from rich.segment import Segment

Cells = list[tuple[str, str]]  # characters, each with the words of its style, such as "bold cyan"

WINDOW = 40  # lines of code that are lexed again for each line; a longer string loses its colour
# Languages that are lexed line by line, except inside strings and comments of several lines
LINEWISE = {"bash", "c", "cpp", "diff", "go", "java", "javascript", "js", "json", "jsx", "py"}
LINEWISE |= {"python", "rs", "rust", "sh", "sql", "ts", "tsx", "typescript"}
OPEN = "Token.Literal.String", "Token.Comment.Multiline"  # at a line's end: it goes on in the next
PIECE = 500  # characters that are broken into rows at a time: each row goes through all of them
HELD = 200  # characters after an opening mark; beyond them it is taken for text
ITEM = r"(?:[-*+]|\d{1,9}[.)])\s+"
BULLETS = ("-", "*", "+")
FENCE = re.compile(
    rf"(?P<head>\s*(?P<item>{ITEM})?)(?P<fence>`{{3,}}|~{{3,}})\s*(?P<language>[\w+#.-]*)[^`]*$"
)
HELD_LINE = re.compile(rf"\||({ITEM})?(```|~~~)")  # a table's, or a fence
RULE = re.compile(r" {0,3}([-*_])( *\1){2,} *$")
BLOCK = re.compile(
    r"(?P<indent>\s*)(?:(?P<heading>#{1,6})\s+|(?P<quote>>)\s?"
    r"|(?P<bullet>[-*+])\s+(?P<task>\[[ xX]\]\s)?|(?P<number>\d{1,9}[.)])\s+)(?=\S)"
)
UNDECIDED = re.compile(
    rf"#{{0,6}}|[-*_ ]*|\+|\d{{0,9}}[.)]?|>|[-*+]\s+\[[ xX]?\]?|({ITEM})?(`{{0,2}}|~{{0,2}})"
)
TABLE_MARKS = r"[|:\s-]*-[|:\s-]*"  # the line below a table's head
TOKEN_STYLES = {  # by what the name of a Pygments token begins with
    "Token.Comment": "dim",
    "Token.Literal.String": "green",
    "Token.Generic.Inserted": "green",
    "Token.Literal.Number": "cyan",
    "Token.Name.Builtin": "cyan",
    "Token.Keyword": "blue",
    "Token.Name.Decorator": "yellow",
    "Token.Name.Function": "bold",
    "Token.Name.Class": "bold",
    "Token.Generic.Deleted": "red",
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


class Markdown(PlainText):
    """Break streamed Markdown into styled rows."""

    def __init__(self, paint: Callable[[str, str], str]) -> None:
        super().__init__(paint)
        self._width = 80
        self._rows: list[str] = []  # finished, not returned yet
        # The unfinished line
        self._line = ""
        self._at = 0  # so much of it is in rows
        self._is_kind_known = False
        self._style = ""
        self._cells: Cells = []  # of its last row
        self._hanging: Cells = []  # its further rows begin with these
        # The unfinished code
        self._code: list[str] | None = None
        self._language = ""
        self._fence = ""  # ends it
        self._fence_column = 0  # of its beginning
        self._table: list[str] = []  # lines of the unfinished table

    def feed(self, text: str, width: int) -> str:
        self._width = width
        # In pieces: the time for the text after an open mark is the square of its length
        for piece in re.findall("\n|[^\n]{1,512}", text):
            if piece == "\n":
                self._end_line()
            else:
                self._continue_line(piece)
        if self._is_kind_known:
            self.row = self._paint(self._cells)
        else:
            self.row = start_of(self._line.expandtabs(4), width)
        rows = "".join(f"{row}\n" for row in self._rows)
        self._rows = []
        return rows

    def finish(self) -> str:
        if self._cells or self._line[self._at :]:
            self._end_line()
        self._end_table()
        return self.feed("", self._width)

    # -- lines

    def _continue_line(self, piece: str) -> None:
        self._line += piece
        if self._code is not None:
            return
        if not self._is_kind_known:
            line = self._line.strip()
            if UNDECIDED.fullmatch(line) or HELD_LINE.match(line):
                return
            self._begin_line()
        self._add_inline(is_whole=False)

    def _end_line(self) -> None:
        fence = FENCE.match(self._line)
        if self._code is not None:
            self._add_code(self._code)
        elif self._line.lstrip().startswith("|"):
            self._table.append(self._line.strip())
        elif fence:
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
        self._line = ""
        self._at = 0
        self._is_kind_known = False
        self._cells = []

    def _begin_line(self) -> None:
        """Find out what kind of line this is: its beginning as the reader sees it, its style."""
        self._end_table()
        self._is_kind_known = True
        self._style = ""
        blanks = len(self._line) - len(self._line.lstrip(" "))
        self._hanging = styled(" " * min(blanks, self._width // 2))
        block = BLOCK.match(self._line)
        if not block:
            return
        self._at = block.end()
        indent = block["indent"].expandtabs(4)
        if block["heading"]:
            self._style = "bold" if len(block["heading"]) > 2 else "bold cyan"
        elif block["quote"]:
            self._style = "dim"
            self._cells = styled(f"{indent}│ ", "dim")
            self._hanging = self._cells
        else:
            mark = indent + item_mark(block)
            self._cells = styled(mark)
            self._hanging = styled(" " * cell_count(mark))

    def _add_inline(self, is_whole: bool) -> None:
        """Add what is decided of the line to its rows."""
        cells, self._at = inline(self._line, self._at, self._style, is_whole)
        width = min(self._width, PROSE)
        least = len(self._hanging)
        hanging = self._hanging if least < width - 1 else []  # without room for a character: none
        for start in range(0, len(cells), PIECE):
            self._cells = self._cells + cells[start : start + PIECE]
            text = plain(self._cells)
            while cell_count(text.rstrip(" ")) > width:
                # Between words, or within one that is too wide
                end = row_end(text, width, least) or len(start_of(text, width)) or 1
                next_word = len(text) - len(text[end:].lstrip(" "))
                self._rows.append(self._paint(self._cells[:end]))
                self._cells = hanging + self._cells[next_word:]
                text = plain(self._cells)

    def _paint(self, cells: Cells) -> str:
        shown = cells[: len(plain(cells).rstrip(" "))]
        parts = groupby(shown, key=itemgetter(1))
        return "".join(self.paint(plain(part), style) for style, part in parts)

    # -- code and tables

    def _begin_code(self, fence: re.Match[str]) -> None:
        """Code begins, perhaps as the text of an item of a list."""
        head = fence["head"].expandtabs(4)
        self._code = []
        self._language = fence["language"]
        self._fence = fence["fence"]
        self._fence_column = len(head)
        title = f"── {self._language} ──" if self._language else "──"
        item = (fence["item"] or "").strip()
        before = ""
        if item:
            mark = "•" if item in BULLETS else item
            before = f"{head.partition(item)[0]}{mark} "
        self._rows.append(before + self.paint(title, "dim"))

    def _ends_code(self, line: str) -> bool:
        """Whether a line of code is the fence that ends it; a fence further in is text."""
        mark = line.strip()
        column = len(line) - len(line.lstrip())
        is_fence = mark.startswith(self._fence) and not mark.strip(self._fence[0])
        return is_fence and column <= self._fence_column + 3

    def _add_code(self, code: list[str]) -> None:
        line = self._line.expandtabs(4)
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
        lines = self._table
        self._table = []
        if len(lines) > 1 and re.fullmatch(TABLE_MARKS, lines[1]):
            head, marks, *rows = [table_cells(line) for line in lines]
            rows_of_cells = table([head, *rows], marks, self._width)
            if rows_of_cells:
                lines = [self._paint(cells) for cells in rows_of_cells]
        self._rows += lines


def styled(text: str, style: str = "") -> Cells:
    return [(character, style) for character in text]


def plain(cells: Iterable[tuple[str, str]]) -> str:
    return "".join(character for character, _ in cells)


def item_mark(block: re.Match[str]) -> str:
    """What is shown in front of an item of a list."""
    if block["number"]:
        return f"{block['number']} "
    if block["task"]:
        return "☐ " if "[ ]" in block["task"] else "☑ "
    return "• "


def inline(
    text: str,
    at: int,
    style: str,
    is_whole: bool,
) -> tuple[Cells, int]:
    """The text from `at` on, with its marks as styles, and the start of the undecided rest."""
    cells: Cells = []
    is_whole = is_whole or len(text) - at > HELD
    while piece := INLINE.match(text, at):
        if not is_whole and may_change(piece):
            break
        cells += inline_cells(piece, style)
        at = piece.end()
    return cells, at


def whole_inline(text: str, style: str = "") -> Cells:
    cells, _ = inline(text, 0, style, is_whole=True)
    return cells


def may_change(piece: re.Match[str]) -> bool:
    """Whether more of the line may make something else of this."""
    if piece.lastgroup in ("code", "strong", "struck"):
        return piece.end() == len(piece.string)
    return piece.lastgroup == "mark"


def inline_cells(piece: re.Match[str], style: str) -> Cells:
    """The text of a mark in the style of the mark."""
    match piece.lastgroup:
        case "code":
            return styled(piece["code"].strip(), f"{style} cyan".strip())
        case "strong":
            added = "italic" if len(piece["stars"]) == 1 else "bold"
            return whole_inline(piece["strong"], f"{style} {added}".strip())
        case "struck":
            return whole_inline(piece["struck"], f"{style} strike".strip())
        case "target":
            name = styled(piece["name"], f"{style} underline".strip())
            if piece["name"] == piece["target"]:
                return name
            return name + styled(f" ({piece['target']})", "dim")
    text = piece["escaped"] or piece[0]
    return styled(text.replace("\t", " " * 4), style)


def highlighted(code: list[str], language: str) -> tuple[Cells, bool]:
    """The last line of code with the colours of its language, if that is known; and whether a
    string or a comment goes on after it."""
    from rich.syntax import Syntax  # late: 60 ms

    lexer = Syntax("", language).lexer if language else None
    if lexer is None:
        return styled(code[-1]), False
    cells: Cells = []
    token_name = ""
    for token, text in lexer.get_tokens("\n".join([*code, ""])):
        token_name = str(token)
        cells += styled(text, token_style(token_name))
    start = sum(len(line) + 1 for line in code[:-1])
    return cells[start : start + len(code[-1])], token_name.startswith(OPEN)


def token_style(name: str) -> str:
    for beginning, style in TOKEN_STYLES.items():
        if name.startswith(beginning):
            return style
    return ""


def table_cells(line: str) -> list[str]:
    cells = re.split(r"(?<!\\)\|", line.removeprefix("|").removesuffix("|"))
    return [cell.replace("\\|", "|").strip() for cell in cells]


def table(rows: list[list[str]], marks: list[str], width: int) -> list[Cells]:
    """The rows of a table, as wide as its cells need, at most `width` columns; [] if that is too
    narrow. `marks`: each column's `---`, `--:` or `:-:`."""
    from rich import box, console, table, text  # late: 60 ms

    columns = max(len(row) for row in rows)
    if width < 6 * columns - 3:
        return []
    grid = table.Table(
        box=box.MINIMAL,
        show_edge=False,
        pad_edge=False,
        border_style="dim",
    )
    for mark in [*marks, *repeat("", columns)][:columns]:
        grid.add_column(header_style="bold", justify=column_side(mark), overflow="fold")
    for number, row in enumerate(rows):
        texts = [text.Text.assemble(*whole_inline(cell)) for cell in row]
        if number:
            grid.add_row(*texts)
            continue
        for column, heading in zip(grid.columns, texts):
            column.header = heading
    return [cells_of(line) for line in console.Console(width=width).render_lines(grid)]


def cells_of(segments: Iterable[Segment]) -> Cells:
    cells: Cells = []
    for segment in segments:
        style = str(segment.style or "")
        cells += styled(segment.text, style.replace("none", ""))
    return cells


def column_side(mark: str) -> JustifyMethod:
    if not mark.endswith(":"):
        return "left"
    return "center" if mark.startswith(":") else "right"
