"""Checks of names of files, Python objects, hub models and servers."""

from __future__ import annotations

import importlib
import inspect
import ipaddress
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from megatron_grpo.config.errors import Problem, RunError, to_text
from megatron_grpo.config.outside_files import require_regular

# Environment variable with the bearer token of servers and of the endpoint; no file of a run holds the token.
TOKEN_VARIABLE = "MEGATRON_GRPO_TOKEN"
LFS_POINTER = "is a pointer of Git LFS, not the file; fetch the file itself (git lfs pull), or download the model anew"


def check_readable(path: str | Path, kind: Literal["file", "folder"] = "file") -> str | None:
    """Find why a file or folder cannot be read; None: it can."""
    try:  # opened, because permission bits alone do not tell whether that works
        if kind == "folder":
            os.listdir(path)
        else:
            require_regular(Path(path))
            with open(path, "rb") as file:
                file.read(1)
    except (FileNotFoundError, NotADirectoryError):
        return f"no such {kind}"
    except IsADirectoryError:
        return "is a folder, not a file"
    except PermissionError:
        return "no permission to read it"
    except (OSError, ValueError) as error:  # ValueError: a pipe, or the path has a NUL character
        return f"cannot be read: {getattr(error, 'strerror', None) or str(error).removeprefix(f'{path} ')}"
    return None


def check_writable(key: str, path: str) -> Iterator[Problem]:
    """Report why a folder cannot be written to; it may not exist yet."""
    subject, folder = f"{key}={to_text(path)}", Path(os.path.abspath(path))
    # Only trying tells: permission bits say nothing of quotas, read-only disks and file systems of other machines.
    existing = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    if not os.path.isdir(existing):
        yield Problem(subject, f"{to_text(existing)} is not a folder, or is a link that leads nowhere; choose another")
        return
    try:
        with tempfile.TemporaryDirectory(dir=existing, prefix=".megatron_grpo_") as probe:
            Path(probe, *folder.relative_to(existing).parts).mkdir(parents=True, exist_ok=True)
    except PermissionError:
        yield Problem(subject, f"no permission to write in {existing}")
    except (OSError, ValueError) as error:  # ValueError: the path has a NUL character
        yield Problem(subject, f"cannot be made in {existing}: {getattr(error, 'strerror', None) or error}")


def import_object(module: str, name: str) -> Any:
    """Import an object; a ValueError's text continues a message of the setting."""
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ValueError(f"cannot be imported: {type(error).__name__}: {error}") from error


def is_import_path(name: str) -> bool:
    """True for module:NAME and module.NAME."""
    return re.fullmatch(r"\w+(\.\w+)*[:.]\w+", name) is not None


def import_value(path: str, folders: Sequence[str]) -> Any:
    """Import the value at module:NAME; a ValueError's text continues a message of the setting."""
    module, _, name = re.sub(r"\.(\w+)$", r":\1", path).partition(":")
    make_importable(folders)
    return import_object(module, name)


def import_callable(kind: str, path: str, *, instance: bool = False) -> Callable[..., Any]:
    """Import the callable at package.module.name, or package.module.object.name.

    With `instance`, a class is instantiated. RunError if the import fails, or the object is not callable.
    """
    module, _, name = path.rpartition(".")
    outer_module, _, holder = module.rpartition(".")
    try:
        try:
            function: Any = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            if not outer_module or error.name != module:
                raise
            function = getattr(getattr(importlib.import_module(outer_module), holder), name)
        if instance and inspect.isclass(function):
            function = function()
    except Exception as error:  # a user's module may raise anything while it is imported
        raise RunError(f"{kind} {path} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise RunError(f"{kind} {path} is {type(function).__name__}, which cannot be called")
    return function


CODE_FOLDER = "code"  # subfolder of a run's folder with the user's code that it began with


def list_import_folders(run_dir: str | None = None, imports: Iterable[str] = ()) -> tuple[str, ...]:
    """List the user's folders: working folder, PYTHONPATH, and maybe a run's code.

    Args:
        run_dir: folder of a run.
        imports: import paths of the run; its code is listed if the module of one of them is nowhere else.
    """
    folders = (os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep))
    working = tuple(dict.fromkeys(os.path.abspath(folder) for folder in folders if folder))
    if run_dir is None:
        return working
    # The code of a run that somebody else made may have the name of a package that is not installed, and that
    # libraries import where it is. So this folder is not on the path of a run whose modules are found without it.
    code = os.path.abspath(os.path.join(run_dir, CODE_FOLDER))
    search_path = [folder for folder in (*working, *sys.path) if folder != code]
    modules = {re.split("[.:]", path)[0] for path in imports}
    has_all = all(module in sys.builtin_module_names or PathFinder.find_spec(module, search_path) for module in modules)
    return working if has_all else (*working, code)


# Environment variable of a run's processes that names the user's families of models (`models.families`).
FAMILIES_VARIABLE = "MEGATRON_GRPO_FAMILIES"


def read_family_environment() -> dict[str, str]:
    """Read the variable that names families, for processes elsewhere."""
    return {FAMILIES_VARIABLE: os.environ[FAMILIES_VARIABLE]} if FAMILIES_VARIABLE in os.environ else {}


def set_family_environment(environment: dict[str, str]) -> None:
    """Set the variable that names families as another process has it."""
    os.environ.pop(FAMILIES_VARIABLE, None)
    os.environ.update(environment)


def make_importable(folders: Sequence[str]) -> None:
    """Append folders to this process's import path."""
    # The launchers, and Ray on other machines, start Python without the working folder on its path (-P). At the end of
    # the path a user's file hides no installed module.
    sys.path += [folder for folder in folders if folder not in sys.path]


SCRIPT_STREAM = "script:train_dataset"
"""Value of data.train_path for rows that a script's train_dataset streams (megatron_grpo.train)."""


def is_hub_name(path: str) -> bool:
    """True for a name on the Hugging Face hub, such as "Qwen/Qwen3-8B"."""
    # A name whose first part is a folder here is a misspelt path.
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path) is not None and not os.path.exists(Path(path).parent)


def read_token() -> str | None:
    """Read the bearer token from the environment."""
    return os.environ.get(TOKEN_VARIABLE) or None


def is_loopback(host: str) -> bool:
    """True if only this machine reaches a server on this host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_url(url: str) -> str | None:
    """Find the problem of a server's URL; None: it is fine."""
    advice = "give http://HOST:PORT or https://HOST:PORT"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"is not a URL: {error}; {advice}"
    if parts.scheme not in ("http", "https"):
        return f"has {f'the scheme {parts.scheme!r}' if parts.scheme else 'no scheme'}; {advice}"
    if not parts.hostname or port == 0:
        return f"names no host or port; {advice}"
    if parts.path.strip("/") or parts.query or parts.fragment:
        return f"has more than a host and a port; {advice}"
    return None


def is_lfs_pointer(file: Path) -> bool:
    """True for the text that stands for a file without Git LFS."""
    try:
        with file.open("rb") as opened:
            return opened.read(40).startswith(b"version https://git-lfs.github.com/spec/")
    except OSError:
        return False
