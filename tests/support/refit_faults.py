"""Faults of a refit: what happens to which process, and when."""

import os
import signal
from collections.abc import Callable
from typing import Any

from megatron_grpo.config.generation_schema import RefitConfig
from megatron_grpo.weight_sync.links import Links
from megatron_grpo.weight_sync.refit_calls import RefitCalls
from megatron_grpo.weight_sync.transfer_modes import LinkMode
from megatron_grpo.weight_sync.transport import WeightTransport

FAULTY_RANK = 1
"""The rank of the policy on which faults of messages happen."""

FIRST, MIDDLE, LAST = "before the first message", "in the middle", "after the last message"
MOMENTS = (FIRST, MIDDLE, LAST)
KILL_WORKER, STALL_WORKER = "kill a vLLM worker", "stall a vLLM worker"
KILL_RANK, STALL_RANK = "kill a rank", "stall a rank"
DROP, FLIP, FAIL = "drop a message", "flip a bit", "fail"
SIGNALS = {
    KILL_WORKER: signal.SIGKILL,
    KILL_RANK: signal.SIGKILL,
    STALL_WORKER: signal.SIGSTOP,
    STALL_RANK: signal.SIGSTOP,
}


class FaultyReshard(WeightTransport):
    """Calls something between the last message and the commit, once."""

    before_commit: Callable[[], Any] | None = None

    def __init__(self, policy: Any, generation: Any, config: RefitConfig) -> None:
        calls = RefitCalls(policy, generation)
        super().__init__(calls, LinkMode(calls, config), config)

    def _commit(self, version: int, engines: tuple[int, ...], deadline: float) -> None:
        call, self.before_commit = self.before_commit, None
        if call is not None:
            call()
        super()._commit(version, engines, deadline)


class _Done:
    """What a message that is never sent looks like to its sender."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None: ...


def inject(links: Links, moment: str, target: tuple[int, int] | None, fault_name: str | None) -> None:
    """Signal a process, or lose or change a message, when it is due on a rank of the policy.

    With a message all later ones of the rank are lost: a link never skips a message, and gloo ends a process that gets
    one of another size.

    Args:
        links: the rank's links.
        moment: one of MOMENTS; of messages, the last one stands for what comes after it.
        target: a process and a signal for it.
        what: DROP, FLIP, or FAIL of the rank.
    """

    def fault(buffer: Any) -> None:
        if target is not None:
            os.kill(*target)
        if fault_name == FAIL:
            raise RuntimeError("the cable is out")
        if fault_name == FLIP:
            buffer[3] ^= 1

    begin, last = links.begin, len(links.messages) - 1
    due = {FIRST: 0, MIDDLE: (last + 1) // 2, LAST: last}[moment]

    def faulty(number: int) -> Any:
        if number == due:
            fault(links.view_buffer(number))
        return [_Done()] if fault_name == DROP and number >= due else begin(number)

    links.begin = faulty  # type: ignore[method-assign]
