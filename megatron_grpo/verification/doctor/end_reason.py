"""Why a run ended early, as its summary says. Without torch, because the doctor reads it first."""

from __future__ import annotations

from pathlib import Path

from megatron_grpo.config.outside_files import read_json
from megatron_grpo.observability.run_files import SUMMARY_FILE


def read_end_reason(run_dir: Path) -> str | None:
    """Read why a run ended early; None: not known, ValueError: damaged."""
    file = run_dir / SUMMARY_FILE
    if not file.exists():
        return None
    try:
        reason = read_json(file).get("reason")
    except AttributeError as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    return reason if isinstance(reason, str) else None


NOT_SERVED = ("is not served:", "must not serve:")
"""Texts in a run's end reason by which a check of the weights refused a refit."""


def read_refused_refit(run_dir: Path) -> str | None:
    """Read why a refused refit ended the run; None: none did.

    Raises:
        ValueError: the summary of the run is damaged; the message names the file.
    """
    reason = read_end_reason(run_dir) or ""
    return reason if any(text in reason for text in NOT_SERVED) else None
