"""A rank's process: threads, temporary files, remote calls, profile, sketches of tensors."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call, create_autospec

import pytest
import torch

from megatron_grpo.cluster.actor_processes import ActorProcesses
from megatron_grpo.config.loop_schema import AsyncGRPOConfig
from megatron_grpo.config.schema import ModelConfig, ParallelConfig, PolicyConfig
from megatron_grpo.models.heads import LOGITS
from megatron_grpo.trainer import model_ranks, step_record
from megatron_grpo.trainer.actor import RankActor
from megatron_grpo.trainer.checkpoint import RankCheckpoint
from megatron_grpo.trainer.messages import RankReport, RankSettings
from megatron_grpo.trainer.model_ranks import MegatronPolicy
from megatron_grpo.trainer.offload import DeviceMemory
from megatron_grpo.trainer.step_record import SKETCH, StepRecorder, sketch, sketch_rows
from tests.support.programs import read_programs


@pytest.mark.parametrize(
    ("cores", "ranks", "on_machine", "shared", "configured_threads", "expected"),
    [
        (8, 2, None, False, None, 4),
        (8, 2, None, True, None, 2),
        (2, 1, None, True, None, 1),
        (2, 2, None, True, None, 1),
        (8, 2, None, True, 3, 3),
        (96, 128, 8, False, None, 12),
        (96, 2, 8, False, None, 48),
    ],
)
def test_ranks_share_the_cores_of_their_machine_with_engines_that_sample_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    ranks: int,
    on_machine: int | None,
    shared: bool,
    configured_threads: int | None,
    expected: int,
) -> None:
    threads: list[int] = []

    class Actor:
        @classmethod
        def options(cls, **_: Any) -> "type[Actor]":
            return cls

        @classmethod
        def remote(cls, _name: str, _rank: int, count: int) -> None:
            threads.append(count)

    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(model_ranks.ray, "remote", lambda _: Actor)
    shape: Any = SimpleNamespace(head=LOGITS)
    settings = RankSettings(
        config=PolicyConfig(
            model=ModelConfig(path="none"), parallel=ParallelConfig(data=ranks), threads=configured_threads
        ),
        shape=shape,
        folder="none",
        decay_steps=1,
        ranks_per_machine=on_machine,
        shares_cores=shared,
    )
    MegatronPolicy(settings, lambda _: {}, startup_timeout_s=1.0)
    assert threads == [expected] * ranks


@pytest.mark.parametrize(("enabled", "age", "ahead"), [(True, 1, True), (True, 0, False), (False, 1, False)])
def test_without_age_nothing_is_sampled_meanwhile(enabled: bool, age: int, ahead: bool) -> None:
    assert AsyncGRPOConfig(enabled=enabled, max_trajectory_age_steps=age).can_sample_ahead == ahead


CODE = read_programs("rank_process")["code"]


@pytest.mark.slow
def test_the_imports_of_a_rank_make_no_folder_of_wandb(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", CODE], check=True, env=environment, capture_output=True)
    assert [entry.name for entry in tmp_path.iterdir() if "wandb" in entry.name] == []


class LocalActor:
    """A handle whose calls run at once in this process, and return results in place of references."""

    def __init__(self, model: Any) -> None:
        self._actor = RankActor.__new__(RankActor)
        self._actor.model = model

    def __getattr__(self, name: str) -> Any:
        class Method:
            remote: Callable[..., Any] = getattr(self._actor, name)

        return Method


@pytest.fixture
def model() -> Any:
    """A model whose parts take the calls that the real ones take."""
    model = Mock(spec=["checkpoint", "memory", "recorder", "sync_reference"])
    model.checkpoint = create_autospec(RankCheckpoint, instance=True)
    model.memory = create_autospec(DeviceMemory, instance=True)
    model.recorder = create_autospec(StepRecorder, instance=True)
    model.recorder.end.return_value = model.recorder.end_states.return_value = []
    return model


def test_calls_reach_the_model(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = MegatronPolicy.__new__(MegatronPolicy)
    policy.actors = [LocalActor(model)]
    policy._reports = [RankReport(data_rank=0, device_name="cpu", startup_s={}, processes=ActorProcesses("here", ()))]
    monkeypatch.setattr(policy, "_gather", lambda results, _: results)
    policy.save_checkpoint("folder", background=True)
    model.checkpoint.is_written.return_value = False
    assert not policy.is_checkpoint_written()
    policy.finish_checkpoint()
    policy.load_checkpoint("folder")
    assert model.checkpoint.method_calls == [
        call.save("folder", True),
        call.is_written(),
        call.finish(),
        call.load("folder"),
    ]
    policy.offload(weights=True)
    policy.onload()
    assert model.memory.method_calls == [call.offload(True), call.onload()]
    policy.begin_record()
    assert policy.end_record() == []
    assert model.recorder.method_calls == [call.begin(), call.end()]
    policy.sync_reference(0.5)
    assert model.sync_reference.call_args == call(0.5)
    assert policy.submit(lambda rank, number: (rank, number), 3) == [(model, 3)]


def test_the_trace_has_the_operators_of_the_step(tmp_path: Path) -> None:
    torch.ones(4).cumsum(0)
    rank = RankActor.__new__(RankActor)  # without the log of a process
    for name in ("policy rank 1", "policy rank 2"):
        rank.name = name
        rank.begin_profile()
        torch.ones(8, 8) @ torch.ones(8, 8)
        rank.end_profile(str(tmp_path))
        events = json.loads((tmp_path / f"{name.replace(' ', '_')}.json").read_text())["traceEvents"]
        names = {event.get("name") for event in events}
        assert "aten::mm" in names
        assert "aten::cumsum" not in names
        assert any(event.get("name") == "[memory]" for event in events)


def distance(first: torch.Tensor, second: torch.Tensor, name: str = "weight") -> float:
    pairs = zip(sketch(first, name), sketch(second, name), strict=True)
    return math.sqrt(sum((a - b) ** 2 for a, b in pairs))


@pytest.mark.parametrize("shape", [(1,), (63,), (7, 65), (3, 5, 129)])
def test_the_sketch_of_a_difference_is_the_difference_of_the_sketches(shape: tuple[int, ...]) -> None:
    first, second = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    difference = [a - b for a, b in zip(sketch(first, "w"), sketch(second, "w"), strict=True)]
    torch.testing.assert_close(torch.tensor(sketch(first - second, "w")), torch.tensor(difference))


def test_one_changed_element_moves_the_sketch_by_exactly_its_change() -> None:
    tensor = torch.randn(300, 41)
    changed = tensor.clone()
    changed[123, 4] += 0.25
    change = float(changed[123, 4].double() - tensor[123, 4].double())
    assert distance(tensor, changed) == pytest.approx(change, rel=1e-9)
    assert distance(tensor, tensor.clone()) == 0


def test_distances_are_estimated_without_bias_and_within_the_stated_deviation() -> None:
    draw = torch.Generator().manual_seed(0)
    ratios = []
    for number in range(400):
        # Few large columns: elements of equal place in their blocks must not share a sum.
        tensor = torch.randn(64, SKETCH, generator=draw) * torch.tensor([10.0] + [0.1] * (SKETCH - 1))
        norm = float(tensor.double().norm())
        ratios.append(sum(value**2 for value in sketch(tensor, f"tensor {number}")) / norm**2)
    estimates = torch.tensor(ratios)
    assert float(estimates.mean()) == pytest.approx(1.0, abs=4 * math.sqrt(2 / SKETCH / len(estimates)))
    assert float(estimates.std()) == pytest.approx(math.sqrt(2 / SKETCH), rel=0.25)


def test_a_tensor_sketched_in_pieces_has_the_same_sketch(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000)
    expected = sketch(tensor, "w")
    monkeypatch.setattr(step_record, "_PIECE", 2 * SKETCH)
    torch.testing.assert_close(torch.tensor(sketch(tensor, "w")), torch.tensor(expected))


@pytest.mark.parametrize("width", [1, 5, 64, 65, 300])
def test_rows_have_the_sketches_that_they_have_by_themselves(width: int) -> None:
    rows = torch.randn(7, width)
    expected = torch.tensor([sketch(row, "norm") for row in rows], dtype=torch.float64)
    torch.testing.assert_close(sketch_rows(rows, "norm"), expected)


def test_sketches_of_parts_of_rows_add_up() -> None:
    """Tensor parallelism splits the heads at any column."""
    rows = torch.randn(7, 300)
    parts = [sketch_rows(rows[:, begin:end], "heads", begin) for begin, end in ((0, 50), (50, 190), (190, 300))]
    torch.testing.assert_close(torch.stack(parts).sum(dim=0), sketch_rows(rows, "heads"))
