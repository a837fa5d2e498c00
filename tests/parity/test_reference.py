"""The moving reference policy and its checkpoint in several layouts; a bad gradient changes nothing."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_grpo.config.schema import ReferenceConfig
from megatron_grpo.models.hf_folder import HFFolderReader
from megatron_grpo.models.hf_weights import iter_hf_tensors
from megatron_grpo.trainer.rank import PolicyRank
from tests.parity import policy_training
from tests.parity.on_rank import expect_close
from tests.parity.policy_training import OPTIMIZER, train_arguments
from tests.parity.ranks import LAYOUTS, Layout, run_on_ranks
from tests.parity.training import merge, parameters_of, whole_tensors
from tests.support.tiny_models import TinyModel

ALPHA = 0.6


def make_engine(layout: Layout, model: TinyModel, *, offload: bool = False) -> PolicyRank:
    optimizer, reference = replace(OPTIMIZER, warmup_steps=0), ReferenceConfig(offload=offload)
    return policy_training.make_engine(layout, model, optimizer=optimizer, reference=reference)


def reference_tensors(engine: PolicyRank) -> dict[str, Tensor]:
    assert engine.reference is not None
    tensors = iter_hf_tensors(engine.reference, engine.shape)
    return {name: tensor.clone().cpu() for name, tensor in tensors if tensor is not None}


def sync_on_rank(layout: Layout, model: TinyModel, folder: Path) -> tuple[dict[str, Tensor], ...]:
    """Two syncs with a step before each, a checkpoint between them."""
    engine = make_engine(layout, model)
    engine.train(*train_arguments(layout))
    first = whole_tensors(engine)
    engine.sync_reference(ALPHA)
    engine.checkpoint.save(str(folder))
    engine.train(*train_arguments(layout))
    engine.sync_reference(ALPHA)
    return first, whole_tensors(engine), reference_tensors(engine)


def resume_on_rank(layout: Layout, model: TinyModel, folder: Path) -> dict[str, Tensor]:
    engine = make_engine(layout, model)
    engine.checkpoint.load(str(folder))
    engine.train(*train_arguments(layout))
    engine.sync_reference(ALPHA)
    return reference_tensors(engine)


@pytest.mark.slow  # test_training.py loads checkpoints
def test_the_reference_is_the_mixture_and_continues_from_a_checkpoint(
    tiny_models: dict[str, TinyModel], tmp_path: Path
) -> None:
    """After two syncs, a restart between: a policy_2 + a (1 - a) policy_1 + (1 - a)^2 start."""
    model = tiny_models["qwen3_tied"]
    written_by = Layout(tensor=2, pipeline=2)
    (tmp_path / "checkpoint").mkdir()
    by_rank = run_on_ranks(written_by, sync_on_rank, model, tmp_path / "checkpoint")
    first, second, reference = (merge([result[part] for result in by_rank]) for part in range(3))
    start = dict(model.load().named_parameters())
    for name, tensor in reference.items():
        expected = ALPHA * second[name] + ALPHA * (1 - ALPHA) * first[name] + (1 - ALPHA) ** 2 * start[name].detach()
        torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=1e-5)
        assert not torch.equal(tensor, start[name])
    for layout in (written_by, Layout(), Layout(data=2)):
        resumed = merge(run_on_ranks(layout, resume_on_rank, model, tmp_path / "checkpoint"))
        expect_close(resumed, reference, *((0.0, 0.0) if layout == written_by else ()))


def plain_checkpoint_on_rank(layout: Layout, model: TinyModel, folder: Path) -> tuple[bool, dict[str, Tensor]]:
    """A checkpoint of a run whose reference never moved, loaded by one that has a reference."""
    engine = make_engine(layout, model)
    engine.train(*train_arguments(layout))
    engine.checkpoint.save(str(folder))
    resumed = make_engine(layout, model)
    resumed.checkpoint.load(str(folder))
    return resumed.reference_moved, reference_tensors(resumed)


def test_a_reference_that_never_moved_is_the_starting_model(tiny_models: dict[str, TinyModel], tmp_path: Path) -> None:
    model = tiny_models["qwen3_tied"]
    (tmp_path / "checkpoint").mkdir()
    by_rank = run_on_ranks(Layout(pipeline=2), plain_checkpoint_on_rank, model, tmp_path / "checkpoint")
    assert [moved for moved, _ in by_rank] == [False, False]
    start = dict(model.load().named_parameters())
    for name, tensor in merge([tensors for _, tensors in by_rank]).items():
        assert torch.equal(tensor, start[name])


def weights(engine: PolicyRank) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters_of(engine)]


def bad_gradient_on_rank(layout: Layout, model: TinyModel) -> tuple[float, bool, list[float], bool]:
    """An infinite advantage, then a good step: the weights after each are what they would be without the first."""
    engine, undisturbed = make_engine(layout, model), make_engine(layout, model)
    batch, *rest = train_arguments(layout)
    spoilt = batch.select(list(range(len(batch))))
    spoilt.fields.advantages[spoilt.fields.loss_mask > 0] = float("inf")
    share = engine.train(spoilt, *rest)
    untouched = all(map(torch.equal, weights(engine), weights(undisturbed)))
    for policy in (engine, undisturbed):
        policy.train(batch, *rest)
    recovered = all(map(torch.equal, weights(engine), weights(undisturbed)))
    return share.grad_norm, untouched, [metrics["loss"] for metrics in share.metrics or []], recovered


@pytest.mark.parametrize("layout", [*LAYOUTS[:1], LAYOUTS[-1], Layout(data=2)], ids=str)
def test_a_gradient_that_is_not_finite_changes_nothing(layout: Layout, tiny_models: dict[str, TinyModel]) -> None:
    by_rank = run_on_ranks(layout, bad_gradient_on_rank, tiny_models["qwen3_tied"])
    for grad_norm, untouched, losses, recovered in by_rank:
        assert not math.isfinite(grad_norm)
        assert untouched
        assert not any(map(math.isfinite, losses))
        assert recovered
    assert any(losses for _, _, losses, _ in by_rank)


def offloaded_on_rank(layout: Layout, model: TinyModel) -> tuple[bool, int]:
    """Whether an offloaded reference gives the numbers of another, and how often files were opened.

    The references are compared before and after they have moved; the files are those of weights.
    """
    opened: list[str] = []
    original = HFFolderReader.__init__

    def counting(self: HFFolderReader, folder: str | Path) -> None:
        opened.append(str(folder))
        original(self, folder)

    HFFolderReader.__init__ = counting  # type: ignore[method-assign]
    try:
        engines = [make_engine(layout, model, offload=offload) for offload in (False, True)]
    finally:
        HFFolderReader.__init__ = original  # type: ignore[method-assign]
    batch, microbatches, _, _ = train_arguments(layout)
    results = []
    for engine in engines:
        before = engine.compute_reference_logprobs(batch, microbatches)
        engine.train(*train_arguments(layout))
        engine.sync_reference(ALPHA)
        results.append((before, engine.compute_reference_logprobs(batch, microbatches), reference_tensors(engine)))
    resident, offloaded = results
    is_same = all(resident[2][name].equal(offloaded[2][name]) for name in resident[2])
    for a, b in zip(resident[:2], offloaded[:2], strict=True):
        is_same = is_same and (a is b is None or (a is not None and b is not None and a.equal(b)))
    moved = resident[0] is None or (resident[1] is not None and not resident[0].equal(resident[1]))
    return is_same and moved, len(opened)


def test_an_offloaded_reference_gives_the_same_numbers_and_reads_nothing(tiny_models: dict[str, TinyModel]) -> None:
    by_rank = run_on_ranks(Layout(pipeline=2), offloaded_on_rank, tiny_models["qwen3_tied"])
    assert by_rank == [(True, 2), (True, 2)]
