"""Whose a run's folder is."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from megatron_grpo.config.errors import ConfigError, Problem, RunError
from megatron_grpo.config.loop_schema import LOOPS
from megatron_grpo.preflight.load import check_config, compose_config
from megatron_grpo.run.directory import (
    compare_with_last_start,
    is_in_use,
    load_run_config,
    lock_run_directory,
    record_start,
)

RECORDED: dict[str, Any] = yaml.safe_load((Path(__file__).parents[2] / "data" / "recorded_configs.yaml").read_text())


def test_what_a_run_was_started_with_and_what_changed_since(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with lock_run_directory(str(folder)):
        first = compose_config(["+exp=quickstart", "run_dir=here"])
        assert compare_with_last_start(folder, first) == []
        record_start(folder, first)
        assert compare_with_last_start(folder, first) == []
        faster = compose_config(["+exp=quickstart", "run_dir=here", "policy.optimizer.lr=0.5"])
        assert compare_with_last_start(folder, faster) == ["policy.optimizer.lr: 0.001 -> 0.5"]
    assert (tmp_path / "latest").resolve() == folder


@pytest.mark.parametrize("algorithm", RECORDED)
def test_a_folder_of_an_earlier_version_goes_on(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old config.yaml with the sections of all algorithms is read with equal settings."""
    monkeypatch.setenv("HOME", "/home/user")
    arguments, values = RECORDED[algorithm]["arguments"], RECORDED[algorithm]["config"]
    file, config = tmp_path / "config.yaml", compose_config(arguments)
    file.write_text(yaml.safe_dump(values))
    assert load_run_config(tmp_path, [], is_trusted=True) == config
    assert compare_with_last_start(tmp_path, config) == []
    changed = load_run_config(tmp_path, ["grpo.val_period=77"], is_trusted=True)
    assert compare_with_last_start(tmp_path, changed) == [f"{algorithm}.val_period: {config.loop.val_period} -> 77"]
    assert check_config(changed).conflicts == set()
    record_start(tmp_path, changed)
    recorded = yaml.safe_load(file.read_text())
    foreign_loops = {*LOOPS} - {algorithm}
    assert foreign_loops.isdisjoint(recorded)
    of_value = set() if algorithm == "ppo" else {"value", "value_loss_fn"}
    assert set(values) - set(recorded) == foreign_loops - {"kto"} | of_value | {"distillation", "teacher", "teachers"}
    assert load_run_config(tmp_path, [], is_trusted=True) == changed


def test_another_run_is_refused_once_the_first_has_started(tmp_path: Path) -> None:
    config = compose_config(["+exp=quickstart", "data.train_path=other.jsonl"])
    assert compare_with_last_start(tmp_path, config) == [], "looking alone makes the folder nobody's"
    record_start(tmp_path, compose_config(["+exp=quickstart"]))
    with pytest.raises(ConfigError, match=r"holds another run: its data\.train_path is .*choose another run_dir"):
        compare_with_last_start(tmp_path, config)


def test_a_run_that_trains_and_one_that_does_not_are_two(tmp_path: Path) -> None:
    record_start(tmp_path, compose_config(["+exp=quickstart"]))
    sampling = compose_config(["+exp=quickstart", "debug.train=false"])
    with pytest.raises(ConfigError, match=r"holds another run: its debug\.train is True, this one's is False"):
        compare_with_last_start(tmp_path, sampling)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", r"config\.yaml is empty"),
        (b"policy: [", r"config\.yaml is not valid YAML: .*expected"),
        (b"- 1\n- 2\n", r"config\.yaml is damaged: it does not hold the configuration of a run"),
        (b"policy: {precision: float32}", r"config\.yaml is damaged: it does not hold the configuration of a run"),
        (b"\xff\xfe\x00", r"config\.yaml is damaged: it is not UTF-8 text"),
        (b"[" * 5000, r"config\.yaml is not valid YAML"),
        (b"a: \x00", r"config\.yaml is not valid YAML: .*(special|control) characters"),
    ],
)
def test_a_broken_configuration_is_told(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=text) as raised:
        compare_with_last_start(tmp_path, compose_config(["+exp=quickstart"]))
    assert f"  run_dir={tmp_path}  " in str(raised.value)
    assert "choose another run_dir" in str(raised.value)
    assert str(raised.value).count("\n") == 1


def test_a_configuration_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"config\.yaml cannot be read: Is a directory"):
        compare_with_last_start(tmp_path, compose_config(["+exp=quickstart"]))


def test_a_folder_has_one_driver_at_a_time(tmp_path: Path) -> None:
    first = lock_run_directory(str(tmp_path))
    with first, pytest.raises(RunError, match="is in use by another run"), lock_run_directory(str(tmp_path)):
        pass
    with lock_run_directory(str(tmp_path)) as folder:
        assert folder == tmp_path


