"""The weight map of released models has as many numbers as their publishers count."""

from __future__ import annotations

from math import prod

import pytest

from megatron_grpo.models.families import build_weight_map, read_model_shape
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_map import iter_entries
from tests.support.hf_configs import HF_CONFIGS, config_folder

PUBLISHED = {
    "Qwen/Qwen3-0.6B": 751_632_384,  # its safetensors files also hold the head, which is tied to the embedding
    "Qwen/Qwen3-1.7B": 2_031_739_904,  # as well
    "Qwen/Qwen3-8B": 8_190_735_360,
    "models/Qwen3-8B-YaRN": 8_190_735_360,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "unsloth/DeepSeek-V3-0324-BF16": 671_026_419_200,  # without the layer for multi-token prediction
    # Of models that see images, the text part alone.
    "Qwen/Qwen3.5-9B": 8_953_803_264,
    "Qwen/Qwen3.5-35B-A3B": 34_660_610_688,
    "Qwen/Qwen3.5-397B-A17B": 396_346_350_336,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "zai-org/GLM-4.5-Air": 106_852_251_264,
    "zai-org/GLM-4.6": 352_797_829_024,
    "zai-org/GLM-5": 743_911_218_432,  # 744B; this and the next without the layer for multi-token prediction
    "deepseek-ai/DeepSeek-V3.2": 671_877_944_064,  # DeepSeek-V3's and 61 indexers
    "moonshotai/Kimi-K2-Instruct": 1_026_408_232_448,
    "moonshotai/Moonlight-16B-A3B-Instruct": 15_960_110_208,
    "MiniMaxAI/MiniMax-M2": 228_689_764_864,  # its hub page counts 13,880,064 scales of FP8 blocks, too
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31_577_940_288,
}
"""Parameters of each model as its hub page or technical report counts them."""


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_parameters_are_as_many_as_published(name: str) -> None:
    assert _parameters(read_model_shape(config_folder(name))) == PUBLISHED[name]


def _parameters(shape: ModelShape) -> int:
    """Numbers in all tensors of the weight map, copies of tied tensors included."""
    entries = iter_entries(build_weight_map(shape), shape, range(shape.layers))
    experts = shape.experts.count if shape.experts is not None else 1
    return sum(
        prod(tensor.measure(shape.sizes)) * (experts if "{expert}" in tensor.name else 1)
        for entry, _, _ in entries
        for tensor in entry.hf
    )
