"""A rank leaves no temporary files behind when Ray ends its process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import os
from megatron_grpo.trainer.actor import RankActor

RankActor.list_gpus = lambda rank: []  # Ray, which is not started here, is asked for them
RankActor("policy rank 0", 0, 1).import_packages()
os._exit(0)
"""


@pytest.mark.slow
def test_the_imports_of_a_rank_make_no_folder_of_wandb(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", CODE], check=True, env=environment, capture_output=True)
    assert [entry.name for entry in tmp_path.iterdir() if "wandb" in entry.name] == []
