"""Ray's start on a busy machine is tried again, up to the run's own deadline."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_grpo.cluster import ray_cluster
from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import ClusterConfig


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
