"""The keys of the sandbox, in which programs run that a model wrote."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron_grpo.config.section import Positive, Seconds, Section

Level = Literal["limits", "namespaces", "filtered"]
LEVELS: tuple[Level, ...] = ("limits", "namespaces", "filtered")
"""How a program is kept apart, the weakest first."""


@dataclass(kw_only=True)
class SandboxConfig(Section):
    """Programs that the model wrote: how far they are kept apart, and what they may use."""

    required: Level = "filtered"
    """The least that is accepted; a machine that allows less is refused. limits: time, memory, output, but the network
    and all files of this user are open; namespaces: also no network, no other process, no files but the system's;
    filtered: also a filter of system calls (libseccomp), without which kernel memory has no limit."""

    wall_time_s: Seconds = 10.0
    """Longest time of a program; then it is killed."""

    cpu_time_s: Positive = 10
    """Processor time of each process of a program, in whole seconds."""

    memory_mb: Positive = 512
    """Memory of all processes of a program together, in MiB."""

    folder_mb: Positive = 64
    """Size of a program's own folder, in MiB; it lies in memory, and is gone with the program."""

    processes: Positive = 16
    """Processes and threads of a program."""

    output_kb: Positive = 64
    """Largest output of a program, in KiB; one that writes more is killed."""

    readable: list[str] = field(default_factory=list)
    """Further folders that programs may read, under the same path, such as packages that they import."""
