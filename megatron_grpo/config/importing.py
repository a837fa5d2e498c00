"""What a setting names by an import path: a user's function, class or processor."""

from __future__ import annotations

import importlib
from typing import Any


def imported(module: str, name: str) -> Any:
    """The object of this name in a module, which is imported for it.

    Raises:
        ValueError: there is no such module or name, or the module fails; says why, for a message that begins with the
            setting.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise ValueError(f"cannot be imported: {type(error).__name__}: {error}") from error
