"""Builds this rank's shard of the policy or of the value model from a model's sizes."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import TransformerConfig

from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.platform.device import current_platform
from megatron_grpo.trainer.model.attention import GlobalAndLocalRotary, RotaryAtPositions, scaled_rope
from megatron_grpo.trainer.model.decoder import DecoderModel, ValueHead
from megatron_grpo.trainer.model.experts import mark_experts
from megatron_grpo.trainer.model.layer_spec import layer_spec, uses_transformer_engine
from megatron_grpo.trainer.model.lora import train_adapters_alone
from megatron_grpo.trainer.model.megatron_config import require_fp8, transformer_config
from megatron_grpo.trainer.model.rounding import keep_outer_layers
from megatron_grpo.weights.families.family import padded_vocab
from megatron_grpo.weights.shape import ModelShape


def build_model(config: PolicyConfig, shape: ModelShape) -> list[DecoderModel]:
    """A rank's shard of the model on the platform's device, weights uninitialised: one chunk, or several that
    microbatches pass in turn (virtual pipeline).

    The last chunk of the last stage, `chunk(token_ids, None, None, packed_seq_params=...)`, returns logits, [1, tokens,
    columns], where columns is padded vocabulary / TP; sums over the vocabulary have to leave the padding out. With
    `rows` it returns hidden states. Packed sequences (`PackedSequences`) are passed as one sequence, [1, tokens].

    Args:
        config: the model's configuration; `initialize_parallel` was called with its layout.
        shape: sizes of the model; that of a value model ends in a `ValueHead`, initially zero.

    Raises:
        RunError: this rank's device or packages have no FP8, and the configuration asks for it.
    """
    require_fp8(config.fp8, shape)
    settings = transformer_config(config, shape)
    number = config.parallel.virtual_pipeline
    return [_build_chunk(settings, config, shape, stage) for stage in (range(number) if number > 1 else (None,))]


def _build_chunk(
    settings: TransformerConfig, config: PolicyConfig, shape: ModelShape, vp_stage: int | None
) -> DecoderModel:
    """One chunk of the rank's shard; vp_stage None: the only one."""
    model = DecoderModel(
        config=settings,
        transformer_layer_spec=layer_spec(settings, config, shape, vp_stage),
        vocab_size=padded_vocab(shape, config.parallel.tensor),
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
        model.rotary_pos_emb.inv_freq = scaled_rope(shape)[0].to(current_platform().device)
    if not uses_transformer_engine(shape, config.precision):
        model.rotary_pos_emb = _rotary_at_positions(model.rotary_pos_emb, shape)
    if shape.embedding_scale is not None and model.pre_process:
        scale = float(torch.tensor(shape.embedding_scale, dtype=settings.params_dtype))  # rounded as the embeddings are
        model.embedding.register_forward_hook(lambda _module, _given, embedded: embedded * scale)
    if config.lora.rank:
        train_adapters_alone(model)
    if config.fp8.simulated:
        keep_outer_layers(model, shape.layers, config.fp8)
    if shape.value_head is not None and model.post_process:
        model.output_layer = ValueHead(settings)
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
