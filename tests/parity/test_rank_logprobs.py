"""Log-probabilities under policy and reference, as ranks report them, and with the fused kernel as head."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from megatron_grpo.config.schema import ParallelConfig, ReferenceConfig
from megatron_grpo.trainer.parallel import destroy_parallel, initialize_parallel
from tests.parity.on_rank import expect_logprobs, split_by_sequence
from tests.parity.policy_training import (
    OPTIMIZER,
    expect_gradients_of_transformers,
    gradients_on_rank,
    make_batch,
    make_engine,
    train_arguments,
)
from tests.parity.ranks import LAYOUTS, Layout, run_on_ranks
from tests.parity.training import fetch, merge, rank_share, whole_tensors
from tests.support.interpreter import run_interpreted
from tests.support.tiny_models import TinyModel

TEMPERATURE = 0.8
BySequence = dict[int, Tensor]
"""Log-probabilities by number of the sequence."""


def logprobs_on_rank(
    layout: Layout, model: TinyModel, precision: str = "float32"
) -> tuple[list[BySequence], dict[str, Tensor]]:
    """Those of the policy, then after a step of training those of reference and policy; and the weights then.

    No log-probabilities on ranks that do not report.
    """
    optimizer = replace(OPTIMIZER, warmup_steps=0)
    rank = make_engine(layout, model, precision=precision, optimizer=optimizer, reference=ReferenceConfig())
    share, microbatches, order = rank_share(make_batch(), layout)
    batch = fetch(rank, share, None)
    outputs = [rank.compute_logprobs(batch, microbatches)]
    rank.train(*train_arguments(layout))
    outputs += [rank.compute_reference_logprobs(batch, microbatches), rank.compute_logprobs(batch, microbatches)]
    assert all((values is not None) == rank.is_output_rank for values in outputs)
    reported = [values for values in outputs if values is not None]
    assert all((values.dtype, values.shape) == (torch.float32, (sum(share.lengths),)) for values in reported)
    return [split_by_sequence(values, share, order) for values in reported], whole_tensors(rank)


@pytest.mark.parametrize("layout", [*LAYOUTS, Layout(data=2)], ids=str)
def test_ranks_report_the_logprobs_of_transformers(layout: Layout, tiny_models: dict[str, TinyModel]) -> None:
    """Each rank with no more of the batch than it fetches in a run."""
    tiny = tiny_models["qwen3_tied"]
    by_rank = run_on_ranks(layout, logprobs_on_rank, tiny)
    before, reference, after = zip(*(reported for reported, _ in by_rank if reported), strict=True)
    start, trained = tiny.load(), tiny.load()
    trained.load_state_dict(merge([weights for _, weights in by_rank]), strict=False)
    expect_logprobs(before, start)
    expect_logprobs(reference, start)
    expect_logprobs(after, trained)
    assert any((after[0][number] - before[0][number]).abs().max() > 1e-2 for number in before[0])


def figures_on_rank(layout: Layout, model: TinyModel) -> list[BySequence]:
    """Entropies and sizes of scores by sequence; none on ranks that do not report."""
    rank = make_engine(layout, model)
    share, microbatches, order = rank_share(make_batch(), layout)
    batch = fetch(rank, share, None)
    figures = [rank.compute_entropy(batch, microbatches), rank.compute_score_sizes(batch, microbatches)]
    return [split_by_sequence(values, share, order) for values in figures if values is not None]


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2), Layout(context=2), Layout(pipeline=2)], ids=str)
def test_ranks_report_entropies_and_sizes_of_scores(layout: Layout, tiny_models: dict[str, TinyModel]) -> None:
    """Both by their definitions, from transformers' distributions."""
    tiny, batch = tiny_models["qwen3_tied"], make_batch()
    entropies, sizes = zip(
        *(figures for figures in run_on_ranks(layout, figures_on_rank, tiny) if figures), strict=True
    )
    model, sequences = tiny.load(), batch.fields.token_ids.long().split(batch.lengths)
    for number, (ids, mask) in enumerate(zip(sequences, batch.fields.loss_mask.split(batch.lengths), strict=True)):
        with torch.no_grad():
            logits = model(ids[None], use_cache=False).logits[0, :-1]
        probabilities = (logits / TEMPERATURE).softmax(dim=1)
        scores = torch.nn.functional.one_hot(ids[1:], probabilities.shape[1]) - probabilities
        entropy = -torch.special.xlogy(probabilities, probabilities).sum(dim=1)
        for by_sequence, expected in ((entropies, entropy), (sizes, scores.square().sum(dim=1))):
            (actual,) = (values[number] for values in by_sequence if number in values)
            in_loss = mask[1:] > 0
            torch.testing.assert_close(actual[1:][in_loss], expected[in_loss], atol=1e-4, rtol=1e-4)


def gradients_with_the_fused_head(models: list[TinyModel]) -> list[tuple[dict[str, Tensor], float]]:
    """As `gradients_on_rank`, on a rank of this process."""
    initialize_parallel(ParallelConfig(), rank=0, store=HashStore(), seed=1, timeout_s=60)
    try:
        return gradients_on_rank(Layout(), models, settings={"logprob_kernel": "fused"})
    finally:
        destroy_parallel()


@pytest.mark.slow  # in Triton's interpreter; tests/unit/kernels compare the kernel with every `make test`
def test_gradients_equal_transformers(tiny_models: dict[str, TinyModel]) -> None:
    models = [tiny_models["qwen3_tied"]]
    expect_gradients_of_transformers([run_interpreted(gradients_with_the_fused_head, models)], models, tolerance=1e-4)


def ask_the_fused_head(layout: Layout, model: TinyModel) -> None:
    """For log-probabilities of a batch."""
    engine = make_engine(layout, model, distributed=False, logprob_kernel="fused")
    share, microbatches, *_ = train_arguments(layout)
    engine.compute_logprobs(share, microbatches)


def test_the_key_reaches_the_kernel(tiny_models: dict[str, TinyModel]) -> None:
    """Which says so, as no rank of this layout interprets Triton."""
    with pytest.raises(RuntimeError, match=r"use policy\.logprob_kernel=chunked"):
        run_on_ranks(Layout(), ask_the_fused_head, tiny_models["qwen3_tied"])
