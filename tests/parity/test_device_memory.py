"""Memory that is given up and taken back: nothing is left meanwhile, and nothing has changed afterwards."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_grpo.config.schema import LoraConfig, ModelConfig, PolicyConfig, ReferenceConfig
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.rank import PolicyRank
from tests.parity.policy_training import OPTIMIZER, train_arguments
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import parameters_of, whole_tensors
from tests.support.tiny_models import TinyModel, make_tiny_model

MUON = replace(OPTIMIZER, name="muon")

CASES: dict[str, tuple[Layout, str, dict[str, Any]]] = {
    "float32": (Layout(pipeline=2), "qwen3_tied", {}),
    "float32 copies, each replica a part": (Layout(data=2), "qwen3_tied", {"precision": "bfloat16"}),
    "weights that are fetched late": (Layout(data=2), "qwen3_tied", {"overlap_param_gather": True}),
    "adapters": (Layout(), "qwen3_tied", {"lora": LoraConfig(rank=2)}),
    "experts": (Layout(data=2, expert=2), "qwen3_moe", {}),
    "Muon": (Layout(data=2, expert=2), "qwen3_moe", {"precision": "bfloat16", "optimizer": MUON}),
}


def make_rank(layout: Layout, model: TinyModel, settings: dict[str, Any]) -> PolicyRank:
    overlapped = {"overlap_grad_reduce": True} if settings.get("overlap_param_gather") else {}
    config = PolicyConfig(
        model=ModelConfig(path=str(model.path)),
        parallel=layout.parallel,
        **{"precision": "float32", "optimizer": OPTIMIZER, **overlapped, **settings},
    )
    folder = str(model.path)
    return PolicyRank(
        RankSettings(config=config, shape=model.shape, folder=folder, reference=ReferenceConfig(), decay_steps=100)
    )


def of_training(rank: PolicyRank) -> Iterator[Tensor]:
    """Gradients and moments, found by other ways than in the code."""
    for parameter in parameters_of(rank):
        if parameter.requires_grad:
            yield parameter.main_grad
    for optimizer in rank.optimizer.optimizer.chained_optimizers:
        for state in optimizer.optimizer.state.values():
            yield from (value for name, value in state.items() if name != "step")


def nbytes(tensors: Iterator[Tensor]) -> int:
    """Of the memory behind them; many are views of one buffer."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def turns_on_rank(layout: Layout, model: TinyModel, settings: dict[str, Any]) -> list[bool]:
    """Steps with and without turns in between, and what is where in a turn."""
    moved, resident = (make_rank(layout, model, settings) for _ in range(2))
    results = []
    for _ in range(3):
        for rank in (moved, resident):
            rank.train(*train_arguments(layout))
        before = nbytes(of_training(moved))
        moved.memory.offload(weights=False)
        results.append(before > 0 and nbytes(of_training(moved)) == 0)
        results.append(same_tensors(whole_tensors(moved), whole_tensors(resident)))
        moved.memory.offload(weights=True)
        chunks = [*moved.chunks, *(moved.reference or [])]
        results.append(nbytes(parameter for chunk in chunks for parameter in chunk.parameters()) == 0)
        with pytest.raises(RuntimeError, match="the weights are in host memory"):
            moved.gather_chunks()
        moved.memory.onload()
        results.append(nbytes(of_training(moved)) == before)
        results.append(
            all(map(torch.equal, map(on_host, chunks), map(on_host, [*resident.chunks, *(resident.reference or [])])))
        )
    return results


def on_host(chunk: torch.nn.Module) -> Tensor:
    """All parameters and buffers of a chunk, one behind the other, in float32."""
    return torch.cat([tensor.detach().flatten().float() for tensor in (*chunk.parameters(), *chunk.buffers())])


def same_tensors(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("case", CASES)
def test_a_model_in_turns_is_that_which_stays(case: str, tmp_path: Path) -> None:
    layout, name, settings = CASES[case]
    for result in run_on_ranks(layout, turns_on_rank, make_tiny_model(name, tmp_path), settings):
        assert result == [True] * 15
