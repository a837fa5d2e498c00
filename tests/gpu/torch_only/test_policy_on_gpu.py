"""A model over ranks with one GPU each, in every layout, against transformers on the CPU: the bodies of tests/parity.

Layers are Transformer Engine's in bfloat16 where it is installed, and torch's else.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_grpo.platform.device import detect_platform
from megatron_grpo.trainer.parallel import make_deterministic
from tests.parity.on_rank import load_on_rank, save_on_rank
from tests.parity.policy_training import OPTIMIZER, expect_gradients_of_transformers, gradients_on_rank
from tests.parity.ranks import LAYOUTS, Layout, run_on_ranks
from tests.parity.test_context_parallel import LAYOUTS as CONTEXT
from tests.parity.test_experts import LAYOUTS as EXPERTS
from tests.parity.test_experts import step_on_rank
from tests.parity.test_muon import muon_steps
from tests.parity.test_muon import steps_on_rank as muon_steps_on_rank
from tests.parity.test_pipeline import INTERLEAVED
from tests.parity.test_rank_logprobs import expect_logprobs, logprobs_on_rank
from tests.parity.test_training import adamw_steps, steps_on_rank
from tests.parity.training import merge
from tests.support.tiny_models import TinyModel, make_tiny_model

ONE = Layout()
DENSE = [*LAYOUTS[1:], Layout(data=2), *CONTEXT]
DEEP = [INTERLEAVED, replace(INTERLEAVED, tensor=2, sequence=True), replace(INTERLEAVED, context=2)]
LOGPROBS = {"float32": 2e-4, "bfloat16": 0.2}
"""Absolute tolerance of a logit. On a CPU torch's layers stay within 2e-5 and 0.1."""
GRADIENTS = {"float32": 1e-3, "bfloat16": 0.12}
"""Tolerance of a gradient's difference relative to the gradient, both as norms. On a CPU torch's layers stay within
1e-4 and 0.05."""
HARDER = {"float32": 1e-3, "bfloat16": 0.25}
"""The same for seven layers and for experts, where torch's layers stay within 0.11 in bfloat16."""
PRECISIONS = pytest.mark.parametrize("precision", LOGPROBS)


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    folder = tmp_path_factory.mktemp("special")
    return lambda name: make_tiny_model(name, folder)


def expect_gradients(
    layout: Layout, models: list[TinyModel], precision: str, tolerance: float, packing: bool = True, **settings: Any
) -> None:
    by_rank = run_on_ranks(layout, gradients_on_rank, models, packing, {"precision": precision, **settings})
    expect_gradients_of_transformers(by_rank, models, tolerance)


@PRECISIONS
@pytest.mark.parametrize("kernel", ["fused", "chunked"])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_gradients_of_every_family(
    packing: bool, kernel: str, precision: str, tiny_models: dict[str, TinyModel]
) -> None:
    models = list(tiny_models.values())
    expect_gradients(ONE, models, precision, GRADIENTS[precision], packing, logprob_kernel=kernel)


@PRECISIONS
@pytest.mark.parametrize("layout", [ONE, *DENSE], ids=str)
def test_logprobs(layout: Layout, precision: str, tiny_models: dict[str, TinyModel]) -> None:
    """Of the policy, of its reference after a step of training, and of the policy that this step makes."""
    tiny = tiny_models["qwen3_tied"]
    by_rank = run_on_ranks(layout, logprobs_on_rank, tiny, precision)
    before, reference, after = zip(*(reported for reported, _ in by_rank if reported), strict=True)
    start, trained = tiny.load(), tiny.load()
    trained.load_state_dict(merge([weights for _, weights in by_rank]), strict=False)
    for actual, model in ((before, start), (reference, start), (after, trained)):
        expect_logprobs(actual, model, LOGPROBS[precision])


@PRECISIONS
@pytest.mark.parametrize("layout", DENSE, ids=str)
def test_gradients(layout: Layout, precision: str, tiny_models: dict[str, TinyModel]) -> None:
    models = [tiny_models["qwen3_tied"], tiny_models["llama_untied"]]
    expect_gradients(layout, models, precision, GRADIENTS[precision])


