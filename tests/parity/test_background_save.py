"""Checkpoints that all replicas write, beside training or not; a writer that is killed leaves none."""

import gc
import os
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_grpo.config.errors import RunError
from megatron_grpo.observability.file_digests import FileRecords
from megatron_grpo.trainer.checkpoint import ResultsFile
from tests.parity.on_rank import expect_close, load_on_rank
from tests.parity.policy_training import make_engine, train_arguments
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import merge, whole_tensors
from tests.support.tiny_models import TinyModel


def refuse_gather(*_: Any, **__: Any) -> None:
    raise AssertionError("a rank gathers the optimizer state of others")


def save_on_rank(layout: Layout, model: TinyModel, folder: Path, background: bool) -> dict[str, Tensor]:
    """A checkpoint after two steps, and while it is written a third, whose weights these are."""
    engine = make_engine(layout, model)
    for _ in range(2):
        engine.train(*train_arguments(layout))
    original, DistributedOptimizer.get_parameter_state_dp_zero = (
        DistributedOptimizer.get_parameter_state_dp_zero,
        refuse_gather,
    )
    try:
        engine.checkpoint.save(str(folder), background=background)
        engine.train(*train_arguments(layout))
        if background:
            engine.checkpoint.finish()
    finally:
        DistributedOptimizer.get_parameter_state_dp_zero = original
    return whole_tensors(engine)


@pytest.mark.parametrize("layout", [pytest.param(Layout(data=2), marks=pytest.mark.slow), Layout(context=2)], ids=str)
def test_every_replica_writes_its_part_while_training_goes_on(
    layout: Layout, tiny_models: dict[str, TinyModel], tmp_path: Path
) -> None:
    model = tiny_models["qwen3_tied"]
    for background in (False, True):
        folder = tmp_path / f"background_{background}"
        folder.mkdir()
        expected = merge(run_on_ranks(layout, save_on_rank, model, folder, background))
        written = [sum(file.stat().st_size for file in folder.glob(f"__{rank}_*.distcp")) for rank in range(2)]
        assert min(written) > 0.4 * sum(written)
        actual = merge(run_on_ranks(layout, load_on_rank, model, folder, {}))
        assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    expect_close(merge(run_on_ranks(Layout(), load_on_rank, model, folder, {})), expected)


def record_on_rank(layout: Layout, model: TinyModel, folders: dict[bool, Path]) -> dict[bool, list[FileRecords]]:
    """A rank's records of the files that it wrote, then of its share of all files; by `background`."""
    engine = make_engine(layout, model)
    engine.train(*train_arguments(layout))
    records: dict[bool, list[FileRecords]] = {}
    for background, folder in folders.items():
        written = engine.checkpoint.save(str(folder), background=background)
        if background:
            assert not written
            written = engine.checkpoint.finish()
        torch.distributed.barrier()
        records[background] = [written, engine.checkpoint.record_files(str(folder), sorted(os.listdir(folder)))]
    return records


def test_ranks_record_what_they_write_and_share_what_is_read(tiny_models: dict[str, TinyModel], tmp_path: Path) -> None:
    folders = {background: tmp_path / str(background) for background in (False, True)}
    for folder in folders.values():
        folder.mkdir()
    by_rank = run_on_ranks(Layout(data=2), record_on_rank, tiny_models["qwen3_tied"], folders)
    for background, folder in folders.items():
        expected = {
            path.name: {"bytes": path.stat().st_size, "xxh3_128": xxhash.xxh3_128_hexdigest(path.read_bytes())}
            for path in folder.iterdir()
        }
        assert {".metadata", "metadata.json", "__0_0.distcp", "__1_0.distcp"} <= expected.keys()
        for index in (0, 1):  # written, read
            first, second = (records[background][index] for records in by_rank)
            assert not first.keys() & second.keys()
            assert dict(first) | dict(second) == expected
        assert all(name.startswith("__1_") for name in by_rank[1][background][0])


def copies_on_rank(layout: Layout, model: TinyModel, folder: Path) -> tuple[bool, bool]:
    """Whether the copies that a background process writes are there while it may write, and after the end."""
    copies: list[weakref.ref[Tensor]] = []

    def copy_buckets(write_buckets: list[Any], non_blocking: bool = True) -> list[Any]:
        copied_buckets = [
            (file, key, (objects, [(item, tensor.clone()) for item, tensor in tensors]))
            for file, key, (objects, tensors) in write_buckets
        ]
        copies.extend(weakref.ref(tensor) for _, _, (_, tensors) in copied_buckets for _, tensor in tensors)
        return copied_buckets

    engine = make_engine(layout, model)
    engine.train(*train_arguments(layout))
    original = FileSystemWriterAsync.preload_tensors
    try:
        FileSystemWriterAsync.preload_tensors = staticmethod(copy_buckets)  # type: ignore[method-assign]
        engine.checkpoint.save(str(folder), background=True)
    finally:
        FileSystemWriterAsync.preload_tensors = staticmethod(original)  # type: ignore[method-assign]
    gc.collect()
    are_held = bool(copies) and all(copy() is not None for copy in copies)
    engine.checkpoint.finish()
    gc.collect()
    return are_held, all(copy() is None for copy in copies)


def test_copies_are_held_until_the_background_process_has_ended(
    tiny_models: dict[str, TinyModel], tmp_path: Path
) -> None:
    """On a GPU they are pinned memory, which a fork does not copy: given back, it would be overwritten."""
    assert run_on_ranks(Layout(), copies_on_rank, tiny_models["qwen3_tied"], tmp_path) == [(True, True)]


def sleep_long(*_: Any) -> None:
    time.sleep(60)


def killed_on_rank(layout: Layout, model: TinyModel, folder: Path) -> bool:
    """Whether finishing a checkpoint fails of which rank 1's writer is killed before it is done."""
    engine = make_engine(layout, model)
    kill = torch.distributed.get_rank() == 1
    original = ResultsFile.put
    try:
        ResultsFile.put = sleep_long if kill else original  # type: ignore[method-assign]
        engine.checkpoint.save(str(folder), background=True)
    finally:
        ResultsFile.put = original  # type: ignore[method-assign]
    process = engine.checkpoint._writer.process
    assert process is not None
    if kill:
        assert not engine.checkpoint.is_written()
        process.kill()
    try:
        engine.checkpoint.finish()
    except RunError as error:
        return isinstance(error.__cause__, CheckpointException)
    return False


def test_a_killed_writer_leaves_no_checkpoint(tiny_models: dict[str, TinyModel], tmp_path: Path) -> None:
    assert run_on_ranks(Layout(data=2), killed_on_rank, tiny_models["qwen3_tied"], tmp_path) == [True, True]
    assert not (tmp_path / "metadata.json").exists()
