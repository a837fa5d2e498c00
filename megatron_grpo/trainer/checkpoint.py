"""A rank's part of a Megatron distributed checkpoint: weights, optimizer, schedule and random state."""

from __future__ import annotations

import logging
import pickle
import queue
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async, fully_parallel
from megatron.core.dist_checkpointing.strategies.async_utils import TemporalAsyncCaller
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import LoraConfig
from megatron_grpo.models.hf_weights import is_adapter_parameter
from megatron_grpo.observability.file_digests import FileRecord, FileRecords, record_file
from megatron_grpo.observability.run_files import sync
from megatron_grpo.platform.device import detect_platform, environment
from megatron_grpo.trainer.plain_pickles import check_layer_state, describe_refusal, open_checkpoint

if TYPE_CHECKING:
    from megatron_grpo.trainer.rank import ModelRank


@contextmanager
def errors_in_one_line(failure: str) -> Iterator[None]:
    """Turn a checkpoint's error into a RunError of one line, which begins with `failure`."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException) and error.failures:  # its text is the traceback of every rank
            cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, pickle.UnpicklingError):
            cause = describe_refusal("one of its tensors", cause)
        if isinstance(cause, RunError):
            raise RunError(f"{failure}: {cause}") from error
        line = str(cause).strip().partition("\n")[0]
        raise RunError(f"{failure}: {type(cause).__name__}: {line}") from error


logger = logging.getLogger(__name__)


class ResultsFile:
    """The queue in which Megatron-Core's checkpoint writer leaves its result: a file.

    The writer is this process or one forked from it. A full pipe would block it, and the manager process that
    Megatron-Core would start for each save takes seconds to import everything, and outlives a killed rank. The file has
    no name, so no other process can write what is unpickled here.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # open until the result is taken

    def put(self, result: Any) -> None:
        pickle.dump(result, self._file)
        self._file.flush()

    def get_nowait(self) -> Any:
        """Take the result; raises queue.Empty if it is incomplete."""
        with self._file as file:
            file.seek(0)
            try:
                return pickle.load(file)  # safe: written by a process that this one forked
            except (EOFError, pickle.UnpicklingError):
                raise queue.Empty from None


@dataclass(frozen=True, slots=True)
class _PendingWrite:
    folder: str
    completions: Sequence[Callable[[], None]]
    """Collective calls that complete the checkpoint when all ranks have written."""
    records: ResultsFile  # of the files that this rank wrote


def _write_and_record(write: Callable[..., None], records: ResultsFile, rank: int, buckets: Any, results: Any) -> None:
    """Write this rank's files and compute their digests.

    They are read back at once, while the system has them in memory.
    """
    write(rank, buckets, results)
    paths = [
        path for bucket in buckets if (path := Path(bucket[0])).exists()
    ]  # `results` tells why one was not written
    with ThreadPoolExecutor(len(buckets)) as pool:
        records.put(dict(zip((path.name for path in paths), pool.map(record_file, paths), strict=True)))


def _take_records(folder: str, records: ResultsFile) -> FileRecords:
    """Take the records of a rank's files; the first rank adds metadata."""
    by_name: dict[str, FileRecord] = records.get_nowait()
    if dist.get_rank() == 0:
        for path in (path for path in Path(folder).iterdir() if path.suffix != DEFAULT_SUFFIX):
            sync(path)
            by_name[path.name] = record_file(path)
    return by_name


# Optimizer state is stored per parameter, in the parameter's own shape, so that another layout can load it. With this
# value Megatron-Core calls the methods of its optimizer that `trainer.optimizer.replace_state_methods` replaces.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


