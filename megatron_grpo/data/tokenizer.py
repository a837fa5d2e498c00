"""Loads the tokenizer of a model, without code that comes with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import RunError


def load_tokenizer(model: Path | str) -> Any:
    """Load the tokenizer of a model's folder with transformers.

    Raises:
        RunError: the folder has no tokenizer, or one that needs code of its own, which is never run.
    """
    from transformers import AutoTokenizer  # here: seconds to import, spent while other processes start

    try:
        # With None, transformers would ask at the terminal whether it may run the code.
        return AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        text = f"{model} has no tokenizer that transformers can load (code that comes with a model is not run)"
        raise RunError(f"{text}: {reason}") from error
