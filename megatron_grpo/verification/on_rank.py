"""What one rank of a layout measures."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_grpo.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, PolicyConfig
from megatron_grpo.data.batch import TokenBatch, TokenFields
from megatron_grpo.data.bins import OF_TOKENS
from megatron_grpo.data.planning import planner
from megatron_grpo.models.families import shape_of_folder
from megatron_grpo.models.hf_weights import iter_hf_tensors
from megatron_grpo.policy.rank.policy_rank import PolicyRank
from megatron_grpo.verification.problem import MOE, counts_of, make_batch, make_loss

_GATHER_BYTES = 2**28


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What every rank of a layout is told."""

    folder: str
    parallel: ParallelConfig
    packing: bool
    sequences: int
    longest: int
    steps: int
    seed: int
    timeout_s: float


@dataclass(slots=True)
class Findings:
    """What a rank has found; what other ranks speak for is empty."""

    logprobs: dict[int, Tensor] = field(default_factory=dict)
    """By number of the sequence, each [tokens], float32; 0 at first tokens."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Both by the names of transformers, in full shape, of the rank's pipeline stage."""
    losses: list[float] = field(default_factory=list)
    """This rank's share of the loss, after each optimizer step and before the first."""
    step_s: float = 0.0
    peak_bytes: int = 0


def measure(task: Task, enter: Callable[[str], None]) -> Findings:
    """Build the rank's part of the model, and measure; the process groups are set up for the layout.

    Args:
        task: what to measure.
        enter: told the name of each phase as it begins.
    """
    enter("building the model")
    batch, found = _replica_batch(task)
    rank = _build(task, distributed=False)  # each rank then keeps the whole gradient
    microbatches = _microbatches(task, batch.lengths)
    enter("log-probabilities")
    logprobs = rank.logprobs(TokenBatch(batch.lengths, TokenFields(token_ids=batch.fields.token_ids)), microbatches)
    result = Findings(weights=_whole(rank))
    if logprobs is not None:
        result.logprobs = dict(zip(found, logprobs.split(batch.lengths), strict=True))
    loss_fn, counts = make_loss(), counts_of(_batch(task))
    enter("gradients")
    shares = rank.compute_gradients(batch, microbatches, loss_fn, counts)
    result.losses.append(_loss(shares))
    result.gradients = _whole_gradients(rank)
    del rank  # else both would count in the peak
    rank = _build(task, distributed=True)
    enter("optimizer steps")
    times = []
    for _ in range(task.steps):
        began = time.monotonic()
        rank.train(batch, microbatches, loss_fn, counts)
        times.append(time.monotonic() - began)
        result.losses.append(_loss(rank.compute_gradients(batch, microbatches, loss_fn, counts)))
    result.step_s = statistics.median(times)
    result.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if parallel_state.get_tensor_model_parallel_rank():  # its neighbours computed the same loss
        result.losses = [0.0] * len(result.losses)
    return result


def _batch(task: Task) -> TokenBatch:
    return make_batch(shape_of_folder(task.folder).vocab, task.sequences, task.longest, task.seed)


def _replica_batch(task: Task) -> tuple[TokenBatch, list[int]]:
    """This replica's sequences, and their numbers in the whole batch."""
    batch = _batch(task)
    lengths = torch.tensor(batch.lengths).numpy()
    shares = planner(_config(task), OF_TOKENS).share(lengths, task.parallel.data)
    own = sorted(shares[parallel_state.get_data_parallel_rank()])
    return batch.select(own), own


def _microbatches(task: Task, lengths: list[int]) -> list[list[int]]:
    (plan,) = planner(_config(task), OF_TOKENS).microbatches([torch.tensor(lengths).numpy()])
    return plan


def _config(task: Task) -> PolicyConfig:
    return PolicyConfig(
        model=ModelConfig(path=task.folder),
        parallel=task.parallel,
        precision="float32",
        packing=task.packing,
        moe=MOE,
        microbatch_tokens=3 * task.longest,
        # A large epsilon keeps an update a smooth function of the gradient: rounding must not flip its sign.
        optimizer=OptimizerConfig(lr=1e-2, adam_eps=1e-2),
        max_grad_norm=1.0,
    )


def _build(task: Task, *, distributed: bool) -> PolicyRank:
    shape, config = shape_of_folder(task.folder), _config(task)
    config = replace(config, optimizer=replace(config.optimizer, distributed=distributed))
    return PolicyRank(config, shape, task.folder, reference=None, temperature=1.0, decay_steps=100)


def _loss(shares: list[dict[str, Tensor]]) -> float:
    return sum(float(share["loss"]) for share in shares)


def _whole(rank: PolicyRank) -> dict[str, Tensor]:
    """The weights, under the names and in the shapes of transformers."""
    tensors: Iterator[tuple[str, Any]] = iter_hf_tensors(rank.whole_chunks(), rank.shape, _GATHER_BYTES)
    return {name: tensor.clone().cpu() for name, tensor in tensors if tensor is not None}


def _whole_gradients(rank: PolicyRank) -> dict[str, Tensor]:
    """The gradients likewise: exported in the place of the weights."""
    parameters = rank.parameters()
    weights = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)
    gradients = _whole(rank)
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data.copy_(weight)
    return gradients
