"""GRPO and PPO post-training on Megatron-Core; `train` starts a run from a script, as the command line does."""

import os
import sys


def _search_user_folders_last() -> None:
    """Move the working folder to the end of the import path, so that a file like random.py in it hides no other module.

    Python first searches the folder in which `python -m` or `python -c` is started, and Ray's workers that of the
    driver. The order of a script's path, and the place of PYTHONPATH, are kept.
    """
    starts = (os.path.basename(sys.argv[0]) if sys.argv else "") in ("-m", "-c", "default_worker.py")
    library = os.path.dirname(os.__file__)
    if not starts or library not in sys.path:
        return
    kept = {os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder}
    installed = (sys.prefix, sys.base_prefix)
    first = sys.path[: sys.path.index(library)]
    moved = [one for one in first if not one.startswith(installed) and os.path.abspath(one) not in kept]
    sys.path[:] = [one for one in sys.path if one not in moved] + moved


_search_user_folders_last()

import importlib  # noqa: E402  # only now is the standard library's found first
from typing import Any  # noqa: E402

__all__ = ["Callback", "ConfigError", "RunError", "train"]

_WHERE = {
    "train": "megatron_grpo.api",
    "Callback": "megatron_grpo.run.user_objects",
    "ConfigError": "megatron_grpo.config.errors",
    "RunError": "megatron_grpo.config.errors",
}


def __getattr__(name: str) -> Any:
    """The names in `__all__`, imported when they are first used."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(_WHERE[name]), name)
