"""Sparse attention (DeepSeek-V3.2, section 2.1): an indexer chooses the tokens that each token attends to.

Megatron-Core's own module computes the same for the fused kernels of some GPUs; without them it gathers the keys and
values of every query in each head. Here the choice is a mask of torch's fused kernel, on all devices.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_grpo.models.megatron_names import translate_layer
from megatron_grpo.models.shape import IndexerShape, LatentShape
from megatron_grpo.trainer.model.attention import TorchCoreAttention, select_rows
from megatron_grpo.trainer.model.latent_attention import ReplicatedLinear, rotate_halves, rotate_neighbours
from megatron_grpo.trainer.model.packed_sequences import AttentionRectangle, PackedSequences


class Indexer(torch.nn.Module):
    """Makes the vectors by which tokens are chosen; nothing in it is trained.

    The choice has no gradient, and the policy's loss none for the indexer. Every tensor-parallel rank has all heads.
    Parameters have the names of Megatron-Core's own module.
    """

    def __init__(
        self, config: TransformerConfig, indexer: IndexerShape, latent: LatentShape, rope_factor: float
    ) -> None:
        super().__init__()
        assert latent.query_rank is not None
        self.shape, self.rope_dim, self.rope_factor = indexer, latent.rope_dim, rope_factor
        self.linear_wq_b = ReplicatedLinear(latent.query_rank, indexer.heads * indexer.head_dim, config=config)
        self.linear_wk = ReplicatedLinear(config.hidden_size, indexer.head_dim, config=config)
        options: dict[str, Any] = {"dtype": config.params_dtype, "device": config.platform.device}
        self.k_norm = torch.nn.LayerNorm(indexer.head_dim, eps=1e-6, **options)
        self.linear_weights_proj = ReplicatedLinear(config.hidden_size, indexer.heads, config=config)
        self.requires_grad_(False)
        self._is_split = config.sequence_parallel

    @torch.no_grad()
    def forward(self, hidden: Tensor, short_query: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and weights of the heads.

        They are those of all tokens of a context-parallel rank: [tokens, heads, head_dim], [tokens, head_dim], and
        [tokens, heads] in float32. `hidden` and `short_query`, [tokens of this rank, 1, features], are normalised.
        """
        key = self.k_norm(self.linear_wk(hidden)[0])
        parts = [key, self.linear_weights_proj(hidden)[0], short_query]
        if self._is_split:
            group = parallel_state.get_tensor_model_parallel_group()
            both = gather_from_sequence_parallel_region(torch.cat(parts, dim=-1), group=group)
            parts = list(both.split([part.shape[-1] for part in parts], dim=-1))
        key, weights, short_query = parts
        query = self.linear_wq_b(short_query)[0].unflatten(-1, (self.shape.heads, self.shape.head_dim))
        query, key = self._rotate(query, angles), self._rotate(key[:, :, None], angles)
        return query[:, 0], key[:, 0, 0], weights[:, 0].float() * self.shape.heads**-0.5

    def _rotate(self, vectors: Tensor, angles: Tensor) -> Tensor:
        # The rotated features are the first, other than in the latent attention's heads.
        rotate = rotate_neighbours if self.shape.interleaved_rope else rotate_halves
        rotated, plain = vectors.split([self.rope_dim, vectors.shape[-1] - self.rope_dim], dim=-1)
        return torch.cat([rotate(rotated, angles, self.rope_factor), plain], dim=-1)


class SparseCoreAttention(TorchCoreAttention):
    """Causal attention to the tokens that an indexer chose.

    Layers without an indexer attend to those that the last layer before them with one chose for the same microbatch.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        layer_number: int,
        indexer: IndexerShape,
        latent: LatentShape,
        rope_factor: float,
        **keywords: Any,
    ) -> None:
        super().__init__(config, layer_number=layer_number, **keywords)
        layer, _halves = translate_layer(layer_number)
        self._source, self._top_k = indexer.find_source(layer), indexer.top_k
        self._is_shared = not all(indexer.layers[layer + 1 : layer + 2])  # by the next layer
        self.indexer = Indexer(config, indexer, latent, rope_factor) if indexer.layers[layer] else None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *vectors: Any, packed_seq_params: Any = None, **_: Any
    ) -> Tensor:
        """Attend, as `TorchCoreAttention`; `vectors` are arguments of the indexer."""
        assert isinstance(packed_seq_params, PackedSequences), "sequences without their layout"
        assert packed_seq_params.calls is not None, "the microbatch was made for attention of Transformer Engine"
        chosen = packed_seq_params.chosen.get(self._source)
        if self.indexer is not None:
            queries, keys, weights = self.indexer(*vectors)
            chosen = self._choose(queries, keys, weights, packed_seq_params.calls.rectangles)
            if self._is_shared:
                packed_seq_params.chosen[self._source] = chosen
        assert chosen is not None, "the layer that chooses for this one is in another pipeline stage or chunk"
        return super().forward(query, key, value, packed_seq_params=packed_seq_params, masks=chosen)

    @torch.no_grad()
    def _choose(
        self, queries: Tensor, keys: Tensor, weights: Tensor, rectangles: list[AttentionRectangle]
    ) -> list[Tensor | None]:
        """Choose the keys of each query.

        A mask for each rectangle, [parts, 1, queries, keys]; None: all keys before the query.
        """
        if self._context is not None:
            keys = gather_from_sequence_parallel_region(keys, group=self._context)
        chosen: list[Tensor | None] = []
        for rectangle in rectangles:
            if rectangle.keys.shape[1] <= self._top_k:
                chosen.append(None)
                continue
            query, weight = (select_rows(tensor, rectangle.queries) for tensor in (queries, weights))
            scores = compute_index_scores(query, select_rows(keys, rectangle.keys), weight)
            visible = rectangle.make_causal_mask()
            scores.masked_fill_(~visible, -torch.inf)
            chosen.append((choose_highest(scores, self._top_k) & visible)[:, None])
        return chosen


def choose_highest(scores: Tensor, count: int) -> Tensor:
    """Mark the `count` highest scores of each row, among equal ones the first.

    Scores are equal where no head has a positive product. Which of them `topk` takes depends on the device and on the
    length of the row, thus on what a sequence is packed with and on context parallelism.
    """
    lowest = scores.topk(count, dim=-1).values[..., -1:]
    is_higher, is_equal = scores > lowest, scores == lowest
    room = count - is_higher.sum(dim=-1, keepdim=True)
    return is_higher | (is_equal & (is_equal.cumsum(dim=-1) <= room))


def compute_index_scores(queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Compute an indexer's scores (DeepSeek-V3.2, eq. 1).

    A score is the sum over heads of weight * relu(query key / sqrt(head_dim)). Queries are [parts, queries, heads,
    head_dim], keys [parts, keys, head_dim], weights [parts, queries, heads]; the scores are [parts, queries, keys],
    float32.
    """
    scores = queries.new_zeros(*queries.shape[:2], keys.shape[1], dtype=torch.float32)
    columns = keys.float().transpose(-1, -2)
    for head in range(queries.shape[2]):  # one by one, because the products of all heads would be the largest tensor
        products = F.relu_(queries[:, :, head].float() @ columns * keys.shape[-1] ** -0.5)
        scores += products.mul_(weights[:, :, head, None])
    return scores
