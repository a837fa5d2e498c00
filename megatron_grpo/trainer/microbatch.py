"""A microbatch on the device: packed sequences, the tokens that the head computes, and the fields of these tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.batch.images import compute_grid_positions
from megatron_grpo.batch.token_batch import TokenBatch, TokenFields, find_token_indices, require_field
from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.losses.loss import Segments
from megatron_grpo.models.routed_experts import RoutedForm
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.platform.device import Platform
from megatron_grpo.trainer.image_tokens import ImageTokens
from megatron_grpo.trainer.model import packed_sequences as packs
from megatron_grpo.trainer.model.layer_spec import uses_transformer_engine
from megatron_grpo.trainer.vision_tower import VisionTower

MaskField = Literal["loss_mask", "sampled"]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Sequences laid end to end on the device.

    All stages build the same microbatches; the first one reads token_ids, the last one the rest. The head computes only
    some tokens, here called rows: log-probabilities of a prompt's tokens are not needed, and the logits of all tokens
    would be the largest tensor of the step. A microbatch has one row at least, so that every rank goes through the same
    collectives, also a context-parallel rank without a sampled token.
    """

    token_ids: Tensor
    """[1, tokens of this rank], int64; zeros on padding, and everywhere on stages that do not read them."""
    sequences: packs.PackedSequences
    rows: Tensor  # [rows], int64: index, among this rank's tokens, of the hidden state that predicts each row
    tokens: TokenFields  # fields of the predicted tokens, each [rows]; token_ids is always there, int64
    segments: Segments
    token_indices: NDArray[np.int64]
    """[rows], on the host: index of each predicted token in the flat batch; -1: a row whose result is dropped."""


