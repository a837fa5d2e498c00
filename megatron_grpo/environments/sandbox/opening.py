"""Finds the strongest isolation that this machine allows, and refuses when that is less than what is required."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_grpo.config.sandbox_schema import LEVELS, Level, SandboxConfig
from megatron_grpo.environments.sandbox.sandbox import Sandbox, SandboxUnavailableError

_ADVICE: dict[Level, str] = {
    "limits": "it needs Linux with /proc",
    "namespaces": "allow user namespaces (user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns of "
    "sysctl; in a container --security-opt seccomp=unconfined or --cap-add SYS_ADMIN)",
    "filtered": "install libseccomp (Debian, Ubuntu: libseccomp2)",
}


def open_sandbox(config: SandboxConfig, python: str | None = None) -> Sandbox:
    """A sandbox of the strongest level that a trial program runs at.

    Args:
        config: limits, and the least level that is accepted.
        python: interpreter of Python programs; None: this one's.

    Raises:
        SandboxUnavailableError: nothing as strong as `sandbox.required` works here; says why, and what would help.
    """
    refused: Level | None = None
    reason = ""
    for level in reversed(LEVELS[LEVELS.index(config.required) :]):
        sandbox = Sandbox(config, level, python)
        why_not = _why_not(sandbox)
        if why_not is None:
            return sandbox
        refused, reason = level, why_not
    assert refused is not None
    raise SandboxUnavailableError(
        f"sandbox.required={config.required} is not possible on this machine: {reason}; {_ADVICE[refused]}, or accept "
        f"less with sandbox.required={LEVELS[max(LEVELS.index(config.required) - 1, 0)]} or run where it is possible"
    )


def _why_not(sandbox: Sandbox) -> str | None:
    """Why a trial program does not run as it should; None: it does."""
    if not Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists():
        return "the kernel does not list the children of processes, so their memory cannot be watched"
    try:
        finished = sandbox.run_python("print('ready')")
    except SandboxUnavailableError as error:
        return str(error)
    if finished.stdout == "ready\n":
        return None
    said = finished.stderr.strip()[-200:]
    return f"a trial program ended by {finished.ending}, exit code {finished.exit_code}: {said}"
