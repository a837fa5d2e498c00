"""A process that Ray gave a GPU, and that sees none, does not compute on its CPU in silence."""

import pytest
import torch

from megatron_grpo.cluster.ray_cluster import SHARED_GPUS, list_assigned_gpus
from megatron_grpo.platform import device
from megatron_grpo.platform.device import Platform, require_gpus


def test_a_gpu_that_is_given_and_not_seen_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(device, "detect_platform", lambda: Platform("cpu", torch.device("cpu"), "gloo"))
    require_gpus([])
    with pytest.raises(RuntimeError, match=r"gave this process GPU 3 of .*CUDA_VISIBLE_DEVICES=3.*nvidia-smi"):
        require_gpus([3])


def test_a_gpu_that_is_seen_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "detect_platform", lambda: Platform("cuda", torch.device("cuda", 0), "nccl"))
    require_gpus([0])


def test_gpus_that_are_shared_with_ranks_are_assigned_as_those_of_ranks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray counts none for such a process."""
    monkeypatch.setattr("ray.get_gpu_ids", lambda: [7])
    assert list_assigned_gpus() == ["7"]
    monkeypatch.setattr("ray.get_gpu_ids", list)
    assert list_assigned_gpus() == []
    monkeypatch.setenv(SHARED_GPUS, "2,3")
    assert list_assigned_gpus() == ["2", "3"]
