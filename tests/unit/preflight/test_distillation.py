"""What a configuration of distillation may say: teachers, their layouts, tokenizers and rewards."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_grpo.models.tokenizer_files import explain_other_tokens
from megatron_grpo.preflight.distillation_checks import find_teacher_tokenizer_problems
from megatron_grpo.preflight.layout_checks import count_gpus
from megatron_grpo.preflight.load import compose_config

RECIPE = "+exp=quickstart_distillation"


def test_the_loop_is_that_of_grpo() -> None:
    config = compose_config([RECIPE, "grpo.max_num_steps=7", "env.addition.type=unscored"])
    assert config.training_loop.max_num_steps == 7
    assert not config.uses_rewards
    assert not config.uses_reference
    assert list(config.named_teachers) == ["teacher"]


def test_a_task_decides_its_teacher() -> None:
    overrides = ["+env.games.type=countdown", "+teachers.games.model.path=/games", "+teachers.games.parallel.tensor=2"]
    config = compose_config([RECIPE, *overrides, "env.games.type=unscored"])
    assert list(config.named_teachers) == ["teacher", "teachers.games"]
    assert [config.find_teacher(task) for task in ("addition", "games")] == ["teacher", "teachers.games"]
    assert config.teacher_models["teachers.games"].model.path == "/games"
    gpus = count_gpus(config)
    assert {key: gpus[key] for key in ("teacher.parallel", "teachers.games.parallel")} == {
        "teacher.parallel": 1,
        "teachers.games.parallel": 2,
    }


def write_tokens(folder: Path, tokens: dict[str, int]) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": []}))
    return folder


def test_another_tokenizer_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    policy = write_tokens(tmp_path / "policy", {"a": 0, "b": 1})
    assert explain_other_tokens(policy, write_tokens(tmp_path / "same", {"b": 1, "a": 0})) is None
    swapped = write_tokens(tmp_path / "swapped", {"a": 1, "b": 0})
    assert explain_other_tokens(policy, swapped) == (
        "has another tokenizer: its token 0 is 'b', that of the policy 'a'"
    )
    shorter = write_tokens(tmp_path / "shorter", {"a": 0})
    assert explain_other_tokens(policy, shorter) == (
        "has another tokenizer: its token 1 is missing, that of the policy 'b'"
    )
    (tmp_path / "none").mkdir()
    assert "cannot be compared" in (explain_other_tokens(policy, tmp_path / "none") or "")
    config = compose_config([RECIPE, f"policy.model.path={policy}", f"teacher.model.path={swapped}"])
    (problem,) = find_teacher_tokenizer_problems(config)
    assert problem.subject == f"teacher.model.path={swapped}"
