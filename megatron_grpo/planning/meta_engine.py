"""Traces the loaders of an engine that does not run: vLLM's model of each rank, without storage, in another process."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.models.families import measure_tensors
from megatron_grpo.models.shape import ModelShape, read_config_json
from megatron_grpo.models.source import PREPARED_MODELS, find_local_folder, is_made_before_run
from megatron_grpo.platform.hooks import LIBRARIES
from megatron_grpo.weight_sync import boxes, weight_trace
from megatron_grpo.weight_sync.boxes import Box, unpack_boxes

TIMEOUT_S = 900.0
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def trace_run(config: Config, shape: ModelShape) -> list[list[Box]] | None:
    """Trace the loaders of a run's engines; None: vLLM is not here."""
    if find_spec("vllm") is None:
        return None
    if is_made_before_run(config, config.policy.model.path):
        model_config = PREPARED_MODELS[str(config.prepare.name)]
    else:
        folder = find_local_folder(config.policy.model.path)
        assert folder is not None, "the sizes were read from it"
        model_config = read_config_json(folder / "config.json")
        model_config.pop("quantization_config", None)  # engines of a run have plain weights
    return trace_engine(model_config, shape, config.generation.parallel, config.engine_dtype)


def trace_engine(
    model_config: dict[str, Any], shape: ModelShape, parallel: GenerationParallelConfig, dtype: str = "bfloat16"
) -> list[list[Box]]:
    """Trace the loaders of an engine's ranks; results are cached on disk.

    Args:
        model_config: contents of the model's config.json.
        shape: sizes of the model.
        parallel: layout of the engine.
        dtype: type of the engine's weights.

    Raises:
        ValueError: vLLM cannot build the model, parts of its parameters cannot be explained, or it takes longer than
            TIMEOUT_S.
    """
    layout = {"tensor": parallel.tensor, "pipeline": parallel.pipeline, "expert": parallel.expert}
    request = {"config": model_config, "layout": layout, "dtype": dtype, "tensors": measure_tensors(shape)}
    return [unpack_boxes(text) for text in _run_cached(json.dumps(request, sort_keys=True))]


@cache
def _run_cached(request: str) -> list[str]:
    digest = hashlib.blake2b(request.encode(), digest_size=12)
    for module in (boxes, weight_trace, sys.modules[__name__]):
        digest.update(Path(str(module.__file__)).read_bytes())
    digest.update(str(LIBRARIES["vllm"].find_installed()).encode())
    folder = Path(os.environ.get("MEGATRON_GRPO_CACHE") or Path.home() / ".cache" / "megatron_grpo") / "traces"
    file = folder / f"{digest.hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError):
        return TypeAdapter(list[str]).validate_json(file.read_text())
    texts = _run(request)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(texts))
        partial.replace(file)
    return texts


def _run(request: str) -> list[str]:
    """Trace in a process that imports vLLM."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __name__, folder]
        (Path(folder) / "request.json").write_text(request)
        environment = {**os.environ, **_ENVIRONMENT}
        print("tracing vLLM's loaders, in a process that imports vLLM", file=sys.stderr, flush=True)
        try:
            result = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"the process that traces vLLM's loaders had not ended after {TIMEOUT_S:g} s") from None
        if result.returncode:
            raise ValueError(f"vLLM's loaders cannot be traced: {find_reason(result.stderr)}")
        return TypeAdapter(list[str]).validate_json((Path(folder) / "boxes.json").read_text())


def find_reason(stderr: str) -> str:
    """Find the message of the exception that ended a process."""
    lines = stderr.splitlines()
    begins = [number for number, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)]
    return " ".join(" ".join(lines[begins[-1] :]).split())[:500] if begins else "its process ended without a message"


def main(folder: Path) -> None:
    """Answer `request.json` with `boxes.json`."""
    from vllm.config import set_current_vllm_config

    from megatron_grpo.weight_sync.boxes import pack_boxes
    from megatron_grpo.weight_sync.weight_trace import trace_model

    request = json.loads((folder / "request.json").read_text())
    (folder / "config.json").write_text(json.dumps(request["config"]))
    parallel, texts = GenerationParallelConfig(**request["layout"]), []
    for rank in range(parallel.ranks_per_engine):
        with build_rank(folder, rank, parallel, request["dtype"]) as (model, config), set_current_vllm_config(config):
            trace = trace_model(model, request["tensors"], config.model_config.dtype)
        if trace.unexplained:
            raise ValueError(trace.describe_unexplained())
        texts.append(pack_boxes(trace.boxes))
    (folder / "boxes.json").write_text(json.dumps(texts))


@contextlib.contextmanager
def build_rank(
    folder: Path, rank: int, parallel: GenerationParallelConfig, dtype: str
) -> Iterator[tuple[torch.nn.Module, Any]]:
    """Build vLLM's model of a rank without storage; yield it with vLLM's configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import utils
    from vllm.utils.torch_utils import set_default_torch_dtype

    utils._model_to_pp_missing_layer_names.clear()  # its keys are addresses of models
    arguments = EngineArgs(
        model=str(folder),
        dtype=dtype,
        enforce_eager=True,
        tensor_parallel_size=parallel.tensor,
        pipeline_parallel_size=parallel.pipeline,
        enable_expert_parallel=parallel.expert > 1,
        skip_tokenizer_init=True,
        language_model_only=True,
        load_format="dummy",
        distributed_executor_backend="mp",
        disable_log_stats=True,
    )
    config = arguments.create_engine_config()
    config.parallel_config.rank = rank
    with _make_groups(rank, parallel.tensor, parallel.pipeline):
        with (
            _build_any_layers(),
            set_default_torch_dtype(config.model_config.dtype),
            _WithoutStorage(),
            set_current_vllm_config(config),
        ):
            model = initialize_model(vllm_config=config)
        yield model, config


