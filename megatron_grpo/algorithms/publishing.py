"""The end of a step: generation samples from the new weights."""

from __future__ import annotations

from megatron_grpo.refit.interface import TransferReport, WeightTransport


def refit_policy_generation(transport: WeightTransport, version: int) -> TransferReport:
    """Make generation sample from the policy's current weights, as `version`.

    Raises:
        RefitError: some worker did not get or verify them; generation refuses to sample until a refit succeeds.
    """
    return transport.publish(version)
