"""Who has the devices: engines and models in training have their own, or the same in turn."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_grpo.cluster.futures import is_lost
from megatron_grpo.config.errors import RunError, SamplingError
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.observability.timers import StepTimer
from megatron_grpo.policy.driver.rank_group import RankGroup

logger = logging.getLogger(__name__)


class Placement:
    """Engines and models have devices of their own: whoever has something to do does it."""

    def turn_to_sampling(self, timer: StepTimer) -> None:
        """From here on engines sample, until `turn_to_training`; the timer counts what that takes."""

    def turn_to_training(self, timer: StepTimer) -> None:
        """From here on models compute and are saved, until `turn_to_sampling` or a refit."""

    @contextmanager
    def refit(self, timer: StepTimer) -> Iterator[None]:
        """Around a refit, which comes in the turn of training; when it has succeeded it is the turn of sampling."""
        yield


class Colocated(Placement):
    """Engines and models share devices, whose memory holds either at a time, and in a refit the weights of both.

    It is the turn of training when this is made: engines sleep and models are on the devices.

    Args:
        generation: the engines.
        policy: whose weights a refit sends.
        others: what else is trained.
    """

    def __init__(self, generation: VllmGeneration, policy: RankGroup, others: Sequence[RankGroup] = ()) -> None:
        self._generation, self._policy, self._others = generation, policy, others
        self._sampling = False
        self._unsettled = False
        """In a refit, or since something failed: engines may be half awake, or not answer."""

    def turn_to_sampling(self, timer: StepTimer) -> None:
        """Without a refit in between the engines have the weights that they had before, from host memory."""
        if not self._sampling:
            with self.refit(timer):
                pass

    def turn_to_training(self, timer: StepTimer) -> None:
        """Let engines sleep and bring the models back to the devices.

        Raises:
            SamplingError: an engine failed; called again, this brings the models back all the same, to be saved.
            RunError: a rank of a model failed.
        """
        if not self._sampling and not self._unsettled:
            return
        with timer.phase("sleep"):
            try:
                self._generation.sleep()
            except RunError as error:
                if not self._unsettled and not is_lost(error.__cause__):  # one that is lost has no memory
                    self._unsettled = True
                    raise SamplingError(str(error)) from error
                logger.warning("what is trained comes back to the devices, although %s", error)
        with timer.phase("onload"):
            for model in (self._policy, *self._others):
                model.onload()
        self._sampling = self._unsettled = False

    @contextmanager
    def refit(self, timer: StepTimer) -> Iterator[None]:
        """What the refit does not need leaves the devices before it, the policy's weights after it."""
        self._unsettled = True  # until all of it has succeeded
        with timer.phase("offload"):
            self._policy.offload(weights=False)
            for model in self._others:
                model.offload(weights=True)
        with timer.phase("wake"):
            self._generation.wake("weights")
        yield
        with timer.phase("offload"):
            self._policy.offload(weights=True)
        with timer.phase("wake"):
            self._generation.wake("kv_cache")
        self._sampling, self._unsettled = True, False
