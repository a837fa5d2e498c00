"""AdamW over Megatron's gradient buffers, its learning-rate schedule and gradient clipping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_grpo.config.schema import PolicyConfig


class ModelOptimizer:
    """Wraps the chunks of a model for data-parallel training and steps them.

    Gradients are summed over microbatches and ranks, never averaged: losses come normalised by global counts, so that a
    step does not depend on how it was split.
    """

    def __init__(self, chunks: Sequence[GPTModel], config: PolicyConfig, decay_steps: int) -> None:
        settings = config.optimizer
        half = config.precision == "bfloat16"
        chunks[0].config.finalize_model_grads_func = _sum_model_grads  # all chunks have one configuration
        self.chunks = [
            DistributedDataParallel(
                config=chunk.config,
                ddp_config=DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True,
                    use_distributed_optimizer=settings.distributed,
                    fp8_param_gather=config.fp8.parameters and config.fp8.on_device,
                ),
                module=chunk,
                # The gradients of the first chunk are the last to come: there is nothing to overlap with them.
                disable_bucketing=number > 0,
            )
            for number, chunk in enumerate(chunks)
        ]
        optimizer_config = OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            adam_eps=settings.adam_eps,
            bf16=half,
            params_dtype=torch.bfloat16 if half else torch.float32,
            use_distributed_optimizer=settings.distributed,
            fp8_recipe=config.fp8.recipe if config.fp8.on_device else None,
            clip_grad=0.0,  # clipped here, after the norm has been checked
        )
        self.optimizer = get_megatron_optimizer(
            optimizer_config,
            self.chunks,
            config_overrides=get_standard_config_overrides(optimizer_config),
            use_gloo_process_groups=False,
        )
        self.settings = settings
        self.max_grad_norm = config.max_grad_norm
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=settings.lr,
            min_lr=settings.min_lr,
            lr_warmup_steps=settings.warmup_steps,
            lr_decay_steps=max(decay_steps, settings.warmup_steps + 1),
            lr_decay_style=settings.decay_style,
            start_wd=settings.weight_decay,
            end_wd=settings.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    def zero_grad(self) -> None:
        """Forget the gradients of the previous step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def grad_norm(self) -> float:
        """Global L2 norm of the gradient over all ranks; call once, after backward and before `step`."""
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    @torch.no_grad()
    def step(self, grad_norm: float) -> float:
        """Clip to the configured norm and update the weights.

        Returns:
            The learning rate that was used. The schedule counts this step first, so warm-up does not start at zero.
        """
        # By the norm over all ranks and chained optimizers, so that every weight is scaled by one factor.
        if self.max_grad_norm > 0:
            for optimizer in self.optimizer.chained_optimizers:
                parameters = optimizer.get_parameters()
                if parameters:
                    clip_grad_by_total_norm_fp32(parameters, max_norm=self.max_grad_norm, total_norm=grad_norm)
        self.scheduler.step(1)
        self.optimizer.step_with_ready_grads()
        return float(self.optimizer.param_groups[0]["lr"])

    def load_state_dict(self, state: dict[str, Any], schedule_steps: int) -> None:
        """Continue from a checkpoint's moments and place in the schedule, with the settings of this run.

        Megatron's parameter groups carry their settings, and loading brings back those of the run that saved.
        """
        self.optimizer.load_state_dict(state)
        for group in self.optimizer.param_groups:
            group.update(
                max_lr=self.settings.lr,
                min_lr=self.settings.min_lr,
                betas=(self.settings.adam_beta1, self.settings.adam_beta2),
                eps=self.settings.adam_eps,
            )
        self.scheduler.num_steps = schedule_steps
        self.scheduler.step(0)


def _sum_model_grads(model: Sequence[torch.nn.Module], _num_tokens: Any = None, **keywords: Any) -> None:
    """Megatron's gradient reduction without its division by the number of tokens."""
    finalize_model_grads(list(model), None, **keywords)
