"""When training ends before its last step: a validation metric that is good enough or no longer improves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypedDict

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
