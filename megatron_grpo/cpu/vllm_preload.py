"""What the processes of a CPU engine have in common, imported once by the process that they are forked from."""

import contextlib
import gc
import importlib

MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.model_loader",
    "megatron_grpo.cpu.vllm_worker",
    "megatron_grpo.weights.refit.worker",
)

with contextlib.suppress(ImportError):
    # With this vLLM names its processes for ps. It finds the memory of the name only before the environment changes.
    importlib.import_module("setproctitle").getproctitle()
for module in MODULES:
    importlib.import_module(module)
gc.collect()
gc.freeze()  # a collection in a forked process would write to, and so copy, every page of what is imported here
