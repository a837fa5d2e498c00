"""Finds documents for the model by the words of a query (BM25)."""

from __future__ import annotations

import heapq
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

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
