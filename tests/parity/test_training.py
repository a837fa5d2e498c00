"""Gradients, the optimizer step and checkpoints of the Megatron policy against transformers and torch, every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_grpo.config.schema import OptimizerConfig
from tests.parity.on_rank import expect_close, expect_continuation, save_on_rank
from tests.parity.policy_training import (
    MAX_GRAD_NORM,
    OPTIMIZER,
    expect_gradients_of_transformers,
    gradients_on_rank,
    hf_loss,
    make_engine,
    train_arguments,
)
from tests.parity.ranks import LAYOUTS, Layout, run_on_ranks
from tests.parity.training import merge, whole_tensors
from tests.support.rare import rare
from tests.support.tiny_models import TinyModel

TRAINING_LAYOUTS = [*LAYOUTS, Layout(data=2)]


def steps_on_rank(layout: Layout, models: list[TinyModel], steps: int) -> list[tuple[dict[str, Tensor], list[float]]]:
    results = []
    for model in models:
        engine = make_engine(layout, model)
        rates = [engine.train(*train_arguments(layout)).learning_rate for _ in range(steps)]
        results.append((whole_tensors(engine), rates))
    return results


@pytest.mark.parametrize("layout", TRAINING_LAYOUTS, ids=str)
def test_gradients_equal_transformers(layout: Layout, tiny_models: dict[str, TinyModel]) -> None:
    models = list(tiny_models.values())
    expect_gradients_of_transformers(run_on_ranks(layout, gradients_on_rank, models), models, tolerance=1e-4)


def test_recomputed_activations_do_not_change_the_gradients(tiny_models: dict[str, TinyModel]) -> None:
    models, layout = list(tiny_models.values()), Layout(tensor=2, sequence=True)
    by_rank = run_on_ranks(layout, gradients_on_rank, models, True, {"activation_checkpointing": True})
    expect_gradients_of_transformers(by_rank, models, tolerance=1e-4)


@pytest.mark.parametrize("layout", [*rare(LAYOUTS[:-1]), *TRAINING_LAYOUTS[-2:]], ids=str)
def test_optimizer_steps_equal_torch_adamw(layout: Layout, tiny_models: dict[str, TinyModel]) -> None:
    """Clipping, warm-up, decay of matrices only, with the optimizer state sharded over data-parallel ranks."""
    by_rank = run_on_ranks(layout, steps_on_rank, list(tiny_models.values()), 3)
    for index, tiny in enumerate(tiny_models.values()):
        rates = [0.5e-2, 1e-2, 1e-2]
        expected = adamw_steps(tiny, [(OPTIMIZER, rate) for rate in rates])
        expect_close(merge([result[index][0] for result in by_rank]), expected)
        assert by_rank[0][index][1] == pytest.approx(rates)


def adamw_steps(tiny: TinyModel, steps: list[tuple[OptimizerConfig, float]]) -> dict[str, Tensor]:
    """The weights of transformers after steps of torch's AdamW, each with these settings at this learning rate."""
    model = tiny.load()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    adamw = torch.optim.AdamW([{"params": matrices}, {"params": vectors}])
    for settings, rate in steps:
        adamw.zero_grad()
        hf_loss(model).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        betas = (settings.adam_beta1, settings.adam_beta2)
        for group, decay in zip(adamw.param_groups, (settings.weight_decay, 0.0), strict=True):
            group.update(lr=rate, betas=betas, eps=settings.adam_eps, weight_decay=decay)
        adamw.step()
    return {name: parameter.data for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "settings", "tolerance"),
    [
        ("qwen3_tied", {}, {}),
        ("llama_untied", {"distributed": False}, {}),
        pytest.param("qwen2_tied", {"precision": "bfloat16"}, {"atol": 2e-2, "rtol": 2e-2}, marks=pytest.mark.slow),
        pytest.param("gemma3", {}, {}, marks=pytest.mark.slow),
    ],
    ids=["distributed", "replicated", "bfloat16", "gemma3"],
)
def test_a_loaded_checkpoint_continues_exactly_and_in_other_layouts(
    name: str, settings: dict[str, Any], tolerance: dict[str, float], tiny_models: dict[str, TinyModel], tmp_path: Path
) -> None:
    """The step after loading equals the step after saving: to the bit in the same layout, to rounding in others."""
    written_by, folder = Layout(tensor=2, pipeline=2), tmp_path / "checkpoint"
    read_by = (Layout(), Layout(pipeline=2), Layout(data=2), Layout(tensor=2, sequence=True))
    expect_continuation(tiny_models[name], folder, written_by, read_by, settings, **tolerance)


OTHER_SETTINGS = OptimizerConfig(
    lr=3e-3, min_lr=1e-3, weight_decay=0.3, adam_beta1=0.8, adam_beta2=0.9, adam_eps=2e-2, warmup_steps=2
)


def continue_with_other_settings(
    layout: Layout, model: TinyModel, folder: Path, distributed: bool
) -> tuple[dict[str, Tensor], float]:
    engine = make_engine(layout, model, optimizer=OTHER_SETTINGS, distributed=distributed)
    engine.checkpoint.load(str(folder))
    rate = engine.train(*train_arguments(layout)).learning_rate
    return whole_tensors(engine), rate


@pytest.mark.parametrize("distributed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_changed_optimizer_settings_take_effect_on_loading(
    distributed: bool, tiny_models: dict[str, TinyModel], tmp_path: Path
) -> None:
    """Two steps, a checkpoint, a third step with every setting changed: torch's AdamW says where that leads."""
    model = tiny_models["qwen3_tied"]
    (tmp_path / "checkpoint").mkdir()
    run_on_ranks(Layout(), save_on_rank, model, tmp_path / "checkpoint", {"distributed": distributed})
    expected = adamw_steps(model, [(OPTIMIZER, 0.5e-2), (OPTIMIZER, 1e-2), (OTHER_SETTINGS, 3e-3)])
    for layout in (Layout(), Layout(data=2), Layout(tensor=2, pipeline=2)):
        by_rank = run_on_ranks(layout, continue_with_other_settings, model, tmp_path / "checkpoint", distributed)
        expect_close(merge([weights for weights, _ in by_rank]), expected)
        assert [rate for _, rate in by_rank] == pytest.approx([3e-3] * layout.ranks)
    with pytest.raises(RuntimeError, match=r"written with policy\.optimizer\.distributed=.*, and this run has"):
        run_on_ranks(Layout(), continue_with_other_settings, model, tmp_path / "checkpoint", not distributed)
