"""The policy's side of the comparison of weights, for every family: each box of an engine, experts by transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.models.families import FAMILIES, measure_tensors, read_model_shape
from megatron_grpo.models.shape import Activation
from megatron_grpo.planning.meta_engine import build_rank
from megatron_grpo.verification.hf_model import list_stored_tensors, load_eager_model
from megatron_grpo.verification.problem import _name_as_stored, make_model
from megatron_grpo.weight_sync import rank_checks
from megatron_grpo.weight_sync.boxes import Box, pack_boxes, to_slices
from megatron_grpo.weight_sync.fingerprints import (
    OUTPUT_TOLERANCES,
    PROBES,
    compute_fingerprint,
    draw_probes,
    is_expert,
    measure_difference,
    name_boxes,
)
from megatron_grpo.weight_sync.rank_checks import fingerprint_policy
from megatron_grpo.weight_sync.weight_trace import trace_model
from tests.support.engine_configs import ENGINE_CONFIGS

NAMES = [name for name in ENGINE_CONFIGS if not name.endswith("_vision")]


def test_the_models_are_of_every_family_and_their_experts_of_every_activation(tmp_path: Path) -> None:
    assert FAMILIES.keys() <= set(NAMES)
    activations = set()
    for name in NAMES:
        (folder := tmp_path / name).mkdir()
        (folder / "config.json").write_text(json.dumps(ENGINE_CONFIGS[name]))
        shape = read_model_shape(folder)
        if shape.experts is not None:
            activations.add(shape.activation)
    assert activations == set(get_args(Activation))


@pytest.mark.parametrize("name", NAMES)
def test_each_weight_of_an_engine_is_compared(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("qwen3_5"):
        pytest.importorskip("torchvision")  # vLLM's module of these models imports it
    folder = make_model({**ENGINE_CONFIGS[name], "pad_token_id": None}, tmp_path / "model", seed=0)
    shape, model = read_model_shape(folder), load_eager_model(folder, torch.float32)
    stored = {key: value.detach().clone() for key, value in list_stored_tensors(model).items()}
    tensors = _name_as_stored(model, stored, shape)
    monkeypatch.setattr(
        rank_checks, "iter_hf_tensors", lambda *_: ((key, tensors[key]) for key in measure_tensors(shape))
    )
    boxes = trace_engine(folder, measure_tensors(shape))
    rank: Any = SimpleNamespace(shape=shape, gather_chunks=list)
    (fingerprints,) = fingerprint_policy(rank, [pack_boxes(boxes)])
    assert fingerprints.keys() == {key for key, _ in name_boxes(boxes)}
    for key, box in name_boxes(boxes):
        if not is_expert(box):
            values = compute_fingerprint(box.cut.compute(tensors[box.tensor][to_slices(box.cut.tensor)]))
            assert measure_difference(values, fingerprints[key]) == 0, key
    outputs = dict(compute_experts(model))
    by_expert = {read_numbers(key): key for key in {key for key, box in name_boxes(boxes) if is_expert(box)}}
    assert by_expert.keys() == outputs.keys()
    assert (shape.experts is None) == (not outputs)
    for numbers, output in outputs.items():
        actual = fingerprints[by_expert[numbers]]
        assert measure_difference(compute_fingerprint(output), actual) < OUTPUT_TOLERANCES[torch.float32], numbers


def trace_engine(folder: Path, sizes: dict[str, tuple[int, ...]]) -> list[Box]:
    """Trace vLLM's loaders of an engine of one rank."""
    from vllm.config import set_current_vllm_config

    with (
        build_rank(folder, 0, GenerationParallelConfig(), "float32") as (model, config),
        set_current_vllm_config(config),
    ):
        trace = trace_model(model, sizes, torch.float32)
    assert trace.unexplained == {}
    return list(trace.boxes)


def read_numbers(key: str) -> tuple[int, int]:
    """Layer and expert of a fingerprint's name."""
    match = re.search(r"layers\.(\d+)\..*experts\.(\d+)", key)
    assert match is not None, key
    return int(match[1]), int(match[2])


@torch.no_grad()
def compute_experts(model: nn.Module) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Apply each expert of transformers' model to the probes."""
    for name, module in model.named_modules():
        if not type(module).__name__.endswith("Experts"):
            continue
        layer = int(re.findall(r"layers\.(\d+)\.", name)[0])
        weight = module.down_proj
        is_llama4, count = type(module).__name__ == "Llama4TextExperts", len(weight)
        hidden = weight.shape[-1] if is_llama4 or "GptOss" in type(module).__name__ else weight.shape[1]
        probes = draw_probes(hidden, torch.device("cpu"))
        if is_llama4:  # which takes the tokens of all experts, one behind the other
            parts = module(probes.repeat(count, 1)).split(PROBES)
            yield from (((layer, number), part) for number, part in enumerate(parts))
            continue
        for number in range(count):
            chosen = torch.full((PROBES, 1), number)
            yield (layer, number), module(probes, chosen, torch.ones(PROBES, 1))
