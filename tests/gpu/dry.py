"""What tests of GPUs do in a dry run (`benchmarks/gpu_check.py --dry`), where there is none."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # a machine with little more than torch lacks what a rank needs, and imports this too
    from tests.parity.ranks import Layout
    from tests.support.tiny_models import TinyModel

DRY = "GPU_CHECK_DRY"
"""Environment variable of the tests' processes in a dry run."""


def end_dry(layout: Layout, tiny: TinyModel, **policy: Any) -> None:
    """End a dry run after two steps of every rank on tensors without numbers, decided as on CUDA.

    Args:
        policy: further keys of policy.*, in bfloat16.
    """
    if DRY not in os.environ:
        return
    from megatron_grpo.config.schema import Config, ModelConfig, PolicyConfig
    from megatron_grpo.planning.dry_run import run_dry

    model = ModelConfig(path=str(tiny.path))
    config = Config(policy=PolicyConfig(model=model, parallel=layout.parallel, precision="bfloat16", **policy))
    for rank in range(layout.ranks):
        run_dry(config, tiny.shape, rank)
    pytest.skip(f"dry: two steps of {layout.ranks} ranks on tensors without numbers")
