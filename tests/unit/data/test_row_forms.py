"""Rows in the shape of public datasets, brought into form; those of another shape are told."""

from typing import Any

import pytest
from jinja2 import Template

from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.rows import RowCheck
from megatron_grpo.data.specs import ROW_FORMS, find_last_box, find_processor, make_task_spec
from megatron_grpo.preflight.load import compose_config

ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "gsm8k": (
        {
            "question": "Natalia sold 48 clips, then half as many. How many?",
            "answer": "48/2 = <<48/2=24>>24\n#### 1,072",
        },
        "Natalia sold 48 clips",
        "1072",
    ),
    "math": (
        {"problem": "What is 1/2?", "answer": "\\frac12", "solution": "...", "level": 2},
        "What is 1/2?",
        "\\frac12",
    ),
    "dapo_math_17k": (
        {
            "data_source": "math_dapo",
            "prompt": [{"content": "Solve the following math problem: 34", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b6eb4"},
        },
        "Solve the following math problem: 34",
        "34",
    ),
    "openmathinstruct2": (
        {"problem": "1+1", "generated_solution": "long", "expected_answer": "2", "problem_source": "augmented_math"},
        "1+1",
        "2",
    ),
    "tldr": (
        {"prompt": "SUBREDDIT: r/x\n\nTITLE: t\n\nPOST: p\n\nTL;DR:", "completion": " Short."},
        "TITLE: t",
        "Short.",
    ),
    "countdown": ({"target": 98, "nums": [44, 19, 35]}, "44, 19, 35", "98"),
}
REWARDS = "env.{0}={{type:reward_functions,reward_funcs:[tests.integration.example_rewards.right]}}"
FURTHER = {name: [REWARDS.format(name)] for name in ("tldr", "countdown")}


class Characters:
    """A tokenizer whose tokens are characters, with a chat template that only joins messages."""

    chat_template = "yes"

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(sign) for sign in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], **settings: Any) -> str:
        template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        return str(Template(template).render(messages=messages))


@pytest.mark.parametrize("recipe", ROWS)
def test_a_recipe_reads_rows_of_its_dataset(base_overrides: list[str], recipe: str) -> None:
    row, words, answer = ROWS[recipe]
    overrides = [override for override in base_overrides if not override.startswith("data.train_path")]
    config = compose_config([*overrides, f"data={recipe}", *FURTHER.get(recipe, [])])
    data, task = config.data, config.data.task_name
    (override,) = data.training_sets.values()
    environments = {name: env.type for name, env in config.env.items()}
    formed = RowCheck(override, data, environments).convert(row)
    assert isinstance(formed, dict), formed
    prompt = find_processor(data.processor)(row, make_task_spec(data, task), Characters(), 10_000, 0)
    assert words in prompt["message_log"][0]["content"]
    assert prompt["extra_env_info"][REFERENCE] == answer
    assert prompt["task_name"] == task
    assert ("boxed" in prompt["message_log"][0]["content"]) == (data.system_prompt is not None)


@pytest.mark.parametrize(
    ("form", "row", "text"),
    [
        ("gsm8k", {"question": "1+1?", "answer": "2"}, "has no final answer after ####"),
        ("gsm8k", {"problem": "1+1?"}, "column 'answer' is not text; the row has problem"),
        ("math", {"problem": "1+1?", "solution": "two"}, "has no \\boxed{...}"),
        ("dapo_math", {"prompt": "1+1?", "reward_model": {"style": "x"}}, "has no ground_truth"),
        ("openmathinstruct2", {"problem": "1", "expected_answer": None}, "column 'expected_answer' is not text"),
        ("tldr", {"prompt": "1"}, "column 'completion' is not text"),
        ("countdown", {"nums": [1, "2"], "target": 3}, "is not a list of whole numbers"),
        ("countdown", {"nums": [1, 2], "target": "3"}, "column 'target' is not a whole number"),
    ],
)
def test_rows_of_another_shape_are_told(form: str, row: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="column") as caught:
        ROW_FORMS[form](row)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("no", None),
        ("\\boxed{1} and \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1} and \\boxed{2", "1"),
        ("\\boxed{}", ""),
    ],
)
def test_the_last_complete_box(text: str, box: str | None) -> None:
    assert find_last_box(text) == box


def test_a_processor_of_ones_own_is_imported() -> None:
    assert find_processor("megatron_grpo.data.processors.math_data_processor").__name__ == "math_data_processor"
    with pytest.raises(ValueError, match="cannot be imported: ModuleNotFoundError"):
        find_processor("no_such_module.processor")
    with pytest.raises(ValueError, match="is dict, which cannot be called"):
        find_processor("megatron_grpo.data.specs.ROW_FORMS")
