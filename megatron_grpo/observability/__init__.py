"""Reports of a run: times, metrics, trackers, plots, progress, summary, report page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_grpo.batch.rollout_files import read_rollouts as read_rollouts


def __getattr__(name: str) -> Any:
    # Imported when it is first used: other modules of this folder need no NumPy.
    if name == "read_rollouts":
        from megatron_grpo.batch.rollout_files import read_rollouts

        return read_rollouts
    raise AttributeError(f"module {__name__} has no attribute {name}")
