"""Steps that ranks refuse because of their probability error: one decision on all ranks, and nothing has changed."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenBatch
from tests.parity.on_rank import expect_close
from tests.parity.policy_training import OPTIMIZER, make_batch, make_engine, train_arguments
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.test_training import adamw_steps
from tests.parity.training import fetched, merged, whole_tensors
from tests.support.tiny_models import TinyModel

Found = tuple[list[bool], dict[str, Tensor], dict[str, Tensor], list[dict[str, float]]]


def refusals_on_rank(layout: Layout, model: TinyModel, limits: list[float | None]) -> Found:
    """Which limits refuse a step, the weights before and after refused ones, and the metrics of the last of them."""
    engine = make_engine(layout, model)
    share, microbatches, loss_fn, counts = train_arguments(layout)
    batch = fetched(engine, share, loss_fn)
    before = whole_tensors(engine)
    answers = [engine.train(batch, microbatches, loss_fn, counts, limit) for limit in limits]
    return [one.is_refused for one in answers], before, whole_tensors(engine), answers[-1].metrics or []


def refused_then_trained(layout: Layout, model: TinyModel) -> dict[str, Tensor]:
    engine = make_engine(layout, model)
    engine.train(*train_arguments(layout), 1.0001)
    engine.train(*train_arguments(layout), 1e9)
    return whole_tensors(engine)


def expected_error(model: TinyModel, batch: TokenBatch) -> tuple[float, float, float]:
    """Mean and largest exp(|training - sampling|) over the loss by transformers, one sequence at a time; and tokens."""
    errors: list[float] = []
    tokens, loaded = batch.fields, model.load()
    assert tokens.token_ids is not None
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
    assert all(found[0] == [True, True] for found in by_rank)
    before, after = (merged([found[place] for found in by_rank]) for place in (1, 2))
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, atol=0, rtol=0)
    shares = [one for found in by_rank for one in found[3]]
    assert sum(one["token_mult_prob_error"] for one in shares) == pytest.approx(error, rel=1e-4)
    assert all(math.isfinite(one["loss"]) for one in shares)
    accepted = run_on_ranks(layout, refusals_on_rank, model, [(without_worst + error) / 2])
    assert all(found[0] == [False] for found in accepted), "the worst token does not count"


@pytest.mark.parametrize("layout", [Layout(data=2), Layout(tensor=2, pipeline=2)], ids=str)
def test_a_refused_step_leaves_no_trace(layout: Layout, tiny_models: dict[str, TinyModel]) -> None:
    """The step after it is that of torch's AdamW from the same weights, with the first learning rate."""
    model = tiny_models["qwen3_tied"]
    by_rank = run_on_ranks(layout, refused_then_trained, model)
    expect_close(merged(by_rank), adamw_steps(model, [(replace(OPTIMIZER), 0.5e-2)]))
