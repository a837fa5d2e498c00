"""Mixtures of experts from Megatron ranks that share them into vLLM engines that share or split them."""

from functools import partial
from pathlib import Path

import pytest
from transformers import Qwen3MoeConfig

from megatron_grpo.config.schema import ParallelConfig
from megatron_grpo.weight_sync.transport import make_transport
from tests.integration.test_refit import REFIT, assert_serves, ray_cluster, start_policy
from tests.integration.vllm_helpers import Oracle, engines, make_model

__all__ = ["ray_cluster"]  # a fixture of every test here

FAMILY = partial(
    Qwen3MoeConfig,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=48,  # vLLM's CPU kernel pads it, whole and halved
    norm_topk_prob=True,
)
LAYOUTS = {
    "ep2_to_shared": (ParallelConfig(data=2, expert=2), 2),
    "tp2ep2_to_split": (ParallelConfig(tensor=2, expert=2, sequence=True), 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_generation_equals_transformers_before_and_after_each_refit(name: str, tmp_path: Path) -> None:
    layout, expert = LAYOUTS[name]
    base = make_model(tmp_path / "base", seed=0, family=FAMILY)
    trained = make_model(tmp_path / "trained", seed=1, family=FAMILY)
    policy = start_policy(trained, layout)
    try:
        with engines(base, tensor=2, expert=expert) as generation:
            assert_serves(generation, Oracle(base), version=0)
            policy.wait_ready()
            transport = make_transport(policy, generation, REFIT, Path())
            transport.connect()
            for version in (1, 2):  # the second refit starts from what the first left in the engine
                sent = transport.publish(version)
                assert sent.tensors >= 2 * (9 + 4 * 3) + 2, "a layer's 9, 3 an expert, the embedding, the last norm"
                assert_serves(generation, Oracle(trained), version)
    finally:
        policy.shutdown()
