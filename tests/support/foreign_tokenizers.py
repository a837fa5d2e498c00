"""Builders of small tokenizer folders in the layouts of released models, without downloads."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
MERGES = [("2", "0"), ("2", "3"), ("20", "2"), ("202", "3"), ("\u0120", "2"), ("\u0120", "t"), ("\u0120t", "h")]
MERGES += [("\u0120th", "e"), ("c", "a"), ("ca", "t"), ("\u0120", "\u0120"), ("\u010a", "\u010a"), ("'", "s")]

CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
DEEPSEEK = ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>")
DEEPSEEK_TURNS = ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>")
DEEPSEEK_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<\uff5cUser\uff5c>' + m['content'] }}"
    "{% else %}{{ '<\uff5cAssistant\uff5c>' + m['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<\uff5cAssistant\uff5c><think>\\n' }}{% endif %}"
)


def byte_level(
    special: Sequence[str] = (),
    added: Sequence[str] = (),
    *,
    split: str = LLAMA3_SPLIT,
    bos: str | None = None,
    nfc: bool = False,
) -> Tokenizer:
    """A byte-level BPE tokenizer, as of Llama 3, Qwen and DeepSeek; `bos`: token that begins every text."""
    vocabulary = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for first, right in MERGES:
        vocabulary.setdefault(first + right, len(vocabulary))
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    if nfc:
        core.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(Regex(split), behavior="isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    if bos is not None:
        _begin_with(core, bos)
    return core


def sentencepiece_like(special: Sequence[str] = ("<unk>", "<s>", "</s>"), *, gemma: bool = False) -> Tokenizer:
    """A BPE tokenizer with bytes as a last resort: of Llama 2 and Mistral, or with `gemma` of Gemma."""
    letters = [*"\u2581abcdefghijklmnopqrstuvwxyzHCTI0123456789.,:?!'\"()\n"]
    pieces = [*special, *(f"<0x{n:02X}>" for n in range(256)), *letters]
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("c", "a"), ("\u2581", "\u2581"), ("2", "0")]
    vocabulary = {piece: n for n, piece in enumerate(dict.fromkeys([*pieces, *("".join(pair) for pair in merges)]))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if gemma:
        core.normalizer = normalizers.Replace(" ", "\u2581")
        core.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    else:
        core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        parts.append(decoders.Strip(" ", 1, 0))
    core.decoder = decoders.Sequence(parts)
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    _begin_with(core, "<bos>" if gemma else "<s>")
    return core


def _begin_with(core: Tokenizer, bos: str) -> None:
    numbered = [(bos, core.token_to_id(bos))]
    core.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=numbered)


def token(content: str, **options: bool) -> dict[str, Any]:
    """A token as tokenizer_config.json writes it."""
    plain = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    return {"__type": "AddedToken", "content": content, **plain, **options}


def save_folder(folder: Path, core: Tokenizer, model_type: str, tokenizer_class: str | None, **settings: Any) -> Path:
    """Write tokenizer.json, tokenizer_config.json and a config.json of this model type; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    named = {} if tokenizer_class is None else {"tokenizer_class": tokenizer_class}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | named))
    config = {"model_type": model_type, "vocab_size": core.get_vocab_size() + 4}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def deepseek_r1_distill(folder: Path, model_type: str = "llama") -> Path:
    """DeepSeek-R1's distillations: a byte-level tokenizer.json beside tokenizer_class LlamaTokenizerFast."""
    bos, eos = DEEPSEEK
    core = byte_level(DEEPSEEK, [*DEEPSEEK_TURNS, "<think>", "</think>"], bos=bos)
    settings = {"bos_token": token(bos), "eos_token": token(eos), "pad_token": token(eos), "unk_token": None}
    settings |= {"add_bos_token": True, "add_eos_token": False, "legacy": True, "model_max_length": 16384}
    settings |= {"clean_up_tokenization_spaces": False, "sp_model_kwargs": {}, "chat_template": DEEPSEEK_TEMPLATE}
    return save_folder(folder, core, model_type, "LlamaTokenizerFast", **settings)