class MicrobatchMaker:
    """Makes microbatches from a rank's batches."""

    def __init__(
        self, config: PolicyConfig, shape: ModelShape, platform: Platform, tower: VisionTower | None = None
    ) -> None:
        """`tower`: makes features of images; None: no layer of this rank takes them."""
        self.tower = tower
        self._config, self._parallel, self._shape = config, config.parallel, shape
        self._move = platform.move
        uses_te = uses_transformer_engine(shape, platform, config.precision)
        self._transformer_engine = uses_te and shape.indexer is None  # whether attention is Transformer Engine's

    def lay_out(self, lengths: Sequence[int]) -> packs.PackedLayout:
        """Lay sequences of these lengths out on this rank."""
        return packs.lay_out(lengths, rank=parallel_state.get_context_parallel_rank(), **self._choose_padding(lengths))

    def count_stage_tokens(self, lengths: Sequence[int]) -> int:
        """Count the tokens that a rank's pipeline stages exchange.

        `lengths`: of the microbatch's sequences; none: it has the dummy's.
        """
        lengths = lengths or [1]
        tokens = int(packs.pad_lengths(lengths, **self._choose_padding(lengths)).sum()) // self._parallel.context
        return tokens // (self._parallel.tensor if self._parallel.sequence else 1)

    def _choose_padding(self, lengths: Sequence[int]) -> dict[str, Any]:
        parallel, multiple = self._parallel, self._parallel.sequence_multiple
        return {
            "size": parallel.context,
            # A rank's tokens, after sequence parallelism, are a multiple of what FP8 products require.
            "tensor_multiple": (parallel.tensor if parallel.sequence else 1) * self._config.fp8.token_multiple,
            # Packed sequences are padded only as the layout needs, others to the longest of the microbatch.
            "width": None if self._config.packing else -(-max(lengths) // multiple) * multiple,
        }

    def make(self, batch: TokenBatch, indices: list[int], mask_field: MaskField) -> Microbatch:
        """Make a microbatch of these sequences; of one dummy token if there are none."""
        # All indices are computed on the host, so that nothing here makes the host wait for the device.
        if indices:
            selected = batch.select(indices)
        else:  # a token that nothing predicts
            zeros = {name: value.new_zeros(1, *value.shape[1:]) for name, value in batch.fields.as_dict().items()}
            selected = TokenBatch([1], TokenFields(**zeros))
        layout = self.lay_out(selected.lengths)
        mask = getattr(selected.fields, mask_field)  # without it every token is computed but the first of a sequence
        in_loss = np.ones(sum(selected.lengths), dtype=np.bool_) if mask is None else (mask > 0).numpy()
        imitated = selected.fields.imitated if mask_field == "loss_mask" else None
        is_computed = in_loss if imitated is None else in_loss | (imitated > 0).numpy()
        rows, tokens = layout.find_predicting(is_computed, distance=self._shape.head.distance)
        fields = selected.fields
        if fields.token_ids is None:
            fields = replace(fields, token_ids=torch.zeros(len(is_computed), dtype=torch.int32))
        assert fields.token_ids is not None
        is_empty = len(tokens) == 0
        if is_empty:  # the head computes one row that the loss leaves out, because an empty maximum is an error
            rows, tokens, token_indices = np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, -1)
        else:
            token_indices = find_token_indices(np.asarray(batch.lengths), np.asarray(indices))[tokens]
        index = torch.from_numpy(tokens)
        # The layers replay the recorded experts; the head has no use for them.
        row_fields = {name: value[index] for name, value in replace(fields, routed_experts=None).as_dict().items()}
        row_fields["token_ids"] = row_fields["token_ids"].long()
        for name in {"loss_mask", "imitated"} & row_fields.keys() if is_empty else ():
            row_fields[name] = torch.zeros(1)
        token_ids, is_token = np.zeros(layout.local_tokens, dtype=np.int64), layout.source >= 0
        token_ids[is_token] = fields.token_ids.numpy()[layout.source[is_token]]
        move = self._move
        sequence = np.repeat(np.arange(len(selected)), selected.lengths)  # of each token
        return Microbatch(
            token_ids=move(token_ids[None]),
            sequences=self._pack(layout, selected, is_dummy=not indices),
            rows=move(rows),
            tokens=TokenFields(**{name: move(value.numpy()) for name, value in row_fields.items()}),
            segments=Segments(
                sequence_index=move(sequence[tokens]),
                sizes=move(np.bincount(sequence[in_loss], minlength=len(selected)).astype(np.float32)),
                **self._share_sequences(in_loss, tokens),
            ),
            token_indices=token_indices,
        )

    def _share_sequences(self, in_loss: NDArray[np.bool_], tokens: NDArray[np.int64]) -> dict[str, Any]:
        """Say how context-parallel ranks share the sequences; nothing if they are whole."""
        if self._parallel.context == 1:
            return {}
        order = np.cumsum(in_loss) - 1
        count = int(in_loss.sum())
        return {"sum_over_ranks": sum_over_context, "order": self._move(order[tokens]), "count": count}

    def _place_images(self, layout: packs.PackedLayout, batch: TokenBatch) -> packs.PlacedImages | None:
        """Compute features of images for tokens that this rank embeds."""
        if self.tower is None:
            return None
        part, parts = 0, 1
        if self._parallel.sequence:
            part, parts = parallel_state.get_tensor_model_parallel_rank(), self._parallel.tensor
        source = packs.select_source(layout, part=part, parts=parts)
        tokens = ImageTokens.locate(batch, source, self._shape)  # also where no sequence should have an image
        return self.tower.compute(tokens) if tokens.images else None

    def _find_grid_positions(self, layout: packs.PackedLayout, batch: TokenBatch) -> NDArray[np.int64]:
        """Find the positions of this rank's tokens in time, height and width: [3, tokens]."""
        vision, token_ids = self._shape.vision, require_field(batch.fields.token_ids).numpy()
        assert vision is not None, "the model has one position of a token"
        sequences = np.split(token_ids, np.cumsum(batch.lengths)[:-1])
        images = batch.images or [()] * len(batch)
        pairs = zip(sequences, images, strict=True)
        positions = np.concatenate([compute_grid_positions(ids, stored, vision) for ids, stored in pairs], axis=1)
        return np.where(layout.source < 0, 0, positions[:, np.maximum(layout.source, 0)])

    def _pack(self, layout: packs.PackedLayout, batch: TokenBatch, *, is_dummy: bool) -> packs.PackedSequences:
        shape, routed = self._shape, batch.fields.routed_experts  # the recorded experts in this rank's layers
        packed = packs.build_packed_sequences(
            layout, self._transformer_engine, shape.window, self._move, chunked=shape.chunked
        )
        if shape.vision is not None:
            packed.grid_positions = self._move(self._find_grid_positions(layout, batch))
            packed.images = self._place_images(layout, batch)
        if shape.mamba is not None:
            packed.state_tokens = packs.build_state_tokens(layout, self._move)
        if self._shape.experts is not None:
            part, parts = 0, 1
            if self._parallel.sequence:
                part, parts = parallel_state.get_tensor_model_parallel_rank(), self._parallel.tensor
            source = packs.select_source(layout, part=part, parts=parts, is_dummy=is_dummy)
            packed.membership = packs.build_membership(layout, source, self._move)
            if routed is not None:
                packed.routed = packs.select_routing(RoutedForm.from_shape(shape), routed.numpy(), source, self._move)
        return packed


def sum_over_context(values: Tensor) -> Tensor:
    """Sum values over the context-parallel ranks that share the sequences."""
    total = values.clone()
    dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
    return total


def copy_to_host(by_microbatch: list[dict[str, Tensor]]) -> list[dict[str, float]]:
    values = [value.double() for metrics in by_microbatch for value in metrics.values()]
    numbers = iter(torch.stack(values).tolist() if values else ())
    return [{name: next(numbers) for name in metrics} for metrics in by_microbatch]
