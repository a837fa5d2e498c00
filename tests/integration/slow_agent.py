"""An agent whose finished work is written down, and which waits at a sample until it is let go."""

import os
import time
from pathlib import Path
from typing import Any

from megatron_grpo.data.scores import ModelAccess
from tests.integration.example_agent import twice

WORK = "MEGATRON_GRPO_TEST_WORK"
"""Environment variable with a folder; a file `wait` in it holds up every agent that begins after `done` is long."""
DONE_FIRST = 40


async def work(prompt: str, access: ModelAccess, **columns: Any) -> int:
    """As `twice`; a line in `done` for each."""
    folder = Path(os.environ[WORK])
    works = folder / "done"
    while (folder / "wait").exists() and works.exists() and len(works.read_text().splitlines()) >= DONE_FIRST:
        time.sleep(0.1)
    result = await twice(prompt, access, **columns)
    with works.open("a") as file:
        file.write(f"{prompt}\n")
    return result
