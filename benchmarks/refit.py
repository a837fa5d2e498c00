"""Times a refit against a raw broadcast of as many bytes over groups of equal kind; prints JSON.

python benchmarks/refit.py --policy-pipeline 2 --generation-pipeline 2
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from header import header

from megatron_grpo.cluster.rendezvous import open_store
from megatron_grpo.config.schema import (
    EngineConfig,
    GenerationConfig,
    GenerationParallelConfig,
    ModelConfig,
    ParallelConfig,
    PolicyConfig,
    RefitConfig,
)
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.models.families import shape_of_folder
from megatron_grpo.policy.driver.policy import MegatronPolicy, PolicySettings
from megatron_grpo.refit.broadcast.channel import Rendezvous, join
from megatron_grpo.refit.broadcast.transport import BroadcastTransport
from megatron_grpo.refit.interface import TransferReport

START_S = 600.0
HOST = "127.0.0.1"


def main() -> None:
    options = _options()
    ray.init(include_dashboard=False, num_cpus=2, _node_ip_address=HOST, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        parameters = _make_model(Path(folder), options)
        reports = _refits(Path(folder), options)
    ray.shutdown()
    seconds = [report.seconds for report in reports[options.warmup :]]
    raw = _raw_broadcasts(options, reports[-1].bytes_sent)[options.warmup :]
    result = {
        **header("refit"),
        "policy": {"tensor": options.policy_tensor, "pipeline": options.policy_pipeline},
        "generation": {"tensor": options.generation_tensor, "pipeline": options.generation_pipeline},
        "parameters": parameters,
        "bytes": reports[-1].bytes_sent,
        "tensors": reports[-1].tensors,
        "buckets": reports[-1].buckets,
        "refit_ms": _summary(seconds),
        "raw_broadcast_ms": _summary(raw),
        "ratio": round(statistics.median(seconds) / statistics.median(raw), 2),
    }
    print(json.dumps(result, indent=2))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {
        "policy-tensor": 1,
        "policy-pipeline": 2,
        "generation-tensor": 1,
        "generation-pipeline": 2,
        "layers": 4,
        "hidden": 128,
        "vocabulary": 64,
        "repeats": 20,
        "warmup": 3,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--bucket-mib", type=float, default=256.0)
    return parser.parse_args()


def _make_model(folder: Path, options: argparse.Namespace) -> int:
    """A random Qwen3 with a tokenizer that vLLM can load; its number of parameters."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=max(options.hidden // 32, 2),
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        dtype=torch.float32,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _refits(folder: Path, options: argparse.Namespace) -> list[TransferReport]:
    layout = ParallelConfig(tensor=options.policy_tensor, pipeline=options.policy_pipeline)
    settings = PolicySettings(
        config=PolicyConfig(model=ModelConfig(path=str(folder)), parallel=layout, precision="float32"),
        shape=shape_of_folder(folder),
        folder=str(folder),
        reference=None,
        temperature=1.0,
        decay_steps=1,
        seed=0,
    )
    generation = VllmGeneration(
        str(folder),
        GenerationConfig(
            parallel=GenerationParallelConfig(tensor=options.generation_tensor, pipeline=options.generation_pipeline),
            engine=EngineConfig(enforce_eager=True, kv_cache_gib=0.1, max_num_seqs=8),
        ),
        precision="float32",
        max_total_sequence_length=64,
        actor_options=lambda engine: {"num_cpus": 0},
        startup_timeout_s=START_S,
    )
    generation.start()
    policy = MegatronPolicy(settings, actor_options=lambda rank: {"num_cpus": 0}, startup_timeout_s=START_S)
    try:
        policy.start()
        policy.wait_ready()
        generation.wait_ready()
        transport = BroadcastTransport(policy, generation, RefitConfig(bucket_mib=options.bucket_mib, timeout_s=60.0))
        transport.connect()
        return [transport.publish(version) for version in range(1, options.warmup + options.repeats + 1)]
    finally:
        policy.shutdown()
        generation.shutdown()


def _raw_broadcasts(options: argparse.Namespace, total_bytes: int) -> list[float]:
    """Seconds of each broadcast of the refit's bytes, split over as many senders, to as many receivers."""
    stages = options.policy_pipeline
    receivers = options.generation_tensor * options.generation_pipeline
    store = open_store(HOST, 60.0)
    rendezvous = Rendezvous(host=HOST, port=store.port, receivers=receivers, timeout_s=60.0)
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    common = (rendezvous, total_bytes // stages, options.warmup + options.repeats, results)
    processes = [context.Process(target=_raw_sender, args=(stage, *common)) for stage in range(stages)]
    processes += [context.Process(target=_raw_receiver, args=(1 + rank, stages, *common)) for rank in range(receivers)]
    for process in processes:
        process.start()
    timings = [results.get() for _ in processes]
    for process in processes:
        process.join()
    # A broadcast has ended when its last member has.
    return [max(seconds) for seconds in zip(*timings, strict=True)]


def _raw_sender(stage: int, rendezvous: Rendezvous, size: int, repeats: int, results: Any) -> None:
    group = join(rendezvous, stage, 0, torch.device("cpu"))
    buffer = torch.ones(size, dtype=torch.uint8)
    results.put(_timed(lambda: group.broadcast(buffer, root=0).wait(), repeats))


def _raw_receiver(rank: int, stages: int, rendezvous: Rendezvous, size: int, repeats: int, results: Any) -> None:
    groups = [join(rendezvous, stage, rank, torch.device("cpu")) for stage in range(stages)]
    buffer = torch.empty(size, dtype=torch.uint8)

    def receive() -> None:
        for group in groups:
            group.broadcast(buffer, root=0).wait()

    results.put(_timed(receive, repeats))


def _timed(action: Callable[[], Any], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        time.sleep(0.02)  # a refit also begins when the last one is long over
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return seconds


def _summary(seconds: list[float]) -> dict[str, float]:
    return {
        "median": round(1e3 * statistics.median(seconds), 2),
        "min": round(1e3 * min(seconds), 2),
        "max": round(1e3 * max(seconds), 2),
    }


if __name__ == "__main__":
    main()
