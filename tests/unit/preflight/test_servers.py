"""Checks of servers that run elsewhere, and of the endpoint for agents."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_grpo.config.errors import ConfigError
from megatron_grpo.config.paths import TOKEN_VARIABLE
from megatron_grpo.environments.interface import Environment
from megatron_grpo.preflight.environment_checks import check_scoring
from megatron_grpo.preflight.load import compose_config


def test_an_endpoint_that_others_reach_has_a_token(base_overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    compose_config([*base_overrides, "generation.endpoint.enabled=true", "generation.endpoint.host=0.0.0.0"])


class AskingEnvironment(Environment):
    """One that asks the model by itself."""

    agent = True

    def score(self, requests: Any) -> Any:
        raise AssertionError("nothing is scored before a start")


def test_an_environment_that_asks_the_model_needs_the_endpoint(base_overrides: list[str]) -> None:
    kind = f"env.math.type={__name__}:{AskingEnvironment.__name__}"
    with pytest.raises(ConfigError) as caught:
        check_scoring(compose_config([*base_overrides, kind]))
    (problem,) = caught.value.problems
    assert problem.subject == kind
    assert "give generation.endpoint.enabled=true" in problem.text
    check_scoring(compose_config([*base_overrides, kind, "generation.endpoint.enabled=true"]))
