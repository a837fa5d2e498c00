"""Building this rank's part of the Megatron-Core model from a model's sizes."""

from __future__ import annotations

import os
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_grpo.config.schema import Fp8Config, LoraConfig, ParallelConfig
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_map import padded_vocab
from megatron_grpo.platform.device import current_platform
from megatron_grpo.policy.modeling.adapter import train_adapters_alone
from megatron_grpo.policy.modeling.decoder import DecoderModel
from megatron_grpo.policy.modeling.fp8 import fp8_settings, require_fp8
from megatron_grpo.policy.modeling.fp8_rounding import keep_outer_layers
from megatron_grpo.policy.modeling.layer_spec import Additions, layer_spec, uses_transformer_engine
from megatron_grpo.policy.modeling.rotary import RotaryAtPositions


def build_model(
    shape: ModelShape,
    parallel: ParallelConfig,
    *,
    precision: Literal["float32", "bfloat16"],
    activation_checkpointing: bool = False,
    lora: LoraConfig | None = None,
    fp8: Fp8Config | None = None,
) -> list[DecoderModel]:
    """A rank's shard of the model on the platform's device, its weights not yet set: a chunk, or several that the
    microbatches pass in turn (virtual pipeline).

    The last chunk of the last stage, `chunk(token_ids, position_ids, None)`, gives logits [sequences, length, columns],
    columns being padded vocabulary / TP; those past the vocabulary have to be left out of every sum over it. Packed
    sequences (`PackedSequences`) are given as one sequence, [1, tokens]; with `rows` it ends in hidden states.

    Args:
        shape: sizes of the model.
        parallel: the layout that `initialize_parallel` was called with.
        precision: dtype of weights and activations.
        activation_checkpointing: recompute every layer in the backward pass.
        lora: adapters, which alone are trained then; None, or a rank of 0: none.
        fp8: whether the layers' products are in FP8; None: they are not.

    Raises:
        RunError: FP8 is asked for, and this rank's device or packages do not have it.
    """
    additions = Additions(lora or LoraConfig(), fp8 or Fp8Config())
    require_fp8(additions.fp8)
    config = transformer_config(shape, parallel, precision, activation_checkpointing, additions.fp8)
    number = parallel.virtual_pipeline
    return [_build_chunk(config, shape, parallel, chunk if number > 1 else None, additions) for chunk in range(number)]


def _build_chunk(
    config: TransformerConfig,
    shape: ModelShape,
    parallel: ParallelConfig,
    vp_stage: int | None,
    additions: Additions,
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
    if shape.rope_scaling is not None:
        model.rotary_pos_emb.inv_freq = scaled_rope_frequencies(shape).to(current_platform().device)
    if not uses_transformer_engine():
        model.rotary_pos_emb = RotaryAtPositions(model.rotary_pos_emb)
    if additions.lora.rank:
        train_adapters_alone(model)
    if additions.fp8.simulated:
        keep_outer_layers(model, shape.layers, additions.fp8)
    return model


def transformer_config(
    shape: ModelShape,
    parallel: ParallelConfig,
    precision: Literal["float32", "bfloat16"],
    activation_checkpointing: bool,
    fp8: Fp8Config,
) -> TransformerConfig:
    """Megatron-Core's settings for a dense decoder without dropout."""
    dtype = getattr(torch, precision)
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn_hidden,
        num_attention_heads=shape.attention_heads,
        num_query_groups=shape.key_value_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        num_layers_in_first_pipeline_stage=parallel.first_stage_layers,
        num_layers_in_last_pipeline_stage=parallel.last_stage_layers,
        account_for_embedding_in_pipeline_split=parallel.count_embedding,
        account_for_loss_in_pipeline_split=parallel.count_loss,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        sequence_parallel=parallel.sequence and parallel.tensor > 1,
        bf16=precision == "bfloat16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        attention_softmax_in_fp32=True,
        # Initialisation also marks which parameters are split over TP (without the marks, gradient norms leave the
        # other ranks' shards out), so it has to run, but it need not draw values that load_hf_weights overwrites.
        perform_initialization=True,
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        embedding_init_method=_leave_as_is,
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        # The default dispatcher refuses variable_seq_lengths, even of a model without experts.
        moe_token_dispatcher_type="alltoall",
        recompute_granularity="full" if activation_checkpointing else None,
        recompute_method="uniform" if activation_checkpointing else None,
        recompute_num_layers=1 if activation_checkpointing else None,
        **fp8_settings(fp8),
        **_platform_settings(interleaved=parallel.virtual_pipeline > 1),
    )


def _leave_as_is(weight: Tensor) -> None:
    """Initialisation of weights that are about to be loaded: does nothing to a weight of any shape [...] and dtype."""


def _platform_settings(*, interleaved: bool) -> dict[str, Any]:
    """Fused kernels where there is a GPU for them, and results that repeat."""
    cuda = current_platform().name == "cuda"
    engine = uses_transformer_engine()
    if cuda:
        # Read by Transformer Engine, which refuses deterministic_mode without it.
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    return {
        # Deterministic anyway on CPU, where the flag would only choose a slower embedding.
        "deterministic_mode": cuda,
        "apply_rope_fusion": engine,
        "bias_activation_fusion": cuda,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        # Not used; the default value warns that it is deprecated.
        "cuda_graph_scope": [],
        "persist_layer_norm": False,
        # Needs a CUDA extension from apex.
        "gradient_accumulation_fusion": False,
        # gloo has no batches of sends and receives; and of two interleaved stages, where both directions have one peer,
        # a batch mixes them up.
        "batch_p2p_comm": cuda and not interleaved,
        "batch_p2p_sync": cuda,
    }


def scaled_rope_frequencies(shape: ModelShape) -> Tensor:
    """Inverse frequencies of scaled rotary embeddings, computed by transformers so that they are exactly its own.

    Returns:
        [head_dim / 2], float32.
    """
    # Imported here because it takes seconds and only models with scaled frequencies need it.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert shape.rope_scaling is not None
    scaling = {**shape.rope_scaling, "rope_theta": shape.rope_theta}
    rope_type = scaling.get("rope_type") or scaling.get("type")
    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_attention_heads=shape.attention_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        rope_parameters={**scaling, "rope_type": rope_type},
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    return frequencies.float()
