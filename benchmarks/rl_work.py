"""Work of a pipeline's stages in training and log-probabilities, put together of dry runs of one layer of each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_grpo.config.schema import Config
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_layouts import split_policy
from megatron_grpo.planning.dry.work import Work
from megatron_grpo.planning.trace import RankTrace

if TYPE_CHECKING:
    from megatron_grpo.planning.dry_run import DryReport

Kind = frozenset[str]
"""Kind of a layer: what stands in its two halves."""
_BY_LAYER = ("windowed", "unrotated", "delta_layers", "mamba_layers", "single_halves")
"""Fields of a shape that have an entry for each layer."""


def pick_layers(shape: ModelShape, layers: Sequence[int]) -> ModelShape:
    """Make the model of these layers alone."""
    fields: dict[str, Any] = {name: tuple(getattr(shape, name)[layer] for layer in layers)
                              for name in _BY_LAYER if getattr(shape, name)}  # fmt: skip
    if shape.experts is not None:
        fields["experts"] = replace(shape.experts, layers=tuple(shape.experts.layers[layer] for layer in layers))
    return replace(shape, layers=len(layers), **fields)


def choose_runs(shape: ModelShape) -> dict[Kind | None, list[int]]:
    """Choose the layers of the dry runs: one of each kind (None), or one more of a kind."""
    first = {shape.list_kinds(layer): layer for layer in reversed(range(shape.layers))}
    base = sorted(first.values())
    return {None: base, **{kind: sorted([*base, layer]) for kind, layer in first.items()}}


def build_traces(config: Config, shape: ModelShape, reports: Mapping[Kind | None, DryReport]) -> list[RankTrace]:
    """Build the trace of every stage: its layers' work, and the embedding's or the head's at the ends.

    Args:
        config: the run's configuration.
        shape: sizes of its model.
        reports: dry runs of `choose_runs`, on one pipeline stage.
    """
    parallel, base = config.policy.parallel, reports[None]
    stage_ranks, last = parallel.world_size // parallel.pipeline, parallel.pipeline - 1
    layer_work = {kind: report.work - base.work for kind, report in reports.items() if kind is not None}
    layer_bytes = {kind: report.end_bytes["train"] - base.end_bytes["train"] for kind, report in reports.items()}
    rest = base.work - sum(layer_work.values(), Counter())
    tokens = config.policy.microbatch_tokens // parallel.context // (parallel.tensor if parallel.sequence else 1)
    traces = []
    for stage, shard in enumerate(split_policy(parallel, shape)[::stage_ranks]):
        work: Counter[Work] = Counter()
        for kind, number in Counter(map(shape.list_kinds, shard.layers)).items():
            work.update({piece: times * number for piece, times in layer_work[kind].items()})
        for piece, times in rest.items():
            is_embedding = "embedding" in piece.name
            if piece.chunk is None or (stage == 0 if is_embedding else stage == last):
                work[piece] += times
        if last:
            ends = (stage * stage_ranks, (stage + 1) % parallel.pipeline * stage_ranks)
            for phase in {phase for phase, _ in base.passes}:
                work[Work(phase, None, False, "send", "send", nbytes=2 * tokens * shape.hidden, ranks=ends)] += 1
        # Every stage counts as if it had the embedding and the head.
        nbytes = sum(layer_bytes[shape.list_kinds(layer)] for layer in shard.layers)
        nbytes += base.end_bytes["train"] - sum(layer_bytes.values())
        report = replace(base, work=work, end_bytes={"train": nbytes})
        traces.append(RankTrace(stage, stage * stage_ranks, len(shard.layers), 1.0, report, {}))
    return traces
