"""Plans refits of published models between large layouts and prints JSON: bytes a rank, messages, estimated seconds.

    python benchmarks/refit_large.py [--gb-per-s 50]

Nothing is moved: the estimate is that of megatron_grpo.refit_plan. It takes every rank to send and to receive at the
same speed whomever it talks to (50 GB/s: one 400 Gb/s port a GPU), a message to cost 50 microseconds beside its bytes,
and packing, checking and writing to be done while others are under way. Beside it stands what a broadcast would take at
the same speed, in which every worker receives the whole model, and what a refit with matrices in FP8 blocks would take.
Sizes of the models are those of their config.json.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from header import header

from megatron_grpo.config.generation_schema import GenerationParallelConfig, RefitConfig
from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.planning.refit_summary import summarize_refit
from megatron_grpo.preflight.engine_checks import find_cut_blocks

DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
QWEN3_235B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
}
CASES = {
    "DeepSeek-V3, 1,024 to 512 ranks": (
        DEEPSEEK_V3,
        ParallelConfig(tensor=8, pipeline=16, data=8, expert=16, first_stage_layers=3, last_stage_layers=2),
        GenerationParallelConfig(tensor=8, pipeline=4, data=16),
    ),
    "DeepSeek-V3, 256 to 64 ranks that share experts": (
        DEEPSEEK_V3,
        ParallelConfig(pipeline=16, data=16, expert=16, first_stage_layers=3, last_stage_layers=2),
        GenerationParallelConfig(tensor=16, pipeline=1, expert=16, data=4),
    ),
    "Qwen3-235B-A22B, 128 to 64 ranks": (
        QWEN3_235B,
        ParallelConfig(tensor=4, pipeline=8, data=4, expert=8, first_stage_layers=11, last_stage_layers=11),
        GenerationParallelConfig(tensor=8, pipeline=1, expert=8, data=8),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb-per-s", type=float, default=50.0)
    parser.add_argument("--bucket-mib", type=float, default=RefitConfig().bucket_mib)
    options = parser.parse_args()
    speed = options.gb_per_s * 1e9
    cases = []
    for name, (raw, training, generation) in CASES.items():
        shape = parse_model_shape(raw)
        arguments = shape, training, generation, "bfloat16", int(options.bucket_mib * 2**20)
        assert not any(find_cut_blocks(shape, training, generation))
        summary, in_fp8 = summarize_refit(*arguments), summarize_refit(*arguments, fp8_blocks=True, by_layer=True)
        engine_bytes = summary.bytes / generation.data  # a worker has a part of an engine, which has the model once
        cases.append(
            {
                "case": name,
                "training": asdict(training),
                "generation": asdict(generation),
                **summary.as_dict(speed),
                "broadcast_s": round(engine_bytes / speed, 3),
                "in_fp8_blocks": {"bytes": in_fp8.bytes, "estimated_s": round(in_fp8.compute_seconds(speed), 4)},
            }
        )
    print(json.dumps({**header("refit_large"), "bucket_mib": options.bucket_mib, "cases": cases}, indent=2))


if __name__ == "__main__":
    main()
