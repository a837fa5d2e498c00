"""Self-distillation (Shenfeld et al. 2026): distillation's step, whose teacher is the policy with a hint in its prompt.

The hint, such as a demonstration or feedback, is in a column of the row. The policy samples without it. Its output at
each sampled token, behind the prompt with the hint and with the weights of the start of the step, is the teacher's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.algorithms.context import GRPORun
from megatron_grpo.algorithms.distillation import follow_teacher
from megatron_grpo.algorithms.loop import train_steps
from megatron_grpo.algorithms.step_report import StepReport
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.trajectory import Outcome
from megatron_grpo.data.load_prompts import PromptData
from megatron_grpo.data.loader import Prompts
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.rollouts.partitions import exchange_prompts, place_outputs

__all__ = ["SelfDistillationRun", "self_distillation_step", "self_distillation_train"]

FIELD = "teacher_outputs"


@dataclass(kw_only=True)
class SelfDistillationRun(GRPORun):
    """A run of GRPO with a hint for each prompt."""

    hinted_prompts: Prompts

    @classmethod
    def select_fields(cls, data: PromptData) -> dict[str, Any]:
        return {"hinted_prompts": data.hinted_prompts}


def self_distillation_train(run: SelfDistillationRun) -> None:
    """Train until a limit or the data's end."""
    train_steps(run, self_distillation_step)


def self_distillation_step(run: SelfDistillationRun, batches: Iterator[list[DatumSpec]]) -> StepReport | None:
    """Do one step of self-distillation, as `grpo_step`."""
    return follow_teacher(run, batches, add_own_outputs)


def add_own_outputs(run: SelfDistillationRun, batch: StepBatch, outcomes: Sequence[Outcome]) -> NDArray[np.bool_]:
    """Add the policy's outputs with the hint.

    Responses that are too long behind the prompt with the hint leave the loss. Returns [sequences]: True where the
    outputs of sampled tokens are finite.
    """
    rows = {outcome.prompt_idx for outcome in outcomes}
    by_row = {row: np.array(_list_tokens(run.hinted_prompts[row]), dtype=np.int32) for row in rows}
    prompts = [by_row[outcome.prompt_idx] for outcome in outcomes]
    longest = run.config.policy.max_total_sequence_length
    arguments = (batch.partitions, prompts, longest)
    lengths, fits, fields = run.rollouts.compute(exchange_prompts, batch, ("token_ids", "sampled"), *arguments)
    batch.in_loss = batch.in_loss & fits
    hinted = replace(batch, lengths=lengths, fields=fields, advantages=None)
    is_finite = run.policy.add_field(hinted, FIELD)
    run.rollouts.compute(place_outputs, batch, ("sampled",), hinted, FIELD)
    return is_finite


def _list_tokens(prompt: DatumSpec) -> list[int]:
    return [token for message in prompt["message_log"] for token in message["token_ids"]]
