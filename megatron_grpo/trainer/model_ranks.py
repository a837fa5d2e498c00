"""The driver's handle of a model in training: one Ray actor a rank, and the policy and the value model on top of it."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, ParamSpec

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from megatron_grpo.batch.packing import Cost, make_packer
from megatron_grpo.batch.replay_files import StateFigure, TensorFigure, choose_watched_tokens, sum_states
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.token_batch import find_token_indices
from megatron_grpo.cluster.actor_calls import Method, call_actor
from megatron_grpo.cluster.futures import find_lost_calls, gather, join_names
from megatron_grpo.config.errors import ModelLostError, RunError
from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.losses.loss import GlobalCounts, LossFunction, combine_metrics
from megatron_grpo.models.families import count_forward_flops
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.trainer.actor import PolicyActor, RankActor, ValueActor
from megatron_grpo.trainer.messages import ForwardResult, RankReport, RankSettings, RankTrainResult, ReplicaWork

P = ParamSpec("P")


@dataclass(slots=True)
class TrainResult:
    """The outcome of training on a batch."""

    loss: float
    grad_norm: float
    """Global L2 norm of the gradient before clipping."""
    learning_rate: float
    metrics: dict[str, float] = field(default_factory=dict)
    """The loss function's metrics, reduced over all tokens of the step."""
    optimizer_steps: int = 1
    """Number of optimizer steps that the result covers."""
    gpu_memory_gib: float = 0.0
    """Peak GPU memory of a rank's tensors, the largest of all ranks, GiB; 0 on a CPU."""


class NonFiniteGradientError(RunError):
    """The norm of a gradient is NaN or infinite; the optimizer step was not made.

    `sequences` are the numbers, in the step, of the sequences that may have caused it.
    """

    def __init__(self, grad_norm: float, sequences: list[int]) -> None:
        super().__init__(f"the gradient norm is {grad_norm}; the weights were left as they were")
        self.grad_norm = grad_norm
        self.sequences = sequences


class RefusedStepError(RunError):
    """The probability error is beyond its limit; the optimizer step was not made, and `metrics` has the error."""

    def __init__(self, metrics: Mapping[str, float]) -> None:
        super().__init__(f"token_mult_prob_error is {metrics['token_mult_prob_error']:g}")
        self.metrics = metrics


def derive_cost(shape: ModelShape) -> Cost:
    """Floating-point operations of a sequence's forward pass in a model of these sizes.

    `count_forward_flops` is linear in tokens and in query-key pairs of both kinds of layers.
    """

    def of(length: int) -> float:
        return count_forward_flops(shape, [length])

    every_pair = of(2) - 2 * of(1)  # two tokens of one sequence see three pairs, those of two sequences see two
    window = shape.window
    if window is None:
        return Cost(per_token=of(1) - every_pair, per_pair=every_pair)
    # For tokens past the window, only layers without a window add a key with each token.
    per_pair = of(window + 2) - 2 * of(window + 1) + of(window)
    return Cost(of(1) - every_pair, per_pair, window, per_windowed_pair=every_pair - per_pair)


StepMicrobatches = list[NDArray[np.int64]]
"""For each microbatch of a replica the numbers, in the step, of its sequences: [sequences], int64."""


def split_among_replicas(batch: StepBatch, replicas: int) -> list[slice]:
    """For each replica the slice of shards that it works on; all slices are equally long."""
    each, left = divmod(len(batch.partitions), replicas)
    assert not left, "every replica has whole shards"
    return [slice(start, start + each) for start in range(0, len(batch.partitions), each)]


def assign_microbatches(
    config: PolicyConfig, cost: Cost, batch: StepBatch, sequences: NDArray[np.int64], microbatch_tokens: int
) -> list[StepMicrobatches]:
    """Plan each replica's microbatches from the wanted sequences in its shards.

    Args:
        config: the model's section of the configuration.
        cost: cost of computing a sequence.
        batch: the step's batch.
        sequences: [chosen], int64: numbers of the wanted sequences.
        microbatch_tokens: most tokens of a microbatch, padding included.
    """
    shares = split_among_replicas(batch, config.parallel.data)
    is_wanted = np.zeros(len(batch), dtype=np.bool_)
    is_wanted[sequences] = True
    held = [np.sort(np.concatenate(batch.partitions[mine])) for mine in shares]
    numbers = [own[is_wanted[own]] for own in held]
    plans = make_packer(config, cost, microbatch_tokens).make_microbatches([batch.lengths[n] for n in numbers])
    return [[own[indices] for indices in plan] for own, plan in zip(numbers, plans, strict=True)]


SETTLE_S = 3.0
"""Seconds to wait, once a rank has failed, for the ends of other ranks to become known."""


