"""Steps that ranks refuse for their probability error; tensors whose gradient is exactly zero."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from megatron_grpo.batch.token_batch import TokenBatch
from megatron_grpo.config.schema import LoraConfig
from megatron_grpo.trainer.zero_gradients import ZeroGradients
from megatron_grpo.verification.problem import SMALL, TINY, make_model
from tests.parity import policy_training
from tests.parity.adapters import LORA, make_lora_rank
from tests.parity.on_rank import expect_close
from tests.parity.policy_training import OPTIMIZER, make_batch, make_engine, train_arguments
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.test_training import adamw_steps
from tests.parity.training import fetch, merge, whole_tensors
from tests.support.tiny_models import VOCAB, TinyModel, logprobs_of_logits

Found = tuple[list[bool], dict[str, Tensor], dict[str, Tensor], list[dict[str, float]]]


def refusals_on_rank(layout: Layout, model: TinyModel, limits: list[float | None]) -> Found:
    """Which limits refuse a step, the weights before and after refused ones, and the metrics of the last of them."""
    engine = make_engine(layout, model)
    share, microbatches, loss_fn, counts = train_arguments(layout)
    batch = fetch(engine, share, loss_fn)
    before = whole_tensors(engine)
    answers = [engine.train(batch, microbatches, loss_fn, counts, limit) for limit in limits]
    return [answer.is_refused for answer in answers], before, whole_tensors(engine), answers[-1].metrics or []


def refused_then_trained(layout: Layout, model: TinyModel) -> dict[str, Tensor]:
    engine = make_engine(layout, model)
    engine.train(*train_arguments(layout), 1.0001)
    engine.train(*train_arguments(layout), 1e9)
    return whole_tensors(engine)


def expected_error(model: TinyModel, batch: TokenBatch) -> tuple[float, float, float]:
    """Mean and largest exp(|training - sampling|) over the loss by transformers, one sequence at a time; and tokens."""
    errors: list[float] = []
    tokens, loaded = batch.fields, model.load()
    assert tokens.loss_mask is not None
    assert tokens.generation_logprobs is not None
    columns: Any = (tokens.token_ids.long(), tokens.loss_mask, tokens.generation_logprobs)
    for ids, mask, sampled in zip(*(column.split(batch.lengths) for column in columns), strict=True):
        with torch.no_grad():
            logits = loaded(ids[None]).logits[0, :-1] / 0.8
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        errors += (logprobs - sampled[1:]).abs()[mask[1:] > 0].exp().tolist()
    return sum(errors) / len(errors), max(errors), len(errors)


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tensor=2, pipeline=2), Layout(data=2, context=2), Layout(pipeline=2, data=2)], ids=str
)
def test_all_ranks_refuse_the_same_steps(layout: Layout, tiny_models: dict[str, TinyModel]) -> None:
    model = tiny_models["qwen3_tied"]
    error, worst, tokens = expected_error(model, make_batch())
    without_worst = error - (worst - 1) / tokens
    assert without_worst < error
    limits = [without_worst * 0.999, 1.001]
    by_rank = run_on_ranks(layout, refusals_on_rank, model, limits)
    assert all(result[0] == [True, True] for result in by_rank)
    before, after = (merge([result[index] for result in by_rank]) for index in (1, 2))
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, atol=0, rtol=0)
    shares = [share for result in by_rank for share in result[3]]
    assert sum(share["token_mult_prob_error"] for share in shares) == pytest.approx(error, rel=1e-4)
    assert all(math.isfinite(share["loss"]) for share in shares)
    accepted = run_on_ranks(layout, refusals_on_rank, model, [(without_worst + error) / 2])
    assert all(result[0] == [False] for result in accepted), "the worst token does not count"


@pytest.mark.parametrize("layout", [Layout(data=2), Layout(tensor=2, pipeline=2)], ids=str)
def test_a_refused_step_leaves_no_trace(layout: Layout, tiny_models: dict[str, TinyModel]) -> None:
    """The step after it is that of torch's AdamW from the same weights, with the first learning rate."""
    model = tiny_models["qwen3_tied"]
    by_rank = run_on_ranks(layout, refused_then_trained, model)
    expect_close(merge(by_rank), adamw_steps(model, [(replace(OPTIMIZER), 0.5e-2)]))


TEMPERATURE = 0.8
"""That of `policy_training.make_engine`."""
BLOCKED = {
    "qwen3": ("layers.1.self_attn.o_proj", "layers.2.mlp.down_proj"),
    "qwen3_moe": ("layers.1.self_attn.o_proj", "layers.0.mlp.experts.2.down_proj"),
}
"""Matrices of zeros by family, through which nothing passes: tensors before them have no gradient."""


