"""A reward function that notes the texts it is given."""

import json
import os
from pathlib import Path
from typing import Any

NOTES = "MEGATRON_GRPO_TEST_NOTES"
"""Environment variable with the file for the notes."""


def letters(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
    """The share of letters in each completion; each is noted with its prompt."""
    with Path(os.environ[NOTES]).open("a", encoding="utf-8") as file:
        for prompt, completion in zip(prompts, completions, strict=True):
            file.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [sum(character.isascii() and character.isalpha() for character in text) / (len(text) + 1) for text in texts]
