"""The policy on a GPU against transformers on the CPU: log-probabilities and gradients of every family."""

from __future__ import annotations

import pytest
import torch

from megatron_grpo.platform.device import current_platform
from tests.parity.policy_training import expect_gradients_of_transformers, gradients_on_rank
from tests.parity.ranks import Layout
from tests.parity.test_logprobs import logprobs_on_rank, microbatches
from tests.support.tiny_models import TinyModel

pytestmark = pytest.mark.usefixtures("one_rank")


def test_the_platform_is_cuda() -> None:
    assert current_platform().name == "cuda"


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 2e-3), ("bfloat16", 0.5)])
def test_logprobs_equal_transformers(precision: str, tolerance: float, tiny_models: dict[str, TinyModel]) -> None:
    folders = [model.path for model in tiny_models.values()]
    found = logprobs_on_rank(Layout(), folders, precision, recompute=False)
    for model, actual in zip(tiny_models.values(), found, strict=True):
        for ids, logprobs in zip(microbatches(), actual, strict=True):
            torch.testing.assert_close(logprobs.cpu(), model.logprobs(ids), atol=tolerance, rtol=0)


def test_gradients_equal_transformers(tiny_models: dict[str, TinyModel]) -> None:
    models = list(tiny_models.values())
    expect_gradients_of_transformers([gradients_on_rank(Layout(), models)], models, tolerance=1e-2)
