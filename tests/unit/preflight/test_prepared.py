"""What recipes make before the run is checked as if it were there."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from megatron_grpo.preflight.load import compose_config
from megatron_grpo.preflight.machine_checks import examine_machine
from megatron_grpo.prepare.lessons import RECIPES, TRAIN_FILE, VAL_FILE, make_prompt_rows

SUMS = dict.fromkeys(
    ("addition", "addition_moe", "addition_hybrid", "distillation", "preference", "labelled"), (4588, 512)
)
ROWS = {
    **SUMS,
    "addition_text": (6705, 496),
    "calculator": (3495, 256),
    "two_tasks": (2550, 512),
    "counting": (4000, 256),
}


@pytest.mark.parametrize("name", RECIPES)
def test_every_row_has_a_prompt_an_answer_and_a_task(name: str) -> None:
    if "gym" in RECIPES[name]:
        pytest.importorskip("reasoning_gym", reason="the extra reasoning_gym is not installed")
    files = make_prompt_rows(name)
    assert {file: len(rows) for file, rows in files.items()} == dict(
        zip((TRAIN_FILE, VAL_FILE), ROWS[name], strict=True)
    )
    for rows in files.values():
        assert all(row.keys() >= {"prompt", "answer", "task_name"} for row in rows)


@pytest.mark.parametrize(
    ("overrides", "subject", "text"),
    [
        (["data.prompt_key=question"], "data.prompt_key=question", "makes rows with prompt, answer, task_name"),
        (["data.answer_key=solution"], "data.answer_key=solution", "makes rows with prompt, answer, task_name"),
        (["+exp=quickstart_kto", "data.label_key=liked"], "data.label_key=liked", "task_name, response, label"),
        (["data.apply_chat_template=true"], "data.apply_chat_template=True", "has no chat template"),
        (["data.max_input_seq_length=5"], "data.max_input_seq_length=5", "leaves out every row"),
        (["env=math", "data.task_name=math"], "env", "of the task addition, and env has math; use env=addition"),
        (["grpo.num_prompts_per_step=4589"], "data.train_path=", "has 4588 rows, fewer than the 4589 prompts"),
        (["data.train_path=${prepare.folder}/rows.jsonl"], "data.train_path=", "makes: train.jsonl, val.jsonl"),
        (["policy.model.path=${prepare.folder}/other"], "policy.model.path=", "prepare.name=addition makes model"),
    ],
)
def test_settings_that_do_not_fit_it(overrides: list[str], subject: str, text: str) -> None:
    ((problem,), _) = examine_machine(
        compose_config(overrides if "+exp" in overrides[0] else ["+exp=quickstart", *overrides])
    )
    assert problem.subject.startswith(subject)
    assert text in problem.text


def test_the_recipes_fit_it() -> None:
    names = ("_reasoning_gym",) if find_spec("reasoning_gym") else ()
    for name in (*names, "", "_moe", "_hybrid", "_ppo", "_dpo", "_kto", "_reward_model", "_tools", "_two_tasks"):
        recipe = f"quickstart{name}"
        assert examine_machine(compose_config([f"+exp={recipe}"]))[0] == []
