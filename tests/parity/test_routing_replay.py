"""Replayed routing on real ranks, against no replay and against transformers that is forced to the same experts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from megatron_grpo.batch.token_batch import TokenBatch
from megatron_grpo.config.schema import MoeConfig, ReferenceConfig
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo.models.routed_experts import RoutedForm
from megatron_grpo.verification.problem import prepare_model
from tests.parity.on_rank import expect_gradients, split_by_sequence
from tests.parity.policy_training import make_batch, make_engine, train_arguments, whole_gradients
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import fetch, merge, rank_share
from tests.support.forced_routing import forced, own_routing
from tests.support.tiny_models import TinyModel, logprobs_of_logits, make_tiny_model

TEMPERATURE = 0.8
REPLAY = MoeConfig(replay_routing=True)
LAYOUTS = [Layout(), Layout(expert=2, data=2), Layout(tensor=2, sequence=True), Layout(pipeline=2), Layout(context=2)]
BySequence = dict[int, Tensor]


NEWER = ("glm4_moe", "minimax_m2", "llama4", "gemma4_moe", "gpt_oss", "qwen3_5_moe", "qwen3_next")
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek_v3", *NEWER)]


@pytest.fixture(scope="module", params=["qwen3_moe", *OTHERS])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    name, folder = request.param, tmp_path_factory.mktemp("replay")
    if name in NEWER:
        return TinyModel(name, prepare_model(f"tiny:{name}", False, folder, seed=0))
    return make_tiny_model(name, folder)


def sequences() -> list[Tensor]:
    """[tokens], int32, of each sequence of the batch."""
    batch = make_batch()
    return list(batch.fields.token_ids.split(batch.lengths))


def own_record(tiny: TinyModel) -> list[Tensor]:
    """What the model itself chooses, without the last token of each sequence: [tokens, layers with experts, top_k]."""
    model = tiny.load()
    records = [own_routing(model, token_ids) for token_ids in sequences()]
    for record in records:
        record[-1] = -1
    return records


def other_record(tiny: TinyModel) -> list[Tensor]:
    """Experts of which each token has some that the model would not choose; some tokens have none on record."""
    experts = tiny.shape.experts
    generator = torch.Generator().manual_seed(5)
    records = []
    for token_ids in sequences():
        drawn = torch.rand(len(token_ids), sum(experts.layers), experts.count, generator=generator)
        record = drawn.argsort(dim=-1)[..., : experts.top_k]
        record[torch.rand(len(token_ids), generator=generator) < 0.2] = -1
        record[-1] = -1
        records.append(record)
    return records


def with_record(tiny: TinyModel, batch: TokenBatch, order: list[int], records: list[Tensor]) -> TokenBatch:
    """A batch of some sequences of `make_batch`, with what is on record of them."""
    form = RoutedForm.from_shape(tiny.shape)
    routed = torch.from_numpy(form.pack(torch.cat([records[number] for number in order]).numpy()))
    return TokenBatch(batch.lengths, replace(batch.fields, routed_experts=routed))


def replayed_on_rank(
    layout: Layout, tiny: TinyModel, records: list[Tensor] | None, settings: dict[str, Any] | None = None
) -> tuple[list[BySequence], dict[str, Tensor], dict[str, float]]:
    """Log-probabilities by sequence, gradients, and what a step tells; records None: without replay."""
    moe = MoeConfig() if records is None else REPLAY
    engine = make_engine(layout, tiny, distributed=False, moe=moe, **(settings or {}))
    share, microbatches, order = rank_share(make_batch(), layout)
    _, _, loss_fn, counts = train_arguments(layout)
    if records is not None:
        share = with_record(tiny, share, order, records)
    logprobs = engine.compute_logprobs(fetch(engine, replace_sampled(share), None), microbatches)
    results = [] if logprobs is None else [dict(zip(order, logprobs.split(share.lengths), strict=True))]
    engine.compute_gradients(fetch(engine, share, loss_fn), microbatches, loss_fn, counts)
    gradients = whole_gradients(engine)
    report = engine.train(fetch(engine, share, loss_fn), microbatches, loss_fn, counts)
    metrics = next((entry for entry in report.metrics or [] if "moe_aux_loss" in entry), {})
    return results, gradients, metrics


def replace_sampled(batch: TokenBatch) -> TokenBatch:
    """The batch without a loss mask, so that all tokens are asked about."""
    return TokenBatch(batch.lengths, replace(batch.fields, loss_mask=None))


def of_transformers(tiny: TinyModel, records: list[Tensor]) -> tuple[BySequence, dict[str, Tensor]]:
    """Log-probabilities by sequence, and gradients of the loss, with the routing forced to the records."""
    model, batch = tiny.load(), make_batch()
    tokens, results, total = batch.fields, {}, torch.zeros(())
    columns = (tokens.token_ids.long(), tokens.loss_mask, tokens.advantages)
    for number, (ids, mask, advantages) in enumerate(
        zip(*(column.split(batch.lengths) for column in columns), strict=True)
    ):
        with forced(model, records[number]):
            logprobs = logprobs_of_logits(model(ids[None]).logits / TEMPERATURE, ids[None])[0]
        results[number] = logprobs.detach()
        total = total - (logprobs * advantages * mask).sum()
    (total / tokens.loss_mask.sum()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return results, revert_weight_conversion(model, gradients)


def expect_equal(
    by_rank: list[Any], logprobs: BySequence, gradients: dict[str, Tensor], *, atol: float, rtol: float
) -> None:
    """What ranks found, all sequences once."""
    parts = [part for reported, _, _ in by_rank for part in reported]
    assert sorted(number for part in parts for number in part) == list(range(len(make_batch())))
    for part in parts:
        for number, values in part.items():
            torch.testing.assert_close(values, logprobs[number], atol=atol, rtol=0)
    actual = merge([part for _, part, _ in by_rank])
    expect_gradients(actual, gradients, rtol, floor=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_replayed_routing_equals_transformers_that_is_forced_to_it(layout: Layout, model: TinyModel) -> None:
    records = other_record(model)
    logprobs, gradients = of_transformers(model, records)
    unforced, _ = of_transformers(model, [torch.full_like(record, -1) for record in records])
    assert max((logprobs[n] - unforced[n]).abs().max() for n in logprobs) > 0.1, "other experts say something else"
    by_rank = run_on_ranks(layout, replayed_on_rank, model, records)
    expect_equal(by_rank, logprobs, gradients, atol=3e-5, rtol=2e-4)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_replaying_the_routers_own_choice_changes_nothing(layout: Layout, model: TinyModel) -> None:
    records = own_record(model)
    replayed = run_on_ranks(layout, replayed_on_rank, model, records)
    plain = run_on_ranks(layout, replayed_on_rank, model, None)
    for (logprobs, gradients, metrics), (other_logprobs, other_gradients, other_metrics) in zip(
        replayed, plain, strict=True
    ):
        assert [part.keys() for part in logprobs] == [part.keys() for part in other_logprobs]
        for part, other_part in zip(logprobs, other_logprobs, strict=True):
            assert all(torch.equal(part[number], other_part[number]) for number in part)
        assert gradients.keys() == other_gradients.keys()
        assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)
        assert "moe_routing_agreement" not in other_metrics
        assert metrics == (other_metrics | {"moe_routing_agreement": 1.0} if other_metrics else {})


def test_agreement_is_the_share_of_recorded_experts_that_the_router_would_choose(model: TinyModel) -> None:
    records = other_record(model)
    tiny = model.load()
    agreed = compared = 0
    for token_ids, record in zip(sequences(), records, strict=True):
        with forced(tiny, record):
            routing = own_routing(tiny, token_ids)
        for chosen, theirs in zip(routing.flatten(0, 1).tolist(), record.flatten(0, 1).tolist(), strict=True):
            if theirs[0] >= 0:
                agreed += len(set(chosen) & set(theirs))
                compared += len(theirs)
    assert 0 < agreed < compared
    for layout in LAYOUTS[1:]:
        reports = [metrics for _, _, metrics in run_on_ranks(layout, replayed_on_rank, model, records) if metrics]
        assert len(reports) == 1
        assert reports[0]["moe_routing_agreement"] == pytest.approx(agreed / compared), layout


def test_recomputed_layers_replay_the_experts_of_their_own_microbatch(model: TinyModel) -> None:
    """The layers of one microbatch are computed again after those of the next have passed."""
    records = other_record(model)
    logprobs, gradients = of_transformers(model, records)
    settings = {"activation_checkpointing": True}
    by_rank = run_on_ranks(Layout(pipeline=2), replayed_on_rank, model, records, settings)
    expect_equal(by_rank, logprobs, gradients, atol=3e-5, rtol=2e-4)


def reference_on_rank(layout: Layout, tiny: TinyModel, records: list[Tensor]) -> tuple[BySequence, BySequence]:
    """Log-probabilities by sequence, of the policy and of the reference policy."""
    rank = make_engine(layout, tiny, moe=REPLAY, reference=ReferenceConfig())
    share, microbatches, order = rank_share(make_batch(), layout)
    batch = fetch(rank, replace_sampled(with_record(tiny, share, order, records)), None)
    policy, reference = rank.compute_logprobs(batch, microbatches), rank.compute_reference_logprobs(batch, microbatches)
    return tuple(split_by_sequence(logprobs, share, order) for logprobs in (policy, reference))


def test_the_reference_policy_chooses_for_itself(model: TinyModel) -> None:
    records = other_record(model)
    policy, reference = run_on_ranks(Layout(), reference_on_rank, model, records)[0]
    logprobs, _ = of_transformers(model, records)
    unforced, _ = of_transformers(model, [torch.full_like(record, -1) for record in records])
    for number in logprobs:
        torch.testing.assert_close(policy[number], logprobs[number], atol=3e-5, rtol=0)
        torch.testing.assert_close(reference[number], unforced[number], atol=3e-5, rtol=0)


def without_record_on_rank(layout: Layout, tiny: TinyModel) -> None:
    engine = make_engine(layout, tiny, moe=REPLAY)
    share, microbatches, _ = rank_share(make_batch(), layout)
    engine.compute_logprobs(fetch(engine, share, None), microbatches)


def test_a_batch_without_the_record_is_a_defect(model: TinyModel) -> None:
    with pytest.raises(RuntimeError, match="recorded experts come with every microbatch"):
        run_on_ranks(Layout(), without_record_on_rank, model)


def entries_on_rank(layout: Layout, tiny: TinyModel, replays: bool) -> tuple[list[str], list[str]]:
    engine = make_engine(layout, tiny, moe=replace(REPLAY, replay_routing=replays))
    _, _, loss_fn, _ = train_arguments(layout)
    assert isinstance(loss_fn, ClippedPGLossFn)
    return list(engine.list_needed_fields(None)), list(engine.list_needed_fields(loss_fn))


def test_stages_with_experts_fetch_the_record(model: TinyModel) -> None:
    """The first layer of DeepSeek-V3 has no experts, and so has the first of two stages."""
    for replays in (True, False):
        stages = run_on_ranks(Layout(pipeline=2), entries_on_rank, model, replays)
        for stage, (passes, steps) in enumerate(stages):
            layers = model.shape.experts.layers
            is_fetched = replays and any(layers[stage * len(layers) // 2 : (stage + 1) * len(layers) // 2])
            assert ("routed_experts" in passes, "routed_experts" in steps) == (is_fetched, is_fetched)
