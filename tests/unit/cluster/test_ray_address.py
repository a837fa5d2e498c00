"""Whether Ray answers at an address is known within seconds; servers that talk as gRPC does stand in for it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from megatron_grpo.cluster.machines import check_address, check_reachable
from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import ClusterConfig
from megatron_grpo.preflight.load import check_overrides
from tests.support.config_problems import problems_of


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


def settings_frame(connection: socket.socket) -> None:
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
    with listening(settings_frame) as address:
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
    given: dict[str, Any] = {}
    monkeypatch.setattr(ray, "init", lambda **settings: given.update(settings))
    cluster = RayCluster(ClusterConfig(gpus_per_node=0))
    cluster.start()
    folder = Path(given["_temp_dir"]).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    cluster.shutdown()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("variable", "base_overrides", "joined"),
    [
        (None, None, None),
        ("", None, None),
        ("local", None, None),
        ("10.0.0.1:6379", None, "10.0.0.1:6379"),
        (" 10.0.0.1:6379 ", None, "10.0.0.1:6379"),
        ("auto", None, "auto"),
        ("10.0.0.1:6379", "auto", "auto"),
    ],
)
def test_the_address_in_the_environment_is_joined_as_ray_does(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, base_overrides: str | None, joined: str | None
) -> None:
    if variable is None:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
    else:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    inits: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "init", lambda **settings: inits.append(settings))
    monkeypatch.setattr("megatron_grpo.cluster.machines.check_reachable", lambda address: None)
    monkeypatch.setattr(RayCluster, "_await_machines", lambda self: None)
    cluster = RayCluster(ClusterConfig(gpus_per_node=0, ray_address=base_overrides))
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
