"""A teacher's output for each token, and the policy's comparison with it, on ranks."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenFields, require_field
from megatron_grpo.models.hf_weights import read_head_rows
from megatron_grpo.trainer.messages import RankSettings, TeacherHead
from megatron_grpo.trainer.model.build import DecoderModel
from megatron_grpo_kernels.divergence import Divergence, TeacherStates, TeacherTokens, linear_divergence
from megatron_grpo_kernels.top_tokens import find_top_tokens


def compute_teacher_output(settings: RankSettings, model: DecoderModel, hidden: Tensor) -> Tensor:
    """Compute a teacher's output from the hidden states of its rows (`TokenFields.teacher_outputs`)."""
    assert settings.teacher is not None, "a teacher's ranks know what they compute"
    if settings.teacher.top_k is None:
        return hidden
    top_tokens = find_top_tokens(
        hidden,
        model.head_weight,
        settings.teacher.top_k,
        **_locate_head(model, settings.teacher.vocab),
        scale=settings.logit_scale,
        cap=settings.shape.logit_cap,
        chunk_tokens=settings.config.logprob_chunk_size,
    )
    return pack_top_tokens(*top_tokens)


def pack_top_tokens(token_ids: Tensor, logprobs: Tensor, tail: Tensor) -> Tensor:
    """Pack likeliest tokens as one field: [tokens, 2 k + 1], float32."""
    # float32 has every whole number up to 2**24, and vocabularies are smaller.
    return torch.cat([token_ids.float(), logprobs, tail[:, None]], dim=1)


def unpack_top_tokens(packed: Tensor, vocab: int) -> TeacherTokens:
    """Undo `pack_top_tokens`; all `vocab` tokens have no tail."""
    k = packed.shape[1] // 2
    return TeacherTokens(packed[:, :k].long(), packed[:, k : 2 * k], packed[:, -1] if k < vocab else None)


def _locate_head(model: DecoderModel, vocab: int) -> dict[str, Any]:
    """Locate this rank's rows: start, columns and group for the kernels."""
    group, rows = parallel_state.get_tensor_model_parallel_group(), len(model.head_weight)
    start = group.rank() * rows
    return {
        "start": start,
        "columns": max(0, min(rows, vocab - start)),
        "group": group if group.size() > 1 else None,
    }


class TeacherHeads:
    """Comparison of the policy with its teachers, on its last stage.

    For whole distributions the rank holds the rows of the teachers' heads that it has of its own, so that both models'
    logits are made from hidden states, chunk by chunk.
    """

    def __init__(self, settings: RankSettings, model: DecoderModel) -> None:
        assert settings.distillation is not None
        self._settings, self._distillation = settings, settings.distillation
        weight = model.head_weight
        position = _locate_head(model, self._distillation.vocab)
        self.weights = [
            _read_head(head, position["start"], position["columns"], weight) for head in self._distillation.heads
        ]

    def compare(self, model: DecoderModel, hidden: Tensor, tokens: TokenFields, cap: float | None) -> Tensor:
        """Compute the policy's divergence from the teacher of each row: [rows], float32, with gradient."""
        distillation, outputs = self._distillation, require_field(tokens.teacher_outputs)
        arguments: dict[str, Any] = {
            **_locate_head(model, distillation.vocab),
            "scale": self._settings.logit_scale,
            "cap": cap,
            "chunk_tokens": self._settings.config.logprob_chunk_size,
        }
        divergence = Divergence(distillation.kl_type, distillation.mixed_kl_weight)
        is_own = distillation.self_output is not None and distillation.self_output.top_k is None
        if not distillation.heads and not is_own:
            teacher = unpack_top_tokens(outputs, distillation.vocab)
            return linear_divergence(hidden, model.head_weight, teacher, divergence, **arguments)
        states = outputs.view(torch.bfloat16) if outputs.dtype == torch.int16 else outputs
        if is_own:  # one optimizer step: the head still has the weights under which the states were computed
            teacher_states = TeacherStates(states.to(hidden.dtype), model.head_weight.detach(), cap)
            return linear_divergence(hidden, model.head_weight, teacher_states, divergence, **arguments)
        values = hidden.new_zeros(len(hidden), dtype=torch.float32)
        for number, (head, weight) in enumerate(zip(distillation.heads, self.weights, strict=True)):
            rows = torch.arange(len(hidden), device=hidden.device)
            if len(self.weights) > 1:  # equal on all ranks that share the vocabulary
                rows = (require_field(tokens.teacher) == number).nonzero()[:, 0]
            theirs = TeacherStates(states[rows, : head.shape.hidden].to(weight.dtype), weight, head.shape.logit_cap)
            part = linear_divergence(hidden[rows], model.head_weight, theirs, divergence, **arguments)
            values = values.index_add(0, rows, part)
        return values


@torch.no_grad()
def _read_head(head: TeacherHead, start: int, columns: int, like: Tensor) -> Tensor:
    # As many rows as the policy's head has here, in its dtype. A dry run has no folder.
    weight = like.new_zeros(len(like), head.shape.hidden)
    if columns and head.folder:
        weight[:columns].copy_(read_head_rows(head.shape, head.folder, start, start + columns))
    return weight
