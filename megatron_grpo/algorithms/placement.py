"""Turns of models and engines on shared devices, and the refit, which needs both there."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_grpo.cluster.futures import is_lost
from megatron_grpo.config.errors import ModelLostError, RunError, SamplingError
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.rollouts.pool import RolloutPool
from megatron_grpo.trainer.model_ranks import ModelRanks
from megatron_grpo.weight_sync.refit_calls import CanaryFailedError, RefitError
from megatron_grpo.weight_sync.transfer_modes import TransferReport
from megatron_grpo.weight_sync.transport import WeightTransport

logger = logging.getLogger(__name__)


class Placement:
    """Moves models and engines into and out of shared devices.

    Device memory holds either the models or the engines; during a refit, the weights of both. At the start models are
    on the devices and engines asleep.

    Args:
        engines: that share devices with the models; None: they have devices of their own, and no call does anything.
        models: the policy first.
        rollouts: in flight while engines sleep (asynchronous sampling); their deadlines wait. None: there are none.
    """

    def __init__(
        self,
        engines: VllmGeneration | None = None,
        models: Sequence[ModelRanks] = (),
        rollouts: RolloutPool | None = None,
    ) -> None:
        self._engines, self._models, self._rollouts = engines, models, rollouts
        self._has_engines_awake = False
        # True during a refit and after a failure, when engines may be partly awake or not answer.
        self._unsettled = False

    def wake_engines(self, timer: StepTimer) -> None:
        """Wake the engines with the weights that they had; the models leave the devices."""
        if not self._has_engines_awake:
            with self.refit(timer):
                pass

    @contextmanager
    def refit(self, timer: StepTimer) -> Iterator[None]:
        """Hold the weights of both sides on the devices during the body."""
        if self._engines is None:
            yield
            return
        policy, *other_models = self._models
        self._unsettled = True  # until every part has succeeded
        with timer.phase("offload"):
            policy.offload(weights=False)
            for model in other_models:
                model.offload(weights=True)
        with timer.phase("wake"):
            self._engines.wake("weights")
        yield
        # The cache of keys and values takes the memory that the policy's weights leave.
        with timer.phase("offload"):
            policy.offload(weights=True)
        with timer.phase("wake"):
            self._engines.wake("kv_cache")
            if self._rollouts is not None:
                self._rollouts.restart_clocks()
        self._has_engines_awake, self._unsettled = True, False

    def offload_engines(self, timer: StepTimer, *, keep_weights: bool = True) -> None:
        """Put engines to sleep and load the models; SamplingError: an engine failed.

        `keep_weights`: engines keep their weights in host memory; false: a refit follows before they wake.
        """
        if self._engines is None or not (self._has_engines_awake or self._unsettled):
            return
        self.sleep_engines(timer, keep_weights=keep_weights)
        self._unsettled = True
        with timer.phase("onload"):
            for model in self._models:
                model.onload()
        self._unsettled = False

    def sleep_engines(self, timer: StepTimer, *, keep_weights: bool = True) -> None:
        """Put engines to sleep, and leave the devices to models."""
        if self._engines is None or not (self._has_engines_awake or self._unsettled):
            return
        with timer.phase("sleep"):
            try:
                if self._rollouts is not None:
                    self._rollouts.stop_clocks()
                self._engines.sleep(keep_weights=keep_weights)
            except RunError as error:
                # The second call after a failure loads the models in spite of it, so that they can be saved. An engine
                # that is lost holds no memory.
                if not self._unsettled and not is_lost(error.__cause__):
                    self._unsettled = True
                    raise SamplingError(str(error)) from error
                logger.warning("the models come back to the devices, although %s", error)
        self._has_engines_awake = self._unsettled = False


def publish(transport: WeightTransport, placement: Placement, version: int, timer: StepTimer) -> TransferReport:
    """Send the weights to all engines, which serve them as `version`.

    Raises RefitError if the engines do not serve the version; the models are as before.
    """
    try:
        with placement.refit(timer), timer.phase("refit"):
            report = transport.publish(version)
        # The canary needs memory to compute, which engines on shared devices get only after the refit.
        with timer.phase("refit"):
            return transport.admit(report)
    except CanaryFailedError as error:
        raise RefitError(f"{error}; {_describe_differing_weights(transport, placement, timer)}") from error
    except (RefitError, ModelLostError):
        raise
    except RunError as error:  # an engine did not wake up
        raise RefitError(f"publishing version {version}: {error}") from error


def _describe_differing_weights(transport: WeightTransport, placement: Placement, timer: StepTimer) -> str:
    try:
        placement.offload_engines(timer)  # the models' weights may be in host memory
        with placement.refit(timer):
            return transport.describe_differences()
    except RunError as error:
        return f"the weights could not be compared: {error}"
