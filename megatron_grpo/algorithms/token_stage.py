"""Running arithmetic over the tokens of a whole step where the tokens are, so that the driver never holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray

from megatron_grpo.cluster.futures import stored
from megatron_grpo.data.batch import StepBatch
from megatron_grpo.rollouts.pool import RolloutPool
from megatron_grpo.rollouts.shards import gather_shards, split_by_shard


def on_tokens(
    rollouts: RolloutPool,
    batch: StepBatch,
    entries: Sequence[str],
    fn: Callable[..., Any],
    *arguments: Any,
    in_driver: bool = False,
) -> Any:
    """Call fn(lengths, arrays, *arguments) on entries of all sequences, and add the entries that it returns to a batch.

    Args:
        rollouts: one of whose workers makes the call.
        batch: the step's batch, whose shards hold the entries.
        entries: names of the entries that fn reads: its `arrays` are these, flat and in the order of the step.
        fn: returns new entries by name, each [sum(lengths)], and a summary.
        arguments: passed on to fn.
        in_driver: make the call in this process instead, which may have a GPU that the workers have not.

    Returns:
        The summary.
    """
    fields, sequences = [shard.fields for shard in batch.shards], [shard.sequences for shard in batch.shards]
    if in_driver:
        what = f"the step's {', '.join(entries)}"
        here = [dict(zip(entries, stored([one[name] for name in entries], what), strict=True)) for one in fields]
        arrays, summary = fn(batch.lengths, gather_shards(here, sequences, batch.lengths, entries), *arguments)
        split = split_by_shard(arrays, sequences, batch.lengths)
        added = [{name: ray.put(array) for name, array in one.items()} for one in split]
    else:
        added, summary = rollouts.compute(fn, fields, sequences, batch.lengths, entries, *arguments)
    for shard, references in zip(batch.shards, added, strict=True):
        shard.fields |= references
    return summary
