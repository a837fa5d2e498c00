"""Programs in the strongest sandbox that this machine allows, and marks of tests that need a strong one."""

import pytest

from megatron_grpo.config.data_schema import LEVELS, IsolationLevel, SandboxConfig
from megatron_grpo.environments.sandbox.sandbox import ProgramResult, Sandbox, SandboxUnavailableError, open_sandbox

CONFIG = SandboxConfig(wall_time_s=8, cpu_time_s=5, memory_mb=200, folder_mb=8, processes=8, output_kb=16)


def strongest() -> IsolationLevel | None:
    """The strongest level that this machine allows."""
    try:
        return open_sandbox(SandboxConfig(required="limits")).level
    except SandboxUnavailableError:
        return None


STRONGEST = strongest()
isolated = pytest.mark.skipif(
    STRONGEST in (None, "limits"), reason="this machine allows no namespaces; sandbox.required refuses it"
)
filtered = pytest.mark.skipif(STRONGEST != "filtered", reason="this machine has no libseccomp or no namespaces")


def require_level(level: IsolationLevel) -> None:
    """Skip the test on a machine that does not allow this level."""
    if STRONGEST is None or LEVELS.index(level) > LEVELS.index(STRONGEST):
        pytest.skip(f"sandbox.required={level} is not possible on this machine, which allows {STRONGEST}")


def run(
    source: str, stdin: str = "", level: IsolationLevel | None = None, config: SandboxConfig = CONFIG
) -> ProgramResult:
    """A Python program at a level, by default the strongest there is."""
    return Sandbox(config, level or STRONGEST).run_python(source, stdin)
