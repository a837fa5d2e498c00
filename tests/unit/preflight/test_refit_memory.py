"""Memory of a refit on an engine's GPU: what is counted, and vLLM's shares that leave too little for it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config.schema import Config
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.planning.engine_layouts import find_room_problems
from megatron_grpo.platform.hardware import load_hardware
from megatron_grpo.preflight.refit_memory import (
    NCCL_RECEIVING,
    estimate_nccl_bytes,
    estimate_open_bytes,
    find_refit_remarks,
    list_refit_parts,
    needs_conversion,
)

H100, B200 = load_hardware("h100"), load_hardware("b200")


def read_shape(family: str) -> ModelShape:
    return parse_model_shape(json.loads(Path(f"tests/data/hf_configs/{family}/config.json").read_text()))


def on_gpus(**base_overrides: Any) -> Config:
    config = Config()
    config.cluster.gpus_per_node = 8
    config.policy.parallel.data = 64
    config.generation.parallel.data = 8
    for name, value in base_overrides.items():
        setattr(config.generation, name, value)
    return config


def test_memory_of_the_communicator_is_bounded_by_peers_on_the_same_machine() -> None:
    few, some, all_of_them = (estimate_nccl_bytes(on_gpus(), peers, NCCL_RECEIVING) for peers in (2, 7, 64))
    assert few < some == all_of_them < 3e9
    on_cpu = on_gpus()
    on_cpu.cluster.gpus_per_node = 0
    assert estimate_nccl_bytes(on_cpu, 64, NCCL_RECEIVING) == 0
    assert estimate_nccl_bytes(on_gpus(placement="colocated"), 64, NCCL_RECEIVING) == 0


def test_vllm_that_leaves_too_little_for_the_communicator_is_remarked_on() -> None:
    config = on_gpus()
    assert list(find_refit_remarks(config, None, None)) == []
    config.generation.engine.gpu_memory_utilization = 0.98
    [remark] = find_refit_remarks(config, None, None)
    assert remark.subject == "generation.engine.gpu_memory_utilization=0.98"
    text = "leaves 1.6 GB of a GPU with 80 GB, and a refit takes up to 3.0 GB of that (NCCL 2.9, buffers 0.1, "
    assert remark.text.startswith(text)
    [remark] = find_refit_remarks(config, None, H100)
    nbytes = 81559 * 2**20  # as nvidia-smi shows an H100
    free, total = re.findall(r"([\d.]+) GB", remark.text)[:2]
    assert float(total) == pytest.approx(nbytes / 1e9, rel=0.02)
    assert float(free) == pytest.approx(0.02 * nbytes / 1e9, rel=0.05)
    config.generation.engine.gpu_memory_utilization = float(remark.text.rpartition("use at most ")[2])
    assert list(find_refit_remarks(config, None, None)) == []


@pytest.mark.parametrize(
    ("family", "arguments", "on_hopper", "on_blackwell"),
    [
        ("llama3_1_8b", {}, False, False),
        ("llama3_1_8b", {"quantization": "fp8_per_block"}, True, True),
        ("llama3_1_8b", {"quantization": "int8_per_channel_weight_only"}, True, True),
        ("deepseek_v3", {}, False, True),
        ("deepseek_v3", {"quantization": "fp8"}, True, True),
        ("deepseek_v3", {"moe_backend": "triton"}, False, False),
        ("deepseek_v3", {"moe_backend": "flashinfer_cutlass"}, True, True),
        ("gpt_oss_20b", {}, False, False),
    ],
)
def test_engines_convert_what_their_kernels_do_not_take(
    family: str, arguments: dict[str, Any], on_hopper: bool, on_blackwell: bool
) -> None:
    config, shape = on_gpus(engine_args=arguments), read_shape(family)
    assert [needs_conversion(config, shape, gpu) for gpu in (None, H100, B200)] == [on_hopper, on_hopper, on_blackwell]


def test_a_layer_that_is_converted_is_counted_before_and_after_its_conversion() -> None:
    """DeepSeek-V3 on eight ranks: 256 experts of three matrices of 7168 x 2048, one that all tokens use, attention."""
    shape, experts = read_shape("deepseek_v3"), 256 * 3 * 7168 * 2048 // 8
    whole_on_each_rank = 7168 * (1536 + 512 + 64)
    divided = 1536 * 128 * (128 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * 7168 + 3 * 7168 * 2048
    layer = experts + whole_on_each_rank + divided // 8
    config = on_gpus()
    config.generation.parallel.tensor = 8
    assert estimate_open_bytes(config, shape, H100) == 0, "the kernel for bfloat16 takes plain weights"
    config.policy.precision = "bfloat16"
    assert estimate_open_bytes(config, shape, B200) == 2 * 2 * experts
    config.generation.engine_args = {"quantization": "fp8_per_block"}
    assert estimate_open_bytes(config, shape, H100) == 2 * 2 * layer
    config.refit.fp8_blocks = True
    assert estimate_open_bytes(config, shape, H100) == 2 * layer
    config.generation.engine.gpu_memory_utilization = 0.94
    assert list(find_refit_remarks(config, None, None)) == []
    [remark] = find_refit_remarks(config, shape, None)
    assert remark.text.endswith("conversion of a layer 2.9); use at most 0.92")


@pytest.mark.parametrize("gpu", [H100, B200], ids=lambda gpu: gpu.name)
def test_plan_and_check_give_one_verdict(gpu: Any) -> None:
    config, shape = on_gpus(engine_args={"quantization": "fp8_per_block"}), read_shape("llama3_1_8b")
    needed = sum(list_refit_parts(config, shape, gpu).values())
    for share in (0.5, 0.9, 0.95, 0.98, 0.99):
        config.generation.engine.gpu_memory_utilization = share
        remarks = list(find_refit_remarks(config, shape, gpu))
        assert bool(remarks) == (share * gpu.memory_gib * 2**30 + needed > gpu.memory_gib * 2**30)
        assert [problem for problem in find_room_problems(config, shape, gpu) if problem in remarks] == remarks
