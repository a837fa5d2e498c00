"""Environments with tools read calls in the test's own process, except where a test asks for the limits."""

import pytest

from tests.support.calls_here import CallsHere


@pytest.fixture(autouse=True)
def calls_here(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "limited" not in request.node.name:
        monkeypatch.setattr("megatron_grpo.environments.tools.LimitedCalls", CallsHere)
