"""Files of the figures of recorded steps, for replays: run_dir/replay/step_N.parquet."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch.rollout_checks import find_file_problem
from megatron_grpo.config.errors import select_first_line
from megatron_grpo.config.outside_files import parse_file_json, require_regular

if TYPE_CHECKING:
    import pyarrow as pa

REPLAY_FOLDER = "replay"
_METADATA_KEY = b"megatron_grpo.replay"
# Distributions whose versions are recorded, where they are installed.
_RECORDED_LIBRARIES = "megatron_grpo torch megatron-core transformer-engine triton vllm transformers numpy"
WATCHED_TOKENS = 32  # most tokens of a step whose hidden states are recorded
_STATE = "hidden state"
_MOST_ROWS = 2**20  # of a file; a run writes one for each tensor, and for each watched token at each point


@dataclass(frozen=True, slots=True)
class TensorFigure:
    """The norm and a sketch of a Hugging Face tensor."""

    kind: Literal["weight", "gradient", "update"]
    """A weight before the step; the gradient of an optimizer step, before clipping; or the change of a weight over all
    optimizer steps of the step."""
    optimizer_step: int  # number of the optimizer step in the step, from 0; 0 for weights and updates
    name: str
    norm: float
    sketch: list[float]  # random projections (`trainer.step_record.sketch`)


def find_library_versions() -> dict[str, str]:
    versions = {}
    for name in _RECORDED_LIBRARIES.split():
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def choose_watched_tokens(tokens: int) -> NDArray[np.int64]:
    # The choice depends on the number of tokens alone, so that every layout records the same tokens.
    return np.sort(np.random.default_rng(tokens).choice(tokens, min(tokens, WATCHED_TOKENS), replace=False))


@dataclass(frozen=True, slots=True)
class StateFigure:
    """A sketch of a token's hidden state at one point (`trainer.hidden_states`)."""

    point: str
    token: int  # index of the token in the step, whose sequences lie end to end
    sketch: list[float]  # random projections (`trainer.step_record.sketch_rows`), rounded to float32


def sum_states(ranks: Iterable[Sequence[tuple[str, NDArray[np.int64], NDArray[np.float64]]]]) -> list[StateFigure]:
    """Add up the ranks' partial sketches of hidden states.

    Of each rank: (point, token indices [n], sketches [n, projections]).
    """
    sums: dict[tuple[str, int], NDArray[np.float64]] = {}
    for point, tokens, sketches in chain.from_iterable(ranks):
        for token, sketch in zip(tokens.tolist(), sketches, strict=True):
            sums[point, token] = sums[point, token] + sketch if (point, token) in sums else sketch
    # Rounded to float32, because the order in which a layout adds its parts changes float64's last digits.
    return [StateFigure(point, token, total.astype(np.float32).tolist()) for (point, token), total in sums.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Figures of a step; its log-probabilities are in the file of its rollouts."""

    loss: float
    grad_norm: float
    learning_rate: float
    tensors: list[TensorFigure]
    config: dict[str, Any]  # the configuration of the run when it made the step
    device: str  # name that the vendor gives the device of a rank; "cpu" without a GPU
    versions: dict[str, str] = field(default_factory=find_library_versions)
    states: list[StateFigure] = field(default_factory=list)  # hidden states of watched tokens; empty: not recorded


def locate_figures_file(run_dir: Path, step: int) -> Path:
    return run_dir / REPLAY_FOLDER / f"step_{step}.parquet"


def write_figures(file: Path, figures: StepFigures) -> None:
    """Write the figures of a step, completely or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    metadata = asdict(replace(figures, tensors=[], states=[]))
    del metadata["tensors"], metadata["states"]
    rows = [asdict(tensor) for tensor in figures.tensors]
    rows += [
        {"kind": _STATE, "name": state.point, "token": state.token, "sketch": state.sketch} for state in figures.states
    ]
    table = pa.Table.from_pylist(rows, _make_schema().with_metadata({_METADATA_KEY: json.dumps(metadata)}))
    file.parent.mkdir(parents=True, exist_ok=True)
    # The file gets its name when it is complete, so a run that is killed leaves no part of one.
    unfinished = file.with_name(f".{file.name}")
    if unfinished.is_symlink():  # in a folder from elsewhere, and leads to a file of the user's
        unfinished.unlink()
    pq.write_table(table, unfinished, compression="zstd")
    unfinished.rename(file)


def _make_schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema(
        {
            "kind": pa.string(),
            "optimizer_step": pa.int32(),
            "name": pa.string(),
            "norm": pa.float64(),
            "token": pa.int64(),
            "sketch": pa.list_(pa.float64()),
        }
    )


def read_figures(file: Path) -> StepFigures | None:
    """Read a file of `write_figures`; None: no file. ValueError if it is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pydantic import TypeAdapter, ValidationError

    if not file.exists():
        return None
    try:
        require_regular(file)
        metadata, schema = pq.read_metadata(file), pq.read_schema(file)
        if metadata.num_rows > _MOST_ROWS:
            raise ValueError(f"it has {metadata.num_rows} rows, and at most {_MOST_ROWS} are read")
        if problem := find_file_problem(file, metadata, schema, _make_schema()):
            raise ValueError(problem)
        values = parse_file_json((schema.metadata or {})[_METADATA_KEY])
        tensors, states = [], []
        for row in pq.read_table(file).to_pylist():
            token = row.pop("token", None)  # earlier versions have no such column
            if row["kind"] == _STATE:
                states.append({"point": row["name"], "token": token, "sketch": row["sketch"]})
            else:
                tensors.append(row)
        return TypeAdapter(StepFigures).validate_python({**values, "tensors": tensors, "states": states})
    except (pa.ArrowException, LookupError, TypeError, ValueError, OSError) as error:
        reason = select_first_line(error)
        if isinstance(error, ValidationError):
            details = error.errors(include_url=False)[0]
            reason = f"{'.'.join(map(str, details['loc']))}: {details['msg']}"
        raise ValueError(f"{file} is damaged, or was written by another version: {reason}") from None
