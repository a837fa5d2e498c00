"""The tokenizer of vLLM's processes: the run's, in place of the one that vLLM would load by itself."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from megatron_grpo.batch.special_tokens import list_added_tokens
from megatron_grpo.config.errors import RunError
from megatron_grpo.data.tokenizer import find_difference, load_tokenizer, make_sample_texts


@cache
def load_engine_tokenizer(folder: str) -> Any:
    """Load a folder's tokenizer once; errors as of `load_tokenizer`."""
    return load_tokenizer(folder)


class EngineTokenizer:
    """Stands in vLLM's registry for tokenizers of Hugging Face folders."""

    @classmethod
    def from_pretrained(cls, folder: str | Path, *_: Any, **options: Any) -> Any:
        """Load the tokenizer, with the cached properties that vLLM expects.

        Args:
            folder: the model's folder.
            options: vLLM's arguments for transformers, of which only the side of truncation has a meaning here.
        """
        from vllm.tokenizers.hf import get_cached_tokenizer

        tokenizer = get_cached_tokenizer(load_engine_tokenizer(str(folder)))  # a shallow copy
        tokenizer.truncation_side = options.get("truncation_side", tokenizer.truncation_side)
        return tokenizer


def replace_tokenizer_in_vllm() -> None:
    """Make this process of vLLM load tokenizers with `EngineTokenizer`."""
    from vllm.tokenizers.registry import TokenizerRegistry

    TokenizerRegistry.tokenizers["hf"] = (EngineTokenizer.__module__, EngineTokenizer.__name__)


def require_same_tokenizer(served: Any, tokenizer: Any) -> None:
    """Raise RunError unless vLLM has the run's tokenizer."""
    difference = find_difference(served, tokenizer, make_sample_texts(list_added_tokens(tokenizer)))
    if difference is not None:
        raise RunError(
            f"the installed vLLM has another tokenizer ({type(served).__name__}) for this model than the run, so that "
            f"stop strings and structured output would fail: {difference}"
        )
