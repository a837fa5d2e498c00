"""Refits through a folder: the same bits as over links, and only what changed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from megatron_grpo.config.generation_schema import RefitMode
from megatron_grpo.config.schema import RefitConfig
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.trainer.model_ranks import MegatronPolicy
from megatron_grpo.weight_sync.transport import make_transport
from tests.integration.test_refit import ray_cluster, start_policy
from tests.integration.test_reshard import CASES, RARE, Case, answers
from tests.integration.vllm_helpers import engines, make_model

__all__ = ["ray_cluster"]  # a fixture of every test here

REFIT = RefitConfig(mode="files", bucket_mib=0.02, timeout_s=60.0, retries=0)
"""Files so small that a version has many."""
OTHERS = ("ep2_to_ep2", "latent_tp2_to_pp2")


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES.values(), *(RARE[name] for name in OTHERS)], ids=[*CASES, *OTHERS])
def test_the_engine_holds_the_same_bits_however_weights_come(case: Case, tmp_path: Path) -> None:
    family = case.family
    base = make_model(tmp_path / "base", seed=0, family=family)
    policy = start_policy(make_model(tmp_path / "trained", seed=1, family=family), case.training)
    try:
        with engines(base, **case.generation) as generation:
            policy.wait_ready()
            files = make_transport(policy, generation, REFIT, tmp_path / "run")
            files.connect()
            before = answers(generation)
            files.publish(1)
            through_files = answers(generation)
            assert not np.array_equal(before, through_files), "another model"
            assert np.array_equal(through_files, _over_links("broadcast", policy, generation, version=2))
            assert np.array_equal(through_files, _over_links("reshard", policy, generation, version=3))
            # Layers that are not loaded again stay as they are.
            files.connect()
            assert files.publish(4).bytes_sent > 0
            assert files.publish(5).bytes_sent == 0, "nothing has changed"
            assert np.array_equal(answers(generation), through_files)
            ray.get(policy.submit(scale_a_norm, 2.0))
            report = files.publish(6)
            assert report.tensors == 1
            changed = answers(generation)
            assert not np.array_equal(changed, through_files)
            assert np.array_equal(changed, _over_links("broadcast", policy, generation, version=7))
            files.close()
            assert not (tmp_path / "run" / "refit").exists()
    finally:
        policy.shutdown()


def _over_links(mode: RefitMode, policy: MegatronPolicy, generation: VllmGeneration, version: int) -> np.ndarray:
    transport = make_transport(policy, generation, replace(REFIT, mode=mode), Path())
    transport.connect()
    transport.publish(version)
    return answers(generation)


def scale_a_norm(rank: Any, factor: float) -> None:
    """On every rank: multiply the weights of the model's last norm, where it is."""
    import torch

    for chunk in rank.chunks:
        norm = getattr(chunk.decoder, "final_layernorm", None)
        if norm is not None:
            with torch.no_grad():
                norm.weight.mul_(factor)
