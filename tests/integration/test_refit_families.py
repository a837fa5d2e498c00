"""Further families from Megatron ranks into vLLM engines, of which quantized folders give no weights before a refit."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config.generation_schema import RefitMode
from megatron_grpo.config.schema import ParallelConfig
from megatron_grpo.weight_sync.transport import make_transport
from tests.integration.test_refit import REFIT, assert_serves, ray_cluster, start_policy
from tests.integration.vllm_helpers import Oracle, engines, make_model
from tests.support.quantized_folders import FP8_BLOCKS, MXFP4, quantize_folder

__all__ = ["ray_cluster"]  # a fixture of every test here


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, how policy and engine share it, and how the weights travel."""

    family: str
    layout: ParallelConfig
    expert: int = 1
    mode: RefitMode = "broadcast"
    quantization: dict[str, Any] | None = None


CASES = {
    "gpt_oss": Case(family="gpt_oss", layout=ParallelConfig(tensor=2, expert=2, sequence=True)),
    "gpt_oss reshard": Case(family="gpt_oss", layout=ParallelConfig(data=2, expert=2), mode="reshard", expert=2),
    "gpt_oss in MXFP4": Case(
        family="gpt_oss", layout=ParallelConfig(data=2, expert=2), mode="reshard", quantization=MXFP4
    ),
    "qwen3 in FP8": Case(
        family="qwen3", layout=ParallelConfig(tensor=2), quantization={**FP8_BLOCKS, "weight_block_size": [16, 8]}
    ),
    "glm4": Case(family="glm4", layout=ParallelConfig(tensor=2)),
    "glm4_moe": Case(family="glm4_moe", layout=ParallelConfig(tensor=2, expert=2, sequence=True)),
    "phi3": Case(family="phi3", layout=ParallelConfig(tensor=2)),
    "olmo3": Case(family="olmo3", layout=ParallelConfig(tensor=2)),
    "llama4": Case(family="llama4", layout=ParallelConfig(tensor=2, expert=2, sequence=True)),
    "gemma4": Case(family="gemma4", layout=ParallelConfig(tensor=2)),
    "gemma4_moe": Case(family="gemma4_moe", layout=ParallelConfig(tensor=2, expert=2, sequence=True)),
    "mistral": Case(family="mistral", layout=ParallelConfig(tensor=2)),
    "ministral3": Case(family="ministral3", layout=ParallelConfig(tensor=2)),
    "seed_oss": Case(family="seed_oss", layout=ParallelConfig(tensor=2)),
    "nemotron_h": Case(family="nemotron_h", layout=ParallelConfig(tensor=2)),
    "nemotron_h reshard": Case(family="nemotron_h", layout=ParallelConfig(tensor=2), mode="reshard"),
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
            for version in (1, 2):  # the second refit starts from what the first left in the engine
                transport.publish(version)
                assert_serves(generation, Oracle(trained), version)
    finally:
        policy.shutdown()
