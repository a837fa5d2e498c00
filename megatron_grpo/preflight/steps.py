"""How many steps a run has that max_num_steps=-1 leaves to its epochs: known once its rows are counted."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.prompt_files import training_rows
from megatron_grpo.preflight.recording import recorded_max_num_steps

OPEN = 2**31 - 1
"""What stands in the place of -1 until the rows are counted: more steps than any run has."""


def leave_steps_open(config: Config) -> None:
    """Put a number in the place of -1 that checks of a configuration by itself can compare with."""
    if config.loop.max_num_steps == -1:
        config.loop.max_num_steps = OPEN


def settle_steps(config: Config) -> Iterator[Problem]:
    """Write the steps of max_num_epochs passes over the rows in the place of -1, with debug.rollouts_from those of the
    recorded run; what keeps it from that.

    Rows whose prompts turn out to be too long make the run shorter; dynamic sampling, which takes further prompts for a
    step, too.
    """
    if config.loop.max_num_steps != OPEN:
        return
    if not config.generates:
        config.loop.max_num_steps = recorded_max_num_steps(config)
        return
    rows = training_rows(config)
    if rows is None:
        text = "needs rows that can be counted, and they are streamed; give a number of steps"
        yield Problem(f"{config.algorithm}.max_num_steps=-1", text)
        return
    per_epoch = rows // config.prompts_per_generation_batch
    config.loop.max_num_steps = max(per_epoch * config.loop.max_num_epochs, 1)
