"""Checks of recorded rollouts: a file may come from elsewhere, and hold what no run writes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_grpo.config.errors import to_text

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from megatron_grpo.batch.rollout_files import RunFacts

BATCH_ROWS = 256  # most rows that are read at once
MAX_VALUES = 2**28  # of a column in a row group; a run ends one with the prompt that reaches 2**22 tokens
# A column of equal values takes no space in the file. A run writes log-probabilities, which do.
FREE_VALUES, VALUES_OF_A_BYTE = 2**24, 16
MAX_BATCH_BYTES = 2**31  # of texts that are read at once; a text that repeats takes no space in the file
# Columns that earlier versions did not write.
_ADDED = (
    *("engine", "fault", "notes", "reward_errors", "segment_tokens", "token", "turn_rewards", "turn_tokens"),
    *("prompt", "answer", "columns", "images", "segment_images"),
)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NEVER_EMPTY = (
    *("prompt_idx", "group", "sample", "token_ids", "spans", "logprobs", "response", "stop_reason"),
    *("reward_parts", "reward_metrics", "notes", "task_name", "prompt", "columns"),
)
_BY_TOKEN = ("logprobs", "prev_logprobs", "advantages")  # a value for each sampled token


def find_file_problem(file: Path, metadata: pq.FileMetaData, columns: pa.Schema, expected: pa.Schema) -> str | None:
    """Find columns that lack, have another type, or are too large to be read."""
    for name in expected.names:
        if name not in columns.names:
            if name not in _ADDED:
                return f"it has no column {name}"
        elif columns.field(name).type != expected.field(name).type:
            return f"its column {name} is {to_text(columns.field(name).type)}, not {expected.field(name).type}"
    values: Counter[str] = Counter()
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for index in range(group.num_columns):
            column = group.column(index)
            values[column.path_in_schema] += column.num_values
            if column.num_values > MAX_VALUES:
                text = f"{column.num_values} values of {to_text(column.path_in_schema)} in a row group"
                return f"it has {text}, and at most {MAX_VALUES} are read"
    size = file.stat().st_size
    for name, count in values.items():
        if count > max(FREE_VALUES, VALUES_OF_A_BYTE * size):
            return f"it has {count} values of {to_text(name)} in {size} bytes, which no run writes"
    return None


def choose_batch_rows(metadata: pq.FileMetaData) -> int:
    """Choose how many rows are read at once, by the sizes of their texts."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(index) for group in groups for index in range(group.num_columns)]
    sizes = (column.total_uncompressed_size for column in columns if column.physical_type == "BYTE_ARRAY")
    return max(1, min(BATCH_ROWS, MAX_BATCH_BYTES // max([1, *sizes])))


def require_possible(
    row: Mapping[str, Any], number: int, last_group: int, run: RunFacts | None, *, is_trained: bool
) -> None:
    """Check a row of a file of rollouts; ValueError: no run writes it.

    Log-probabilities and advantages may be any numbers, because a run that computed wrong ones records them, and the
    doctor looks at them.

    Args:
        number: of the row, from 1.
        last_group: group of the row before.
        run: what is known of the recorded run.
        is_trained: the rollout is trained on, and so needs finite numbers.
    """
    problems = [
        _find_value_problems(row),
        _find_token_problems(row, run),
        _find_span_problems(row),
        _find_place_problems(row, last_group, run),
        *([_find_number_problems(row)] if is_trained else []),
    ]
    for problem in chain.from_iterable(problems):
        raise ValueError(f"row {number}, prompt {row['prompt_idx']}, sample {row['sample']} has {problem}")


def _find_value_problems(row: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"no {name}" for name in _NEVER_EMPTY if row.get(name, "") is None)
    if row["stop_reason"] not in ("stop", "length"):
        yield f"the stop_reason {to_text(row['stop_reason'])}"
    turn_rewards, turn_tokens = row.get("turn_rewards") or [], row.get("turn_tokens") or []
    if len(turn_rewards) != len(turn_tokens) or None in [*turn_rewards, *turn_tokens]:
        yield f"{len(turn_rewards)} rewards of turns, and {len(turn_tokens)} numbers of their tokens"
    yield from ("an infinite reward" for reward in (row["reward"], *turn_rewards) if reward and math.isinf(reward))
    for image in row.get("images") or ():
        if not (image and _DIGEST.fullmatch(image["digest"] or "") and image["rows"] and image["columns"]):
            yield f"the image {to_text(image)}"
    counts, segments, images = (row.get(name) or [] for name in ("segment_images", "segment_tokens", "images"))
    expected = len(segments) if images and len(segments) > 1 else 0
    is_whole = None not in counts and min(counts, default=0) >= 0 and sum(counts) == (len(images) if expected else 0)
    if len(counts) != expected or not is_whole:
        yield f"segments of {to_text(counts)} images, and {len(images)} images"
    weight = row["loss_multiplier"]
    if weight is None or not 0 <= weight <= 1:
        yield f"the loss_multiplier {to_text(weight)}, which is not from 0 to 1"


def _find_place_problems(row: Mapping[str, Any], last_group: int, run: RunFacts | None) -> Iterator[str]:
    group, sample = row["group"], row["sample"]
    if min(group, sample, row["prompt_idx"]) < 0:
        yield f"the group {group}, prompt_idx {row['prompt_idx']} or sample {sample}, which are numbers from 0"
    if run is not None and group >= run.prompts_per_step:
        yield f"the group {group}, and a step of the run has {run.prompts_per_step} prompts"
    if run is not None and sample >= run.samples_per_prompt:
        yield f"the sample {sample}, and a prompt of the run has {run.samples_per_prompt} samples"
    if group < last_group:
        yield f"the group {group} behind the group {last_group}"


def _find_number_problems(row: Mapping[str, Any]) -> Iterator[str]:
    rewards = {
        "reward": row["reward"],
        **{f"reward_parts.{to_text(name)}": part for name, part in row["reward_parts"].items()},
    }
    yield from (f"the {name} nan" for name, reward in rewards.items() if reward is not None and math.isnan(reward))
    for index in np.flatnonzero(~np.isfinite(row["logprobs"])).tolist():
        yield f"the log-probability {row['logprobs'][index]} at its sampled token {index + 1}"


def _find_token_problems(row: Mapping[str, Any], run: RunFacts | None) -> Iterator[str]:
    token_ids = row["token_ids"]
    # Of numbers with gaps Arrow makes an array of another type.
    if token_ids.dtype != np.int32 or any(
        row[name] is not None and row[name].dtype != np.float32 for name in _BY_TOKEN
    ):
        yield "no number at some tokens"
    if len(token_ids) and token_ids.min() < 0:
        yield f"the token {token_ids.min()}"
    if len(token_ids) and run is not None and token_ids.max() >= run.vocab:
        yield f"the token {token_ids.max()}, and the model has {run.vocab} tokens"


def _find_span_problems(row: Mapping[str, Any]) -> Iterator[str]:
    tokens, before, sampled = len(row["token_ids"]), 0, 0
    segments = row.get("segment_tokens") or [tokens]
    if row.get("segment_tokens") and not (None not in segments and min(segments) > 0 and sum(segments) == tokens):
        yield f"segments of {to_text(segments)} tokens, and {tokens} tokens"
    bounds = list(pairwise([0, *accumulate(segments)]))
    for span in row["spans"]:
        if span is None or len(span) != 3 or None in span:
            yield f"the span {to_text(span)}, which is not start, end and version"
        start, end, _ = span
        # The first token of a sequence is not sampled: no token predicts it.
        if not (before <= start <= end and any(first < start and end <= last for first, last in bounds)):
            yield f"the span {to_text(span)}, which does not follow the others among its {tokens} tokens"
        before, sampled = end, sampled + end - start
    for name in _BY_TOKEN:
        if row[name] is not None and len(row[name]) != sampled:
            yield f"{len(row[name])} {name} of {sampled} sampled tokens"
