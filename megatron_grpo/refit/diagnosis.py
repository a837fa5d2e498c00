"""After an attempt at a refit that failed: which engines have to be replaced, and whether the policy is whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ray
from ray.exceptions import RayError

from megatron_grpo.cluster.futures import explain, is_lost, listed, lost_among
from megatron_grpo.cluster.late import report_hanging
from megatron_grpo.generation.vllm_generation import ENGINE_NAME
from megatron_grpo.refit.interface import PolicyLostError

SETTLE_S = 15.0
"""Time that everybody has to come back once one has failed: links that are closed are noticed at once, those that are
silent when the deadline passes, which began a little later for the ranks than for the driver."""

RANK_NAME = "policy rank {}".format


def lost_engines(sends: Sequence[ray.ObjectRef], receives: Mapping[int, ray.ObjectRef], failure: str) -> dict[int, str]:
    """Engines that cannot take part in another attempt. Waits up to SETTLE_S for calls that are not over.

    Args:
        sends: what the policy's ranks were called for, by rank; empty: nothing.
        receives: what the engines were called for, by number.
        failure: the attempt's failure, for messages.

    Returns:
        By number, why the engine has to be replaced.

    Raises:
        PolicyLostError: a rank of the policy died or hangs.
    """
    ranks = {RANK_NAME(rank): call for rank, call in enumerate(sends)}
    calls = [*sends, *receives.values()]
    over = set(ray.wait(calls, num_returns=len(calls), timeout=SETTLE_S)[0])
    lost = {}
    for number, call in receives.items():
        error = _error_of(call) if call in over else None
        if call not in over:
            lost[number] = f"{failure}; {ENGINE_NAME(number)} does not come back"
        elif error is not None and is_lost(error):
            told = f"{ENGINE_NAME(number)} {explain(error)}"
            lost[number] = failure if told in failure else f"{failure}; {told}"
    late = [name for name, call in ranks.items() if call not in over]
    _require_policy([RANK_NAME(rank) for rank in lost_among(sends, 0.0)], "gone", failure)
    _require_policy([name for name in late if report_hanging([name])], "stuck", failure)
    if not lost:  # else they may be waiting for an engine that is ended in a moment
        _require_policy(late, "stuck", failure)
    return lost


def _require_policy(missing: Sequence[str], state: str, failure: str) -> None:
    if missing:
        raise PolicyLostError(f"{failure}; {listed(missing)} is {state}, and no rank of the policy can be replaced")


def _error_of(call: ray.ObjectRef) -> RayError | None:
    """What a call that is over has raised."""
    try:
        ray.get(call)
    except RayError as error:
        return error
    return None
