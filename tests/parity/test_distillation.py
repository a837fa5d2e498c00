"""Teachers' outputs and the gradients of distillation against transformers, in layouts of policy and teachers."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenBatch
from megatron_grpo.config.schema import LossConfig, ModelConfig, PolicyConfig
from megatron_grpo.losses.distillation_loss import DistillationLossFn
from megatron_grpo.trainer.messages import PolicyDistillation, RankSettings, TeacherHead, TeacherOutput
from megatron_grpo.trainer.rank import TeacherRank
from tests.parity.policy_training import (
    expect_gradients_of_transformers,
    hf_loss,
    make_batch,
    make_engine,
    whole_gradients,
)
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import LENGTHS, fetch, rank_share, step_counts
from tests.support.fp8_oracle import expected_divergence, with_tail
from tests.support.rare import rare
from tests.support.tiny_models import VOCAB, TinyModel, make_tiny_model

TEMPERATURE = 0.8
TEACHERS = ("llama_untied", "gemma3")
CHOICE = [index % 2 for index in range(len(LENGTHS))]
"""Number of each sequence's teacher."""

Outputs = Tensor  # [sum(LENGTHS), width]
Gradients = list[tuple[dict[str, Tensor], float]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    folder = tmp_path_factory.mktemp("models")
    return {name: make_tiny_model(name, folder) for name in ("qwen3_tied", "qwen3_moe", "mixtral", *TEACHERS)}


def outputs_on_rank(layout: Layout, teachers: list[TinyModel], top_k: int | None) -> list[dict[int, Tensor] | None]:
    """Each teacher's outputs by sequence; None on ranks that do not report."""
    outputs: list[dict[int, Tensor] | None] = []
    for tiny in teachers:
        config = PolicyConfig(model=ModelConfig(path=str(tiny.path)), parallel=layout.parallel, precision="float32")
        output = TeacherOutput(vocab=VOCAB, top_k=top_k)
        settings = RankSettings(
            config=config,
            shape=tiny.shape,
            folder=str(tiny.path),
            temperature=TEMPERATURE,
            decay_steps=1,
            teacher=output,
        )
        teacher = TeacherRank(settings)
        teacher.memory.offload(weights=True)  # as on GPUs that engines share
        teacher.memory.onload()
        share, microbatches, order = rank_share(make_batch(), layout)
        values = teacher.compute_outputs(fetch(teacher, share, None), microbatches)
        pieces = None if values is None else values.split(share.lengths)
        outputs.append(None if pieces is None else dict(zip(order, pieces, strict=True)))
    return outputs


def teach(layout: Layout, teachers: list[TinyModel], top_k: int | None = None) -> Outputs:
    """The outputs of each sequence's teacher, as the driver merges them."""
    by_rank = run_on_ranks(layout, outputs_on_rank, teachers, top_k)
    by_teacher = [
        {index: tensor for rank_outputs in by_rank for index, tensor in (rank_outputs[number] or {}).items()}
        for number in range(len(teachers))
    ]
    choice = CHOICE if len(teachers) > 1 else [0] * len(LENGTHS)
    return torch.cat([by_teacher[number][index] for index, number in enumerate(choice)])


def distilled_batch(outputs: Outputs, teachers: int) -> TokenBatch:
    batch = make_batch()
    choice = torch.tensor(CHOICE).repeat_interleave(torch.tensor(LENGTHS)).float() if teachers > 1 else None
    return TokenBatch(LENGTHS, replace(batch.fields, teacher_outputs=outputs, teacher=choice))


def gradients_on_rank(
    layout: Layout,
    model: TinyModel,
    teachers: list[TinyModel],
    outputs: Outputs,
    loss: LossConfig,
    packing: bool,
    top_k: int | None = None,
) -> tuple[Gradients, float]:
    """Gradients and their norm, and this rank's share of the loss."""
    heads = () if top_k else tuple(TeacherHead(str(teacher.path), teacher.shape) for teacher in teachers)
    distillation = PolicyDistillation(
        vocab=VOCAB, kl_type=loss.kl_type, mixed_kl_weight=loss.mixed_kl_weight, heads=heads
    )
    engine = make_engine(
        layout, model, distributed=False, packing=packing, distillation=distillation, logprob_chunk_size=3
    )
    batch, loss_fn = distilled_batch(outputs, len(teachers)), DistillationLossFn(loss)
    share, microbatches, _ = rank_share(batch, layout)
    tokens = fetch(engine, share, loss_fn)
    tokens = TokenBatch(tokens.lengths, replace(tokens.fields, teacher=share.fields.teacher))
    shares = engine.compute_gradients(tokens, microbatches, loss_fn, step_counts(make_batch()))
    value = sum(float(share["loss"]) for share in shares) if engine._has_loss else 0.0
    return [(whole_gradients(engine), engine.optimizer.compute_grad_norm())], value


def expected_loss(model: torch.nn.Module, teachers: list[TinyModel], loss: LossConfig, top_k: int | None) -> Tensor:
    """The loss in transformers, one sequence at a time."""
    batch, loaded, total = make_batch(), [teacher.load() for teacher in teachers], torch.zeros(())
    choice = CHOICE if len(teachers) > 1 else [0] * len(LENGTHS)
    columns = (batch.fields.token_ids.long(), batch.fields.loss_mask)
    for number, ids, mask in zip(choice, *(column.split(LENGTHS) for column in columns), strict=True):
        with torch.no_grad():
            theirs = (loaded[number](ids[None], use_cache=False).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        ours = (model(ids[None], use_cache=False).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        if top_k is not None and top_k < VOCAB:
            chosen = theirs.topk(top_k).indices
            ours, theirs = with_tail(ours, chosen), with_tail(theirs, chosen)
        total = total + (expected_divergence(ours, theirs, loss.kl_type, loss.mixed_kl_weight) * mask[1:]).sum()
    total = total / batch.fields.loss_mask.sum()
    return total + loss.policy_loss_weight * hf_loss(model) if loss.policy_loss_weight else total


def compare(
    layout: Layout,
    teacher_layout: Layout,
    policy: TinyModel,
    teachers: list[TinyModel],
    loss: LossConfig,
    *,
    packing: bool = True,
    top_k: int | None = None,
) -> None:
    outputs = teach(teacher_layout, teachers, top_k)
    by_rank = run_on_ranks(layout, gradients_on_rank, policy, teachers, outputs, loss, packing, top_k)
    oracle = partial(expected_loss, teachers=teachers, loss=loss, top_k=top_k)
    expect_gradients_of_transformers([gradients for gradients, _ in by_rank], [policy], 1e-4, oracle)
    if loss.policy_loss_weight:  # at ratio 1 the surrogate has another value than the oracle, and the same gradient
        return
    with torch.no_grad():
        expected = float(oracle(policy.load()))
    assert sum(value for _, value in by_rank) == pytest.approx(expected, rel=1e-4)


PAIRS = [
    (Layout(), Layout(tensor=2)),
    (Layout(tensor=2, sequence=True), Layout()),
    (Layout(pipeline=2), Layout(pipeline=2)),
    (Layout(context=2), Layout(data=2)),
    (Layout(tensor=2, pipeline=2), Layout(context=2)),
]


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("layouts", [PAIRS[1], *rare([PAIRS[0], *PAIRS[2:]])], ids=str)
def test_whole_distributions_of_two_teachers(
    layouts: tuple[Layout, Layout], packing: bool, models: dict[str, TinyModel]
) -> None:
    teachers = [models[name] for name in TEACHERS]
    compare(*layouts, models["qwen3_tied"], teachers, LossConfig(kl_type="reverse"), packing=packing)


@pytest.mark.parametrize("layouts", [PAIRS[1], *rare(PAIRS[2:4])], ids=str)
@pytest.mark.parametrize("name", ["forward", "mixed", "jensen_shannon"])
def test_every_divergence_of_whole_distributions(
    name: str, layouts: tuple[Layout, Layout], models: dict[str, TinyModel]
) -> None:
    loss = LossConfig(kl_type=name, mixed_kl_weight=0.3, policy_loss_weight=0.5, reference_policy_kl_penalty=0.0)
    compare(*layouts, models["qwen3_tied"], [models["gemma3"]], loss)


@pytest.mark.parametrize("layouts", [PAIRS[3], *rare([*PAIRS[:3], PAIRS[4]])], ids=str)
def test_likeliest_tokens_with_a_tail(layouts: tuple[Layout, Layout], models: dict[str, TinyModel]) -> None:
    compare(*layouts, models["qwen3_tied"], [models["llama_untied"]], LossConfig(kl_type="jensen_shannon"), top_k=7)


def test_mixtures_of_experts(models: dict[str, TinyModel]) -> None:
    """Ranks share the experts of the policy, and those of the teacher."""
    layout, loss = Layout(expert=2, data=2), LossConfig(kl_type="reverse")
    compare(layout, layout, models["qwen3_moe"], [models["mixtral"]], loss)


def test_all_tokens_as_the_likeliest_are_the_whole_distribution(models: dict[str, TinyModel]) -> None:
    layout, policy, teacher = Layout(tensor=2, sequence=True), models["qwen3_tied"], models["llama_untied"]
    loss = LossConfig(kl_type="mixed")
    losses = []
    for top_k in (None, VOCAB):
        outputs = teach(layout, [teacher], top_k)
        losses.append(run_on_ranks(layout, gradients_on_rank, policy, [teacher], outputs, loss, True, top_k))
    for (full, value), (top, top_value) in zip(*losses, strict=True):
        assert top_value == pytest.approx(value, rel=1e-6)
        for name, gradient in full[0][0].items():
            torch.testing.assert_close(top[0][0][name], gradient, atol=1e-6, rtol=1e-4)