def make_blocked(family: str, folder: Path, *blocked: str) -> TinyModel:
    make_model({"model_type": family, **SMALL, **TINY[family], "vocab_size": VOCAB}, folder, seed=0)
    file = folder / "model.safetensors"
    tensors = {
        name: torch.zeros_like(tensor) if any(part in name for part in blocked) else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})
    return TinyModel(family, folder)


def find_on_rank(layout: Layout, models: list[TinyModel]) -> list[tuple[list[str], tuple[str, ...]]]:
    """By model the tensors of which the rank has a part, and those without gradient."""
    results = []
    for model in models:
        rank = policy_training.make_engine(layout, model)
        rank.train(*policy_training.train_arguments(layout))
        zeros = ZeroGradients(rank)
        results.append((zeros.list_names(), zeros.find()))
    return results


def list_zeros_of_transformers(model: TinyModel) -> set[str]:
    """Names of tensors without gradient, by transformers; experts one by one."""
    loaded, fields = model.load(), policy_training.make_batch().fields
    total: Any = torch.zeros(())
    columns: Any = (fields.token_ids, fields.loss_mask, fields.advantages)
    lengths = policy_training.make_batch().lengths
    for ids, mask, advantages in zip(*(column.split(lengths) for column in columns), strict=True):
        logprobs = logprobs_of_logits(loaded(ids[None].long()).logits / TEMPERATURE, ids[None].long())[0]
        total = total - (logprobs * advantages * mask).sum()
    total.backward()
    gradients: dict[str, Tensor] = {name: p.grad for name, p in loaded.named_parameters() if p.grad is not None}
    return {name for name, gradient in revert_weight_conversion(loaded, gradients).items() if not gradient.any()}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tensor=2, sequence=True),
        Layout(pipeline=2),
        pytest.param(Layout(data=2, expert=2), marks=pytest.mark.slow),
        pytest.param(Layout(tensor=2, context=2, sequence=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_they_are_those_of_transformers(layout: Layout, tmp_path: Path) -> None:
    families = [name for name in BLOCKED if layout.expert == 1 or "moe" in name]
    models = [make_blocked(family, tmp_path / family, *BLOCKED[family]) for family in families]
    by_rank = run_on_ranks(layout, find_on_rank, models)
    for number, model in enumerate(models):
        counter = Counter(name for rank in by_rank for name in rank[number][0])
        zero = Counter(name for rank in by_rank for name in rank[number][1])
        assert set(counter) == set(model.tensors())
        expected = list_zeros_of_transformers(model)
        assert {f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"} <= expected
        assert {name for name, count in zero.items() if count == counter[name]} == expected


def find_adapters_on_rank(layout: Layout, model: TinyModel, lora: LoraConfig) -> list[tuple[str, ...]]:
    rank, steps = make_lora_rank(layout, model, lora), []
    for _ in range(2):
        rank.train(*policy_training.train_arguments(layout))
        steps.append(ZeroGradients(rank).find())
    return steps


def test_adapters_have_no_gradient_in_their_first_step_alone(tmp_path: Path) -> None:
    model = make_blocked("qwen3", tmp_path)
    ((first, second),) = run_on_ranks(Layout(), find_adapters_on_rank, model, LORA)
    assert first
    assert all(name.endswith("(lora_a)") for name in first), "the second matrix begins at zero"
    assert second == ()


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2, sequence=True)], ids=str)
def test_every_family_has_them_where_transformers_has_them(layout: Layout, tmp_path: Path) -> None:
    """Whatever its parameters join: gates, delta nets, Mamba, latent attention, stacked experts."""
    families = ["gemma3", "deepseek_v3", "phi3", "gpt_oss", "qwen3_5", "qwen3_next", "llama4", "nemotron_h", "glm4_moe"]
    models = [make_blocked(family, tmp_path / family) for family in families]
    by_rank = run_on_ranks(layout, find_on_rank, models, timeout_s=300.0)
    for number, model in enumerate(models):
        counter = Counter(name for rank in by_rank for name in rank[number][0])
        zero = Counter(name for rank in by_rank for name in rank[number][1])
        assert set(counter) <= set(model.tensors())
        expected = list_zeros_of_transformers(model)
        assert {name for name, count in zero.items() if count == counter[name]} == expected & set(counter), model.name
