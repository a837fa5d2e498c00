"""Log-probabilities over the tokens that a filter of sampling keeps, in every layout, against transformers."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_grpo.config.schema import LossConfig, ReferenceConfig
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo.trainer.model.build import build_reference
from megatron_grpo.trainer.rank import PolicyRank
from megatron_grpo_kernels import filtered_logprob
from megatron_grpo_kernels.filtered_logprob import filtered_logprobs
from megatron_grpo_kernels.kept_tokens import find_kept_bounds
from megatron_grpo_kernels.token_filter import TokenFilter
from tests.parity.on_rank import expect_gradients
from tests.parity.policy_training import make_batch, make_engine, train_arguments, whole_gradients
from tests.parity.ranks import LAYOUTS, Layout, run_on_ranks
from tests.parity.training import fetch, merge, rank_share
from tests.support.tiny_models import TinyModel

TOKENS, HIDDEN = 12, 6
FILTERS = {
    "top_p": TokenFilter(top_p=0.8),
    "top_k": TokenFilter(top_k=4),
    "all": TokenFilter(top_k=6, top_p=0.9, min_p=0.01),
}


def problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, targets and factors of the results."""
    generator = torch.Generator().manual_seed(4)
    hidden, weight = torch.randn(TOKENS, HIDDEN, generator=generator), torch.randn(16, HIDDEN, generator=generator)
    targets = torch.randint(0, 8, (TOKENS,), generator=generator)
    return hidden, weight, targets, torch.randn(3, TOKENS, generator=generator)


def results_on_rank(layout: Layout, vocab: int, name: str, candidates: int) -> tuple[Tensor, Tensor, Tensor]:
    """Results, this rank's part of the hidden states' gradient, and that of its rows."""
    group = parallel_state.get_tensor_model_parallel_group()
    hidden, weight, targets, factors = problem()
    rows = weight.chunk(group.size())[group.rank()].clone().requires_grad_()
    hidden.requires_grad_()
    start = group.rank() * len(rows)
    filtered_logprob.find_kept_bounds = partial(find_kept_bounds, candidates=candidates)
    try:
        results = filtered_logprobs(
            hidden,
            rows,
            targets,
            FILTERS[name],
            start=start,
            columns=max(0, min(len(rows), vocab - start)),
            group=group if group.size() > 1 else None,
            scale=1.3,
            chunk_tokens=5,
        )
    finally:
        filtered_logprob.find_kept_bounds = find_kept_bounds
    logprobs = results.logprobs.masked_fill(results.logprobs.isneginf(), 0.0)
    both = torch.autograd.grad((torch.stack([logprobs, *results[1:]]) * factors).sum(), (hidden, rows))
    return torch.stack(results).detach(), *both


@pytest.mark.parametrize("candidates", [1024, 2], ids=["all sorted", "few candidates"])
@pytest.mark.parametrize("vocab", [16, 11, 8], ids=["whole", "padding", "a part of padding alone"])
@pytest.mark.parametrize("name", FILTERS)
def test_the_split_vocabulary_is_the_whole_one(name: str, vocab: int, candidates: int) -> None:
    ((expected, of_hidden, of_weight),) = run_on_ranks(Layout(), results_on_rank, vocab, name, 1024)
    by_rank = run_on_ranks(Layout(tensor=2), results_on_rank, vocab, name, candidates)
    assert expected[0].isneginf().any()
    assert expected[0].isfinite().any()
    for results, _, _ in by_rank:
        torch.testing.assert_close(results, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sum(part for _, part, _ in by_rank), of_hidden, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat([rows for *_, rows in by_rank]), of_weight, atol=1e-4, rtol=1e-4)


FILTER, KL = TokenFilter(top_k=40, top_p=0.9), 0.3
CONFIG = LossConfig(reference_policy_kl_penalty=KL, entropy_coef=0.1)


def with_reference(layout: Layout, model: TinyModel) -> PolicyRank:
    """A rank with the filter and a reference."""
    engine = make_engine(layout, model, distributed=False)
    engine.settings = replace(engine.settings, token_filter=FILTER, reference=ReferenceConfig())
    engine.reference = build_reference(engine.chunks, engine.config, ReferenceConfig(), engine.shape, engine.platform)
    return engine


