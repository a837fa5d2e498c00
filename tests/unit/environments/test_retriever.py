"""Search in documents: BM25 by its formula, in languages with and without blanks, from files as others write them."""

import json
import math
import unicodedata
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.environments.retriever import Retriever, read_documents, split_terms
from megatron_grpo.environments.tools import ToolEnvironment


def bm25(documents: list[str], query: str) -> list[float]:
    """Score of each document, straight from the formula."""
    split = [document.lower().split() for document in documents]
    mean = sum(map(len, split)) / len(split)
    scores = []
    for document in split:
        counts, score = Counter(document), 0.0
        for word in set(query.lower().split()):
            containing = sum(word in words for words in split)
            idf = math.log(1 + (len(split) - containing + 0.5) / (containing + 0.5))
            tf = counts[word]
            score += idf * tf * 2.5 / (tf + 1.5 * (0.25 + 0.75 * len(document) / mean))
        scores.append(score)
    return scores


@settings(max_examples=100)
@given(
    documents=st.lists(
        st.lists(st.sampled_from("abcde"), min_size=1, max_size=9).map(" ".join), min_size=1, max_size=9
    ),
    query=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4).map(" ".join),
)
def test_documents_are_ranked_by_bm25(documents: list[str], query: str) -> None:
    retriever, expected = Retriever(documents), bm25(documents, query)
    scores = retriever.compute_scores(query)
    assert [scores.get(number, 0.0) for number in range(len(documents))] == pytest.approx(expected)
    order = sorted((number for number, score in enumerate(expected) if score > 0), key=lambda n: (-scores[n], n))
    assert retriever.search(query, 3) == [documents[number] for number in order[:3]]


def test_documents_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n"two words"\n')
    assert Retriever(read_documents(tmp_path / "a.jsonl")).search("words", 5) == ["two words"]
    (tmp_path / "a.txt").write_text("first part\nof one\n\n\nsecond part")
    assert Retriever(read_documents(tmp_path / "a.txt")).search("first", 5) == ["first part\nof one"]
    (tmp_path / "b.jsonl").write_text("3\n")
    with pytest.raises(ValueError, match=r"b.jsonl:1 is neither"):
        Retriever(read_documents(tmp_path / "b.jsonl"))


SEPARATORS = ("\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1e")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_lines_end_at_line_feeds_alone(tmp_path: Path, end: str, encoding: str) -> None:
    texts = [f"first{mark}second about cats {number}" for number, mark in enumerate(SEPARATORS)]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    assert sum(len(line.splitlines()) for line in lines) > len(lines), "str.splitlines would cut them"
    (tmp_path / "docs.jsonl").write_bytes(end.join([*lines, "", '"dogs"']).encode(encoding))
    retriever = Retriever(read_documents(tmp_path / "docs.jsonl"))
    assert sorted(retriever.search("cats", 99)) == sorted(texts)
    assert retriever.search("DOGS", 99) == ["dogs"]


SENTENCES = {
    "Japanese": ("猫は動物です。", "東京は日本の首都です。", "カレーが好きだ"),
    "Chinese": ("北京是中国的首都", "我喜欢吃苹果", "机器学习很有趣"),
    "Thai": ("แมวกินปลา", "กรุงเทพเป็นเมืองหลวง", "ฉันชอบน้ำชา"),
    "Khmer": ("ឆ្មាស៊ីត្រី", "ភ្នំពេញជារដ្ឋធានី"),
    "Burmese": ("ကြောင်ကငါးစားတယ်", "ရန်ကုန်မြို့"),
    "Korean": ("고양이는 동물이다", "서울은 한국의 수도이다"),
    "Hindi": ("बिल्ली एक जानवर है", "दिल्ली भारत की राजधानी है"),
}
QUERIES = (
    *(("猫", "猫は動物です。"), ("日本", "東京は日本の首都です。"), ("ｶﾚｰ", "カレーが好きだ")),
    *(("北京", "北京是中国的首都"), ("苹果", "我喜欢吃苹果"), ("学习", "机器学习很有趣")),
    *(("ปลา", "แมวกินปลา"), ("เมืองหลวง", "กรุงเทพเป็นเมืองหลวง"), ("ត្រី", "ឆ្មាស៊ីត្រី")),
    *(("고양이", "고양이는 동물이다"), ("राजधानी", "दिल्ली भारत की राजधानी है")),
    *(("GPT模型", "什么是ＧＰＴ模型？"), ("STRASSE", "Die Straße ist lang"), ("ﬁne", "a fine day")),
    *(("CAFÉ", "ein cafe\u0301 hier"), ("မြို့", "ရန်ကုန်မြို့")),
)


@pytest.mark.parametrize(("query", "document"), QUERIES)
def test_every_language_is_found(query: str, document: str) -> None:
    other_texts = [text for sentences in SENTENCES.values() for text in sentences if text != document]
    assert Retriever([*other_texts, document]).search(query, 1) == [document]


@pytest.mark.parametrize("language", SENTENCES)
def test_every_piece_of_a_text_finds_it(language: str) -> None:
    """Two characters or more of a text without blanks rank it before those that lack its letters."""
    sentences = SENTENCES[language]
    retriever = Retriever(sentences)
    for number, sentence in enumerate(sentences):
        for piece in sentence.split() if language in ("Hindi", "Korean") else _pieces(sentence):
            scores = retriever.compute_scores(piece)
            assert number in scores, piece
            lacking = [index for index, text in enumerate(sentences) if not set(piece) & set(text)]
            assert not set(lacking) & scores.keys()


def _pieces(text: str) -> list[str]:
    bare_text = text.rstrip("。")
    return [bare_text[begin : begin + size] for size in (2, 3, 4) for begin in range(len(bare_text) - size + 1)]


@settings(max_examples=50)
@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_terms_do_not_depend_on_form_and_case(text: str) -> None:
    """Composed, decomposed and compatible characters are the same, as Unicode says."""
    expected = Counter(split_terms(text))
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        assert Counter(split_terms(unicodedata.normalize(form, text))) == expected


def test_documents_are_read_before_a_run(tmp_path: Path) -> None:
    for name, content, text in (
        ("a.jsonl", b'{"text": "x"}\n{"text": 3}\n', "a.jsonl:2 is neither a text nor an object"),
        ("b.jsonl", b'{"text": "x"}\n{"text"', "b.jsonl:2 is not JSON"),
        ("c.txt", b"\xff\xfe", "c.txt is not UTF-8 text"),
    ):
        (tmp_path / name).write_bytes(content)
        options = {"tools": ["retriever"], "documents": str(tmp_path / name)}
        ((subject, reason),) = ToolEnvironment.option_problems(options)
        assert subject == f"documents={tmp_path / name}"
        assert text in reason
