"""Multi-latent attention (DeepSeek-V2, section 2.1) of the torch layers, for packed sequences in every layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_grpo.models.shape import LatentShape
from megatron_grpo.trainer.model.attention import TorchCoreAttention
from megatron_grpo.trainer.model.layers import RMSNorm


class ReplicatedLinear(torch.nn.Module):
    """A matrix that tensor parallelism does not split."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        weight: Any = torch.nn.Parameter(
            torch.empty(outputs, inputs, dtype=config.params_dtype, device=config.platform.device)
        )
        weight.sequence_parallel = config.sequence_parallel  # each rank sees some of the tokens: gradients are added up
        self.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)


@dataclass
class LatentAttentionParts:
    """The projections that tensor parallelism splits."""

    column: Callable[..., torch.nn.Module] = tensor_parallel.ColumnParallelLinear
    linear_proj: Callable[..., torch.nn.Module] = tensor_parallel.RowParallelLinear


class LatentAttention(MegatronModule):
    """Attention from low-rank vectors, with one rotated key for all heads.

    Parameters have the names of Megatron-Core's own module, whose torch layers split the projections to the short
    vectors and lose part of their gradients. `softmax_scale` is the factor of query-key products, `rope_factor` that of
    the rotated parts (YaRN).
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
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.latent, self.rope_factor = latent, rope_factor
        process_groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        heads, hidden = config.num_attention_heads, config.hidden_size
        queries = heads * (latent.plain_dim + latent.rope_dim)
        split: dict[str, Any] = {"config": config, "bias": False, "is_expert": False, "tp_group": process_groups.tp}
        column = {**split, "init_method": config.init_method, "skip_bias_add": False, "gather_output": False}
        initialize = config.output_layer_init_method
        row = {**split, "init_method": initialize, "skip_bias_add": True, "input_is_parallel": True}
        if latent.query_rank is None:
            self.linear_q_proj = submodules.column(hidden, queries, **column)
        else:
            self.linear_q_down_proj = ReplicatedLinear(config, hidden, latent.query_rank)
            self.q_layernorm = RMSNorm(config, latent.query_rank)
            self.linear_q_up_proj = submodules.column(latent.query_rank, queries, **column)
        self.linear_kv_down_proj = ReplicatedLinear(config, hidden, latent.rank + latent.rope_dim)
        self.kv_layernorm = RMSNorm(config, latent.rank)
        outputs = heads * (latent.plain_dim + latent.value_dim)
        self.linear_kv_up_proj = submodules.column(latent.rank, outputs, **column)
        self.core_attention = TorchCoreAttention(config, layer_number=layer_number, softmax_scale=softmax_scale)
        self.linear_proj = submodules.linear_proj(heads * latent.value_dim, hidden, **row)

    def forward(
        self, hidden_states: Tensor, *_: Any, rotary_pos_emb: Tensor, packed_seq_params: Any = None, **__: Any
    ) -> tuple[Tensor, Tensor | None]:
        # From [length, 1, hidden] to the same, and no bias. With sequence parallelism `length` counts this rank's
        # tokens; the angles, [length, 1, 1, rope_dim], float32, are those of all tokens.
        latent = self.latent
        if latent.query_rank is None:
            queries, _bias = self.linear_q_proj(hidden_states)
        else:
            queries, _bias = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)))
        queries = queries.unflatten(-1, (-1, latent.plain_dim + latent.rope_dim))
        short, shared_key = self.linear_kv_down_proj(hidden_states).split([latent.rank, latent.rope_dim], dim=-1)
        both, _bias = self.linear_kv_up_proj(self.kv_layernorm(short))
        keys, values = both.unflatten(-1, (-1, latent.plain_dim + latent.value_dim)).split(
            [latent.plain_dim, latent.value_dim], dim=-1
        )
        if self.config.sequence_parallel:
            # The heads of every rank contribute a gradient to the shared key, and backward sums them.
            process_group = parallel_state.get_tensor_model_parallel_group()
            shared_key = tensor_parallel.gather_from_sequence_parallel_region(shared_key, group=process_group)
        plain, rotated = queries.split([latent.plain_dim, latent.rope_dim], dim=-1)
        query = torch.cat([plain, self._rotate(rotated, rotary_pos_emb)], dim=-1)
        shared_key = self._rotate(shared_key[:, :, None], rotary_pos_emb).expand(-1, -1, keys.shape[2], -1)
        key = torch.cat([keys, shared_key], dim=-1)
        out = self.core_attention(query, key, values, packed_seq_params=packed_seq_params)
        projected: tuple[Tensor, Tensor | None] = self.linear_proj(out)
        return projected

    def _rotate(self, vectors: Tensor, angles: Tensor) -> Tensor:
        # Neighbours rotate against each other. Moving them half a vector apart leaves query-key products unchanged.
        vectors = vectors.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        cos, sin = (angles.cos() * self.rope_factor), (angles.sin() * self.rope_factor)
        first, second = vectors.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        return vectors * cos.to(vectors.dtype) + turned * sin.to(vectors.dtype)
