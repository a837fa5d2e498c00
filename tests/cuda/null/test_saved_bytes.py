"""A layer of a dry run holds as many bytes between its forward and its backward pass as Transformer Engine's layer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from megatron_grpo.config.schema import Config, PolicyConfig
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.planning.dry.tracker import MemoryTracker
from megatron_grpo.planning.dry_run import run_dry
from tests.cuda.null.test_rank import Case, fp8, layout
from tests.cuda.null.trial import make_trial

LENGTH, SEQUENCES = 64, 4
"""Of each microbatch: tokens of a sequence, and sequences."""
SMALL_TENSORS = 2**15
"""Bytes that may differ: scales of FP8, and context parallelism's boundaries of sequences for each of its turns. One
byte for each number of a hidden state is 2**17."""
TENSOR = layout(tensor=2, sequence=True)
CASES = {
    "qwen3": Case(),
    "qwen2": Case("qwen2"),
    "gemma3": Case("gemma3"),
    "latent attention": Case("deepseek_v3"),
    "latent attention, tensor": Case("deepseek_v3", TENSOR | fp8("tensorwise")),
    "latent attention, context": Case("deepseek_v3", layout(context=2)),
    "latent attention, blockwise": Case("deepseek_v3", fp8("blockwise")),
    "latent attention, recomputed": Case("deepseek_v3", {"recompute_modules": ["core_attn"]}),
    "experts": Case("qwen3_moe"),
    "experts shared": Case("qwen3_moe", layout(data=2, expert=2)),
    "tensor": Case(policy=TENSOR),
    "context": Case(policy=layout(context=2)),
    "recomputed": Case(policy={"activation_checkpointing": True}),
    "recomputed parts": Case(policy={"recompute_modules": ["core_attn", "mlp"]}),
    "delayed": Case(policy=fp8("delayed")),
    "tensorwise": Case(policy=fp8("tensorwise")),
    "tensorwise, parameters": Case(policy=fp8("tensorwise", parameters=True)),
    "tensorwise, tensor": Case(policy=TENSOR | fp8("tensorwise")),
    "blockwise": Case(policy=fp8("blockwise")),
    "blockwise, parameters": Case(policy=fp8("blockwise", parameters=True)),
    "experts, delayed": Case("qwen3_moe", fp8("delayed")),
    "experts, tensorwise": Case("qwen3_moe", fp8("tensorwise")),
    "experts, blockwise": Case("qwen3_moe", fp8("blockwise")),
}


@contextmanager
def held_after_layers(sizes: list[int], allocated: Callable[[], int]) -> Iterator[None]:
    """Record the bytes that are allocated at the end of each layer's forward pass, where gradients will follow."""

    def record(module: Any, *_: Any) -> None:
        if isinstance(module, TransformerLayer) and torch.is_grad_enabled():
            sizes.append(allocated())

    handle = register_module_forward_hook(record)
    yield
    handle.remove()


def track_bytes() -> int:
    """Bytes that the dry run's tracker counts now."""
    tracker = next(mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, MemoryTracker))
    return tracker.live.total()


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_layers_hold_what_transformer_engines_hold(case: Case, models: Callable[[str], Path]) -> None:
    folder = models(case.family)
    config = Config(policy=PolicyConfig(**({"logprob_kernel": "chunked"} | case.policy)))
    config.policy.microbatch_tokens, config.policy.max_total_sequence_length = LENGTH * SEQUENCES, LENGTH
    config.loss_fn.reference_policy_kl_penalty = 0.0
    trial = make_trial(folder, config.policy, case.number, lengths=2 * [SEQUENCES * [LENGTH]])
    trial.train()  # makes workspaces and copies of weights that stay
    true_sizes: list[int] = []
    with held_after_layers(true_sizes, torch.cuda.memory_allocated):
        trial.train()
    dry: list[int] = []
    with held_after_layers(dry, track_bytes):
        run_dry(config, read_model_shape(folder), case.number)
    layers = len(trial.rank.chunks[0].decoder.layers)
    assert layers > 2
    of_layers = [[after - before for before, after in pairwise(holding[:layers])] for holding in (true_sizes, dry)]
    assert of_layers[1] == pytest.approx(of_layers[0], abs=SMALL_TENSORS)
