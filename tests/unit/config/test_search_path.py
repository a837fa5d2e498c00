"""Recipes and options from folders outside the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_grpo.config.overrides import list_config_groups
from megatron_grpo.preflight.load import compose_config
from tests.support.config_problems import problems_of

RECIPE = (
    "# @package _global_\n# Mine.\ndefaults:\n  - quickstart\n  - override /loss_fn: gentle\n  - _self_\nname: mine\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "exp").mkdir()
    (tmp_path / "loss_fn").mkdir()
    (tmp_path / "exp" / "mine.yaml").write_text(RECIPE + "grpo:\n  max_num_steps: 7\n")
    (tmp_path / "loss_fn" / "gentle.yaml").write_text("ratio_clip_min: 0.05\n")
    return tmp_path


@pytest.mark.parametrize("form", ["--config-dir={}", "hydra.searchpath=[file://{}]", "hydra.searchpath=[{}]"])
def test_a_recipe_outside_the_package_is_found(folder: Path, form: str) -> None:
    config = compose_config([form.format(folder), "+exp=mine", "grpo.seed=3"])
    assert (config.name, config.grpo.max_num_steps, config.grpo.seed) == ("mine", 7, 3)
    assert (config.loss_fn.ratio_clip_min, config.loss_fn.clip_max) == (0.05, 0.05)
    assert config.policy.parallel.pipeline == 2, "it builds on a recipe of the package"
    assert "mine" not in list_config_groups()["exp"], "the folder counts for its command line only"


def test_what_is_wrong_with_a_folder_is_told(folder: Path, tmp_path: Path) -> None:
    base = ["+exp=quickstart"]
    assert problems_of([*base, "--config-dir=/no/such"]) == {"--config-dir=/no/such": "no such folder"}
    (empty := tmp_path / "empty").mkdir()
    ((_, text),) = problems_of([*base, f"--config-dir={empty}"]).items()
    assert text.startswith("has no recipe and no option: files such as exp/NAME.yaml")
    (folder / "exp" / "quickstart.yaml").write_text(RECIPE)
    ((_, text),) = problems_of([*base, f"hydra.searchpath=[{folder}]"]).items()
    assert text == "has exp/quickstart.yaml, a name that is taken already; rename it"
    (folder / "exp" / "quickstart.yaml").unlink()
    told = problems_of([f"--config-dir={folder}", "+exp=mime"])
    assert "did you mean mine?" in told["exp=mime"]