class RankCheckpoint:
    """Writes and reads a rank's part of checkpoints; all methods but `is_written` are collective."""

    def __init__(self, rank: ModelRank) -> None:
        self._rank = rank
        self._pending: _PendingWrite | None = None  # in the background
        self._writer = TemporalAsyncCaller()
        # Megatron-Core can compare all ranks' entries, which every rank receives. Their layout never changes.
        self._is_compared = False

    def save(self, folder: str, background: bool = False) -> FileRecords:
        """Write to an existing, empty folder; in the background `finish` has to follow.

        Returns records of the files that this rank wrote, by name; in the background `finish` does.
        """
        assert self._pending is None, "one checkpoint is written at a time"
        rank = self._rank
        with errors_in_one_line(f"{folder} cannot be written"):
            filesystem_async.get_write_results_queue = ResultsFile
            state = build_sharded_state(rank, is_loading=False)
            state["random"] = _build_random_state(rank)
            if rank.reference_moved and rank.reference is not None:
                state["reference"] = _build_reference_weights(rank.reference)
            # Replicas have equal weights and divide their writing. Each rank writes its part of the optimizer's state.
            default = serialization.get_default_save_sharded_strategy()
            replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
            strategy = fully_parallel.FullyParallelSaveStrategyWrapper(default, replicas)
            request = dist_checkpointing.save(
                state,
                folder,
                strategy,
                validate_access_integrity=not self._is_compared,
                async_sharded_save=True,  # it returns calls that write, and that complete the checkpoint
                content_metadata=dict(_METADATA),
                async_strategy="mcore",  # Megatron-Core's own writer; the default needs a package for GPUs
            )
            self._is_compared = True
            records = ResultsFile()
            if request.async_fn is None:  # this rank has nothing to write
                records.put({})
            else:
                request = request._replace(async_fn=partial(_write_and_record, request.async_fn, records))
            if not background:
                request.execute_sync()
                return _take_records(folder, records)
            self._pending = _PendingWrite(folder, request.finalize_fns, records)
            # A forked process sees host tensors as they were at the fork. Tensors on a GPU are copied to the host
            # before it, and the copies are held until the process has ended.
            self._writer.schedule_async_call(request)
            if self._writer.process is not None:
                logger.info("process %d writes this rank's part of the checkpoint", self._writer.process.pid)
            return {}

    def is_written(self) -> bool:
        """True once the background process has ended."""
        return self._writer.process is None or not self._writer.process.is_alive()

    def finish(self) -> FileRecords:
        """Wait until all ranks have written, else raise a RunError; then write the metadata.

        Returns records of the files that this rank wrote, by name.
        """
        assert self._pending is not None, "no checkpoint is written in the background"
        pending, self._pending = self._pending, None
        with errors_in_one_line("a checkpoint cannot be written"):
            self._writer.close()  # without a deadline: the driver has one, and names the ranks that are overdue
            dist.barrier()
            for complete in pending.completions:
                complete()
            return _take_records(pending.folder, pending.records)

    def record_files(self, folder: str, names: Sequence[str]) -> FileRecords:
        """Read this rank's share of files in a folder; returns their records."""
        with errors_in_one_line(f"{folder} cannot be read"):
            return {name: record_file(Path(folder, name)) for name in names[dist.get_rank() :: dist.get_world_size()]}

    def load(self, folder: str) -> None:
        """Load a folder that `save` wrote; RunError: optimizer.distributed or policy.lora differ."""
        rank = self._rank
        # An optimizer on the host stores the classes that it is made of, and torch loads only classes listed as safe.
        param_groups = rank.optimizer.optimizer.param_groups
        settings = (value for param_group in param_groups for value in param_group.values())
        classes: list[Any] = [value for value in settings if isinstance(value, type)]
        with errors_in_one_line(f"{folder} cannot be loaded"), torch.serialization.safe_globals(classes):
            state = build_sharded_state(rank, is_loading=True)
            common = open_checkpoint(folder)
            _require_same_kind(common, state, rank.shape.head.role)
            # Random state belongs to a rank, so it is restored only in the layout that wrote it. Nothing the model
            # computes draws from it as long as the model has no dropout.
            if common["layout"] == state["layout"]:
                state["random"] = _build_random_state(rank)
            if common["reference_moved"] and rank.reference is not None:
                state["reference"] = _build_reference_weights(rank.reference)
            # Each replica reads a part of the weights and sends it to the others, but all of its own optimizer state.
            default = serialization.get_default_load_sharded_strategy(folder)
            replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
            strategy = fully_parallel.FullyParallelLoadStrategyWrapper(default, replicas)
            weights = {name: state.pop(name) for name in ("model", "reference") if name in state}
            compare = {"validate_access_integrity": not self._is_compared}
            loaded = dist_checkpointing.load(weights, folder, strategy, **compare)
            loaded |= dist_checkpointing.load(state, folder, **compare)
            self._is_compared = True
            load_weights(rank.chunks, loaded["model"])
            if "reference" in loaded:
                assert rank.reference is not None
                load_weights(rank.reference, loaded["reference"])
                rank.reference_moved = True
            rank.optimizer.load_state_dict(loaded["optimizer"], loaded["schedule_steps"])
            if "random" in loaded:
                torch.set_rng_state(loaded["random"]["torch"])
                get_cuda_rng_tracker().set_states(loaded["random"]["tracker"])


