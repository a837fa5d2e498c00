"""Finds the Python program in a response, in fenced blocks."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

# Info string of a Python block: python, py3, Python 3, {.python .numberLines}, python title="a.py", main.py.
_PYTHON = re.compile(r"\W*(?:(?:i?python|pypy|py)\s?[\d.]*(?![\w-])|[\w./-]*\.py\b)", re.IGNORECASE)
_BACKTICKS = re.compile(r"`{3,}")
# Text before a fence at the beginning of a line: blanks, marks of lists and quotations.
_LINE_PREFIX = re.compile(r"(?:[ \t]|[-*+>]|\d{1,4}[.)])*")
_MAX_ENDS = 8  # candidates for the end of one block
# Characters of blocks that are parsed at most; after that, a block ends at its first closing fence. A parse costs at
# least _MIN_COST characters.
_PARSED_CHARACTERS = 200_000
_MIN_COST = 500

_SOURCE = "<response>"
warnings.filterwarnings("ignore", module=re.escape(_SOURCE))  # SyntaxWarnings of programs that models wrote

Kind = Literal["python", "untagged", "other"]


def extract_program(response: str) -> str:
    """Find the last Python block, or the whole response without any block.

    Without a block that is tagged as Python, it is the last untagged block that is a program, else the last untagged
    block, else the last block of another tag that is a program. So output in a block of its own is not taken for the
    program. A block that is not closed ends with the response. Empty blocks do not count.
    """
    reader = _BlockReader(response)
    blocks = [(kind, code) for kind, code in reader.read_blocks() if code.strip()]
    # Fences may stand in the strings of a program without a block. "~~~python" alone is an expression of Python.
    if not blocks or (not response.lstrip().startswith("~~~") and reader.is_program(response)):
        return response
    by_kind: dict[Kind, list[str]] = {"python": [], "untagged": [], "other": []}
    for kind, code in reversed(blocks):
        by_kind[kind].append(code)
    if by_kind["python"]:
        return by_kind["python"][0]
    programs = (code for code in (*by_kind["untagged"], *by_kind["other"]) if reader.is_program(code))
    return next(programs, by_kind["untagged"][0] if by_kind["untagged"] else response)


@dataclass(frozen=True, slots=True)
class _Fence:
    """The line that opens a block."""

    kind: Kind
    mark: str  # three or more backticks or tildes
    indent: int  # blanks before the mark
    is_at_start: bool  # only blanks and marks of lists and quotations stand before the mark


@dataclass(frozen=True, slots=True)
class _End:
    """A candidate for the end of a block."""

    line: int  # line of the fence; the content ends before it, or within it at `column`
    column: int | None  # where the fence begins within the line; None: at the line's beginning
    is_closing: bool  # the line is a closing fence and no more, or opens a Python block
    next_line: int  # line after the block
    rest: str = ""  # text after the fence, if it has another fence


class _BlockReader:
    """Splits a response into blocks, with limited work."""

    def __init__(self, response: str) -> None:
        self._lines = response.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        self._budget = _PARSED_CHARACTERS + len(response)

    def read_blocks(self) -> Iterator[tuple[Kind, str]]:
        """Yield kind and content of each block in order."""
        number = 0
        while number < len(self._lines):
            fence = _parse_opening(self._lines[number])
            number += 1
            if fence is not None:
                self._remove_quotation(number, fence)
                end = self._find_end(fence, number)
                yield fence.kind, self._join_content(fence, number, end)
                number = end.next_line
                if end.rest:  # text after the closing fence, in its line, may open the next block
                    number -= 1
                    self._lines[number] = end.rest

    def _remove_quotation(self, start: int, fence: _Fence) -> None:
        """Remove a quotation's marks from the lines of its block."""
        opening = self._lines[start - 1]
        depth = opening[: opening.find(fence.mark)].count(">") if fence.is_at_start else 0
        marks = re.compile(rf"(?:[ \t]*>){{{depth}}} ?")
        for number in range(start, len(self._lines) if depth else start):
            match = marks.match(self._lines[number])
            if match is None:  # the end of the quotation ends the block
                break
            self._lines[number] = self._lines[number][match.end() :]

    def is_program(self, code: str) -> bool:
        """True for Python with a statement or a call, unlike output."""
        tree = self._parse(code)
        if tree is None:
            return False
        expressions = [statement for statement in tree.body if isinstance(statement, ast.Expr)]
        has_call = any(isinstance(node, ast.Call) for statement in expressions for node in ast.walk(statement))
        return has_call or len(expressions) < len(tree.body)

    def _find_end(self, fence: _Fence, start: int) -> _End:
        # A fence in a string of the program does not end the block, which ends where its content is Python without
        # errors: at the first such fence that begins a line, or else at one within a line. Where there is none, the
        # first closing fence ends the block.
        ends: list[_End] = []
        within_lines: list[_End] = []
        for number in range(start, len(self._lines)):
            end = _parse_end(self._lines[number], number, fence)
            if end is None:
                continue
            ends.append(end)
            if end.column is not None:
                within_lines.append(end)
            elif self._is_python(fence, start, end):
                return end
            if len(ends) == _MAX_ENDS or fence.kind == "other" or (end.is_closing and self._budget <= 0):
                break
        last = _End(len(self._lines), None, is_closing=False, next_line=len(self._lines))
        for end in [*([] if len(ends) == _MAX_ENDS else [last]), *within_lines]:
            if self._is_python(fence, start, end):
                return end
        return next((end for end in ends if end.is_closing), ends[0] if ends else last)

    def _is_python(self, fence: _Fence, start: int, end: _End) -> bool:
        if fence.kind == "other" or self._budget <= 0:
            return False
        return self._parse(self._join_content(fence, start, end)) is not None

    def _join_content(self, fence: _Fence, start: int, end: _End) -> str:
        lines = self._lines[start : end.line]
        if end.column is not None:
            lines = [*lines, self._lines[end.line][: end.column]]
        elif end.line < len(self._lines):
            lines = [*lines, ""]
        first = next((line for line in lines if line.strip()), "")
        if first[: fence.indent].isspace():
            lines = [_cut_indent(line, fence.indent) for line in lines]
            first = _cut_indent(first, fence.indent)
        code = "\n".join(lines)
        return textwrap.dedent(code) if first[:1].isspace() else code

    def _parse(self, code: str) -> ast.Module | None:
        self._budget -= max(len(code), _MIN_COST)
        if self._budget < 0:
            return None
        try:
            return ast.parse(code, _SOURCE)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _parse_opening(line: str) -> _Fence | None:
    text = line.lstrip(" \t")
    if text.lstrip("> \t").startswith("~~~"):
        text = text.lstrip("> \t")
        info = text.lstrip("~")
        before, mark = line[: len(line) - len(text)], text[: len(text) - len(info)]
    else:
        before, backticks, info = line.rpartition("```")  # an info string has no backtick
        if not backticks or "`" in info:
            return None
        mark = backticks + "`" * (len(before) - len(before.rstrip("`")))
        before = before.rstrip("`")
        if len(_BACKTICKS.findall(before)) % 2:  # the end of a span within the line
            return None
    is_python = _PYTHON.match(info[:100]) is not None
    is_at_start = _LINE_PREFIX.fullmatch(before) is not None
    if not (is_at_start or is_python or not info.strip()):
        return None
    kind: Kind = "python" if is_python else "untagged" if not info.strip() else "other"
    return _Fence(kind, mark, len(line) - len(text) if is_at_start else 0, is_at_start)


def _parse_end(line: str, number: int, fence: _Fence) -> _End | None:
    opening = _parse_opening(line)
    if opening is not None and opening.kind == "python" and opening.is_at_start:
        return _End(number, None, is_closing=True, next_line=number)
    column = line.find(fence.mark)
    if column < 0:
        return None
    before, after = line[:column], line[column:].lstrip(fence.mark[0])
    end_column = column if before.strip() else None
    is_closing, rest = end_column is None and not after.strip(), after if "```" in after else ""
    return _End(number, end_column, is_closing=is_closing, next_line=number + 1, rest=rest)


def _cut_indent(line: str, indent: int) -> str:
    return line[min(indent, len(line) - len(line.lstrip(" \t"))) :]
