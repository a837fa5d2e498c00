"""SFT, DPO, SimPO and KTO: gradients of transformers in every layout, and TRL's losses on the same rows."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_grpo.algorithms.kto import exchange_responses
from megatron_grpo.config.schema import DPOConfig, KTOConfig, ReferenceConfig
from megatron_grpo.data.processors import TaskDataSpec
from megatron_grpo.data.supervised_rows import preference_data_processor, supervised_data_processor
from megatron_grpo.losses.likelihood import NLLLossFn
from megatron_grpo.losses.preference import (
    PreferenceLoss,
    SequenceGradientLossFn,
    compute_label_loss,
    compute_preference_loss,
)
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.source import VOCABULARY
from megatron_grpo.prepare.models import make_tokenizer
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.rank import PolicyRank
from tests.parity.on_rank import expect_gradients
from tests.parity.pairs import (
    ROWS,
    STEPS,
    compare_on_rank,
    make_config,
    make_model,
    make_pair_batch,
    make_pairs,
    make_rows,
    make_token_batch,
    record_losses,
    sum_on_rank,
    trl_arguments,
)
from tests.parity.policy_training import make_batch, make_engine, whole_gradients
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import fetch, merge, rank_share, step_counts
from tests.support.rare import rare
from tests.support.tiny_models import TinyModel

LAYOUTS = [Layout(tensor=2, sequence=True), Layout(pipeline=2), Layout(context=2), Layout(data=2)]


def gradients_on_rank(layout: Layout, model: TinyModel, packing: bool) -> tuple[dict[str, Tensor], float]:
    """Gradients, and this rank's share of the loss."""
    engine = make_engine(layout, model, distributed=False, packing=packing)
    share, microbatches, _ = rank_share(make_batch(), layout)
    loss_fn, counts = NLLLossFn(), step_counts(make_batch())
    metrics = engine.compute_gradients(fetch(engine, share, loss_fn), microbatches, loss_fn, counts)
    loss = sum(float(metric["loss"]) for metric in metrics) if engine._has_loss else 0.0
    return whole_gradients(engine), loss


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("layout", [LAYOUTS[0], *rare(LAYOUTS[1:])], ids=str)
def test_gradients_of_the_likelihood_equal_transformers(
    layout: Layout, packing: bool, tiny_models: dict[str, TinyModel]
) -> None:
    tiny = next(iter(tiny_models.values()))
    by_rank = run_on_ranks(layout, gradients_on_rank, tiny, packing)
    batch, model = make_batch(), tiny.load()
    ids, masks = (column.split(batch.lengths) for column in (batch.fields.token_ids.long(), batch.fields.loss_mask))
    losses = [
        torch.nn.functional.cross_entropy(
            model(sequence[None], use_cache=False).logits[0, :-1] / 0.8,  # the temperature of `make_engine`
            sequence[1:].where(mask[1:] > 0, -100),
            reduction="sum",
        )
        for sequence, mask in zip(ids, masks, strict=True)
    ]
    expected = torch.stack(losses).sum() / batch.fields.loss_mask.sum()
    expected.backward()
    assert sum(loss for _, loss in by_rank) == pytest.approx(expected.item(), rel=1e-5)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    expect_gradients(merge([exported for exported, _ in by_rank]), gradients, floor=1e-3)


