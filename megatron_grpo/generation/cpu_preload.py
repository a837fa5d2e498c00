"""Imports that all processes of a CPU engine need, made once by the process that they are forked from."""

import contextlib
import gc
import importlib

MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.model_loader",
    "megatron_grpo.generation.cpu_worker",
    "megatron_grpo.weight_sync.engine_worker",
)

gc.disable()  # a fifth of the time of these imports
with contextlib.suppress(ImportError):
    # vLLM names its processes for ps with this module, which finds the name's memory only in an unchanged environment.
    importlib.import_module("setproctitle").getproctitle()
for module in MODULES:
    importlib.import_module(module)
gc.collect()
gc.freeze()  # a collection in a forked process would write to every page that is imported here, and so copy it
gc.enable()
