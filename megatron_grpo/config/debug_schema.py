"""The keys of the debug modes: one half of a run without the other."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_grpo.config.section import Section


@dataclass(kw_only=True)
class DebugConfig(Section):
    """One half of a run without the other; docs/debugging.md. What both halves meet in is `logger.rollouts=all`, which
    records every step."""

    rollouts_from: str | None = None
    """Folder of a run that recorded its rollouts, or its folder rollouts: train on these, step by step, instead of
    sampling. No engine, no environment and no refit is started, and no prompt is read. The run ends with the recording
    if that has fewer steps. null: sample."""

    train: bool = True
    """False: sample and score with the weights of the model folder, and train nothing: no rank is started, no refit and
    no checkpoint is made. Rollouts, rewards, metrics and validations are written as ever."""
