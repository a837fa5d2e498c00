"""Measures a layout on this machine, rank by rank, and compares its results with transformers'."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_grpo.batch.packing import TOKEN_COST, make_packer
from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, PolicyConfig
from megatron_grpo.losses.loss import LossFunction
from megatron_grpo.models.families.reading import include_tower, read_model_shape
from megatron_grpo.models.hf_weights import iter_hf_tensors
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.rank import PolicyRank
from megatron_grpo.verification.problem import MOE, Truth, count_tokens, make_loss
from megatron_grpo.verification.processes import run_on_ranks
from megatron_grpo.verification.tolerances import measure_distance


@dataclass(frozen=True, slots=True)
class Task:
    """What every rank of a layout gets."""

    folder: str
    """Folder of the model in Hugging Face format."""
    parallel: ParallelConfig
    packing: bool
    batch: TokenBatch
    """The sequences of all replicas."""
    steps: int
    seed: int
    timeout_s: float
    loss: LossFunction = field(default_factory=make_loss)
    microbatch_tokens: int | None = None
    """Largest microbatch; None: three of the longest sequence."""
    formula: str = ""
    """Name of the loss's formula; empty: the loss that shows the model."""
    images_folder: str = ""
    """Store of the images that sequences have; empty: they have none."""
    trains_tower: bool = False


@dataclass(slots=True)
class RankResults:
    """What one rank measured; fields that only other ranks fill are empty."""

    logprobs: dict[int, Tensor] = field(default_factory=dict)
    """By index of the sequence [tokens], float32: log-probabilities; 0 at the first token."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Weights and gradients of the rank's pipeline stage, unsharded, by their names in transformers."""
    losses: list[float] = field(default_factory=list)
    """This rank's share of the loss: before the first optimizer step and after each one."""
    step_s: float = 0.0
    peak_bytes: int = 0


def measure(task: Task, enter: Callable[[str], object]) -> dict[str, Any]:
    """Build the rank's part of the model and measure it.

    Returns the fields of `RankResults` by name. `enter` gets the name of each phase as it begins.
    """
    enter("building the model")
    config = _build_config(task)
    shares = make_packer(config, TOKEN_COST).assign_to_replicas(np.array(task.batch.lengths), task.parallel.data)
    numbers = sorted(shares[parallel_state.get_data_parallel_rank()])
    batch = task.batch.select(numbers)
    (microbatches,) = make_packer(config, TOKEN_COST).make_microbatches([np.array(batch.lengths)])
    # The distributed optimizer is off at first, so that each rank keeps the whole gradient.
    rank = _build_rank(config, task.images_folder)
    enter("log-probabilities")
    logprobs = rank.compute_logprobs(
        TokenBatch(batch.lengths, TokenFields(token_ids=batch.fields.token_ids), batch.images), microbatches
    )
    result = RankResults(weights=_join_shards(rank))
    if logprobs is not None:
        result.logprobs = dict(zip(numbers, logprobs.split(batch.lengths), strict=True))
    loss_fn, counts = task.loss, count_tokens(task.batch)
    enter("gradients")
    result.losses.append(_sum_losses(rank.compute_gradients(batch, microbatches, loss_fn, counts)))
    result.gradients = _join_gradients(rank)
    del rank  # otherwise the peak would count both models
    rank = _build_rank(_build_config(task, distributed=True), task.images_folder)
    enter("optimizer steps")
    times = []
    for _ in range(task.steps):
        began = time.monotonic()
        rank.train(batch, microbatches, loss_fn, counts)
        times.append(time.monotonic() - began)
        result.losses.append(_sum_losses(rank.compute_gradients(batch, microbatches, loss_fn, counts)))
    result.step_s = statistics.median(times)
    result.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    # All tensor-parallel ranks know the loss; the sum over ranks counts that of rank 0.
    if parallel_state.get_tensor_model_parallel_rank():
        result.losses = [0.0] * len(result.losses)
    # Not dataclasses.asdict, which copies every tensor.
    return {attribute.name: getattr(result, attribute.name) for attribute in fields(result)}


def _build_config(task: Task, *, distributed: bool = False) -> PolicyConfig:
    return PolicyConfig(
        model=ModelConfig(path=task.folder),
        train_vision_tower=task.trains_tower,
        parallel=task.parallel,
        precision="float32",
        packing=task.packing,
        moe=MOE,
        microbatch_tokens=task.microbatch_tokens or 3 * max(task.batch.lengths),
        # With a large epsilon an update is a smooth function of the gradient: rounding does not flip its sign.
        optimizer=OptimizerConfig(lr=1e-2, adam_eps=1e-2, distributed=distributed),
        max_grad_norm=1.0,
    )


def _build_rank(config: PolicyConfig, images_folder: str) -> PolicyRank:
    folder, shape = config.model.path, read_model_shape(config.model.path)
    shape = include_tower(shape, folder) if config.train_vision_tower else shape
    return PolicyRank(
        RankSettings(config=config, shape=shape, folder=folder, images_folder=images_folder, decay_steps=100)
    )


def _sum_losses(shares: list[dict[str, Tensor]]) -> float:
    return sum(float(share["loss"]) for share in shares)


