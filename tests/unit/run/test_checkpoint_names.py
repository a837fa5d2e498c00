"""checkpoints/best and latest stand for a checkpoint in every setting that takes one."""

from pathlib import Path

import pytest

from megatron_grpo import export, replay
from megatron_grpo.config.errors import ConfigError
from megatron_grpo.config.schema import Config, DataConfig
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.run.directory import record_start
from tests.support.config_problems import problems_of
from tests.unit.run.test_checkpointer import save_steps

KEYS = ("policy.model.path", "checkpointing.resume", "value.model.path")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with checkpoints after steps 2 (the best), 4 and 6."""
    config = Config(data=DataConfig(val_path="rows.jsonl"))
    (tmp_path / "run").mkdir()
    record_start(tmp_path / "run", config)
    save_steps(tmp_path / "run", {2: 0.9, 4: 0.1, 6: 0.5})
    return tmp_path / "run"


@pytest.mark.parametrize(("name", "step"), [("best", 2), ("latest", 6), ("newest", 6), ("step_4", 4)])
def test_every_setting_resolves_it(run_dir: Path, tmp_path: Path, name: str, step: int) -> None:
    config = compose_config(
        ["+exp=quickstart_ppo", f"run_dir={tmp_path}/new", *(f"{key}={run_dir}/checkpoints/{name}" for key in KEYS)]
    )
    expected = str(run_dir / "checkpoints" / f"step_{step}")
    assert (config.policy.model.path, config.checkpointing.resume, config.value.model.path) == (expected,) * 3
    assert replay.read_request([str(run_dir), f"step={name.removeprefix('step_')}"]).step == step


def test_a_reward_model_is_resolved_among_functions(run_dir: Path, tmp_path: Path) -> None:
    functions = f"env.addition.reward_funcs=[my.rewards.length,{run_dir}/checkpoints/best]"
    settings = ("env.addition.type=reward_functions", "checkpointing.metric_name=val_reward")
    config = compose_config(["+exp=quickstart", f"run_dir={tmp_path}/new", functions, *settings])
    assert config.env["addition"].reward_funcs == ["my.rewards.length", f"{run_dir}/checkpoints/step_2"]


def test_other_paths_stay_as_they_are(tmp_path: Path) -> None:
    (model := tmp_path / "checkpoints" / "best").mkdir(parents=True)
    for path in (str(model), "./models/best", "ORGANISATION/latest"):
        assert compose_config(["+exp=quickstart", f"policy.model.path={path}"]).policy.model.path == path


@pytest.mark.parametrize("key", KEYS)
def test_a_run_without_checkpoints_is_told_with_the_key(tmp_path: Path, key: str) -> None:
    record_start(tmp_path, Config(data=DataConfig(val_path="rows.jsonl")))
    folder = tmp_path / "checkpoints"
    problems = problems_of(["+exp=quickstart_ppo", f"run_dir={tmp_path}/new", f"{key}={folder}/best"])
    assert problems == {f"{key}={folder}/best": f"{folder} has no checkpoint"}
    problems = problems_of(
        ["+exp=quickstart_ppo", f"run_dir={tmp_path}/new", f"{key}={tmp_path}/no/checkpoints/latest"]
    )
    assert problems == {
        f"{key}={tmp_path}/no/checkpoints/latest": f"{tmp_path}/no is not the folder of a run: it has no config.yaml"
    }


def test_commands_tell_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_start(tmp_path, Config(data=DataConfig(val_path="rows.jsonl")))
    path = f"{tmp_path}/checkpoints/best"
    assert export.main([f"checkpoint={path}", f"output={tmp_path}/model"]) == 2
    assert replay.main([str(tmp_path), "step=best"]) == 2
    message = capsys.readouterr().err
    assert f"export: checkpoint={path}: {tmp_path}/checkpoints has no checkpoint" in message
    assert f"replay: step={path}: {tmp_path}/checkpoints has no checkpoint" in message


def test_a_run_goes_on_from_its_own_when_the_other_is_gone(run_dir: Path) -> None:
    """A job that is queued again has the command of its first start."""
    command = ["+exp=quickstart", f"run_dir={run_dir}", "checkpointing.resume=/gone/checkpoints/latest"]
    assert compose_config(command).checkpointing.resume == "/gone/checkpoints/latest"
    with pytest.raises(ConfigError, match="/gone is not the folder of a run"):
        compose_config(["+exp=quickstart", f"run_dir={run_dir}/new", command[-1]])