@contextlib.contextmanager
def _build_any_layers() -> Iterator[None]:
    """Let vLLM build experts and sparse attention without kernels for this machine."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.models.transformers.base import Base

    check, build_attention = FusedMoEConfig.__post_init__, MLAAttention.__init__

    def check_sizes(self: Any) -> None:
        # Experts without gates are refused on a CPU, after everything else is checked and set.
        with contextlib.suppress(NotImplementedError):
            check(self)

    def select(moe_config: FusedMoEConfig) -> tuple[UnquantizedMoeBackend, None]:
        return UnquantizedMoeBackend.TRITON, None

    def build_dense(self: Any, *arguments: Any, **keywords: Any) -> None:
        # It has the same weights as sparse attention, which a CPU lacks.
        build_attention(self, *arguments, **keywords | {"use_sparse": False})

    def keep_class(self: Any, cls: type, *_: Any, **__: Any) -> None:
        # Made ready to compile, transformers' own class would need vLLM's configuration for the rest of the process.
        pass

    with (
        patch.object(MLAAttention, "__init__", build_dense),
        patch.object(FusedMoEConfig, "__post_init__", check_sizes),
        patch.object(unquantized_fused_moe_method, "select_unquantized_moe_backend", select),
        patch.object(Base, "_decorate_cls_for_torch_compile", keep_class),
    ):
        yield


class _WithoutStorage(TorchDispatchMode):
    """Creates floating-point tensors on the meta device.

    Integers keep their values, since loaders read maps of experts.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, meta = dict(kwargs or {}), torch.device("meta")
        operands = [value for argument in args for value in (argument if isinstance(argument, list) else [argument])]
        tensors = [value for value in operands if isinstance(value, Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            args = _move(args, meta)
        is_floating = (kwargs.get("dtype") or torch.get_default_dtype()).is_floating_point
        is_factory = not tensors and any(argument.name == "device" for argument in func._schema.arguments)
        if ("device" in kwargs and any(tensor.is_meta for tensor in tensors)) or (is_factory and is_floating):
            kwargs["device"] = meta
        return func(*args, **kwargs)


def _move(value: Any, device: torch.device) -> Any:
    """Move tensors in an operation's arguments."""
    if isinstance(value, list | tuple):
        return type(value)(_move(item, device) for item in value)
    return value.to(device) if isinstance(value, Tensor) else value


@contextlib.contextmanager
def _make_groups(rank: int, tensor: int, pipeline: int) -> Iterator[None]:
    """Give vLLM groups that know ranks and sizes, and cannot communicate."""
    from vllm.distributed import parallel_state

    class MadeUpGroup(parallel_state.GroupCoordinator):
        def __init__(self, ranks: list[int], name: str) -> None:
            self.rank, self.ranks, self.world_size, self.rank_in_group = rank, ranks, len(ranks), ranks.index(rank)
            self.local_rank = self.device_index = 0
            self.group_ranks, self.unique_name, self.torch_distributed_backend = [ranks], name, "gloo"
            self.device_communicator = self.mq_broadcaster = None
            group: Any = SimpleNamespace(size=lambda: len(ranks), rank=lambda: ranks.index(rank))
            self.cpu_group = self.device_group = group
            self.use_device_communicator, self.device = False, torch.device("cpu")
            self.use_custom_op_call = self.use_cpu_custom_send_recv = False
            self._pending_isends: deque[Any] = deque()

    stage, tensor_rank = divmod(rank, tensor)
    neighbours = [stage * tensor + index for index in range(tensor)]
    members = {
        **{name: [rank] for name in ("_DP", "_DCP", "_PCP")},
        **dict.fromkeys(("_TP", "_EP", "_EPLB"), neighbours),
        "_WORLD": list(range(tensor * pipeline)),
        "_PP": [number * tensor + tensor_rank for number in range(pipeline)],
    }
    values = {name: MadeUpGroup(ranks, f"{name}:0") for name, ranks in members.items()}
    replaced = {name: getattr(parallel_state, name) for name in (*values, "_NODE_COUNT")}
    vars(parallel_state).update(values, _NODE_COUNT=1)
    try:
        yield
    finally:
        vars(parallel_state).update(replaced)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
