"""What tests of several files run on every rank, and how they compare what ranks return."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenBatch
from tests.parity.policy_training import make_batch, make_engine, train_arguments
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import merge, whole_tensors
from tests.support.tiny_models import logprobs_of_logits

Weights = dict[str, Tensor]
TEMPERATURE = 0.8
"""That of `make_engine`."""


def train_on_rank(
    layout: Layout, model: Any, settings: dict[str, Any], steps: int = 1, make: Callable[..., Any] = make_engine
) -> Weights:
    """The weights after some steps."""
    engine = make(layout, model, **settings)
    for _ in range(steps):
        engine.train(*train_arguments(layout))
    return whole_tensors(engine)


def continue_on_rank(
    layout: Layout,
    model: Any,
    folder: Path,
    settings: dict[str, Any],
    *,
    loads: bool,
    make: Callable[..., Any] = make_engine,
    arguments: Callable[[Layout], Any] = train_arguments,
) -> Weights:
    """Two steps and a checkpoint, or the checkpoint that is loaded; then a step, whose weights these are."""
    engine = make(layout, model, **settings)
    if loads:
        engine.checkpoint.load(str(folder))
    else:
        for _ in range(2):
            engine.train(*arguments(layout))
        engine.checkpoint.save(str(folder))
    engine.train(*arguments(layout))
    return whole_tensors(engine)


save_on_rank = partial(continue_on_rank, loads=False)
load_on_rank = partial(continue_on_rank, loads=True)


def expect_continuation(
    model: Any,
    folder: Path,
    written_by: Layout,
    read_by: Iterable[Layout],
    settings: dict[str, Any] | None = None,
    *,
    save: Callable[..., Weights] = save_on_rank,
    load: Callable[..., Weights] = load_on_rank,
    atol: float = 2e-6,
    rtol: float = 1e-4,
) -> Weights:
    """Expect the step after loading to equal the step after saving, whose weights are returned.

    To the bit in the layout that wrote the checkpoint, to rounding in others.
    """
    folder.mkdir(exist_ok=True)
    expected = merge(run_on_ranks(written_by, save, model, folder, settings or {}))
    for layout in (written_by, *read_by):
        actual = merge(run_on_ranks(layout, load, model, folder, settings or {}))
        tolerance = (0.0, 0.0) if layout == written_by else (atol, rtol)
        expect_close(actual, expected, *tolerance, where=str(layout))
    return expected


def expect_close(actual: Weights, expected: Weights, atol: float = 2e-6, rtol: float = 1e-4, where: str = "") -> None:
    """Up to rounding of float32."""
    for name, tensor in expected.items():
        message = f"{where} {name}: "
        torch.testing.assert_close(actual[name], tensor, atol=atol, rtol=rtol, msg=lambda text, m=message: m + text)


def expect_gradients(actual: Weights, expected: Weights, tolerance: float = 1e-4, floor: float = 0.0) -> None:
    """Up to a share of each tensor's norm, or of `floor` where that is larger."""
    for name, gradient in expected.items():
        error = (actual[name] - gradient).norm() / gradient.norm().clamp(min=floor)
        assert error < tolerance, f"{name}: relative error {error:.1e}"


def split_by_sequence(values: Tensor | None, share: TokenBatch, order: list[int]) -> dict[int, Tensor]:
    """A rank's numbers of its share, by number of the sequence; {} on ranks that do not report."""
    return {} if values is None else dict(zip(order, values.split(share.lengths), strict=True))


def expect_logprobs(
    by_rank: Iterable[dict[int, Tensor]], model: torch.nn.Module, tolerance: float = 2e-5 / TEMPERATURE
) -> None:
    """Those of every sequence of the batch, from one replica, are those of transformers."""
    batch = make_batch()
    reported = sorted((number, values) for part in by_rank for number, values in part.items())
    assert [number for number, _ in reported] == list(range(len(batch)))
    sequences = batch.fields.token_ids.long().split(batch.lengths)
    for ids, (_, logprobs) in zip(sequences, reported, strict=True):
        with torch.no_grad():
            expected = logprobs_of_logits(model(ids[None]).logits / TEMPERATURE, ids[None])
        torch.testing.assert_close(logprobs, expected[0], atol=tolerance, rtol=0)
