"""Addresses, GPUs and the start of Ray: what a cluster has, and whether Ray answers at an address."""

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from megatron_grpo.cluster import machines as gpus
from megatron_grpo.cluster import ray_cluster
from megatron_grpo.cluster.machines import (
    check_address,
    check_machines,
    check_reachable,
    fill_in_gpus,
    find_interface,
)
from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.paths import check_url, is_loopback
from megatron_grpo.config.schema import ClusterConfig
from megatron_grpo.preflight.load import check_overrides, compose_config, load_config
from tests.support.config_problems import problems_of
from tests.support.message_table import read_rows

ADDRESS = "127.0.0.1:6379"


def node(count: int, alive: bool = True) -> dict[str, object]:
    return {
        "Alive": alive,
        "NodeManagerAddress": f"10.0.0.{count}",
        "Resources": {"CPU": 4.0, **({"GPU": float(count)} if count else {})},
    }


@pytest.mark.parametrize(
    ("gpus_per_node", "address", "visible_gpus", "expected"),
    [
        (None, None, 3, 3),
        (None, None, 0, 0),
        (2, None, 3, 2),
        (0, None, 3, 0),
        (None, ADDRESS, 4, 4),
        (None, ADDRESS, 0, None),
    ],
)
def test_gpus_of_this_machine_where_they_are_left_open(
    monkeypatch: pytest.MonkeyPatch,
    gpus_per_node: int | None,
    address: str | None,
    visible_gpus: int,
    expected: int | None,
) -> None:
    monkeypatch.setattr(gpus, "count_visible_gpus", lambda: visible_gpus)
    cluster = ClusterConfig(gpus_per_node=gpus_per_node, ray_address=address)
    fill_in_gpus(cluster)
    assert cluster.gpus_per_node == expected
    assert cluster.gpus == (expected or 0)


def test_layouts_that_do_not_fit_what_is_found(base_overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert compose_config(base_overrides).cluster.gpus == 0, "tests run on machines without GPUs"
    monkeypatch.setattr(gpus, "count_visible_gpus", lambda: 1)
    ((subject, text),) = problems_of(base_overrides).items()
    assert subject == "cluster.gpus_per_node=1"
    assert "1 node(s) have 1 GPUs, but policy.parallel takes 1 and generation.parallel 1" in text
    assert text.endswith("or 0 for a run on CPU")


def test_a_driver_without_gpus_does_not_guess_those_of_a_cluster(
    base_overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_grpo.preflight.machine_checks.check_reachable", lambda address: None)
    ((subject, text),) = problems_of([*base_overrides, f"cluster.ray_address={ADDRESS}"]).items()
    assert subject == "cluster.gpus_per_node=null"
    assert text.endswith("give their number, or 0 for CPU")
    config = load_config([*base_overrides, f"cluster.ray_address={ADDRESS}", "cluster.gpus_per_node=0"])
    assert config.cluster.gpus == 0


def test_a_cluster_needs_enough_machines_with_enough_gpus() -> None:
    config = ClusterConfig(num_nodes=2, gpus_per_node=8)
    assert check_machines(config, [node(8), node(8), node(0)]) is None
    assert check_machines(ClusterConfig(num_nodes=1, gpus_per_node=0), [node(0)]) is None
    text = check_machines(config, [node(8), node(4), node(8, alive=False)])
    assert text is not None
    assert "the Ray cluster has 2 machine(s), with 8, 4 GPUs" in text


class Machines:
    """What `ray.nodes` says at one look after the other; the last for good."""

    def __init__(self, *looks: list[dict[str, object]]) -> None:
        self.looks, self.number = looks, 0

    def __call__(self) -> list[dict[str, object]]:
        self.number += 1
        return self.looks[min(self.number, len(self.looks)) - 1]


def wait(machines: Machines, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 60.0) -> None:
    monkeypatch.setattr(ray_cluster, "JOIN_S", 0.01)
    monkeypatch.setattr("ray.nodes", machines)
    cluster = RayCluster(ClusterConfig(num_nodes=2, gpus_per_node=8, ray_address=ADDRESS, startup_timeout_s=timeout_s))
    cluster._await_machines()


def test_machines_that_join_late_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machines = Machines([node(8)], [node(8)], [node(8)], [node(8)], [node(8), node(8)])
    wait(machines, monkeypatch)
    assert machines.number > 4
    assert [record.message for record in caplog.records] == ["1 of 2 machines have joined: 10.0.0.8"]


def test_machines_that_never_join_are_an_error_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=r"has 1 machine\(s\), with 8 GPUs"):
        wait(Machines([node(8)]), monkeypatch, timeout_s=0.1)


def test_too_few_gpus_on_machines_that_are_there_are_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines([node(8), node(4)])
    with pytest.raises(RunError, match="with 8, 4 GPUs"):
        wait(machines, monkeypatch)
    assert machines.number <= 2


@pytest.mark.parametrize(("host", "local"), read_rows("machines", "which_hosts_only_this_machine_reaches"))
def test_which_hosts_only_this_machine_reaches(host: str, local: bool) -> None:
    assert is_loopback(host) is local


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8000", "https://node-3.cluster:443/", "http://[::1]:9", "http://host"]
)
def test_urls_of_servers(url: str) -> None:
    assert check_url(url) is None


