"""Times refits of adapters alone against refits of merged weights, in one run; prints JSON.

The same policy publishes to engines that take merged weights, then to engines with a slot for adapters. `planned` has
both for DeepSeek-V3 with adapters on attention, and on experts too, by calculation as in refit_large.py.

python benchmarks/adapter_refit.py --hidden 512 --layers 8 --rank 16
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ray
from header import header
from raw_transfer import HOST
from refit import START_S, make_model, summarize_times
from refit_large import CASES

from megatron_grpo.config.generation_schema import EngineConfig, GenerationParallelConfig
from megatron_grpo.config.schema import (
    GenerationConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    PolicyConfig,
    RefitConfig,
)
from megatron_grpo.generation.engine_arguments import VllmSettings
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.models.adapter_names import make_policy_slot, measure_adapters
from megatron_grpo.models.families.reading import parse_model_shape, read_model_shape
from megatron_grpo.planning.refit_summary import summarize_refit
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.model_ranks import MegatronPolicy
from megatron_grpo.weight_sync.transfer_modes import TransferReport
from megatron_grpo.weight_sync.transport import make_transport

if TYPE_CHECKING:
    from collections.abc import Iterator

WARMUP = 3
SPEED = 50e9  # bytes a second of each rank, one 400 Gb/s port a GPU


def main() -> None:
    options = parse_options()
    ray.init(include_dashboard=False, num_cpus=2, _node_ip_address=HOST, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_model(Path(folder), options)
        settings = make_settings(Path(folder), options)
        policy = MegatronPolicy(settings, actor_options=lambda rank: {"num_cpus": 0}, startup_timeout_s=START_S)
        policy.start()
        policy.wait_ready()
        try:
            merged, alone = (measure(policy, adapters, options) for adapters in ("merged", "alone"))
        finally:
            policy.shutdown()
    ray.shutdown()
    results = {name: describe(reports) for name, reports in (("merged", merged), ("alone", alone))}
    times = [results[name]["refit_ms"]["median"] for name in ("alone", "merged")]
    result = {
        **header("adapter_refit"),
        "parameters": parameters,
        "rank": options.rank,
        **results,
        "bytes_ratio": round(merged[-1].bytes_sent / alone[-1].bytes_sent, 1),
        "time_ratio": round(times[1] / times[0], 2),
        "planned": plan_large(options.rank),
    }
    print(json.dumps(result, indent=2))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"layers": 4, "hidden": 256, "vocabulary": 64, "rank": 16, "repeats": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def make_settings(folder: Path, options: argparse.Namespace) -> RankSettings:
    config = PolicyConfig(
        model=ModelConfig(path=str(folder)),
        parallel=ParallelConfig(pipeline=2),
        lora=LoraConfig(rank=options.rank),
        precision="float32",
    )
    return RankSettings(config=config, shape=read_model_shape(folder), folder=str(folder), decay_steps=1)


@contextmanager
def start_engines(settings: RankSettings, adapters: Literal["merged", "alone"]) -> Iterator[VllmGeneration]:
    slot = make_policy_slot(settings.config, settings.shape) if adapters == "alone" else None
    config = GenerationConfig(engine=EngineConfig(enforce_eager=True, kv_cache_gib=0.1, max_num_seqs=8))
    generation = VllmGeneration(
        VllmSettings(
            model_path=settings.folder,
            config=replace(config, parallel=GenerationParallelConfig(tensor=2)),
            precision="float32",
            max_total_sequence_length=64,
            adapter=slot,
        ),
        actor_options=lambda engine: {"num_cpus": 0},
        startup_timeout_s=START_S,
    )
    try:
        generation.start()
        generation.wait_ready()
        yield generation
    finally:
        generation.shutdown()


def measure(
    policy: MegatronPolicy, adapters: Literal["merged", "alone"], options: argparse.Namespace
) -> list[TransferReport]:
    """Refits behind the first ones, without checks."""
    with start_engines(policy.settings, adapters) as generation:
        config = RefitConfig(timeout_s=60.0, adapters=adapters)
        transport = make_transport(policy, generation, config, run_dir=Path())  # nothing is written there
        transport.connect()
        return [transport.publish(version) for version in range(1, WARMUP + options.repeats + 1)][WARMUP:]


def describe(reports: list[TransferReport]) -> dict[str, Any]:
    seconds = [report.seconds for report in reports]
    speed = reports[-1].bytes_sent / statistics.median(seconds)
    return {
        "bytes": reports[-1].bytes_sent,
        "messages": reports[-1].buckets,
        "refit_ms": summarize_times(seconds),
        "mb_per_s": round(speed / 1e6, 1),
    }


def plan_large(rank: int) -> list[dict[str, Any]]:
    """Bytes and estimated seconds of the largest models' refits, merged and alone."""
    plans = []
    for name, (raw, training, generation) in CASES.items():
        shape = parse_model_shape(raw)
        attention = ["linear_proj"] if shape.latent is not None else ["linear_qkv", "linear_proj"]
        arguments = shape, training, generation, "bfloat16", int(RefitConfig().bucket_mib * 2**20)
        summaries = {"merged": summarize_refit(*arguments)}
        kinds = {"attention": attention}
        if generation.expert > 1:  # else every rank has a part of every expert, and all adapters
            kinds["all"] = [*attention, "linear_fc1", "linear_fc2"]
        for kind, targets in kinds.items():
            adapters = measure_adapters(shape, LoraConfig(rank=rank, target_modules=targets))  # type: ignore[arg-type]
            summaries[f"alone, {kind}"] = summarize_refit(*arguments, adapters=adapters)
        figures = {
            kind: {"bytes": summary.bytes, "estimated_s": round(summary.compute_seconds(SPEED), 4)}
            for kind, summary in summaries.items()
        }
        plans.append({"case": name, **figures})
    return plans


if __name__ == "__main__":
    main()
