"""The attempts of a refit, with links and transfers that are made up: what is tried again, and what is replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from megatron_grpo.config.errors import RunError, SamplingError
from megatron_grpo.config.generation_schema import GenerationParallelConfig, RefitConfig, RefitMode
from megatron_grpo.config.schema import GenerationConfig
from megatron_grpo.weight_sync.transport import (
    AttemptError,
    PolicyLostError,
    RefitError,
    TransferReport,
    WeightTransport,
)

BAD = AttemptError("a bit was flipped", {})


def gone(*engines: int) -> AttemptError:
    return AttemptError("no answer", {engine: f"engine {engine} died" for engine in engines})


class FakeGeneration:
    """Engines that are replaced as often as `left` says."""

    def __init__(self, left: int = 9) -> None:
        self.config = GenerationConfig(parallel=GenerationParallelConfig(tensor=2, data=3))
        self.left = left
        self.replaced: list[list[int]] = []

    def replace(self, lost: Mapping[int, str]) -> None:
        if not self.left:
            raise RunError("; ".join(lost.values()) + "; that was the last one")
        self.left -= 1
        self.replaced.append(list(lost))


class Scripted(WeightTransport):
    """Each attempt takes the next of `outcomes`: an error, or None for one that works; so do links."""

    mode: ClassVar[RefitMode] = "reshard"

    def __init__(self, generation: FakeGeneration, *outcomes: Exception | None, retries: int = 1) -> None:
        faked: Any = generation
        super().__init__(faked, faked, RefitConfig(retries=retries))
        self.outcomes = list(outcomes)
        self.log: list[tuple[Any, ...]] = []

    def _connect(self, engines: tuple[int, ...]) -> None:
        self._linked = engines
        self.log.append(("links", engines))

    def _attempt(self, version: int, engines: tuple[int, ...]) -> TransferReport:
        self.log.append((version, engines))
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if outcome is not None:
            raise outcome
        return TransferReport(version=version, bytes_sent=1, tensors=1, buckets=1, seconds=0.0)


ALL = (0, 1, 2)


def test_links_are_made_once_and_anew_after_a_failure() -> None:
    transport = Scripted(FakeGeneration(), None, None, BAD)
    transport.connect()
    for version in (1, 2):
        assert transport.publish(version).retries == 0
    assert transport.publish(3).retries == 1
    links = ("links", ALL)
    assert transport.log == [links, (1, ALL), (2, ALL), (3, ALL), links, (3, ALL)]


def test_an_attempt_that_costs_an_engine_is_no_retry() -> None:
    generation = FakeGeneration()
    transport = Scripted(generation, gone(1), gone(0, 2), retries=0)
    report = transport.publish(4)
    assert generation.replaced == [[1], [0, 2]]
    assert report.retries == 2
    assert report.replaced == tuple(
        f"generation engine {engine} was replaced: engine {engine} died" for engine in (1, 0, 2)
    )
    assert transport.publish(5).replaced == (), "they are told once"


def test_retries_are_counted_beside_replacements() -> None:
    transport = Scripted(FakeGeneration(), BAD, gone(1), BAD, retries=1)
    with pytest.raises(
        RefitError, match=r"^a bit was flipped; tried again: no answer; tried again: a bit was flipped$"
    ):
        transport.publish(4)


def test_an_engine_that_is_not_replaced_any_more_ends_the_refit() -> None:
    transport = Scripted(FakeGeneration(left=1), gone(1), gone(1))
    with pytest.raises(RefitError, match=r"^engine 1 died; that was the last one$"):
        transport.publish(4)


def test_nothing_is_tried_without_the_whole_policy() -> None:
    transport = Scripted(FakeGeneration(), PolicyLostError("policy rank 1 is gone"), retries=5)
    with pytest.raises(PolicyLostError):
        transport.publish(4)
    assert [entry for entry in transport.log if entry[0] == 4] == [(4, ALL)]


def test_engines_that_were_lost_in_between_get_what_was_published_last_and_the_others_nothing() -> None:
    generation = FakeGeneration()
    transport = Scripted(generation, None, BAD)
    transport.publish(7)
    transport.restore({2: "it died over a response", 0: "so did this"})
    assert generation.replaced == [[2, 0]]
    links = ("links", (0, 2))
    assert transport.log[2:] == [links, (7, (0, 2)), links, (7, (0, 2))]
    report = transport.publish(8)
    assert transport.log[-2:] == [("links", ALL), (8, ALL)], "links to two engines are not links to three"
    assert (report.retries, len(report.replaced)) == (0, 2)


@pytest.mark.parametrize(("left", "outcomes"), [(0, [None]), (1, [None, BAD, BAD]), (1, [None, gone(1)])])
def test_what_cannot_be_restored_is_no_failure_of_what_is_trained(left: int, outcomes: list[Any]) -> None:
    transport = Scripted(FakeGeneration(left), *outcomes)
    transport.publish(7)
    with pytest.raises(SamplingError):
        transport.restore({1: "it died over a response"})
