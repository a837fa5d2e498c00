"""The driver's handle of a model in training: one Ray actor a rank, and the policy and the value model on top of it."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from megatron_grpo.batch.packing import Cost
from megatron_grpo.batch.replay_files import StateFigure, TensorFigure, choose_watched_tokens, sum_states
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.token_batch import find_token_indices
from megatron_grpo.cluster.actor_calls import Method, call_actor
from megatron_grpo.cluster.actor_processes import compute_restart_timeout, end_on_machines
from megatron_grpo.cluster.futures import find_lost_calls, gather, join_names
from megatron_grpo.cluster.overdue import report_hanging
from megatron_grpo.config.errors import ModelLostError, RunError
from megatron_grpo.losses.loss import GlobalCounts, LossFunction, combine_metrics
from megatron_grpo.observability.file_digests import FileRecords
from megatron_grpo.trainer.actor import RankActor
from megatron_grpo.trainer.messages import ForwardResult, RankReport, RankSettings, RankTrainResult
from megatron_grpo.trainer.microbatch_schedule import (
    StepMicrobatches,
    assign_microbatches,
    derive_cost,
    split_among_replicas,
)

if TYPE_CHECKING:
    from megatron_grpo.trainer.rank import PolicyRank

P = ParamSpec("P")
T = TypeVar("T")

# Seconds to wait, once a rank has failed, for the ends of other ranks to become known.
SETTLE_S = 3.0

# Outputs of models for each token, by their field in a batch, with their names in messages.
OUTPUTS = {
    "prev_logprobs": "log-probabilities",
    "prev_entropy": "entropies",
    "score_sizes": "sizes of gradients",  # by the logits
    "unfiltered_logprobs": "log-probabilities",  # over the vocabulary without the filter of sampling
    "reference_logprobs": "reference log-probabilities",  # under the frozen reference policy
    "values": "values",  # the expected return before every token
    "teacher_outputs": "the teacher's output",  # a teacher's hidden state or likeliest tokens
}


@dataclass(slots=True)
class TrainResult:
    """The outcome of training on a batch.

    Example: `TrainResult(loss=0.02, grad_norm=0.8, learning_rate=1e-6, metrics={"kl": 0.001})`.
    """

    loss: float
    grad_norm: float
    """Global L2 norm of the gradient before clipping."""
    learning_rate: float
    metrics: dict[str, float] = field(default_factory=dict)
    """The loss function's metrics, reduced over all tokens of the step."""
    optimizer_steps: int = 1
    gpu_memory_gib: float = 0.0
    """Peak GPU memory of a rank's tensors, the largest of all ranks, GiB; 0 on a CPU."""
    zero_gradients: frozenset[str] = frozenset()
    """Tensors, by their names in the model's folder, whose gradient is exactly zero."""
    probe_s: tuple[float, ...] = ()
    """Seconds of a fixed computation on each rank's device (rank_speed.py); empty: not measured."""

    def summarize_devices(self) -> dict[str, float]:
        """Summarize the devices: memory, the slowest rank and its share of the median."""
        figures = {"gpu_memory_gib": self.gpu_memory_gib} if self.gpu_memory_gib else {}
        if len(self.probe_s) < 2:  # there is no other rank to compare with
            return figures
        slowest = max(range(len(self.probe_s)), key=self.probe_s.__getitem__)
        speed = median(self.probe_s) / self.probe_s[slowest]
        return {**figures, "slowest_rank": float(slowest), "slowest_rank_speed": speed}


class NonFiniteGradientError(RunError):
    """The gradient is not finite, maybe because of `sequences`; no step was made."""

    def __init__(self, grad_norm: float, sequences: list[int]) -> None:
        super().__init__(f"the gradient norm is {grad_norm}; the weights were left as they were")
        self.grad_norm = grad_norm
        self.sequences = sequences


class RefusedStepError(RunError):
    """The probability error is too large; no optimizer step was made."""

    def __init__(self, metrics: Mapping[str, float]) -> None:
        super().__init__(f"token_mult_prob_error is {metrics['token_mult_prob_error']:g}")
        self.metrics = metrics


def _join(by_rank: Sequence[FileRecords]) -> FileRecords:
    return {name: record for records in by_rank for name, record in records.items()}


