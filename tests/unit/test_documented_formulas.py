"""The loss and the advantages of docs/extending.md, as they stand there: they pass their trials."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_grpo.config.schema import GRPOConfig, LossConfig
from megatron_grpo.losses.advantages import INPUTS as REWARD_INPUTS
from megatron_grpo.losses.advantages import USER_INPUTS, make_estimator
from megatron_grpo.losses.formula_trials import find_advantages_problem, find_objective_problem
from megatron_grpo.losses.objectives import INPUTS
from megatron_grpo.losses.policy_loss import make_objective

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()


def read_section(title: str) -> str:
    return re.split(r"\n## ", PAGE.partition(f"\n## {title}\n")[2])[0]


def list_parameters(section: str) -> set[str]:
    return set(re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE))


def test_the_functions_pass_their_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections = [read_section("A loss of your own"), read_section("Advantages of your own")]
    code = [block for section in sections for block in re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)]
    assert len(code) == 2
    (tmp_path / "documented_losses.py").write_text("\n".join(code))
    monkeypatch.syspath_prepend(tmp_path)
    folders = (str(tmp_path),)
    objective = LossConfig(objective="documented_losses.two_bounds", objective_options={"high": 0.3})
    assert find_objective_problem(make_objective(objective, folders)) is None
    config = GRPOConfig()
    config.adv_estimator.name = "documented_losses.over_mean"
    assert find_advantages_problem(make_estimator(config, folders), 4) is None


def test_the_tables_have_all_inputs() -> None:
    assert list_parameters(read_section("A loss of your own")) == INPUTS.keys()
    assert list_parameters(read_section("Advantages of your own")) == {*USER_INPUTS} <= REWARD_INPUTS.keys()
