"""Refits through a folder: the same bits as over links, only what changed, and nothing that was damaged on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import RayTaskError

from megatron_grpo.config.schema import ParallelConfig, RefitConfig
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.policy.driver.policy import MegatronPolicy
from megatron_grpo.refit.broadcast.transport import BroadcastTransport
from megatron_grpo.refit.files.transport import FilesTransport
from megatron_grpo.refit.interface import RefitError
from megatron_grpo.refit.reshard.transport import ReshardTransport
from tests.integration.test_refit import assert_serves, ray_cluster, start_policy
from tests.integration.test_reshard import CASES, FAMILIES, RARE, Case, _answers
from tests.integration.vllm_helpers import Oracle, engines, make_model

__all__ = ["ray_cluster"]  # a fixture of every test here

REFIT = RefitConfig(mode="files", bucket_mib=0.02, timeout_s=60.0, retries=0)
"""Files so small that a version has many."""
OTHERS = ("ep2_to_ep2", "latent_tp2_to_pp2")
TENSORS = 2 * 11 + 1 + 1
"""Of the dense model: 11 a layer, the (tied) embedding and the last norm."""


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES.values(), *(RARE[name] for name in OTHERS)], ids=[*CASES, *OTHERS])
def test_the_engine_holds_the_same_bits_however_weights_come(case: Case, tmp_path: Path) -> None:
    family = FAMILIES[case.family]
    base = make_model(tmp_path / "base", seed=0, family=family)
    policy = start_policy(make_model(tmp_path / "trained", seed=1, family=family), case.training)
    try:
        with engines(base, **case.generation) as generation:
            policy.wait_ready()
            files = FilesTransport(policy, generation, REFIT, tmp_path / "run")
            files.connect()
            before = _answers(generation)
            files.publish(1)
            through_files = _answers(generation)
            assert not np.array_equal(before, through_files), "another model"
            assert np.array_equal(through_files, _over_links(BroadcastTransport, policy, generation, version=2))
            assert np.array_equal(through_files, _over_links(ReshardTransport, policy, generation, version=3))
            # Layers that are not loaded again stay as they are.
            files.connect()
            assert files.publish(4).bytes_sent > 0
            assert files.publish(5).bytes_sent == 0, "nothing has changed"
            assert np.array_equal(_answers(generation), through_files)
            ray.get(policy.submit(_scale_a_norm, 2.0))
            report = files.publish(6)
            assert report.tensors == 1
            changed = _answers(generation)
            assert not np.array_equal(changed, through_files)
            assert np.array_equal(changed, _over_links(BroadcastTransport, policy, generation, version=7))
            files.close()
            assert not (tmp_path / "run" / "refit").exists()
    finally:
        policy.shutdown()


def test_a_damaged_file_is_refused_and_the_next_refit_heals(engine_and_policy: Any, tmp_path: Path) -> None:
    generation, policy, oracle = engine_and_policy
    transport = _Damaging(policy, generation, REFIT, tmp_path / "run")
    transport.connect()
    transport.publish(1)
    assert_serves(generation, oracle, version=1)
    transport.damages = 1
    ray.get(policy.submit(_scale_a_norm, 2.0))
    with pytest.raises(RefitError, match=r"worker 0: .*/refit/0000.*safetensors: model\..* is not what was written"):
        transport.publish(2)
    with pytest.raises(RuntimeError, match="refit of version 2 was not committed"):
        _answers(generation)
    ray.get(policy.submit(_scale_a_norm, 0.5))
    assert transport.publish(3).tensors == TENSORS, "all is written again"
    assert_serves(generation, oracle, version=3)
    # With retries the same fault is no error.
    transport._retries, transport.damages = 1, 1
    ray.get(policy.submit(_scale_a_norm, 2.0))
    assert transport.publish(4).retries == 1
    ray.get(policy.submit(_scale_a_norm, 0.5))
    assert transport.publish(5).retries == 0
    assert_serves(generation, oracle, version=5)


@pytest.mark.slow
def test_a_folder_that_engines_do_not_share_is_told_when_connecting(engine_and_policy: Any, tmp_path: Path) -> None:
    generation, policy, _ = engine_and_policy
    transport = FilesTransport(policy, generation, replace(REFIT, directory=str(tmp_path / "shared")), tmp_path / "run")
    transport.connect()
    other = {"folder": str(transport._folder), "session": "x"}
    with pytest.raises(RayTaskError, match=r"another run writes to .*/shared/run-"):
        ray.get(generation.submit("connect_weights", "files", other, 0))
    nowhere = {"folder": str(tmp_path / "mine"), "session": "x"}
    with pytest.raises(
        RayTaskError, match=r"cannot be read: No such file .*; refit\.directory has to be a folder that"
    ):
        ray.get(generation.submit("connect_weights", "files", nowhere, 0))


class _Damaging(FilesTransport):
    """Flips a bit of what was written last, between writing and reading."""

    damages = 0
    """Versions that this is still done to."""

    def _on_engines(self, method: str, version: int, engines: Sequence[int]) -> Any:
        if method == "receive_weights" and self.damages:
            self.damages -= 1
            file = max(self._folder.glob("0*/*.safetensors"))
            data = bytearray(file.read_bytes())
            data[-3] ^= 4
            file.write_bytes(data)
        return super()._on_engines(method, version, engines)


@pytest.fixture(scope="module")
def engine_and_policy(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[VllmGeneration, MegatronPolicy, Oracle]]:
    """Tests leave the policy with the weights that it starts with, and connect anew."""
    folder = tmp_path_factory.mktemp("models")
    base, trained = make_model(folder / "base", seed=0), make_model(folder / "trained", seed=1)
    policy = start_policy(trained, ParallelConfig(pipeline=2))
    with engines(base) as generation:
        policy.wait_ready()
        yield generation, policy, Oracle(trained)
    policy.shutdown()


def _over_links(
    kind: type[BroadcastTransport] | type[ReshardTransport],
    policy: MegatronPolicy,
    generation: VllmGeneration,
    version: int,
) -> np.ndarray:
    transport = kind(policy, generation, replace(REFIT, mode=kind.mode))
    transport.connect()
    transport.publish(version)
    return _answers(generation)


def _scale_a_norm(rank: Any, factor: float) -> None:
    """On every rank: multiply the weights of the model's last norm, where it is."""
    import torch

    for chunk in rank.chunks:
        norm = getattr(chunk.decoder, "final_layernorm", None)
        if norm is not None:
            with torch.no_grad():
                norm.weight.mul_(factor)
