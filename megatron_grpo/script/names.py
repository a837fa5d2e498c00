"""Names that a script gives and that become parts of keys."""

from __future__ import annotations

import re
from typing import Any

from megatron_grpo.config.errors import ConfigError, Problem

_FINE = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*|0|[1-9][0-9]*")


def check_name(name: Any, argument: str, section: str) -> None:
    """Refuse a name that no key of an override can have.

    Args:
        name: key of the mapping that was given.
        argument: the mapping ("val_dataset").
        section: the section of the configuration that gets the name ("data.val_sets").

    Raises:
        ConfigError: it is none.
    """
    if not _FINE.fullmatch(str(name)):
        text = (
            f"cannot be a name in {section}.NAME, whose keys have dots between their parts; use letters (a-z, A-Z), "
            "digits, _ and -, and a letter or _ first (or digits alone)"
        )
        raise ConfigError([Problem(f"{argument}[{name!r}]", text)])
