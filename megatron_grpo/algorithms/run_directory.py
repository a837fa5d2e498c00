"""The folder of a run: claimed by one driver at a time, with the configuration it was started with."""

from __future__ import annotations

import dataclasses
import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import Config

CONFIG_FILE = "config.yaml"
IDENTITY = ("algorithm", "policy.model.path", "data.train_path", "grpo.seed", "ppo.seed")
"""Keys that make a run another run; everything else may change between start and resume."""


@contextmanager
def claimed_run_directory(config: Config) -> Iterator[tuple[Path, list[str]]]:
    """Create or reopen config.run_dir and hold it until the run ends.

    Yields:
        The folder, and what differs from the configuration that it was last started with, one line per key.

    Raises:
        RunError: another driver holds the folder, or it belongs to another run.
    """
    folder = Path(config.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as lock:  # the kernel releases it when the driver dies, however it dies
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(f"run_dir={folder} is in use by another run that is still alive") from None
        changes = _changes(folder / CONFIG_FILE, config)
        temporary = folder / (CONFIG_FILE + ".tmp")
        temporary.write_text(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))
        temporary.rename(folder / CONFIG_FILE)
        _link_latest(folder)
        yield folder, changes


def _changes(file: Path, config: Config) -> list[str]:
    if not file.exists():
        return []
    before = dict(_leaves(yaml.safe_load(file.read_text())))
    now = dict(_leaves(dataclasses.asdict(config)))
    for key in IDENTITY:
        if before.get(key) != now[key]:
            raise RunError(
                f"run_dir={file.parent} holds another run: its {key} is {before.get(key)}, this one's is {now[key]}; "
                "choose another run_dir"
            )
    different = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    return [f"{key}: {before.get(key)} -> {now.get(key)}" for key in different]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _link_latest(folder: Path) -> None:
    """Point the `latest` link beside the folder at it."""
    link = folder.parent / "latest"
    if folder.name == link.name or (link.exists() and not link.is_symlink()):
        return
    temporary = folder.parent / f".latest.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(folder.name)
    temporary.rename(link)
