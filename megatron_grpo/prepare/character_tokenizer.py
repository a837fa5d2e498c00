"""The tokenizer of prepared models: a token for each character, and for each mark of a call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron_grpo.models.source import CALL_BEGIN, CALL_END, EOS, PAD


def make_tokenizer(vocabulary: Mapping[str, int], longest: int) -> Any:
    """Make a tokenizer of characters and call marks for `longest` positions."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel(dict(vocabulary), unk_token="<unk>"))
    marks = [text for text in (CALL_BEGIN, CALL_END) if text in vocabulary]
    # Not re.escape: it escapes blanks, which this library's regular expressions do not allow.
    pieces = [re.sub(r"[\\^$.|?*+()\[\]{}]", r"\\\g<0>", text) for text in marks]
    core.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*pieces, "."])), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=EOS,
        pad_token=PAD,
        unk_token="<unk>",
        model_max_length=longest,
        clean_up_tokenization_spaces=False,
    )
