"""Times a refit against a raw transfer of as many bytes over groups of equal kind; prints JSON.

For a refit shard to shard the raw transfer sends the bytes of every link of the plan in one piece, without packing,
checksums, verification or writing; for a broadcast it broadcasts the bytes of each stage. Beside it stands what
vLLM's workers take on a CPU for the form of their matrices that they multiply by, which no transfer can do without.

python benchmarks/refit.py --mode reshard --policy-tensor 2 --generation-pipeline 2 --hidden 1024 --layers 8
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from header import header
from raw_transfer import HOST, packing, raw_broadcasts, raw_links

from megatron_grpo.config.generation_schema import EngineConfig, GenerationParallelConfig
from megatron_grpo.config.schema import GenerationConfig, ModelConfig, ParallelConfig, PolicyConfig, RefitConfig
from megatron_grpo.generation.engine_arguments import VllmSettings
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.planning.refit_summary import RefitSummary, summarize_refit
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.model_ranks import MegatronPolicy
from megatron_grpo.weight_sync.transfer_modes import TransferReport
from megatron_grpo.weight_sync.transport import make_transport

START_S = 600.0
MODES: dict[str, dict[str, Any]] = {
    "reshard": {"mode": "reshard"},
    "network": {"mode": "reshard", "shared_memory": False},
    "broadcast": {"mode": "broadcast"},
}
"""Settings of the refit, by name: network is reshard as between machines."""


def main() -> None:
    options = _options()
    ray.init(include_dashboard=False, num_cpus=2, _node_ip_address=HOST, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_model(Path(folder), options)
        measured = _refits(Path(folder), options)
        shape = read_model_shape(folder)
        summary = summarize_refit(shape, *_layouts(options), "float32", int(options.bucket_mib * 2**20))
    ray.shutdown()
    repeats, engine = options.warmup + options.repeats, _layouts(options)[1]
    links, packed = raw_links(summary, repeats), packing(engine, shape, repeats)
    results = {}
    for mode, measured_mode in measured.items():
        raw = links
        if mode == "broadcast":
            bytes_per_rank = measured_mode.reports[-1].bytes_sent // summary.receiving.ranks
            raw = raw_broadcasts(options.policy_pipeline, engine.ranks_per_engine, bytes_per_rank, repeats)
        results[mode] = _result(options, measured_mode, raw[options.warmup :], packed[options.warmup :], summary)
    mode, *beside = results
    result = {
        **header("refit"),
        "mode": mode,
        "policy": {"tensor": options.policy_tensor, "pipeline": options.policy_pipeline},
        "generation": {"tensor": options.generation_tensor, "pipeline": options.generation_pipeline},
        "parameters": parameters,
        "bucket_mib": options.bucket_mib,
        **results[mode],
        "beside": {other_mode: results[other_mode] for other_mode in beside},
    }
    print(json.dumps(result, indent=2))


@dataclass
class Measured:
    """Refits of one kind."""

    reports: list[TransferReport]
    extra_mib: dict[str, float]
    """By process, the most memory that it took from before links were made until the last refit, and had not before."""


def _result(
    options: argparse.Namespace,
    measured: Measured,
    raw: list[float],
    packed: list[float],
    summary: RefitSummary,
) -> dict[str, Any]:
    last = measured.reports[-1]
    seconds = [report.seconds for report in measured.reports[options.warmup :]]
    return {
        "bytes": last.bytes_sent,
        "received_over_owned": round(last.bytes_sent / summary.bytes, 4),
        "tensors": last.tensors,
        "buckets": last.buckets,
        "refit_ms": summarize_times(seconds),
        "raw_ms": summarize_times(raw),
        "vllm_packing_ms": summarize_times(packed),
        "ratio": round(statistics.median(seconds) / statistics.median(raw), 2),
        "extra_memory_mib": measured.extra_mib,
    }


def _layouts(options: argparse.Namespace) -> tuple[ParallelConfig, GenerationParallelConfig]:
    return (
        ParallelConfig(tensor=options.policy_tensor, pipeline=options.policy_pipeline),
        GenerationParallelConfig(tensor=options.generation_tensor, pipeline=options.generation_pipeline),
    )


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
    parser.add_argument("--bucket-mib", type=float, default=RefitConfig().bucket_mib)
    parser.add_argument("--mode", choices=MODES, default="reshard")
    parser.add_argument("--beside", choices=MODES, nargs="*", default=[], help="measured in the same run")
    return parser.parse_args()


def make_model(folder: Path, options: argparse.Namespace) -> int:
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


def _refits(folder: Path, options: argparse.Namespace) -> dict[str, Measured]:
    """The refits of each kind, all between the same processes."""
    layout, engines = _layouts(options)
    settings = RankSettings(
        config=PolicyConfig(model=ModelConfig(path=str(folder)), parallel=layout, precision="float32"),
        shape=read_model_shape(folder),
        folder=str(folder),
        decay_steps=1,
    )
    generation = VllmGeneration(
        VllmSettings(
            model_path=str(folder),
            config=GenerationConfig(
                parallel=engines,
                engine=EngineConfig(enforce_eager=True, kv_cache_gib=0.1, max_num_seqs=8),
            ),
            precision="float32",
            max_total_sequence_length=64,
        ),
        actor_options=lambda engine: {"num_cpus": 0},
        startup_timeout_s=START_S,
    )
    generation.start()
    policy = MegatronPolicy(settings, actor_options=lambda rank: {"num_cpus": 0}, startup_timeout_s=START_S)
    try:
        policy.start()
        policy.wait_ready()
        generation.wait_ready()
        return {
            mode: _measure(policy, generation, mode, options) for mode in dict.fromkeys([options.mode, *options.beside])
        }
    finally:
        policy.shutdown()
        generation.shutdown()


def _measure(policy: MegatronPolicy, generation: VllmGeneration, mode: str, options: argparse.Namespace) -> Measured:
    pids = {f"policy rank {rank}": pid for rank, pid in enumerate(ray.get(policy.submit(_pid)))}
    engines = ray.get([engine.__ray_call__.remote(_worker_pids) for engine in generation.engines.values()])
    pids |= {f"worker {number}": pid for number, pid in enumerate(pid for engine in engines for pid in engine)}
    memory = {name: Memory(pid) for name, pid in pids.items()}
    config = RefitConfig(**{"bucket_mib": options.bucket_mib, "timeout_s": 60.0, **MODES[mode]})
    transport = make_transport(policy, generation, config, run_dir=Path())  # nothing is written there
    transport.connect()
    print(f"{mode}: connected, {time.strftime('%X')}", file=sys.stderr, flush=True)
    reports = [transport.publish(version) for version in range(1, options.warmup + options.repeats + 1)]
    return Measured(
        reports, {name: memory_row.extra_mib(mapped=name.startswith("worker")) for name, memory_row in memory.items()}
    )


def _pid(_rank: Any) -> int:
    return os.getpid()


def _worker_pids(_engine: Any) -> list[int]:
    """vLLM's worker processes: no others are as many generations away from the engine's actor, which asks."""
    generation = [psutil.Process()]
    while children := [child for parent in generation for child in parent.children()]:
        generation = children
    return [process.pid for process in generation]


class Memory:
    """What a process takes from now on beside what it has now."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        (self._folder / "clear_refs").write_text("5")  # the peak is counted anew
        self._before, self._shared = self._status("VmRSS"), self._status("RssShmem")

    def extra_mib(self, mapped: bool) -> float:
        """The most that it has had, in MiB.

        Args:
            mapped: whether shared memory is another process's, and counted there.
        """
        shared = self._status("RssShmem") - self._shared if mapped else 0
        return round((self._status("VmHWM") - self._before - shared) / 1024, 1)

    def _status(self, name: str) -> int:
        """A number of KiB."""
        lines = (self._folder / "status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def summarize_times(seconds: list[float]) -> dict[str, float]:
    return {
        "median": round(1e3 * statistics.median(seconds), 2),
        "min": round(1e3 * min(seconds), 2),
        "max": round(1e3 * max(seconds), 2),
    }


if __name__ == "__main__":
    main()
