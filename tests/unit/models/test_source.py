"""A model's folder is on every machine that needs it, and a machine without it says so."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import Config, GenerationConfig
from megatron_grpo.generation.engine import VllmEngine
from megatron_grpo.generation.engine_arguments import VllmSettings
from megatron_grpo.models.source import require_folder
from megatron_grpo.trainer.actor import RankActor, RankSettings


def test_a_folder_with_a_model_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    require_folder(str(tmp_path))


def test_ranks_and_engines_of_a_machine_without_the_folder_name_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # a rank changes it
    monkeypatch.setattr("ray.get_gpu_ids", list)
    monkeypatch.setattr(RankActor, "import_packages", lambda _: None)
    shape: Any = None
    rank = RankSettings(config=Config().policy, shape=shape, folder=str(tmp_path), decay_steps=1)
    engine = VllmSettings(
        index=0,
        model_path=str(tmp_path),
        config=GenerationConfig(),
        precision="bfloat16",
        max_total_sequence_length=8,
    )
    expected = rf"^{socket.gethostname()} has no model in {tmp_path}: .*HF_HOME"
    with pytest.raises(RunError, match=expected):
        RankActor("policy rank 0", 0, 1).start(rank, ("here", 1))
    with pytest.raises(RunError, match=expected):
        asyncio.run(VllmEngine(engine).start())
