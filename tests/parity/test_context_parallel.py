"""Sequences over context-parallel ranks: log-probabilities, gradients, losses, checkpoints, 32,768 tokens."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.config.schema import LossConfig
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from tests.parity.on_rank import expect_continuation, expect_gradients
from tests.parity.policy_training import (
    expect_gradients_of_transformers,
    gradients_on_rank,
    make_engine,
    whole_gradients,
)
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.test_invariance import AS_IT_COMES, whole_steps
from tests.parity.test_rank_logprobs import expect_logprobs, logprobs_on_rank
from tests.parity.training import fetch, merge, step_counts
from tests.support.loss_oracle import CONFIGS
from tests.support.rare import rare
from tests.support.tiny_models import VOCAB, TinyModel, make_tiny_model

LAYOUTS = [
    Layout(context=2),
    Layout(tensor=2, context=2),
    Layout(tensor=2, context=2, sequence=True),
    Layout(pipeline=2, context=2),
    Layout(context=2, data=2),
]


@pytest.mark.parametrize("layout", [*LAYOUTS, Layout(context=4)], ids=str)
def test_ranks_report_the_logprobs_of_transformers(layout: Layout, tiny_models: dict[str, TinyModel]) -> None:
    model = tiny_models["llama_untied"]
    by_rank = run_on_ranks(layout, logprobs_on_rank, model)
    reported = [result for result, _ in by_rank if result]
    assert len(reported) == layout.data, "the ranks that share a sequence report it once"
    expect_logprobs([result[0] for result in reported], model.load())


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_equal_transformers(layout: Layout, packing: bool, tiny_models: dict[str, TinyModel]) -> None:
    models = [tiny_models["qwen3_tied"], tiny_models["llama_untied"]]
    expect_gradients_of_transformers(run_on_ranks(layout, gradients_on_rank, models, packing), models, tolerance=1e-4)


@pytest.mark.parametrize("layout", [Layout(context=2), *rare([Layout(pipeline=2, context=2)])], ids=str)
def test_every_loss_is_that_of_whole_sequences(layout: Layout, tiny_models: dict[str, TinyModel]) -> None:
    """Also those that speak of a response, whose tokens lie on several ranks."""
    cuts = dict.fromkeys(CONFIGS, (AS_IT_COMES[0], 40))
    model = tiny_models["qwen3_tied"]
    expected = whole_steps(Layout(), model, dict.fromkeys(CONFIGS, AS_IT_COMES))
    for name, (loss, gradients) in whole_steps(layout, model, cuts).items():
        assert loss == pytest.approx(expected[name][0], rel=1e-5, abs=1e-6), name
        expect_gradients(gradients, expected[name][1])


@pytest.mark.slow  # test_training.py loads checkpoints in other layouts
def test_a_checkpoint_goes_into_and_out_of_context_parallelism(
    tiny_models: dict[str, TinyModel], tmp_path: Path
) -> None:
    read_by = (Layout(), Layout(pipeline=2, context=2), Layout(context=2, data=2))
    folder = tmp_path / "checkpoint"
    expect_continuation(tiny_models["qwen3_tied"], folder, Layout(tensor=2, context=2), read_by)


LENGTH = 32_768


def make_long_batch() -> TokenBatch:
    """One sequence, whose prompt is its first 1,024 tokens."""
    generator = torch.Generator().manual_seed(5)
    mask = (torch.arange(LENGTH) >= 1024).float()
    tokens = TokenFields(
        token_ids=torch.randint(0, VOCAB, (LENGTH,), generator=generator).int(),
        loss_mask=mask,
        advantages=torch.randn(LENGTH, generator=generator),
        generation_logprobs=-torch.rand(LENGTH, generator=generator),
    )
    return TokenBatch([LENGTH], tokens)


def train_on_rank(layout: Layout, model: TinyModel) -> tuple[Tensor | None, float, dict[str, Tensor], float]:
    """Log-probabilities, this rank's share of the loss, gradients and their norm."""
    engine, batch = make_engine(layout, model, distributed=False), make_long_batch()
    logprobs = engine.compute_logprobs(fetch(engine, batch, None), [[0]])
    loss_fn = ClippedPGLossFn(LossConfig(reference_policy_kl_penalty=0.0))
    metrics = engine.compute_gradients(fetch(engine, batch, loss_fn), [[0]], loss_fn, step_counts(batch))
    return logprobs, float(metrics[0]["loss"]), whole_gradients(engine), engine.optimizer.compute_grad_norm()


@pytest.mark.slow
def test_context_parallel_ranks_compute_what_one_rank_does(tmp_path: Path) -> None:
    model = make_tiny_model("qwen3_tied", tmp_path)
    ((expected, loss, gradients, norm),) = run_on_ranks(Layout(), train_on_rank, model, timeout_s=550)
    by_rank = run_on_ranks(Layout(context=2), train_on_rank, model, timeout_s=550)
    assert expected is not None
    (logprobs,) = (values for values, *_ in by_rank if values is not None)
    torch.testing.assert_close(logprobs, expected, atol=2e-5, rtol=0)
    assert sum(share for _, share, *_ in by_rank) == pytest.approx(loss, abs=2e-6)
    for name, gradient in merge([parts for *_, parts, _ in by_rank]).items():
        assert (gradient - gradients[name]).norm() < 1e-4 * max(float(gradients[name].norm()), 1e-3 * norm), name
    assert [result[3] for result in by_rank] == pytest.approx([norm] * 2, rel=1e-4)


@pytest.mark.parametrize("layout", [Layout(), Layout(context=2)], ids=str)
def test_stretched_positions_are_those_of_transformers(layout: Layout, tmp_path: Path) -> None:
    """Most of the tests' sequences are longer than the 8 tokens that YaRN stretches."""
    model = make_tiny_model("qwen3_stretched", tmp_path)
    assert model.shape.softmax_scale == pytest.approx(16**-0.5 * (0.1 * math.log(4) + 1) ** 2)
    expect_gradients_of_transformers(run_on_ranks(layout, gradients_on_rank, [model]), [model], tolerance=1e-4)
