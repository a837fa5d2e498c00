"""What of refit.fp8_blocks is refused before anything starts, and what is said of memory for NCCL."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_grpo.config.schema import Config
from megatron_grpo.models.families import parse_model_shape
from megatron_grpo.preflight.engine_checks import (
    NCCL_RECEIVING,
    estimate_nccl_bytes,
    estimate_open_bytes,
    find_refit_problems,
    find_refit_remarks,
)
from tests.support.config_problems import SMALL

SHAPE = replace(parse_model_shape(SMALL), hidden=256, head_dim=128, ffn_hidden=512)
"""Eight heads and four key/value heads in four layers."""


def config(**given: Any) -> Config:
    made = Config()
    made.policy.precision = "bfloat16"
    made.generation.engine_args = {"quantization": "fp8_per_block"}
    made.refit.fp8_blocks = True
    for name, value in given.items():
        setattr(made.refit, name, value)
    return made


def problems(made: Config) -> list[str]:
    found = list(find_refit_problems(made, SHAPE))
    assert {problem.subject for problem in found} <= {"refit.fp8_blocks=True"}
    return [problem.text for problem in found]


def test_what_fits_is_taken() -> None:
    assert problems(config()) == []
    assert problems(config(fp8_blocks=False, mode="broadcast")) == []
    assert list(find_refit_problems(config(), None)) == []


def test_another_mode_or_another_engine_is_refused_with_what_to_do() -> None:
    assert problems(config(mode="broadcast")) == [
        "refit.mode=broadcast sends tensors as vLLM's loader reads them; use reshard"
    ]
    plain = config()
    plain.generation.engine_args = {}
    [text] = problems(plain)
    assert "+generation.engine_args.quantization=fp8_per_block" in text
    wide = config()
    wide.policy.precision = "float32"
    assert problems(wide) == ["such engines compute in bfloat16; give generation.engine.dtype=bfloat16"]
    wide.generation.engine.dtype = "bfloat16"
    assert problems(wide) == []


def test_a_block_that_two_ranks_share_is_named() -> None:
    made = config()
    made.generation.parallel.tensor = 8
    [text] = problems(made)
    assert "gate_proj.weight on engine ranks: 0 to 64 of (512, 256) (and " in text
    assert text.endswith("use fewer tensor-parallel ranks, or false")


def on_gpus(**given: Any) -> Config:
    made = Config()
    made.cluster.gpus_per_node = 8
    made.policy.parallel.data = 64
    made.generation.parallel.data = 8
    for name, value in given.items():
        setattr(made.generation, name, value)
    return made


def test_memory_of_the_communicator_is_bounded_by_peers_on_the_same_machine() -> None:
    few, some, all_of_them = (estimate_nccl_bytes(on_gpus(), peers, NCCL_RECEIVING) for peers in (2, 7, 64))
    assert few < some == all_of_them < 3e9
    on_cpu = on_gpus()
    on_cpu.cluster.gpus_per_node = 0
    assert estimate_nccl_bytes(on_cpu, 64, NCCL_RECEIVING) == 0
    assert estimate_nccl_bytes(on_gpus(placement="colocated"), 64, NCCL_RECEIVING) == 0


def test_vllm_that_leaves_too_little_for_the_communicator_is_remarked_on() -> None:
    config = on_gpus()
    assert list(find_refit_remarks(config)) == []
    config.generation.engine.gpu_memory_utilization = 0.98
    [remark] = find_refit_remarks(config)
    assert remark.subject == "generation.engine.gpu_memory_utilization=0.98"
    text = "leaves 1.6 GB of a GPU with 80 GB, and a refit takes up to 3.0 GB of that (NCCL 2.9, buffers 0.1, a layer "
    assert remark.text.startswith(text)
    config.generation.engine.gpu_memory_utilization = float(remark.text.rpartition("use at most ")[2])
    assert list(find_refit_remarks(config)) == []


def test_a_layer_of_experts_that_is_converted_is_counted() -> None:
    """DeepSeek-V3: 256 experts of three matrices of 7168 x 2048, on eight ranks."""
    shape = parse_model_shape(json.loads(Path("tests/data/hf_configs/deepseek_v3/config.json").read_text()))
    made = on_gpus()
    made.generation.parallel.tensor = 8
    assert estimate_open_bytes(made, shape) == 0, "the kernel for bfloat16 takes plain weights"
    made.generation.engine_args = {"quantization": "fp8_per_block"}
    assert estimate_open_bytes(made, shape) == 256 * 3 * 7168 * 2048 * 2 // 8
    made.refit.fp8_blocks = True
    assert estimate_open_bytes(made, shape) == 256 * 3 * 7168 * 2048 // 8
    made.generation.engine.gpu_memory_utilization = 0.96
    assert list(find_refit_remarks(made)) == []
    [remark] = find_refit_remarks(made, shape)
    assert remark.text.endswith("a layer of experts before its conversion 1.4); use at most 0.94")
