"""Gradients, the optimizer step and checkpoints of the Megatron policy against transformers and torch, every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_grpo.policy.checkpoint import load_engine, save_engine
from tests.parity.policy_training import (
    MAX_GRAD_NORM,
    expect_gradients_of_transformers,
    gradients_on_rank,
    hf_loss,
    make_engine,
    train_arguments,
)
from tests.parity.ranks import LAYOUTS, Layout, run_on_ranks
from tests.parity.training import merged, whole_tensors
from tests.tiny_models import TinyModel

TRAINING_LAYOUTS = [*LAYOUTS, Layout(data=2)]


def steps_on_rank(layout: Layout, models: list[TinyModel], steps: int) -> list[tuple[dict[str, Tensor], list[float]]]:
    found = []
    for model in models:
        engine = make_engine(layout, model)
        rates = [engine.train(*train_arguments(layout)).learning_rate for _ in range(steps)]
        found.append((whole_tensors(engine), rates))
    return found


@pytest.mark.parametrize("layout", TRAINING_LAYOUTS, ids=str)
def test_gradients_equal_transformers(layout: Layout, tiny_models: dict[str, TinyModel]) -> None:
    models = list(tiny_models.values())
    expect_gradients_of_transformers(run_on_ranks(layout, gradients_on_rank, models), models, tolerance=1e-4)


@pytest.mark.parametrize("layout", TRAINING_LAYOUTS, ids=str)
def test_optimizer_steps_equal_torch_adamw(layout: Layout, tiny_models: dict[str, TinyModel]) -> None:
    """Clipping, warm-up, decay of matrices only, with the optimizer state sharded over data-parallel ranks."""
    by_rank = run_on_ranks(layout, steps_on_rank, list(tiny_models.values()), 3)
    for index, tiny in enumerate(tiny_models.values()):
        model = tiny.load()
        matrices = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-2)
        rates = [0.5e-2, 1e-2, 1e-2]
        for rate in rates:
            adamw.zero_grad()
            hf_loss(model).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            for group in adamw.param_groups:
                group["lr"] = rate
            adamw.step()
        actual = merged([found[index][0] for found in by_rank])
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                actual[name], parameter.data, atol=2e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )
        assert by_rank[0][index][1] == pytest.approx(rates)


def save_on_rank(layout: Layout, model: TinyModel, folder: Path, settings: dict[str, Any]) -> dict[str, Tensor]:
    engine = make_engine(layout, model, **settings)
    for _ in range(2):
        engine.train(*train_arguments(layout))
    save_engine(engine, str(folder))
    engine.train(*train_arguments(layout))
    return whole_tensors(engine)


def load_on_rank(layout: Layout, model: TinyModel, folder: Path, settings: dict[str, Any]) -> dict[str, Tensor]:
    engine = make_engine(layout, model, **settings)
    load_engine(engine, str(folder))
    engine.train(*train_arguments(layout))
    return whole_tensors(engine)


@pytest.mark.parametrize(
    ("name", "settings", "tolerance"),
    [
        ("qwen3_tied", {}, {"atol": 2e-6, "rtol": 1e-4}),
        ("llama_untied", {"distributed": False}, {"atol": 2e-6, "rtol": 1e-4}),
        ("qwen2_tied", {"precision": "bfloat16"}, {"atol": 2e-2, "rtol": 2e-2}),
    ],
    ids=["distributed", "replicated", "bfloat16"],
)
def test_a_loaded_checkpoint_continues_exactly_and_in_other_layouts(
    name: str,
    settings: dict[str, Any],
    tolerance: dict[str, float],
    tiny_models: dict[str, TinyModel],
    tmp_path: Path,
) -> None:
    """The step after loading equals the step after saving: to the bit in the same layout, to rounding in others."""
    model = tiny_models[name]
    written_by = Layout(tensor=2, pipeline=2)
    (tmp_path / "checkpoint").mkdir()
    expected = merged(run_on_ranks(written_by, save_on_rank, model, tmp_path / "checkpoint", settings))
    for layout in (written_by, Layout(), Layout(pipeline=2), Layout(data=2), Layout(tensor=2, sequence=True)):
        actual = merged(run_on_ranks(layout, load_on_rank, model, tmp_path / "checkpoint", settings))
        exactness = {"atol": 0.0, "rtol": 0.0} if layout == written_by else tolerance
        for key, tensor in expected.items():
            torch.testing.assert_close(actual[key], tensor, **exactness, msg=lambda m, w=f"{layout} {key}": f"{w}: {m}")
