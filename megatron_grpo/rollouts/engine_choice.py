"""The engines of a rollout worker: which one takes a rollout, and which are overdue, lost or leaving."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from megatron_grpo.cluster.futures import build_overdue_error
from megatron_grpo.rollouts.clock import RolloutClock
from megatron_grpo.rollouts.engine_client import EngineClient, EngineLoss

OVERDUE_CHECK_S = 0.5  # between two checks for overdue engines


class Engines:
    """The engines of a rollout worker; rollouts are assigned to them."""

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        self.clients, self.clock = list[EngineClient](), RolloutClock()
        self._losses: asyncio.Queue[EngineClient] = asyncio.Queue()
        for client in clients:
            self.add(client)

    def add(self, client: EngineClient) -> None:
        client.losses, client.clock = self._losses, self.clock
        self.clients.append(client)

    def find(self, number: int) -> EngineClient | None:
        return next((client for client in self.clients if client.number == number), None)

    def forget_idle(self) -> dict[int, int]:
        """Forget idle leaving engines; count the others' rollouts."""
        self.clients = [client for client in self.clients if client.load or not client.is_leaving]
        return {client.number: client.load for client in self.clients if client.is_leaving}

    def hand_back(self, number: int) -> None:
        """Let other engines sample what this one has not finished."""
        client = self.find(number)
        if client is None:
            return
        client.hand_back()
        self.clients.remove(client)
        for heir in self.clients:  # they have the full deadline for what comes in addition
            heir.replaced_at = self.clock.time()

    def assign(self, group_sizes: Sequence[int]) -> list[EngineClient]:
        """Choose an engine for each group, and count the load.

        Loads become as equal as groups allow. A group stays on one engine, for the prefix cache, and neighbouring
        groups share an engine; among equally loaded engines the first ones are filled first.
        """
        clients = [client for client in self.clients if not client.is_leaving]
        loads = [client.load for client in clients]
        if len(group_sizes) == 1:
            client = clients[loads.index(min(loads))]
            client.load += group_sizes[0]
            return [client]
        # Rollouts fill the engines' free capacity below a common level, one engine after the other; a group goes to the
        # engine in whose capacity its middle lies.
        level = _compute_water_level(loads, sum(group_sizes))
        ends = list(accumulate(max(0.0, level - load) for load in loads))
        assigned, begin = [], 0
        for size in group_sizes:
            client = clients[min(bisect_left(ends, begin + size / 2), len(ends) - 1)]
            client.load += size
            assigned.append(client)
            begin += size
        return assigned

    async def mark_overdue_lost(self, deadline_s: float) -> None:
        """Mark engines as lost that stay busy for `deadline_s`; runs until cancelled."""
        began = self.clock.time()
        while True:
            await asyncio.sleep(min(OVERDUE_CHECK_S, deadline_s))
            # A new engine has the full deadline, since it starts over with the requests of the lost one.
            limit = self.clock.time() - deadline_s
            slow = [client for client in self.clients if client.is_busy and max(began, client.replaced_at) <= limit]
            if not slow:
                continue
            restarts = [client.restarts for client in slow]
            names = [client.name for client in slow]
            # On a thread, because reading the stacks of overdue engines takes seconds.
            reason = str(await asyncio.to_thread(build_overdue_error, "generation", names, deadline_s))
            for client, restarts_before in zip(slow, restarts, strict=True):
                if client.restarts == restarts_before:
                    client.mark_lost(reason)

    async def wait_for_losses(self) -> dict[int, EngineLoss]:
        """Wait for lost engines; returns all losses so far, by number."""
        while True:
            clients = [await self._losses.get()]
            while not self._losses.empty():
                clients.append(self._losses.get_nowait())
            # A refit may have replaced an engine meanwhile.
            losses = {client.number: client.loss for client in clients if client.loss is not None}
            if losses:
                return losses


def _compute_water_level(loads: Sequence[int], amount: int) -> float:
    """Compute the load to which `amount` rollouts raise the lowest loads."""
    # Loads join in ascending order until the common level would stay below the next one.
    lowest: list[int] = []
    for load in sorted(loads):
        if lowest and (sum(lowest) + amount) / len(lowest) <= load:
            break
        lowest.append(load)
    return (sum(lowest) + amount) / len(lowest)
