"""The packs in which a run's trainer computed a step, and suspects that let their sequences see each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_grpo.batch.rollout_files import locate_rollouts_file, read_rows
from megatron_grpo.batch.step_batch import StepBatch, partition_sequences
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.config.schema import Config
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.trainer.microbatch_schedule import assign_microbatches, derive_cost
from megatron_grpo.verification.doctor.law import Tokens, compute_residual
from megatron_grpo.verification.doctor.suspects.side import Candidate, Side, Suspect

Packs = Mapping[tuple[int, int], tuple[list[Tensor], Tensor]]
"""By group and sample of a rollout: the sequences before its first one in its pack, and its own; token ids, [tokens],
int64."""


def read_packs(run_dir: Path, step: int, config: Config, shape: ModelShape) -> Packs:
    """Pack a step's rollouts again as the run did; empty without packing.

    Raises:
        ValueError: the record cannot be read.
    """
    if not config.policy.packing:
        return {}
    trajectories = [Trajectory.from_row(row) for row in read_rows(step, locate_rollouts_file(run_dir, step))]
    batch, cost = (
        StepBatch.from_outcomes(config, [trajectory.outcome for trajectory in trajectories]),
        derive_cost(shape),
    )
    batch.partitions = partition_sequences(config, batch, cost)
    sequences = [(part, index) for trajectory in trajectories for index, part in enumerate(trajectory.split_segments())]
    tokens = config.policy.logprob_microbatch_tokens or config.policy.microbatch_tokens
    packs: dict[tuple[int, int], tuple[list[Tensor], Tensor]] = {}
    for packs_of_replica in assign_microbatches(config.policy, cost, batch, np.arange(len(batch)), tokens):
        for pack in packs_of_replica:
            ids = [torch.from_numpy(np.array(sequences[number][0].token_ids, dtype=np.int64)) for number in pack]
            for index, number in enumerate(pack):
                part, segment = sequences[number]
                if segment == 0:
                    packs[part.group, part.sample] = ids[:index], ids[index]
    return packs


MOST_BEFORE = 7
"""Most sequences before a rollout that it is tried to see, in the order of the record."""


def iterate_packing_suspects(packs: Packs, side: Side) -> Iterator[Candidate]:
    """Yield attention across the sequences of a pack.

    The packs are those of the step, or neighbours in the order of the record.
    """
    if not packs:
        return
    # A kernel that ignores the bounds of a pack attends to earlier sequences; positions may restart in each or go on.
    key = "policy.packing=false; python -m megatron_grpo.replay with this key compares the layers of a packed step"
    for restarts, words in ((True, "with positions that begin anew"), (False, "with positions that go on")):
        text = f"lets packed sequences see those before them in the pack, {words}"
        yield Suspect("packed_leak", "layout", text, key), partial(_predict_leaked, packs, restarts)
        in_order = f"{text} (packs in the order of the record)"
        yield (
            Suspect("packed_leak", "layout", in_order, key, assumes=2),
            partial(_predict_leaked_in_order, packs, restarts),
        )


def _predict_leaked(packs: Packs, restarts: bool, side: Side) -> Tensor:
    before = [packs[rollout.row["group"], rollout.row["sample"]][0] for rollout in side.rollouts]
    pairs = zip(before, side.tokens, strict=True)
    return side.predict(tokens=[_join_behind(ids, tokens, restarts) for ids, tokens in pairs])


def _predict_leaked_in_order(packs: Packs, restarts: bool, side: Side) -> Tensor:
    # How many sequences a pack had is not known here, so each rollout is tried behind 0 to MOST_BEFORE of them.
    order = sorted(packs)
    ids_by_name = {name: ids for name, (_, ids) in packs.items()}
    pieces = []
    for number, (rollout, recorded) in enumerate(zip(side.rollouts, side.recorded.split(side.lengths), strict=True)):
        at = order.index((rollout.row["group"], rollout.row["sample"]))
        tried = []
        for count in range(min(MOST_BEFORE, at) + 1):
            before = [ids_by_name[name] for name in order[at - count : at]]
            tokens = _join_behind(before, side.tokens[number], restarts)
            (predicted,) = side.oracle.compute_logprobs([tokens], [side.law])
            tried.append(predicted)
        errors = [float(compute_residual(recorded, predicted).mean()) for predicted in tried]
        pieces.append(tried[errors.index(min(errors))])
    return torch.cat(pieces)


def _join_behind(before: Sequence[Tensor], tokens: Tokens, restarts: bool) -> Tokens:
    shift = sum(len(ids) for ids in before)
    positions = torch.cat([torch.arange(len(ids)) for ids in (*before, tokens.ids)]) if restarts else None
    return Tokens(torch.cat([*before, tokens.ids]), tokens.chosen + shift, tokens.begins + shift, positions)
