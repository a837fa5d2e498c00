"""Equal vocabularies have equal digests, however they are written, and others do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.models import source
from megatron_grpo.models.source import PREPARED_MODELS, compute_vocabulary_digest


def digest(folder: Path, content: Any, **form: Any) -> str | None:
    text = content if isinstance(content, str) else json.dumps(content, **form)
    (folder / "tokenizer.json").write_text(text)
    return compute_vocabulary_digest(folder)


VOCABULARY = {"a": 0, "b": 1, "é": 2}
WRITTEN = {"model": {"type": "BPE", "vocab": VOCABULARY}, "added_tokens": [{"id": 3, "content": "<end>"}]}


def test_the_way_of_writing_does_not_matter(tmp_path: Path) -> None:
    turned = {"added_tokens": WRITTEN["added_tokens"], "model": {"vocab": dict(reversed(VOCABULARY.items()))}}
    scored = {**WRITTEN, "model": {"vocab": [["a", -1.0], ["b", -2.0], ["é", -3.0]]}}
    digests = {digest(tmp_path, one, **form) for one in (WRITTEN, turned, scored) for form in ({}, {"indent": 2})}
    assert len(digests) == 1
    assert None not in digests


def test_another_number_or_token_does(tmp_path: Path) -> None:
    others = [
        {**WRITTEN, "model": {"vocab": {**VOCABULARY, "b": 2, "é": 1}}},
        {**WRITTEN, "model": {"vocab": {**VOCABULARY, "c": 4}}},
        {**WRITTEN, "added_tokens": []},
    ]
    assert len({digest(tmp_path, one) for one in (WRITTEN, *others)}) == 4


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model": {}}', '{"model": {"vocab": [1]}}', "[" * 10**5])
def test_what_is_no_tokenizer_has_none(content: str, tmp_path: Path) -> None:
    assert compute_vocabulary_digest(tmp_path) is None
    assert digest(tmp_path, content) is None


@pytest.mark.parametrize("name", PREPARED_MODELS)
def test_token_ids_of_prepared_models_are_those_of_their_vocabulary(name: str) -> None:
    ids = source.VOCABULARY if name.startswith(("addition", "distillation")) else source.CONVERSATION_VOCABULARY
    config = PREPARED_MODELS[name]
    found = [config[key] for key in ("vocab_size", "eos_token_id", "pad_token_id")]
    assert found == [len(ids), ids[source.EOS], ids[source.PAD]]