def losses_of_steps(layout: Layout, folder: Path) -> list[float]:
    """Losses of our steps, read with the processor of rows."""
    config, shape = make_config(folder, layout), read_model_shape(folder)
    rank = PolicyRank(RankSettings(config=config, shape=shape, folder=str(folder), decay_steps=STEPS))
    spec = TaskDataSpec(task_name="addition", answer_key=None, response_key="completion", apply_chat_template=False)
    tokenizer = make_tokenizer(VOCABULARY, 64)
    data = [supervised_data_processor(row, spec, tokenizer, 64, n) for n, row in enumerate(make_rows())]
    losses = []
    for start in range(0, len(data), ROWS):
        batch = make_token_batch(data[start : start + ROWS])
        halves = [[*range(ROWS // 2)], [*range(ROWS // 2, ROWS)]]  # two microbatches, whose means would differ
        result = rank.train(batch, halves, NLLLossFn(), step_counts(batch))
        losses.append(sum(metrics["loss"] for metrics in result.metrics or []))
    return losses


@pytest.mark.slow
def test_the_losses_of_twenty_steps_are_those_of_trl(tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    folder, (recorder, losses) = make_model(tmp_path / "model"), record_losses(SFTTrainer)
    arguments = SFTConfig(output_dir=str(tmp_path / "trl"), **trl_arguments())
    tokenizer = make_tokenizer(VOCABULARY, 64)
    recorder(str(folder), arguments, train_dataset=Dataset.from_list(make_rows()), processing_class=tokenizer).train()
    (ours,) = run_on_ranks(Layout(), losses_of_steps, folder)
    assert len(losses) == len(ours) == STEPS
    assert losses[-1] < losses[0] - 0.5, "the model learns"
    assert ours == pytest.approx(losses, abs=1e-5)


def losses_of_pairs(
    layout: Layout, folder: Path, settings: Sequence[DPOConfig | KTOConfig], packing: bool, steps: int
) -> list[float]:
    """Losses of the steps under one setting after the other, each from the same weights."""
    spec, tokenizer = TaskDataSpec(task_name="math", apply_chat_template=False), make_tokenizer(VOCABULARY, 64)
    config = make_config(folder, layout, packing=packing)
    fields, weights, losses = ["prev_logprobs", "reference_logprobs"], torch.ones(ROWS).double(), list[float]()
    for loop in settings:
        rank = PolicyRank(
            RankSettings(
                config=config,
                shape=read_model_shape(folder),
                folder=str(folder),
                decay_steps=STEPS,
                reference=ReferenceConfig(offload=False),
            )
        )
        for start in range(0, steps * ROWS, ROWS):
            rows = enumerate(make_pairs()[start : start + ROWS])
            pairs = [preference_data_processor(row, spec, tokenizer, 64, number) for number, row in rows]
            batch = make_pair_batch(pairs)
            compute_loss = partial(compute_preference_loss, weights=weights, config=loop)
            if isinstance(loop, KTOConfig):
                exchanged = [exchange_responses(pairs[number], pairs[number - 1], 64) for number in range(ROWS)]
                (policy, reference), _, _ = sum_on_rank(rank, layout, make_pair_batch(exchanged), fields)
                point = max(0.0, (policy - reference).mean().item())
                compute_loss = partial(compute_labels, point=point, config=loop)
            result, *work = compare_on_rank(rank, layout, batch, fields, compute_loss)
            rank.train(*work, SequenceGradientLossFn(), step_counts(batch))
            losses.append(result.loss)
    return losses


def compute_labels(
    policy: Tensor, reference: Tensor, tokens: Tensor, point: float, config: KTOConfig
) -> PreferenceLoss:
    labels = torch.tensor([[True, False]] * ROWS)
    return compute_label_loss(policy, reference, labels, torch.ones(ROWS).double(), point, config)


def losses_of_trl(trainer: Any, arguments: Any, folder: Path, rows: list[dict[str, Any]]) -> list[float]:
    from datasets import Dataset

    recorder, losses = record_losses(trainer)
    tokenizer = make_tokenizer(VOCABULARY, 64)
    recorder(str(folder), args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer).train()
    return losses


def make_labelled_rows() -> list[dict[str, Any]]:
    """Each pair's responses as two rows with labels, in TRL's order within a batch: chosen ones, then rejected ones."""
    pairs = make_pairs()
    return [
        {"prompt": pair["prompt"], "completion": pair[column], "label": column == "chosen"}
        for start in range(0, len(pairs), ROWS)
        for column in ("chosen", "rejected")
        for pair in pairs[start : start + ROWS]
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "trl"),
    [
        (DPOConfig(reference_policy_kl_penalty=0.1), {"beta": 0.1}),
        (
            DPOConfig(reference_policy_kl_penalty=0.5, loss_type="ipo", preference_average_log_probs=True),
            {"beta": 0.5, "loss_type": ["ipo"]},
        ),
        (
            DPOConfig(reference_policy_kl_penalty=2.0, loss_type="simpo", target_margin=1.0),
            {"beta": 2.0, "loss_type": "simpo", "simpo_gamma": 1.0, "cpo_alpha": 0.0},
        ),
    ],
    ids=["sigmoid", "ipo", "simpo"],
)
def test_the_losses_of_twenty_steps_on_pairs_are_those_of_trl(
    ours: DPOConfig, trl: dict[str, Any], tmp_path: Path
) -> None:
    import trl as library
    from trl.experimental import cpo

    folder = make_model(tmp_path / "model")
    config, trainer = library.DPOConfig, library.DPOTrainer
    if ours.loss_type == "simpo":
        config, trainer = cpo.CPOConfig, cpo.CPOTrainer
    arguments = config(output_dir=str(tmp_path / "trl"), **trl_arguments(), **trl)
    expected = losses_of_trl(trainer, arguments, folder, make_pairs())
    (actual,) = run_on_ranks(Layout(), losses_of_pairs, folder, [ours], True, STEPS)
    assert len(expected) == len(actual) == STEPS
    assert abs(expected[-1] - expected[0]) > 0.01, "the model learns"
    assert actual == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_the_losses_of_twenty_steps_on_labels_are_those_of_trl(tmp_path: Path) -> None:
    """One batch of TRL is a whole step, so that its reference point is that of the step."""
    import trl

    folder, ours = make_model(tmp_path / "model"), KTOConfig(undesirable_weight=0.7)
    size = {"per_device_train_batch_size": 2 * ROWS}
    arguments = trl.KTOConfig(
        output_dir=str(tmp_path / "trl"), beta=0.1, undesirable_weight=0.7, **(trl_arguments() | size)
    )
    expected = losses_of_trl(trl.KTOTrainer, arguments, folder, make_labelled_rows())
    (actual,) = run_on_ranks(Layout(), losses_of_pairs, folder, [ours], True, STEPS)
    assert abs(expected[-1] - expected[0]) > 0.01, "the model learns"
    assert actual == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("layout", [LAYOUTS[0], *rare(LAYOUTS[1:])], ids=str)
def test_pairs_are_learnt_alike_in_every_layout(layout: Layout, packing: bool, tmp_path: Path) -> None:
    """The loss of the later steps shows the gradients of the earlier ones."""
    folder = make_model(tmp_path / "model")
    settings = [
        DPOConfig(reference_policy_kl_penalty=0.3, sft_loss_weight=0.1),
        DPOConfig(reference_policy_kl_penalty=2.0, loss_type="simpo"),
        KTOConfig(reference_policy_kl_penalty=0.3),
    ]
    (expected,) = run_on_ranks(Layout(), losses_of_pairs, folder, settings, True, 3)
    for actual in run_on_ranks(layout, losses_of_pairs, folder, settings, packing, 3):
        assert actual == pytest.approx(expected, rel=1e-5)
