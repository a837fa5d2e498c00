"""What the rollouts of a generation batch have in common, and the seeds that tell their responses apart."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field

from megatron_grpo.data.responses import SamplingSettings
from megatron_grpo.data.scores import TrainerState


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """What the rollouts of one generation batch have in common."""

    samples_per_prompt: int
    settings: SamplingSettings
    run_seed: int
    step: int
    """Number of the generation batch: part of every sample's seed."""
    max_total_sequence_length: int
    """Tokens of prompt, responses and observations together."""
    max_turns: int = 1
    """Most responses of one rollout."""
    timeout_s: float
    """Deadline of an attempt at a rollout, and of a second attempt at its scoring."""
    trainer_state: TrainerState = field(default_factory=TrainerState)
    """How far the run is, for reward functions."""


def sample_seed(run_seed: int, step: int, prompt_idx: int, sample: int, turn: int = 0) -> int:
    """Seed of one response, from what identifies it alone: a resumed run or another layout draws equal tokens.

    Returns:
        An integer in [0, 2^62).
    """
    identity = struct.pack("<4q", run_seed, step, prompt_idx, sample) + (struct.pack("<q", turn) if turn else b"")
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little") >> 2
