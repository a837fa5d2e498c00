"""The keys that GRPO and PPO share: one setting with two names, wherever it is given."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import megatron_grpo.conf
from megatron_grpo.config.compose import build_schema_defaults, compose_typed, unite_shared_keys
from megatron_grpo.config.keys import find_key, flatten, is_section, read_keys, read_sections
from megatron_grpo.config.loop_schema import LOOPS, is_shared, translate_key
from megatron_grpo.config.schema import Config, LoopConfig
from megatron_grpo.preflight.load import compose_config

GRPO, PPO = "+exp=quickstart", "+exp=quickstart_ppo"


def test_a_shared_key_is_known_under_both_names_and_listed_once() -> None:
    """Against the classes themselves: what LoopConfig defines, nested sections included."""
    shared = [name for name, _ in flatten(dataclasses.asdict(LoopConfig()))]
    for name in shared:
        assert find_key(f"grpo.{name}") == find_key(f"ppo.{name}") == f"grpo.{name}"
        assert f"ppo.{name}" not in read_keys()
    assert sum(is_shared(name) for name in read_keys()) == len(shared)
    loop_keys = {name for loop in LOOPS for name, _ in flatten(dataclasses.asdict(getattr(Config(), loop)), f"{loop}.")}
    in_sections = {name for name in read_keys() if name.partition(".")[0] in LOOPS}
    assert in_sections == {translate_key("grpo", name) for name in loop_keys}
    assert is_section("ppo.early_stop")
    assert [group.name for group in read_sections()].count("grpo.early_stop") == 1


def test_ppos_own_default_is_documented() -> None:
    assert read_keys()["grpo.num_generations_per_prompt"].default_text == (
        "16, with ppo 1, with sft 1, with dpo 2, with reward_model 2"
    )
    assert read_keys()["grpo.num_prompts_per_step"].default_text == "32"


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "loop"), [(GRPO, "grpo"), (PPO, "ppo")])
def test_both_names_set_what_the_algorithm_reads(recipe: str, loop: str) -> None:
    for name in LOOPS:
        overrides = [
            f"{name}.max_num_steps=77",
            f"{name}.early_stop.patience=3",
            f"{name}.reward_scaling={{source_max: 2}}",
        ]
        config = compose_config([recipe, *overrides])
        assert config.training_loop is getattr(config, loop)
        assert (config.training_loop.max_num_steps, config.training_loop.early_stop.patience) == (77, 3)
        assert config.training_loop.reward_scaling.source_max == 2
        expected = dataclasses.asdict(compose_config([recipe]).training_loop)
        changed = {
            key
            for key, value in flatten(dataclasses.asdict(config.training_loop))
            if value != dict(flatten(expected))[key]
        }
        assert changed == {"max_num_steps", "early_stop.patience", "reward_scaling.source_max"}


def test_the_section_that_is_not_read_stays_at_its_defaults() -> None:
    config = compose_config([PPO, "grpo.max_num_steps=77"])
    assert config.grpo == Config().grpo
    assert compose_config([GRPO, "ppo.max_num_steps=77"]).ppo == Config().ppo


def test_each_algorithm_has_its_own_defaults() -> None:
    """A shared key that nobody gives is PPO's in a run of PPO."""
    required = ["policy.model.path=/model", "data.train_path=rows.jsonl", "run_dir=here"]
    assert compose_config([*required, "algorithm=ppo"]).ppo.num_generations_per_prompt == 1
    assert (
        compose_config([*required, "algorithm=ppo", "grpo.num_generations_per_prompt=16"]).samples_per_step == 32 * 16
    )
    assert compose_config(required).grpo.num_generations_per_prompt == 16


def test_a_value_may_refer_to_either_name() -> None:
    config = compose_config(
        [PPO, "ppo.max_num_steps=${grpo.val_period}", "grpo.val_period=30", "ppo.seed=${ppo.val_period}"]
    )
    assert (config.ppo.max_num_steps, config.ppo.seed) == (30, 30)


def test_the_command_line_beats_the_recipe_under_either_name() -> None:
    """The recipe says ppo.num_prompts_per_step=256."""
    assert compose_config([PPO, "grpo.num_prompts_per_step=64"]).ppo.num_prompts_per_step == 64


def test_the_printed_configuration_has_shared_keys_once() -> None:
    values = compose_typed([PPO, "grpo.seed=7"]).values
    assert values["ppo"]["seed"] == 7
    assert values["grpo"].keys() == {
        "normalize_rewards",
        "normalize_rewards_over",
        "use_leave_one_out_baseline",
        "adv_estimator",
        "num_iterations",
        "turn_credit",
        "turn_discount",
    }


@pytest.mark.parametrize(
    ("files", "seed", "problems"),
    [
        ({"exp/base": {"ppo": {"seed": 1}}, "exp/mine": {"grpo": {"seed": 2}}}, 2, 0),
        ({"exp/base": {"grpo": {"seed": 2}}, "exp/mine": {"ppo": {"seed": 1}}}, 1, 0),
        ({"exp/base": {}, "exp/mine": {"ppo": {"seed": 1}, "grpo": {"seed": 2}}}, 1, 1),
    ],
)
def test_of_two_recipes_the_later_one_counts(
    files: dict[str, Any], seed: int, problems: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "megatron_grpo.config.compose.read_settings", lambda path: dict(flatten(files[path])), raising=True
    )
    composed = OmegaConf.merge(OmegaConf.create(build_schema_defaults()), *files.values())
    _, contradictions = unite_shared_keys(composed, "ppo", set(), lambda: list(files))  # type: ignore[arg-type]  # DictConfig, of dicts
    assert composed.ppo.seed == composed.grpo.seed == seed
    assert len(contradictions) == problems


def test_a_users_recipe_may_use_either_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Hydra, in a copy of conf/: a recipe that builds on quickstart_ppo and sets keys under GRPO's name."""
    folder = tmp_path / "conf_of_a_test"
    shutil.copytree(Path(megatron_grpo.conf.__file__).parent, folder)
    (folder / "exp" / "mine.yaml").write_text(
        "# @package _global_\n# For a test.\ndefaults:\n  - quickstart_ppo\n  - _self_\n"
        "grpo:\n  num_prompts_per_step: 64\n  num_generations_per_prompt: 1\n  seed: 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("overrides", "compose"):
        monkeypatch.setattr(f"megatron_grpo.config.{module}.CONF_MODULE", folder.name)
    config = compose_config(["+exp=mine"])
    assert (config.ppo.num_prompts_per_step, config.ppo.num_generations_per_prompt, config.ppo.seed) == (64, 1, 3)
