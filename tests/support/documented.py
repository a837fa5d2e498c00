"""The names that docs/metrics.md gives to metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def undocumented(metrics: Iterable[str]) -> set[str]:
    """Those of the metrics that the page lacks."""
    known = "|".join(_patterns())
    return {name for name in metrics if not re.fullmatch(known, name)}


def _patterns() -> set[str]:
    """First columns of the tables: whole names, with NAME for any name, and endings of the name before them."""
    patterns = {name.replace("NAME", r"\w+") for name in re.findall(r"`(val_[\w/]+)`", PAGE.read_text())}
    for cell in re.findall(r"^\| (`.*?) \|", PAGE.read_text(), flags=re.MULTILINE):
        whole = ""
        for name in re.findall(r"`([\w/]+)`", cell):
            if not name.startswith("_"):
                whole = name
                patterns.add(name.replace("NAME", r"\w+"))
            else:
                parts = whole.split("_")
                patterns |= {"_".join(parts[:count]) + name for count in range(1, len(parts) + 1)}
    return patterns
