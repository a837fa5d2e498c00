"""The trainer's log-probabilities of recorded tokens, computed again by a rank in this process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed import HashStore

from megatron_grpo.config.schema import Config, LoraConfig, ParallelConfig
from megatron_grpo.data.batch import TokenBatch, TokenFields, given
from megatron_grpo.data.packing import OF_TOKENS, planner
from megatron_grpo.proof.hidden_states import assembled, captured
from megatron_grpo.proof.oracle import Tokens
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.parallel import destroy_parallel, initialize_parallel
from megatron_grpo.trainer.rank import PolicyRank
from megatron_grpo.weights.families import shape_of_folder


def trainer_again(
    config: Config, folder: Path, sequences: Sequence[Tokens], *, hidden: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute sequences by the trainer's own code, on one rank, in the precision of the run.

    Args:
        config: the run's configuration; its layout is replaced by one rank.
        folder: the weights in Hugging Face format, adapters merged.
        sequences: the tokens.
        hidden: keep hidden states.

    Returns:
        Log-probabilities of the chosen tokens, [chosen tokens of all sequences], float32; and hidden states by point
        (`proof.hidden_states`), [tokens of all sequences, width], empty without `hidden`.
    """
    policy = replace(config.policy, parallel=ParallelConfig(), lora=LoraConfig())
    policy = replace(policy, optimizer=replace(policy.optimizer, distributed=False))
    lengths = [len(one.ids) for one in sequences]
    batch = TokenBatch(lengths, TokenFields(token_ids=torch.cat([one.ids for one in sequences]).int()))
    initialize_parallel(policy.parallel, rank=0, store=HashStore(), seed=0, timeout_s=policy.timeout_s)
    try:
        settings = RankSettings(
            config=policy,
            shape=shape_of_folder(folder),
            folder=str(folder),
            decay_steps=1,
            temperature=config.generation.temperature,
        )
        (microbatches,) = planner(policy, OF_TOKENS).microbatches([np.array(lengths)])
        rank, everywhere = PolicyRank(settings), np.arange(sum(lengths))
        with ExitStack() as stack:
            pieces = stack.enter_context(captured(rank, batch, microbatches, everywhere)) if hidden else []
            found = given(rank.logprobs(batch, microbatches))
    finally:
        destroy_parallel()
    logprobs = [part[one.places] for part, one in zip(found.split(lengths), sequences, strict=True)]
    return torch.cat(logprobs), assembled(pieces, len(everywhere))
