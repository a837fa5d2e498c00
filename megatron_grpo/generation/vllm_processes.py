"""What the processes of an engine find in their environment, before vLLM is imported and starts them."""

from __future__ import annotations

import os

from megatron_grpo.cluster.process_log import level_of_libraries
from megatron_grpo.generation.vllm_arguments import VllmSettings
from megatron_grpo.generation.vllm_cores import prepare_cpu_processes
from megatron_grpo.generation.vllm_plugin import ENGINE_MARKER
from megatron_grpo.platform.device import current_platform


def prepare_processes(settings: VllmSettings, name: str) -> None:
    """Set vLLM's variables in this process, from which the others have them; what the user has set stays.

    Args:
        settings: what the engine is started with.
        name: the engine's name in logs and heartbeats.
    """
    os.environ[ENGINE_MARKER] = name
    os.environ.setdefault("VLLM_LOGGING_LEVEL", level_of_libraries())
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")  # of the others, when one has died
    if settings.config.engine.batch_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    if current_platform().name == "cpu":
        prepare_cpu_processes(settings)
