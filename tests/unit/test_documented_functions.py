"""The functions of a run in docs/python.md: what the page says of their names, and the example that needs no run."""

import contextlib
import dataclasses
import inspect
import io
import re
from pathlib import Path

from megatron_grpo import api
from megatron_grpo.algorithms import context, grpo, ppo

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
SECTION = PAGE.read_text().partition("## The functions of a run")[2].partition("\n## ")[0]


def test_the_example_without_a_run_prints_what_the_page_says() -> None:
    code = re.findall(r"```python\n(.*?)```", SECTION, flags=re.DOTALL)[1]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(PAGE), "exec"), {})
    assert printed.getvalue().splitlines() == re.findall(r"^print\(.*\)  # (.*)$", code, flags=re.MULTILINE)


def test_every_part_of_a_run_that_the_page_names_is_there() -> None:
    fields = {field.name for field in dataclasses.fields(context.PPORun)}
    parts = set(re.findall(r"run\.(\w+)", SECTION))
    assert len(parts) >= 10
    assert parts <= fields


def test_every_function_that_the_page_names_is_public() -> None:
    named = set(re.findall(r"`(\w+)\(", SECTION))
    public = {*grpo.__all__, *ppo.__all__}
    functions = {name for name in public if inspect.isfunction(getattr(grpo, name, None) or getattr(ppo, name))}
    assert functions - named == {"grpo_step", "ppo_step"}, "one step of the loop, which the training functions call"
    assert named <= functions


def test_every_argument_of_train_is_in_a_table() -> None:
    rows = re.findall(r"^\| `(.*?)` \|", PAGE.read_text(), flags=re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"\w+", row)}
    assert set(inspect.signature(api.train).parameters) - {"config", "unknown"} <= documented
