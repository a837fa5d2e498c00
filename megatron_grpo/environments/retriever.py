"""Search in local documents by BM25, in any script."""

from __future__ import annotations

import heapq
import json
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

_K1, _B = 1.5, 0.75


class Retriever:
    """Ranks documents by BM25 (Robertson and Zaragoza 2009, eq. 3.15).

    The idf is ln(1 + (N - n + 0.5) / (n + 0.5)).
    """

    def __init__(self, documents: Sequence[str]) -> None:
        self._documents = list(documents)
        self._lengths: list[int] = []
        self._postings: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for index, document in enumerate(self._documents):
            counts = Counter(split_terms(document))
            self._lengths.append(counts.total())
            for term, count in counts.items():
                self._postings[term].append((index, count))
        self._mean_length = sum(self._lengths) / max(len(self._lengths), 1)

    def search(self, query: str, count: int) -> list[str]:
        """Find up to `count` documents, best first; among equals the earlier first."""
        scores = self.compute_scores(query)
        best = heapq.nlargest(count, scores, key=lambda index: (scores[index], -index))
        return [self._documents[index] for index in best]

    def compute_scores(self, query: str) -> dict[int, float]:
        """Score documents that share a term with a query; by index."""
        scores: defaultdict[int, float] = defaultdict(float)
        for term in set(split_terms(query)):
            postings = self._postings.get(term, [])
            idf = math.log(1 + (len(self._documents) - len(postings) + 0.5) / (len(postings) + 0.5))
            for index, count in postings:
                relative_length = 1 - _B + _B * self._lengths[index] / self._mean_length
                scores[index] += idf * count * (_K1 + 1) / (count + _K1 * relative_length)
        return dict(scores)


def read_documents(path: str | Path) -> list[str]:
    """Read documents: lines of a JSONL file, or paragraphs of another file.

    A line of JSONL is a text, or an object with "text". ValueError names the line that is neither, or another coding
    than UTF-8.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    if not str(path).endswith(".jsonl"):
        paragraphs = re.split(r"\n\s*\n", text.replace("\r\n", "\n"))
        return [paragraph.strip() for paragraph in paragraphs if paragraph.strip()]
    documents = []
    # Not splitlines: a text in JSON may contain other line separators, such as U+2028.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number} is not JSON: {error}") from None
            document = row.get("text") if isinstance(row, dict) else row
            if not isinstance(document, str):
                raise ValueError(f'{path}:{number} is neither a text nor an object with a text under "text"')
            documents.append(document)
    return documents


_PLAIN_WORD = re.compile(r"\w+")
_IDEOGRAPHS = (
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Han and kana
    "\U0001b000-\U0001b16f\U00020000-\U000323af"
    "\u1100-\u11ff\ua960-\ua97f\uac00-\ud7ff"  # Hangul, whose words carry particles
)
_LETTERS = (  # scripts without blanks whose words are of several letters
    "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u1950-\u19df\u1a20-\u1aaf\ua980-\ua9df\uaa60-\uaadf"
)  # Thai and Lao, Tibetan, Burmese, Khmer, Tai


_RUNS = re.compile(rf"(?P<ideographs>[{_IDEOGRAPHS}]+)|(?P<letters>[{_LETTERS}]+)|[^{_IDEOGRAPHS}{_LETTERS}]+")


@cache
def _compile_word() -> re.Pattern[str]:
    # The letters of a word may carry combining marks, which \w does not match.
    marks = [chr(code) for code in range(0x300, 0x20000) if unicodedata.category(chr(code))[0] == "M"]
    return re.compile(rf"[\w{''.join(marks)}]+")


def split_terms(text: str) -> Iterator[str]:
    """Yield the terms of a document or query.

    Texts are compared in Unicode's form NFKC without case. In scripts without blanks between words, the terms are
    single characters (ideographs, kana, Hangul) and pairs of neighbours (these, Thai, Lao, Burmese, Khmer, Tibetan).
    """
    if text.isascii():
        yield from _PLAIN_WORD.findall(text.lower())
        return
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    for run in (run for match in _compile_word().finditer(folded) for run in _RUNS.finditer(match[0])):
        term, kind = run[0], run.lastgroup
        if kind is None:
            yield term
            continue
        if kind == "ideographs" or len(term) == 1:
            yield from term
        yield from (term[start : start + 2] for start in range(len(term) - 1))
