"""Forward passes that keep the hidden states of a rank's layers.

The points at which states are kept, in the order of computation, by names that follow Hugging Face's:

    embedding                           output of the embedding, scaled where the model scales it
    layers.N.input_layernorm            absent where Transformer Engine fuses the norm with the product after it
    layers.N.self_attn.heads            output of every attention head, before the output projection
    layers.N.self_attn                  output of the attention, or of the delta net in its place, after its projection
    layers.N.post_attention_layernorm   input of the feed-forward network; absent where it is fused
    layers.N.mlp.router                 weight of every expert, 0 for those that were not chosen
    layers.N.mlp                        output of the feed-forward network or of the experts
    layers.N                            hidden state after the layer
    norm                                output of the last norm, which the head multiplies
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.identity_op import IdentityOp
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenBatch, find_token_indices
from megatron_grpo.models.megatron_names import find_final_norm, iterate_layers
from megatron_grpo.trainer.model.packed_sequences import select_source

if TYPE_CHECKING:
    from megatron_grpo.trainer.rank import Microbatches, ModelRank

EMBEDDING, HEADS, ROUTER, NORM = "embedding", "self_attn.heads", "mlp.router", "norm"
# Captured modules of a layer by their names in Megatron-Core, in the order of computation, with the names here.
LAYER_POINTS = {
    "input_layernorm": "input_layernorm",
    "self_attention.core_attention": HEADS,
    "self_attention": "self_attn",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.router": ROUTER,
    "mlp": "mlp",
    "": "",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """Hidden states of a rank at one point, for one microbatch.

    Example: `Piece("layers.3.mlp", tokens=tensor([7, 8]), values=hidden[:2], column=0)`.
    """

    point: str
    tokens: Tensor
    """[rows], int64: index of each row's token in the whole batch."""
    values: Tensor
    """[rows, width], in the type of the computation."""
    column: int
    """First column of the values in the whole tensor; above 0 where tensor parallelism splits the heads."""


@contextmanager
def capture_states(
    rank: ModelRank,
    batch: TokenBatch,
    microbatches: Microbatches,
    tokens: NDArray[np.int64],
    keep: Callable[[Piece], None],
) -> Iterator[None]:
    """Capture the hidden states of the body's forward pass.

    Collective over the ranks of a layout. Every real token of the microbatches is kept by exactly one rank at every
    point, whatever the layout: of tensor-parallel ranks with equal values the first one keeps them, and padding is left
    out. Where tensor parallelism splits the heads, each rank keeps its columns. `tokens`, [tokens of `batch`], are
    indices in the whole batch of all replicas; -1: not kept. `keep` gets each piece, its values on the device.
    """
    parallel = rank.config.parallel
    part, parts = (parallel_state.get_tensor_model_parallel_rank(), parallel.tensor) if parallel.sequence else (0, 1)
    sources: list[_Source] = []
    for indices in microbatches:
        layout = rank.maker.lay_out([batch.lengths[index] for index in indices])
        flat = tokens[find_token_indices(np.asarray(batch.lengths), np.asarray(indices))]
        part_source = select_source(layout, part=part, parts=parts)
        context_tokens, part_tokens = (np.where(index < 0, -1, flat[index]) for index in (layout.source, part_source))
        sources.append((context_tokens, part_tokens))
    handles = [
        module.register_forward_hook(partial(_keep_output, point, iter(sources), keep, parallel.sequence))
        for chunk in rank.gather_chunks()
        for point, module in _iter_points(chunk)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _iter_points(chunk: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    if chunk.pre_process:
        yield EMBEDDING, chunk.embedding
    for layer, halves, layer_module in iterate_layers(chunk):
        modules = dict(layer_module.named_modules())
        for inner, name in LAYER_POINTS.items():
            module = modules.get(inner)
            if module is not None and not isinstance(module, IdentityOp) and (name or "mlp" in halves):
                yield f"layers.{layer}{'.' if name else ''}{name}", module
    final_norm = find_final_norm(chunk)
    if chunk.post_process and final_norm is not None:
        yield NORM, final_norm


# A microbatch's tokens on this rank, by index in the whole batch and -1 on padding: [tokens of this context-parallel
# rank], and [tokens of this rank's part under sequence parallelism].
_Source = tuple[NDArray[np.int64], NDArray[np.int64]]


def _keep_output(
    point: str, sources: Iterator[_Source], keep: Callable[[Piece], None], sequence_parallel: bool, *arguments: Any
) -> None:
    # A forward hook: each chunk of a pipeline stage runs its microbatches in their order. After them come microbatches
    # without sequences, which ranks append where experts are shared.
    microbatch_source, output = next(sources, None), arguments[-1]
    if microbatch_source is None:
        return
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    values = hidden.detach().flatten(1)  # [tokens, 1, width], or [tokens, heads, size of a head] of packed sequences
    has_heads, part = point.endswith(HEADS), parallel_state.get_tensor_model_parallel_rank()
    if part and not has_heads and not sequence_parallel:
        return  # equal on all tensor-parallel ranks
    context_source, part_source = microbatch_source
    source = context_source if has_heads else part_source
    assert len(values) == len(source), f"{point}: {len(values)} rows for {len(source)} tokens"
    rows = torch.from_numpy(np.flatnonzero(source >= 0))
    if len(rows):
        tokens = torch.from_numpy(source)[rows]
        column = part * values.shape[1] if has_heads else 0
        keep(Piece(point, tokens, values[rows.to(values.device)], column))
