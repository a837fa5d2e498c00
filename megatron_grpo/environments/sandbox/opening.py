"""Finds the strongest isolation that this machine allows, and refuses when that is less than what is required."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_grpo.config.sandbox_schema import LEVELS, Level, SandboxConfig
from megatron_grpo.environments.sandbox.sandbox import Sandbox, SandboxUnavailableError
from megatron_grpo.environments.sandbox.syscalls import LIBRARY

_NAMESPACES_ADVICE = (
    "allow user namespaces (user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns of sysctl; in a "
    "container --security-opt seccomp=unconfined or --cap-add SYS_ADMIN), or install bubblewrap"
)


def open_sandbox(config: SandboxConfig, python: str | None = None) -> Sandbox:
    """A sandbox of the strongest level that a trial program runs at.

    Args:
        config: limits, and the least level that is accepted.
        python: interpreter of Python programs; None: this one's.

    Raises:
        SandboxUnavailableError: nothing as strong as `sandbox.required` works here; says why, and what would help.
    """
    reason = ""
    for sandbox in _possible(config, python):
        why_not = _why_not(sandbox)
        if why_not is None:
            return sandbox
        reason = why_not if sandbox.bubblewrap is None else f"{reason}; with bubblewrap: {why_not}"
    raise SandboxUnavailableError(
        f"sandbox.required={config.required} is not possible on this machine: {reason}; "
        f"{_advice(config.required, reason)}, or accept less "
        f"with sandbox.required={LEVELS[max(LEVELS.index(config.required) - 1, 0)]} or run where it is possible"
    )


def _advice(required: Level, reason: str) -> str:
    """What would help."""
    if required == "limits":
        return "it needs Linux with /proc"
    if LIBRARY in reason:
        return "install libseccomp (Debian, Ubuntu: libseccomp2)"
    return _NAMESPACES_ADVICE


def _possible(config: SandboxConfig, python: str | None) -> Iterator[Sandbox]:
    """The sandboxes that are good enough, the strongest first; with bubblewrap only what does not work without."""
    bubblewrap = None if os.geteuid() == 0 else shutil.which("bwrap", path="/usr/local/bin:/usr/bin:/bin")
    for level in reversed(LEVELS[LEVELS.index(config.required) :]):
        yield Sandbox(config, level, python)
        if level != "limits" and bubblewrap is not None:
            yield Sandbox(config, level, python, bubblewrap)


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
