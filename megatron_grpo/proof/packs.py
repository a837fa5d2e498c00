"""The packs in which a run's trainer computed the log-probabilities of a step, and what a leak between them gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_grpo.config.schema import Config
from megatron_grpo.data.rollout_files import read_recorded, rollouts_file
from megatron_grpo.data.step_batch import StepBatch, assign
from megatron_grpo.proof.evidence import Rollout
from megatron_grpo.proof.law import Tokens
from megatron_grpo.proof.suspects.side import Candidate, Side, Suspect
from megatron_grpo.trainer.group import cost_of, planned
from megatron_grpo.weights.shape import ModelShape

Packs = Mapping[tuple[int, int], list[Tensor]]
"""By group and sample of a rollout: token ids of the sequences before it in its pack, each [tokens], int64."""


def read_packs(run_dir: Path, step: int, config: Config, shape: ModelShape) -> Packs:
    """The sequences before each rollout of a step in its pack; empty without packing.

    Raises:
        ValueError: the record cannot be read.
    """
    if not config.policy.packing:
        return {}
    _, groups = read_recorded(rollouts_file(run_dir, step))
    trajectories = [trajectory for group in groups for trajectory in group]
    batch, cost = StepBatch.of_outcomes(config, [trajectory.outcome for trajectory in trajectories]), cost_of(shape)
    batch.shards = assign(config, batch, cost)
    tokens = config.policy.logprob_microbatch_tokens or config.policy.microbatch_tokens
    before: dict[tuple[int, int], list[Tensor]] = {}
    for plan in planned(config.policy, cost, batch, np.arange(len(batch)), tokens):
        for pack in plan:
            ids = [torch.from_numpy(trajectories[number].token_ids).long() for number in pack]
            for index, number in enumerate(pack):
                trajectory = trajectories[number]
                before[trajectory.group, trajectory.sample] = ids[:index]
    return before


def packing_suspects(packs: Packs, side: Side) -> Iterator[Candidate]:
    """Sequences of a pack that see the sequences before them."""
    if not any(packs.values()):
        return
    key = "policy.packing=false shows whether packing is the reason; policy.parallel.context, the attention backend"
    for restarts, words in ((True, "with positions that begin anew"), (False, "with positions that go on")):
        text = f"lets packed sequences see those before them in the pack, {words}"
        yield Suspect("packed_leak", "layout", text, key), partial(_leaked, packs, restarts)


def _leaked(packs: Packs, restarts: bool, side: Side) -> Tensor:
    pairs = zip(side.rollouts, side.tokens, strict=True)
    return side.predict(tokens=[_behind(packs, rollout, tokens, restarts) for rollout, tokens in pairs])


def _behind(packs: Packs, rollout: Rollout, tokens: Tokens, restarts: bool) -> Tokens:
    row: Mapping[str, Any] = rollout.row
    before: Sequence[Tensor] = packs.get((row["group"], row["sample"]), [])
    shift = sum(len(ids) for ids in before)
    positions = torch.cat([torch.arange(len(ids)) for ids in (*before, tokens.ids)]) if restarts else None
    return Tokens(torch.cat([*before, tokens.ids]), tokens.places + shift, tokens.begins + shift, positions)
