"""One rank of the value model: values of tokens and optimizer steps. Knows nothing of Ray."""

from __future__ import annotations

from torch import Tensor

from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.data.batch import TokenBatch, TokenFields
from megatron_grpo.models.hf_weights import load_hf_weights
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.policy.megatron_fields import transformer_fields
from megatron_grpo.policy.modeling.decoder import DecoderModel
from megatron_grpo.policy.modeling.value_head import build_value_model
from megatron_grpo.policy.rank.model_rank import Microbatches, ModelRank


class ValueRank(ModelRank):
    """A rank's share of the value model and of its optimizer.

    Args:
        config: how the value model is laid out and trained (`Config.value_model`).
        shape: sizes of the value model, from `as_value_model`.
        folder: the model's folder in Hugging Face format.
        decay_steps: optimizer steps of the learning-rate schedule.
    """

    routing_name = "value_moe"

    def __init__(self, config: PolicyConfig, shape: ModelShape, folder: str, *, decay_steps: int) -> None:
        chunks = build_value_model(
            shape,
            config.parallel,
            precision=config.precision,
            activation_checkpointing=config.activation_checkpointing,
            fields=transformer_fields(config),
        )
        load_hf_weights(chunks, shape, folder)
        super().__init__(chunks, shape, config, decay_steps)

    def values(self, batch: TokenBatch, microbatches: Microbatches) -> Tensor | None:
        """The value before every token of `batch` under the current weights.

        Returns:
            [sum(lengths)], float32, on the host, on the reporter; None elsewhere.
        """
        return self._forward_tokens(self.whole_chunks(), batch, microbatches)

    def _of_rows(self, model: DecoderModel, hidden: Tensor, tokens: TokenFields) -> tuple[Tensor, TokenFields]:
        """[rows, hidden] to values, [rows], float32: what is known before each token."""
        return model.output_layer(hidden), tokens
