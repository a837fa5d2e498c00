"""Flat jobs: every documented field reaches a setting, the order of precedence, and how mistakes are told."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_grpo.config.errors import ConfigError
from megatron_grpo.config.job import SETTING_OF_FIELD
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.run.checkpoints import choose_ranking
from tests.support.grpo_parameters import GRPO_PARAMETERS

ROOT = Path(__file__).parents[3]


def write(folder: Path, content: Any) -> str:
    file = folder / "job.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return f"job={file}"


def problems_of(folder: Path, content: Any, *overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        compose_config(["+exp=quickstart", write(folder, content), *overrides])
    return {problem.subject.removeprefix(f"{folder}/"): problem.text for problem in caught.value.problems}


def get(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def test_every_field_becomes_its_setting(tmp_path: Path) -> None:
    assert SETTING_OF_FIELD.keys() == GRPO_PARAMETERS.keys()
    recipe = compose_config(["+exp=quickstart"])
    config = compose_config(["+exp=quickstart", write(tmp_path, GRPO_PARAMETERS)])
    for field, value in GRPO_PARAMETERS.items():
        assert get(config, SETTING_OF_FIELD[field]) == value, field
        assert get(recipe, SETTING_OF_FIELD[field]) != value, f"{field}: the test says nothing"


def test_the_documented_table_is_the_mapping() -> None:
    section = (ROOT / "docs" / "python.md").read_text().partition("\n## Flat jobs\n")[2]
    rows = re.findall(r"^\| `(\w+)` \| `([\w.]+)` \|$", section, flags=re.MULTILINE)
    assert dict(rows) == SETTING_OF_FIELD


def test_recipe_then_job_then_command_line(tmp_path: Path) -> None:
    job = write(tmp_path, {"num_prompts_per_step": 12, "ratio_clip_max": 0.3})
    config = compose_config(["+exp=quickstart", job, "grpo.num_prompts_per_step=20"])
    assert config.grpo.num_prompts_per_step == 20
    assert config.loss_fn.ratio_clip_max == 0.3
    assert config.grpo.num_generations_per_prompt == 8


def test_null_switches_off_what_can_be_off(tmp_path: Path) -> None:
    config = compose_config(["+exp=quickstart", write(tmp_path, {"ratio_clip_c": None, "generation_top_k": None})])
    assert config.loss_fn.ratio_clip_c is None
    assert config.generation.top_k is None


def test_temperature_0_is_greedy_and_hardly_more_is_refused(tmp_path: Path) -> None:
    config = compose_config(["+exp=quickstart", write(tmp_path, {"generation_temperature": 0})])
    assert config.generation.temperature == 0
    (text,) = problems_of(tmp_path, {"generation_temperature": 0.005}).values()
    assert "must be 0 (greedy) or float >= 0.01" in text


def test_a_preset_is_not_halved_by_a_job(tmp_path: Path) -> None:
    """Which of the two was meant cannot be known, and either would silently be half of what was asked for."""
    job = {"ratio_clip_max": 0.2, "use_rloo": False, "num_prompts_per_step": 12}
    ((subject, text),) = problems_of(tmp_path, job, "+variant=dapo").items()
    assert subject == "job.yaml: ratio_clip_max=0.2"
    assert "variant=dapo says 0.28" in text
    (text,) = problems_of(tmp_path, {"ref_policy_kl_penalty": 0.05}, "loss_fn=no_kl").values()
    assert "loss_fn=no_kl says 0" in text
    assert compose_config(["+exp=quickstart", write(tmp_path, {"ratio_clip_max": "0.28"}), "+variant=dapo"])
    problems = problems_of(tmp_path, {"ratio_clip_max": 0.28}, "loss_fn=clip_higher", "+variant=gspo")
    assert "variant=gspo says 0.0004" in problems["job.yaml: ratio_clip_max=0.28"]
    (text,) = problems_of(tmp_path, {"ratio_clip_max": "abc"}, "+variant=dapo").values()
    assert "must be float >= 0" in text
    settled = ["+exp=quickstart", write(tmp_path, job), "+variant=dapo", "loss_fn.ratio_clip_max=0.3"]
    assert compose_config(settled).loss_fn.ratio_clip_max == 0.3


def test_a_named_environment(tmp_path: Path) -> None:
    config = compose_config(["+exp=quickstart", write(tmp_path, {"environment": "math"})])
    assert list(config.env) == ["math"]
    assert config.data.task_name == "math"
    three_workers = {"environment": {"name": "addition", "num_workers": 3}}
    config = compose_config(["+exp=quickstart", write(tmp_path, three_workers)])
    assert config.env["addition"].num_workers == 3


def test_an_environment_of_the_jobs_own(tmp_path: Path) -> None:
    described = {
        "name": "mine",
        "type": "reward_functions",
        "reward_funcs": ["a.b", "c.d"],
        "dataset": "rows.jsonl",
        "validation_dataset": None,
        "answer_key": "solution",
    }
    config = compose_config(["+exp=quickstart", "checkpointing=none", write(tmp_path, {"environment": described})])
    assert list(config.env) == ["mine"]
    assert config.env["mine"].reward_funcs == ["a.b", "c.d"]
    assert (config.data.task_name, config.data.train_path, config.data.val_path) == ("mine", "rows.jsonl", None)
    assert config.data.answer_key == "solution"


def test_data_of_its_own_is_not_validated_with_the_recipes(tmp_path: Path) -> None:
    described = {"name": "mine", "type": "reward_functions", "reward_funcs": ["a.b"], "dataset": "rows.jsonl"}
    job = write(tmp_path, {"environment": described})
    for recipe in ("+exp=quickstart", "+exp=quickstart_ppo"):
        config = compose_config([recipe, job])
        assert (config.data.val_path, choose_ranking(config).metric_name) == (None, "reward")
        job_config = compose_config([recipe, job, "data.val_path=mine.jsonl"])
        assert (job_config.data.val_path, choose_ranking(job_config).metric_name) == ("mine.jsonl", "val_reward")


def test_all_mistakes_come_under_the_fields_names(tmp_path: Path) -> None:
    job = {
        "generation_top_p": 0.0,
        "ratio_clip_c": 1.0,
        "generation_temperature": -0.5,
        "num_prompts_per_step": 0,
        "max_grad_norm": "high",
        "use_rloo": "perhaps",
        "generation_top_k": True,
        "ratio_clip_maximum": 0.3,
    }
    problems = problems_of(tmp_path, job, "grpo.max_num_steps=0")
    assert problems == {
        "job.yaml: generation_top_p=0.0": "must be float > 0 and <= 1 (it sets generation.top_p)",
        "job.yaml: ratio_clip_c=1.0": "must be float > 1 or null (it sets loss_fn.ratio_clip_c)",
        "job.yaml: generation_temperature=-0.5": (
            "must be 0 (greedy) or float >= 0.01 and <= 2 (it sets generation.temperature)"
        ),
        "job.yaml: num_prompts_per_step=0": "must be int > 0 (it sets grpo.num_prompts_per_step)",
        "job.yaml: max_grad_norm=high": "must be float >= 0 (it sets policy.max_grad_norm)",
        "job.yaml: use_rloo=perhaps": "must be true or false (it sets grpo.use_leave_one_out_baseline)",
        "job.yaml: generation_top_k=True": "must be int > 0 or null (it sets generation.top_k)",
        "job.yaml: ratio_clip_maximum": "unknown field; did you mean ratio_clip_max?",
        "grpo.max_num_steps=0": "must be int > 0 or -1",
    }


@pytest.mark.parametrize(
    ("content", "subject", "text"),
    [
        ("a: [", "job=", "is not valid YAML"),
        ("- a", "job=", "must be a mapping of fields, not list"),
        ({"environment": 3}, "job.yaml: environment=3", "name of an environment"),
        ({"environment": {"dataset": "x"}}, "job.yaml: environment.name=null", "must be the name"),
        ({"environment": {"name": "math", "tipe": "math"}}, "job.yaml: environment.tipe", "mean environment.type?"),
        ({"environment": {"name": "x", "type": "maths"}}, "job.yaml: environment.type=maths", "one of math, addition"),
        ({"beta": 0.04}, "job.yaml: beta", "TRL's beta is loss_fn.reference_policy_kl_penalty here"),
        (
            {"policy": {"model_name": "x"}},
            "job.yaml: policy",
            "a job is flat and has fields of its own; keys go on the",
        ),
        ({"zzz": 1}, "job.yaml: zzz", "unknown field; there is generation_batch_size"),
        (
            {"environment": "maths"},
            "job.yaml: environment=maths",
            "no such environment; there is addition, calculator, counting, math, reasoning_gym, two_tasks",
        ),
        ({"ratio_clip_max": date(2026, 1, 2)}, "job.yaml: ratio_clip_max=2026-01-02", "must be float >= 0"),
        ({"ratio_clip_max": "${"}, "job.yaml: ratio_clip_max=${", "must be float >= 0"),
        ("ratio_clip_max: !!set {a}", "job.yaml: ratio_clip_max={'a'}", "must be float >= 0"),
        ("ratio_clip_max: 2026-13-99", "job=", "is not valid YAML"),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, content: Any, subject: str, text: str) -> None:
    problems = problems_of(tmp_path, content)
    (problem_key,) = (key for key in problems if key.startswith(subject))
    assert text in problems[problem_key]


def test_a_section_on_the_command_line_wins_key_by_key(tmp_path: Path) -> None:
    job = write(tmp_path, {"ratio_clip_min": 0.1, "ratio_clip_max": 0.1})
    config = compose_config(["+exp=quickstart", job, "loss_fn={ratio_clip_min: 0.3}"])
    assert (config.loss_fn.ratio_clip_min, config.loss_fn.ratio_clip_max) == (0.3, 0.1)


def test_a_field_that_ppo_does_not_read_is_told(tmp_path: Path) -> None:
    """Also at GRPO's default: otherwise the run would have another value, silently."""
    with pytest.raises(ConfigError, match=r"job.yaml: use_rloo=True +is for algorithm=grpo"):
        compose_config(["+exp=quickstart_ppo", write(tmp_path, {"use_rloo": True})])


def test_a_field_of_a_shared_setting_is_ppos_in_a_run_of_ppo(tmp_path: Path) -> None:
    job = write(tmp_path, {"num_prompts_per_step": 64})
    assert compose_config(["+exp=quickstart_ppo", job]).ppo.num_prompts_per_step == 64
    for name in ("grpo", "ppo"):
        config = compose_config(["+exp=quickstart_ppo", job, f"{name}.num_prompts_per_step=32"])
        assert config.ppo.num_prompts_per_step == 32, "the command line has the last word, under either name"
    with pytest.raises(ConfigError, match=r"job.yaml: num_prompts_per_step=0 +must be int > 0 \(it sets ppo\."):
        compose_config(["+exp=quickstart_ppo", write(tmp_path, {"num_prompts_per_step": 0})])


def test_a_missing_file_and_two_jobs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"job=/nowhere.yaml +no such file"):
        compose_config(["+exp=quickstart", "job=/nowhere.yaml"])
    job = write(tmp_path, {})
    with pytest.raises(ConfigError, match="one run takes one job"):
        compose_config(["+exp=quickstart", job, "+" + job])
