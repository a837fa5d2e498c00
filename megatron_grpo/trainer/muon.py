"""Muon over whole matrices: their parts of the gradient buffers, and the state of Megatron-Core's Muon in checkpoints.

Megatron-Core trains the layers' matrices with Muon and every other parameter with AdamW. Muon orthogonalizes a whole
matrix, so the ranges of elements that a distributed optimizer gives to data-parallel ranks do not suit it. With
`policy.optimizer.distributed` Megatron-Core's layer-wise optimizer gives each rank whole matrices, the buffers are laid
out so that none crosses the border of two ranks' parts, and a distributed optimizer has the other parameters.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, override

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer, tag_params_for_buffer_routing
from megatron.core.optimizer.param_layout import FullParamLayout
from torch import Tensor

from megatron_grpo.config.schema import PolicyConfig


def list_muon_settings(config: PolicyConfig) -> dict[str, Any]:
    """List fields of Megatron-Core's OptimizerConfig for Muon."""
    settings = config.optimizer
    names = ("muon_momentum", "muon_nesterov", "muon_scale_mode", "muon_extra_scale_factor")
    return {
        "optimizer": "muon",
        **{name: getattr(settings, name) for name in names},
        "muon_num_ns_steps": settings.muon_ns_steps,
        "muon_coefficient_type": "simple",  # one polynomial for all iterations (Jordan 2024), as in torch and Moonlight
        "muon_tp_mode": "duplicated",  # whole matrices; otherwise updates would depend on the layout
        "muon_fp32_matmul_prec": "medium" if config.precision == "bfloat16" else "highest",
        "use_distributed_optimizer": False,
        "use_layer_wise_distributed_optimizer": settings.distributed,
        # The layer-wise optimizer has weights in float32 only as those of a model in two types.
        "bf16": config.precision == "bfloat16" or settings.distributed,
    }


def mark_matrices(chunk: GPTModel) -> None:
    """Mark which parameters Muon updates, and which of these every tensor-parallel rank has whole."""
    tag_params_for_buffer_routing([chunk])
    for parameter in chunk.parameters():
        # Transformer Engine gives a replicated matrix a split axis too, and Muon would gather its replicas as parts.
        if not getattr(parameter, "tensor_model_parallel", False):
            parameter.partition_dim = -1


def lay_out_matrices(chunk: GPTModel, buffers: DistributedDataParallelConfig, *, is_first: bool) -> FullParamLayout:
    """Lay out a chunk's buffers so that each matrix lies within one rank's part."""
    replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    # The size of a bucket as in DistributedDataParallel, which chooses it after the layout.
    bucket_size = buffers.bucket_size or max(40_000_000, 1_000_000 * replicas)
    is_bucketed = buffers.overlap_grad_reduce and is_first and parallel_state.get_pipeline_model_parallel_rank() == 0
    return LayerWiseDistributedOptimizer.compute_full_param_layout(
        [parameter for parameter in chunk.parameters() if parameter.requires_grad],
        bucket_size if is_bucketed else None,
        replicas,
        buffers,
        parallel_state.get_expert_data_parallel_world_size(),
    )


def replace_layer_wise_optimizer() -> None:
    """Let Megatron-Core make a `MatrixOptimizer` as its layer-wise optimizer; idempotent."""
    factories: Any = importlib.import_module("megatron.core.optimizer")
    factories.LayerWiseDistributedOptimizer = MatrixOptimizer


class MatrixOptimizer(LayerWiseDistributedOptimizer):
    """Megatron-Core's layer-wise optimizer, in every layout and with state for every layout."""

    @override
    def shard_params(self, optimizers: Any, full_param_layouts: Any = None) -> None:
        """Give each data-parallel rank its matrices."""
        # Megatron-Core leaves experts whole on all ranks where there is one replica, although tensor-parallel ranks
        # with the same experts have parts of their gradients.
        sizes = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        expert_sizes = parallel_state.get_expert_data_parallel_world_size()
        self._shard_params_from_layout(optimizers, full_param_layouts, sizes, expert_sizes)

    def iter_matrices(self) -> Iterator[tuple[Any, Tensor, dict[str, Tensor]]]:
        """Iterate over this rank's (parameter, float32 weight, state)."""
        for optimizer in self.chained_optimizers:
            for group in (*optimizer.float16_groups, *optimizer.fp32_from_fp32_groups):
                for parameter in group:
                    main = getattr(parameter, "main_param", parameter)
                    yield parameter, main, optimizer.optimizer.state[main]

    def sharded_state_dict(self, model_sharded_state_dict: Any, is_loading: bool = False, **_: Any) -> dict[str, Any]:
        """Build entries of the float32 weights and moments, under the parameters' names."""
        # Megatron-Core's own entries are for one number of replicas, and not for weights in float32.
        weights, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
        weight_of = {weight.data: weight for weight in nested_values(weights)}
        entries: dict[str, Any] = {}
        for index, (parameter, main, state) in enumerate(self.iter_matrices()):
            if not state:
                state["momentum_buffer"] = torch.zeros_like(main)
            for name, value in {"param": main, **state}.items():
                entry = make_sharded_optimizer_tensor(weight_of[parameter], value.detach(), f"optimizer.state.{name}")
                entry.replica_id = (*entry.replica_id[:2], 0)  # one data-parallel rank has a matrix
                entries[f"{index}.{name}"] = entry
        return entries

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `sharded_state_dict` names; settings are the run's."""
        for index, (_, main, state) in enumerate(self.iter_matrices()):
            for name, target in {"param": main, **state}.items():
                target.copy_(state_dict[f"{index}.{name}"])
