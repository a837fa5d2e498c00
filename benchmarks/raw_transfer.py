"""What a refit is compared with: as many bytes over groups of equal kind and nothing else, and vLLM's packing alone."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.models.families import build_weight_map
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_map import can_travel_in_fp8, index_tensors
from megatron_grpo.planning.engine_shards import assume_boxes
from megatron_grpo.planning.refit_summary import RefitSummary
from megatron_grpo.platform.device import open_store
from megatron_grpo.weight_sync.refit_group import Rendezvous, make_gloo_group

HOST = "127.0.0.1"


def raw_links(summary: RefitSummary, repeats: int) -> list[float]:
    """Seconds of each transfer of the plan's bytes, link by link, between as many processes."""
    sources, targets = summary.sending.ranks, summary.receiving.ranks
    store = open_store(HOST, 60.0)
    rendezvous = Rendezvous(host=HOST, port=store.port, receivers=targets, timeout_s=60.0)
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    common = (summary.links, sources, sources + targets, rendezvous, repeats, results)
    processes = [context.Process(target=_run_raw_member, args=(rank, *common)) for rank in range(sources + targets)]
    return _slowest(processes, results)


def _run_raw_member(
    rank: int,
    links: dict[tuple[int, int], int],
    sources: int,
    size: int,
    rendezvous: Rendezvous,
    repeats: int,
    results: Any,
) -> None:
    group = make_gloo_group(rendezvous, "raw", rank, size)
    buffers = {
        sources + target if rank == source else source: torch.ones(nbytes, dtype=torch.uint8)
        for (source, target), nbytes in links.items()
        if rank in (source, sources + target)
    }

    def transfer() -> None:
        begin = group.send if rank < sources else group.recv
        for work in [begin([buffer], peer, 0) for peer, buffer in buffers.items()]:
            work.wait()

    results.put(_time_action(transfer, repeats))


def raw_broadcasts(stages: int, receivers: int, total_bytes: int, repeats: int) -> list[float]:
    """Seconds of each broadcast of the refit's bytes, split over as many senders, to as many receivers."""
    store = open_store(HOST, 60.0)
    rendezvous = Rendezvous(host=HOST, port=store.port, receivers=receivers, timeout_s=60.0)
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    common = (rendezvous, total_bytes // stages, repeats, results)
    processes = [context.Process(target=_run_raw_sender, args=(stage, *common)) for stage in range(stages)]
    processes += [
        context.Process(target=_run_raw_receiver, args=(1 + rank, stages, *common)) for rank in range(receivers)
    ]
    return _slowest(processes, results)


def _run_raw_sender(stage: int, rendezvous: Rendezvous, size: int, repeats: int, results: Any) -> None:
    group = make_gloo_group(rendezvous, f"stage {stage}", 0, rendezvous.receivers + 1)
    buffer = torch.ones(size, dtype=torch.uint8)
    results.put(_time_action(lambda: group.broadcast(buffer, root=0).wait(), repeats))


def _run_raw_receiver(rank: int, stages: int, rendezvous: Rendezvous, size: int, repeats: int, results: Any) -> None:
    size_of_group = rendezvous.receivers + 1
    groups = [make_gloo_group(rendezvous, f"stage {stage}", rank, size_of_group) for stage in range(stages)]
    buffer = torch.empty(size, dtype=torch.uint8)

    def receive() -> None:
        for group in groups:
            group.broadcast(buffer, root=0).wait()

    results.put(_time_action(receive, repeats))


def packing(engine: GenerationParallelConfig, shape: ModelShape, repeats: int) -> list[float]:
    """Seconds in which the workers pack their matrices as vLLM multiplies by them on a CPU, and do nothing else."""
    context = multiprocessing.get_context("spawn")
    entries, ranks = build_weight_map(shape), assume_boxes(shape, engine)
    keys = index_tensors(entries, shape)
    results, together = context.SimpleQueue(), context.Barrier(len(ranks))
    processes: list[BaseProcess] = []
    for boxes in ranks:
        sizes: dict[tuple[int, int], tuple[int, int]] = {}  # of joined matrices, by layer and row of the weight map
        for box in boxes:
            key = keys[box.tensor]
            if can_travel_in_fp8(entries[key.row]):
                rows, columns = (indices.size for indices in box.layout.tensor)
                sizes[key.layer, key.row] = (sizes.get((key.layer, key.row), (0, 0))[0] + rows, columns)
        if any(box.tensor == "model.norm.weight" for box in boxes):
            sizes[shape.layers, 0] = (shape.vocab // engine.tensor, shape.hidden)
        arguments = list(sizes.values()), together, repeats, results
        processes.append(context.Process(target=_run_packing_member, args=arguments))
    return _slowest(processes, results)


def _run_packing_member(sizes: list[tuple[int, int]], together: Any, repeats: int, results: Any) -> None:
    from vllm import _custom_ops

    torch.set_num_threads(1)
    packed: dict[int, Any] = {}
    matrices = [torch.ones(size) for size in sizes]

    def pack() -> None:
        together.wait()
        for number, matrix in enumerate(matrices):
            packed.pop(number, None)
            packed[number] = _custom_ops.create_onednn_mm(matrix.t(), 32)

    results.put(_time_action(pack, repeats))


def _slowest(processes: Sequence[BaseProcess], results: Any) -> list[float]:
    """Run processes, each of which puts its seconds of every repeat into `results`; a repeat ends with its last one."""
    for process in processes:
        process.start()
    timings = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return [max(seconds) for seconds in zip(*timings, strict=True)]


def _time_action(action: Callable[[], Any], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        time.sleep(0.02)  # a refit also begins when the last one is long over
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return seconds
