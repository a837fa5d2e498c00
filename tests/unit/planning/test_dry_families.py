"""Dry runs of newer families: layers and their memory are the same on fake and on real tensors."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_grpo.config.schema import Config, ParallelConfig
from megatron_grpo.models.families import FAMILIES
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.planning.dry import kernels
from megatron_grpo.planning.dry.tracker import GRANULE
from megatron_grpo.planning.dry.work import LOG, WorkLog, _classify
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


def test_a_deterministic_policy_computes_delta_nets_in_torch() -> None:
    config, shape = make_problem("qwen3_next")
    for deterministic, name in ((True, "delta_rule in torch"), (False, "delta_rule")):  # in either order
        config.policy.deterministic = deterministic
        names = {item.name for item in run_dry(config, shape, 1).work}
        assert names & {"delta_rule", "delta_rule in torch"} == {name}


class OperatorCount(TorchDispatchMode):
    """Counts the operators that a dry run counts."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += _classify(func) != "free"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("sequences", "heads", "sizes"), [(1, 2, (32, 64)), (3, 4, (64, 32))])
def test_delta_nets_in_torch_have_the_operators_and_memory_of_their_functions(
    sequences: int, heads: int, sizes: tuple[int, int]
) -> None:
    tokens, (key_dim, value_dim) = 3 * 64, sizes
    ends = torch.arange(sequences + 1) * (tokens // sequences)
    shapes = [(heads, key_dim), (heads, key_dim), (heads, value_dim), (heads,), (heads,)]
    results: list[list[float]] = []
    for function in (delta_net.compute_delta_rule, kernels._run_torch_delta_rule):
        inputs = [torch.rand(1, tokens, *shape).mul(-1).requires_grad_() for shape in shapes]
        addresses = {tensor.data_ptr() for tensor in inputs}
        saved: dict[int, Tensor] = {}

        def keep(tensor: Tensor, inputs: set[int] = addresses, saved: dict[int, Tensor] = saved) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in inputs:
                saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        log, counts = WorkLog(), list[float]()
        token = LOG.set(log)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            with OperatorCount() as forward:
                output = function(*inputs, cu_seqlens=ends)[0]
            counts.append(forward.count)
        work_forward = log.counts.total()
        with OperatorCount() as backward:
            output.sum().backward()
        LOG.reset(token)
        counts.append(backward.count)
        if work_forward:
            counts = [work_forward, log.counts.total() - work_forward]
        results.append([*counts, sum(tensor.untyped_storage().nbytes() for tensor in saved.values())])
    (*expected, expected_bytes), (*stood_in, bytes_of_stand_in) = results
    assert stood_in == pytest.approx(expected, rel=0.05)
    assert bytes_of_stand_in == pytest.approx(expected_bytes, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_delta_nets_run_dry_where_their_kernels_are_not_installed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_net, "find_spec", lambda name: None)
    work = run_dry(*make_problem(family), 1).work
    assert any(item.name == "delta_rule" for item in work), "the GPU's kernel, not plain torch"
