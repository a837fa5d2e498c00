"""What an environment process answers when it is ready, and how long that may take."""

from __future__ import annotations

from dataclasses import dataclass

STARTUP_S = 900.0
"""Deadline in seconds for the start of an environment process, and of all rollout workers."""


@dataclass(frozen=True, slots=True)
class EnvironmentStatus:
    """Answer of an environment process that is ready."""

    node_id: str  # Ray's id of its machine
    pid: int
    multi_turn: bool
    has_agent: bool
    reads_token_ids: bool
