"""Names of processes, in messages and of log files."""

from __future__ import annotations

ENGINE_NAME = "generation engine {}".format
RANK_NAME = "policy rank {}".format
WORKER_NAME = "rollout worker {}".format
