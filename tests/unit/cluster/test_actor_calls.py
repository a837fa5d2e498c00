"""Calls of actors by the method itself: only its name is used, so that fakes and protocols do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Protocol

import pytest

from megatron_grpo.cluster.actor_calls import call_actor, call_actor_for_many, stream_actor


class Sampler(Protocol):
    def sample(self, prompt: str, *, samples: int = 1) -> list[str]: ...


class FakeMethod:
    """A remote method, which answers with its options and arguments."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def options(self, **options: Any) -> FakeMethod:
        return FakeMethod(**options)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        call = (self._options, args, kwargs)
        results = self._options.get("num_returns", 1)
        return [call] * results if isinstance(results, int) and results > 1 else call


ACTOR = SimpleNamespace(sample=FakeMethod())


def test_a_call_has_its_arguments() -> None:
    assert call_actor(ACTOR, Sampler.sample, "a", samples=2) == ({}, ("a",), {"samples": 2})


def test_a_stream_is_a_generator_of_ray() -> None:
    assert stream_actor(ACTOR, Sampler.sample, "a") == ({"num_returns": "streaming"}, ("a",), {})


@pytest.mark.parametrize("results", [1, 3])
def test_many_results_have_a_reference_each(results: int) -> None:
    assert (
        call_actor_for_many(ACTOR, results, Sampler.sample, "a") == [({"num_returns": results}, ("a",), {})] * results
    )
