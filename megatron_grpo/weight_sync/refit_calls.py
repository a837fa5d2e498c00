"""Runs on the driver: remote calls of a refit on both sides, and who is lost after a failed attempt."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from torch.distributed import TCPStore

from megatron_grpo.cluster.futures import explain_error, find_lost_calls, gather, is_canary_failure, is_lost, join_names
from megatron_grpo.cluster.overdue import report_hanging
from megatron_grpo.cluster.process_log import ENGINE_NAME, RANK_NAME
from megatron_grpo.config.errors import ModelLostError, RunError
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.trainer.model_ranks import MegatronPolicy
from megatron_grpo.weight_sync.refit_group import record_failure

# Seconds for the other calls to end once one has failed. Waits for a transfer end within `refit_group.FAILURE_CHECK_S`.
SETTLE_S = 15.0


class RefitError(RunError):
    """A refit failed, so no engine may serve the new version."""


class CanaryFailedError(RefitError):
    """Engines do not serve: their log-probabilities differ from the policy's."""


class PolicyLostError(RefitError, ModelLostError):
    """A rank of the policy is gone or hangs."""


class AttemptError(Exception):
    """One attempt failed; `lost_engines`: reasons to replace engines, by number."""

    def __init__(self, text: str, lost_engines: Mapping[int, str]) -> None:
        super().__init__(text)
        self.lost_engines = lost_engines


class RefitCalls:
    """Waits for calls of the policy's ranks and of engines."""

    def __init__(self, policy: MegatronPolicy, generation: VllmGeneration) -> None:
        self.policy, self.generation = policy, generation
        # Store of the current links: their plan, and the first failure, which ends the waits of all processes.
        self.store: TCPStore | None = None
        self.engine_boxes: list[str] = []
        """Packed boxes of an engine's ranks, once they are traced; all engines have these."""
        self.engines_convert = False
        """Whether engines convert layers on GPUs (`engine_layers.has_converted_layers`)."""

    def wait(
        self, sends: Sequence[ray.ObjectRef], receives: Mapping[int, ray.ObjectRef], deadline: float, phase_name: str
    ) -> list[Any]:
        """Wait for calls of ranks and of engines; return results in this order.

        Raises:
            CanaryFailedError: an engine does not compute what the policy does.
            AttemptError: a call failed, which is noticed without waiting for the deadline; or the deadline passed.
            PolicyLostError: a rank of the policy died or hangs.
        """
        names = [*map(RANK_NAME, range(len(sends))), *map(ENGINE_NAME, receives)]
        calls, remaining_s = [*sends, *receives.values()], max(deadline - time.monotonic(), 0.0)
        try:
            return gather(calls, deadline_s=remaining_s, phase_name=phase_name, name=names.__getitem__)
        except RunError as error:
            if is_canary_failure(error.__cause__):
                raise CanaryFailedError(str(error)) from error
            if self.store is not None:
                record_failure(self.store, str(error))
            lost_engines = find_lost_engines(sends, receives, str(error))
            self.store = None  # its last reference closes it: a process that connects later fails at once
            raise AttemptError(str(error), lost_engines) from error


def find_lost_engines(
    sends: Sequence[ray.ObjectRef], receives: Mapping[int, ray.ObjectRef], failure: str
) -> dict[int, str]:
    """Find why engines, by number, cannot take part in another attempt.

    Waits up to SETTLE_S for unfinished calls. PolicyLostError: a rank of the policy died or hangs.
    """
    calls = [*sends, *receives.values()]
    ended = set(ray.wait(calls, num_returns=len(calls), timeout=SETTLE_S)[0])
    lost_engines = {}
    for number, call in receives.items():
        if call not in ended:
            lost_engines[number] = f"{failure}; {ENGINE_NAME(number)} does not come back"
            continue
        try:
            ray.get(call)
        except RayError as error:
            if is_lost(error):
                reason = f"{ENGINE_NAME(number)} {explain_error(error)}"
                lost_engines[number] = failure if reason in failure else f"{failure}; {reason}"
    overdue = [RANK_NAME(rank) for rank, call in enumerate(sends) if call not in ended]
    _require_policy([RANK_NAME(rank) for rank in find_lost_calls(sends, 0.0)], "gone", failure)
    _require_policy([name for name in overdue if report_hanging([name])], "stuck", failure)
    # Ranks that wait for a lost engine go on once its processes are ended, so without one overdue ranks are stuck.
    if not lost_engines:
        _require_policy(overdue, "stuck", failure)
    return lost_engines


def _require_policy(missing: Sequence[str], state: str, failure: str) -> None:
    if missing:
        subject = f"{join_names(missing)} {'is' if len(missing) == 1 else 'are'}"
        raise PolicyLostError(f"{failure}; {subject} {state}")
