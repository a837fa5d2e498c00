"""Gemma-3 from Megatron ranks into a vLLM engine: windows, norms and rotary embeddings mean the same on both sides."""

from pathlib import Path

import pytest

from megatron_grpo.config.schema import ParallelConfig
from megatron_grpo.weight_sync.transport import make_transport
from tests.integration.test_refit import REFIT, assert_serves, ray_cluster, start_policy
from tests.integration.vllm_helpers import Oracle, engines, make_model

__all__ = ["ray_cluster"]  # a fixture of every test here


@pytest.mark.slow
def test_generation_equals_transformers_before_and_after_a_refit(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", seed=0, family="gemma3")
    trained = make_model(tmp_path / "trained", seed=1, family="gemma3")
    policy = start_policy(trained, ParallelConfig(tensor=2))
    try:
        with engines(base) as generation:
            assert_serves(generation, Oracle(base), version=0)
            policy.wait_ready()
            transport = make_transport(policy, generation, REFIT, Path())
            transport.connect()
            assert transport.publish(1).tensors >= 2 * 13 + 2, "13 tensors a layer, the (tied) embedding, the last norm"
            assert_serves(generation, Oracle(trained), version=1)
    finally:
        policy.shutdown()
