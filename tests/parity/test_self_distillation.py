"""The policy as its own teacher: gradients of transformers with the hint before the response, in every layout."""

import pytest
import torch
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.config.schema import LossConfig
from megatron_grpo.losses.distillation_loss import DistillationLossFn
from megatron_grpo.trainer.messages import PolicyDistillation, TeacherOutput
from megatron_grpo.trainer.rank import PolicyRank
from tests.parity.on_rank import expect_gradients
from tests.parity.policy_training import make_engine, whole_gradients
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import fetch, merge, rank_share, step_counts
from tests.support.fp8_oracle import expected_divergence, with_tail
from tests.support.rare import rare
from tests.support.tiny_models import VOCAB, TinyModel

LAYOUTS = [Layout(tensor=2, sequence=True), Layout(pipeline=2), Layout(context=2), Layout(data=2)]
PROMPTS, HINTS, RESPONSES = [2, 4, 3, 5, 2, 3], [5, 4, 8, 9, 3, 6], [3, 5, 4, 7, 4, 5]
TOP_K = (None, 5)
TEMPERATURE = 0.8  # of `make_engine`


def make_sequences() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Prompt, prompt with the hint, and response of each sequence."""
    draw = torch.Generator().manual_seed(7)
    lengths = zip(PROMPTS, HINTS, RESPONSES, strict=True)
    return [tuple(torch.randint(0, VOCAB, (count,), generator=draw) for count in row) for row in lengths]


def make_batch(*, has_hint: bool) -> TokenBatch:
    pieces = [(hinted if has_hint else prompt, response) for prompt, hinted, response in make_sequences()]
    sampled = torch.cat([torch.cat([torch.zeros(len(a)), torch.ones(len(b))]) for a, b in pieces])
    fields = TokenFields(
        token_ids=torch.cat([torch.cat(pair) for pair in pieces]).int(),
        sampled=sampled > 0,
        loss_mask=sampled,
        advantages=torch.zeros(len(sampled)),
        generation_logprobs=torch.zeros(len(sampled)),
    )
    return TokenBatch([len(a) + len(b) for a, b in pieces], fields)


def teach(engine: PolicyRank, layout: Layout) -> Tensor:
    """The outputs with the hint at the sampled tokens of the step, at those of the sequences without it."""
    hinted, step = make_batch(has_hint=True), make_batch(has_hint=False)
    share, microbatches, order = rank_share(hinted, layout)
    values = engine.compute_teacher_outputs(fetch(engine, share, None), microbatches)
    gathered: list[dict[int, Tensor] | None] = [None] * torch.distributed.get_world_size()
    rank_outputs = None if values is None else dict(zip(order, values.split(share.lengths), strict=True))
    torch.distributed.all_gather_object(gathered, rank_outputs)
    outputs = {index: piece for part in gathered for index, piece in (part or {}).items()}
    hinted_outputs = torch.cat([outputs[index] for index in range(len(hinted))])
    placed = hinted_outputs.new_zeros(sum(step.lengths), hinted_outputs.shape[1])
    placed[step.fields.sampled] = hinted_outputs[hinted.fields.sampled]
    return placed


def gradients_on_rank(layout: Layout, model: TinyModel, packing: bool) -> list[tuple[dict[str, Tensor], float]]:
    """Gradients, and this rank's share of the loss, for whole distributions and likeliest tokens."""
    results = []
    for top_k in TOP_K:
        output = TeacherOutput(vocab=VOCAB, top_k=top_k)
        distillation = PolicyDistillation(vocab=VOCAB, kl_type="reverse", mixed_kl_weight=0.5, self_output=output)
        engine = make_engine(layout, model, distributed=False, packing=packing, distillation=distillation)
        batch, loss_fn = make_batch(has_hint=False), DistillationLossFn(LossConfig())
        batch.fields.teacher_outputs = teach(engine, layout)
        share, microbatches, _ = rank_share(batch, layout)
        metrics = engine.compute_gradients(
            fetch(engine, share, loss_fn), microbatches, loss_fn, step_counts(make_batch(has_hint=False))
        )
        loss = sum(float(metric["loss"]) for metric in metrics) if engine._has_loss else 0.0
        results.append((whole_gradients(engine), loss))
    return results


def compute_loss(model: torch.nn.Module, top_k: int | None) -> Tensor:
    """The divergence from the model that sees the hint, one response at a time."""
    total = torch.zeros(())
    for prompt, hinted, response in make_sequences():
        count = len(response)

        def predict(beginning: Tensor, response: Tensor = response, count: int = count) -> Tensor:
            logits = model(torch.cat([beginning, response])[None], use_cache=False).logits[0, -count - 1 : -1]
            return (logits / TEMPERATURE).log_softmax(-1)

        ours = predict(prompt)
        with torch.no_grad():
            theirs = predict(hinted)
        if top_k is not None:
            chosen = theirs.topk(top_k).indices
            ours, theirs = with_tail(ours, chosen), with_tail(theirs, chosen)
        total = total + expected_divergence(ours, theirs, "reverse", 0.5).sum()
    return total / sum(RESPONSES)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("layout", [LAYOUTS[0], *rare(LAYOUTS[1:])], ids=str)
def test_gradients_of_self_distillation_equal_transformers(
    layout: Layout, packing: bool, tiny_models: dict[str, TinyModel]
) -> None:
    tiny = next(iter(tiny_models.values()))
    by_rank = run_on_ranks(layout, gradients_on_rank, tiny, packing)
    for number, top_k in enumerate(TOP_K):
        model = tiny.load()
        expected = compute_loss(model, top_k)
        expected.backward()
        assert sum(results[number][1] for results in by_rank) == pytest.approx(expected.item(), rel=1e-4)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        expect_gradients(merge([results[number][0] for results in by_rank]), gradients, floor=1e-3)


def test_the_divergence_is_that_of_trls_self_distillation() -> None:
    from trl.experimental.sdft.loss_utils import compute_full_logit_self_distillation_loss

    draw = torch.Generator().manual_seed(1)
    ours, theirs = torch.randn(2, 3, 4, 11, generator=draw, dtype=torch.float64)
    expected = compute_full_logit_self_distillation_loss(ours, theirs, distillation_alpha=1.0)
    actual = expected_divergence(ours.log_softmax(-1), theirs.log_softmax(-1), "reverse", 0.5)
    torch.testing.assert_close(actual, expected)
