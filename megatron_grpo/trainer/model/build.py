"""Building a rank's shard of the policy or of the value model: a decoder whose head is applied to chosen tokens
alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_map import pad_vocab
from megatron_grpo.platform.device import Platform, detect_platform
from megatron_grpo.trainer.model.attention import (
    GlobalAndLocalRotary,
    RotaryAtPositions,
    RotaryTable,
    compute_scaled_rope,
)
from megatron_grpo.trainer.model.experts import mark_experts
from megatron_grpo.trainer.model.layer_spec import build_layer_specs, uses_transformer_engine
from megatron_grpo.trainer.model.lora import train_adapters_alone
from megatron_grpo.trainer.model.megatron_config import build_transformer_config, require_fp8
from megatron_grpo.trainer.model.rounding import keep_outer_layers


class DecoderModel(GPTModel):
    """Megatron-Core's model without its head, which `PolicyRank` or `ValueHead` applies to chosen tokens alone.

    The head is the largest matrix of a small model, and its output the largest tensor of any model. So prompts and
    padding never reach it, and logits of all tokens are never held.
    """

    rows: Tensor | None = None
    """[rows], int64: indices of the chosen tokens of the next microbatch, [1, tokens]; None: the model returns logits
    of every token, [sequences, length, columns of this rank]."""

    def _postprocess(self, hidden_states: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        """[length, 1, hidden] of hidden states to those of the rows, [1, rows, hidden], on the last stage."""
        if not self.post_process or self.rows is None:
            output: Tensor = super()._postprocess(hidden_states, *arguments, **keywords)
            return output
        assert hidden_states.shape[1] == 1, "rows index packed sequences"
        hidden = hidden_states
        if self.config.sequence_parallel:
            # Every rank gets the complete gradient of the rows from the head, so backward only slices out its tokens.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden[self.rows].transpose(0, 1)

    @property
    def head_weight(self) -> Tensor:
        """[columns of this rank, hidden]: a row for each vocabulary entry, padding included."""
        weight: Tensor | None = None
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        return self.output_layer.weight if weight is None else weight


class ValueHead(torch.nn.Module):
    """Head of a value model: hidden state times weight plus bias, in float32, equal on all tensor-parallel ranks.

    Sequence parallelism does not split its input (`DecoderModel.rows`): every rank computes all of the head and its
    gradient.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        placed = {"dtype": config.params_dtype, "device": config.platform.device}
        weight: Any = torch.nn.Parameter(torch.zeros(1, config.hidden_size, **placed))
        bias: Any = torch.nn.Parameter(torch.zeros(1, **placed))
        self.weight, self.bias = weight, bias

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows, hidden], any float type, to the value after each token: [rows], float32."""
        return F.linear(hidden.float(), self.weight.float(), self.bias.float())[:, 0]


def build_model(config: PolicyConfig, shape: ModelShape, platform: Platform | None = None) -> list[DecoderModel]:
    """A rank's shard of the model on the platform's device, weights uninitialised: one chunk, or several that
    microbatches pass in turn (virtual pipeline).

    The last chunk of the last stage, `chunk(token_ids, None, None, packed_seq_params=...)`, returns logits, [1, tokens,
    columns], where columns is padded vocabulary / TP; sums over the vocabulary have to leave the padding out. With
    `rows` it returns hidden states. Packed sequences (`PackedSequences`) are passed as one sequence, [1, tokens].

    Args:
        config: the model's configuration; `initialize_parallel` was called with its layout.
        shape: sizes of the model; that of a value model ends in a `ValueHead`, initially zero.
        platform: platform to build for; None: the one that this process has.

    Raises:
        RunError: this rank's device or packages have no FP8, and the configuration asks for it.
    """
    platform = platform or detect_platform()
    require_fp8(config.fp8, shape, platform)
    settings = build_transformer_config(config, shape, platform)
    number = config.parallel.virtual_pipeline
    return [_build_chunk(settings, config, shape, stage) for stage in (range(number) if number > 1 else (None,))]


def _build_chunk(
    settings: TransformerConfig, config: PolicyConfig, shape: ModelShape, vp_stage: int | None
) -> DecoderModel:
    """One chunk of the rank's shard; vp_stage None: the only chunk."""
    model = DecoderModel(
        config=settings,
        transformer_layer_spec=build_layer_specs(settings, config, shape, vp_stage),
        vocab_size=pad_vocab(shape, config.parallel.tensor),
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
        model.rotary_pos_emb.inv_freq = compute_scaled_rope(shape)[0].to(settings.platform.device)
    if uses_transformer_engine(shape, settings.platform, config.precision):
        model.rotary_pos_emb = RotaryTable(model.rotary_pos_emb)
    else:
        model.rotary_pos_emb = _rotary_at_positions(model.rotary_pos_emb, shape, settings.platform)
    if shape.embedding_scale is not None and model.pre_process:
        scale = float(torch.tensor(shape.embedding_scale, dtype=settings.params_dtype))  # rounded as the embeddings are
        model.embedding.register_forward_hook(lambda _module, _given, embedded: embedded * scale)
    if config.lora.rank:
        train_adapters_alone(model)
    if config.fp8.is_simulated:
        keep_outer_layers(model, shape.layers, config.fp8)
    if shape.value_head is not None and model.post_process:
        model.output_layer = ValueHead(settings)
    return model


def _rotary_at_positions(rotary: RotaryEmbedding, shape: ModelShape, platform: Platform) -> RotaryAtPositions:
    if shape.local_rope_theta is None:
        return RotaryAtPositions(rotary)
    local = RotaryEmbedding(
        shape.head_dim,
        rotary_percent=1.0,
        rotary_base=shape.local_rope_theta,
        use_cpu_initialization=platform.device.type == "cpu",
        cp_group=rotary.cp_group,
    )
    return GlobalAndLocalRotary(rotary, local)
