"""The policy's side of the checks after a refit, on ranks of several layouts, against the model's folder."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron_grpo.config.errors import CanaryError
from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.schema import ModelConfig, PolicyConfig
from megatron_grpo.generation.engine_canary import CanaryPrompt
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.model import packed_sequences
from megatron_grpo.trainer.model.packed_sequences import PackedLayout
from megatron_grpo.trainer.rank import PolicyRank
from megatron_grpo.weight_sync.boxes import Box, pack_boxes, to_slices
from megatron_grpo.weight_sync.fingerprints import (
    OUTPUT_TOLERANCES,
    Fingerprint,
    compute_fingerprint,
    draw_probes,
    measure_difference,
)
from megatron_grpo.weight_sync.rank_checks import fingerprint_policy, score_canary
from megatron_grpo.weight_sync.refit_checks import CANARY_LENGTHS, draw_canary
from tests.parity.ranks import Layout, run_on_ranks
from tests.support.engine_table import table_boxes
from tests.support.tiny_models import TinyModel, make_tiny_model

Sequences = tuple[tuple[int, ...], ...]
Found = tuple[list[dict[str, Fingerprint]], tuple[tuple[float, ...], ...] | None]


def checks_of_rank(layout: Layout, model: TinyModel, engine: list[str], sequences: Sequences) -> Found:
    """A rank's fingerprints for each rank of an engine, and its log-probabilities of the canary."""
    config = PolicyConfig(model=ModelConfig(path=str(model.path)), parallel=layout.parallel, precision="float32")
    folder = str(model.path)
    rank = PolicyRank(RankSettings(config=config, shape=model.shape, folder=folder, decay_steps=100, temperature=0.6))
    return fingerprint_policy(rank, engine), score_canary(rank, sequences)


@pytest.mark.parametrize(
    ("name", "layout", "generation"),
    [
        ("qwen3_tied", Layout(pipeline=2), GenerationParallelConfig(tensor=2)),
        ("qwen3_moe", Layout(data=2, expert=2), GenerationParallelConfig(tensor=2)),
        ("mixtral", Layout(tensor=2, sequence=True), GenerationParallelConfig(tensor=2, expert=2)),
    ],
    ids=str,
)
def test_ranks_compute_what_the_folder_says(
    name: str, layout: Layout, generation: GenerationParallelConfig, tmp_path: Path
) -> None:
    tiny = make_tiny_model(name, tmp_path)
    engine = table_boxes(generation, tiny.shape)
    sequences = draw_canary(1, tiny.shape.vocab, 32)
    by_rank = run_on_ranks(layout, checks_of_rank, tiny, list(map(pack_boxes, engine)), sequences)
    for number, boxes in enumerate(engine):
        expected = _of_folder(tiny, boxes)
        parts = [part[number] for part, _ in by_rank]
        fingerprints = {name: fingerprint for part in parts for name, fingerprint in part.items()}
        assert fingerprints.keys() == expected.keys()
        assert sum(map(len, parts)) == len(expected), "every tensor from one rank"
        assert (
            max(measure_difference(expected[name], fingerprints[name]) for name in fingerprints)
            < OUTPUT_TOLERANCES[torch.float32]
        )
        tensors = [name for name in fingerprints if not name.rpartition(".")[2].isdigit()]
        assert all(measure_difference(expected[name], fingerprints[name]) == 0 for name in tensors)
    logprobs = [values for _, values in by_rank if values is not None]
    for values in logprobs:
        for actual, expected_one in zip(values, _by_transformers(tiny, sequences), strict=True):
            torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected_one), atol=2e-5, rtol=0)
    assert len(logprobs) == layout.data


def _by_transformers(tiny: TinyModel, sequences: Sequences) -> tuple[tuple[float, ...], ...]:
    """Log-probabilities of all tokens but the first, each sequence computed alone."""
    return tuple(tuple(tiny.logprobs(torch.tensor([sequence]))[0, 1:].tolist()) for sequence in sequences)


def packed_wrongly(layout: Layout, model: TinyModel, sequences: Sequences, fault: str) -> Any:
    """A rank's log-probabilities of the canary, if sequences of one pack see each other or take others' positions."""
    config = PolicyConfig(model=ModelConfig(path=str(model.path)), parallel=layout.parallel, precision="float32")
    folder = str(model.path)
    rank = PolicyRank(RankSettings(config=config, shape=model.shape, folder=folder, decay_steps=100))
    original = packed_sequences.build_packed_sequences

    def faulty(packed: PackedLayout, *arguments: Any, **named: Any) -> Any:
        if fault == "leak":  # one boundary is lost: keys of all sequences before are seen
            total = packed.widths.sum(keepdims=True)
            packed = replace(packed, widths=total, lengths=total)
        if fault == "positions":  # boundaries are a token late
            packed = replace(packed, positions=np.roll(packed.positions, 1))
        return original(packed, *arguments, **named)

    packed_sequences.build_packed_sequences = faulty
    try:
        return score_canary(rank, sequences)
    finally:
        packed_sequences.build_packed_sequences = original


@pytest.mark.parametrize("layout", [Layout(), Layout(pipeline=2), Layout(context=2)], ids=str)
def test_a_pack_shows_what_a_sequence_alone_does_not(layout: Layout, tmp_path: Path) -> None:
    tiny = make_tiny_model("qwen3_tied", tmp_path)
    sequences = draw_canary(1, tiny.shape.vocab, 64)
    assert tuple(map(len, sequences)) == CANARY_LENGTHS
    theirs = _by_transformers(tiny, sequences)
    for fault in ("none", "leak", "positions"):
        (ours,) = [
            result for result in run_on_ranks(layout, packed_wrongly, tiny, sequences, fault) if result is not None
        ]
        prompt = CanaryPrompt(1, sequences, ours, limit=1e-4)
        if fault == "none":
            assert prompt.require_agreement(theirs).error < 1e-5
            continue
        with pytest.raises(CanaryError, match=r"sequence by sequence"):
            prompt.require_agreement(theirs)
    (alone,) = [
        result for result in run_on_ranks(layout, packed_wrongly, tiny, sequences[:1], "leak") if result is not None
    ]
    assert CanaryPrompt(1, sequences[:1], alone, limit=1e-4).require_agreement(theirs[:1]).error < 1e-5


def _of_folder(tiny: TinyModel, boxes: list[Box]) -> dict[str, Fingerprint]:
    """Fingerprints of a folder's tensors that a rank of an engine keeps, and of its experts' outputs."""
    tensors, fingerprints = tiny.tensors(), dict[str, Fingerprint]()
    experts: defaultdict[str, list[Tensor]] = defaultdict(list)
    for box in filter(lambda box: box.tensor, boxes):
        cut = tensors[box.tensor][to_slices(box.layout.tensor)]
        if ".experts." in box.tensor:
            experts[box.tensor.rsplit(".", 2)[0]].append(cut)
        else:
            fingerprints[box.tensor] = compute_fingerprint(cut)
    inputs = draw_probes(tiny.shape.hidden, torch.device("cpu"))
    for name, (gate, up, down) in experts.items():
        fingerprints[name] = compute_fingerprint((functional.silu(inputs @ gate.T) * (inputs @ up.T)) @ down.T)
    return fingerprints
