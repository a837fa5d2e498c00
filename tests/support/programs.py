"""Programs, scripts and files that tests run or write, from tests/data/programs.yaml."""

from pathlib import Path

import yaml


def read_programs(file: str) -> dict[str, str]:
    """The programs of a file of tests by name."""
    programs: dict[str, dict[str, str]] = yaml.safe_load(
        (Path(__file__).parents[1] / "data" / "programs.yaml").read_text()
    )
    return programs[file]
