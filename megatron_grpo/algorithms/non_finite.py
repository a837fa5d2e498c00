"""What happens when a reward, a log-probability or a gradient is NaN or infinite: the step stops and says for whom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron_grpo.config.errors import RunError
from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.observability.json_files import write_json
from megatron_grpo.rollouts.trajectory import Trajectory

_NAMED = 8
"""Prompts that the message names; the file names all."""


def require_finite_samples(trajectories: Sequence[Trajectory], run_dir: Path, step: int) -> None:
    """Check the rewards and the sampling log-probabilities of one generation batch.

    Raises:
        RunError: see `stop_step`.
    """
    for what, bad in (
        ("the reward", [t for t in trajectories if not math.isfinite(t.reward)]),
        (
            "a reward function's reward",
            [t for t in trajectories if not all(map(math.isfinite, t.reward_parts.values()))],
        ),
        ("a sampling log-probability", [t for t in trajectories if not all(map(math.isfinite, t.logprobs))]),
    ):
        if bad:
            stop_step(what, bad, run_dir, step)


def require_finite_tokens(
    batch: SequenceBatch, name: str, trajectories: Sequence[Trajectory], run_dir: Path, step: int
) -> None:
    """Check a per-token entry of the batch where the loss is taken.

    Args:
        batch: one sequence for each trajectory.
        name: key of batch.tokens.

    Raises:
        RunError: see `stop_step`.
    """
    wrong = ~batch.tokens[name].isfinite() & (batch.tokens["loss_mask"] > 0)
    if wrong.any():
        pieces = wrong.split(batch.lengths)
        bad = [trajectory for trajectory, piece in zip(trajectories, pieces, strict=True) if piece.any()]
        stop_step(f"an entry of {name}", bad, run_dir, step)


def stop_step(what: str, bad: Sequence[Trajectory], run_dir: Path, step: int) -> NoReturn:
    """Write the offending responses to run_dir/non_finite_step_N.json and end the run.

    Raises:
        RunError: always; names the prompts, as rows of the training data.
    """
    file = run_dir / f"non_finite_step_{step}.json"
    prompts = sorted({trajectory.prompt_idx for trajectory in bad})
    rows = [trajectory.to_row() for trajectory in bad]
    write_json(file, {"step": step, "what": what, "prompt_ids": prompts, "trajectories": rows})
    named = ", ".join(map(str, prompts[:_NAMED])) + (", ..." if len(prompts) > _NAMED else "")
    raise RunError(
        f"step {step}: {what} is not finite for {len(bad)} response(s) to prompt(s) {named}; "
        f"the weights were left as they were, and {file} has the responses"
    )
