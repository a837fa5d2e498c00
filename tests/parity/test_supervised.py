"""Supervised fine-tuning: gradients of transformers in every layout, and TRL's losses on the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_grpo.algorithms.supervised import make_trajectory
from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.config.schema import ModelConfig, OptimizerConfig, PolicyConfig
from megatron_grpo.data.processors import DatumSpec, TaskDataSpec
from megatron_grpo.data.supervised_rows import supervised_data_processor
from megatron_grpo.losses.supervised import NLLLossFn
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
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
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


@pytest.mark.slow
def test_the_losses_of_twenty_steps_are_those_of_trl(tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    folder, losses = make_model(tmp_path / "model"), list[float]()

    class Recorder(SFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            result = super().compute_loss(*args, **kwargs)
            losses.append(float(result[0] if isinstance(result, tuple) else result))
            return result

    arguments = SFTConfig(
        output_dir=str(tmp_path / "trl"),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        learning_rate=1e-3,
        weight_decay=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        train_sampling_strategy="sequential",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        model_init_kwargs={"dtype": "float32"},
    )
    tokenizer = make_tokenizer(VOCABULARY, 64)
    Recorder(str(folder), arguments, train_dataset=Dataset.from_list(make_rows()), processing_class=tokenizer).train()
    (ours,) = run_on_ranks(Layout(), losses_of_steps, folder)
    assert len(losses) == len(ours) == STEPS
    assert losses[-1] < losses[0] - 0.5, "the model learns"
    assert ours == pytest.approx(losses, abs=1e-5)
