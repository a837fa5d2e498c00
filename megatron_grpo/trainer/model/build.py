"""Builds a rank's shard of the policy or the value model: a decoder whose head is applied to chosen tokens only."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_grpo.cluster.process_log import AdviceOnce
from megatron_grpo.config.schema import PolicyConfig, ReferenceConfig
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.vision_shape import TrainedTower
from megatron_grpo.models.weight_map import pad_vocab
from megatron_grpo.platform.device import Platform, detect_platform
from megatron_grpo.trainer.model.attention import RotaryAtPositions, RotaryTable, compute_scaled_rope
from megatron_grpo.trainer.model.experts import ExpertRouter, mark_experts
from megatron_grpo.trainer.model.image_layer import ImageLayer
from megatron_grpo.trainer.model.layer_spec import build_layer_specs, uses_transformer_engine
from megatron_grpo.trainer.model.lora import train_adapters_alone
from megatron_grpo.trainer.model.megatron_config import build_transformer_config, require_fp8
from megatron_grpo.trainer.model.packed_sequences import PackedSequences
from megatron_grpo.trainer.model.rounding import keep_outer_layers
from megatron_grpo.trainer.model.vision_module import build_vision_module


class DecoderModel(GPTModel):
    """Megatron-Core's model; its head is applied to chosen tokens only.

    The head is the largest matrix of a small model, and its output the largest tensor of any model. So prompts and
    padding never reach it, and logits of all tokens are never held.
    """

    def forward(self, *arguments: Any, rows: Tensor | None = None, **keywords: Any) -> Tensor:
        """Compute logits of all tokens or, of chosen ones, hidden states.

        `rows`: [rows], int64, indices of the chosen tokens; only the last stage reads them. On the first stage features
        of images are in place of the embeddings of their tokens.
        """
        select, packed = None if rows is None else self._select_rows, keywords.get("packed_seq_params")
        if self.pre_process and isinstance(packed, PackedSequences) and packed.images is not None:
            embedded, images = self.embedding(input_ids=arguments[0], position_ids=None), packed.images
            keywords["decoder_input"] = embedded.index_copy(0, images.slots, images.features[:, :1].type_as(embedded))
        output: Tensor = super().forward(*arguments, output_processor=select, output_processor_context=rows, **keywords)
        return output

    def _select_rows(self, hidden_states: Tensor, context: Tensor, **_: Any) -> Tensor:
        assert hidden_states.shape[1] == 1, "rows index packed sequences"
        if self.config.sequence_parallel:
            # Every rank gets the complete gradient of the rows from the head, so backward only slices out its tokens.
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        return hidden_states[context].transpose(0, 1)

    vision_tower: Any  # one that is trained, in the first chunk of the first stage; None: there is none here

    @property
    def takes_images(self) -> bool:
        """Whether a layer here takes features of images, or the embedding."""
        return self.pre_process or any(isinstance(module, ImageLayer) for module in self.modules())

    @property
    def head_weight(self) -> Tensor:
        """A row for each vocabulary entry of this rank, padding included."""
        is_tied = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if is_tied else self.output_layer.weight
        return weight


class ValueHead(torch.nn.Module):
    """Linear head of a value model; every tensor-parallel rank computes all of it."""

    def __init__(self, config: TransformerConfig, *, has_bias: bool = True) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": config.params_dtype, "device": config.platform.device}
        weight: Any = torch.nn.Parameter(torch.zeros(1, config.hidden_size, **options))
        weight.is_embedding_or_output_parameter = True  # Muon leaves such parameters to AdamW
        self.weight = weight
        self.bias = torch.nn.Parameter(torch.zeros(1, **options)) if has_bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute values in float32: [rows, hidden] to [rows]."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(hidden.float(), self.weight.float(), bias)[:, 0]


def build_model(config: PolicyConfig, shape: ModelShape, platform: Platform | None = None) -> list[DecoderModel]:
    """Build a rank's shard of the model, weights uninitialised.

    `initialize_parallel` comes first, with the layout of `config`. The shard is one chunk, or several that microbatches
    pass in turn (virtual pipeline), each called as `chunk(token_ids, None, None, packed_seq_params=...)`: token ids are
    [1, tokens], the packed sequences end to end. The last chunk of the last stage returns logits, [1, tokens, columns];
    columns is padded vocabulary / TP, and sums over the vocabulary have to leave the padding out. With `rows` it
    returns hidden states, [1, rows, hidden]. A value model ends in a `ValueHead`, initially zero. Raises a RunError if
    the rank lacks the FP8 that the configuration asks for.
    """
    _log_advice_once()
    platform = platform or detect_platform()
    require_fp8(config.fp8, shape, platform)
    settings = build_transformer_config(config, shape, platform)
    chunks = config.parallel.virtual_pipeline
    return [_build_chunk(settings, config, shape, stage) for stage in (range(chunks) if chunks > 1 else (None,))]


@cache
def _log_advice_once() -> None:
    # Megatron-Core warns of its model class and its layout of buffers in every chunk, of its writer in every process.
    for name in (
        "models.gpt.gpt_model",
        "distributed.distributed_data_parallel",
        "dist_checkpointing.strategies.torch",
        "dist_checkpointing.strategies.common",
    ):
        logging.getLogger(f"megatron.core.{name}").addFilter(AdviceOnce("deprecated", "full_param_layout not provided"))


def make_reference_config(config: PolicyConfig, reference: ReferenceConfig) -> PolicyConfig:
    """Make the configuration of the frozen reference from the policy's."""
    if not reference.offload or not config.fp8.parameters:
        return config
    # Moving an FP8 parameter to host memory would move its outer tensor alone. In bfloat16 products stay the same,
    # since the reference holds the values of the policy's FP8 parameters.
    return replace(config, fp8=replace(config.fp8, parameters=False))


