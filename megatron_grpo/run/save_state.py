"""How far a run has come: the driver's part of a checkpoint."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from megatron_grpo.run.early_stop import EarlyStopState, default_early_stop_state


class GRPOSaveState(TypedDict):
    """Progress of a GRPO run."""

    consumed_samples: int
    """Prompts used so far."""
    current_step: int
    """Steps in the current epoch."""
    current_epoch: int
    """Epochs of the training data that are complete."""
    total_steps: int
    """Steps so far; also the policy's weight version."""
    generation_batches: int
    """Batches of prompts sampled so far; more than steps with dynamic sampling."""
    total_valid_tokens: int
    """Tokens that losses were taken over."""
    early_stop: EarlyStopState
    """What decides whether training ends early."""
    val_step: NotRequired[int]
    """Steps before the last validation."""
    val_reward: NotRequired[float | None]
    """Mean reward of the last validation; None: no response got one."""
    val_accuracy: NotRequired[float | None]
    """Accuracy of the last validation; None: the environment cannot say."""


class PPOSaveState(GRPOSaveState):
    """Progress of a PPO run: its loop is that of GRPO."""


def default_grpo_save_state() -> GRPOSaveState:
    """A run that has not begun."""
    return GRPOSaveState(
        consumed_samples=0,
        current_step=0,
        current_epoch=0,
        total_steps=0,
        generation_batches=0,
        total_valid_tokens=0,
        early_stop=default_early_stop_state(),
    )
