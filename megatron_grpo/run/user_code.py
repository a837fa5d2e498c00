"""The user's code in a run's folder, so that a resume and a replay have it in any working folder."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType

from megatron_grpo.config.paths import CODE_FOLDER, list_import_folders
from megatron_grpo.config.schema import Config
from megatron_grpo.config.section import IMPORTS
from megatron_grpo.config.started_values import list_started_values


def keep_user_code(run_dir: Path, config: Config) -> None:
    """Copy the files of the user's imported modules into the run's folder."""
    for path, file in list_user_files(config).items():
        copy = run_dir / CODE_FOLDER / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())


def list_code_changes(run_dir: Path, config: Config) -> list[str]:
    """List the files that differ from those of the run's last start."""
    return [
        f"{file}: is not as it was at the last start, {copy}"
        for path, file in list_user_files(config).items()
        if (copy := run_dir / CODE_FOLDER / path).is_file() and copy.read_bytes() != file.read_bytes()
    ]


def list_user_files(config: Config) -> dict[Path, Path]:
    """List the files of imported user modules, by their path in an import folder."""
    names = [str(started.value) for started in list_started_values(config) if started.effect == IMPORTS]
    folders = [Path(folder) for folder in list_import_folders()]
    files = {}
    for module in _walk_modules([name.replace(":", ".") for name in names], folders):
        file = Path(str(module.__file__))
        folder = next(folder for folder in folders if folder in file.parents)
        files[file.relative_to(folder)] = file
    return files


def _walk_modules(names: list[str], folders: list[Path]) -> Iterator[ModuleType]:
    """Yield the user's modules that hold these objects, and those that they import."""
    visited_names = set()
    while names:
        name = names.pop()
        module, parent = sys.modules.get(name), name.rpartition(".")[0]
        names += [parent] if parent else []  # packages around it; and an object's path ends in its name
        if module is None or name in visited_names or not _is_of_user(module, folders):
            continue
        visited_names.add(name)
        yield module
        names += _list_imports(module)


def _list_imports(module: ModuleType) -> Iterator[str]:
    """List the names that a module imports, functions included."""
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), module.__package__)
            yield from (f"{source}.{alias.name}" for alias in node.names)  # its parent is the module, or it is one


def _is_of_user(module: ModuleType, folders: list[Path]) -> bool:
    file = getattr(module, "__file__", None)
    if file is None or not file.endswith(".py") or module.__name__.partition(".")[0] == "megatron_grpo":
        return False
    is_installed = any(Path(prefix) in Path(file).parents for prefix in (sys.prefix, sys.base_prefix))
    return not is_installed and any(folder in Path(file).parents for folder in folders)
