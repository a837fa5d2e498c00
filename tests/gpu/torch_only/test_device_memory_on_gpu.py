"""A rank's memory on a GPU, given up while others need it and taken back, and how often a step makes the host wait."""

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.parity.policy_training import make_engine, train_arguments
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.test_device_memory import make_rank, nbytes, of_training
from tests.parity.training import fetch, whole_tensors
from tests.support.tiny_models import TinyModel, make_tiny_model

pytestmark = pytest.mark.gpu
MIB = 2**20


def turn_on_rank(layout: Layout, model: TinyModel, precision: str) -> dict[str, Any]:
    """Bytes before a turn of others, to give up, and left; and whether nothing has changed."""
    gc.collect()  # a model of the test before is in cycles
    earlier = torch.cuda.memory_allocated()
    rank = make_rank(layout, model, {"precision": precision})
    rank.train(*train_arguments(layout))
    before = whole_tensors(rank)
    state = nbytes(of_training(rank))
    weights = nbytes(parameter for chunk in rank.chunks for parameter in chunk.parameters())
    sizes = [torch.cuda.memory_allocated() - earlier]
    for with_weights in (False, True):
        rank.memory.offload(weights=with_weights)
        sizes.append(torch.cuda.memory_allocated() - earlier)
    reserved = torch.cuda.memory_reserved()
    rank.memory.onload()
    after = whole_tensors(rank)
    is_same = all(torch.equal(after[name], tensor) for name, tensor in before.items())
    learns = rank.train(*train_arguments(layout)).grad_norm > 0
    return {"held": sizes, "state": state, "weights": weights, "reserved": reserved, "same": is_same, "learns": learns}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_device_has_its_bytes_back(
    precision: str, tiny_models: dict[str, TinyModel], record_property: Callable[[str, object], None]
) -> None:
    (result,) = run_on_ranks(Layout(), turn_on_rank, tiny_models["qwen3_tied"], precision)
    resident, without_state, without_weights = result["held"]
    record_property("left_mib", without_weights / MIB)
    record_property("left_reserved_mib", result["reserved"] / MIB)
    assert resident - without_state >= result["state"] > 0
    assert without_state - without_weights >= result["weights"] > 0
    assert without_weights <= result["reserved"] < 256 * MIB, "what the allocator keeps, engines cannot have"
    assert result["same"]
    assert result["learns"]


def waits_on_rank(layout: Layout, model: TinyModel) -> float:
    """Calls that make the host wait for the device, for each further microbatch of a step."""
    rank = make_engine(layout, model, precision="bfloat16")
    share, microbatches, loss_fn, counts = train_arguments(layout)
    batch, waits = fetch(rank, share, loss_fn), []
    for repeats in (1, 1, 2):  # the first warms up
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            rank.compute_gradients(batch, microbatches * repeats, loss_fn, counts)
            torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchronizing CUDA operation" in str(warning.message) for warning in warned))
    return (waits[2] - waits[1]) / len(microbatches)


@pytest.mark.parametrize(("name", "limit"), [("qwen3_tied", 2), ("qwen3_moe", 8)])
def test_a_microbatch_hardly_makes_the_host_wait(
    name: str, limit: int, tmp_path_factory: pytest.TempPathFactory, record_property: Callable[[str, object], None]
) -> None:
    """Experts of two layers wait for the numbers of their tokens; Megatron-Core's dispatcher asks for them."""
    (waits,) = run_on_ranks(Layout(), waits_on_rank, make_tiny_model(name, tmp_path_factory.mktemp("waits")))
    record_property("waits_per_microbatch", waits)
    assert waits <= limit
