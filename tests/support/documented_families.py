"""The model families that docs/extending.md shows, added to the package as its text says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megatron_grpo.models.families import FAMILIES
from megatron_grpo.verification import ranks

_measure = ranks.measure
LIMITS = {"glm": 40, "dots1": 60}
"""Lines that a file of each family may have."""


def read_family_files() -> dict[str, str]:
    """The files in the text, by the name of their family."""
    text = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    files = [file for file in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "FAMILY = Family(" in file]
    return {re.search(r'name="(\w+)"', file)[1]: file for file in files}  # type: ignore[index]


def add_documented_families() -> None:
    for name, file in read_family_files().items():
        namespace: dict[str, Any] = {"__name__": f"documented_{name}"}
        exec(compile(file, f"docs/extending.md: {name}", "exec"), namespace)
        FAMILIES[name] = namespace["FAMILY"]


def measure_documented(task: ranks.Task, enter: Any) -> dict[str, Any]:
    """`ranks.measure` in a process that knows the families of the text."""
    add_documented_families()
    return _measure(task, enter)
