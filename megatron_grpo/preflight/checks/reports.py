"""What a run is to report, and whether it can."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config


def report_problems(config: Config) -> Iterator[Problem]:
    """Reports that need something that is switched off."""
    if config.logger.log_completions and config.logger.rollouts == "off":
        text = "needs the rollouts to be written; set logger.rollouts to sample or all"
        yield Problem("logger.log_completions=True", text)
