"""Environment variables of a Ray that a run starts itself; Ray reads some when it is imported, so they come first."""

from __future__ import annotations

import os
import secrets
import sys

LOCAL_MARKER = "MEGATRON_GRPO_LOCAL"
"""Set in every process of a run whose Ray is its own: all of them are on this machine."""

SETTINGS = {
    LOCAL_MARKER: "1",
    # Of process groups between policy ranks, and of vLLM's.
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray hides the GPUs from processes that ask for none by overwriting CUDA_VISIBLE_DEVICES; ours choose themselves.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Nodes drain for half a minute otherwise, long after everything of the run has ended.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    # Ray's own lets anything else on the machine go first, on a laptop all the time.
    "RAY_worker_niceness": "0",
}


def prepare_ray_environment() -> None:
    """Set what is not set yet. Does nothing once Ray is imported: half of it would be read and half not.

    Ray's servers listen on every address of the machine, and whoever may talk to them can run code; so a Ray that is
    started here answers only to holders of a token drawn for this run.
    """
    if "ray" in sys.modules:
        return
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
