"""The Ray cluster of a run, and its reserved GPUs."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatron_grpo.cluster import machines
from megatron_grpo.cluster.allocators import CPU_SETTINGS
from megatron_grpo.cluster.cleanup import FolderRemover, keep_sigterm_handler
from megatron_grpo.cluster.engine_nodes import NODE_LABEL, Node, find_places, read_nodes
from megatron_grpo.cluster.process_log import read_log_environment
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.paths import read_family_environment
from megatron_grpo.config.schema import ClusterConfig, ParallelConfig

_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
RAY_WAITS_S = 25.0  # a try that fails later than this ran into one of Ray's own deadlines
JOIN_S = 1.0  # seconds between two checks for machines that have not joined yet
# Environment variable of processes that use GPUs of policy ranks: Ray's ids of these GPUs, separated by commas.
SHARED_GPUS = "MEGATRON_GRPO_SHARED_GPUS"
# Size of the object store on CPUs: batches of a tiny model are small, and Ray's default is a third of the memory.
OBJECT_STORE_BYTES = 512 * 2**20

logger = logging.getLogger(__name__)


class RayCluster:
    """Starts or joins Ray and reserves GPUs for ranks and engines."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self._policy_group: PlacementGroup | None = None
        self._value_group: PlacementGroup | None = None
        self._teacher_groups: list[PlacementGroup] = []
        self._engine_groups: dict[int, PlacementGroup] = {}  # by number of the engine
        self._engine_bundles: list[dict[str, float]] = []  # of one engine; empty: engines reserve nothing
        self._engine_places: dict[int, tuple[str, ...]] = {}  # nodes of engines that may be on no other
        self._settled_nodes: set[str] = set()  # those of the start, and those that got engines since then
        self._ranks_per_engine = 1
        # Around the folder of Ray's session, which Ray opens to everybody; None: Ray was not started here.
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        # Roles that nodes have; processes of such a role start there alone.
        self._roles: set[str] = set()
        # Ray's ids of the policy's GPUs if engines and the value model share them; else empty.
        self._shared_gpus: list[str] = []

    def start(self, remove_if_killed: FolderRemover | None = None) -> None:
        """Start Ray on this machine, or join the cluster at `cluster.ray_address`.

        RunError: no cluster answers at the address, the cluster has too few GPUs, Ray does not start here, or this
        process already uses Ray.
        """
        if ray.is_initialized():
            raise RunError("this process has called ray.init already; call ray.shutdown() before the run is started")
        machines.fill_in_address(self.config)
        with keep_sigterm_handler():
            if self.config.ray_address is None:
                self._start_local(remove_if_killed)
            else:
                _join(self.config.ray_address)
                self._await_machines()
        self._settled_nodes = {str(node["NodeID"]) for node in ray.nodes() if node["Alive"]}

    def _start_local(self, remove_if_killed: FolderRemover | None) -> None:
        # A short name, because the path of a socket has at most 107 bytes.
        self._temporary = tempfile.TemporaryDirectory(prefix="ray_", ignore_cleanup_errors=True)
        if remove_if_killed is not None:
            remove_if_killed(self._temporary.name)
        memory = None if self.config.gpus else OBJECT_STORE_BYTES
        began, tries = time.monotonic(), 0
        while True:
            tries, start = tries + 1, time.monotonic()
            # Each try has a session of its own: processes of the last one may still end.
            folder = os.path.join(self._temporary.name, f"r{tries}")
            try:
                # Without an address Ray would join one in the environment, which takes no such arguments.
                ray.init(
                    address=machines.LOCAL,
                    include_dashboard=False,
                    object_store_memory=memory,
                    _temp_dir=folder,
                    **_QUIET,
                )
                return
            except Exception as error:  # Ray's own class, if one of its processes does not answer within 30 to 60 s
                ray.shutdown()
                now = time.monotonic()
                # A busy machine may need longer than Ray waits; an error at once is hardly another at the third try.
                is_busy = now - start >= RAY_WAITS_S and now - began < self.config.startup_timeout_s
                if tries > 1 and not is_busy:
                    text = f"Ray does not start on this machine: {tries} tries in {now - began:.0f} s, of at most"
                    limit = f"cluster.startup_timeout_s={self.config.startup_timeout_s:g}"
                    raise RunError(f"{text} {limit}; the last: {error}") from error
                logger.warning("Ray did not start within %.0f s (%s); trying again", now - start, error)

    def _await_machines(self) -> None:
        # Machines of one job join minutes apart, because each first imports a container image. So a lack of GPUs is an
        # error only once `cluster.num_nodes` machines have joined.
        end = time.monotonic() + self.config.startup_timeout_s
        logged: list[str] = []
        while (shortage := machines.check_machines(self.config, ray.nodes())) is not None:
            joined = sorted(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"])
            if len(joined) >= self.config.num_nodes or time.monotonic() > end:
                raise RunError(shortage)
            if joined != logged:
                text = "%d of %d machines have joined: %s"
                logger.warning(text, len(joined), self.config.num_nodes, ", ".join(joined))
                logged = joined
            time.sleep(JOIN_S)
        self._roles = machines.list_roles(ray.nodes())

    def reserve(
        self,
        policy: ParallelConfig | None,
        generation: GenerationParallelConfig | None,
        value: ParallelConfig | None,
        teachers: Sequence[ParallelConfig] = (),
    ) -> None:
        """Reserve GPUs for models and engines; does nothing on CPUs."""
        per_node = self.config.gpus
        if not per_node:
            return
        needs: dict[str, int] = {}  # GPUs of each component, for the error message
        # Ranks fill whole nodes in rank order, so that tensor-parallel neighbours share a node.
        if policy is not None:
            self._policy_group = self._fill_nodes(policy.world_size, per_node)
            needs["the policy"] = policy.world_size
        if value is not None:
            self._value_group = self._fill_nodes(value.world_size, per_node)
            needs["the value model"] = value.world_size
        self._teacher_groups = [self._fill_nodes(teacher.world_size, per_node) for teacher in teachers]
        if teachers:
            needs["the teachers"] = sum(teacher.world_size for teacher in teachers)
        if generation is not None:
            ranks = generation.ranks_per_engine
            # An engine that does not fit a node gets a bundle per GPU, which vLLM's Ray executor fills.
            is_on_node = ranks <= per_node
            self._engine_bundles = [{"GPU": ranks, "CPU": 1}] if is_on_node else [{"GPU": 1, "CPU": 1}] * ranks
            for engine in range(generation.data):
                self.reserve_engine(engine)
            needs["generation"] = ranks * generation.data
        groups = (self._policy_group, self._value_group, *self._teacher_groups, *self._engine_groups.values())
        self._await_groups([group for group in groups if group], needs)

    def reserve_engine(self, engine: int, hosts: tuple[str, ...] = ()) -> None:
        """Begin to reserve the GPUs of an engine.

        `hosts`: ids of its nodes; empty: nodes for engines.
        """
        if hosts:
            self._engine_places[engine] = hosts
        if self._engine_bundles:
            self._engine_groups[engine] = self._pack(self._engine_bundles, self._select_place(engine))

    def release_engine(self, engine: int) -> None:
        """Give back the GPUs of an engine that has ended."""
        self._engine_places.pop(engine, None)
        if engine in self._engine_groups:
            remove_placement_group(self._engine_groups.pop(engine))

    def take_places(self, nodes: Sequence[Node]) -> list[tuple[str, ...]]:
        """Find room for engines on nodes that have joined, once for each node."""
        has_role = machines.GENERATION_ROLE in self._roles
        joined = [
            node
            for node in nodes
            if node.id not in self._settled_nodes
            and (node.role == machines.GENERATION_ROLE or (node.role is None and not has_role))
        ]
        engines = find_places(joined, self._engine_bundles)
        self._settled_nodes.update(*engines)
        return engines

    def list_hosts(self, engine: int) -> set[str]:
        """List the nodes on which an engine has GPUs; empty on CPUs."""
        group = self._engine_groups.get(engine)
        hosts = () if group is None else placement_group_table(group)["bundles_to_node_id"].values()
        return {host for host in hosts if host}  # empty: the bundle has no node

    def explain_lack(self, engine: int) -> str | None:
        """Say which GPUs an engine lacks; None: none."""
        group = self._engine_groups.get(engine)
        # `PlacementGroup.wait(0)` is False of a group that exists where Ray answers later than at once.
        if group is None or placement_group_table(group)["state"] == "CREATED":
            return None
        needed, free = sum(bundle["GPU"] for bundle in self._engine_bundles), ray.available_resources().get("GPU", 0)
        return f"it needs {needed:g} GPUs on nodes for engines, and {free:g} of the cluster are free"

    def reserve_shared(self, ranks: int, guests: Sequence[int]) -> None:
        """Reserve a GPU for each rank of the policy.

        `guests`: of each process that shares GPUs, the policy's rank on its first one.
        """
        if self.config.gpus:
            self._policy_group = self._fill_nodes(ranks, self.config.gpus, guests)
            self._await_groups([self._policy_group], {"the policy": ranks})

    def share(self, devices: list[str], ranks_per_engine: int) -> None:
        """Let engines and the value model use the policy's GPUs.

        `devices`: Ray's id of the GPU of each policy rank; empty on CPUs.
        """
        self._shared_gpus, self._ranks_per_engine = devices, ranks_per_engine

    def require_shared(self, devices: list[str]) -> None:
        """Require that restarted policy ranks have the GPUs that engines share."""
        if devices != self._shared_gpus:
            text = f"the policy's ranks have restarted on GPUs {devices}, and its engines are on {self._shared_gpus}"
            raise RunError(f"{text}; start the run again, which goes on from its newest checkpoint")

    def _fill_nodes(self, ranks: int, per_node: int, guests: Sequence[int] = ()) -> PlacementGroup:
        bundles = []
        for begin in range(0, ranks, per_node):
            gpus = min(per_node, ranks - begin)
            bundles.append({"GPU": gpus, "CPU": gpus + sum(begin <= rank < begin + per_node for rank in guests)})
        return self._pack(bundles, self._select_nodes(machines.TRAINING_ROLE))

    def _pack(self, bundles: Sequence[Mapping[str, float]], selector: dict[str, str]) -> PlacementGroup:
        selectors = [selector] * len(bundles)
        return placement_group(list(bundles), strategy="PACK", bundle_label_selector=selectors)

    def _select_place(self, engine: int) -> dict[str, str]:
        hosts = self._engine_places.get(engine)
        return {NODE_LABEL: f"in({','.join(hosts)})"} if hosts else self._select_nodes(machines.GENERATION_ROLE)

    def _move_engine(self, engine: int) -> None:
        """Reserve elsewhere what an engine has on nodes that drain or are gone."""
        # Ray starts nothing on a draining node, not even in a group that was reserved there before.
        hosts = self.list_hosts(engine).union(self._engine_places.get(engine, ()))
        if hosts and hosts - {node.id for node in read_nodes() if node.drains_until is None}:
            self.release_engine(engine)
            self.reserve_engine(engine)

    def _select_nodes(self, role: str) -> dict[str, str]:
        """Select the nodes of a role by label; empty: no node has it."""
        return {machines.ROLE_LABEL: role} if role in self._roles else {}

    def _await_groups(self, groups: list[PlacementGroup], needs: dict[str, int]) -> None:
        ready, pending = ray.wait(
            [group.ready() for group in groups], num_returns=len(groups), timeout=self.config.startup_timeout_s
        )
        if pending:
            free = ray.available_resources().get("GPU", 0)
            demand = ", ".join(f"{component} needs {count}" for component, count in needs.items())
            placed = f"{free:g} are still free after placing {len(ready)} of {len(groups)} groups"
            raise RunError(f"the cluster has not enough free GPUs: {demand}; {placed}")

    def build_policy_options(self, rank: int) -> dict[str, Any]:
        """Build the Ray options of a policy rank."""
        return self._build_rank_options(self._policy_group, rank)

    def build_value_options(self, rank: int) -> dict[str, Any]:
        """Build the Ray options of a rank of the value model."""
        if self._shared_gpus:
            return self._build_guest_options(rank, [self._shared_gpus[rank]])
        return self._build_rank_options(self._value_group, rank)

    def build_teacher_options(self, teacher: int, rank: int) -> dict[str, Any]:
        """Build the Ray options of a rank of a teacher, by its number."""
        if self._shared_gpus:
            return self._build_guest_options(rank, [self._shared_gpus[rank]])
        return self._build_rank_options(self._teacher_groups[teacher] if self._teacher_groups else None, rank)

    def _build_rank_options(self, group: PlacementGroup | None, rank: int) -> dict[str, Any]:
        if group is None:
            selector = self._select_nodes(machines.TRAINING_ROLE)
            return {"num_cpus": 0, "label_selector": selector, "runtime_env": {"env_vars": CPU_SETTINGS}}
        bundle = rank // self.config.gpus
        return {"num_cpus": 1, "num_gpus": 1, "scheduling_strategy": _schedule_in(group, bundle)}

    def build_engine_options(self, engine: int) -> dict[str, Any]:
        """Build the Ray options of a generation engine."""
        if self._shared_gpus:
            # The engine sees the GPUs of all policy ranks on its node: its ranks use the first ones, and read weights
            # from all.
            first = engine * self._ranks_per_engine
            begin = first // self.config.gpus * self.config.gpus
            on_node = self._shared_gpus[begin : begin + self.config.gpus]
            used = self._shared_gpus[first : first + self._ranks_per_engine]
            return self._build_guest_options(first, [*used, *(gpu for gpu in on_node if gpu not in used)])
        self._move_engine(engine)
        if not self._engine_bundles:
            return {"num_cpus": 0, "label_selector": self._select_place(engine)}
        group = self._engine_groups[engine]
        if len(group.bundle_specs) > 1:
            return {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": _schedule_in(group, -1)}
        gpus = int(group.bundle_specs[0]["GPU"])
        return {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": _schedule_in(group, 0)}

    def _build_guest_options(self, rank: int, devices: list[str]) -> dict[str, Any]:
        # `rank`: of the policy, on the same node.
        assert self._policy_group is not None, "reserve_shared() comes first"
        return {
            "num_cpus": 1,
            "num_gpus": 0,
            "scheduling_strategy": _schedule_in(self._policy_group, rank // self.config.gpus),
            "runtime_env": {"env_vars": dict.fromkeys(("CUDA_VISIBLE_DEVICES", SHARED_GPUS), ",".join(devices))},
        }

    def shutdown(self) -> None:
        """Leave Ray, or end it if this process started it; idempotent."""
        if ray.is_initialized():
            ray.shutdown()
        if self._temporary is not None:
            self._temporary.cleanup()


def _join(address: str) -> None:
    reason = machines.check_address(address) or machines.check_reachable(address)
    if reason is None:
        try:
            environment = read_log_environment() | read_family_environment()
            ray.init(address=address, runtime_env={"env_vars": environment}, **_QUIET)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = _explain_failed_join(error)
    if reason is not None:
        message = f"no Ray cluster answers at cluster.ray_address={address}: {reason}"
        raise RunError(f"{message}{machines.explain_origin(address)}")


def _explain_failed_join(error: BaseException) -> str:
    # Ray's own message does not mention a missing token.
    cause: BaseException | None = error
    while cause is not None and ray.exceptions.AuthenticationError.__name__ not in f"{type(cause).__name__} {cause}":
        cause = cause.__cause__ or cause.__context__  # a cause may hold the traceback of its own cause as text
    if cause is None:
        return str(error)
    mode = os.environ.get("RAY_AUTH_MODE", "disabled")
    return (
        f"{error}: the cluster wants a token, and RAY_AUTH_MODE={mode}; set RAY_AUTH_MODE=token, and give its token in "
        "RAY_AUTH_TOKEN or ~/.ray/auth_token"
    )


def _schedule_in(group: PlacementGroup, bundle: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=True
    )


def list_assigned_gpus() -> list[str]:
    """List Ray's ids of this process's GPUs; empty on CPUs."""
    shared = os.environ.get(SHARED_GPUS)
    return [str(gpu) for gpu in ray.get_gpu_ids()] if shared is None else shared.split(",")


def find_node_address() -> str:
    """Find the address of this node for the run's other processes."""
    if machines.LOCAL_MARKER in os.environ:
        return "127.0.0.1"
    return str(ray.util.get_node_ip_address())
