"""The replay that the doctor does by itself when a run measured more than one rank computes."""

from pathlib import Path

import pytest

from megatron_grpo.run.directory import load_run_config
from megatron_grpo.verification.doctor import recorded_figures
from megatron_grpo.verification.doctor.recorded_figures import replay_in_layout
from megatron_grpo.verification.replay.compare import Comparison, Difference
from tests.support.recorded_run import make_recorded_run


def test_a_layout_is_compared_with_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = make_recorded_run(tmp_path, policy={"parallel": {"tensor": 2}, "packing": True})
    config = load_run_config(run_dir, [])
    replay = replay_in_layout(run_dir, 1, config, timeout_s=120)
    assert replay.command.endswith(f"{run_dir} step=1 policy.parallel.tensor=1 policy.packing=false")
    assert not replay.differs
    assert "agree here in every quantity" in replay.text
    changed = Difference("hidden states", 0.5, 1e-4, "layers.2.mlp", sequence=0, token=3, token_id=7)
    monkeypatch.setattr(recorded_figures, "replay_step", lambda *_, **__: None)
    monkeypatch.setattr(recorded_figures, "compare", lambda *_: Comparison("one", "other", [changed]))
    differing = replay_in_layout(run_dir, 1, config, timeout_s=120)
    assert differing.differs
    assert differing.text.endswith("differ: hidden states of layer 2, first in layers.2.mlp")


def test_what_cannot_be_replayed_here_is_told(tmp_path: Path) -> None:
    run_dir = make_recorded_run(tmp_path, policy={"parallel": {"data": 64}})
    replay = replay_in_layout(run_dir, 1, load_run_config(run_dir, []), timeout_s=120)
    assert "64 ranks are more than this machine has room for" in replay.text
    (tmp_path / "small").mkdir()
    small = make_recorded_run(tmp_path / "small", policy={"parallel": {"data": 2}})
    (small / "rollouts" / "step_1.parquet").unlink()
    replay = replay_in_layout(small, 1, load_run_config(small, []), timeout_s=120)
    assert "could not be done here: step=1 has no rollouts" in replay.text
