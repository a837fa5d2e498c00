"""Checks of servers that run elsewhere, and of the endpoint for agents."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_grpo.config.errors import ConfigError
from megatron_grpo.config.paths import TOKEN_VARIABLE
from megatron_grpo.environments.interface import Environment
from megatron_grpo.preflight.environment_checks import check_scoring
from megatron_grpo.preflight.load import compose_config
from tests.support.config_problems import problems_of

AGENT = ["env.math.type=reward_functions", "env.math.reward_funcs=[m.reward]", "env.math.agent_func=m.agent"]


def test_servers_in_the_place_of_engines(given: list[str]) -> None:
    config = compose_config([*given, "generation.server.urls=[http://a:1,http://b:1]", "generation.parallel.data=2"])
    assert config.generation.server.urls == ["http://a:1", "http://b:1"]


@pytest.mark.parametrize(
    ("overrides", "subject", "text"),
    [
        (["generation.server.urls=[a:1]"], "generation.server.urls=a:1", "has the scheme 'a'"),
        (
            ["generation.server.urls=[http://a:1,http://a:1]", "generation.parallel.data=2"],
            "generation.server.urls=['http://a:1', 'http://a:1']",
            "names a server twice",
        ),
        (
            ["generation.server.urls=[http://a:1,http://b:1]"],
            "generation.parallel.data=1",
            "is the number of engines, and there are 2 servers; give 2",
        ),
        (
            ["generation.server.urls=[http://a:1]", "generation.placement=colocated"],
            "generation.placement=colocated",
            "servers (generation.server.urls) have theirs; use separate",
        ),
        (AGENT, "env.math.agent_func=m.agent", "give generation.endpoint.enabled=true"),
        (["generation.endpoint.tool_parser=hermez"], "generation.endpoint.tool_parser=hermez", "choose one of"),
        (["generation.endpoint.reasoning_parser=qwen"], "generation.endpoint.reasoning_parser=qwen", "choose one of"),
        ([*AGENT, "env.math.type=math"], "env.math.reward_funcs", "needs env.math.type=reward_functions"),
        (
            [*AGENT[:2], "env.math.agent_func=agent", "generation.endpoint.enabled=true"],
            "env.math.agent_func=agent",
            "must be written package.module.function",
        ),
        (
            ["generation.endpoint.enabled=true", "generation.endpoint.host=0.0.0.0"],
            "generation.endpoint.host=0.0.0.0",
            f"put a token into the environment variable {TOKEN_VARIABLE}, or use 127.0.0.1",
        ),
        (
            ["generation.endpoint.enabled=true", "cluster.num_nodes=2", "cluster.gpus_per_node=8"],
            "generation.endpoint.host=127.0.0.1",
            "is reached from one node, and agents run on 2; use 0.0.0.0",
        ),
    ],
)
def test_mistakes(
    given: list[str], monkeypatch: pytest.MonkeyPatch, overrides: list[str], subject: str, text: str
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    problems = problems_of([*given, *overrides])
    assert text in problems[subject]


def test_an_endpoint_that_others_reach_has_a_token(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    compose_config([*given, "generation.endpoint.enabled=true", "generation.endpoint.host=0.0.0.0"])


class AskingEnvironment(Environment):
    """One that asks the model by itself."""

    agent = True

    def score(self, requests: Any) -> Any:
        raise AssertionError("nothing is scored before a start")


def test_an_environment_that_asks_the_model_needs_the_endpoint(given: list[str]) -> None:
    kind = f"env.math.type={__name__}:{AskingEnvironment.__name__}"
    with pytest.raises(ConfigError) as caught:
        check_scoring(compose_config([*given, kind]))
    (problem,) = caught.value.problems
    assert problem.subject == kind
    assert "give generation.endpoint.enabled=true" in problem.text
    check_scoring(compose_config([*given, kind, "generation.endpoint.enabled=true"]))
