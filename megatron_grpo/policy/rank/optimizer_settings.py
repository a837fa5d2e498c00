"""How a model's settings become those of Megatron-Core's gradient buffers and optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.platform.device import current_platform
from megatron_grpo.policy.megatron_fields import made


@dataclass(frozen=True, slots=True)
class Overlap:
    """What data-parallel ranks tell each other while they compute."""

    grad_reduce: bool
    param_gather: bool

    @classmethod
    def of(cls, config: PolicyConfig) -> Overlap:
        """As the configuration says it, or where it leaves that open, on GPUs; never where there is nobody to tell."""
        if parallel_state.get_data_parallel_world_size(with_context_parallel=True) == 1:
            return cls(grad_reduce=False, param_gather=False)
        on_gpu = current_platform().name == "cuda"
        reduce = on_gpu if config.overlap_grad_reduce is None else config.overlap_grad_reduce
        possible = reduce and config.optimizer.distributed
        gather = possible if config.overlap_param_gather is None else config.overlap_param_gather
        return cls(grad_reduce=reduce, param_gather=gather)


def ddp_config(config: PolicyConfig, overlap: Overlap) -> DistributedDataParallelConfig:
    """Settings of the gradient buffers, in which gradients are summed in float32 unless policy.ddp says otherwise."""
    ours = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": config.optimizer.distributed,
        "fp8_param_gather": config.fp8.parameters and config.fp8.on_device,
        "overlap_grad_reduce": overlap.grad_reduce,
        "overlap_param_gather": overlap.param_gather,
    }
    return made(DistributedDataParallelConfig, ours, config.ddp)


def adam_config(config: PolicyConfig, overlap: Overlap) -> OptimizerConfig:
    """Settings of AdamW."""
    settings = config.optimizer
    half = config.precision == "bfloat16"
    ours = {
        "optimizer": "adam",
        "lr": settings.lr,
        "min_lr": settings.min_lr,
        "weight_decay": settings.weight_decay,
        "adam_beta1": settings.adam_beta1,
        "adam_beta2": settings.adam_beta2,
        "adam_eps": settings.adam_eps,
        "bf16": half,
        "params_dtype": torch.bfloat16 if half else torch.float32,
        "use_distributed_optimizer": settings.distributed,
        "overlap_param_gather": overlap.param_gather,
        # Offloading goes through the code of the precision-aware optimizer.
        "use_precision_aware_optimizer": settings.precision_aware or settings.cpu_offload > 0,
        "optimizer_cpu_offload": settings.cpu_offload > 0,
        "optimizer_offload_fraction": settings.cpu_offload,
        "fp8_recipe": config.fp8.recipe if config.fp8.on_device else None,
        "clip_grad": 0.0,  # clipped by ModelOptimizer, after the norm has been checked
    }
    return made(OptimizerConfig, ours, config.megatron_optimizer)
