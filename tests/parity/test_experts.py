"""Experts on real ranks: checkpoints into and out of every layout, biases, and what a step tells about the routing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.extensions.transformer_engine import _set_expert_parameter_attributes
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from megatron_grpo.config.schema import MoeConfig
from megatron_grpo.trainer.model import build
from megatron_grpo.trainer.model.experts import mark_experts
from tests.parity.on_rank import expect_close, expect_continuation, train_on_rank
from tests.parity.policy_training import hf_loss, make_engine, train_arguments
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import fetch, merge, whole_tensors
from tests.support.rare import rare
from tests.support.tiny_models import TinyModel, make_tiny_model

MOE = MoeConfig(aux_loss_coeff=0.05, z_loss_coeff=0.01, bias_update_rate=0.125)
SHARED = Layout(expert=2, data=2)
LAYOUTS = [
    Layout(),
    SHARED,
    Layout(tensor=2, sequence=True, expert=2),
    Layout(pipeline=2),
    Layout(expert=2, expert_tensor=2, data=4),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model("deepseek_v3", tmp_path_factory.mktemp("experts"))


def step_on_rank(
    layout: Layout, model: TinyModel, settings: dict[str, Any] | None = None
) -> tuple[dict[str, float], dict[str, Tensor], dict[str, Tensor]]:
    """What a step reports, how often each expert was chosen by layer, and the weights after it."""
    engine = make_engine(layout, model, moe=MOE, **(settings or {}))
    share, microbatches, loss_fn, counts = train_arguments(layout)
    report = engine.train(fetch(engine, share, loss_fn), microbatches, loss_fn, counts)
    chosen = engine.routing.sum_counts()
    layers = [router.layer_number - 1 for router in engine.routing.routers]
    metrics = next((entry for entry in report.metrics or [] if "moe_aux_loss" in entry), {})
    return metrics, {f"{layer}": row for layer, row in zip(layers, chosen, strict=True)}, whole_tensors(engine)


@pytest.fixture(scope="module")
def alone(model: TinyModel) -> tuple[dict[str, float], dict[str, Tensor], dict[str, Tensor]]:
    return run_on_ranks(Layout(), step_on_rank, model)[0]


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_a_step_tells_the_same_of_its_experts_in_every_layout(layout: Layout, model: TinyModel, alone: Any) -> None:
    by_rank = run_on_ranks(layout, step_on_rank, model)
    reports = [metrics for metrics, _, _ in by_rank if metrics]
    assert len(reports) == 1, "metrics are added up over ranks: one tells them"
    for name in ("moe_load_highest", "moe_load_lowest", "moe_aux_loss", "moe_z_loss"):
        assert reports[0][name] == pytest.approx(alone[0][name], rel=1e-5), name
    for _, chosen, _ in by_rank:
        for layer, counts in chosen.items():
            assert torch.equal(counts, alone[1][layer])
    expect_close(merge([tensors for _, _, tensors in by_rank]), alone[2])


def test_a_step_moves_the_bias_of_each_expert_towards_those_that_are_chosen_too_rarely(
    model: TinyModel, alone: Any
) -> None:
    metrics, chosen, weights = alone
    start = model.tensors()
    assert set(chosen) == {"1"}, "the first layer has no experts"
    for layer, counts in chosen.items():
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        moved = [0.125 if count < float(counts.mean()) else -0.125 for count in counts.tolist()]
        assert torch.equal(weights[name], start[name] + torch.tensor(moved))
        assert metrics["moe_load_highest"] == pytest.approx(float(counts.max() / counts.mean()))
        assert metrics["moe_load_lowest"] == pytest.approx(float(counts.min() / counts.mean()))
        lengths = train_arguments(Layout())[0].lengths
        assert counts.sum() == 2 * sum(lengths), "every real token chooses two, and padding none"


def frozen_on_rank(layout: Layout, model: TinyModel) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine = make_engine(layout, model, moe=MoeConfig(freeze_router=True))
    start = {name: tensor.clone() for name, tensor in whole_tensors(engine).items()}
    share, microbatches, loss_fn, counts = train_arguments(layout)
    engine.train(fetch(engine, share, loss_fn), microbatches, loss_fn, counts)
    return start, whole_tensors(engine)


def test_frozen_routers_alone_keep_their_weights(model: TinyModel) -> None:
    for start, weights in run_on_ranks(SHARED, frozen_on_rank, model):
        unchanged = {name for name, tensor in start.items() if torch.equal(weights[name], tensor)}
        assert unchanged == {name for name in start if ".mlp.gate." in name}


def test_padding_is_not_counted(model: TinyModel, alone: Any) -> None:
    _, chosen, _ = run_on_ranks(Layout(context=2), step_on_rank, model)[0]
    assert torch.equal(chosen["1"], alone[1]["1"])


@pytest.mark.slow
def test_a_checkpoint_goes_into_and_out_of_shared_experts(model: TinyModel, tmp_path: Path) -> None:
    read_by = (*LAYOUTS[:1], *LAYOUTS[2:])
    weights = expect_continuation(model, tmp_path / "checkpoint", SHARED, read_by, {"moe": MOE})
    assert any(name.endswith("e_score_correction_bias") for name in weights)


def norm_on_rank(layout: Layout, model: TinyModel, distributed: bool, as_on_gpus: bool) -> float:
    """The norm of a step's gradient; `as_on_gpus`: experts have the marks of Transformer Engine's layers."""

    def mark(chunk: torch.nn.Module) -> None:
        for name, module in chunk.named_modules():
            if ".mlp.experts." in name and isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                for mark in ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce"):
                    delattr(module.weight, mark)
                mode = "column" if isinstance(module, ColumnParallelLinear) else "row"
                own_groups = layout.expert > 1 or layout.expert_tensor != layout.tensor
                _set_expert_parameter_attributes(module, mode, own_groups)
        mark_experts(chunk)

    build.mark_experts = mark if as_on_gpus else mark_experts
    try:
        engine = make_engine(layout, model, distributed=distributed)
    finally:
        build.mark_experts = mark_experts
    share, microbatches, loss_fn, counts = train_arguments(layout)
    engine.compute_gradients(fetch(engine, share, loss_fn), microbatches, loss_fn, counts)
    return engine.optimizer.compute_grad_norm()


NORM_LAYOUTS = [
    Layout(tensor=2, sequence=True),
    Layout(tensor=2, sequence=True, expert=2),
    Layout(tensor=2, sequence=True, expert_tensor=2),
    Layout(tensor=2, sequence=True, expert=2, data=2),
]


@pytest.mark.parametrize("as_on_gpus", [False, True], ids=["torch layers", "marks of GPUs"])
@pytest.mark.parametrize("layout", [*NORM_LAYOUTS[:3], *rare(NORM_LAYOUTS[3:])], ids=str)
def test_the_gradient_norm_counts_every_expert_once(layout: Layout, as_on_gpus: bool, model: TinyModel) -> None:
    full_model = model.load()
    hf_loss(full_model).backward()
    gradients = [parameter.grad for parameter in full_model.parameters() if parameter.grad is not None]
    expected = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
    for distributed in (False, True):
        norms = run_on_ranks(layout, norm_on_rank, model, distributed, as_on_gpus)
        assert norms == pytest.approx([expected] * layout.ranks, rel=1e-4)


@pytest.mark.parametrize(
    "settings", [{"activation_checkpointing": True}, {"recompute_modules": ["moe"]}], ids=["layers", "experts"]
)
def test_recomputed_activations_count_tokens_once(settings: dict[str, Any], model: TinyModel, alone: Any) -> None:
    """The layers of one microbatch are computed again after those of the next have passed."""
    by_rank = run_on_ranks(Layout(pipeline=2), train_on_rank, model, {"moe": MOE, **settings})
    expect_close(merge(by_rank), alone[2])


def test_sending_while_computing_changes_nothing(model: TinyModel) -> None:
    """Also where the last microbatch has no token for an expert."""
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    plain, overlapped = (run_on_ranks(SHARED, step_on_rank, model, settings) for settings in ({}, overlap))
    for (_, _, expected), (_, _, weights) in zip(plain, overlapped, strict=True):
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
