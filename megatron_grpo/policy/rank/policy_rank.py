"""One rank of the policy: log-probabilities, optimizer steps, and the frozen reference policy beside it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from megatron_grpo.config.schema import PolicyConfig, ReferenceConfig
from megatron_grpo.data.batch import TokenBatch, TokenFields, given
from megatron_grpo.models.hf_weights import load_hf_weights
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.policy.megatron_fields import transformer_fields
from megatron_grpo.policy.modeling.adapter import adapters_off
from megatron_grpo.policy.modeling.build import build_model
from megatron_grpo.policy.modeling.decoder import DecoderModel, row_logprobs
from megatron_grpo.policy.rank.model_rank import Microbatches, ModelRank
from megatron_grpo.policy.rank.offload import OffloadedWeights


class PolicyRank(ModelRank):
    """A rank's share of the policy, of its optimizer and, when asked for, of the frozen reference policy.

    Args:
        config: the policy's configuration; torch.distributed and Megatron's groups are set up for config.parallel.
        shape: sizes of the model in config.model.path.
        folder: the model's folder in Hugging Face format.
        reference: how to hold the reference policy; None: there is none. With adapters it is the policy without them,
            and nothing is held beside it.
        temperature: sampling temperature, which log-probabilities are taken under.
        decay_steps: optimizer steps of the learning-rate schedule.
    """

    def __init__(
        self,
        config: PolicyConfig,
        shape: ModelShape,
        folder: str,
        *,
        reference: ReferenceConfig | None,
        temperature: float,
        decay_steps: int,
    ) -> None:
        self.shape, self.temperature = shape, temperature
        self.replays_routing = config.moe.replay_routing
        chunks = self._build(config)
        load_hf_weights(chunks, shape, folder)
        self._has_reference = reference is not None
        self._offloaded: OffloadedWeights | None = None
        if reference is not None and not config.lora.rank:  # else it is the policy without its adapters
            self.reference = [chunk.requires_grad_(False) for chunk in self._build(config)]
            _copy_weights(chunks, self.reference)  # nothing is read from disk a second time
            if reference.offload:
                self._offloaded = OffloadedWeights(self.reference)
        super().__init__(chunks, shape, config, decay_steps)

    def _build(self, config: PolicyConfig) -> list[DecoderModel]:
        return build_model(
            self.shape,
            config.parallel,
            precision=config.precision,
            activation_checkpointing=config.activation_checkpointing,
            fields=transformer_fields(config),
            lora=config.lora,
            fp8=config.fp8,
            quantization=config.quantization,
        )

    def logprobs(self, batch: TokenBatch, microbatches: Microbatches) -> Tensor | None:
        """Log-probability of every token of `batch` under the current weights.

        Returns:
            [sum(lengths)], float32, on the host, on the reporter; None elsewhere.
        """
        return self._forward_tokens(self.whole_chunks(), batch, microbatches)

    def reference_logprobs(self, batch: TokenBatch, microbatches: Microbatches) -> Tensor | None:
        """Log-probability of every token of `batch` under the frozen reference policy.

        Returns:
            [sum(lengths)], float32, on the host, on the reporter; None elsewhere.
        """
        assert self._has_reference, "the reference policy was not loaded"
        if self.reference is None:
            with adapters_off(self.chunks):
                return self._forward_tokens(self.whole_chunks(), batch, microbatches)
        with nullcontext() if self._offloaded is None else self._offloaded.on_device():
            return self._forward_tokens(self.reference, batch, microbatches)

    @torch.no_grad()
    def sync_reference(self, alpha: float) -> None:
        """reference = alpha * policy + (1 - alpha) * reference, in float32 (TR-DPO, Gorbatovski et al. 2024)."""
        assert self.reference is not None, "the reference policy was not loaded"
        # In float32, rounded once at the end: in bfloat16 the difference and its product would be rounded as well.
        for reference, chunk in zip(self.reference, self.whole_chunks(), strict=True):
            for moved, weight in zip(reference.parameters(), chunk.parameters(), strict=True):
                moved.copy_(torch.lerp(moved.float(), weight.to(moved.device).float(), alpha))
        self.reference_moved = True

    def _of_rows(self, model: DecoderModel, hidden: Tensor, tokens: TokenFields) -> tuple[Tensor, TokenFields]:
        """[rows, hidden] to log-probabilities, [rows], float32, and the entries with the entropy among them."""
        logprobs, entropy = row_logprobs(
            model,
            self.shape.vocab,
            hidden,
            given(tokens.token_ids),
            temperature=self.temperature,
            kernel=self.config.logprob_kernel,
            chunk_tokens=self.config.logprob_chunk_size,
        )
        return logprobs, replace(tokens, entropy=entropy)


@torch.no_grad()
def _copy_weights(source: list[DecoderModel], target: list[DecoderModel]) -> None:
    """Give the chunks of a model the parameters and buffers of another of the same layout."""
    for one, other in zip(source, target, strict=True):
        for tensors, others in ((one.parameters(), other.parameters()), (one.buffers(), other.buffers())):
            for tensor, copied in zip(tensors, others, strict=True):
                copied.copy_(tensor)
