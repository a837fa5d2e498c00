"""Tiny vocabularies with the structure of released tokenizer.json files: byte-level BPE, and BPE with byte fallback."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = (
    "The answer is 2023, and the question was: how many cats are in the hat?",
    "system user assistant model tool ipython developer functions",
    "You are a helpful assistant. Think step by step, then answer with a number.",
    "def add(a, b):\n    return a + b\n\nprint(add(12, 30))  # 42\n",
    '{"name": "calculator", "arguments": {"expression": "12 + 30"}}',
    "<tool_call>\n</tool_call> <tool_response>\n</tool_response> <think>\n</think>\n\n",
    "Ein Schüler zählt bis zwölf. 1, 22, 333, 4444.",
    "It's the teacher's; they'll say I've won. \\boxed{42} $x^2$",
)
"""Text that merges are learnt from."""

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""One digit a token (Qwen2, Qwen3)."""
QWEN3_5_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As Qwen2's, with combining marks in words."""
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")
"""Up to three digits a token (Llama 3, GLM-4.5, Phi-4)."""
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN_SPLIT = "|".join((*_CASED, r"\p{N}", _REST))
"""Words by case, one digit a token (Mistral's tekken)."""
O200K_SPLIT = "|".join((*(word + _SUFFIX for word in _CASED), r"\p{N}{1,3}", _REST))
"""Words by case, up to three digits a token (gpt-oss)."""


SPLITS = {
    "qwen2": QWEN2_SPLIT,
    "qwen3_5": QWEN3_5_SPLIT,
    "llama3": LLAMA3_SPLIT,
    "tekken": TEKKEN_SPLIT,
    "o200k": O200K_SPLIT,
}


def build_tokenizer(tokens: Sequence[Mapping[str, Sequence[str]]], split: str | None = None, **form: Any) -> Tokenizer:
    """The tokenizer of a layout's `core`.

    Args:
        tokens: added tokens in the order of their ids, in runs of one kind: "special", "ordinary", or "special
            stripping", which swallow the blanks around them.
        split: name of the pre-tokenizer of byte-level BPE; None: a tokenizer converted from sentencepiece.
        form: further arguments of `byte_level` or `byte_fallback`.
    """
    added = [_make_token(text, kind) for run in tokens for kind, texts in run.items() for text in texts]
    return byte_fallback(added, **form) if split is None else byte_level(SPLITS[split], added, **form)


def _make_token(text: str, kind: str) -> AddedToken:
    """A token that is found in a text before it is split."""
    strips = kind.endswith("stripping")
    return AddedToken(text, special=kind.startswith("special"), normalized=False, lstrip=strips, rstrip=strips)


def byte_level(
    split: str,
    tokens: Sequence[AddedToken],
    *,
    first: bool = False,
    nfc: bool = False,
    bos: str | None = None,
    ignore_merges: bool = False,
) -> Tokenizer:
    """A byte-level BPE tokenizer.

    Args:
        split: regular expression of the pre-tokenizer.
        tokens: added tokens, in the order of their ids.
        first: whether their ids come before those of the vocabulary, as in tekken; otherwise after it.
        nfc: whether text is normalised to NFC.
        bos: token that the post-processor puts before every text.
        ignore_merges: whether words of the vocabulary are found without merging.
    """
    merges = _learnt_merges(split)
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(start + right for start, right in merges)]
    if first:
        pieces = [*(token.content for token in tokens), *pieces]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges), ignore_merges=ignore_merges))
    if nfc:
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = _byte_level_split(split)
    core.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    _add(core, tokens)
    plain = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    core.post_processor = plain if bos is None else processors.Sequence([plain, _with_bos(core, bos)])
    return core


def byte_fallback(tokens: Sequence[AddedToken], *, bos: str, prepends: bool) -> Tokenizer:
    """A BPE tokenizer converted from sentencepiece: blanks are `▁`, unknown characters are bytes.

    Args:
        tokens: added tokens, in the order of their ids, which are the first of the vocabulary.
        bos: token that the post-processor puts before every text.
        prepends: whether a blank is put before every text and taken off when decoding (Llama 2), or not (Gemma).
    """
    blanks: list[Any] = [normalizers.Replace(" ", "▁")]
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *blanks]) if prepends else blanks[0]
    split = None if prepends else pre_tokenizers.Split(" ", "merged_with_previous")
    scratch = Tokenizer(models.BPE())
    scratch.normalizer, scratch.pre_tokenizer = normalizer, pre_tokenizers.Split("▁", "merged_with_next")
    scratch.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    model = json.loads(scratch.to_str())["model"]
    names = [token.content for token in tokens]
    base = sorted(model["vocab"], key=model["vocab"].get)
    pieces = [*names, *(f"<0x{byte:02X}>" for byte in range(256)), *(piece for piece in base if piece not in names)]
    core = Tokenizer(
        models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=[tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    core.normalizer = normalizer
    if split is not None:
        core.pre_tokenizer = split
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prepends else steps)
    _add(core, tokens)
    core.post_processor = _with_bos(core, bos)
    return core


@cache
def _learnt_merges(split: str) -> tuple[tuple[str, str], ...]:
    scratch = Tokenizer(models.BPE())
    scratch.pre_tokenizer = _byte_level_split(split)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    scratch.train_from_iterator(CORPUS, trainer)
    return tuple(tuple(pair) for pair in json.loads(scratch.to_str())["model"]["merges"])


def _byte_level_split(split: str) -> pre_tokenizers.PreTokenizer:
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), by_bytes])


def _with_bos(core: Tokenizer, bos: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, core.token_to_id(bos))]
    )


def _add(core: Tokenizer, tokens: Sequence[AddedToken]) -> None:
    """Add tokens one at a time, so that special and ordinary ones keep their order."""
    for token in tokens:
        (core.add_special_tokens if token.special else core.add_tokens)([token])
