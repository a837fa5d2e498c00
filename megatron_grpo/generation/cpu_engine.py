"""A vLLM engine on a CPU: its arguments, its cores, and how its processes are forked.

Importing vLLM takes ten seconds of a core. vLLM spawns its processes, because a Ray actor must not be forked (a fork
lacks its threads), and OpenMP reads its number of threads at a process's start. So a process without threads imports
vLLM while the actor imports it too; the engine core is forked from that process, and the workers from the core. A model
of one rank has no worker: the core computes it.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import shutil
import uuid
from multiprocessing import forkserver, util
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.models.tokenizer_files import read_settings
from megatron_grpo.platform.device import environment
from megatron_grpo.platform.hooks import check_hooks

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_grpo.generation.engine_arguments import VllmSettings

CPU_BATCH_TOKENS = 4096  # of one forward pass; more when a single sequence may be longer

# The executor that runs a model of one rank in the engine core itself, without messages to and from a worker. Its short
# name, "uni", would become "mp" on a CPU: vLLM's spawned cores do not bind their OpenMP threads; ours do.
IN_CORE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"

SPIN_S = 0.002  # seconds that processes busy-wait for their next message before they sleep on a socket
RECHECK_MS = 20  # longest sleep: a wake-up is lost when two messages come within a millisecond of each other
SOCKETS = "VLLM_RPC_BASE_PATH"  # vLLM's environment variable for the folder of its processes' sockets


def make_cpu_arguments(settings: VllmSettings) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "distributed_executor_backend": IN_CORE if settings.config.parallel.ranks_per_engine == 1 else "mp",
        # For a prompt prefilled in two parts vLLM rewinds the request's generator, which torch refuses on a CPU.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(CPU_BATCH_TOKENS, settings.max_total_sequence_length),
        "kv_cache_memory_bytes": int(settings.config.engine.kv_cache_gib * 2**30),
        "worker_cls": "megatron_grpo.generation.cpu_worker.PipelineCPUWorker",
    }
    if settings.routed is not None:  # our record of experts lacks tokens from a prefix cache
        arguments["enable_prefix_caching"] = False
    model = read_settings(Path(settings.model_path) / "config.json")
    if {"ssm_state_size", "linear_key_head_dim"} & (model.keys() | model.get("text_config", {}).keys()):
        # vLLM caches states (of Mamba, of delta nets) of a prefix only where prompts may be prefilled in parts.
        arguments["enable_prefix_caching"] = False
    if "kv_lora_rank" in model:
        # Of processors with matrix tiles (AMX) vLLM would use them, in bfloat16 alone, with copies that no refit fills.
        arguments["attention_backend"] = "CPU_MLA"
        # vLLM's kernel reads the heads of such queries in wrong places; torch's operations do not.
        arguments["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
    return arguments


def prepare_cpu_processes(settings: VllmSettings) -> None:
    """Bind workers to cores, and begin to import vLLM, before this process does."""
    ranks = settings.config.parallel.ranks_per_engine
    total = settings.config.parallel.data * ranks
    cores = assign_cores(sorted(os.sched_getaffinity(0)), first=settings.index * ranks, ranks=ranks, total=total)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cores
    if settings.config.engine.enforce_eager:
        # vLLM would still compile the computation of each token's rank, for seconds, and nobody reads the ranks.
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
    os.environ.setdefault(SOCKETS, util.get_temp_dir())
    multiprocessing.set_forkserver_preload(["megatron_grpo.generation.cpu_preload"])
    with environment(OMP_NUM_THREADS=str(len(cores.split("|")[0].split(","))), **_preload_openmp()):
        forkserver.ensure_running()


def assign_cores(cores: list[int], *, first: int, ranks: int, total: int) -> str:
    """Assign cores to ranks [first, first + ranks) of `total`, in vLLM's form.

    That is one comma-separated core list per rank, joined by "|"; a rank without its own core shares one.
    """
    share = len(cores) // total  # 0: there are more ranks than cores
    numbers = range(first, first + ranks)
    assigned = [cores[rank * share : (rank + 1) * share] or [cores[rank % len(cores)]] for rank in numbers]
    return "|".join(",".join(map(str, rank_cores)) for rank_cores in assigned)


def patch_vllm() -> None:
    """Make vLLM's queues sleep, fork its processes, and mend its speculative decoding.

    Called in the actor, this sets how the core is started; called in the core, how the workers are started.
    """
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.utils import cpu_triton_utils
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    check_hooks("cpu")
    accept_recorder()
    cpu_triton_utils._expand_kernel_impl = repeat_per_token
    # The queues spin for a second after each message, on cores that a CPU run needs for training and sampling.
    shm_broadcast.SpinCondition.__init__.__defaults__ = (SPIN_S,)
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = RECHECK_MS
    utils.get_mp_context = ForkedCoreContext
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    for executor in (multiproc_executor, uniproc_executor):
        # The workers' rendezvous file: vLLM would make it in the system's temporary folder and leave it there.
        executor.get_file_store_init_method = lambda: f"file://{os.environ[SOCKETS]}/{uuid.uuid4().hex}"


def accept_recorder() -> None:
    """Let engines return experts that `RecordingCPUWorker` records.

    vLLM would refuse, since its own record needs a prefix cache and its second model runner.
    """
    from vllm.config import VllmConfig

    VllmConfig._verify_aux_output_compatibility = lambda _: None


def repeat_per_token(output: Tensor, values: Tensor, ends: Tensor, replaced: float, value: float, *_: Any) -> None:
    """Repeat requests' sampling settings for their proposed tokens; `replaced` becomes `value`.

    vLLM's function converts `output`, [tokens], to integers, and so writes into a copy. Temperatures were then whatever
    the memory held. `values` is [requests]; `ends`, [requests], counts the tokens up to each request's last one.
    """
    counts = ends.diff(prepend=ends.new_zeros(1)).long()
    output.copy_(values.masked_fill(values == replaced, value).repeat_interleave(counts))


class ForkedCore(ForkServerProcess):
    """Process of an engine core with the actor's environment."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "environment": dict(os.environ)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        os.environ.update(state.pop("environment"))
        self.__dict__.update(state)


class ForkedCoreContext(ForkServerContext):
    Process = ForkedCore


def remove_sockets() -> None:
    """Remove the processes' sockets, so that an engine that is killed leaves no files.

    Call it after the engine core has answered a call: the core makes the connection on which it answers in a thread,
    for which vLLM does not wait. If the socket's file is gone by then, that thread tries for ever and every call waits.
    """
    shutil.rmtree(util.get_temp_dir(), ignore_errors=True)


def _preload_openmp() -> dict[str, str]:
    """Make LD_PRELOAD with torch's OpenMP library, which vLLM's processes need."""
    preloaded = os.environ.get("LD_PRELOAD", "")
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or "omp" in preloaded:
        return {}
    torch = Path(spec.origin).parent
    folders = (torch.parent / "torch.libs", torch / "lib")
    libraries = [path for folder in folders for path in folder.glob("libgomp*.so*")]
    return {"LD_PRELOAD": ":".join(filter(None, [preloaded, *map(str, libraries[:1])]))}
