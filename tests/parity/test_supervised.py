"""SFT and DPO: gradients of transformers in every layout, and TRL's losses on the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_grpo.algorithms.supervised import make_trajectory
from megatron_grpo.batch.packing import SequencePadder
from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.config.schema import DPOConfig, ModelConfig, OptimizerConfig, PolicyConfig, ReferenceConfig
from megatron_grpo.data.processors import DatumSpec, TaskDataSpec
from megatron_grpo.data.supervised_rows import preference_data_processor, supervised_data_processor
from megatron_grpo.losses.likelihood import NLLLossFn
from megatron_grpo.losses.preference import SequenceGradientLossFn, compute_preference_loss
from megatron_grpo.models.families import read_model_shape
from megatron_grpo.models.source import PREPARED_MODELS, VOCABULARY
from megatron_grpo.prepare.lessons import make_prompt_rows
from megatron_grpo.prepare.models import make_tokenizer
from megatron_grpo.rollouts.partitions import concatenate_trajectories
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.rank import PolicyRank
from tests.parity.policy_training import make_batch, make_engine, whole_gradients
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import fetched, merged, rank_share, step_counts
from tests.support.rare import rare
from tests.support.tiny_models import TinyModel

STEPS, ROWS = 20, 8
LAYOUTS = [Layout(tensor=2, sequence=True), Layout(pipeline=2), Layout(context=2), Layout(data=2)]


def gradients_on_rank(layout: Layout, model: TinyModel, packing: bool) -> tuple[dict[str, Tensor], float]:
    """Gradients, and this rank's share of the loss."""
    engine = make_engine(layout, model, distributed=False, packing=packing)
    share, microbatches, _ = rank_share(make_batch(), layout)
    loss_fn, counts = NLLLossFn(), step_counts(make_batch())
    metrics = engine.compute_gradients(fetched(engine, share, loss_fn), microbatches, loss_fn, counts)
    loss = sum(float(one["loss"]) for one in metrics) if engine._has_loss else 0.0
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
            model(one[None], use_cache=False).logits[0, :-1] / 0.8,  # the temperature of `make_engine`
            one[1:].where(mask[1:] > 0, -100),
            reduction="sum",
        )
        for one, mask in zip(ids, masks, strict=True)
    ]
    expected = torch.stack(losses).sum() / batch.fields.loss_mask.sum()
    expected.backward()
    assert sum(loss for _, loss in by_rank) == pytest.approx(expected.item(), rel=1e-5)
    actual = merged([gradients for gradients, _ in by_rank])
    for name, parameter in model.named_parameters():
        error = (actual[name] - parameter.grad).norm() / parameter.grad.norm().clamp(min=1e-3)
        assert error < 1e-4, name


def make_model(folder: Path) -> Path:
    """The prepared model's architecture with random weights, and its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    set_seed(0)
    settings = PREPARED_MODELS["addition"]
    config = AutoConfig.for_model(**settings)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    make_tokenizer(VOCABULARY, settings["max_position_embeddings"]).save_pretrained(folder)
    return folder


def make_rows() -> list[dict[str, Any]]:
    """A prompt and a response of various lengths for each sequence of each step."""
    rows = make_prompt_rows("addition")["train.jsonl"][: STEPS * ROWS]
    return [{"prompt": row["prompt"], "completion": row["answer"] * (1 + n % 3)} for n, row in enumerate(rows)]


def make_token_batch(rows: Sequence[DatumSpec]) -> TokenBatch:
    trajectories = [make_trajectory(row["message_log"], row, number) for number, row in enumerate(rows)]
    arrays = concatenate_trajectories(trajectories)
    sampled = torch.from_numpy(arrays["sampled"])
    fields = TokenFields(
        token_ids=torch.from_numpy(arrays["token_ids"].astype(np.int32)), sampled=sampled, loss_mask=sampled.float()
    )
    return TokenBatch([trajectory.tokens for trajectory in trajectories], fields)


def losses_of_steps(layout: Layout, folder: Path) -> list[float]:
    """Losses of our steps, read with the processor of rows."""
    optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.1, adam_beta2=0.999, adam_eps=1e-8)
    config = PolicyConfig(
        model=ModelConfig(path=str(folder)), optimizer=optimizer, precision="float32", max_grad_norm=1.0
    )
    rank = PolicyRank(
        RankSettings(config=config, shape=read_model_shape(folder), folder=str(folder), decay_steps=STEPS)
    )
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


def trl_arguments() -> dict[str, Any]:
    """Settings of TRL's trainers that are those of our steps."""
    return {
        "max_steps": STEPS,
        "per_device_train_batch_size": ROWS,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "model_init_kwargs": {"dtype": "float32"},
    }


