"""Muon in every layout against Newton-Schulz in float64 on transformers' matrices, and its checkpoints."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from tests.parity.on_rank import expect_continuation
from tests.parity.policy_training import MAX_GRAD_NORM, OPTIMIZER, hf_loss, make_engine, train_arguments
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import merge, whole_tensors
from tests.support.tiny_models import TinyModel, make_tiny_model

MUON = replace(OPTIMIZER, name="muon", warmup_steps=0)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Newton-Schulz as published by Jordan (2024), in float64."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.double().T if is_tall else matrix.double()
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if is_tall else x


def list_matrices(model: torch.nn.Module) -> Iterator[list[Tensor]]:
    """The matrices that Muon orthogonalizes, each as views of its parts: gate and up projections are one matrix."""
    parameters: dict[str, Any] = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1 and "embed_tokens" not in name and "lm_head" not in name
    }
    for name, parameter in parameters.items():
        if parameter.ndim == 3:  # experts
            yield from ([matrix] for matrix in parameter.unbind())
        elif name.endswith("gate_proj.weight"):
            yield [parameter, parameters[name.replace("gate_proj", "up_proj")]]
        elif not name.endswith("up_proj.weight"):
            yield [parameter]


def muon_steps(tiny: TinyModel) -> Iterator[dict[str, Tensor]]:
    """The weights of transformers after each step of a plain Muon, and of torch's AdamW for other parameters."""
    model = tiny.load()
    matrices = list(list_matrices(model))
    stored = {id(part if part._base is None else part._base) for parts in matrices for part in parts}
    other_parameters = [parameter for parameter in model.parameters() if id(parameter) not in stored]
    decay = [p for p in other_parameters if p.ndim > 1], [p for p in other_parameters if p.ndim == 1]
    settings = {"lr": MUON.lr, "betas": (MUON.adam_beta1, MUON.adam_beta2), "eps": MUON.adam_eps}
    groups = [
        {"params": group, "weight_decay": rate} for group, rate in zip(decay, (MUON.weight_decay, 0.0), strict=True)
    ]
    adamw = torch.optim.AdamW(groups, **settings)
    moments: list[Tensor] = [torch.zeros(()) for _ in matrices]
    while True:
        model.zero_grad()
        hf_loss(model).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        adamw.step()
        for index, parts in enumerate(matrices):
            gradient = torch.cat([find_gradient(part) for part in parts]).double()
            moments[index] = 0.95 * moments[index] + gradient
            update = orthogonalize(gradient + 0.95 * moments[index]) * 0.2 * max(gradient.shape) ** 0.5
            with torch.no_grad():
                for part, change in zip(parts, update.split([len(part) for part in parts]), strict=True):
                    part.mul_(1 - MUON.lr * MUON.weight_decay).sub_(MUON.lr * change.float())
        weights = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
        yield revert_weight_conversion(model, weights)


def find_gradient(part: Tensor) -> Tensor:
    """The gradient of a parameter, or of an expert's matrix in one."""
    if part._base is None:
        return part.grad
    return part._base.grad.as_strided(part.shape, part.stride(), part.storage_offset())


def steps_on_rank(layout: Layout, model: TinyModel, settings: dict[str, Any]) -> list[dict[str, Tensor]]:
    """The weights after one step and after ten."""
    engine = make_engine(layout, model, optimizer=MUON, **settings)
    results = []
    for steps in (1, 9):
        for _ in range(steps):
            engine.train(*train_arguments(layout))
        results.append(whole_tensors(engine))
    return results


