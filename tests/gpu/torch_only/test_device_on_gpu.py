"""The GPUs themselves: torch sees and uses each, and says with which libraries."""

from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_every_gpu_multiplies(record_property: Callable[[str, object], None]) -> None:
    """In float32 without the shortcut of TF32, which tolerances of other tests rely on."""
    capability = torch.cuda.get_device_capability()
    record_property("capability", ".".join(map(str, capability)))
    record_property("cuda", torch.version.cuda)
    record_property("cudnn", torch.backends.cudnn.version())
    record_property("nccl", ".".join(map(str, torch.cuda.nccl.version())))
    first, second = torch.randn(2, 512, 512, dtype=torch.float64).unbind()
    for index in range(torch.cuda.device_count()):
        for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
            product = first.to(f"cuda:{index}", dtype) @ second.to(f"cuda:{index}", dtype)
            assert (product.cpu() - first @ second).norm() < tolerance * (first @ second).norm(), (index, dtype)


def test_each_gpu_reaches_the_next(record_property: Callable[[str, object], None]) -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs 2 GPUs, and this machine has {count}")
    peers = [torch.cuda.can_device_access_peer(index, (index + 1) % count) for index in range(count)]
    record_property("peer_access", sum(peers))
    for index in range(count):
        sent = torch.arange(2**20, device=f"cuda:{index}")
        assert torch.equal(sent.to(f"cuda:{(index + 1) % count}").cpu(), sent.cpu())
