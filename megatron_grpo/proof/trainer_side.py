"""The trainer's log-probabilities of recorded tokens, computed again by a rank in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed import HashStore

from megatron_grpo.config.schema import Config, LoraConfig, ParallelConfig
from megatron_grpo.data.batch import TokenBatch, TokenFields, given
from megatron_grpo.data.packing import OF_TOKENS, planner
from megatron_grpo.proof.oracle import Tokens
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.parallel import destroy_parallel, initialize_parallel
from megatron_grpo.trainer.rank import PolicyRank
from megatron_grpo.weights.families import shape_of_folder


def trainer_logprobs(
    config: Config, folder: Path, sequences: Sequence[Tokens], precision: Literal["float32", "bfloat16"]
) -> Tensor:
    """Log-probabilities of the chosen tokens by the trainer's own code, on one rank.

    Args:
        config: the run's configuration; its layout is replaced by one rank.
        folder: the weights in Hugging Face format, adapters merged.
        sequences: the tokens.
        precision: type of weights and activations.

    Returns:
        [chosen tokens of all sequences], float32.
    """
    policy = replace(config.policy, parallel=ParallelConfig(), lora=LoraConfig(), precision=precision)
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
        found = given(PolicyRank(settings).logprobs(batch, microbatches))
    finally:
        destroy_parallel()
    return torch.cat([part[one.places] for part, one in zip(found.split(lengths), sequences, strict=True)])
