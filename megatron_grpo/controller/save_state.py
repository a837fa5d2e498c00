"""How far a run has come: the driver's part of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NotRequired, TypedDict

if TYPE_CHECKING:
    from megatron_grpo.config.schema import EarlyStopConfig


class EarlyStopState(TypedDict):
    """What the decision to stop early depends on; part of the checkpoint."""

    best: float | None
    """Best value so far; None before the first validation."""
    last: float | None
    """Value of the latest validation; None before the first."""
    waited: int
    """Validations in a row that did not improve on the best."""


def default_early_stop_state() -> EarlyStopState:
    """The state before the first validation."""
    return EarlyStopState(best=None, last=None, waited=0)


def observe(state: EarlyStopState, metrics: Mapping[str, float], config: EarlyStopConfig) -> None:
    """Take a validation into account; one without the metric (no response could be judged) counts for nothing."""
    if not config.enabled or config.metric_name not in metrics:
        return
    value = metrics[config.metric_name]
    sign = 1.0 if config.higher_is_better else -1.0
    improved = state["best"] is None or sign * (value - state["best"]) > config.min_delta
    if improved:
        state["best"] = value
    state["last"] = value
    state["waited"] = 0 if improved else state["waited"] + 1


def reason_to_stop(state: EarlyStopState, config: EarlyStopConfig) -> str | None:
    """Why training should end now, for people; None: it should go on."""
    if not config.enabled or state["last"] is None:
        return None
    name, last = config.metric_name, state["last"]
    if config.threshold is not None:
        reached = last >= config.threshold if config.higher_is_better else last <= config.threshold
        if reached:
            return f"{name} is {last:g}, which reaches early_stop.threshold={config.threshold:g}"
    if config.patience is not None and state["waited"] >= config.patience:
        return f"{name} has not improved on {state['best']:g} for {state['waited']} validations"
    return None


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
