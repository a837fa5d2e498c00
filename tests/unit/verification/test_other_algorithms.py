"""Runs whose steps the doctor and a replay cannot examine are refused, with the reason."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_grpo import doctor, replay
from megatron_grpo.config.compose import compose_typed
from megatron_grpo.config.errors import ConfigError
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.run.directory import record_start
from megatron_grpo.verification.replay.replayed_step import _require_replayable
from tests.support.coming_layouts import SHAPE


@pytest.mark.parametrize("algorithm", ["kto", "dpo", "sft", "reward_model"])
def test_the_doctor_refuses_runs_that_sample_nothing(
    algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_start(tmp_path, compose_typed([f"+exp=quickstart_{algorithm}", f"run_dir={tmp_path}"]).require())
    assert doctor.main([str(tmp_path)]) == 2
    assert f"algorithm={algorithm} learns from rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "arguments", "subject"), [(doctor, [], "the doctor"), (replay, ["step=1"], "a replay")]
)
def test_prompts_with_images_are_refused_before_the_record_is_read(
    command: Any, arguments: list[str], subject: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_start(tmp_path, compose_typed(["+exp=quickstart_vision", f"run_dir={tmp_path}"]).require())
    assert command.main([str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert "configuration has 1 problem" in error
    assert f"data.image_key=image  {subject} does not compute prompts with images (data.image_key) yet" in error


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("+exp=quickstart_chord",), "its loss has more than the samples that are recorded"),
        (("+exp=quickstart_kto",), "its loss has more than the samples that are recorded"),
        (("+exp=quickstart_self_distillation",), "its loss has more than the samples that are recorded"),
        (("+exp=quickstart_distillation",), "its loss has more than the samples that are recorded"),
        (("+exp=quickstart", "+variant=high_entropy"), "entropies are not recorded"),
        (("+exp=quickstart", "+variant=otb"), None),
        (("+exp=quickstart", "+variant=clip_cov"), None),
    ],
)
def test_a_replay_refuses_losses_of_which_it_has_a_part(overrides: tuple[str, ...], reason: str | None) -> None:
    trajectories = [SimpleNamespace(token_ids=np.array([1, 2]))]
    record: Any = SimpleNamespace(config=compose_config(overrides), trajectories=trajectories)
    settings: Any = SimpleNamespace(shape=SHAPE)
    if reason is None:
        _require_replayable(record, settings)
        return
    with pytest.raises(ConfigError, match=reason):
        _require_replayable(record, settings)
