"""Engines that begin with placeholders, after a refit, against engines that have read the folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megatron_grpo.config.schema import GenerationConfig, ParallelConfig
from megatron_grpo.generation.engine_arguments import VllmSettings, make_engine_arguments
from megatron_grpo.models.families import measure_tensors, read_model_shape
from megatron_grpo.models.weight_layouts import split_policy
from megatron_grpo.weight_sync import placeholder_loader
from megatron_grpo.weight_sync.boxes import to_slices
from megatron_grpo.weight_sync.engine_layers import ModelReload
from megatron_grpo.weight_sync.model_writer import ModelWriter
from megatron_grpo.weight_sync.pieces import read_ranges, split_messages
from megatron_grpo.weight_sync.placeholder_loader import PLACEHOLDER, PlaceholderLoader
from megatron_grpo.weight_sync.transfer_plan import choose_wire_dtypes, plan_messages
from megatron_grpo.weight_sync.weight_trace import trace_model
from tests.support.engine_configs import ENGINE_CONFIGS, write_engine_config
from tests.support.engine_state import list_state
from tests.support.refit_models import full_tensor, made_up_worker

# A dense model with a tied head, experts, latent attention, delta nets, a state space, a buffer that is loaded, sinks, a
# vision folder. The others are slow.
QUICK = ("qwen2", "qwen3_moe", "deepseek_v3", "qwen3_5", "nemotron_h", "gemma4", "gpt_oss", "ministral3_vision")
NOT_ON_CPUS = {"deepseek_v32", "glm_moe_dsa", "nemotron_h_moe"}
CASES = [
    pytest.param(family, marks=[] if family in QUICK else pytest.mark.slow)
    for family in ENGINE_CONFIGS
    if family not in NOT_ON_CPUS
]


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{tmp_path_factory.mktemp('group')}/meet", 0, "gloo")
        initialize_model_parallel(1, 1)
    yield
    cleanup_dist_env_and_memory()


def write_folder(family: str, folder: Path) -> dict[str, Tensor]:
    """Write a model with the tensors that a refit sends, and return these."""
    write_engine_config(family, folder)
    sizes = measure_tensors(read_model_shape(folder))
    tensors = {name: 0.1 * full_tensor(name, size).bfloat16() for name, size in sizes.items()}
    save_file(tensors, folder / "model.safetensors")
    return tensors


def build_model(folder: Path, *, awaits_refit: bool, **engine_args: Any) -> tuple[nn.Module, Any]:
    """Start vLLM's model of an engine as its worker does; return it with vLLM's configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor.model_loader import get_model

    settings = VllmSettings(
        model_path=str(folder),
        config=GenerationConfig(engine_args=engine_args),
        precision="bfloat16",
        max_total_sequence_length=128,
        awaits_refit=awaits_refit,
    )
    config = AsyncEngineArgs(**make_engine_arguments(settings), skip_tokenizer_init=True).create_engine_config()
    with set_current_vllm_config(config), torch.no_grad():
        return get_model(vllm_config=config), config


def refit(model: nn.Module, config: Any, folder: Path, tensors: dict[str, Tensor], mode: str) -> None:
    """Bring tensors into the model as an engine's worker does, without links."""
    from vllm.config import set_current_vllm_config

    shape = read_model_shape(folder)
    with set_current_vllm_config(config), torch.no_grad():
        if mode == "broadcast":
            reload = ModelReload(made_up_worker(model))
            reload.begin()
            reload.load(tensors.items())
            reload.finish()
            return
        boxes = trace_model(model, measure_tensors(shape), torch.bfloat16).boxes
        dtypes = choose_wire_dtypes(shape, "bfloat16", fp8_blocks=False)
        policy, names = split_policy(ParallelConfig(), shape), list(tensors)
        messages = split_messages(plan_messages(shape, policy, [boxes], 1, dtypes, 1 << 20))
        writer = ModelWriter(model, torch.bfloat16, boxes, messages)
        writer.begin()
        for number, message in enumerate(messages):
            for position, piece in enumerate(message):
                values = tensors[names[piece["tensor"]]][to_slices(read_ranges(piece))]
                writer.write(number, position, values)
        writer.finish()


def find_differences(expected: nn.Module, actual: nn.Module) -> list[str]:
    """Paths of the tensors and numbers in which two models differ."""
    states = list_state(expected), list_state(actual)
    differing = [path for path in states[0].keys() ^ states[1].keys()]
    for path in states[0].keys() & states[1].keys():
        one, other = states[0][path], states[1][path]
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            is_equal = one.dtype == other.dtype and torch.equal(one.float().nan_to_num(7), other.float().nan_to_num(7))
        else:
            is_equal = type(one) is type(other) and one == other
        if not is_equal:
            differing.append(path)
    return sorted(differing)


@pytest.mark.parametrize("mode", ["reshard", pytest.param("broadcast", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", CASES)
def test_a_refit_leaves_nothing_of_the_placeholders(
    family: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family.startswith("qwen3_5") or family.endswith("_vision"):
        pytest.importorskip("torchvision")  # vLLM's module of these models imports it
    tensors = write_folder(family, tmp_path)
    expected, _ = build_model(tmp_path, awaits_refit=False)
    monkeypatch.setattr(PlaceholderLoader, "_get_weights_iterator", lambda *_: pytest.fail("the folder was read"))
    actual, config = build_model(tmp_path, awaits_refit=True)
    assert find_differences(expected, actual)
    refit(actual, config, tmp_path, tensors, mode)
    assert find_differences(expected, actual) == []