@pytest.mark.slow
def test_the_losses_of_twenty_steps_are_those_of_trl(tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    folder, losses = make_model(tmp_path / "model"), list[float]()

    class Recorder(SFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            result = super().compute_loss(*args, **kwargs)
            losses.append((result[0] if isinstance(result, tuple) else result).item())
            return result

    arguments = SFTConfig(output_dir=str(tmp_path / "trl"), **trl_arguments())
    tokenizer = make_tokenizer(VOCABULARY, 64)
    Recorder(str(folder), arguments, train_dataset=Dataset.from_list(make_rows()), processing_class=tokenizer).train()
    (ours,) = run_on_ranks(Layout(), losses_of_steps, folder)
    assert len(losses) == len(ours) == STEPS
    assert losses[-1] < losses[0] - 0.5, "the model learns"
    assert ours == pytest.approx(losses, abs=1e-5)


def make_pairs() -> list[dict[str, Any]]:
    """Right sums of various lengths as chosen responses, wrong ones as rejected."""
    return [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": row["completion"][::-1] + "7" * (n % 4)}
        for n, row in enumerate(make_rows())
    ]


def losses_of_pairs(layout: Layout, folder: Path, settings: DPOConfig, packing: bool, steps: int) -> list[float]:
    """Losses of our steps on pairs."""
    config = PolicyConfig(
        model=ModelConfig(path=str(folder)),
        parallel=layout.parallel,
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1, adam_beta2=0.999, adam_eps=1e-8),
        precision="float32",
        max_grad_norm=1.0,
        packing=packing,
    )
    shape = read_model_shape(folder)
    rank = PolicyRank(
        RankSettings(
            config=config, shape=shape, folder=str(folder), decay_steps=STEPS, reference=ReferenceConfig(offload=False)
        )
    )
    spec, tokenizer, losses = (
        TaskDataSpec(task_name="math", apply_chat_template=False),
        make_tokenizer(VOCABULARY, 64),
        [],
    )
    for start in range(0, steps * ROWS, ROWS):
        rows = enumerate(make_pairs()[start : start + ROWS])
        pairs = [preference_data_processor(row, spec, tokenizer, 64, number) for number, row in rows]
        batch = make_token_batch(
            [{**pair, "message_log": log} for pair in pairs for log in (pair["message_log"], pair["rejected"])]
        )
        plan = SequencePadder(40, 2).assign_microbatches(batch.lengths, layout.data)
        mine = plan[parallel_state.get_data_parallel_rank()]
        order = [index for microbatch in mine for index in microbatch]
        share, microbatches = batch.select(order), [[order.index(index) for index in part] for part in mine]
        sums = torch.zeros(2, len(batch), dtype=torch.float64)
        for row, compute in enumerate((rank.compute_logprobs, rank.compute_reference_logprobs)):
            values = compute(share, microbatches)
            if values is not None:
                masked = (values * share.fields.loss_mask).double().split(share.lengths)
                sums[row, order] = torch.stack([piece.sum() for piece in masked])
        dist.all_reduce(sums)
        tokens = torch.stack([mask.sum() for mask in batch.fields.loss_mask.split(batch.lengths)]).long().view(-1, 2)
        logprobs, reference = (one.view(-1, 2) for one in sums)
        result = compute_preference_loss(logprobs, reference, tokens, torch.ones(ROWS).double(), settings)
        gradient = result.gradient.flatten().float().repeat_interleave(torch.tensor(batch.lengths))
        batch.fields.advantages = -gradient * batch.fields.loss_mask
        rank.train(batch.select(order), microbatches, SequenceGradientLossFn(), step_counts(batch))
        losses.append(result.loss)
    return losses


def losses_of_trl(folder: Path, output: Path, **settings: Any) -> list[float]:
    from datasets import Dataset
    from trl import DPOConfig as TRLConfig
    from trl import DPOTrainer

    losses: list[float] = []

    class Recorder(DPOTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            result = super().compute_loss(*args, **kwargs)
            losses.append((result[0] if isinstance(result, tuple) else result).item())
            return result

    arguments = TRLConfig(output_dir=str(output), **trl_arguments(), **settings)
    tokenizer = make_tokenizer(VOCABULARY, 64)
    Recorder(
        str(folder), args=arguments, train_dataset=Dataset.from_list(make_pairs()), processing_class=tokenizer
    ).train()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "trl"),
    [
        (DPOConfig(reference_policy_kl_penalty=0.1), {"beta": 0.1}),
        (
            DPOConfig(reference_policy_kl_penalty=0.5, loss_type="ipo", preference_average_log_probs=True),
            {"beta": 0.5, "loss_type": ["ipo"]},
        ),
    ],
    ids=["sigmoid", "ipo"],
)
def test_the_losses_of_twenty_steps_on_pairs_are_those_of_trl(
    ours: DPOConfig, trl: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model")
    expected = losses_of_trl(folder, tmp_path / "trl", **trl)
    (actual,) = run_on_ranks(Layout(), losses_of_pairs, folder, ours, True, STEPS)
    assert len(expected) == len(actual) == STEPS
    assert abs(expected[-1] - expected[0]) > 0.01, "the model learns"
    assert actual == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("layout", [LAYOUTS[0], *rare(LAYOUTS[1:])], ids=str)
def test_pairs_are_learnt_alike_in_every_layout(layout: Layout, packing: bool, tmp_path: Path) -> None:
    """The loss of the later steps shows the gradients of the earlier ones."""
    folder, settings = make_model(tmp_path / "model"), DPOConfig(reference_policy_kl_penalty=0.3, sft_loss_weight=0.1)
    (expected,) = run_on_ranks(Layout(), losses_of_pairs, folder, settings, True, 4)
    for actual in run_on_ranks(layout, losses_of_pairs, folder, settings, packing, 4):
        assert actual == pytest.approx(expected, rel=1e-5)