@PRECISIONS
@pytest.mark.parametrize("layout", DEEP, ids=str)
def test_gradients_of_interleaved_stages(layout: Layout, precision: str, special: Callable[[str], TinyModel]) -> None:
    expect_gradients(layout, [special("qwen3_deep")], precision, HARDER[precision])


@pytest.mark.parametrize("layout", [ONE, Layout(tensor=2, pipeline=2), Layout(data=2)], ids=str)
def test_optimizer_steps_are_those_of_torch_adamw(layout: Layout, tiny_models: dict[str, TinyModel]) -> None:
    tiny = tiny_models["qwen3_tied"]
    by_rank = [result[0] for result in run_on_ranks(layout, steps_on_rank, [tiny], 3)]
    rates = [0.5e-2, 1e-2, 1e-2]
    assert by_rank[0][1] == pytest.approx(rates)
    weights = merge([result for result, _ in by_rank])
    for name, expected in adamw_steps(tiny, [(OPTIMIZER, rate) for rate in rates]).items():
        error = (weights[name] - expected).norm() / expected.norm()
        assert error < 1e-3, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3_moe"])
def test_muon_steps_are_those_in_float64(name: str, special: Callable[[str], TinyModel]) -> None:
    tiny = special(name)
    expected = list(islice(muon_steps(tiny), 10))
    for trained, weights in zip(
        run_on_ranks(ONE, muon_steps_on_rank, tiny, {})[0], (expected[0], expected[9]), strict=True
    ):
        for key, tensor in weights.items():
            error = (trained[key] - tensor).norm() / tensor.norm()
            assert error < 1e-3, f"{key}: relative error {error:.1e}"


@pytest.mark.parametrize("layout", EXPERTS[1:], ids=str)
def test_experts_are_chosen_and_trained_as_on_one_rank(layout: Layout, special: Callable[[str], TinyModel]) -> None:
    model = special("deepseek_v3")
    _, chosen, weights = run_on_ranks(ONE, step_on_rank, model)[0]
    by_rank = run_on_ranks(layout, step_on_rank, model)
    for _, counts, _ in by_rank:
        assert all((counts[layer] == chosen[layer]).all() for layer in counts)
    trained = merge([tensors for _, _, tensors in by_rank])
    for name, expected in weights.items():
        error = (trained[name] - expected).norm() / expected.norm()
        assert error < 1e-3, f"{name}: relative error {error:.1e}"


@PRECISIONS
@pytest.mark.parametrize("layout", [ONE, Layout(data=2, expert=2)], ids=str)
def test_gradients_of_grouped_products(layout: Layout, precision: str, special: Callable[[str], TinyModel]) -> None:
    """Transformer Engine multiplies a rank's experts in one call, and torch one by one."""
    expect_gradients(layout, [special("qwen3_moe")], precision, HARDER[precision])


def repeatable_on_rank(layout: Layout, body: Callable[..., Any], *arguments: Any) -> Any:
    """A body of a rank as an actor runs it with policy.deterministic."""
    if detect_platform().name == "cuda":
        make_deterministic()
    try:
        return body(layout, *arguments)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("layout", [ONE, Layout(tensor=2, pipeline=2)], ids=str)
def test_a_deterministic_run_repeats_to_the_bit_and_over_a_checkpoint(
    layout: Layout, tiny_models: dict[str, TinyModel], tmp_path: Path
) -> None:
    settings = {"precision": "bfloat16", "deterministic": True}
    results = []
    for number, body in enumerate((save_on_rank, save_on_rank, load_on_rank)):
        folder = tmp_path / str(number % 2)
        folder.mkdir(exist_ok=True)
        arguments = (body, tiny_models["qwen3_tied"], folder, settings)
        results.append(merge(run_on_ranks(layout, repeatable_on_rank, *arguments)))
    once, again, loaded = results
    for name, expected in once.items():
        assert torch.equal(again[name], expected), name
        assert torch.equal(loaded[name], expected), name
