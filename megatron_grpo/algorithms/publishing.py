"""The end of a step: generation samples from the new weights."""

from __future__ import annotations

from megatron_grpo.config.errors import ModelLostError, RunError
from megatron_grpo.observability.timers import StepTimer
from megatron_grpo.refit.interface import RefitError, TransferReport, WeightTransport
from megatron_grpo.run.placement import Placement


def refit_policy_generation(transport: WeightTransport, version: int) -> TransferReport:
    """Make generation sample from the policy's current weights, as `version`.

    Raises:
        RefitError: some worker did not get or verify them; generation refuses to sample until a refit succeeds.
    """
    return transport.publish(version)


def publish(
    transport: WeightTransport | None, placement: Placement, version: int, timer: StepTimer
) -> TransferReport | RefitError | None:
    """`refit_policy_generation` at the end of a step, whose failure is an outcome of the step; None: without engines.

    The models have learnt from the step by then, so it counts: the loop reports and saves it before it ends the run.

    Raises:
        ModelLostError: a rank is gone that had to make room for the engines.
    """
    if transport is None:
        return None
    try:
        with placement.refit(timer), timer.phase("refit"):
            return refit_policy_generation(transport, version)
    except RefitError as error:
        return error
    except ModelLostError:
        raise
    except RunError as error:  # an engine did not wake up
        return RefitError(f"publishing version {version}: {error}")
