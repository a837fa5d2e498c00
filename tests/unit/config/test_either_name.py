"""The keys that loops share: one setting with a name for each algorithm; and a run has one loop."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import megatron_grpo.conf
from megatron_grpo.config.compose import build_schema_defaults, compose_typed
from megatron_grpo.config.conversion import refuse_other_loops
from megatron_grpo.config.keys import build_values, find_key, flatten, is_section, read_keys, read_sections
from megatron_grpo.config.loop_names import LOOPS, is_shared, translate_key, unite_shared_keys
from megatron_grpo.config.loop_schema import SampledLoopConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.load import compose_checked, compose_config

GRPO, PPO = "+exp=quickstart", "+exp=quickstart_ppo"


def test_a_shared_key_is_known_under_both_names_and_listed_once() -> None:
    """Against the classes themselves: what SampledLoopConfig defines, nested sections included."""
    shared = [name for name, _ in flatten(dataclasses.asdict(SampledLoopConfig()))]
    for name in shared:
        assert find_key(f"grpo.{name}") == find_key(f"ppo.{name}") == f"grpo.{name}"
        assert f"ppo.{name}" not in read_keys()
    assert sum(is_shared(name) for name in read_keys()) == len(shared)
    loop_keys = {
        name for loop, section in LOOPS.items() for name, _ in flatten(dataclasses.asdict(section()), f"{loop}.")
    }
    in_sections = {name for name in read_keys() if name.partition(".")[0] in LOOPS and "<" not in name}
    assert in_sections == {translate_key("grpo", name) for name in loop_keys}
    assert is_section("ppo.early_stop")
    assert [group.name for group in read_sections()].count("grpo.early_stop") == 1


def test_ppos_own_default_is_documented() -> None:
    assert read_keys()["grpo.num_generations_per_prompt"].default_text == (
        "16, with ppo 1, with sft 1, with dpo 2, with kto 1, with reward_model 2"
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
        assert config.loop is getattr(config, loop)
        assert (config.loop.max_num_steps, config.loop.early_stop.patience) == (77, 3)
        assert config.loop.reward_scaling.source_max == 2
        expected = dataclasses.asdict(compose_config([recipe]).loop)
        changed = {
            key for key, value in flatten(dataclasses.asdict(config.loop)) if value != dict(flatten(expected))[key]
        }
        assert changed == {"max_num_steps", "early_stop.patience", "reward_scaling.source_max"}


def test_a_run_has_one_loop() -> None:
    for recipe, loop in ((PPO, "ppo"), (GRPO, "grpo"), ("+exp=quickstart_sft", "sft")):
        config = compose_config([recipe, "run_dir=here", "dpo.max_num_steps=77"])
        assert [name for name in LOOPS if getattr(config, name) is not None] == [loop]
        assert LOOPS.keys() & build_values(config).keys() == {loop}
        assert build_values(config)[loop]["max_num_steps"] == 77


def test_each_algorithm_has_its_own_defaults() -> None:
    """A shared key that nobody gives is PPO's in a run of PPO."""
    required = ["policy.model.path=/model", "data.train_path=rows.jsonl", "run_dir=here"]
    assert compose_config([*required, "algorithm=ppo"]).ppo.num_generations_per_prompt == 1
    assert (
        compose_config([*required, "algorithm=ppo", "grpo.num_generations_per_prompt=16"]).samples_per_step == 32 * 16
    )
    assert compose_config(required).grpo.num_generations_per_prompt == 16


OF_SAMPLES = """
    overlong_filtering=true advantage_clip_low=-1 reward_scaling.enabled=true reward_shaping.overlong_buffer_length=3
    use_dynamic_sampling=true batch_multiplier=2 dynamic_sampling_max_gen_batches=3 seq_logprob_error_threshold=2
    async_grpo.enabled=true async_grpo.max_trajectory_age_steps=0 sync_ref_model=true ref_model_sync_steps=3
"""


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "kto", "reward_model"])
def test_a_loop_that_learns_from_rows_has_no_keys_about_samples(algorithm: str) -> None:
    run = ["+exp=quickstart_sft", "run_dir=here", f"algorithm={algorithm}", "~env.addition"]
    loop = Config(algorithm=algorithm).loop  # type: ignore[arg-type]
    settings = OF_SAMPLES.split()
    assert not [setting for setting in settings if hasattr(loop, setting.partition(".")[0].partition("=")[0])]
    for name in ("grpo", algorithm):  # under either name
        composed = compose_checked([*run, *(f"{name}.{setting}" for setting in settings)])
        texts = {problem.key: problem.text for problem in composed.problems}
        expected = f"is about samples that a step learns from, and algorithm={algorithm} learns from rows"
        for setting in settings:
            assert texts[f"{name}.{setting.partition('=')[0]}"].startswith(f"{expected}; leave it out"), setting
        assert not any("unknown" in text for text in texts.values())
    # Their defaults are no mistake, as recipes for several algorithms have them.
    defaults = [f"{algorithm}.overlong_filtering=false", "grpo.async_grpo={enabled: false}"]
    assert not [problem for problem in compose_typed([*run, *defaults]).problems if "samples" in problem.text]


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
    assert LOOPS.keys() & values.keys() == {"ppo"}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"grpo": {"num_iterations": 3}}, "is for algorithm=grpo, and this run has algorithm=ppo; give ppo.ppo_epochs"),
        ({"sft": {"val_rewards": True}}, "is for algorithm=sft, and this run has algorithm=ppo; the value model is"),
        ({"dpo": {"los_type": "ipo"}}, "unknown key"),
        ({"grpo": {"num_iterations": 1, "seed": 7}, "dpo": {"loss_type": "sigmoid"}, "sft": {}}, None),
    ],
)
def test_what_a_recorded_configuration_says_of_other_loops(settings: dict[str, Any], text: str | None) -> None:
    """Their defaults are no mistake: an earlier version recorded them."""
    values = build_values(compose_typed([PPO]).require()) | settings
    problems = refuse_other_loops(values, "ppo")
    assert LOOPS.keys() & values.keys() == {"ppo"}
    assert [problem.text for problem in problems if not problem.text.startswith(str(text))] == []
    assert len(problems) == (text is not None)


@pytest.mark.parametrize(
    ("files", "seed", "problems"),
    [
        ({"exp/base": {"ppo": {"seed": 1}}, "exp/mine": {"grpo": {"seed": 2}}}, 2, 0),
        ({"exp/base": {"grpo": {"seed": 2}}, "exp/mine": {"ppo": {"seed": 1}}}, 1, 0),
        ({"exp/base": {}, "exp/mine": {"ppo": {"seed": 1}, "grpo": {"seed": 2}}}, 1, 1),
    ],
)
def test_of_two_recipes_the_later_one_counts(files: dict[str, Any], seed: int, problems: int) -> None:
    composed = OmegaConf.merge(OmegaConf.create(build_schema_defaults()), *files.values())
    sources = [dict(flatten(settings)) for settings in reversed(files.values())]
    _, contradictions = unite_shared_keys(composed, "ppo", lambda: sources)  # type: ignore[arg-type]  # DictConfig, of dicts
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
