"""AdamW over Megatron's gradient buffers, its learning-rate schedule and gradient clipping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.policy.rank.optimizer_settings import Overlap, adam_config, ddp_config
from megatron_grpo.policy.rank.optimizer_shards import shard_by_boxes

_DECAY_STYLES = {
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "inverse_sqrt": "inverse-square-root",
}
"""What Megatron-Core calls the schedules that have another name in transformers."""


class ModelOptimizer:
    """Wraps the chunks of a model for data-parallel training and steps them.

    Gradients are summed over microbatches and ranks, never averaged: losses come normalised by global counts, so that a
    step does not depend on how it was split.
    """

    def __init__(self, chunks: Sequence[GPTModel], config: PolicyConfig, decay_steps: int) -> None:
        settings, overlap = config.optimizer, Overlap.of(config)
        buffers = ddp_config(config, overlap)
        self.chunks = [
            DistributedDataParallel(
                config=chunk.config,
                ddp_config=replace(buffers),
                module=chunk,
                # The gradients of the first chunk are the last to come: there is nothing to overlap with them.
                disable_bucketing=number > 0,
            )
            for number, chunk in enumerate(chunks)
        ]
        self._gathers_late = overlap.param_gather
        shared = chunks[0].config  # all chunks have one configuration
        shared.finalize_model_grads_func = _sum_model_grads
        if overlap.grad_reduce:  # only the last microbatch's backward pass completes a gradient
            without = [chunk.no_sync for chunk in self.chunks]
            shared.no_sync_func = without if len(without) > 1 else without[0]
        optimizer_config = adam_config(config, overlap)
        self._decoupled = optimizer_config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        self.optimizer = get_megatron_optimizer(
            optimizer_config,
            self.chunks,
            config_overrides=get_standard_config_overrides(optimizer_config),
            use_gloo_process_groups=False,
        )
        shard_by_boxes(self.optimizer)
        self.settings = settings
        self.max_grad_norm = config.max_grad_norm
        warmup = settings.warmup(decay_steps)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=settings.lr,
            min_lr=settings.min_lr,
            lr_warmup_steps=warmup,
            lr_decay_steps=max(decay_steps, warmup + 1),
            lr_decay_style=_DECAY_STYLES.get(settings.decay_style, settings.decay_style),
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

    def finish_gathering(self) -> None:
        """Have all weights as the last step made them, of which ranks may still gather some; collective over
        data-parallel ranks, and nothing to do when it was done since that step."""
        if not self._gathers_late:
            return
        for chunk in self.chunks:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                group.finish_param_sync(skip_next_bucket_dispatch=True)

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
                    clip_grad_by_total_norm_fp32(
                        parameters,
                        max_norm=self.max_grad_norm,
                        total_norm=grad_norm,
                        use_decoupled_grad=self._decoupled,
                    )
        self.scheduler.step(1)
        self.optimizer.step_with_ready_grads()
        return float(self.optimizer.param_groups[0]["lr"])

    def load_state_dict(self, state: dict[str, Any], schedule_steps: int) -> None:
        """Continue from a checkpoint's moments and place in the schedule, with the settings of this run.

        Megatron's parameter groups carry their settings, and loading brings back those of the run that saved.
        """
        # A stage without experts has an optimizer for them that never made a step, and may be the one that wrote this.
        for group in _parameter_groups(state):
            if "step" in group:
                group["step"] = schedule_steps
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


def _parameter_groups(state: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """The parameter groups in the state of an optimizer, or of several that are chained."""
    yield from state.get("param_groups", ())
    for part in state.values():
        if isinstance(part, dict) and "param_groups" not in state:
            yield from _parameter_groups(part)


def _sum_model_grads(model: Sequence[torch.nn.Module], _num_tokens: Any = None, **keywords: Any) -> None:
    """Megatron's gradient reduction without its division by the number of tokens."""
    finalize_model_grads(list(model), None, **keywords)
