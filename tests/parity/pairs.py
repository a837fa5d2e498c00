"""Learning pairs on ranks, as a step of DPO or of a reward model does, and the rows of the comparison with TRL."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_grpo.algorithms.supervised import make_trajectory
from megatron_grpo.batch.packing import SequencePadder
from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.config.schema import ModelConfig, OptimizerConfig, PolicyConfig
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.losses.preference import PreferenceLoss
from megatron_grpo.models.source import PREPARED_MODELS, VOCABULARY
from megatron_grpo.prepare.lessons import make_prompt_rows
from megatron_grpo.prepare.models import make_tokenizer
from megatron_grpo.rollouts.partitions import concatenate_trajectories
from megatron_grpo.trainer.rank import ModelRank
from tests.parity.ranks import Layout

STEPS, ROWS = 20, 8
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, adam_beta2=0.999, adam_eps=1e-8)


def make_model(folder: Path, kind: str = "AutoModelForCausalLM", **settings: Any) -> Path:
    """The prepared model's architecture with random weights, and its tokenizer."""
    import transformers

    transformers.set_seed(0)
    config = transformers.AutoConfig.for_model(**PREPARED_MODELS["addition"], **settings)
    getattr(transformers, kind).from_config(config, dtype=torch.float32).save_pretrained(folder)
    make_tokenizer(VOCABULARY, config.max_position_embeddings).save_pretrained(folder)
    return folder


def make_config(folder: Path, layout: Layout, *, packing: bool = True, distributed: bool = True) -> PolicyConfig:
    """Settings of ranks that are those of `trl_arguments`."""
    return PolicyConfig(
        model=ModelConfig(path=str(folder)),
        parallel=layout.parallel,
        optimizer=replace(OPTIMIZER, distributed=distributed),
        precision="float32",
        max_grad_norm=1.0,
        packing=packing,
    )


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


def record_losses(trainer: Any) -> tuple[Any, list[float]]:
    """A class of TRL whose objects record their losses, and the record."""
    losses: list[float] = []

    class Recorder(trainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            result = super().compute_loss(*args, **kwargs)
            losses.append((result[0] if isinstance(result, tuple) else result).item())
            return result

    return Recorder, losses


def make_rows() -> list[dict[str, Any]]:
    """A prompt and a response of various lengths for each sequence of each step."""
    rows = make_prompt_rows("addition")["train.jsonl"][: STEPS * ROWS]
    return [{"prompt": row["prompt"], "completion": row["answer"] * (1 + n % 3)} for n, row in enumerate(rows)]


def make_pairs() -> list[dict[str, Any]]:
    """Right sums of various lengths as chosen responses, wrong ones as rejected."""
    return [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": row["completion"][::-1] + "7" * (1 + n % 4)}
        for n, row in enumerate(make_rows())
    ]


def make_token_batch(rows: Sequence[DatumSpec], *, is_scored: bool = False) -> TokenBatch:
    trajectories = [
        make_trajectory(row["message_log"], row, number, is_scored=is_scored) for number, row in enumerate(rows)
    ]
    arrays = concatenate_trajectories(trajectories)
    sampled = torch.from_numpy(arrays["sampled"])
    fields = TokenFields(
        token_ids=torch.from_numpy(arrays["token_ids"].astype(np.int32)), sampled=sampled, loss_mask=sampled.float()
    )
    return TokenBatch([trajectory.tokens for trajectory in trajectories], fields)


def make_pair_batch(pairs: Sequence[DatumSpec], *, is_scored: bool = False) -> TokenBatch:
    """The batch of pairs, whose sequences are neighbours."""
    rows: list[DatumSpec] = [
        {**pair, "message_log": log} for pair in pairs for log in (pair["message_log"], pair["rejected"])
    ]
    return make_token_batch(rows, is_scored=is_scored)


def compare_on_rank(
    rank: ModelRank,
    layout: Layout,
    batch: TokenBatch,
    outputs: Sequence[str],
    compute_loss: Callable[..., PreferenceLoss],
) -> tuple[PreferenceLoss, TokenBatch, list[list[int]]]:
    """The loss of pairs, and this replica's share of the batch with its derivatives, in microbatches.

    `compute_loss` takes the outputs by pair, each [pairs, 2], and the tokens of each response.
    """
    sums, order, microbatches = sum_on_rank(rank, layout, batch, outputs)
    tokens = torch.stack([mask.sum() for mask in batch.fields.loss_mask.split(batch.lengths)]).long().view(-1, 2)
    result = compute_loss(*(column.view(-1, 2) for column in sums), tokens)
    gradient = result.gradient.flatten().float().repeat_interleave(torch.tensor(batch.lengths))
    batch.fields.advantages = -gradient * batch.fields.loss_mask
    return result, batch.select(order), microbatches


def sum_on_rank(
    rank: ModelRank, layout: Layout, batch: TokenBatch, outputs: Sequence[str]
) -> tuple[torch.Tensor, list[int], list[list[int]]]:
    """Sums of outputs over each response, [outputs, sequences], and this replica's share: indices and microbatches."""
    plan = SequencePadder(40, 2).assign_microbatches(batch.lengths, layout.data)
    planned = plan[parallel_state.get_data_parallel_rank()]
    order = [index for microbatch in planned for index in microbatch]
    share, microbatches = batch.select(order), [[order.index(index) for index in part] for part in planned]
    sums = torch.zeros(len(outputs), len(batch), dtype=torch.float64)
    for row, field in enumerate(outputs):
        values = rank.outputs[field](rank, share, microbatches)
        if values is not None:
            masked = (values * share.fields.loss_mask).double().split(share.lengths)
            sums[row, order] = torch.stack([piece.sum() for piece in masked])
    dist.all_reduce(sums)
    return sums, order, microbatches
