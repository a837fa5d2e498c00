"""Arguments of engines on GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from megatron_grpo.config.generation_schema import EngineConfig, GenerationParallelConfig
from megatron_grpo.config.schema import GenerationConfig
from megatron_grpo.generation import engine_arguments
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
