"""Post-training on Megatron-Core; `train` starts a run from a script, as the command line does."""

import os
import sys


def _search_user_folders_last() -> None:
    """Move the working folder to the end of the import path."""
    # Python first searches the folder in which `python -m` or `python -c` is started, and Ray's workers that of the
    # driver: a file like random.py in it would hide a module. A script's path and PYTHONPATH keep their order.
    searches_working_folder = (os.path.basename(sys.argv[0]) if sys.argv else "") in ("-m", "-c", "default_worker.py")
    library = os.path.dirname(os.__file__)
    if not searches_working_folder or library not in sys.path:
        return
    requested = {os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder}
    installed = (sys.prefix, sys.base_prefix)
    first = sys.path[: sys.path.index(library)]
    last = [path for path in first if not path.startswith(installed) and os.path.abspath(path) not in requested]
    sys.path[:] = [path for path in sys.path if path not in last] + last


_search_user_folders_last()

import importlib.util  # noqa: E402  # only now is the standard library's found first
from typing import Any  # noqa: E402


def _leave_clone() -> None:
    """Take the modules of the installed package in place of a clone's."""
    # Started in a clone, Python finds this folder first. Only an installation makes packages of the folders conf/ and
    # kernels/ beside it; one that is not editable has its own copies, and other processes of a run import those.
    if importlib.util.find_spec("megatron_grpo.conf") is None:
        folders = [os.path.join(path, __name__) for path in sys.path]
        __path__[:] = next(([folder] for folder in folders if os.path.isdir(os.path.join(folder, "conf"))), __path__)


_leave_clone()

__all__ = ["Callback", "ConfigError", "RunError", "train"]

_MODULES = {
    "train": "megatron_grpo.api",
    "Callback": "megatron_grpo.run.user_objects",
    "ConfigError": "megatron_grpo.config.errors",
    "RunError": "megatron_grpo.config.errors",
}


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(_MODULES[name]), name)