def test_a_start_that_fails_leaves_no_folder_behind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError), lock_run_directory(str(tmp_path / "outputs" / "run")):
        raise ConfigError([Problem("key", "is wrong")])
    assert list(tmp_path.iterdir()) == []
    with lock_run_directory(str(tmp_path / "run")) as folder:
        record_start(folder, compose_config(["+exp=quickstart"]))
    assert {entry.name for entry in folder.iterdir()} == {".lock", "config.yaml"}


@pytest.mark.slow
def test_the_folder_keeps_the_template_of_the_prompts_for_exports(tmp_path: Path) -> None:
    file, other_file = tmp_path / "own.jinja", tmp_path / "other.jinja"
    file.write_text("{{ messages[0].content }} \u00e9\n", encoding="utf-8")
    other_file.write_text("{{ messages[0].content }}")
    (tmp_path / "tools.json").write_text('[{"type": "function"}]')
    script = SimpleNamespace(chat_template={"default": "{{ messages }}", "tool_use": "{{ tools }}"})
    setting, run = f"data.chat_template={file}", tmp_path / "run"
    run.mkdir()
    saved_template = run / "chat_template.jinja"
    base = ["+exp=quickstart", "data.apply_chat_template=true"]

    def template(*overrides: str, tokenizer: Any = None) -> str | None:
        record_start(run, compose_config([*base, *overrides]), tokenizer)
        return saved_template.read_text(encoding="utf-8") if saved_template.exists() else None

    assert template() is None
    assert template(setting) == file.read_text(encoding="utf-8")
    assert template(setting, "data.apply_chat_template=false") is None, "a resume without it has the folder's"
    assert template(tokenizer=script) == "{{ messages }}"
    assert template(f"data.tools={tmp_path / 'tools.json'}", tokenizer=script) == "{{ tools }}"
    assert template(setting, tokenizer=script) == file.read_text(encoding="utf-8")
    two = [setting, "+env.game.type=countdown", f"+data.tasks.game.chat_template={other_file}"]
    assert template(*two) is None, "tasks have different ones"
    assert template(*two, "+data.tasks.game.apply_chat_template=false") is not None


def test_the_folder_of_a_reward_model_keeps_the_form_of_its_conversations(tmp_path: Path) -> None:
    """An export scores conversations with it, whatever happens to the files that the settings name."""
    (tmp_path / "tools.json").write_text('[{"name": "f"}]')
    (tmp_path / "run").mkdir()
    saved_format = tmp_path / "run" / "conversation_format.json"
    base = ["+exp=quickstart", "algorithm=reward_model", "grpo.num_generations_per_prompt=2", "data.answer_key=null"]
    settings = ["data.apply_chat_template=true", "data.system_prompt=Judge.", f"data.tools={tmp_path / 'tools.json'}"]

    def read(*overrides: str) -> Any:
        record_start(tmp_path / "run", compose_config([*base, *overrides]))
        return json.loads(saved_format.read_text()) if saved_format.exists() else None

    assert read(*settings) == {"system_prompt": "Judge.", "tools": [{"name": "f"}]}
    assert read() is None, "plain texts have no form"
    assert read(*settings[:1], "+data.chat_template_kwargs.mood=x") == {"chat_template_kwargs": {"mood": "x"}}
    two = ["+env.game.type=countdown", "+data.tasks.game.system_prompt=Play."]
    assert read(*settings, *two) is None, "tasks have different ones"


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), lock_run_directory(str(tmp_path)):
        raise KeyboardInterrupt
    assert [entry.name for entry in tmp_path.iterdir()] == [".lock"]


def test_whether_a_run_is_alive_in_a_folder(tmp_path: Path) -> None:
    assert not is_in_use(str(tmp_path))
    with lock_run_directory(str(tmp_path)):
        assert is_in_use(str(tmp_path))
    assert not is_in_use(str(tmp_path))


def test_a_folder_that_cannot_be_made_is_one_message() -> None:
    with (
        pytest.raises(RunError, match=r"run_dir=/proc/nowhere cannot be written"),
        lock_run_directory("/proc/nowhere"),
    ):
        pass


def test_only_the_user_may_look_into_a_new_folder(tmp_path: Path) -> None:
    """A folder that exists stays as it is."""
    shared = tmp_path / "shared"
    before = os.umask(0o022)
    try:
        shared.mkdir()
        for name, mode in (("new", 0o700), ("shared", 0o755)):
            with lock_run_directory(str(tmp_path / name)) as folder:
                assert folder.stat().st_mode & 0o777 == mode
                (folder / "kept").touch()
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("error", "stays"), [(ConfigError([Problem("key", "is wrong")]), False), (RunError("Ray does not start"), True)]
)
def test_logs_of_a_refused_start_go_and_those_of_a_failed_one_stay(
    tmp_path: Path, error: Exception, stays: bool
) -> None:
    def start() -> None:
        with lock_run_directory(str(tmp_path / "outputs" / "run")) as folder:
            (folder / "logs").mkdir()
            (folder / "logs" / "driver.log").touch()
            raise error

    with pytest.raises(type(error)):
        start()
    assert (tmp_path / "outputs").exists() == stays
