"""Further families from Megatron ranks into vLLM engines, of which quantized folders give no weights before a refit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import GptOssConfig, PretrainedConfig, Qwen3Config

from megatron_grpo.config.generation_schema import RefitMode
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


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, how policy and engine share it, and how the weights travel."""

    family: Callable[..., PretrainedConfig]
    layout: ParallelConfig
    expert: int = 1
    mode: RefitMode = "broadcast"
    quantization: dict[str, Any] | None = None


CASES = {
    "gpt_oss": Case(family=gpt_oss, layout=ParallelConfig(tensor=2, expert=2, sequence=True)),
    "gpt_oss reshard": Case(family=gpt_oss, layout=ParallelConfig(data=2, expert=2), mode="reshard", expert=2),
    "gpt_oss in MXFP4": Case(
        family=gpt_oss, layout=ParallelConfig(data=2, expert=2), mode="reshard", quantization=MXFP4
    ),
    "qwen3 in FP8": Case(
        family=Qwen3Config,
        layout=ParallelConfig(tensor=2),
        quantization={**FP8_BLOCKS, "weight_block_size": [16, 8]},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_generation_equals_transformers_before_and_after_each_refit(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    quantization = case.quantization
    base = make_model(tmp_path / "base", seed=0, family=case.family)
    trained = make_model(tmp_path / "trained", seed=1, family=case.family)
    if quantization is not None:
        base, trained = (
            quantize_folder(folder, tmp_path / f"{folder.name}_quantized", quantization) for folder in (base, trained)
        )
    policy = start_policy(trained, case.layout)
    try:
        with engines(base, tensor=2, expert=case.expert, awaits_refit=quantization is not None) as generation:
            if quantization is None:
                assert_serves(generation, Oracle(base), version=0)
            policy.wait_ready()
            transport = make_transport(policy, generation, replace(REFIT, mode=case.mode), Path())
            transport.connect()
            for version in (1, 2):  # what the first one left behind is what the second one meets
                transport.publish(version)
                assert_serves(generation, Oracle(trained), version)
    finally:
        policy.shutdown()
