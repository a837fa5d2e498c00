"""Replays one recorded step on ranks of this machine, in any layout and precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.algorithms.stages import combine_results
from megatron_grpo.batch.replay_files import TensorFigure
from megatron_grpo.batch.step_batch import StepBatch, partition_sequences
from megatron_grpo.batch.token_batch import TokenBatch, TokenFields, find_token_indices, repeat_per_token, require_field
from megatron_grpo.config.algorithms import ALGORITHMS
from megatron_grpo.config.errors import ConfigError
from megatron_grpo.config.paths import list_import_folders
from megatron_grpo.losses.divergence import find_inconsistent_sequences
from megatron_grpo.losses.loss import GlobalCounts, combine_metrics
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo.losses.selections import mark_selected
from megatron_grpo.platform.device import detect_platform
from megatron_grpo.preflight.config_checks import find_config_problems
from megatron_grpo.preflight.layout_checks import check_split
from megatron_grpo.preflight.rules import find_broken_rules
from megatron_grpo.run.directory import POLICY_FOLDER
from megatron_grpo.run.launch import make_policy_settings
from megatron_grpo.trainer.hidden_states import Piece
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.microbatch_schedule import (
    StepMicrobatches,
    assign_microbatches,
    derive_cost,
    split_among_replicas,
)
from megatron_grpo.trainer.model_ranks import TrainResult
from megatron_grpo.trainer.rank import PolicyRank
from megatron_grpo.verification.doctor.layer_outputs import compute_logprobs_and_states
from megatron_grpo.verification.hidden_pieces import assemble_pieces
from megatron_grpo.verification.processes import run_on_ranks
from megatron_grpo.verification.replay.record import RecordedStep

Schedule = list[StepMicrobatches]
"""By replica its microbatches, each the indices of its sequences in the step."""


@dataclass(frozen=True, slots=True)
class ReplayTask:
    """What every rank of a replay gets."""

    settings: RankSettings
    checkpoint: str | None
    """Folder of the policy's checkpoint before the step; None: the step begins with the model's own weights."""
    batch: TokenBatch
    """All sequences of the step."""
    members: list[NDArray[np.int64]]
    """By replica the indices of its sequences in the step, [sequences of the replica], int64."""
    captured: NDArray[np.bool_]
    """[tokens of the batch], bool: true for tokens whose hidden states are kept."""
    logprobs: Schedule
    steps: list[tuple[Schedule, GlobalCounts]]
    """Microbatches and denominators of each optimizer step."""
    loss: ClippedPGLossFn
    uses_prev: bool
    """Whether the loss reads the policy's log-probabilities at the start of the step."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay computed or a run recorded; unknown fields are empty."""

    logprobs: Tensor | None
    """[tokens], float32: log-probability of every sampled token before the step; 0 elsewhere."""
    result: TrainResult | None
    tensors: list[TensorFigure]
    hidden: dict[str, Tensor]
    """[captured, width] by point, in the order of computation (`assemble_pieces`); of a record [captured, SKETCH], a
    sketch of each token's state (`step_record.sketch_rows`)."""
    captured: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """[captured], int64, ascending: indices, in the step, of the tokens whose hidden states are known."""
    is_sketched: bool = False
    """Whether `hidden` has sketches."""


def replay_step(record: RecordedStep, *, hidden_tokens: int, timeout_s: float, gpus: int) -> Replayed:
    """Replay a recorded step with the record's configuration.

    Args:
        record: the step, whose rollouts, rewards and advantages are taken as they are.
        hidden_tokens: tokens whose hidden states are kept: the first sequences with so many tokens together that
            predict others, at least one sequence; and the tokens whose states the run recorded.
        timeout_s: deadline of the replay.
        gpus: GPUs of this machine, one for each rank; 0: the ranks compute on the CPU.

    Raises:
        ConfigError: the configuration cannot be replayed, or the layout does not fit the model.
        ValueError: the step has nothing to learn from, or its sequences do not fit the layout.
        RunError: a rank failed or missed the deadline.
    """
    task = build_replay_task(record, hidden_tokens)
    config = record.config
    results = run_on_ranks(
        replay_on_rank, task, config.policy.parallel, seed=config.loop.seed, timeout_s=timeout_s, gpus=gpus
    )
    captured = np.flatnonzero(task.captured)
    return Replayed(
        logprobs=results[0]["logprobs"],
        result=_make_result(task, results),
        tensors=[TensorFigure(**row) for result in results for row in result["tensors"]],
        hidden=assemble_pieces((Piece(**row) for result in results for row in result["pieces"]), len(captured)),
        captured=captured,
    )


