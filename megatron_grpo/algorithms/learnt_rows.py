"""Rows and pairs that a step learns from, written into the run's folder for people to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from megatron_grpo.algorithms.records import SAMPLE_ROWS, SAMPLE_TOKENS, count_within
from megatron_grpo.algorithms.supervised import SupervisedRun, make_trajectory
from megatron_grpo.algorithms.token_functions import select_sampled
from megatron_grpo.batch.rollout_files import TrainedValues
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.data.row_text import describe_row

_LOGPROBS = ("sampled", "prev_logprobs")  # fields of the log-probabilities of learnt tokens


def record_rows(run: SupervisedRun, rows: Sequence[DatumSpec], batch: StepBatch, rewards: Tensor | None = None) -> None:
    """Write some rows of a step for people to look at.

    `rewards`: [rows, responses of a row], such as those of pairs. A step that has log-probabilities also writes them.
    """
    step, samples = run.state["total_steps"] + 1, len(batch) // len(rows)
    if not run.dumps.is_sampled(step):
        return
    tokens = batch.lengths.reshape(-1, samples).sum(axis=1).tolist()
    count = count_within(tokens, SAMPLE_ROWS, SAMPLE_TOKENS)
    chosen = [number * len(rows) // count for number in range(count)]
    logprobs: list[Any] = [None] * (count * samples)
    if "prev_logprobs" in batch.fields:
        sequences = [number * samples + sample for number in chosen for sample in range(samples)]
        logprobs = run.rollouts.compute(select_sampled, batch, _LOGPROBS, "prev_logprobs", sequences)
    recorded: list[tuple[int, list[tuple[Trajectory, TrainedValues]]]] = []
    for index, number in enumerate(chosen):
        row, facts = rows[number], describe_row(rows[number])
        conversations = [row["message_log"], *([row["rejected"]] if "rejected" in row else [])]
        # Not as a score is learnt, which is at the last token: these are read by people.
        trajectories = [make_trajectory(messages, row, number, sample) for sample, messages in enumerate(conversations)]
        scores = [None] * samples if rewards is None else rewards[number].tolist()
        of_row: list[tuple[Trajectory, TrainedValues]] = [
            (
                replace(trajectory, reward=score, correct=None, **facts),
                {} if values is None else {"prev_logprobs": values},
            )
            for trajectory, score, values in zip(trajectories, scores, logprobs[index * samples :], strict=False)
        ]
        recorded.append((number, of_row))
    run.dumps.write_learnt(step, recorded)
