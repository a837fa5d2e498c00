"""Builds this rank's shard of the policy or of the value model from a model's sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import TransformerConfig

from megatron_grpo.config.schema import Fp8Config, LoraConfig, ParallelConfig, QuantizationFormat
from megatron_grpo.platform.device import current_platform
from megatron_grpo.trainer.model.attention import GlobalAndLocalRotary, RotaryAtPositions, scaled_rope_frequencies
from megatron_grpo.trainer.model.decoder import DecoderModel, ValueHead
from megatron_grpo.trainer.model.experts import mark_experts
from megatron_grpo.trainer.model.layer_spec import Additions, layer_spec, uses_transformer_engine
from megatron_grpo.trainer.model.lora import train_adapters_alone
from megatron_grpo.trainer.model.megatron_config import require_fp8, transformer_config
from megatron_grpo.trainer.model.rounding import keep_outer_layers
from megatron_grpo.weights.families.family import padded_vocab
from megatron_grpo.weights.shape import ModelShape


def build_model(
    shape: ModelShape,
    parallel: ParallelConfig,
    *,
    precision: Literal["float32", "bfloat16"],
    activation_checkpointing: bool = False,
    fields: Mapping[str, Any] | None = None,
    lora: LoraConfig | None = None,
    fp8: Fp8Config | None = None,
    quantization: QuantizationFormat | None = None,
) -> list[DecoderModel]:
    """A rank's shard of the model on the platform's device, weights uninitialised: one chunk, or
    several that microbatches pass in turn (virtual pipeline).

    The last chunk of the last stage, `chunk(token_ids, position_ids, None)`, returns logits [sequences, length,
    columns], where columns is padded vocabulary / TP; sums over the vocabulary have to leave the padding out. Packed
    sequences (`PackedSequences`) are passed as one sequence, [1, tokens]; with `rows` it returns hidden states.

    Args:
        shape: sizes of the model; that of a value model has it end in a `ValueHead` (initially zero).
        parallel: the layout that `initialize_parallel` was called with.
        precision: dtype of weights and activations.
        activation_checkpointing: recompute every layer in the backward pass.
        fields: fields of Megatron-Core's TransformerConfig (`transformer_fields`) that override the defaults.
        lora: adapters, the only trained parameters then; None, or a rank of 0: none.
        fp8: FP8 of the linear layers; None: off.
        quantization: format that modelopt rounds the operands of linear layers to; None: they are not rounded.

    Raises:
        RunError: this rank's device or packages have no FP8, and the configuration asks for it.
    """
    additions = Additions(lora or LoraConfig(), fp8 or Fp8Config(), quantization)
    require_fp8(additions.fp8, shape)
    config = transformer_config(shape, parallel, precision, activation_checkpointing, additions.fp8, fields or {})
    number = parallel.virtual_pipeline
    chunks = [
        _build_chunk(config, shape, parallel, chunk if number > 1 else None, additions, precision)
        for chunk in range(number)
    ]
    for chunk in chunks:
        if shape.value_head is not None and chunk.post_process:
            chunk.output_layer = ValueHead(config)
    return chunks


def _build_chunk(
    config: TransformerConfig,
    shape: ModelShape,
    parallel: ParallelConfig,
    vp_stage: int | None,
    additions: Additions,
    precision: Literal["float32", "bfloat16"],
) -> DecoderModel:
    """One chunk of the rank's shard; vp_stage None: the only one."""
    model = DecoderModel(
        config=config,
        transformer_layer_spec=layer_spec(config, shape, vp_stage, additions),
        vocab_size=padded_vocab(shape, parallel.tensor),
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        vp_stage=vp_stage,
    )
    mark_experts(model)
    if shape.rope_scaling is not None:
        model.rotary_pos_emb.inv_freq = scaled_rope_frequencies(shape).to(current_platform().device)
    if not uses_transformer_engine(shape, precision):
        model.rotary_pos_emb = _rotary_at_positions(model.rotary_pos_emb, shape)
    if shape.embedding_scale is not None and model.pre_process:
        _scale_embeddings(model.embedding, shape.embedding_scale, config.params_dtype)
    if additions.lora.rank:
        train_adapters_alone(model)
    if additions.fp8.simulated:
        keep_outer_layers(model, shape.layers, additions.fp8)
    return model


def _rotary_at_positions(rotary: RotaryEmbedding, shape: ModelShape) -> RotaryAtPositions:
    if shape.local_rope_theta is None:
        return RotaryAtPositions(rotary)
    local = RotaryEmbedding(
        shape.head_dim,
        rotary_percent=1.0,
        rotary_base=shape.local_rope_theta,
        use_cpu_initialization=current_platform().name == "cpu",
        cp_group=rotary.cp_group,
    )
    return GlobalAndLocalRotary(rotary, local)


def _scale_embeddings(embedding: torch.nn.Module, scale: float, dtype: torch.dtype) -> None:
    """Multiply what an embedding gives, [length, sequences, hidden], by a factor that is rounded to its dtype first."""
    rounded = float(torch.tensor(scale, dtype=dtype))
    embedding.register_forward_hook(lambda _module, _given, embedded: embedded * rounded)
