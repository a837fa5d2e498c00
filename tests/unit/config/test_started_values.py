"""What a recorded configuration would start, in every key whose value can start something."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_grpo.config.conversion import convert_values
from megatron_grpo.config.data_schema import BUILT_IN
from megatron_grpo.config.errors import ConfigError
from megatron_grpo.config.keys import read_keys
from megatron_grpo.config.schema import Config
from megatron_grpo.config.started_values import STARTING_OPTIONS, find_untrusted_values, list_started_values
from megatron_grpo.environments.registry import import_environment_class
from megatron_grpo.run.directory import load_run_config
from tests.support.text_keys import can_hold_text, fit_text, names_code, set_key

STARTING = "package.module:Name"
"""A value that is code wherever a key imports code, and no built-in name."""
INERT = {
    "name data.task_name data.train_sets.<name>.task_name data.val_sets.<name>.task_name": "names",
    "logger.wandb.project logger.wandb.name logger.mlflow.experiment logger.mlflow.name": "names at trackers",
    "logger.swanlab.project logger.swanlab.name": "names at trackers",
    "logger.rl_insight.project logger.rl_insight.name data.image_key": "names",
    "run_dir refit.directory prepare.folder": "folders that are written",
    "policy.model.path value.model.path teacher.model.path teachers.<name>.model.path": "code of models never runs",
    "data.train_path data.val_path data.train_sets.<name>.path data.val_sets.<name>.path": "rows",
    "data.from_rollouts debug.rollouts_from plan.lengths_from": "recorded rollouts, in Parquet",
    "checkpointing.resume": "pickles of listed classes",
    "plan.hardware data.tools data.tasks.<name>.tools": "plain YAML and JSON",
    "data.prompt_file data.tasks.<name>.prompt_file": "text",
    "data.system_prompt_file data.tasks.<name>.system_prompt_file": "text",
    "data.system_prompt data.tasks.<name>.system_prompt generation.structured.choice": "text",
    "generation.structured.regex generation.structured.json_schema": "forms of responses",
    "generation.bad_words generation.stop_strings": "text",
    "data.subset data.train_split data.val_split": "parts of sets",
    "data.train_sets.<name>.subset data.train_sets.<name>.split": "parts of sets",
    "data.val_sets.<name>.subset data.val_sets.<name>.split": "parts of sets",
    "data.prompt_key data.answer_key data.response_key data.chosen_key data.rejected_key": "columns",
    "data.label_key chord.response_key": "columns",
    "chord.train_path chord.train_split": "rows, as data.train_path",
    "distillation.hint_prompt": "a text with columns of the row",
    "data.tasks.<name>.prompt_key data.tasks.<name>.answer_key data.curriculum.column": "columns",
    "data.chat_template_kwargs.<field> data.tasks.<name>.chat_template_kwargs.<field>": "variables of a template",
    "data.reasoning_gym.tasks.<name>.options": "difficulty of a task",
    "grpo.early_stop.metric_name checkpointing.metric_name env.<name>.leave_out_suspects": "names of metrics",
    "env.<name>.correct_func": "one of the reward functions",
    "generation.endpoint.tool_parser generation.endpoint.reasoning_parser": "parsers in vLLM, by name",
    "env.<name>.options.<field>": "the class's: STARTING_OPTIONS, and all of a user's class",
}
"""Keys with texts or mappings that start nothing, and why."""
INERT_OPTIONS = {
    "code": {"language", "entry_point"},
    "judge": {"model", "question"},
    "openenv": {"action", "observation"},
    "tools": {"parser", "documents", "tools", "compare"},
    "countdown": {"board", "separator"},
    "format": {"pattern"},
}


def list_flagged_keys() -> Iterator[tuple[str, Any]]:
    for key, documented in read_keys().items():
        if can_hold_text(key):
            value = STARTING.replace(":", ".") if names_code(key) else fit_text(documented.type, STARTING)
            value = "team/model" if documented.type.startswith("ORGANISATION") else value
            if list_started_values(set_key(key, value)):
                yield key, value
    yield "sandbox.required", "limits"
    for kind, options in STARTING_OPTIONS.items():
        for option in options:
            yield f"env.{kind}.options.{option}", {"x": {"command": ["program"]}} if option == "servers" else STARTING


FLAGGED = dict(list_flagged_keys())


def test_every_key_with_texts_is_marked_or_known_to_start_nothing() -> None:
    inert = {name for names in INERT for name in names.split()}
    texts = {key for key in read_keys() if can_hold_text(key)}
    assert texts - FLAGGED.keys() == inert, "mark a new key with Starts, or say why it starts nothing"
    assert not inert & FLAGGED.keys()
    assert {"env.<name>.agent_func", "cluster.ray_address", "generation.engine_args.<field>"} <= FLAGGED.keys()
    assert {"algorithm", "loss_fn.objective", "grpo.adv_estimator.name"} <= FLAGGED.keys()


@pytest.mark.parametrize("kind", BUILT_IN)
def test_every_option_of_a_built_in_environment_is_listed_or_starts_nothing(kind: str) -> None:
    parameters = inspect.signature(import_environment_class(BUILT_IN[kind]), eval_str=True).parameters
    texts = {name for name, parameter in parameters.items() if name != "settings" and has_text(parameter.annotation)}
    starting = STARTING_OPTIONS.get(kind, {}).keys()
    assert starting <= texts
    assert texts - starting <= INERT_OPTIONS.get(kind, set()), "list a new option in STARTING_OPTIONS if it starts"


def has_text(hint: Any) -> bool:
    if typing.get_origin(hint) is typing.Literal:
        return False
    return hint in (str, dict, Any) or is_dataclass(hint) or any(map(has_text, typing.get_args(hint)))


def record(folder: Path, key: str, value: Any) -> str:
    """Record a run with a value; returns the name of its key."""
    values = asdict(Config()) | {"policy": {"model": {"path": "model"}}, "data": {"train_path": "rows.jsonl"}}
    parts = key.replace("<name>", "x").replace("<field>", "y").split(".")
    node = values
    if parts[0] == "env" and parts[2] == "options":
        values["env"] = {parts[1]: {"type": parts[1]}}
    for part in parts[:-1]:
        node = node.setdefault(part, {})
    node[parts[-1]] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return ".".join(parts)


# Trust imports an algorithm (test_table.py) and families (test_user_families.py).
@pytest.mark.parametrize("key", sorted(key for key in FLAGGED if key != "algorithm" and not key.endswith(".family")))
def test_a_recorded_value_needs_trust_or_comes_from_the_command_line(key: str, tmp_path: Path) -> None:
    name = record(tmp_path, key, FLAGGED[key])
    with pytest.raises(ConfigError) as caught:
        load_run_config(tmp_path, [])
    (problem,) = caught.value.problems
    assert problem.key.startswith(name)
    assert f"is recorded in {tmp_path / 'config.yaml'}" in problem.text
    assert "give trust_run=true if you trust the run, or this key yourself" in problem.text
    load_run_config(tmp_path, [], is_trusted=True)
    load_run_config(tmp_path, [f"{name}={json.dumps(FLAGGED[key])}"])


def test_only_keys_that_a_command_reads_need_trust(tmp_path: Path) -> None:
    record(tmp_path, "env.x.agent_func", STARTING)
    load_run_config(tmp_path, [], sections=("policy.", "data."))
    with pytest.raises(ConfigError, match=r"env\.x\.agent_func=package"):
        load_run_config(tmp_path, ["grpo.max_num_steps=3"], sections=("policy.", "env."))


def test_numbers_plain_words_and_built_in_names_start_nothing() -> None:
    values = asdict(Config()) | {
        "env": {
            "a": {"type": "code", "options": {"max_tests": 3}},
            "b": {"type": "reward_functions", "reward_funcs": ["org/model", "/models/reward"]},
            "c": {"type": "tools", "options": {"tools": ["python"], "parser": "hermes", "servers": {}}},
        },
        "generation": {
            "engine_args": {"block_size": 16, "kv_cache_dtype": "fp8", "compilation_config": {"mode": 3}},
            "endpoint": {"host": "localhost"},
        },
        "data": {"processor": "gsm8k"},
        "cluster": {"ray_address": "auto"},
        "policy": {"megatron": {"moe_token_dispatcher_type": "alltoall", "moe_aux_loss_coeff": 0.1}},
    }
    config, problems = convert_values(values, "grpo")
    assert config is not None
    assert not problems
    assert list_started_values(config) == []


def test_all_options_of_a_users_class_need_trust() -> None:
    values = asdict(Config()) | {"env": {"x": {"type": "mine:Class", "options": {"shell": {"program": "sh"}, "n": 3}}}}
    config, _ = convert_values(values, "grpo")
    assert config is not None
    keys = [problem.key for problem in find_untrusted_values(config, "file", ["env.x.type"], ("",))]
    assert keys == ["env.x.options.shell.program"]


def test_a_recorded_name_with_dots_is_no_key_of_the_command_line() -> None:
    values = asdict(Config()) | {"env": {"x.reward_funcs": {"type": "evil:Class"}, "x": {"type": "math"}}}
    config, _ = convert_values(values, "grpo")
    assert config is not None
    (problem,) = find_untrusted_values(config, "file", ["env.x.reward_funcs"], ("",))
    assert problem.subject == "env.x.reward_funcs.type=evil:Class"


def test_the_cluster_of_this_environment_needs_no_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    config = set_key("cluster.ray_address", "head:6379")
    assert list_started_values(config)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert not list_started_values(config)
