"""Runs that learn from the rows of the data: their batches, held-out loss, and engines for validation."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_grpo.algorithms.context import TrainingRun
from megatron_grpo.algorithms.idle_tensors import describe_idle_tensors
from megatron_grpo.algorithms.placement import publish
from megatron_grpo.algorithms.records import StepCheck
from megatron_grpo.algorithms.stages import build_batch, train_in_minibatches
from megatron_grpo.algorithms.step_report import StepReport, compute_learning_metrics
from megatron_grpo.algorithms.token_functions import sum_over_sampled
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.trajectory import Outcome, Span, Trajectory
from megatron_grpo.config.data_schema import LABELLED
from megatron_grpo.config.errors import RunError, SamplingError
from megatron_grpo.config.loop_schema import HELD_OUT_LOSS, VALIDATION_PREFIX
from megatron_grpo.config.schema import Config
from megatron_grpo.data.processors import DatumSpec, Message
from megatron_grpo.data.supervised_rows import ASSISTANT
from megatron_grpo.observability.timing import StepTimer, compute_throughput, find_peak_tflops
from megatron_grpo.trainer.model_ranks import NonFiniteGradientError, TrainResult
from megatron_grpo.weight_sync.refit_calls import RefitError


@dataclass(kw_only=True)
class SupervisedRun(TrainingRun):
    """A run that learns from rows; engines, if there are any, sample for validation."""

    published_step: int = field(init=False)  # step whose weights the engines have

    def __post_init__(self) -> None:
        self.published_step = self.state["total_steps"]

    def refresh_engines(self, timer: StepTimer) -> None:
        """Publish the current weights unless the engines have them; SamplingError: that failed."""
        step = self.state["total_steps"]
        if self.transport is None or self.published_step == step:
            return
        try:
            publish(self.transport, self.placement, step, timer)
        except RefitError as error:
            raise SamplingError(str(error)) from error
        self.published_step = step

    def measure_held_out(self, timer: StepTimer) -> dict[str, float]:
        """Measure means over the held-out rows (`measure_rows`), of all and of each named set."""
        self.placement.offload_engines(timer)
        totals: defaultdict[str | None, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        size, replicas = self.config.loop.val_batch_size, self.config.policy.parallel.data
        with timer.phase("held_out"):
            for name in dict.fromkeys(row.get("dataset") for row in self.val_rows):
                of_set = [row for row in self.val_rows if row.get("dataset") == name]
                for start in range(0, len(of_set), size):
                    rows = of_set[start : start + size]
                    # Every replica has a sequence: the first row is repeated for those without, and not counted again.
                    figures = self.measure_rows(rows + rows[:1] * (-len(rows) % replicas), len(rows))
                    for key, figure in itertools.product({None, name}, figures):
                        totals[key][figure] += figures[figure]
        return {
            f"{VALIDATION_PREFIX}{figure if name is None else f'set_{figure}/{name}'}": value / total["units"]
            for name, total in totals.items()
            for figure, value in total.items()
            if figure != "units"
        }

    def measure_rows(self, rows: Sequence[DatumSpec], count: int) -> dict[str, float]:
        """Sum the figures of the first `count` rows; `units` is the divisor."""
        batch, _ = make_batch(self, rows)
        self.policy.add_field(batch, "prev_logprobs")
        sums = self.rollouts.compute(sum_over_sampled, batch, ("sampled", "prev_logprobs"), "prev_logprobs")
        return {HELD_OUT_LOSS: -float(sums[:count].sum()), "units": float(batch.response_tokens[:count].sum())}


def make_trajectory(
    messages: Sequence[Message], row: DatumSpec, group: int, sample: int = 0, *, is_scored: bool = False
) -> Trajectory:
    """Make the sequence of a conversation, whose assistant messages are in the loss.

    It has the form of a rollout, so that batches, packing and checks of steps are those of every algorithm. Of a
    conversation that `is_scored` only the last token is in the loss, whose output is the score.
    """
    ends = np.cumsum([len(message["token_ids"]) for message in messages]).tolist()
    learnt = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
    spans = [Span(ends[number] - len(messages[number]["token_ids"]), ends[number], version=-1) for number in learnt]
    spans = [Span(ends[-1] - 1, ends[-1], version=-1)] if is_scored else spans
    return Trajectory(
        prompt_idx=row["idx"],
        group=group,
        sample=sample,
        loss_multiplier=row["loss_multiplier"],
        task_name=row["task_name"],
        token_ids=np.array([token for message in messages for token in message["token_ids"]], dtype=np.int32),
        spans=spans,
        logprobs=np.zeros(sum(span.end - span.start for span in spans), dtype=np.float32),
        response=messages[learnt[-1]]["content"] if learnt else "",
        stop_reason="stop",
    )


def make_batch(run: SupervisedRun, rows: Sequence[DatumSpec]) -> tuple[StepBatch, StepCheck]:
    """Put the sequences of rows or pairs into the object store."""
    field = "rejected" if run.config.has_pairs else "label" if run.config.row_kind == LABELLED else "message_log"
    for row in rows:
        if field not in row:
            raise RunError(f"row {row['idx']}: its processor (data.processor) returned no field {field!r}")
    is_scored = run.policy.shape.head.is_scalar
    groups = run.rollouts.put([make_trajectories(row, group, is_scored=is_scored) for group, row in enumerate(rows)])
    batch = build_batch(run.config, groups, run.rollouts, run.policy.cost)
    return batch, run.make_check(groups, run.state["total_steps"] + 1)


def make_trajectories(row: DatumSpec, group: int, *, is_scored: bool = False) -> list[Trajectory]:
    """Make a row's sequence, or the two of a pair."""
    conversations = [row["message_log"], *([row["rejected"]] if "rejected" in row else [])]
    return [
        make_trajectory(messages, row, group, sample, is_scored=is_scored)
        for sample, messages in enumerate(conversations)
    ]


