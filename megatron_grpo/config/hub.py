"""Names on the Hugging Face hub, told from paths."""

from __future__ import annotations

import os
import re
from pathlib import Path

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def is_hub_name(path: str) -> bool:
    """Whether this names something on the Hugging Face hub ("Qwen/Qwen3-8B") rather than a file or folder."""
    return _HUB_NAME.fullmatch(path) is not None and not os.path.exists(Path(path).parent)
