"""Log-probabilities with hidden states: of a rank of a layout, and of recorded sequences in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import HashStore

from megatron_grpo.batch.packing import TOKEN_COST, make_packer
from megatron_grpo.batch.token_batch import TokenBatch, TokenFields, require_field
from megatron_grpo.config.schema import Config, LoraConfig, ParallelConfig
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.trainer.hidden_states import Piece, capture_states
from megatron_grpo.trainer.messages import RankSettings, make_training_filter
from megatron_grpo.trainer.parallel import destroy_parallel, initialize_parallel
from megatron_grpo.trainer.rank import Microbatches, PolicyRank
from megatron_grpo.verification.hidden_pieces import assemble_pieces

if TYPE_CHECKING:
    from megatron_grpo.verification.doctor.law import Tokens


def compute_logprobs_and_states(
    rank: PolicyRank, batch: TokenBatch, microbatches: Microbatches, token_indices: NDArray[np.int64]
) -> tuple[Tensor | None, list[Piece]]:
    """Compute log-probabilities and keep hidden states on the host.

    Collective over the ranks of a layout. Each rank returns its pieces (`capture_states`, whose arguments these are);
    `assemble_pieces` makes whole tensors of the pieces of all ranks.

    Returns:
        The log-probabilities of the rank's tokens, and the pieces.
    """
    pieces: list[Piece] = []
    with capture_states(
        rank, batch, microbatches, token_indices, lambda piece: pieces.append(replace(piece, values=piece.values.cpu()))
    ):
        return rank.compute_logprobs(batch, microbatches), pieces


def run_trainer_again(
    config: Config, folder: Path, sequences: Sequence[Tokens], *, hidden: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute recorded sequences by the trainer's code, in this process.

    Args:
        config: the run's configuration; its layout is replaced by one rank.
        folder: the weights in Hugging Face format, adapters merged.
        sequences: the tokens.
        hidden: keep hidden states.

    Returns:
        Log-probabilities of the chosen tokens, [chosen tokens of all sequences], float32; and hidden states by point,
        [tokens of all sequences, width], empty without `hidden`.
    """
    # The folder has adapters merged, and nothing is trained here.
    policy = replace(config.policy, parallel=ParallelConfig(), lora=LoraConfig())
    policy = replace(policy, optimizer=replace(policy.optimizer, distributed=False))
    lengths = [len(sequence.ids) for sequence in sequences]
    batch = TokenBatch(lengths, TokenFields(token_ids=torch.cat([sequence.ids for sequence in sequences]).int()))
    initialize_parallel(policy.parallel, rank=0, store=HashStore(), seed=0, timeout_s=policy.timeout_s)
    try:
        settings = RankSettings(
            config=policy,
            shape=read_model_shape(folder),
            folder=str(folder),
            decay_steps=1,
            temperature=config.generation.temperature,
            token_filter=make_training_filter(config.generation),
        )
        (microbatches,) = make_packer(policy, TOKEN_COST).make_microbatches([np.array(lengths)])
        rank, token_indices = PolicyRank(settings), np.arange(sum(lengths))
        if hidden:
            logprobs_of_tokens, pieces = compute_logprobs_and_states(rank, batch, microbatches, token_indices)
        else:
            logprobs_of_tokens, pieces = rank.compute_logprobs(batch, microbatches), []
    finally:
        destroy_parallel()
    logprobs = [
        part[sequence.chosen]
        for part, sequence in zip(require_field(logprobs_of_tokens).split(lengths), sequences, strict=True)
    ]
    return torch.cat(logprobs), assemble_pieces(pieces, len(token_indices))