class ModelRanks(ABC):
    """A model spread over a Ray worker group, one actor per rank of tensor * pipeline * context * data.

    Args:
        settings: settings that every rank is built from.
        actor_options: Ray options by rank.
        startup_timeout_s: deadline for all ranks to be up.
    """

    label: ClassVar[str]
    """Name of the model in messages."""
    actor_class: ClassVar[type[RankActor]]
    """Class of the Ray actor around a rank."""

    def __init__(
        self, settings: RankSettings, actor_options: Callable[[int], dict[str, Any]], startup_timeout_s: float
    ) -> None:
        self.settings = settings
        self._config = settings.config
        self._startup_timeout_s = startup_timeout_s
        world = settings.config.parallel.world_size
        cores = (os.cpu_count() or 1) // (2 if settings.shares_cores else 1)
        threads = settings.config.threads or max(1, cores // world)
        actor_class = ray.remote(self.actor_class)
        self.actors = [
            actor_class.options(**actor_options(rank)).remote(f"{self.label} rank {rank}", rank, threads)
            for rank in range(world)
        ]
        self._places: list[RankReport] = []
        self._starting: list[ray.ObjectRef] = []

    def start(self) -> None:
        """Begin building the model on every rank; returns at once."""
        address: Any = call_actor(self.actors[0], RankActor.open_store, self._startup_timeout_s)
        self._call(RankActor.import_packages)  # the others need not wait for the address
        self._starting = self._call(RankActor.start, self.settings, address)

    def wait_ready(self) -> None:
        """Block until every rank holds its weights; RunError: a rank failed or the start-up deadline passed."""
        self._places = self._gather(self._starting, f"{self.label} start", self._startup_timeout_s)

    def submit(self, function: Method[P], *args: P.args, **kwargs: P.kwargs) -> list[ray.ObjectRef]:
        """Run function(rank's model, *args, **kwargs) on every rank; returns a reference each."""
        return self._call(RankActor.run, function, *args, **kwargs)

    def _call(self, method: Method[P], *args: P.args, **kwargs: P.kwargs) -> list[ray.ObjectRef]:
        return [call_actor(actor, method, *args, **kwargs) for actor in self.actors]

    def train(self, batch: StepBatch, sequences: NDArray[np.int64], loss_fn: LossFunction) -> TrainResult:
        """One optimizer step, split over data-parallel ranks and microbatches.

        Args:
            batch: the step's batch, whose shards hold the fields that the loss function reads.
            sequences: [chosen], int64, ascending: the sequences to train on, at least one with a token in the loss.
            loss_fn: loss function whose sum over all microbatches is the loss.

        Raises:
            NonFiniteGradientError: the gradient is not finite; the weights are unchanged.
            RefusedStepError: the probability error is beyond its limit; the weights are unchanged.
        """
        counts = GlobalCounts.count(batch, sequences)
        plans = self._plan(batch, sequences, self._config.microbatch_tokens)
        limit = self._prob_error_limit(batch)
        refs = [
            call_actor(actor, RankActor.train, work, loss_fn, counts, limit)
            for actor, work in self._works(batch, plans)
        ]
        shares = self._gather(refs, "training step")
        if not math.isfinite(shares[0].grad_norm):
            raise NonFiniteGradientError(shares[0].grad_norm, self._find_suspects(batch, plans, shares))
        metrics = combine_metrics(one for share in shares for one in share.metrics or [])
        if shares[0].is_refused:
            raise RefusedStepError(metrics)
        return TrainResult(
            loss=metrics.pop("loss"),
            grad_norm=shares[0].grad_norm,
            learning_rate=shares[0].learning_rate,
            metrics=metrics,
            gpu_memory_gib=max(share.gpu_memory_gib for share in shares),
        )

    def _prob_error_limit(self, batch: StepBatch) -> float | None:
        """Largest probability error that ranks may learn from; None: they do not check it."""
        return None

    @property
    def startup_s(self) -> list[dict[str, float]]:
        """Seconds that each rank took to start, by part: "imports" and "model"."""
        return [place.startup_s for place in self._places]

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model."""
        return self.settings.shape

    @property
    def cost(self) -> Cost:
        """Floating-point operations of a sequence's forward pass."""
        return derive_cost(self.shape)

    @property
    def device_name(self) -> str:
        """Name that the vendor gives the device of a rank; "cpu" without a GPU."""
        return self._places[0].device_name

    def save_checkpoint(self, folder: str, *, background: bool = False) -> None:
        """Write weights, optimizer, schedule and random state to an existing, empty folder.

        In the background it returns as soon as the model may change, and `finish_checkpoint` has to follow.
        """
        self._gather(self._call(RankActor.save_checkpoint, folder, background), "checkpoint")

    def checkpoint_is_written(self) -> bool:
        """Whether `finish_checkpoint` would return without waiting."""
        return all(self._gather(self._call(RankActor.checkpoint_is_written), "checking the checkpoint"))

    def finish_checkpoint(self) -> None:
        """Complete a checkpoint that is written in the background; RunError: a rank could not write its part."""
        self._gather(self._call(RankActor.finish_checkpoint), "completing a checkpoint")

    def load_checkpoint(self, folder: str) -> None:
        """Read what `save_checkpoint` wrote, also from a checkpoint of another layout."""
        self._gather(self._call(RankActor.load_checkpoint, folder), "loading the checkpoint")

    def devices(self) -> list[str]:
        """Ray's id of each rank's GPU; empty on a CPU. Ranks need not have started."""
        found = self._gather(self._call(RankActor.gpus), "listing GPUs")
        return [device for devices in found for device in devices]

    def offload(self, *, weights: bool) -> None:
        """Move the optimizer's state to host memory, with `weights` the weights too, and drop gradients."""
        self._gather(self._call(RankActor.offload, weights), "moving to host memory")

    def onload(self) -> None:
        """Move weights and optimizer state back to the devices; gradients are zero."""
        self._gather(self._call(RankActor.onload), "moving back from host memory")

    def begin_record(self) -> None:
        """Note the weights, and from now on the gradient of every optimizer step, until `end_record`."""
        self._gather(self._call(RankActor.begin_record), "recording the weights")

    def end_record(self) -> list[TensorFigure]:
        """Figures of the weights, the gradients since `begin_record`, and the change of the weights, tensor by tensor.

        With expert parallelism and pipelines each stage has figures of its tensors; a tensor comes once.
        """
        found = self._gather(self._call(RankActor.end_record), "recording the update")
        return [figure for figures in found for figure in figures]

    def watch_states(self, batch: StepBatch) -> None:
        """Sketch the hidden states of the watched tokens in the next pass for log-probabilities (`end_states`)."""
        watched = choose_watched_tokens(int(batch.lengths.sum()))
        watches = []
        for mine in split_among_replicas(batch, self._config.parallel.data):
            numbers = find_token_indices(batch.lengths, np.concatenate(batch.partitions[mine]))
            places = np.flatnonzero(np.isin(numbers, watched))
            watches.append((places, numbers[places]))
        pairs = zip(self.actors, self._places, strict=True)
        refs = [call_actor(actor, RankActor.watch_states, *watches[place.data]) for actor, place in pairs]
        self._gather(refs, "choosing the recorded hidden states")

    def end_states(self) -> list[StateFigure]:
        """Sketches of the watched tokens' hidden states, at every point of the model; a point has each token once."""
        return sum_states(self._gather(self._call(RankActor.end_states), "recording hidden states"))

    def begin_profile(self) -> None:
        """Record operators and memory of every rank until `end_profile`."""
        self._gather(self._call(RankActor.begin_profile), "beginning a profile")

    def end_profile(self, folder: str) -> None:
        """Write the recordings into an existing folder, each rank into files of its own."""
        self._gather(self._call(RankActor.end_profile, folder), "writing a profile")

    def shutdown(self) -> None:
        """End every process; idempotent."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []

    def _gather(self, refs: list[ray.ObjectRef], what: str, deadline_s: float | None = None) -> list[Any]:
        deadline_s = deadline_s or self._config.timeout_s
        name = f"{self.label} rank {{}}".format
        try:
            return gather(refs, deadline_s=deadline_s, phase_name=what, name=name)
        except RunError as error:
            lost = find_lost_calls(refs, SETTLE_S) if isinstance(error.__cause__, RayError) else []
            if not lost:
                raise
            text = str(error)
            others = [name(rank) for rank in lost if name(rank) not in text]
            raise ModelLostError(f"{text}; {join_names(others)} is gone" if others else text) from error

    def _find_suspects(
        self, batch: StepBatch, plans: Sequence[StepMicrobatches], shares: Sequence[RankTrainResult]
    ) -> list[int]:
        """Numbers of the sequences that may have caused a gradient that is not finite.

        Candidates are the sequences of microbatches whose loss is not finite, or all if every loss is finite. Returned
        are the candidates with a sampled token whose output is not finite, or all candidates if there are none.
        """
        found: list[int] = []
        for place, share in zip(self._places, shares, strict=True):
            microbatches = plans[place.data]
            for numbers, metrics in zip(microbatches, share.metrics or [], strict=share.metrics is not None):
                if not math.isfinite(metrics["loss"]):
                    found += numbers.tolist()
        suspects = sorted(set(found)) or sorted(np.concatenate([one for plan in plans for one in plan]).tolist())
        finite = self._find_finite(batch)
        return [number for number in suspects if not finite[number]] or suspects

    @abstractmethod
    def _find_finite(self, batch: StepBatch) -> NDArray[np.bool_]:
        """Compute the model's outputs again: [sequences], True where they are finite at sampled tokens."""

    def _forward(self, batch: StepBatch, method: Method[[ReplicaWork]], what: str) -> ForwardResult:
        """Compute a number for every token of the step with a method of the actors."""
        tokens = self._config.logprob_microbatch_tokens or self._config.microbatch_tokens
        plans = self._plan(batch, np.arange(len(batch)), tokens)
        refs = [call_actor(actor, method, work) for actor, work in self._works(batch, plans)]
        by_replica: dict[int, ForwardResult] = {
            place.data: result
            for place, result in zip(self._places, self._gather(refs, what), strict=True)
            if result is not None
        }
        results = [by_replica[replica] for replica in range(self._config.parallel.data)]
        finite = np.zeros(len(batch), dtype=np.bool_)
        finite[np.concatenate(batch.partitions)] = np.concatenate([flags for _, flags in results])
        return [reference for references, _ in results for reference in references], finite

    def _plan(self, batch: StepBatch, sequences: NDArray[np.int64], microbatch_tokens: int) -> list[StepMicrobatches]:
        """Plan each replica's microbatches (`assign_microbatches`)."""
        return assign_microbatches(self._config, self.cost, batch, sequences, microbatch_tokens)

    def _works(self, batch: StepBatch, plans: Sequence[StepMicrobatches]) -> list[tuple[Any, ray.ObjectRef]]:
        """For every rank its actor and a reference to the `ReplicaWork` of its replica, with a plan's microbatches."""
        works = []
        places = np.zeros(len(batch), dtype=np.int64)
        for mine, plan in zip(split_among_replicas(batch, len(plans)), plans, strict=True):
            numbers = np.concatenate(batch.partitions[mine])
            places[numbers] = np.arange(len(numbers))
            works.append(ray.put((batch.select_partitions(mine), [places[microbatch].tolist() for microbatch in plan])))
        return [(actor, works[place.data]) for actor, place in zip(self.actors, self._places, strict=True)]


class MegatronPolicy(ModelRanks):
    """The policy; its checkpoints hold the reference policy too once the reference has moved."""

    label = "policy"
    actor_class = PolicyActor

    def _find_finite(self, batch: StepBatch) -> NDArray[np.bool_]:
        return self._forward(batch, PolicyActor.compute_logprobs, "outputs of a failed training step")[1]

    def _prob_error_limit(self, batch: StepBatch) -> float | None:
        # With prev_logprobs the driver has checked the whole step; a minibatch would be refused after earlier ones.
        return None if "prev_logprobs" in batch.fields else batch.prob_error_limit

    def add_logprobs(self, batch: StepBatch) -> NDArray[np.bool_]:
        """Add prev_logprobs to the batch: log-probabilities of every token under the current weights.

        Returns:
            [sequences], bool: whether the numbers at all sampled tokens are finite.
        """
        batch.fields["prev_logprobs"], finite = self._forward(batch, PolicyActor.compute_logprobs, "log-probabilities")
        return finite

    def add_whole_logprobs(self, batch: StepBatch) -> NDArray[np.bool_]:
        """Add whole_logprobs to the batch: as prev_logprobs, over the whole vocabulary whatever the filter."""
        batch.fields["whole_logprobs"], finite = self._forward(
            batch, PolicyActor.compute_whole_logprobs, "log-probabilities"
        )
        return finite

    def add_reference_logprobs(self, batch: StepBatch) -> NDArray[np.bool_]:
        """Add reference_logprobs to the batch: log-probabilities of every token under the frozen reference policy."""
        batch.fields["reference_logprobs"], finite = self._forward(
            batch, PolicyActor.compute_reference_logprobs, "reference log-probabilities"
        )
        return finite

    def sync_reference(self, alpha: float) -> None:
        """Move the reference policy: reference = alpha * policy + (1 - alpha) * reference (TR-DPO)."""
        self._gather(self._call(PolicyActor.sync_reference, alpha), "moving the reference policy")


class MegatronValue(ModelRanks):
    """The value model of PPO."""

    label = "value model"
    actor_class = ValueActor

    def _find_finite(self, batch: StepBatch) -> NDArray[np.bool_]:
        return self._forward(batch, ValueActor.compute_values, "outputs of a failed training step")[1]

    def add_values(self, batch: StepBatch) -> NDArray[np.bool_]:
        """Add values to the batch: the expected return before every token under the current weights; 0 at first tokens.

        Returns:
            [sequences], bool: whether the numbers at all sampled tokens are finite.
        """
        batch.fields["values"], finite = self._forward(batch, ValueActor.compute_values, "values")
        return finite
