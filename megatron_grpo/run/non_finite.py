"""What happens when a reward, a log-probability or a gradient is NaN or infinite: the step stops and says for whom."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from megatron_grpo.config.errors import RunError, SamplingError
from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.data.trajectory import Trajectory
from megatron_grpo.observability.json_files import write_json

LARGEST_FLOAT32 = torch.finfo(torch.float32).max
_NAMED = 8
"""Prompts that the message names; the file names all."""


def require_finite_samples(
    trajectories: Sequence[Trajectory], run_dir: Path, step: int, data: str = "training"
) -> None:
    """Check the rewards and the sampling log-probabilities of one generation batch.

    Args:
        trajectories: of the batch.
        run_dir: where the offending ones are written.
        step: number of the step, or of the last one before a validation.
        data: which data the prompts are rows of, for the message.

    Raises:
        SamplingError: a reward is not finite; see `stop_step`.
        RunError: a log-probability is not.
    """
    logprobs = [t for t in trajectories if not all(map(math.isfinite, t.logprobs))]
    if logprobs:  # the weights themselves may be broken
        stop_step("a sampling log-probability", logprobs, run_dir, step, data)
    for what, bad in (
        ("the reward", [t for t in trajectories if t.reward is not None and not _fits_float32(t.reward)]),
        (
            "a reward function's reward",
            [t for t in trajectories if not all(map(_fits_float32, t.reward_parts.values()))],
        ),
    ):
        if bad:
            stop_step(what, bad, run_dir, step, data, error=SamplingError)


def _fits_float32(value: float) -> bool:
    """Whether it is finite, also as the float32 that is computed with."""
    return abs(value) <= LARGEST_FLOAT32  # false for NaN


def require_finite_tokens(
    batch: SequenceBatch, name: str, looked_at: Tensor, trajectories: Sequence[Trajectory], run_dir: Path, step: int
) -> None:
    """Check a per-token entry of the batch.

    Args:
        batch: one sequence for each trajectory.
        name: key of batch.tokens.
        looked_at: tokens whose entry matters, [sum(batch.lengths)], bool.

    Raises:
        RunError: see `stop_step`.
    """
    wrong = ~batch.tokens[name].isfinite() & looked_at
    if wrong.any():
        pieces = wrong.split(batch.lengths)
        entries = batch.tokens[name].split(batch.lengths)
        wrong_ones = [index for index, piece in enumerate(pieces) if piece.any()]
        rows = {name: [entries[index].tolist() for index in wrong_ones]}
        stop_step(f"an entry of {name}", [trajectories[index] for index in wrong_ones], run_dir, step, more=rows)


def stop_step(
    what: str,
    bad: Sequence[Trajectory],
    run_dir: Path,
    step: int,
    data: str = "training",
    more: Mapping[str, Sequence[object]] | None = None,
    error: type[RunError] = RunError,
) -> NoReturn:
    """Write the offending responses to run_dir/non_finite_step_N.json and end the run.

    In the file the values are the strings NaN, Infinity and -Infinity: JSON has no such numbers.

    Args:
        more: further entries of the file by name, an item for each response.
        error: what to raise.

    Raises:
        RunError: always; names the prompts, as rows of the data.
    """
    file = run_dir / f"non_finite_step_{step}.json"
    prompts = sorted({trajectory.prompt_idx for trajectory in bad})
    rows = [trajectory.to_row() for trajectory in bad]
    found = {"step": step, "what": what, "data": data, "prompt_ids": prompts, "trajectories": rows, **(more or {})}
    write_json(file, json.loads(json.dumps(found), parse_constant=str))
    named = ", ".join(map(str, prompts[:_NAMED])) + (", ..." if len(prompts) > _NAMED else "")
    raise error(
        f"step {step}: {what} is not finite for {len(bad)} response(s) to prompt(s) {named} of the {data} data; "
        f"no weights were changed by it and nothing of this step was saved; {file} has the responses"
    )
