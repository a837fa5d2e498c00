"""Which model and problems a configuration's `prepare.name` names."""

from __future__ import annotations

from pathlib import Path

from megatron_grpo.prepare.addition import prepare as prepare_addition
from megatron_grpo.prepare.conversations import WARM_UP, prepare_conversations


def prepare(name: str, folder: str | Path) -> None:
    """Make a model and its data, unless they are there already.

    Args:
        name: which of PREPARED_MODELS.
        folder: folder to make; replaced when another recipe made it.
    """
    (prepare_conversations if name in WARM_UP else prepare_addition)(name, folder)