def build_replay_task(record: RecordedStep, hidden_tokens: int) -> ReplayTask:
    """Build the ranks' input; arguments and errors are those of `replay_step`."""
    config = record.config
    settings = make_policy_settings(config, record.model)
    _require_replayable(record, settings)
    outcomes = [trajectory.outcome for trajectory in record.trajectories]
    step, batch = StepBatch.from_outcomes(config, outcomes), record.join_tokens()
    # The run excluded sequences by its log-probabilities, which are recorded; those of the replay come after packing.
    threshold = config.sampled_loop.seq_logprob_error_threshold
    if threshold is not None:
        mask = require_field(batch.fields.sampled) & torch.from_numpy(np.repeat(step.in_loss, step.lengths))
        prev = torch.from_numpy(record.place_at_sampled(record.prev_logprobs))
        generation = require_field(batch.fields.generation_logprobs)
        lengths = step.sum_by_rollout(step.lengths).tolist()
        beyond, _ = find_inconsistent_sequences(mask.float(), prev, generation, lengths, threshold)
        step.in_loss &= ~step.repeat_by_sequence(beyond.numpy())
    cost = derive_cost(settings.shape)
    step.partitions = partition_sequences(config, step, cost)
    _add_fields(record, step, batch)
    policy = config.policy
    forward_tokens = policy.logprob_microbatch_tokens or policy.microbatch_tokens
    steps = [
        (
            assign_microbatches(policy, cost, step, sequences, policy.microbatch_tokens),
            GlobalCounts.count(step, sequences),
        )
        for _ in range(config.passes_per_step)
        for sequences in step.split_minibatches(policy.train_global_batch_samples or len(step))
        if step.response_tokens[sequences][step.in_loss[sequences]].sum()
    ]
    if not steps:
        raise ValueError(f"step {record.step} of {record.run_dir} has no token in the loss: nothing was learnt from it")
    return ReplayTask(
        settings=settings,
        checkpoint=None if record.checkpoint is None else str((record.checkpoint / POLICY_FOLDER).absolute()),
        batch=batch,
        members=[
            np.concatenate(step.partitions[replica]) for replica in split_among_replicas(step, policy.parallel.data)
        ],
        captured=_choose_captured_tokens(record, hidden_tokens),
        logprobs=assign_microbatches(policy, cost, step, np.arange(len(step)), forward_tokens),
        steps=steps,
        loss=ClippedPGLossFn(config.loss_fn, list_import_folders(str(record.run_dir), [config.loss_fn.objective])),
        uses_prev=config.needs_prev_logprobs,
    )


def _choose_captured_tokens(record: RecordedStep, hidden_tokens: int) -> NDArray[np.bool_]:
    """Choose tokens whose hidden states are kept (`replay_step`): [tokens], bool."""
    predicts, ends = record.predicts, np.cumsum(record.lengths)
    counts = np.cumsum(predicts)[ends - 1]  # tokens that predict others, up to each sequence's end
    first = counts[counts > 0][:1]
    chosen = counts <= max(hidden_tokens, *first)
    captured = predicts & np.repeat(chosen, record.lengths)
    if record.figures is not None:
        captured[[state.token for state in record.figures.states]] = True
    return captured & predicts


def _require_replayable(record: RecordedStep, settings: RankSettings) -> None:
    """Require a replayable configuration whose layout fits the model."""
    config, vocab = record.config, settings.shape.vocab
    has_other_loss = config.method.loss != ALGORITHMS["grpo"].loss
    largest = max(int(trajectory.token_ids.max()) for trajectory in record.trajectories)
    text = "cannot be replayed: the experts that engines chose are not recorded"
    chooses_by_entropy = config.loss_fn.selection == "highest_entropy"
    rules = [
        (chooses_by_entropy, "loss_fn.corrections=", "cannot be replayed: entropies are not recorded"),
        (config.value_model is not None, "algorithm=", "cannot be replayed: values and returns are not recorded"),
        (has_other_loss, "algorithm=", "cannot be replayed: its loss has more than the samples that are recorded"),
        (
            config.imitates_environment,
            "loss_fn.environment_nll_weight=",
            "cannot be replayed: the environment's tokens are not recorded as such; use 0",
        ),
        (config.policy.moe.replay_routing, "policy.moe.replay_routing=", text),
        (largest >= vocab, "policy.model.path=", f"has {vocab} tokens, and the rollouts have token {largest}"),
        *check_split("policy.parallel", config.policy.parallel, settings.shape),
    ]
    problems = [
        *find_broken_rules(config, rules),
        *(problem for problem in find_config_problems(config) if problem.subject.startswith("policy.")),
    ]
    if problems:
        raise ConfigError(problems)


