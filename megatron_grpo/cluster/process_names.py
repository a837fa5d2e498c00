"""Names of a run's processes, as they stand in messages and name the files of their logs."""

from __future__ import annotations

ENGINE_NAME = "generation engine {}".format
RANK_NAME = "policy rank {}".format
WORKER_NAME = "rollout worker {}".format