def trained_on_rank(
    layout: Layout, model: TinyModel
) -> tuple[list[dict[int, Tensor]], dict[str, float], dict[str, Tensor]]:
    """Log-probabilities of policy (over kept and over all tokens) and reference; metrics; gradients."""
    engine = with_reference(layout, model)
    share, microbatches, order = rank_share(make_batch(), layout)
    batch = fetch(engine, share, None)
    methods = engine.compute_logprobs, engine.compute_unfiltered_logprobs, engine.compute_reference_logprobs
    outputs = [method(batch, microbatches) for method in methods]
    values = [dict(zip(order, output.split(share.lengths), strict=True)) for output in outputs if output is not None]
    share, microbatches, _, counts = train_arguments(layout)
    share.fields.reference_logprobs = -torch.ones(sum(share.lengths))
    loss_fn = ClippedPGLossFn(CONFIG)
    shares = engine.compute_gradients(fetch(engine, share, loss_fn), microbatches, loss_fn, counts)
    names = ("loss", "outside_filter_fraction", "kl_penalty", "entropy")
    metrics = {name: sum(float(part[name]) for part in shares) for name in names}
    return values, metrics, whole_gradients(engine)


def kept_logits(logits: Tensor) -> Tensor:
    """[tokens, vocabulary] with -inf for tokens that the filter removes, row by row as its definition says."""
    rows = []
    for row in logits:
        values, order = row.sort(descending=True)
        before = values[:40].softmax(0).cumsum(0) - values[:40].softmax(0)
        kept_tokens = order[:40][before < 0.9]
        rows.append(torch.full_like(row, -torch.inf).index_put((kept_tokens,), row[kept_tokens]))
    return torch.stack(rows)


def expected_of_transformers(model: torch.nn.Module) -> tuple[list[Tensor], list[Tensor], dict[str, float], Tensor]:
    """Log-probabilities over kept and over all tokens of each sequence, metrics, and the loss with its graph."""
    batch = make_batch()
    tokens, total = batch.fields, torch.zeros(())
    sums = dict.fromkeys(("outside_filter_fraction", "kl_penalty", "entropy"), 0.0)
    kept_all, whole_all = [], []
    columns = (tokens.token_ids.long(), tokens.loss_mask, tokens.advantages)
    for ids, mask, advantages in zip(*(column.split(batch.lengths) for column in columns), strict=True):
        logits = model(ids[None]).logits[0, :-1] / 0.8
        filtered, unfiltered = (
            scores.log_softmax(-1).gather(1, ids[1:, None])[:, 0] for scores in (kept_logits(logits), logits)
        )
        kept_all.append(torch.cat([torch.zeros(1), filtered]).detach())
        whole_all.append(torch.cat([torch.zeros(1), unfiltered]).detach())
        inside = (mask[1:] > 0) & filtered.isfinite()
        entropy = torch.distributions.Categorical(logits=kept_logits(logits).clamp(min=-1e9)).entropy()
        kl = torch.expm1(-1 - unfiltered) + unfiltered + 1
        surrogate = (filtered - filtered.detach())[inside].exp() * advantages[1:][inside]  # at ratio 1
        total = total - surrogate.sum() + KL * kl[inside].sum() - 0.1 * (entropy * mask[1:]).sum()
        sums["outside_filter_fraction"] += float(mask[1:].sum() - inside.sum())
        sums["kl_penalty"] += float(kl[inside].sum())
        sums["entropy"] += float((entropy * mask[1:]).sum())
    count = tokens.loss_mask.sum()
    return kept_all, whole_all, {name: value / float(count) for name, value in sums.items()}, total / count


@pytest.mark.parametrize("layout", [*LAYOUTS, Layout(data=2), Layout(context=2)], ids=str)
def test_every_layout_trains_on_the_kept_tokens(layout: Layout, tiny_models: dict[str, TinyModel]) -> None:
    """Random tokens, of which the filter removes most: they leave the loss and count in its denominator."""
    tiny = tiny_models["qwen3_tied"]
    model = tiny.load()
    filtered, unfiltered, metrics, loss = expected_of_transformers(model)
    assert 0.1 < metrics["outside_filter_fraction"] < 0.9
    loss.backward()
    by_rank = run_on_ranks(layout, trained_on_rank, tiny)
    for values, _, _ in by_rank:
        for number in values[0] if values else ():
            torch.testing.assert_close(values[0][number], filtered[number], atol=3e-5, rtol=0)
            torch.testing.assert_close(values[1][number], unfiltered[number], atol=3e-5, rtol=0)
            torch.testing.assert_close(values[2][number], unfiltered[number], atol=3e-5, rtol=0)
    last = layout.pipeline > 1
    losses = [reported for _, reported, _ in by_rank if reported["loss"] or not last]
    replicas = losses[:: layout.tensor]
    for name, expected in {**metrics, "loss": loss.item()}.items():
        assert sum(replica[name] for replica in replicas) == pytest.approx(expected, rel=1e-4), name
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    expect_gradients(merge([gradients for *_, gradients in by_rank]), expected, 2e-4)
