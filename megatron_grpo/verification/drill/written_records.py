"""What a run has written, checked after all its faults: figures, checkpoints, prompts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from megatron_grpo.batch.rollout_files import read_rollouts
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.loop_schema import SampledLoopConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.data.loader import PromptSampler
from megatron_grpo.observability.run_files import METRICS_FILE, read_lines
from megatron_grpo.preflight.load import check_overrides
from megatron_grpo.run.checkpoint_files import CheckpointError, verify_checkpoint
from megatron_grpo.run.checkpoints import CHECKPOINTS_FOLDER

SHOWN = 5  # numbers that a message names


def check_records(run_dir: Path) -> list[str]:
    """Check that no step, checkpoint or prompt was lost.

    Returns the problems. Where a run takes the lines of one file in order, its prompts are compared with that order.
    """
    steps = [row["step"] for row in read_lines(run_dir / METRICS_FILE)]
    problems = []
    if steps != [*range(1, len(steps) + 1)]:
        wrong = sorted({*range(1, max(steps) + 1)} ^ {*steps}) or sorted({*steps})
        problems.append(f"{METRICS_FILE} does not have every step once: {wrong[:SHOWN]}")
    for folder in sorted((run_dir / CHECKPOINTS_FOLDER).glob("step_*")):
        try:
            verify_checkpoint(folder)
        except (CheckpointError, RunError, OSError) as error:
            problems.append(f"checkpoint {folder.name} is damaged: {error}")
    config = check_overrides([f"run_dir={run_dir}"]).require()
    if steps and takes_lines_in_order(config):
        rows = sum(bool(line.strip()) for line in Path(config.data.train_path).read_bytes().splitlines())
        order = PromptSampler([rows], [1.0], shuffle=config.data.shuffle, seed=config.loop.seed)
        problems += compare_prompts(list_prompts(run_dir), [*order])
    return problems


def takes_lines_in_order(config: Config) -> bool:
    """True if steps take the lines of one file in order."""
    loop, data = config.loop, config.data
    if not isinstance(loop, SampledLoopConfig) or loop.use_dynamic_sampling or loop.async_grpo.enabled:
        return False
    is_plain = not (data.train_sets or data.streaming or data.curriculum.column or data.from_rollouts)
    return is_plain and data.train_path.endswith(".jsonl") and config.logger.rollouts == "all"


def list_prompts(run_dir: Path) -> list[int]:
    """List the rows of all groups of samples, by step."""
    groups = itertools.groupby(read_rollouts(run_dir), key=lambda row: (row["step"], row["group"], row["prompt_idx"]))
    return [prompt for (_, _, prompt), _ in groups]


def compare_prompts(prompts: Sequence[int], order: Sequence[int]) -> list[str]:
    """Compare prompts with the rows of the first epoch; returns the problems."""
    epoch, expected = prompts[: len(order)], order[: len(prompts)]
    missing = [prompt for prompt in expected if prompt not in {*epoch}]
    repeated = len(epoch) - len({*epoch})
    problems = [f"{len(missing)} prompts are lost, of rows {missing[:SHOWN]}"] if missing else []
    return [*problems, f"{repeated} prompts came twice"] if repeated else problems
