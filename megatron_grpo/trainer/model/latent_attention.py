"""Multi-latent attention (DeepSeek-V2, section 2.1) for packed sequences in every layout.

One module for torch's layers and Transformer Engine's: only the parts differ that it is made of.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_grpo.models.shape import IndexerShape, LatentShape

Builder = Callable[..., torch.nn.Module]


class ReplicatedLinear(torch.nn.Module):
    """A matrix that tensor parallelism does not split."""

    def __init__(self, inputs: int, outputs: int, *, config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        weight: Any = torch.nn.Parameter(
            torch.empty(outputs, inputs, dtype=config.params_dtype, device=config.platform.device)
        )
        weight.sequence_parallel = config.sequence_parallel  # each rank sees some of the tokens: gradients are added up
        self.weight = weight

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return F.linear(hidden, self.weight), None


@dataclass
class LatentAttentionParts:
    """Modules that latent attention is made of."""

    replicated: Builder  # projection of the hidden state to a short vector, which every rank computes whole
    column: Builder  # projection of the hidden state to queries, split over ranks
    norm: Builder  # norm of a short vector; nothing where `normed_column` has it
    normed_column: Builder  # projection of a normalised short vector, split over ranks
    core_attention: Builder
    linear_proj: Builder


class LatentAttention(MegatronModule):
    """Attention from low-rank vectors, with one rotated key for all heads.

    Parameters have the names of Megatron-Core's own module, whose torch layers split the projections to the short
    vectors and lose part of their gradients, and which pads values to the length of keys. `softmax_scale` is the factor
    of query-key products, `rope_factor` that of the rotated parts (YaRN). With an `indexer` the core attention gets
    what this reads: the hidden state, the normalised short query and the angles.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: LatentAttentionParts,
        layer_number: int,
        *,
        latent: LatentShape,
        softmax_scale: float,
        rope_factor: float,
        indexer: IndexerShape | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.latent, self.rope_factor, self.is_sparse = latent, rope_factor, indexer is not None
        process_groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        heads, hidden = config.num_attention_heads, config.hidden_size
        query, value = latent.plain_dim + latent.rope_dim, latent.value_dim
        common: dict[str, Any] = {"config": config, "bias": False, "init_method": config.init_method}
        duplicated = {
            **common,
            "parallel_mode": "duplicated",
            "skip_bias_add": False,
            "skip_weight_param_allocation": False,
        }
        split: dict[str, Any] = {**common, "is_expert": False, "tp_group": process_groups.tp}
        column = {**split, "skip_bias_add": False, "gather_output": False}
        row = {**split, "init_method": config.output_layer_init_method, "skip_bias_add": True}
        norm = {"config": config, "eps": latent.norm_eps}
        normed_config = copy.copy(config)  # of layers that contain a norm, which read its epsilon there
        normed_config.layernorm_epsilon = latent.norm_eps
        normed_column = {**column, "config": normed_config}
        if latent.query_rank is None:
            self.linear_q_proj = submodules.column(hidden, heads * query, **column)
        else:
            self.linear_q_down_proj = submodules.replicated(hidden, latent.query_rank, **duplicated)
            self.q_layernorm = submodules.norm(hidden_size=latent.query_rank, **norm)
            self.linear_q_up_proj = submodules.normed_column(latent.query_rank, heads * query, **normed_column)
        self.linear_kv_down_proj = submodules.replicated(hidden, latent.rank + latent.rope_dim, **duplicated)
        self.kv_layernorm = submodules.norm(hidden_size=latent.rank, **norm)
        outputs = heads * (latent.plain_dim + value)
        self.linear_kv_up_proj = submodules.normed_column(latent.rank, outputs, **normed_column)
        sparse = {} if indexer is None else {"indexer": indexer, "latent": latent, "rope_factor": rope_factor}
        self.core_attention = submodules.core_attention(
            config=config,
            layer_number=layer_number,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            softmax_scale=softmax_scale,
            k_channels=query,
            v_channels=value,
            cp_comm_type=cp_comm_type,
            pg_collection=process_groups,
            **sparse,
        )
        self.linear_proj = submodules.linear_proj(heads * value, hidden, input_is_parallel=True, **row)
        if config.fp8 is not None and config.fp8_recipe != "delayed":
            self._keep_inputs("linear_proj")  # attention keeps its output anyway

    def forward(
        self, hidden_states: Tensor, *_: Any, rotary_pos_emb: Tensor, packed_seq_params: Any = None, **__: Any
    ) -> tuple[Tensor, Tensor | None]:
        # From [length, 1, hidden] to the same, and no bias. With sequence parallelism `length` counts this rank's
        # tokens; the angles, [length, 1, 1, rope_dim], float32, are those of all tokens.
        latent = self.latent
        short_query = hidden_states
        if latent.query_rank is not None:
            short_query, _bias = self.linear_q_down_proj(hidden_states)
            short_query = self.q_layernorm(short_query)
        compressed, _bias = self.linear_kv_down_proj(hidden_states)
        short, shared_key = compressed.split([latent.rank, latent.rope_dim], dim=-1)
        if self.config.sequence_parallel:
            # The heads of every rank contribute a gradient to the shared key, and backward sums them.
            process_group = parallel_state.get_tensor_model_parallel_group()
            shared_key = tensor_parallel.gather_from_sequence_parallel_region(shared_key, group=process_group)
        vectors = (hidden_states.detach(), short_query.detach(), rotary_pos_emb)
        parts = short_query, self.kv_layernorm(short), shared_key, rotary_pos_emb
        make_heads = partial(self._make_heads, is_packed=packed_seq_params.qkv_format == "thd")
        if self.config.recompute_latent_heads:
            heads = tensor_parallel.CheckpointWithoutOutput(fp8=self.config.fp8)
            query, key, value = heads.checkpoint(make_heads, *parts)
            out = self._attend(query, key, value, packed_seq_params, vectors)
            heads.discard_output_and_register_recompute(out)
        else:
            query, key, value = make_heads(*parts)
            out = self._attend(query, key, value, packed_seq_params, vectors)
        projected: tuple[Tensor, Tensor | None] = self.linear_proj(out)
        return projected

    def set_for_recompute_input_layernorm(self) -> None:
        """Let the first projections keep their input, whose values Megatron-Core drops and makes again."""
        names = ["linear_q_proj" if self.latent.query_rank is None else "linear_q_down_proj", "linear_kv_down_proj"]
        self._keep_inputs(*names)

    def _keep_inputs(self, *names: str) -> None:
        # Transformer Engine's layers would keep FP8 copies of their inputs; other layers have no such choice.
        for name in names:
            if hasattr(module := getattr(self, name), "save_original_input"):
                module.save_original_input = True

    def _make_heads(
        self, short_query: Tensor, short: Tensor, shared_key: Tensor, angles: Tensor, *, is_packed: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Queries, keys and values, [length, 1, heads of this rank, ...].
        latent = self.latent
        project = self.linear_q_proj if latent.query_rank is None else self.linear_q_up_proj
        queries, _bias = project(short_query)
        queries = queries.unflatten(-1, (-1, latent.plain_dim + latent.rope_dim))
        both, _bias = self.linear_kv_up_proj(short)
        keys, value = both.unflatten(-1, (-1, latent.plain_dim + latent.value_dim)).split(
            [latent.plain_dim, latent.value_dim], dim=-1
        )
        plain, rotated = queries.split([latent.plain_dim, latent.rope_dim], dim=-1)
        query = torch.cat([plain, rotate_neighbours(rotated, angles, self.rope_factor)], dim=-1)
        shared_key = rotate_neighbours(shared_key[:, :, None], angles, self.rope_factor)
        shared_key = shared_key.expand(-1, -1, keys.shape[2], -1)
        key = torch.cat([keys, shared_key], dim=-1)
        if is_packed:  # Transformer Engine takes [length, heads, ...], each in memory of its own
            query, key, value = query[:, 0], key[:, 0], value[:, 0].contiguous()
        return query, key, value

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, packed: Any, vectors: tuple[Tensor, ...]) -> Tensor:
        # To [length, 1, heads of this rank * value_dim]. An indexer reads `vectors`.
        further = vectors if self.is_sparse else (None,)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out: Tensor = self.core_attention(
                query, key, value, *further, attn_mask_type=AttnMaskType.causal, packed_seq_params=packed
            )
            return out.reshape(len(out), 1, -1)

        config = self.config
        if config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules:
            out: Tensor = tensor_parallel.checkpoint(attend, False, query, key, value)
            return out
        return attend(query, key, value)


def rotate_neighbours(vectors: Tensor, angles: Tensor, factor: float) -> Tensor:
    """Rotate neighbouring features against each other, and multiply by a factor.

    Moving them half a vector apart leaves query-key products unchanged.
    """
    return rotate_halves(vectors.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), angles, factor)


def rotate_halves(vectors: Tensor, angles: Tensor, factor: float) -> Tensor:
    """Rotate the halves of [tokens, 1, heads, features] against each other."""
    cos, sin = angles.cos() * factor, angles.sin() * factor
    first, second = vectors.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return vectors * cos.to(vectors.dtype) + turned * sin.to(vectors.dtype)
