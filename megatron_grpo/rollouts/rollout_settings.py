"""The common settings of the rollouts of a generation batch, and the seeds of their responses."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field

from megatron_grpo.batch.generation_requests import SamplingSettings
from megatron_grpo.data.scores import TrainerState


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """The common settings of the rollouts of one generation batch.

    Example:
        RolloutSettings(
            samples_per_prompt=8,
            sampling=SamplingSettings(max_new_tokens=512, temperature=1.0),
            run_seed=42,
            step=7,
            max_total_sequence_length=1024,
            timeout_s=600.0,
        )
    """

    samples_per_prompt: int
    sampling: SamplingSettings
    run_seed: int
    step: int
    """Number of the generation batch, which is part of every sample's seed."""
    max_total_sequence_length: int
    """Most tokens of prompt, responses and observations together."""
    max_turns: int = 1
    """Most responses of one rollout."""
    timeout_s: float
    """Deadline in seconds of an attempt at a rollout, and of a second attempt at scoring it."""
    trainer_state: TrainerState = field(default_factory=TrainerState)
    """Progress of the run, for reward functions."""


def compute_sample_seed(run_seed: int, step: int, prompt_idx: int, sample: int, turn: int = 0) -> int:
    """Compute the seed of one response, in [0, 2^62).

    It depends only on the response's identity, so that a resume or another layout draws equal tokens.
    """
    # The first turn is not part of the identity: its seed is that of a rollout with a single turn.
    identity = struct.pack("<4q", run_seed, step, prompt_idx, sample) + (struct.pack("<q", turn) if turn else b"")
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little") >> 2
