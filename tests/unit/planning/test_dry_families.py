"""Dry runs of newer families: layers and their memory are the same on fake and on real tensors."""

from functools import partial

import pytest
import torch

from megatron_grpo.config.schema import Config, ParallelConfig
from megatron_grpo.models.families import FAMILIES
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.planning.dry.tracker import GRANULE
from megatron_grpo.planning.dry_run import run_dry, run_tracked
from megatron_grpo.trainer.model import delta_net
from megatron_grpo.verification.problem import SMALL, TINY

NAMES = ("glm4", "glm4_moe", "phi3", "olmo3", "minimax_m2", "glm_moe_dsa")
QUICK = ("glm4_moe", "glm_moe_dsa")


pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a dry run takes the process's GPU away from Megatron-Core"
)


def make_problem(family: str) -> tuple[Config, ModelShape]:
    """A run of a small model of the family, and its shape."""
    raw = {**SMALL, **TINY[family], "architectures": [FAMILIES[family].architecture], "num_hidden_layers": 4}
    shape, config = parse_model_shape(raw), Config()
    config.policy.parallel = ParallelConfig(tensor=2, sequence=True, data=2)
    config.policy.max_total_sequence_length, config.policy.microbatch_tokens = 32, 64
    config.loss_fn.reference_policy_kl_penalty = 0.0
    config.policy.megatron = {"moe_permute_fusion": False} if shape.experts is not None else {}
    return config, shape


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in NAMES]
)
def test_fake_tensors_take_as_much_as_real_ones(family: str) -> None:
    config, shape = make_problem(family)
    fake, tracked = run_dry(config, shape, 1), run_tracked(config, shape, 1, fake=None)
    close = partial(pytest.approx, abs=8 * GRANULE)
    assert {phase: fake.phases[phase] for phase in tracked.phases} == close(tracked.phases)
    assert {phase: fake.end_bytes[phase] for phase in tracked.end_bytes} == close(tracked.end_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_delta_nets_run_dry_where_their_kernels_are_not_installed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_net, "find_spec", lambda name: None)
    work = run_dry(*make_problem(family), 1).work
    assert any(item.name == "delta_rule" for item in work), "the GPU's kernel, not plain torch"
