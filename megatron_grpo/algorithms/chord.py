"""CHORD (Zhang et al. 2025): GRPO's step (grpo.py), whose loss also has the likelihood of demonstrated responses.

Demonstrations join the batch after the advantages, as further sequences and partitions: one optimizer step learns from
both. Their order depends on seed and step alone, so that a run that resumes goes on with the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.algorithms import stages
from megatron_grpo.algorithms.context import GRPORun
from megatron_grpo.algorithms.loop import train_steps
from megatron_grpo.algorithms.records import StepCheck
from megatron_grpo.algorithms.samples import StepSamples, sample
from megatron_grpo.algorithms.step_advantages import add_advantages
from megatron_grpo.algorithms.step_report import StepReport, compute_learning_metrics, compute_sampling_metrics
from megatron_grpo.algorithms.supervised import make_trajectory
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.data.load_prompts import PromptData
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.losses.chord_loss import ChordLossFn
from megatron_grpo.observability.timing import StepTimer

__all__ = ["ChordRun", "chord_step", "chord_train"]


@dataclass(kw_only=True)
class ChordRun(GRPORun):
    """A run of CHORD: one of GRPO with demonstrations."""

    demonstrations: list[DatumSpec]

    @classmethod
    def select_fields(cls, data: PromptData) -> dict[str, Any]:
        return {"demonstrations": data.demonstrations}


def chord_train(run: ChordRun) -> None:
    """Train until a limit or the data's end."""
    train_steps(run, chord_step)


def chord_step(run: ChordRun, batches: Iterator[list[DatumSpec]]) -> StepReport | None:
    """Do one step of CHORD, as `grpo_step`."""
    config, policy, rollouts, timer = run.config, run.policy, run.rollouts, StepTimer()
    samples = sample(run, batches, timer)
    if samples is None:
        return None
    batch, check = stages.prepare_batch(run, samples, timer)
    logprob_metrics = stages.add_logprobs(config, batch, policy, rollouts, check, timer)
    with timer.phase("advantages"):
        is_finite = add_advantages(config, samples.scores, batch, rollouts, run.state)
    check.require_finite("advantages", is_finite | ~batch.in_loss, batch)
    run.dumps.begin()
    mixture, check = add_demonstrations(run, samples, batch, check)
    with timer.phase("train"):
        learned = stages.train_policy(config, mixture, policy, run.loss_fn, check)
    metrics = compute_sampling_metrics(config, samples)
    metrics |= logprob_metrics | compute_learning_metrics(learned, batch)
    metrics["demonstration_weight"] = config.chord.find_weight(check.step)
    return stages.publish_and_report(run, samples, metrics, learned, timer)


def add_demonstrations(
    run: ChordRun, samples: StepSamples, batch: StepBatch, check: StepCheck
) -> tuple[StepBatch, StepCheck]:
    """Add the step's demonstrations, unless their weight is 0."""
    chord, loss_fn = run.config.chord, run.loss_fn
    assert isinstance(loss_fn, ChordLossFn)
    loss_fn.demonstration_weight, loss_fn.favours_uncertain = chord.find_weight(check.step), chord.favours_uncertain
    if not loss_fn.demonstration_weight:
        return batch, check
    chosen = choose_rows(len(run.demonstrations), chord.rows_per_step, check.step, run.config.loop.seed)
    rows = [run.demonstrations[number] for number in chosen.tolist()]
    groups = run.rollouts.put([[make_trajectory(row["message_log"], row, number)] for number, row in enumerate(rows)])
    demonstrations = stages.build_batch(run.config, groups, run.rollouts, run.policy.cost)
    return join_batches(batch, demonstrations), run.make_check([*samples.groups, *groups], check.step)


def choose_rows(count: int, per_step: int, step: int, seed: int) -> NDArray[np.int64]:
    """Choose the rows of a step; each epoch has all."""
    positions = np.arange((step - 1) * per_step, step * per_step)
    orders = {
        epoch: np.random.default_rng([seed, epoch]).permutation(count) for epoch in set((positions // count).tolist())
    }
    return np.array([orders[position // count][position % count] for position in positions.tolist()], dtype=np.int64)


def join_batches(batch: StepBatch, demonstrations: StepBatch) -> StepBatch:
    """Join samples and demonstrations, which the policy-gradient loss leaves out."""
    count, added = len(batch), len(demonstrations)

    def extend(values: NDArray[Any] | None, filling: float) -> NDArray[Any] | None:
        return None if values is None else np.append(values, np.full(added, filling, dtype=values.dtype))

    last = -1 if batch.rollouts is None else int(batch.rollouts[-1])
    # A replica has neighbouring partitions: those of its samples, each followed by one of demonstrations.
    pairs = zip(batch.partitions, (part + count for part in demonstrations.partitions), strict=True)
    zeros = demonstrations.fields["generation_logprobs"]  # for fields that only samples have
    return replace(
        batch,
        lengths=np.append(batch.lengths, demonstrations.lengths),
        rollouts=None if batch.rollouts is None else np.append(batch.rollouts, last + 1 + np.arange(added)),
        rollout_shares=extend(batch.rollout_shares, 1),
        response_tokens=np.append(batch.response_tokens, demonstrations.response_tokens),
        in_loss=np.append(batch.in_loss, np.zeros(added, dtype=np.bool_)),
        positive=extend(batch.positive, 0),
        loss_weights=extend(batch.loss_weights, 1),
        advantages=extend(batch.advantages, 0),
        imitated_tokens=np.append(np.zeros(count, dtype=np.int64), demonstrations.response_tokens),
        demonstrated=np.append(np.zeros(count, dtype=np.bool_), np.ones(added, dtype=np.bool_)),
        partitions=list(chain.from_iterable(pairs)),
        fields={
            name: list(chain.from_iterable(zip(parts, demonstrations.fields.get(name, zeros), strict=True)))
            for name, parts in batch.fields.items()
        },
    )