def _join_shards(rank: PolicyRank) -> dict[str, Tensor]:
    tensors: Iterator[tuple[str, Any]] = iter_hf_tensors(rank.gather_chunks(), rank.shape)
    return {name: tensor.clone().cpu() for name, tensor in tensors if tensor is not None}


def _join_gradients(rank: PolicyRank) -> dict[str, Tensor]:
    # The export of weights joins shards, experts and fused matrices. With the gradients in the weights' place it does
    # the same for gradients, so that one weight map is tested by both.
    parameters: list[Any] = [
        parameter for chunk in rank.gather_chunks() for parameter in chunk.parameters() if parameter.requires_grad
    ]
    weights = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)
    gradients = _join_shards(rank)
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data.copy_(weight)
    return gradients


def run_layout(tasks: Sequence[Task]) -> list[list[RankResults]]:
    """Measure tasks of one layout on its ranks; errors are those of `run_on_ranks`.

    The results are those of every rank, by task. The ranks start once, and take the tasks one after the other.
    """
    task = tasks[0]
    by_rank = run_on_ranks(_measure_tasks, tasks, task.parallel, seed=task.seed, timeout_s=task.timeout_s)
    by_task = zip(*(results["tasks"] for results in by_rank), strict=True)
    return [[RankResults(**result) for result in results] for results in by_task]


def _measure_tasks(tasks: Sequence[Task], enter: Callable[[str], object]) -> dict[str, Any]:
    """Measure tasks one after the other: {"tasks": results of `measure`}."""

    def measure_task(task: Task) -> dict[str, Any]:
        of_formula = f" of {task.formula}" if task.formula else ""
        return measure(task, lambda name: enter(f"{name}{of_formula}"))

    return {"tasks": [measure_task(task) for task in tasks]}


@dataclass(frozen=True, slots=True)
class Row:
    """The results of one layout: distances from transformers in float64."""

    layout: str
    packed: bool
    logprob: float
    """Largest difference of a log-probability."""
    logprob_rms: float
    """Root mean square of these differences."""
    logprob_median: float
    """Median of their absolute values."""
    gradient: float
    """Relative error of the gradient that is furthest from its tolerance, or nearest to it."""
    worst_tensor: str
    """Name in transformers of the tensor whose gradient has this error."""
    loss: float
    """Difference of the loss after the optimizer steps from that of one rank; for one rank, that of the first loss from
    the reference's."""
    exact: bool
    """Whether the exported weights equal the imported ones bit by bit."""
    peak_gib: float
    """Peak memory of the rank that took most, in GiB."""
    step_s: float
    """Median seconds of an optimizer step on the slowest rank."""
    final_loss: float
    tolerances: dict[str, float]
    """Largest values of the distances that rounding explains, by the names of the fields above."""
    formula: str = ""
    """Name of the loss's formula; empty: the loss that shows the model."""

    @property
    def faults(self) -> list[str]:
        """The distances past their tolerances, and differing weights."""
        distances = {name: (getattr(self, name), limit) for name, limit in self.tolerances.items()}
        texts = [
            f"{name} {value:.1e} > {limit:.1e}" for name, (value, limit) in distances.items() if not value <= limit
        ]
        return [*texts, *([] if self.exact else ["exported weights differ"])]

    @property
    def passed(self) -> bool:
        """Whether everything is within tolerance."""
        return not self.faults


def compare_layout(
    name: str, packed: bool, results: Sequence[RankResults], truth: Truth, batch: TokenBatch, one_rank: Row | None
) -> Row:
    """Compare a layout's ranks with transformers and with one rank.

    `one_rank`: the row of the layout of one rank; None: this is that layout.
    """
    logprobs = {number: values for rank in results for number, values in rank.logprobs.items()}
    assert sorted(logprobs) == list(range(len(batch))), "every sequence is reported once"
    first, final = (sum(rank.losses[index] for rank in results) for index in (0, -1))
    gradients = {name: tensor for rank in results for name, tensor in rank.gradients.items()}
    in_order = torch.cat([logprobs[number] for number in range(len(batch))])
    distance, tolerances = measure_distance(in_order, gradients, truth.logprobs, truth.gradients), truth.tolerances
    worst = max(distance.gradients, key=lambda tensor: distance.gradients[tensor] / tolerances.gradients[tensor])
    limits = {"gradient": tolerances.gradients[worst], "loss": tolerances.loss}
    return Row(
        layout=name,
        packed=packed,
        logprob=distance.logprob,
        logprob_rms=distance.logprob_rms,
        logprob_median=distance.logprob_median,
        gradient=distance.gradients[worst],
        worst_tensor=worst,
        loss=abs(first - truth.loss if one_rank is None else final - one_rank.final_loss),
        exact=_has_same_weights(results, truth.weights),
        peak_gib=max(rank.peak_bytes for rank in results) / 2**30,
        step_s=max(rank.step_s for rank in results),
        final_loss=final,
        tolerances={**tolerances.logprobs, **limits},
    )


def _has_same_weights(results: Sequence[RankResults], truth: dict[str, Tensor]) -> bool:
    names = {name for rank in results for name in rank.weights}
    return names == truth.keys() and all(
        torch.equal(tensor, truth[name]) for rank in results for name, tensor in rank.weights.items()
    )
