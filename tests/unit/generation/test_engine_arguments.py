"""Arguments and environment variables of engines, on CPUs and on GPUs."""

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from megatron_grpo.config.generation_schema import EngineConfig, GenerationParallelConfig
from megatron_grpo.config.schema import GenerationConfig
from megatron_grpo.generation import engine, engine_arguments
from megatron_grpo.generation.cpu_engine import make_cpu_arguments
from megatron_grpo.generation.engine_arguments import VllmSettings, make_engine_arguments
from megatron_grpo.platform.device import Platform


@pytest.fixture(autouse=True)
def _one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_arguments, "detect_platform", lambda: Platform("cuda", torch.device("cpu"), "nccl"))
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: ["0"])


def arguments_of(folder: Path, *, awaits_refit: bool = False, **generation: Any) -> dict[str, Any]:
    return make_engine_arguments(
        VllmSettings(
            model_path=str(folder),
            config=GenerationConfig(**generation),
            precision="bfloat16",
            max_total_sequence_length=64,
            awaits_refit=awaits_refit,
        )
    )


@pytest.mark.parametrize(
    ("generation", "overrides"),
    [
        ({}, {"head_dtype": "float32"}),
        ({"engine_args": {"hf_overrides": {"head_dtype": "model"}}}, {"head_dtype": "model"}),
        ({"engine_args": {"hf_overrides": {"rope_theta": 2.0}}}, {"head_dtype": "float32", "rope_theta": 2.0}),
        ({"engine": EngineConfig(batch_invariant=True)}, None),
    ],
)
def test_logits_are_float32_as_in_the_policy(
    generation: dict[str, Any], overrides: dict[str, Any] | None, tmp_path: Path
) -> None:
    assert arguments_of(tmp_path, **generation).get("hf_overrides") == overrides


@pytest.mark.parametrize(
    ("engine", "tokens"),
    [
        ({}, 8192),
        ({"max_num_batched_tokens": 100}, 100),
        ({"max_num_seqs": 10_000}, 10_000),
        ({"enable_chunked_prefill": False}, 8192),
        ({"max_num_seqs": 2}, 128),  # no sequence of the warm-up is longer than 64
        ({"max_num_seqs": 2, "max_num_batched_tokens": 1000}, 128),
    ],
)
def test_prefill_takes_batches_of_a_server(engine: dict[str, Any], tokens: int, tmp_path: Path) -> None:
    assert arguments_of(tmp_path, engine=EngineConfig(**engine))["max_num_batched_tokens"] == tokens


@pytest.mark.parametrize(
    ("ranks", "placement", "executor"),
    [(1, "separate", "uni"), (2, "colocated", "mp"), (1, "colocated", "uni"), (2, "separate", "ray")],
)
def test_one_rank_runs_in_the_core_itself(ranks: int, placement: str, executor: str, tmp_path: Path) -> None:
    """The actor has one GPU, so that two ranks need the placement group of a larger engine."""
    arguments = arguments_of(tmp_path, placement=placement, parallel=GenerationParallelConfig(tensor=ranks))
    assert arguments["distributed_executor_backend"] == executor


@pytest.mark.parametrize(
    ("awaits_refit", "config", "chosen", "expected"),
    [
        (True, {}, {}, "megatron_grpo"),
        (False, {}, {}, "hf"),
        (False, {"quantization_config": {"quant_method": "fp8"}}, {}, "hf"),
        (True, {}, {"load_format": "runai_streamer"}, "runai_streamer"),
        # An engine of plain layers, which cannot read quantized weights.
        (True, {"quantization_config": {"quant_method": "fp8"}}, {"load_format": "runai_streamer"}, "megatron_grpo"),
    ],
)
def test_engines_read_weights_only_where_no_refit_follows(
    awaits_refit: bool, config: dict[str, Any], chosen: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = arguments_of(tmp_path, awaits_refit=awaits_refit, engine_args=chosen)
    assert arguments["load_format"] == expected


@pytest.mark.parametrize(
    ("model", "is_cached"),
    [
        ({"model_type": "qwen3"}, True),
        ({"model_type": "qwen3_5_text", "linear_key_head_dim": 128}, False),
        ({"model_type": "qwen3_5", "text_config": {"linear_key_head_dim": 128}}, False),
        ({"model_type": "nemotron_h", "ssm_state_size": 128}, False),
    ],
)
def test_states_of_prefixes_are_not_cached(model: dict[str, Any], is_cached: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    settings = VllmSettings(
        model_path=str(tmp_path), config=GenerationConfig(), precision="bfloat16", max_total_sequence_length=8
    )
    assert make_cpu_arguments(settings).get("enable_prefix_caching", True) == is_cached


@pytest.mark.parametrize(
    ("model", "backend"),
    [({"model_type": "qwen3"}, None), ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "CPU_MLA")],
)
def test_latent_attention_is_computed_in_every_dtype(
    model: dict[str, Any], backend: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    settings = VllmSettings(
        model_path=str(tmp_path), config=GenerationConfig(), precision="float32", max_total_sequence_length=8
    )
    arguments = make_cpu_arguments(settings)
    assert arguments.get("attention_backend") == backend
    assert arguments.get("compilation_config") == (backend and {"custom_ops": ["-rotary_embedding"]})


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of an engine on a GPU, which the test may change."""
    variables = {"PATH": os.environ["PATH"]}
    monkeypatch.setattr(os, "environ", variables)
    for module in (engine, engine_arguments):
        monkeypatch.setattr(module, "detect_platform", lambda: Platform("cuda", torch.device("cpu"), "nccl"))
    return variables


def prepare(monkeypatch: pytest.MonkeyPatch, capability: int = 9, placement: str = "separate", **parallel: int) -> None:
    """Prepare an engine whose actor has eight GPUs of a compute capability."""
    platforms: Any = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(get_device_capability=lambda: SimpleNamespace(major=capability))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setattr("ray.get_gpu_ids", lambda: list(range(8)))
    config = GenerationConfig(placement=placement, parallel=GenerationParallelConfig(**parallel))
    settings = VllmSettings(model_path="model", config=config, precision="bfloat16", max_total_sequence_length=8)
    engine.prepare_processes(settings, "generation engine 0")


@pytest.mark.parametrize(("capability", "value"), [(8, None), (9, "0"), (10, None)])
def test_fp8_blocks_keep_their_scales_on_hopper(
    capability: int, value: str | None, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(monkeypatch, capability)
    assert environment.get("VLLM_USE_DEEP_GEMM_E8M0") == value


@pytest.mark.parametrize(("placement", "setting"), [("separate", None), ("colocated", "pinned_max_cached_size_mb:64")])
def test_sleeping_engines_pin_as_much_memory_as_their_weights_take(
    placement: str, setting: str | None, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(monkeypatch, placement=placement)
    assert environment.get("PYTORCH_ALLOC_CONF") == setting, "vLLM's own memory is no expandable segment"


@pytest.mark.parametrize(("parallel", "nvls"), [({"tensor": 8}, None), ({"tensor": 8, "pipeline": 2}, "0")])
def test_nccl_of_engines_over_machines_has_no_multicast(
    parallel: dict[str, int], nvls: str | None, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(monkeypatch, **parallel)
    assert (environment["NCCL_CUMEM_ENABLE"], environment.get("NCCL_NVLS_ENABLE")) == ("1", nvls)
    environment |= {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "1"}
    prepare(monkeypatch, **parallel)
    assert (environment["NCCL_CUMEM_ENABLE"], environment["NCCL_NVLS_ENABLE"]) == ("0", "1")