def _require_same_kind(common: dict[str, Any], state: dict[str, Any], section: str) -> None:
    adapters = common.get("lora")  # checkpoints from before adapters have no such entry
    if adapters != state["lora"]:
        was, now = (LoraConfig(**(lora or {"rank": 0})).description for lora in (adapters, state["lora"]))
        raise RunError(f"the checkpoint was written with {was}, and this run has {now}")
    if common["distributed_optimizer"] != state["distributed_optimizer"]:
        was, now = (str(entries["distributed_optimizer"]).lower() for entries in (common, state))
        raise RunError(f"the checkpoint was written with {section}.optimizer.distributed={was}, and this run has {now}")


def build_sharded_state(rank: ModelRank, *, is_loading: bool) -> dict[str, Any]:
    """Build a rank's checkpoint entries, without random state and reference."""
    metadata = dict(_METADATA)  # Megatron adds its process groups
    model = build_sharded_weights(rank.gather_chunks(), metadata)
    optimizer = rank.optimizer.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule_steps": rank.optimizer.scheduler.num_steps,
        "reference_moved": rank.reference_moved,
        "distributed_optimizer": rank.optimizer.settings.distributed,
        "lora": asdict(rank.config.lora) if rank.config.lora.rank else None,
        "layout": {name: getattr(rank.config.parallel, name) for name in ("tensor", "pipeline", "context", "data")},
    }


def build_sharded_weights(chunks: Sequence[GPTModel], metadata: dict[str, Any] | None) -> dict[str, Any]:
    """Build a rank's weight entries by chunk; with adapters, only the adapters'."""
    # Megatron-Core adds process groups to the checkpoint's metadata.
    by_chunk = {str(index): chunk.sharded_state_dict(metadata=metadata) for index, chunk in enumerate(chunks)}
    if not any(is_adapter_parameter(name) for weights in by_chunk.values() for name in weights):
        return by_chunk
    return {
        index: {name: entry for name, entry in weights.items() if is_adapter_parameter(name)}
        for index, weights in by_chunk.items()
    }


def load_weights(chunks: Sequence[GPTModel], loaded: dict[str, Any]) -> None:
    """Load weights in the form of `build_sharded_weights`; RunError: forged layer state."""
    is_partial = any(is_adapter_parameter(name) for weights in loaded.values() for name in weights)
    for number, chunk in enumerate(chunks):
        weights = loaded[str(number)]
        if detect_platform().name == "cuda":  # layers on a CPU have no such state
            weights = {
                name: check_layer_state(name, value) if "_extra_state" in name and isinstance(value, Tensor) else value
                for name, value in weights.items()
            }
        # Transformer Engine pickles the scales of the FP8 recipe `delayed`, and loads them only with this variable.
        with environment(NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE="1"):
            # A checkpoint of adapters lacks the base model's weights.
            missing, unexpected = chunk.load_state_dict(weights, strict=not is_partial)
        assert not unexpected, f"no parameter is called {unexpected}"
        assert not any(map(is_adapter_parameter, missing)), f"nothing was loaded for {missing}"


def _build_reference_weights(reference: Sequence[GPTModel]) -> dict[str, Any]:
    weights = build_sharded_weights(reference, dict(_METADATA))
    add_prefix_for_sharding(weights, "reference.")
    return weights


def _build_random_state(rank: ModelRank) -> ShardedObject:
    process_groups = rank.chunks[0].pg_collection
    axes = (process_groups.pp, process_groups.tp, process_groups.dp_cp)
    state = {"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    sizes, ranks = tuple(axis.size() for axis in axes), tuple(axis.rank() for axis in axes)
    return ShardedObject("random_state", state, sizes, ranks, replica_id=0)
