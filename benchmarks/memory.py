"""Measures the most that a rank holds in host memory while it imports a model and while it saves it; prints JSON.

    python benchmarks/memory.py [--layers 2]

A model of about 200 MB in float32, in a layout of two ranks: two tensor-parallel ones, and two replicas. Counted is the
process's own memory (resident, but for pages of mapped files) above what it was before, looked at every half
millisecond, so that a peak that is shorter may be missed. In `import`, `held_beyond_shard` is to be one tensor of the
model at most; in `save`, `held` is to be no more than `own_shard`: the weights of the rank and its part of the
optimizer's state.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from header import header

if TYPE_CHECKING:
    from megatron_grpo.config.schema import ParallelConfig
    from megatron_grpo.models.shape import ModelShape

LOOK_S = 0.0005
PAGE = os.sysconf("SC_PAGE_SIZE")
MB = 1e6


class Peak:
    """Most memory of this process above what it had at the beginning of the body, in bytes."""

    def __enter__(self) -> Peak:
        self._before, self.bytes, self._over = own_memory(), 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._look_once()

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            self._look_once()

    def _look_once(self) -> None:
        self.bytes = max(self.bytes, own_memory() - self._before)


def own_memory() -> int:
    """Bytes of this process's resident memory that are not pages of files."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * PAGE


def make_model(folder: Path, layers: int) -> None:
    """A model with random weights in Hugging Face format, float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16384,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def measure_rank(rank: int, layout: dict[str, Any], folder: str, port: int, results: Any) -> None:
    """Import on one rank of two, then save."""
    import torch

    from megatron_grpo.config.schema import ModelConfig, ParallelConfig, PolicyConfig
    from megatron_grpo.models.families import parse_model_shape
    from megatron_grpo.platform.device import reach_store
    from megatron_grpo.trainer.messages import RankSettings
    from megatron_grpo.trainer.parallel import initialize_parallel
    from megatron_grpo.trainer.rank import PolicyRank

    torch.set_num_threads(1)
    parallel = ParallelConfig(**layout)
    store = reach_store("127.0.0.1", port, 60.0)
    initialize_parallel(parallel, rank=rank, store=store, seed=0, timeout_s=300.0)
    shape = parse_model_shape(json.loads(Path(folder, "config.json").read_text()))
    measure_import(shape, parallel, folder)  # what is allocated once, at the first time, belongs to nobody's import
    sizes, importing = measure_import(shape, parallel, folder)
    config = PolicyConfig(model=ModelConfig(path=folder), parallel=parallel, precision="float32")
    engine = PolicyRank(RankSettings(config=config, shape=shape, folder=folder, decay_steps=1))
    engine.optimizer.optimizer.state_dict()  # makes the moments
    moments = sum(
        value.nbytes
        for one in engine.optimizer.optimizer.chained_optimizers
        for state in one.optimizer.state.values()
        for value in state.values()
    )
    for number in range(2):
        target = Path(folder).parent / f"{'_'.join(layout)}_{number}"
        target.mkdir(exist_ok=True)
        with Peak() as saving:
            engine.checkpoint.save(str(target))
    found = {
        "rank": rank,
        "import": {
            "shard_mb": sum(sizes) / MB,
            "largest_tensor_mb": max(sizes) / MB,
            "peak_mb": importing / MB,
            "held_beyond_shard_mb": (importing - sum(sizes)) / MB,
        },
        "save": {"own_shard_mb": (sum(sizes) + moments) / MB, "held_mb": saving.bytes / MB},
    }
    results.put(found)
    time.sleep(1)


def measure_import(shape: ModelShape, parallel: ParallelConfig, folder: str) -> tuple[list[int], int]:
    """Bytes of each parameter of this rank's part of a model, and the most that were held while it was loaded."""
    from megatron_grpo.config.schema import PolicyConfig
    from megatron_grpo.models.hf_weights import load_hf_weights
    from megatron_grpo.trainer.model.build import build_model

    with Peak() as importing:
        chunks = build_model(PolicyConfig(parallel=parallel, precision="float32"), shape)
        load_hf_weights(chunks, shape, folder)
    return [parameter.nbytes for chunk in chunks for parameter in chunk.parameters()], importing.bytes


def measure(layout: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """What each rank of a layout held."""
    from megatron_grpo.platform.device import open_store

    store = open_store("127.0.0.1", 60.0)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # so that what is freed is given back, and a peak is one each time
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=measure_rank, args=(rank, layout, str(folder), store.port, results)) for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    found = [results.get(timeout=600) for _ in ranks]
    for rank in ranks:
        with suppress(AssertionError):
            rank.join(60)
    return sorted(found, key=lambda one: int(one["rank"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        make_model(model, arguments.layers)
        layouts: tuple[dict[str, Any], ...] = ({"tensor": 2}, {"data": 2})
        found = {"_".join(f"{k}{v}" for k, v in layout.items()): measure(layout, model) for layout in layouts}
    rounded = json.loads(json.dumps(found), parse_float=lambda text: round(float(text), 1))
    print(json.dumps({**header("memory"), "layers": arguments.layers, "ranks": rounded}, indent=1))


if __name__ == "__main__":
    main()