def _add_fields(record: RecordedStep, step: StepBatch, batch: TokenBatch) -> None:
    """Add the loss's mask, recorded advantages and correct responses."""
    sampled, fields = require_field(batch.fields.sampled), batch.fields
    fields.loss_mask = repeat_per_token(step.in_loss, step.lengths, sampled)
    fields.advantages = torch.from_numpy(record.place_at_sampled(record.advantages))
    if record.config.loss_fn.selection is not None:
        prev = torch.from_numpy(record.place_at_sampled(record.prev_logprobs))
        fields.selected = mark_selected(record.config.loss_fn, prev, fields.advantages, fields.loss_mask > 0)
    if step.rollout_shares is not None:
        fields.rollout_share = repeat_per_token(step.rollout_shares, step.lengths, sampled)
    if step.positive is not None:
        fields.positive = repeat_per_token(step.positive, step.lengths, sampled)


def replay_on_rank(task: ReplayTask, enter: Callable[[str], object]) -> dict[str, Any]:
    """Compute log-probabilities and states, then take the optimizer steps."""
    enter("building the model")
    rank = PolicyRank(task.settings)
    if task.checkpoint is not None:
        enter("loading the checkpoint")
        rank.checkpoint.load(task.checkpoint)
    members = task.members[parallel_state.get_data_parallel_rank()]
    batch, token_indices = (
        task.batch.select(members.tolist()),
        find_token_indices(np.asarray(task.batch.lengths), members),
    )
    enter("log-probabilities")
    # Only tokens go into the forward pass, as in a run: a mask or an advantage must not change it.
    forward = TokenBatch(batch.lengths, TokenFields(token_ids=batch.fields.token_ids, sampled=batch.fields.sampled))
    forward_microbatches = _select_replica_microbatches(task.logprobs, members)
    # States of captured tokens alone are gathered in one tensor, so these are counted from 0; the others get -1.
    numbers = np.cumsum(task.captured) - 1
    logprobs_of_rank, pieces = compute_logprobs_and_states(
        rank, forward, forward_microbatches, np.where(task.captured[token_indices], numbers[token_indices], -1)
    )
    logprobs = _broadcast_outputs(task, logprobs_of_rank, token_indices)
    if task.uses_prev:
        batch.fields.prev_logprobs = logprobs[token_indices]
    if task.settings.reference is not None:
        batch.fields.reference_logprobs = _broadcast_outputs(
            task, rank.compute_reference_logprobs(forward, forward_microbatches), token_indices
        )[token_indices]
    enter("optimizer steps")
    rank.recorder.begin()
    shares = [
        rank.train(batch, _select_replica_microbatches(batches, members), task.loss, counts)
        for batches, counts in task.steps
    ]
    enter("gathering the tensors")
    return {
        "logprobs": logprobs if dist.get_rank() == 0 else None,
        # Not asdict, which copies every tensor.
        "pieces": [{name: getattr(piece, name) for name in Piece.__slots__} for piece in pieces],
        "tensors": [asdict(figure) for figure in rank.recorder.end()],
        "shares": [asdict(share) for share in shares],
    }


def _select_replica_microbatches(plan: Schedule, members: NDArray[np.int64]) -> list[list[int]]:
    """Select this replica's microbatches, by indices into `members`."""
    index_of = {int(number): index for index, number in enumerate(members)}
    return [
        [index_of[int(number)] for number in microbatch] for microbatch in plan[parallel_state.get_data_parallel_rank()]
    ]


def _broadcast_outputs(task: ReplayTask, values: Tensor | None, token_indices: NDArray[np.int64]) -> Tensor:
    """Send outputs to all ranks: [tokens of the batch], float32, host.

    Collective over all ranks. `values`: [tokens of the replica] on the replica's output rank, else None.
    """
    # The loss needs them on the ranks of the last stage. Each token has one output rank, and the others add zeros, so
    # the sum is exact.
    device = detect_platform().device
    all_values = torch.zeros(sum(task.batch.lengths), device=device)
    if values is not None:
        all_values[torch.from_numpy(token_indices).to(device)] = values.to(device)
    dist.all_reduce(all_values)
    return all_values.cpu()


def _make_result(task: ReplayTask, results_of_ranks: list[dict[str, Any]]) -> TrainResult:
    """Combine the ranks' metrics of the optimizer steps, as a run does."""
    results = []
    for number in range(len(task.steps)):
        shares = [result["shares"][number] for result in results_of_ranks]
        metrics = combine_metrics(row for share in shares for row in share["metrics"] or [])
        loss = metrics.pop("loss")
        results.append(TrainResult(loss, shares[0]["grad_norm"], shares[0]["learning_rate"], metrics))
    return combine_results(results, [counts.tokens for _, counts in task.steps])