@pytest.mark.parametrize(("url", "text"), read_rows("machines", "what_is_no_url_of_a_server"))
def test_what_is_no_url_of_a_server(url: str, text: str) -> None:
    problem = check_url(url)
    assert problem is not None
    assert text in problem


class FakeRay:
    """A Ray whose first starts fail, each after some seconds of a clock that only it moves."""

    def __init__(self, failures: int, seconds: float) -> None:
        self.failures, self.seconds, self.now = failures, seconds, 0.0
        self.folders: list[str] = []

    def init(self, *, _temp_dir: str, **_: Any) -> None:
        self.folders.append(_temp_dir)
        if len(self.folders) <= self.failures:
            self.now += self.seconds
            raise RuntimeError("the raylet did not register with the GCS")

    def is_initialized(self) -> bool:
        return False

    def shutdown(self) -> None:
        pass


def start(monkeypatch: pytest.MonkeyPatch, fake: FakeRay, *, timeout_s: float = 900.0) -> None:
    monkeypatch.setattr(ray_cluster, "ray", fake)
    monkeypatch.setattr(ray_cluster, "time", SimpleNamespace(monotonic=lambda: fake.now))
    cluster = RayCluster(ClusterConfig(gpus_per_node=0, startup_timeout_s=timeout_s))
    try:
        cluster._start_local(None)
    finally:
        cluster.shutdown()