def take_batch(
    run: SupervisedRun, batches: Iterator[list[DatumSpec]], timer: StepTimer
) -> tuple[list[DatumSpec], StepBatch, StepCheck] | None:
    """Take the next rows and make their batch; None: none are left."""
    rows = next(batches, None)
    if rows is None:
        return None
    run.placement.offload_engines(timer)  # a validation may have woken them on shared devices
    run.state["consumed_samples"] += len(rows)
    with timer.phase("batch"):
        return rows, *make_batch(run, rows)


def train_on_rows(run: SupervisedRun, batch: StepBatch, check: StepCheck) -> TrainResult | None:
    """Do all optimizer steps of a step; None: no token is in the loss."""
    samples = run.config.policy.train_global_batch_samples or len(batch)
    try:
        return train_in_minibatches(run.policy, batch, run.loss_fn, samples=samples, iterations=1)
    except NonFiniteGradientError as error:
        check.stop("the gradient", error.sequences)


def make_report(
    run: SupervisedRun, batch: StepBatch, learned: TrainResult | None, timer: StepTimer, metrics: dict[str, float]
) -> StepReport:
    """Report a learnt step."""
    config, outcomes, timing = run.config, list[Outcome](), timer.seconds
    metrics = {"sequence_length": float(batch.lengths.mean()), **compute_learning_metrics(learned, batch), **metrics}
    throughput = compute_throughput(
        run.policy.shape,
        batch.lengths.tolist(),
        timing,
        passes=_count_passes(config, learned),
        devices=config.policy.parallel.world_size,
        peak=find_peak_tflops(run.policy.device_name, config.policy.precision, config.cluster.peak_tflops_per_device),
    )
    throughput |= {} if learned is None else learned.summarize_devices()
    remarks = describe_idle_tensors(run.state, run.state["total_steps"] + 1, learned)
    return StepReport(metrics, timing, throughput, outcomes, remarks)


def _count_passes(config: Config, learned: TrainResult | None) -> float:
    # Minibatches without a token in the loss had no optimizer step.
    return 0.0 if learned is None else learned.optimizer_steps / config.optimizer_steps_per_step
