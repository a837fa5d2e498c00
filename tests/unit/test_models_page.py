"""The table of models is what docs/models_page.py makes of the results in the repository."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.models.families import FAMILIES
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.preflight.engine_checks import find_engine_problems
from megatron_grpo.preflight.load import compose_config
from tests.support.engine_configs import ENGINE_CONFIGS

DOCS = Path(__file__).parents[2] / "docs"


def load_page() -> Any:
    spec = importlib.util.spec_from_file_location("models_page", DOCS / "models_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date() -> None:
    assert (DOCS / "layouts.md").read_text() == load_page().format_page(), "run make docs"


def test_every_family_has_a_row_with_its_released_models() -> None:
    assert load_page().RELEASED.keys() == FAMILIES.keys()


def test_the_page_says_what_whole_runs_showed() -> None:
    page = load_page()
    runs = page.read_newest(page.WHOLE_RUNS)["runs"]
    assert FAMILIES.keys() <= runs.keys(), "benchmarks/family_runs.py runs every family"
    lines = [line for line in page.format_table().splitlines() if line.startswith("| `")]
    rows = {line.split("`")[1]: line.split(" | ") for line in lines}
    for family in FAMILIES:
        run, cell = runs[family], rows[family][5]
        assert cell == (f"{run['minutes']:.1f}: {run['canary']:.0e}" if run["verdict"] == "passed" else run["verdict"])
        if run["verdict"] == "passed":
            assert run["steps"] == run["canaries"] == 3, "a canary at every refit"
            assert run["comparisons"] >= 1
            assert run["canary"] < (0.1 if "qwen3_5" in family or family == "qwen3_next" else 1e-4)


@pytest.mark.parametrize("name", [name for name in ENGINE_CONFIGS if not name.endswith("_vision")])
def test_a_whole_run_passed_or_is_refused_before_the_start(name: str) -> None:
    """No run failed, and those without one are the models that the checks of engines still refuse, with the reason."""
    page = load_page()
    run = page.read_newest(page.WHOLE_RUNS)["runs"][name]
    shape = parse_model_shape(ENGINE_CONFIGS[name])
    dtype = ["generation.engine.dtype=bfloat16"] if shape.delta is not None else []
    overrides = ["+exp=quickstart", "generation.parallel.pipeline=1", *dtype]
    texts = [problem.text for problem in find_engine_problems(compose_config(overrides), shape)]
    assert run["verdict"] == ("refused" if texts else "passed")
    assert all(text in run["reason"] for text in texts)
