"""The policy with the fused kernel as its head, in Triton's interpreter, against transformers."""

from __future__ import annotations

import pytest
from torch import Tensor
from torch.distributed import HashStore

from megatron_grpo.config.schema import ParallelConfig
from megatron_grpo.trainer.parallel import destroy_parallel, initialize_parallel
from tests.parity.policy_training import (
    expect_gradients_of_transformers,
    gradients_on_rank,
    make_engine,
    train_arguments,
)
from tests.parity.ranks import Layout, run_on_ranks
from tests.support.interpreter import interpreted
from tests.support.tiny_models import TinyModel


def gradients_with_the_fused_head(models: list[TinyModel]) -> list[tuple[dict[str, Tensor], float]]:
    """As `gradients_on_rank`, on a rank of this process."""
    initialize_parallel(ParallelConfig(), rank=0, store=HashStore(), seed=1, timeout_s=60)
    try:
        return gradients_on_rank(Layout(), models, settings={"logprob_kernel": "fused"})
    finally:
        destroy_parallel()


@pytest.mark.slow  # in Triton's interpreter; tests/unit/kernels compare the kernel with every `make test`
def test_gradients_equal_transformers(tiny_models: dict[str, TinyModel]) -> None:
    models = [tiny_models["qwen3_tied"]]
    expect_gradients_of_transformers([interpreted(gradients_with_the_fused_head, models)], models, tolerance=1e-4)


def ask_the_fused_head(layout: Layout, model: TinyModel) -> None:
    """For log-probabilities of a batch."""
    engine = make_engine(layout, model, distributed=False, logprob_kernel="fused")
    share, microbatches, *_ = train_arguments(layout)
    engine.compute_logprobs(share, microbatches)


def test_the_key_reaches_the_kernel(tiny_models: dict[str, TinyModel]) -> None:
    """Which says so, as no rank of this layout interprets Triton."""
    with pytest.raises(RuntimeError, match=r"use policy\.logprob_kernel=chunked"):
        run_on_ranks(Layout(), ask_the_fused_head, tiny_models["qwen3_tied"])
