"""The policy on a GPU against transformers on the CPU: log-probabilities, gradients and optimizer steps."""

from __future__ import annotations

import pytest
import torch

from megatron_grpo.platform.device import current_platform
from tests.parity.policy_training import OPTIMIZER, expect_gradients_of_transformers, gradients_on_rank
from tests.parity.ranks import Layout
from tests.parity.test_logprobs import logprobs_on_rank, microbatches
from tests.parity.test_training import adamw_steps, steps_on_rank
from tests.support.tiny_models import TinyModel

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.gpu
def test_the_platform_is_cuda() -> None:
    assert current_platform().name == "cuda"


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 2e-3), ("bfloat16", 0.5)])
def test_logprobs_equal_transformers(precision: str, tolerance: float, tiny_models: dict[str, TinyModel]) -> None:
    folders = [model.path for model in tiny_models.values()]
    found = logprobs_on_rank(Layout(), folders, precision, recompute=False)
    for model, actual in zip(tiny_models.values(), found, strict=True):
        for ids, logprobs in zip(microbatches(), actual, strict=True):
            torch.testing.assert_close(logprobs.cpu(), model.logprobs(ids), atol=tolerance, rtol=0)


@pytest.mark.parametrize("kernel", ["fused", "chunked"])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_gradients_equal_transformers(packing: bool, kernel: str, tiny_models: dict[str, TinyModel]) -> None:
    models = list(tiny_models.values())
    found = gradients_on_rank(Layout(), models, packing, {"logprob_kernel": kernel})
    expect_gradients_of_transformers([found], models, tolerance=1e-2)


def test_optimizer_steps_equal_torch_adamw(tiny_models: dict[str, TinyModel]) -> None:
    models = list(tiny_models.values())
    for tiny, (weights, rates) in zip(models, steps_on_rank(Layout(), models, 3), strict=True):
        assert rates == pytest.approx([0.5e-2, 1e-2, 1e-2])
        expected = adamw_steps(tiny, [(OPTIMIZER, rate) for rate in rates])
        for name, weight in expected.items():
            error = (weights[name] - weight).norm() / weight.norm()
            assert error < 1e-3, f"{tiny.name} {name}: relative error {error:.1e}"
