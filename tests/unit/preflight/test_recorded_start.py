"""`train run_dir=X` takes the configuration that the run in X recorded, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_grpo.preflight import load
from megatron_grpo.preflight.load import check_overrides, compose_config, find_recorded_run
from megatron_grpo.run.directory import record_start


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run of PPO with settings of its own."""
    folder = tmp_path / "lr=0.1" / "run 1.5"
    folder.mkdir(parents=True)
    settings = ["ppo.max_num_steps=17", "ppo.seed=5", "checkpointing.save_period=3"]
    record_start(folder, compose_config(["+exp=quickstart_ppo", f"run_dir={folder}", *settings]))
    monkeypatch.setattr(load, "_check_machine", lambda checked, rewards: None)
    return folder


def test_without_further_arguments_it_goes_on_as_it_began(run_dir: Path) -> None:
    checked = check_overrides([f"run_dir={run_dir}"])
    config = checked.require()
    assert (config.algorithm, config.name, config.run_dir) == ("ppo", "quickstart_ppo", str(run_dir))
    assert (config.ppo.max_num_steps, config.ppo.seed, config.checkpointing.save_period) == (17, 5, 3)
    (remark,) = checked.remarks
    assert remark.text == f"resumes with the configuration of its last start, {run_dir}/config.yaml, unchanged"


def test_changes_are_named(run_dir: Path) -> None:
    checked = check_overrides([f"run_dir={run_dir}/", "ppo.max_num_steps=19", "policy.optimizer.lr=0.5"])
    config = checked.require()
    assert (config.ppo.max_num_steps, config.policy.optimizer.lr, config.ppo.seed) == (19, 0.5, 5)
    assert checked.remarks[0].text.endswith(", and ppo.max_num_steps=19 policy.optimizer.lr=0.5")


def test_mistakes_in_changes_are_problems(run_dir: Path) -> None:
    for change in ("ppo.max_num_step=9", "ppo.max_num_steps=many"):
        assert check_overrides([f"run_dir={run_dir}", change]).problems[0].key == change.partition("=")[0]
    (run_dir / "config.yaml").write_text("policy: [")
    assert "is not valid YAML" in check_overrides([f"run_dir={run_dir}"]).problems[0].text


def test_a_recipe_composes_as_ever(run_dir: Path, tmp_path: Path) -> None:
    assert find_recorded_run(["+exp=quickstart_ppo", f"run_dir={run_dir}"]) is None
    assert find_recorded_run(["job=a.yaml", f"run_dir={run_dir}"]) is None
    assert find_recorded_run([f"run_dir={tmp_path}/new"]) is None
    assert find_recorded_run([f"run_dir={run_dir}"]) == run_dir
