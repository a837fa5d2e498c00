"""One rank of the policy: log-probabilities, optimizer steps, and the frozen reference policy beside it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_grpo.config.schema import PolicyConfig, ReferenceConfig
from megatron_grpo.data.batch import TokenBatch, TokenFields, given
from megatron_grpo.models.hf_weights import load_hf_weights
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.platform.device import current_platform
from megatron_grpo.policy.modeling.build import build_model
from megatron_grpo.policy.modeling.decoder import DecoderModel, row_logprobs
from megatron_grpo.policy.rank.model_rank import Microbatches, ModelRank


class PolicyRank(ModelRank):
    """A rank's share of the policy, of its optimizer and, when asked for, of the frozen reference policy.

    Args:
        config: the policy's configuration; torch.distributed and Megatron's groups are set up for config.parallel.
        shape: sizes of the model in config.model.path.
        folder: the model's folder in Hugging Face format.
        reference: how to hold the reference policy; None: there is none.
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
        super().__init__(self._build(folder, config), shape, config, decay_steps)
        self._offload_reference = reference is not None and reference.offload
        if reference is not None:
            self.reference = [chunk.requires_grad_(False) for chunk in self._build(folder, config)]
            if self._offload_reference:
                self._place_reference("cpu")

    def _build(self, folder: str, config: PolicyConfig) -> list[DecoderModel]:
        chunks = build_model(
            self.shape,
            config.parallel,
            precision=config.precision,
            activation_checkpointing=config.activation_checkpointing,
        )
        load_hf_weights(chunks, self.shape, folder)
        return chunks

    def logprobs(self, batch: TokenBatch, microbatches: Microbatches) -> Tensor | None:
        """Log-probability of every token of `batch` under the current weights.

        Returns:
            [sum(lengths)], float32, on the host, on the reporter; None elsewhere.
        """
        return self._forward_tokens(self.chunks, batch, microbatches)

    def reference_logprobs(self, batch: TokenBatch, microbatches: Microbatches) -> Tensor | None:
        """Log-probability of every token of `batch` under the frozen reference policy.

        Returns:
            [sum(lengths)], float32, on the host, on the reporter; None elsewhere.
        """
        assert self.reference is not None, "the reference policy was not loaded"
        if self._offload_reference:
            self._place_reference(current_platform().device)
        logprobs = self._forward_tokens(self.reference, batch, microbatches)
        if self._offload_reference:
            self._place_reference("cpu")
        return logprobs

    def _place_reference(self, device: torch.device | str) -> None:
        for chunk in self.reference or ():
            chunk.to(device)

    @torch.no_grad()
    def sync_reference(self, alpha: float) -> None:
        """reference = alpha * policy + (1 - alpha) * reference, in float32 (TR-DPO, Gorbatovski et al. 2024)."""
        assert self.reference is not None, "the reference policy was not loaded"
        # In float32, rounded once at the end: in bfloat16 the difference and its product would be rounded as well.
        for reference, chunk in zip(self.reference, self.chunks, strict=True):
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
