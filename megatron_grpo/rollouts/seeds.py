"""The common settings of the rollouts of a generation batch, the seeds of their responses, and their failures."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_grpo.batch.generation_requests import SamplingSettings
from megatron_grpo.batch.trajectory import Outcome
from megatron_grpo.config.errors import SamplingError
from megatron_grpo.data.scores import TrainerState


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """The common settings of the rollouts of one generation batch."""

    samples_per_prompt: int
    settings: SamplingSettings
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


def sample_seed(run_seed: int, step: int, prompt_idx: int, sample: int, turn: int = 0) -> int:
    """Seed of one response, which depends only on its identity, so that a resume or another layout draws equal tokens.

    Returns:
        An integer in [0, 2^62).
    """
    identity = struct.pack("<4q", run_seed, step, prompt_idx, sample) + (struct.pack("<q", turn) if turn else b"")
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little") >> 2


REASONS_SHOWN = 3


class RolloutFailure(Exception):  # noqa: N818 - a status of a rollout, not an error of the run
    """One rollout failed for the reason in the message; other rollouts continue."""


def require_few_failures(outcomes: Sequence[Outcome], max_failed_fraction: float) -> None:
    """Raise SamplingError with the reasons if more than this fraction of rollouts failed."""
    failed = [one for one in outcomes if one.failure is not None]
    if len(failed) <= max_failed_fraction * len(outcomes):
        return
    raise SamplingError(
        f"{len(failed)} of {len(outcomes)} rollouts failed, more than rollouts.max_failed_fraction="
        f"{max_failed_fraction:g} allows: {reasons(failed)}"
    )


def reasons(failed: Sequence[Outcome]) -> str:
    """Reasons why rollouts failed, most frequent first, each with the data row of one example."""
    rows: dict[str, int] = {}
    for one in failed:
        rows.setdefault(str(one.failure), one.prompt_idx)
    counted = Counter(str(one.failure) for one in failed).most_common()
    shown = "; ".join(f"{count} x {reason}, row {rows[reason]}" for reason, count in counted[:REASONS_SHOWN])
    return shown + (f"; and {len(counted) - REASONS_SHOWN} other reasons" if len(counted) > REASONS_SHOWN else "")