CASES: list[tuple[str, Layout, dict[str, Any]]] = [
    ("qwen3_tied", Layout(), {}),
    ("qwen3_tied", Layout(), {"distributed": False}),
    ("qwen3_tied", Layout(tensor=2, sequence=True), {}),
    ("qwen3_tied", Layout(pipeline=2), {}),
    ("qwen3_tied", Layout(data=2), {}),
    ("qwen3_tied", Layout(data=2), {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    ("qwen3_tied", Layout(data=2), {"distributed": False}),
    ("qwen2_tied", Layout(tensor=2), {"distributed": False}),
    ("llama_untied", Layout(context=2), {}),
    ("qwen3_moe", Layout(), {}),
    ("qwen3_moe", Layout(data=2, expert=2), {}),
    ("qwen3_moe", Layout(data=2), {}),
    ("qwen3_moe", Layout(tensor=2, sequence=True), {}),
    ("qwen3_moe", Layout(tensor=2, sequence=True, expert_tensor=2), {}),
    ("qwen3_moe", Layout(data=2, expert=2), {"distributed": False}),
    ("deepseek_v3_compressed", Layout(tensor=2, sequence=True), {}),
    ("gemma3", Layout(tensor=2, pipeline=2), {}),
]


def describe(case: Any) -> str:
    return "-".join(map(str, case)) if isinstance(case, dict) else str(case)


@pytest.fixture(scope="module")
def models(tiny_models: dict[str, TinyModel], tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    folder = tmp_path_factory.mktemp("muon")
    return tiny_models | {name: make_tiny_model(name, folder) for name in ("qwen3_moe", "deepseek_v3_compressed")}


@pytest.fixture(scope="module")
def expected(models: dict[str, TinyModel]) -> Callable[[str], list[dict[str, Tensor]]]:
    """The weights after one step and after ten, by model."""

    @cache
    def compute(name: str) -> list[dict[str, Tensor]]:
        by_step = list(islice(muon_steps(models[name]), 10))
        return [by_step[0], by_step[9]]

    return compute


QUICK = (2, 4, 10, 16)  # tensor, data, expert and pipeline parallelism


@pytest.mark.parametrize(
    ("name", "layout", "settings"),
    [pytest.param(*case, marks=[] if number in QUICK else pytest.mark.slow) for number, case in enumerate(CASES)],
    ids=describe,
)
def test_one_and_ten_steps_equal_plain_muon(
    name: str,
    layout: Layout,
    settings: dict[str, Any],
    models: dict[str, TinyModel],
    expected: Callable[[str], list[dict[str, Tensor]]],
) -> None:
    by_rank = run_on_ranks(layout, steps_on_rank, models[name], settings)
    for index, tolerance in enumerate((2e-6, 2e-5)):
        actual = merge([weights[index] for weights in by_rank])
        for key, weight in expected(name)[index].items():
            error = (actual[key] - weight).abs().max().item()
            assert error < tolerance, f"{key}: {error:.1e}"


def updates_on_rank(layout: Layout, model: TinyModel) -> tuple[int, int]:
    """Elements that this rank updates, whose weights are the model's, and elements of its parameters."""
    engine = make_engine(layout, model, optimizer=MUON)
    engine.train(*train_arguments(layout))
    updated = 0
    for parameter, start, part in engine.optimizer.iter_updated_weights():
        assert torch.equal(parameter.detach().view(-1)[start : start + len(part)], part)
        updated += len(part)
    return updated, sum(parameter.numel() for chunk in engine.gather_chunks() for parameter in chunk.parameters())


def test_replicas_update_every_element_once(models: dict[str, TinyModel]) -> None:
    counts = run_on_ranks(Layout(data=2), updates_on_rank, models["qwen3_moe"])
    assert sum(updated for updated, _ in counts) == counts[0][1]
    assert all(updated for updated, _ in counts)


@pytest.mark.parametrize(
    ("name", "settings", "layouts"),
    [
        ("qwen3_moe", {}, [Layout(data=2, expert=2), Layout(tensor=2, sequence=True)]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("qwen3_tied", {}, [Layout(tensor=2, pipeline=2), Layout(), Layout(data=2)]),
                ("qwen3_moe", {}, [Layout(data=2), Layout(data=4, expert=2)]),
                ("qwen3_moe", {"distributed": False}, [Layout(data=2, expert=2), Layout(pipeline=2)]),
                ("qwen3_tied", {"precision": "bfloat16"}, [Layout(data=2), Layout(tensor=2)]),
                ("qwen3_tied", {"precision": "bfloat16", "distributed": False}, [Layout(data=2), Layout(tensor=2)]),
            )
        ),
    ],
    ids=describe,
)
def test_a_loaded_checkpoint_continues_exactly_and_in_other_layouts(
    name: str, settings: dict[str, Any], layouts: list[Layout], models: dict[str, TinyModel], tmp_path: Path
) -> None:
    tolerance = 2e-2 if "precision" in settings else 5e-6
    expect_continuation(
        models[name],
        tmp_path / "checkpoint",
        layouts[0],
        layouts[1:],
        {"optimizer": MUON, **settings},
        atol=tolerance,
        rtol=0.0,
    )
