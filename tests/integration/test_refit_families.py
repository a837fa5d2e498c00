"""Further families from Megatron ranks into vLLM engines, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import NemotronHConfig, PretrainedConfig

from megatron_grpo.config.schema import ParallelConfig
from megatron_grpo.weight_sync.transport import make_transport
from tests.integration.test_refit import REFIT, assert_serves, ray_cluster, start_policy
from tests.integration.vllm_helpers import Oracle, engines, make_model

__all__ = ["ray_cluster"]  # a fixture of every test here


def nemotron_h(**sizes: Any) -> PretrainedConfig:
    """A Nemotron-H with a layer of each kind but experts, for which vLLM has no kernel on a CPU."""
    mamba = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2}
    layers = ["linear_attention", "mlp", "full_attention"]
    return NemotronHConfig(**{**sizes, "tie_word_embeddings": False}, **mamba, layers_block_type=layers)


FAMILIES: dict[str, tuple[Callable[..., PretrainedConfig], ParallelConfig]] = {
    "nemotron_h": (nemotron_h, ParallelConfig(tensor=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["broadcast", "reshard"])
@pytest.mark.parametrize("name", FAMILIES)
def test_generation_equals_transformers_before_and_after_each_refit(name: str, mode: Any, tmp_path: Path) -> None:
    family, layout = FAMILIES[name]
    base = make_model(tmp_path / "base", seed=0, family=family)
    trained = make_model(tmp_path / "trained", seed=1, family=family)
    policy = start_policy(trained, layout)
    try:
        with engines(base, tensor=2) as generation:
            assert_serves(generation, Oracle(base), version=0)
            policy.wait_ready()
            transport = make_transport(policy, generation, replace(REFIT, mode=mode), Path())
            transport.connect()
            for version in (1, 2):  # what the first one left behind is what the second one meets
                transport.publish(version)
                assert_serves(generation, Oracle(trained), version)
    finally:
        policy.shutdown()