class ModelRanks:
    """A model in training, on one Ray actor per rank; `actor_options(rank)`: Ray's options."""

    def __init__(
        self,
        settings: RankSettings,
        actor_options: Callable[[int], dict[str, Any]],
        startup_timeout_s: float,
        label: str | None = None,
    ) -> None:
        self.settings, self.shape = settings, settings.shape
        self.label = label or self.shape.head.label
        self._config = settings.config
        self._actor_options = actor_options
        self._startup_timeout_s = startup_timeout_s
        self._make_actors()

    def _make_actors(self) -> None:
        settings, world = self.settings, self._config.parallel.world_size
        cores = (os.cpu_count() or 1) // (2 if settings.shares_cores else 1)
        threads = self._config.threads or max(1, cores // min(world, settings.ranks_per_machine or world))
        actor_class = ray.remote(RankActor)
        self.actors = [
            actor_class.options(**self._actor_options(rank)).remote(self._name_rank(rank), rank, threads)
            for rank in range(world)
        ]
        self._reports: list[RankReport] = []
        self._ranks_by_tensor: Counter[str] = Counter()  # ranks with a part of each trained tensor, once needed
        self._starting: list[ray.ObjectRef] = []

    def _name_rank(self, rank: int) -> str:
        return f"{self.label} rank {rank}"

    def replace_actors(self) -> None:
        """End every process, stopped ones too, and make new actors; `start` follows."""
        reports = self._reports
        self.shutdown()
        end_on_machines({self._name_rank(rank): report.processes for rank, report in enumerate(reports)})
        if reports:  # none: the ranks of the last restart did not come up
            starts = [report.startup_s for report in reports]
            self._startup_timeout_s = compute_restart_timeout(self._startup_timeout_s, starts)
        self._make_actors()

    def start(self) -> None:
        """Begin building the model on every rank; returns at once."""
        address: Any = call_actor(self.actors[0], RankActor.open_store, self._startup_timeout_s)
        self._call(RankActor.import_packages)  # the others need not wait for the address
        self._starting = self._call(RankActor.start, self.settings, address)

    def wait_ready(self) -> None:
        """Wait until every rank holds its weights, else raise a RunError."""
        self._reports = self._gather(self._starting, f"{self.label} start", self._startup_timeout_s)
        self.startup_s = [report.startup_s for report in self._reports]  # by part: "imports" and "model"
        self.device_name = self._reports[0].device_name

    def submit(self, function: Method[P], *args: P.args, **kwargs: P.kwargs) -> list[ray.ObjectRef]:
        """Run function(rank's model, *args, **kwargs) on every rank."""
        return self._call(RankActor.run, function, *args, **kwargs)

    def _call(self, method: Method[P], *args: P.args, **kwargs: P.kwargs) -> list[ray.ObjectRef]:
        return [call_actor(actor, method, *args, **kwargs) for actor in self.actors]

    def train(self, batch: StepBatch, sequences: NDArray[np.int64], loss_fn: LossFunction) -> TrainResult:
        """Make one optimizer step, split over data-parallel ranks and microbatches.

        `sequences`, [chosen], int64, ascending, are those to train on, at least one with a token in the loss. The loss
        is the sum of `loss_fn` over all microbatches. A NonFiniteGradientError or a RefusedStepError leaves the weights
        unchanged.
        """
        # Counted over the whole step: every rank divides by the same denominators, however sequences are split.
        counts = GlobalCounts.count(batch, sequences)
        schedules = assign_microbatches(self._config, self.cost, batch, sequences, self._config.microbatch_tokens)
        # With prev_logprobs the driver has checked the whole step: ranks would refuse a minibatch after earlier ones
        # changed the weights.
        is_checked = not self.shape.head.is_scalar and "prev_logprobs" not in batch.fields
        limit = batch.prob_error_limit if is_checked else None
        refs = [
            call_actor(actor, RankActor.train, work, loss_fn, counts, limit)
            for actor, work in self._store_work(batch, schedules)
        ]
        results: list[RankTrainResult] = self._gather(refs, "training step")
        first = results[0]
        if not math.isfinite(first.grad_norm):
            raise NonFiniteGradientError(first.grad_norm, self._find_suspects(batch, schedules, results))
        metrics = combine_metrics(metrics for result in results for metrics in result.metrics or [])
        if first.is_refused:
            raise RefusedStepError(metrics)
        return TrainResult(
            loss=metrics.pop("loss"),
            grad_norm=first.grad_norm,
            learning_rate=first.learning_rate,
            metrics=metrics,
            gpu_memory_gib=max(result.gpu_memory_gib for result in results),
            zero_gradients=self._join_zero_gradients(results),
            probe_s=tuple(result.probe_s for result in results if result.probe_s),
        )

    def _join_zero_gradients(self, results: Sequence[RankTrainResult]) -> frozenset[str]:
        """Find tensors whose gradient is zero on all their ranks."""
        ranks_with_zeros = Counter(name for result in results for name in result.zero_gradients)
        if not ranks_with_zeros:
            return frozenset()
        if not self._ranks_by_tensor:
            by_rank = self._gather(self._call(RankActor.list_trained_tensors), "listing tensors")
            self._ranks_by_tensor.update(name for names in by_rank for name in names)
        return frozenset(name for name, count in ranks_with_zeros.items() if count == self._ranks_by_tensor[name])

    @property
    def cost(self) -> Cost:
        """Floating-point operations of a sequence's forward pass."""
        return derive_cost(self.settings.shape)

    def save_checkpoint(self, folder: str, *, background: bool = False) -> FileRecords:
        """Write all state to an empty folder; returns records of the files, by name.

        In the background, `finish_checkpoint` has to follow, and returns them.
        """
        return _join(self._ask("save checkpoint", lambda rank: rank.checkpoint.save(folder, background), "checkpoint"))

    def is_checkpoint_written(self) -> bool:
        """True once every rank has written its part."""
        return all(self._ask("check checkpoint", lambda rank: rank.checkpoint.is_written(), "checking the checkpoint"))

    def finish_checkpoint(self) -> FileRecords:
        """Complete a checkpoint in the background; returns records of its files.

        RunError: it could not be written.
        """
        return _join(self._ask("finish checkpoint", lambda rank: rank.checkpoint.finish(), "completing a checkpoint"))

    def record_files(self, folder: str, names: Sequence[str]) -> FileRecords:
        """Read files in a folder, each on one rank; returns their records."""
        return _join(
            self._ask("record files", lambda rank: rank.checkpoint.record_files(folder, names), "reading a checkpoint")
        )

    def load_checkpoint(self, folder: str) -> None:
        """Read what `save_checkpoint` wrote, also in another layout."""
        self._ask("load checkpoint", lambda rank: rank.checkpoint.load(folder), "loading the checkpoint")

    def list_devices(self) -> list[str]:
        """List Ray's ids of the ranks' GPUs, started or not."""
        by_rank = self._gather(self._call(RankActor.list_gpus), "listing GPUs")
        return [gpu for gpus in by_rank for gpu in gpus]

    def offload(self, *, weights: bool) -> None:
        """Move optimizer state and optionally weights to the host; drop gradients."""
        self._ask("offload", lambda rank: rank.memory.offload(weights), "moving to host memory")

    def onload(self) -> None:
        """Move weights and optimizer state back; gradients are zero."""
        self._ask("onload", lambda rank: rank.memory.onload(), "moving back from host memory")

    def begin_record(self) -> None:
        """Record the weights, and every gradient until `end_record`."""
        self._ask("begin record", lambda rank: rank.recorder.begin(), "recording the weights")

    def end_record(self) -> list[TensorFigure]:
        """Collect figures of weights, gradients since `begin_record`, and weight changes."""
        by_rank = self._ask("end record", lambda rank: rank.recorder.end(), "recording the update")
        return [figure for figures in by_rank for figure in figures]

    def watch_states(self, batch: StepBatch) -> None:
        """Sketch watched tokens in the next pass for log-probabilities (`end_states`)."""
        watched = choose_watched_tokens(int(batch.lengths.sum()))
        watches = []
        for partitions in split_among_replicas(batch, self._config.parallel.data):
            in_step = find_token_indices(batch.lengths, np.concatenate(batch.partitions[partitions]))
            in_replica = np.flatnonzero(np.isin(in_step, watched))
            watches.append((in_replica, in_step[in_replica]))
        pairs = zip(self.actors, self._reports, strict=True)
        refs = [call_actor(actor, RankActor.watch_states, *watches[report.data_rank]) for actor, report in pairs]
        self._gather(refs, "choosing the recorded hidden states")

    def end_states(self) -> list[StateFigure]:
        """Collect the sketches of the watched tokens' hidden states."""
        return sum_states(self._ask("end states", lambda rank: rank.recorder.end_states(), "recording hidden states"))

    def begin_profile(self) -> None:
        """Record operators and memory of every rank until `end_profile`."""
        self._gather(self._call(RankActor.begin_profile), "beginning a profile")

    def end_profile(self, folder: str) -> None:
        """Write each rank's recordings into its files in an existing folder."""
        self._gather(self._call(RankActor.end_profile, folder), "writing a profile")

    def shutdown(self) -> None:
        """End every process; idempotent."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []

    def _gather(self, refs: list[ray.ObjectRef], phase_name: str, deadline_s: float | None = None) -> list[Any]:
        deadline_s = deadline_s or self._config.timeout_s
        try:
            return gather(refs, deadline_s=deadline_s, phase_name=phase_name, name=self._name_rank)
        except RunError as error:
            text = str(error)
            if not isinstance(error.__cause__, RayError):  # the deadline has passed, and some rank hangs
                raise ModelLostError(text) from error
            lost_ranks = find_lost_calls(refs, SETTLE_S)
            if not lost_ranks and not self._has_hanging_ranks(refs):
                raise
            unnamed = [name for name in map(self._name_rank, lost_ranks) if name not in text]
            raise ModelLostError(f"{text}; {join_names(unnamed)} is gone" if unnamed else text) from error

    def _has_hanging_ranks(self, refs: Sequence[ray.ObjectRef]) -> bool:
        """True if a rank hangs whose call goes on, after another rank's has failed."""
        pending = set(ray.wait(list(refs), num_returns=len(refs), timeout=0)[1])
        return bool(report_hanging([self._name_rank(rank) for rank, ref in enumerate(refs) if ref in pending]))

    def _ask(self, name: str, action: Callable[[PolicyRank], T], phase_name: str) -> list[T]:
        return self._gather(self._call(RankActor.act, name, action), phase_name)

    def _find_suspects(
        self, batch: StepBatch, schedules: Sequence[StepMicrobatches], results: Sequence[RankTrainResult]
    ) -> list[int]:
        # Candidates are the sequences of microbatches whose loss is not finite, or all if each is finite. Suspects
        # are candidates with a sampled token whose output is not finite, or all candidates if there are none.
        suspects: set[int] = set()
        for report, result in zip(self._reports, results, strict=True):
            microbatches = schedules[report.data_rank]
            for indices, metrics in zip(microbatches, result.metrics or [], strict=result.metrics is not None):
                if not math.isfinite(metrics["loss"]):
                    suspects.update(indices.tolist())
        if not suspects:
            suspects.update(index for schedule in schedules for indices in schedule for index in indices.tolist())
        _, finite = self._forward(batch, self.shape.head.field, "outputs of a failed training step")
        return [index for index in sorted(suspects) if not finite[index]] or sorted(suspects)

    def add_field(self, batch: StepBatch, field: str) -> NDArray[np.bool_]:
        """Add an output of the model for every token (`OUTPUTS`) to the batch.

        Returns [sequences]: True where the values of sampled tokens are finite.
        """
        batch.fields[field], is_finite = self._forward(batch, field, OUTPUTS[field])
        return is_finite

    def _forward(
        self, batch: StepBatch, field: str, phase_name: str, sequences: NDArray[np.int64] | None = None
    ) -> ForwardResult:
        # `sequences`: indices of those to compute, ascending; the others have 0 everywhere. None: all.
        tokens = self._config.logprob_microbatch_tokens or self._config.microbatch_tokens
        chosen = np.arange(len(batch)) if sequences is None else sequences
        schedules = assign_microbatches(self._config, self.cost, batch, chosen, tokens)
        refs = [call_actor(actor, RankActor.compute, work, field) for actor, work in self._store_work(batch, schedules)]
        answers = zip(self._reports, self._gather(refs, phase_name), strict=True)
        by_replica = {report.data_rank: result for report, result in answers if result is not None}
        results = [by_replica[replica] for replica in range(self._config.parallel.data)]
        finite = np.zeros(len(batch), dtype=np.bool_)
        finite[np.concatenate(batch.partitions)] = np.concatenate([flags for _, flags in results])
        return [reference for references, _ in results for reference in references], finite

    def _store_work(self, batch: StepBatch, schedules: Sequence[StepMicrobatches]) -> list[tuple[Any, ray.ObjectRef]]:
        # Each replica's work is stored once, and every actor of the replica comes with the reference to it.
        work_by_replica = []
        index_in_replica = np.zeros(len(batch), dtype=np.int64)
        for partitions, schedule in zip(split_among_replicas(batch, len(schedules)), schedules, strict=True):
            indices = np.concatenate(batch.partitions[partitions])
            index_in_replica[indices] = np.arange(len(indices))
            microbatches = [index_in_replica[microbatch].tolist() for microbatch in schedule]
            work_by_replica.append(ray.put((batch.select_partitions(partitions), microbatches)))
        return [
            (actor, work_by_replica[report.data_rank]) for actor, report in zip(self.actors, self._reports, strict=True)
        ]


class MegatronPolicy(ModelRanks):
    """The policy, or a reward model in its place.

    Checkpoints hold the reference once that has moved.
    """

    def sync_reference(self, alpha: float) -> None:
        """Move the reference: alpha * policy + (1 - alpha) * reference (TR-DPO)."""
        self._ask("sync_reference", lambda rank: rank.sync_reference(alpha), "moving the reference policy")


class MegatronValue(ModelRanks):
    """The value model of PPO."""


class MegatronTeacher(ModelRanks):
    """A teacher of distillation, which is never trained."""

    def add_outputs(self, batch: StepBatch, sequences: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Add the teacher's output for the tokens of some sequences, 0 elsewhere.

        Returns [sequences of the batch]: True where the values of sampled tokens are finite.
        """
        field = "teacher_outputs"
        batch.fields[field], is_finite = self._forward(batch, field, OUTPUTS[field], sequences)
        return is_finite