@pytest.mark.parametrize(("failures", "seconds"), [(0, 0.0), (1, 2.0), (1, 60.0), (5, 60.0)])
def test_a_busy_machine_gets_another_try(failures: int, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(failures, seconds)
    start(monkeypatch, fake)
    assert len(fake.folders) == failures + 1
    assert all(first != second for first, second in itertools.pairwise(fake.folders))


@pytest.mark.parametrize(
    ("seconds", "timeout_s", "tries", "total"), [(2.0, 900.0, 2, 4), (60.0, 300.0, 5, 300), (60.0, 30.0, 2, 120)]
)
def test_what_did_not_come_is_named(
    seconds: float, timeout_s: float, tries: int, total: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeRay(99, seconds)
    limit = f"{tries} tries in {total} s, of at most cluster.startup_timeout_s={timeout_s:g}"
    with pytest.raises(RunError, match=f"{limit}; the last: the raylet did not register"):
        start(monkeypatch, fake, timeout_s=timeout_s)
    assert len(fake.folders) == tries


@contextmanager
def listening(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(5)


def send_settings_frame(connection: socket.socket) -> None:
    assert connection.recv(24).startswith(b"PRI * HTTP/2.0")
    connection.sendall(bytes([0, 0, 0, 4, 0]))
    connection.sendall(bytes([0, 0, 0, 0]))


@pytest.mark.parametrize("address", ["auto", "127.0.0.1:6379", "head-node.cluster:1", "[::1]:65535"])
def test_addresses_that_ray_knows(address: str) -> None:
    assert check_address(address) is None


@pytest.mark.parametrize("address", ["nonsense", "", "local", "host:0", "host:99999", ":6379", "a b:3", "ray://host:1"])
def test_addresses_of_no_known_form(address: str) -> None:
    assert "give HOST:PORT" in (check_address(address) or "")
    with pytest.raises(RunError, match=r"no Ray cluster answers at cluster\.ray_address="):
        RayCluster(ClusterConfig(ray_address=address)).start()


def test_a_head_that_answers() -> None:
    with listening(send_settings_frame) as address:
        assert check_reachable(address) is None


def test_a_server_of_another_kind() -> None:
    with listening(lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as address:
        assert check_reachable(address) == "something other than Ray answers there"
    with listening(lambda connection: connection.shutdown(socket.SHUT_RDWR)) as address:
        assert check_reachable(address) is not None


def test_a_server_that_says_nothing() -> None:
    with listening(lambda connection: time.sleep(1)) as address:
        assert check_reachable(address, timeout_s=0.2) == "nothing answers within 0.2 s"


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    begin = time.monotonic()
    with pytest.raises(RunError, match=rf"no Ray cluster answers at cluster.ray_address={address}: Connection refused"):
        RayCluster(ClusterConfig(ray_address=address)).start()
    assert time.monotonic() - begin < 5


def test_the_temporary_files_of_a_ray_of_its_own_are_private_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    init_settings: dict[str, Any] = {}
    monkeypatch.setattr(ray, "init", lambda **settings: init_settings.update(settings))
    monkeypatch.setattr(ray, "nodes", list)
    cluster = RayCluster(ClusterConfig(gpus_per_node=0))
    cluster.start()
    folder = Path(init_settings["_temp_dir"]).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    cluster.shutdown()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("variable", "configured_address", "joined"),
    read_rows("machines", "the_address_in_the_environment_is_joined_as_ray_does"),
)
def test_the_address_in_the_environment_is_joined_as_ray_does(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, configured_address: str | None, joined: str | None
) -> None:
    if variable is None:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
    else:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    inits: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "init", lambda **settings: inits.append(settings))
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr("megatron_grpo.cluster.machines.check_reachable", lambda address: None)
    monkeypatch.setattr(RayCluster, "_await_machines", lambda self: None)
    cluster = RayCluster(ClusterConfig(gpus_per_node=0, ray_address=configured_address))
    cluster.start()
    (arguments,) = inits
    assert arguments["address"] == (joined or "local")
    started_here = {"object_store_memory", "_temp_dir", "include_dashboard"}
    assert started_here & arguments.keys() == (set() if joined else started_here), "a cluster refuses these"
    cluster.shutdown()


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "127.0.0.1:1", "auto:1:2"])
def test_an_address_in_the_environment_that_does_not_work_is_named(
    monkeypatch: pytest.MonkeyPatch, base_overrides: list[str], address: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    named = "the address is RAY_ADDRESS of the environment: unset it to start Ray on this machine"
    with pytest.raises(RunError, match=f"cluster.ray_address={address}.*{named}"):
        RayCluster(ClusterConfig(gpus_per_node=0)).start()
    text = problems_of([*base_overrides, "cluster.gpus_per_node=0"])[f"cluster.ray_address={address}"]
    assert text.endswith(named)


def test_a_run_that_joins_by_the_environment_says_so(
    monkeypatch: pytest.MonkeyPatch, base_overrides: list[str]
) -> None:
    monkeypatch.setattr("megatron_grpo.preflight.machine_checks.check_reachable", lambda address: None)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    checked = check_overrides([*base_overrides, "cluster.gpus_per_node=0"])
    assert checked.require().cluster.ray_address == "10.0.0.1:6379"
    remarks = {remark.subject: remark.text for remark in checked.remarks}
    assert "unset it to start Ray here" in remarks["cluster.ray_address=10.0.0.1:6379"]
    text = problems_of(base_overrides)["cluster.gpus_per_node=null"]
    assert "give their number, or 0 for CPU; the address is RAY_ADDRESS" in text


def test_a_ray_that_the_process_has_started_already_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with pytest.raises(RunError, match=r"has called ray\.init already; call ray\.shutdown\(\)"):
        RayCluster(ClusterConfig(gpus_per_node=0)).start()


def test_a_cluster_that_wants_a_token_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray says only that it failed to connect; the cause has the traceback of its own cause as text."""

    def init(**_: Any) -> None:
        try:
            text = (
                "Last connection error: Traceback ...\nray.exceptions.AuthenticationError: RPC error: InvalidAuthToken"
            )
            raise RuntimeError(f"Failed to connect to GCS. {text}")
        except RuntimeError as error:
            raise ConnectionError("Failed to connect to Ray cluster") from error

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(RunError, match=r"wants a token, and RAY_AUTH_MODE=disabled; set RAY_AUTH_MODE=token"):
        RayCluster(ClusterConfig(gpus_per_node=0, ray_address="auto")).start()


def test_gloo_takes_the_interface_of_the_nodes_address(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {
        "lo": [SimpleNamespace(address="127.0.0.1"), SimpleNamespace(address="::1")],
        "ib0": [SimpleNamespace(address="10.1.0.7"), SimpleNamespace(address="fe80::1%ib0")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)
    monkeypatch.setattr(gpus.os, "environ", {})
    assert [find_interface(address) for address in ("10.1.0.7", "fe80::1", "10.1.0.70")] == ["ib0", "ib0", None]
    gpus.prepare_network("10.1.0.7")
    gpus.prepare_network("127.0.0.1")  # what is set stays
    assert gpus.os.environ == {"RES_OPTIONS": "timeout:1 attempts:1", "GLOO_SOCKET_IFNAME": "ib0"}


def test_roles_are_those_of_living_nodes() -> None:
    nodes = [
        {"Alive": True, "Labels": {gpus.ROLE_LABEL: gpus.TRAINING_ROLE}},
        {"Alive": False, "Labels": {gpus.ROLE_LABEL: gpus.GENERATION_ROLE}},
        {"Alive": True, "Labels": {}},
    ]
    assert gpus.list_roles(nodes) == {"training"}
    assert gpus.list_roles(nodes[1:]) == set()
