"""Gradients, the optimizer step and checkpoints of the Megatron policy against transformers and torch, every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_grpo.algorithms.loss_functions import ClippedPGLossFn
from megatron_grpo.config.schema import LossConfig, ModelConfig, OptimizerConfig, PolicyConfig
from megatron_grpo.data.packing import plan_microbatches
from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.models.hf_weights import iter_hf_tensors
from megatron_grpo.policy.checkpoint import load_engine, save_engine
from megatron_grpo.policy.engine import MegatronEngine
from megatron_grpo.policy.interface import GlobalCounts
from tests.parity.ranks import LAYOUTS, Layout, run_on_ranks
from tests.tiny_models import VOCAB, TinyModel

OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, adam_beta2=0.95, adam_eps=1e-2, warmup_steps=2)
"""A large epsilon keeps the update a smooth function of the gradient, so that rounding does not flip its sign."""
MAX_GRAD_NORM = 0.5
TRAINING_LAYOUTS = [*LAYOUTS, Layout(data=2)]


def make_batch() -> SequenceBatch:
    """Eight sequences of different lengths with random masks, advantages and sampling log-probabilities."""
    generator = torch.Generator().manual_seed(3)
    lengths = [5, 9, 7, 12, 6, 12, 8, 4]
    total = sum(lengths)
    mask = (torch.rand(total, generator=generator) < 0.7).float()
    for start in torch.tensor([0, *lengths]).cumsum(0)[:-1].tolist():
        mask[start] = 0.0  # nothing predicts a first token
    return SequenceBatch(
        lengths=lengths,
        token_ids=torch.randint(0, VOCAB, (total,), generator=generator),
        tokens={
            "loss_mask": mask,
            "advantages": torch.randn(total, generator=generator),
            "generation_logprobs": -torch.rand(total, generator=generator),
        },
    )


def make_engine(
    layout: Layout, model: TinyModel, *, distributed: bool = True, precision: str = "float32"
) -> MegatronEngine:
    config = PolicyConfig(
        model=ModelConfig(path=str(model.path)),
        parallel=layout.parallel,
        precision=precision,
        optimizer=replace(OPTIMIZER, distributed=distributed),
        max_grad_norm=MAX_GRAD_NORM,
    )
    return MegatronEngine(config, model.shape, str(model.path), reference=None, temperature=0.8, decay_steps=100)


def rank_share(layout: Layout) -> tuple[SequenceBatch, list[list[int]]]:
    """This replica's sequences and microbatches, as the driver would plan them."""
    batch = make_batch()
    plan = plan_microbatches(batch.lengths, data_parallel=layout.data, microbatch_tokens=30, pad_to_multiple=2)
    mine = plan[parallel_state.get_data_parallel_rank()]
    order = [index for microbatch in mine for index in microbatch]
    return batch.select(order), [[order.index(index) for index in microbatch] for microbatch in mine]


def counts() -> GlobalCounts:
    batch = make_batch()
    return GlobalCounts(tokens=float(batch.tokens["loss_mask"].sum()), sequences=float(len(batch)))


def loss_fn() -> ClippedPGLossFn:
    return ClippedPGLossFn(LossConfig(reference_policy_kl_penalty=0.0))


def whole_tensors(engine: MegatronEngine) -> dict[str, Tensor]:
    tensors = iter_hf_tensors(engine.model, engine.shape, 2**20)
    return {name: tensor.clone().cpu() for name, tensor in tensors if tensor is not None}


def whole_gradients(engine: MegatronEngine) -> dict[str, Tensor]:
    """Gradients under the names and in the shapes of transformers: exported the way weights are."""
    weights = [parameter.detach().clone() for parameter in engine.model.parameters()]
    for parameter in engine.model.parameters():
        parameter.data.copy_(parameter.main_grad)
    gradients = whole_tensors(engine)
    for parameter, weight in zip(engine.model.parameters(), weights, strict=True):
        parameter.data.copy_(weight)
    return gradients


def gradients_on_rank(layout: Layout, models: list[TinyModel]) -> list[tuple[dict[str, Tensor], float]]:
    found = []
    for model in models:
        engine = make_engine(layout, model, distributed=False)
        engine.compute_gradients(*rank_share(layout), loss_fn(), counts())
        gradients = whole_gradients(engine)
        found.append((gradients, engine.optimizer.grad_norm()))
    return found


def steps_on_rank(layout: Layout, models: list[TinyModel], steps: int) -> list[tuple[dict[str, Tensor], list[float]]]:
    found = []
    for model in models:
        engine = make_engine(layout, model)
        rates = [engine.train(*rank_share(layout), loss_fn(), counts()).learning_rate for _ in range(steps)]
        found.append((whole_tensors(engine), rates))
    return found


def hf_loss(model: torch.nn.Module) -> Tensor:
    """The policy-gradient loss at ratio 1, one sequence at a time."""
    batch = make_batch()
    total = torch.zeros(())
    columns = (batch.token_ids, batch.tokens["loss_mask"], batch.tokens["advantages"])
    for ids, mask, advantages in zip(*(column.split(batch.lengths) for column in columns), strict=True):
        logits = model(ids[None]).logits[0, :-1] / 0.8
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        total = total - (logprobs * advantages[1:] * mask[1:]).sum()
    return total / batch.tokens["loss_mask"].sum()


def merged(by_rank: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What the ranks export together; ranks that export the same tensor export the same values."""
    whole: dict[str, Tensor] = {}
    for found in by_rank:
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, whole.setdefault(name, tensor), atol=0, rtol=0)
    return whole


def expect_gradients_of_transformers(
    by_rank: list[list[tuple[dict[str, Tensor], float]]], models: list[TinyModel], tolerance: float
) -> None:
    """What `gradients_on_rank` returned on every rank against backward() in transformers, relative to each norm."""
    for index, tiny in enumerate(models):
        model = tiny.load()
        hf_loss(model).backward()
        expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        actual = merged([found[index][0] for found in by_rank])
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            error = (actual[name] - gradient).norm() / gradient.norm()
            assert error < tolerance, f"{tiny.name} {name}: relative error {error:.1e}"
        norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
        for found in by_rank:
            assert found[index][1] == pytest.approx(norm, rel=tolerance), tiny.name


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
        engine.train(*rank_share(layout), loss_fn(), counts())
    save_engine(engine, str(folder))
    engine.train(*rank_share(layout), loss_fn(), counts())
    return whole_tensors(engine)


def load_on_rank(layout: Layout, model: TinyModel, folder: Path, settings: dict[str, Any]) -> dict[str, Tensor]:
    engine = make_engine(layout, model, **settings)
    load_engine(engine, str(folder))
    engine.train(*rank_share(layout), loss_fn(), counts())
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
