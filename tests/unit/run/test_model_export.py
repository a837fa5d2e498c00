"""A checkpoint that a run begins from is exported once, within a deadline."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_grpo.config.errors import RunError
from megatron_grpo.models.checkpoint_model import POLICY_FOLDER
from megatron_grpo.run import model_export


def test_an_export_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step_3"
    (checkpoint / POLICY_FOLDER).mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("policy: {model: {path: some/model}}")
    monkeypatch.setattr(model_export, "EXPORT_S", 0.001)
    with pytest.raises(RunError, match=r"^policy\.model\.path=.*: the export of .*step_3 did not end within 0\.001 s"):
        model_export.export_checkpoint_model(str(checkpoint), "policy.model.path")