@torch.no_grad()  # else Transformer Engine keeps copies of FP8 parameters as they were before rounding
def build_reference(
    chunks: Sequence[DecoderModel],
    config: PolicyConfig,
    reference: ReferenceConfig,
    shape: ModelShape,
    platform: Platform,
) -> list[DecoderModel]:
    """Build the frozen reference: a copy of the policy's shard."""
    config = make_reference_config(config, reference)
    copies = [chunk.requires_grad_(False) for chunk in build_model(config, shape, platform)]
    # Copied from the policy, which is faster than reading from disk again.
    for chunk, copy in zip(chunks, copies, strict=True):
        targets = (*copy.parameters(), *copy.buffers())
        for source, target in zip((*chunk.parameters(), *chunk.buffers()), targets, strict=True):
            target.copy_(source)
    return copies


def _add_tower(model: DecoderModel, trained: TrainedTower | None) -> None:
    """Add a vision tower that is trained to the first chunk."""
    model.vision_tower = None
    if trained is None:
        return
    if not model.pre_process:
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        assert first or not model.takes_images, "features that another stage takes have no way back to the tower"
        return
    module = build_vision_module(Path(trained.folder), model.config.params_dtype).to(model.config.platform.device)
    for parameter in module.parameters():
        # Under sequence parallelism a rank has the gradients of the features of its own tokens alone.
        parameter.sequence_parallel = model.config.sequence_parallel
    model.vision_tower = module


def _find_rotated_share(shape: ModelShape) -> float:
    # Megatron-Core rounds head_dim * share down, which must not lose a feature to rounding.
    is_partial = shape.rotated_dim not in (None, shape.head_dim)
    return ((shape.rotated_dim or 0) + 0.5) / shape.head_dim if is_partial else 1.0


def _build_chunk(
    settings: TransformerConfig, config: PolicyConfig, shape: ModelShape, vp_stage: int | None
) -> DecoderModel:
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
        rotary_percent=_find_rotated_share(shape),
        vp_stage=vp_stage,
    )
    mark_experts(model)
    for name, parameter in model.named_parameters():
        if name.endswith(".softmax_offset"):  # Transformer Engine makes it in float32, without marks
            parameter.data = parameter.to(settings.params_dtype)
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    if config.moe.freeze_router:
        for router in (module for module in model.modules() if isinstance(module, ExpertRouter)):
            router.requires_grad_(False)
    if shape.rope_scaling is not None:
        model.rotary_pos_emb.inv_freq = compute_scaled_rope(shape)[0].to(settings.platform.device)
    if uses_transformer_engine(shape, settings.platform, config.precision) and shape.latent is None:
        model.rotary_pos_emb = RotaryTable(model.rotary_pos_emb)
    else:
        rotaries = [model.rotary_pos_emb]
        if shape.local_rope_theta is not None:
            local = RotaryEmbedding(
                shape.head_dim,
                rotary_percent=1.0,
                rotary_base=shape.local_rope_theta,
                use_cpu_initialization=settings.platform.device.type == "cpu",
                cp_group=model.rotary_pos_emb.cp_group,
            )
            rotaries.append(local)
        axes = () if shape.vision is None else shape.vision.rotary_axes
        model.rotary_pos_emb = RotaryAtPositions(*rotaries, axes=axes)
    _add_tower(model, None if shape.vision is None else shape.vision.trained)
    if shape.embedding_scale is not None and model.pre_process:
        scale = float(torch.tensor(shape.embedding_scale, dtype=settings.params_dtype))  # rounded as the embeddings are
        model.embedding.register_forward_hook(lambda _module, _inputs, embedded: embedded * scale)
    if config.lora.rank:
        train_adapters_alone(model)
    if config.fp8.is_simulated:
        keep_outer_layers(model, shape.layers, config.fp8)
    if shape.head.is_scalar and model.post_process:
        model.output_layer = ValueHead(settings, has_bias=shape.head.has_bias)
    elsewhere = [
        name for name, weight in model.named_parameters() if weight.device.type != settings.platform.device.type
    ]
    assert not elsewhere, f"an optimizer would copy parameters that are not on the device: {elsewhere}"
    return model
