"""Further families from Megatron ranks into vLLM engines, of which quantized folders give no weights before a refit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import GptOssConfig, PretrainedConfig, Qwen3Config

from megatron_grpo.config.schema import ParallelConfig
from megatron_grpo.weight_sync.transport import make_transport
from tests.integration.test_refit import REFIT, assert_serves, ray_cluster, start_policy
from tests.integration.vllm_helpers import Oracle, engines, make_model
from tests.support.quantized_folders import FP8_BLOCKS, MXFP4, quantize_folder

__all__ = ["ray_cluster"]  # a fixture of every test here


def gpt_oss(**sizes: Any) -> PretrainedConfig:
    """A gpt-oss whose window is shorter than the tests' sequences."""
    return GptOssConfig(
        **{**sizes, "tie_word_embeddings": False, "intermediate_size": 128},
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
    )


FAMILIES: dict[str, tuple[Callable[..., PretrainedConfig], ParallelConfig, dict[str, Any] | None]] = {
    "gpt_oss": (gpt_oss, ParallelConfig(tensor=2, expert=2, sequence=True), None),
    "gpt_oss in MXFP4": (gpt_oss, ParallelConfig(data=2, expert=2), MXFP4),
    "qwen3 in FP8": (partial(Qwen3Config), ParallelConfig(tensor=2), {**FP8_BLOCKS, "weight_block_size": [16, 8]}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_generation_equals_transformers_before_and_after_each_refit(name: str, tmp_path: Path) -> None:
    family, layout, quantization = FAMILIES[name]
    base = make_model(tmp_path / "base", seed=0, family=family)
    trained = make_model(tmp_path / "trained", seed=1, family=family)
    if quantization is not None:
        base, trained = (
            quantize_folder(folder, tmp_path / f"{folder.name}_quantized", quantization) for folder in (base, trained)
        )
    policy = start_policy(trained, layout)
    try:
        with engines(base, tensor=2, awaits_refit=quantization is not None) as generation:
            if quantization is None:
                assert_serves(generation, Oracle(base), version=0)
            policy.wait_ready()
            transport = make_transport(policy, generation, REFIT, Path())
            transport.connect()
            for version in (1, 2):  # what the first one left behind is what the second one meets
                transport.publish(version)
                assert_serves(generation, Oracle(trained), version)
    finally:
        policy.shutdown()
