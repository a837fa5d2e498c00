"""What is wrong with a configuration, and a model that one can name."""

from __future__ import annotations

import pytest

from megatron_grpo.config.errors import ConfigError
from megatron_grpo.preflight.load import load_config

SMALL = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 128,
    "max_position_embeddings": 8192,
}
"""config.json of a model."""


def problems_of(overrides: list[str]) -> dict[str, str]:
    """What load_config complains about: subject -> text."""
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    return {problem.subject: problem.text for problem in caught.value.problems}
