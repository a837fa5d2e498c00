"""Refits that are damaged on the way, over links and through a folder: refused, and healed by the next one."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.exceptions import RayTaskError

from megatron_grpo.config.schema import ParallelConfig
from megatron_grpo.generation.engine_interface import Engine
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.models.families import measure_tensors
from megatron_grpo.trainer.model_ranks import MegatronPolicy
from megatron_grpo.weight_sync.boxes import pack_boxes
from megatron_grpo.weight_sync.refit_calls import RefitCalls, RefitError
from megatron_grpo.weight_sync.transfer_modes import FilesMode, TransferReport
from megatron_grpo.weight_sync.transport import WeightTransport, make_transport
from tests.integration.test_refit import assert_serves, ray_cluster, start_policy
from tests.integration.test_refit_files import REFIT as FILES
from tests.integration.test_refit_files import scale_a_norm
from tests.integration.test_reshard import REFIT, after, answers
from tests.integration.vllm_helpers import Oracle, engines, make_model

pytestmark = pytest.mark.slow

__all__ = ["ray_cluster"]  # a fixture of every test here

TENSORS = 2 * 11 + 1 + 1
"""Of the dense model: 11 a layer, the (tied) embedding and the last norm."""


@pytest.fixture(scope="module")
def engine_and_policy(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[VllmGeneration, MegatronPolicy, Oracle]]:
    """Tests leave the policy with the weights that it starts with, and connect anew."""
    folder = tmp_path_factory.mktemp("models")
    base, trained = make_model(folder / "base", seed=0), make_model(folder / "trained", seed=1)
    policy = start_policy(trained, ParallelConfig(tensor=2))
    with engines(base, pipeline=2) as generation:
        policy.wait_ready()
        yield generation, policy, Oracle(trained)
    policy.shutdown()


def test_a_flipped_bit_is_refused_and_the_next_refit_heals(engine_and_policy: Any, tmp_path: Path) -> None:
    generation, policy, oracle = engine_and_policy
    transport = make_transport(policy, generation, replace(REFIT, retries=0), tmp_path)
    transport.connect()
    transport.publish(10)
    ray.get(policy.submit(_flip_a_bit))
    with pytest.raises(RefitError, match=r"message \d+ from policy rank 1: checksum .* differs"):
        transport.publish(11)
    with pytest.raises(RuntimeError, match="refit of version 11 was not committed"):
        answers(generation)
    assert transport.publish(12).retries == 0
    assert_serves(generation, oracle, version=12)
    # With retries the same fault is not an error.
    transport = make_transport(policy, generation, REFIT, tmp_path)
    transport.connect()
    ray.get(policy.submit(_flip_a_bit))
    assert transport.publish(13).retries == 1
    assert_serves(generation, oracle, version=13)
    # Nor is a rank that loses its links in the middle: the others are told at once and do not wait for the deadline.
    ray.get(policy.submit(_lose_the_links))
    report = transport.publish(14)
    assert report.retries == 1
    assert report.seconds < REFIT.timeout_s
    assert_serves(generation, oracle, version=14)


def test_between_machines_the_same_bits_come_over_the_network(engine_and_policy: Any, tmp_path: Path) -> None:
    generation, policy, oracle = engine_and_policy
    transport = make_transport(policy, generation, replace(REFIT, shared_memory=False), tmp_path)
    transport.connect()
    transport.publish(10)
    sent = answers(generation)
    assert_serves(generation, oracle, version=10)
    assert np.array_equal(after("reshard", policy, generation, version=11), sent)


def test_a_damaged_file_is_refused_and_the_next_refit_heals(engine_and_policy: Any, tmp_path: Path) -> None:
    generation, policy, oracle = engine_and_policy
    calls = RefitCalls(policy, generation)
    transport: Any = WeightTransport(calls, _Damaging(calls, FILES, tmp_path / "run"), FILES)
    transport.connect()
    transport.publish(1)
    assert_serves(generation, oracle, version=1)
    transport._mode.damages = 1
    ray.get(policy.submit(scale_a_norm, 2.0))
    with pytest.raises(RefitError, match=r"worker \d: .*/refit/0000.*safetensors: model\..* is not what was written"):
        transport.publish(2)
    with pytest.raises(RuntimeError, match="refit of version 2 was not committed"):
        answers(generation)
    ray.get(policy.submit(scale_a_norm, 0.5))
    assert transport.publish(3).tensors == TENSORS, "all is written again"
    assert_serves(generation, oracle, version=3)
    # With retries the same fault is not an error.
    transport._config, transport._mode.damages = replace(FILES, retries=1), 1
    ray.get(policy.submit(scale_a_norm, 2.0))
    assert transport.publish(4).retries == 1
    ray.get(policy.submit(scale_a_norm, 0.5))
    assert transport.publish(5).retries == 0
    assert_serves(generation, oracle, version=5)


def test_a_folder_that_engines_do_not_share_is_told_when_connecting(engine_and_policy: Any, tmp_path: Path) -> None:
    generation, policy, _ = engine_and_policy
    config = replace(FILES, directory=str(tmp_path / "shared"))
    calls = RefitCalls(policy, generation)
    mode = FilesMode(calls, config, tmp_path / "run")
    WeightTransport(calls, mode, config).connect()
    sizes = measure_tensors(policy.shape)
    other_message = {"folder": str(mode.folder), "session": "x", "tensors": sizes, "boxes": [pack_boxes([])]}
    with pytest.raises(RayTaskError, match=r"another run writes to .*/shared/run-"):
        ray.get(generation.submit(Engine.connect_weights, "files", other_message, 0))
    nowhere = {**other_message, "folder": str(tmp_path / "mine")}
    with pytest.raises(
        RayTaskError, match=r"cannot be read: No such file .*; refit\.directory has to be a folder that"
    ):
        ray.get(generation.submit(Engine.connect_weights, "files", nowhere, 0))


class _Damaging(FilesMode):
    """Flips a bit of what was written last, between writing and reading."""

    damages = 0
    """Versions that this is still done to."""

    def send(
        self, version: int, engines: tuple[int, ...], deadline: float, on_sent: Callable[[], None]
    ) -> TransferReport:
        return super().send(version, engines, deadline, self._damage if self.damages else on_sent)

    def _damage(self) -> None:
        self.damages -= 1
        file = max(self.folder.glob("0*/*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-3] ^= 4
        file.write_bytes(data)


def _flip_a_bit(rank: Any) -> None:
    """On the second rank of the policy: flip one bit of its second message after it is sealed, once."""
    if (links := _links_of_the_second_rank(rank)) is None:
        return
    begin = links.begin

    def flipped(number: int) -> Any:
        if number == 1:
            links.view_buffer(number)[3] ^= 1
            links.begin = begin
        return begin(number)

    links.begin = flipped


def _lose_the_links(rank: Any) -> None:
    """On the second rank of the policy: fail at its second message."""
    if (links := _links_of_the_second_rank(rank)) is None:
        return
    begin = links.begin

    def lose(number: int) -> Any:
        if number == 1:
            raise RuntimeError("the cable is out")
        return begin(number)

    links.begin = lose


def _links_of_the_second_rank(rank: Any) -> Any:
    """Those of this process if it is the second rank of the policy; None elsewhere."""
    return rank.weight_sender.links if torch.distributed.get_rank() == 1 else None
