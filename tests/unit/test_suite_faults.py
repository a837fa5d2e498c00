"""benchmarks/suite_faults.yaml: sixty faults, each with one place in the package as it is."""

from collections import Counter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FAULTS = yaml.safe_load((ROOT / "benchmarks" / "suite_faults.yaml").read_text())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["name"])
def test_a_fault_has_one_place_and_leaves_python(fault: dict[str, str]) -> None:
    text = (ROOT / fault["file"]).read_text(encoding="utf-8")
    assert text.count(fault["before"]) == 1, f"change `before` of {fault['name']!r} with {fault['file']}"
    compile(text.replace(fault["before"], fault["after"]), fault["file"], "exec")


def test_each_part_has_ten_faults() -> None:
    assert set(Counter(fault["part"] for fault in FAULTS).values()) == {10}
    assert len({fault["name"] for fault in FAULTS}) == len(FAULTS) == 60
