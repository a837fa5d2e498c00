"""vLLM's model of an engine with one GPU on the stand-in device, and a refit into it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.model_loader import get_model

from megatron_grpo.config.schema import GenerationConfig, ParallelConfig
from megatron_grpo.generation.engine_arguments import VllmSettings, make_engine_arguments
from megatron_grpo.models.adapter_slot import AdapterSlot
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.routed_experts import RoutedForm
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_layouts import split_policy
from megatron_grpo.weight_sync import engine_worker  # noqa: F401 - registers the format in which engines begin
from megatron_grpo.weight_sync.boxes import Box
from megatron_grpo.weight_sync.model_writer import ModelWriter
from megatron_grpo.weight_sync.pieces import FP8, lay_out_pieces, split_messages
from megatron_grpo.weight_sync.transfer_plan import choose_wire_dtypes, plan_messages

LONGEST = 1024


def settings_of(
    folder: Path, *, routed: RoutedForm | None = None, adapter: AdapterSlot | None = None, **generation: Any
) -> VllmSettings:
    return VllmSettings(
        index=0,
        model_path=str(folder),
        config=GenerationConfig(**generation),
        precision="bfloat16",
        max_total_sequence_length=min(LONGEST, read_model_shape(folder).max_positions),
        routed=routed,
        awaits_refit=True,
        adapter=adapter,
    )


def engine_config(
    folder: Path, *, routed: RoutedForm | None = None, adapter: AdapterSlot | None = None, **generation: Any
) -> VllmConfig:
    """vLLM's configuration of an engine, from our arguments."""
    arguments = make_engine_arguments(settings_of(folder, routed=routed, adapter=adapter, **generation))
    return AsyncEngineArgs(**arguments, skip_tokenizer_init=True).create_engine_config()


def loaded_model(config: VllmConfig) -> torch.nn.Module:
    """vLLM's model of one GPU, as it begins in a run that trains."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with set_current_vllm_config(config):
        init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo")
        initialize_model_parallel(backend="gloo")
        return get_model(vllm_config=config)


def addresses(model: torch.nn.Module) -> dict[str, int]:
    """Address of every parameter, by name."""
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def refit(
    model: torch.nn.Module, config: VllmConfig, shape: ModelShape, boxes: Sequence[Box], *, fp8_blocks: bool = False
) -> None:
    """Fill a model by the messages of one refit, whose numbers are zeros."""
    dtypes, policy = choose_wire_dtypes(shape, "bfloat16", fp8_blocks), split_policy(ParallelConfig(), shape)
    messages = split_messages(plan_messages(shape, policy, [boxes], 1, dtypes, 1 << 20))
    scaled = {number for number, dtype in enumerate(dtypes) if dtype == FP8}
    with set_current_vllm_config(config), torch.no_grad():
        writer = ModelWriter(model, torch.bfloat16, boxes, messages, scaled)
        writer.begin()
        for number, message in enumerate(messages):
            packed, size = lay_out_pieces(message, [getattr(torch, dtype) for dtype in dtypes])
            sent = torch.zeros(size, dtype=torch.uint8, device="cuda")
            for position, piece in enumerate(packed):
                writer.write(number, position, piece.view_values(sent), piece.view_scales(sent))
        writer.finish()
