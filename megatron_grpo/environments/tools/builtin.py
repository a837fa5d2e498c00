"""Built-in tools: exact arithmetic that evaluates no code of the model, and a search in local documents."""

from __future__ import annotations

import ast
import heapq
import json
import math
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

_LONGEST = 400
"""Largest number of characters of an expression."""
_LARGEST_BITS = 4096
"""Bits of an intermediate result."""
_DIGITS = 12
"""Significant digits of a result that is no whole number."""

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
}


def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / // % ** and brackets, as text: "7", "0.333333333333".

    Raises:
        ValueError: it is no such expression, has no value, or its value is too large.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"an expression may have {_LONGEST} characters")
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("not an expression") from None
    try:
        value = _value(tree.body)
        return str(value.numerator) if value.denominator == 1 else f"{float(value):.{_DIGITS}g}"
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("too large") from None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(Fraction(str(node.value)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _BINARY:
            return _bounded(_BINARY[type(node.op)](left, right))
    raise ValueError("only numbers, + - * / // % ** and brackets")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("only whole exponents")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(exponent.numerator) > _LARGEST_BITS:
        raise ValueError("too large")
    return base**exponent.numerator


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _LARGEST_BITS:
        raise ValueError("too large")
    return value


_WORD = re.compile(r"\w+")
_K1, _B = 1.5, 0.75


class Retriever:
    """Ranks documents by BM25 (Robertson and Zaragoza 2009, eq. 3.15), with idf = ln(1 + (N - n + 0.5) / (n + 0.5)).

    Args:
        documents: their texts.
    """

    def __init__(self, documents: Sequence[str]) -> None:
        self._documents = list(documents)
        self._lengths: list[int] = []
        self._postings: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for number, document in enumerate(self._documents):
            counts = Counter(_words(document))
            self._lengths.append(counts.total())
            for word, count in counts.items():
                self._postings[word].append((number, count))
        self._mean_length = sum(self._lengths) / max(len(self._lengths), 1)

    @staticmethod
    def from_file(path: str | Path) -> Retriever:
        """Documents of a JSONL file, each a text or an object with one under "text"; of another file, its paragraphs.

        Raises:
            ValueError: a line is neither.
        """
        text = Path(path).read_text(encoding="utf-8")
        if not str(path).endswith(".jsonl"):
            return Retriever([part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()])
        documents = []
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                row = json.loads(line)
                document = row.get("text") if isinstance(row, dict) else row
                if not isinstance(document, str):
                    raise ValueError(f'{path}:{number} is neither a text nor an object with a text under "text"')
                documents.append(document)
        return Retriever(documents)

    def search(self, query: str, count: int) -> list[str]:
        """Up to `count` documents that share a word with a query, the best first; of equal ones, the earlier."""
        best = heapq.nlargest(count, self.scores(query).items(), key=lambda one: (one[1], -one[0]))
        return [self._documents[number] for number, _ in best]

    def scores(self, query: str) -> dict[int, float]:
        """The score of every document that shares a word with a query, by number."""
        scores: defaultdict[int, float] = defaultdict(float)
        for word in set(_words(query)):
            postings = self._postings.get(word, [])
            rarity = math.log(1 + (len(self._documents) - len(postings) + 0.5) / (len(postings) + 0.5))
            for number, count in postings:
                long = 1 - _B + _B * self._lengths[number] / self._mean_length
                scores[number] += rarity * count * (_K1 + 1) / (count + _K1 * long)
        return dict(scores)


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]
