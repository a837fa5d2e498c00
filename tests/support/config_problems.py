"""What is wrong with a configuration, and a model that one can name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config.errors import ConfigError
from megatron_grpo.models.families import build_weight_map
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.weight_map import iter_entries
from megatron_grpo.preflight.load import compose_checked, load_config
from tests.support.hf_configs import read_configs

SMALL = read_configs("model_configs")["qwen3"]
"""config.json of a model."""


def problems_of(overrides: list[str]) -> dict[str, str]:
    """What load_config complains about: subject -> text."""
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    return {problem.subject: problem.text for problem in caught.value.problems}


def setting_problems_of(overrides: list[str]) -> dict[str, str]:
    """Problems of settings beside each other and the model, without those of this machine: subject -> text."""
    return {problem.subject: problem.text for problem in compose_checked(overrides).problems}


def write_weights(file: Path, config: dict[str, Any]) -> None:
    """A safetensors file with all tensors of a model, in float32; their content is a hole in the file."""
    shape = parse_model_shape(config)
    header, end = {}, 0
    for entry, layer, _ in iter_entries(build_weight_map(shape), shape, list(range(shape.layers))):
        for tensor in entry.hf:
            sizes = tensor.measure(shape.sizes)
            begin, end = end, end + 4 * math.prod(sizes)
            header[tensor.name.format(layer=layer)] = {"dtype": "F32", "shape": sizes, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + end)
