"""Engines that are added to a run, and removed, while it goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import ray

from megatron_grpo.cluster.engine_nodes import find_leaving, read_nodes
from megatron_grpo.cluster.process_log import ENGINE_NAME
from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.config.errors import ModelLostError
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.rollouts.pool import RolloutPool
from megatron_grpo.run.engine_requests import EngineState, EngineStates, take_requests, write_states
from megatron_grpo.weight_sync.refit_calls import RefitError
from megatron_grpo.weight_sync.transport import WeightTransport

logger = logging.getLogger(__name__)


class EngineResizer:
    """Adds and removes engines between the steps of a run.

    An engine that is added starts while the run goes on. Once it has started, it gets the current weights alone, then
    its part of the prompts. One that leaves gets no more prompts, and ends when its rollouts have.

    Args:
        refusal: why engines can be neither added nor removed; None: they can.
        drain_notice_s: an engine hands back its rollouts if its node drains within so many seconds, and else finishes
            them; None: the engines do not follow Ray's nodes.
        note: tells the user.
    """

    def __init__(
        self,
        generation: VllmGeneration,
        transport: WeightTransport | None,
        rollouts: RolloutPool,
        cluster: RayCluster,
        run_dir: Path,
        *,
        refusal: str | None = None,
        drain_notice_s: float | None = None,
        note: Callable[[str], None],
    ) -> None:
        self._generation, self._transport, self._rollouts = generation, transport, rollouts
        self._cluster, self._run_dir, self._refusal, self._note = cluster, run_dir, refusal, note
        self._drain_notice_s = drain_notice_s
        self._told: tuple[list[EngineState], dict[int, str]] | None = None  # what the file says, with Ray's nodes

    def resize(self, version: int) -> None:
        """Begin what was asked for, and finish what is ready.

        `version`: of the policy's weights. Raises ModelLostError if a rank of the policy is gone.
        """
        for request in take_requests(self._run_dir):
            if isinstance(request, str) or self._refusal is not None:
                self._note(request if isinstance(request, str) else f"engines stay as they are: {self._refusal}")
            elif request.remove is None:
                self._begin_add()
            else:
                self._begin_remove(request.remove, now=request.now)
        if self._drain_notice_s is not None:
            self._follow_nodes(self._drain_notice_s)
        if self._transport is not None:
            self._admit_started(self._transport, version)
        unfinished = self._end_idle()
        self._tell_states(unfinished)

    def _follow_nodes(self, drain_notice_s: float) -> None:
        """Let engines leave nodes that drain, and start some on nodes that joined."""
        nodes, generation = read_nodes(), self._generation
        locations = {
            number: self._cluster.list_hosts(number) | {generation.starts[number].processes.node}
            for number in generation.engines.keys() - self._rollouts.leaving
        }
        for number, node in sorted(find_leaving(nodes, locations).items()):
            self._note(f"{ENGINE_NAME(number)} leaves node {node.address}, which drains")
            self._begin_remove(number, now=node.is_gone_before(time.time() + drain_notice_s))
        for hosts in self._cluster.take_places(nodes):
            self._begin_add(hosts)

    def _begin_add(self, hosts: tuple[str, ...] = ()) -> None:
        self._cluster.reserve_engine(self._generation.next_number, hosts)
        self._note(f"{ENGINE_NAME(self._generation.begin_add())} is being started")

    def _begin_remove(self, number: int, *, now: bool) -> None:
        name, leaving = ENGINE_NAME(number), self._rollouts.leaving
        if number not in self._generation.engines:
            self._note(f"{name} is not removed: it is none of the engines that serve")
        elif not self._generation.engines.keys() - leaving - {number}:
            self._note(f"{name} is not removed: it is the last one")
        else:
            leaving.add(number)
            self._rollouts.share_engines()
            if now:
                self._rollouts.hand_back(number)

    def _admit_started(self, transport: WeightTransport, version: int) -> None:
        for number, reason in self._generation.take_added():
            if reason is not None:
                self._drop(number, self._cluster.explain_lack(number) or reason)
                continue
            try:
                transport.join(number, version)
            except RefitError as error:
                self._generation.remove(number)
                self._drop(number, str(error))
                if isinstance(error, ModelLostError):
                    raise
            else:
                self._rollouts.share_engines()
                self._note(f"{ENGINE_NAME(number)} serves version {version} of the weights")

    def _drop(self, number: int, reason: str) -> None:
        self._cluster.release_engine(number)
        text = f"{ENGINE_NAME(number)} was not added: {reason}"
        logger.warning("%s", text)
        self._note(text)

    def _end_idle(self) -> dict[int, int]:
        """End idle leaving engines; return the others' rollouts."""
        leaving = set(self._rollouts.leaving)
        unfinished = self._rollouts.forget_idle_engines() if leaving else {}
        for number in sorted(leaving - unfinished.keys()):
            if self._transport is not None:
                self._transport.leave(number)
            self._generation.remove(number)
            self._cluster.release_engine(number)
            self._note(f"{ENGINE_NAME(number)} has left the run")
        return unfinished

    def _tell_states(self, unfinished: Mapping[int, int]) -> None:
        generation = self._generation
        nodes = {number: start.processes.node for number, start in sorted(generation.starts.items())}
        engines = [
            EngineState(
                number,
                "leaving" if number in self._rollouts.leaving else "serving",
                restarts=generation.restarts[number],
                unfinished=unfinished.get(number, 0),
            )
            for number in nodes
        ]
        engines += [EngineState(number, "starting") for number in generation.added]
        if (engines, nodes) == self._told:
            return
        self._told = engines, nodes
        addresses = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
        located = [replace(engine, node=addresses.get(nodes.get(engine.number, ""))) for engine in engines]
        write_states(self._run_dir, EngineStates(located, self._refusal))
