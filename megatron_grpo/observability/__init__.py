"""What a run reports: timers, metrics, plots, progress, the summary, and its rollouts for whoever reads them later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_grpo.data.rollout_files import read_rollouts as read_rollouts


def __getattr__(name: str) -> Any:
    """Import what this folder offers to the outside only when it is asked for: most users of it need no numpy."""
    if name == "read_rollouts":
        from megatron_grpo.data.rollout_files import read_rollouts

        return read_rollouts
    raise AttributeError(f"module {__name__} has no attribute {name}")
