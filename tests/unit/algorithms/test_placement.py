"""The order of events on shared devices: never both sides at a time, and the weights of both only in a refit."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from megatron_grpo.algorithms.placement import Placement, publish
from megatron_grpo.config.errors import ModelLostError, RunError, SamplingError
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.weight_sync.refit_calls import CanaryFailedError, RefitError

REFIT = ["policy offloads", "value offloads all", "weights wake", "refit", "policy offloads all", "kv_cache wake"]
TO_TRAINING = ["engines sleep", "policy onloads", "value onloads"]


class Events:
    """Engines, models and a transport that say what they do; some of it may fail."""

    def __init__(self, fails: str = "", error: type[RunError] = RunError) -> None:
        self.log: list[str] = []
        self.fails, self.error = fails, error
        self.cause: Exception | None = None

    def happens(self, event: str) -> None:
        self.log.append(event)
        if event == self.fails:
            raise (RefitError if event == "refit" else self.error)(f"{event}: failed") from self.cause

    def take(self) -> list[str]:
        log, self.log = self.log, []
        return log

    def sleep(self, *, keep_weights: bool) -> None:
        self.keeps_weights = keep_weights
        self.happens("engines sleep")

    def wake(self, part: str) -> None:
        self.happens(f"{part} wake")

    def stop_clocks(self) -> None:
        self.happens("deadlines stop")

    def restart_clocks(self) -> None:
        self.happens("deadlines go on")

    def publish(self, version: int) -> Any:
        self.happens("refit")
        return version

    def admit(self, report: Any) -> Any:
        if self.fails == "canary":
            raise CanaryFailedError("engine 0 must not serve")
        return report

    def describe_differences(self) -> str:
        self.happens("comparison")
        return "model.norm.weight differs"


class Model:
    def __init__(self, events: Events, name: str) -> None:
        self._events, self._name = events, name

    def offload(self, *, weights: bool) -> None:
        self._events.happens(f"{self._name} offloads{' all' if weights else ''}")

    def onload(self) -> None:
        self._events.happens(f"{self._name} onloads")


def make_colocated(events: Any) -> Placement:
    models: Any = Model(events, "policy"), Model(events, "value")
    return Placement(events, models)


def publish_with(placement: Placement, events: Any, timer: StepTimer | None = None) -> Any:
    return publish(events, placement, 7, timer or StepTimer())


def test_a_run_in_turns() -> None:
    events = Events()
    placement, timer = make_colocated(events), StepTimer()
    assert publish_with(placement, events) == 7
    assert events.take() == REFIT, "the start"
    placement.wake_engines(timer)
    assert events.take() == []
    placement.offload_engines(timer, keep_weights=False)
    assert events.take() == TO_TRAINING
    assert not events.keeps_weights, "the step's refit brings others"
    placement.offload_engines(timer)
    assert events.take() == []
    assert publish_with(placement, events, timer) == 7
    assert events.take() == REFIT
    assert timer.seconds.keys() == {"sleep", "onload", "offload", "wake", "refit", "total"}
    placement.offload_engines(StepTimer())  # a checkpoint
    assert events.take() == TO_TRAINING
    placement.wake_engines(StepTimer())
    assert events.take() == [event for event in REFIT if event != "refit"], "the weights are the engines' own"


def test_deadlines_of_rollouts_in_flight_stand_still_while_engines_sleep() -> None:
    events: Any = Events()
    placement = Placement(events, [Model(events, "policy"), Model(events, "value")], events)  # type: ignore[list-item]
    publish_with(placement, events)
    assert events.take() == [*REFIT, "deadlines go on"]
    placement.offload_engines(StepTimer())
    assert events.take() == ["deadlines stop", *TO_TRAINING]


def test_apart_nothing_happens_but_the_refit() -> None:
    events, timer = Events(), StepTimer()
    placement = Placement()
    placement.wake_engines(timer)
    placement.offload_engines(timer)
    assert publish_with(placement, events, timer) == 7
    assert events.take() == ["refit"]
    assert timer.seconds.keys() == {"refit", "total"}


@pytest.mark.parametrize("fails", ["refit", "weights wake", "kv_cache wake", "policy offloads all"])
def test_what_was_learnt_can_be_saved_after_a_refit_that_failed(fails: str) -> None:
    """Engines that do not go to sleep then are no obstacle."""
    events = Events(fails)
    placement = make_colocated(events)
    with pytest.raises(RefitError, match=f"{fails}: failed"):
        publish_with(placement, events)
    assert events.take()[-1] == fails
    events.fails = "engines sleep"
    placement.offload_engines(StepTimer())
    assert events.take() == TO_TRAINING


@pytest.mark.parametrize("shared", [True, False])
def test_weights_are_compared_after_a_failed_canary_with_both_models_on_the_devices(shared: bool) -> None:
    events = Events("canary")
    with pytest.raises(RefitError, match=r"^engine 0 must not serve; model\.norm\.weight differs$"):
        publish_with(make_colocated(events) if shared else Placement(), events)
    compared = ["comparison" if event == "refit" else event for event in REFIT]
    assert events.take() == ([*REFIT, *TO_TRAINING, *compared] if shared else ["refit", "comparison"])


def test_a_comparison_that_fails_hides_nothing() -> None:
    class Broken(Events):
        def describe_differences(self) -> str:
            raise RunError("no memory")

    events = Broken("canary")
    with pytest.raises(RefitError, match=r"^engine 0 must not serve; the weights could not be compared: no memory$"):
        publish_with(make_colocated(events), events)


def test_finished_steps_can_be_saved_when_an_engine_does_not_go_to_sleep() -> None:
    events = Events()
    placement = make_colocated(events)
    publish_with(placement, events)
    events.take()
    events.fails = "engines sleep"
    with pytest.raises(SamplingError, match="engines sleep: failed"):
        placement.offload_engines(StepTimer())
    assert events.take() == TO_TRAINING[:1]
    placement.offload_engines(StepTimer())  # the loop saves
    assert events.take() == TO_TRAINING


def test_a_rank_that_is_gone_is_no_failure_of_the_refit() -> None:
    events = Events("policy offloads", ModelLostError)
    with pytest.raises(ModelLostError):
        publish_with(make_colocated(events), events)


def test_what_was_learnt_can_be_saved_when_an_engine_has_died() -> None:
    """It has given up its memory by that, and is as good as asleep."""
    events = Events()
    placement = make_colocated(events)
    publish_with(placement, events)
    events.take()
    events.fails, events.cause = "engines sleep", ActorDiedError()
    placement.offload_engines(StepTimer())
    assert events.take() == TO_TRAINING
