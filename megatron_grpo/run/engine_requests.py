"""Files by which a run is asked to add or remove engines, and tells which it has."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from megatron_grpo.config.outside_files import read_json
from megatron_grpo.observability.run_files import write_json

ENGINES_FOLDER = "engines"  # in the run's folder
STATES_FILE = "states.json"
REQUESTS_FOLDER = "requests"


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request to add an engine, or to remove one."""

    remove: int | None = None  # number of the engine that leaves; None: one is added
    now: bool = False  # others begin its unfinished rollouts again; else it finishes them


@dataclass(frozen=True, slots=True)
class EngineState:
    """One engine of a run.

    Example: EngineState(number=2, state="serving", node="10.0.0.3", restarts=0)
    """

    number: int
    state: Literal["starting", "serving", "leaving"]
    node: str | None = None  # address; None: it has not started
    restarts: int = 0  # replacements
    unfinished: int = 0  # rollouts that a leaving engine still has


@dataclass(frozen=True, slots=True)
class EngineStates:
    """The engines of a run as it told last."""

    engines: Sequence[EngineState]
    refusal: str | None = None  # why none can be added or removed


def write_request(run_dir: Path, request: EngineRequest) -> None:
    """Ask a run to change its engines."""
    name = f"{time.time_ns()}_{secrets.token_hex(4)}.json"
    write_json(run_dir / ENGINES_FOLDER / REQUESTS_FOLDER / name, asdict(request))


def take_requests(run_dir: Path) -> Iterator[EngineRequest | str]:
    """Take new requests in order; texts tell of other files."""
    for file in sorted((run_dir / ENGINES_FOLDER / REQUESTS_FOLDER).glob("*.json")):
        request: EngineRequest | str = f"{file} is no request of python -m megatron_grpo.engines"
        with suppress(OSError, ValueError):
            request = TypeAdapter(EngineRequest).validate_python(read_json(file))
        file.unlink()
        yield request


def forget_requests(run_dir: Path) -> None:
    """Remove what an earlier start of the run has left."""
    folder = run_dir / ENGINES_FOLDER
    if folder.is_symlink():  # in a folder from elsewhere, and leads to a folder of the user's
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def write_states(run_dir: Path, states: EngineStates) -> None:
    """Tell which engines the run has, and await requests."""
    folder = run_dir / ENGINES_FOLDER
    (folder / REQUESTS_FOLDER).mkdir(parents=True, exist_ok=True)
    write_json(folder / STATES_FILE, asdict(states))


def read_states(run_dir: Path) -> EngineStates:
    """Read which engines a run has.

    FileNotFoundError: it has not told yet. ValueError: the file is damaged.
    """
    file = run_dir / ENGINES_FOLDER / STATES_FILE
    try:
        return TypeAdapter(EngineStates).validate_python(read_json(file))
    except ValidationError as error:
        fault = error.errors()[0]
        raise ValueError(f"{file} is damaged: {'.'.join(map(str, fault['loc']))}: {fault['msg']}") from None
