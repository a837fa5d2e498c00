"""Checks of the folders that a run writes to, and of what they already hold."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.paths import unlistable, unwritable
from megatron_grpo.run.directory import LOCK_FILE, POLICY_FOLDER, VALUE_FOLDER, changes_since_last_start


def folder_problems(config: Config) -> Iterator[Problem]:
    """What is wrong with run_dir, prepare.folder, refit.directory and the checkpoint to start from."""
    if not config.run_dir.strip():
        yield Problem("run_dir=", "is empty; give a folder")
        return
    unusable = list(unwritable("run_dir", config.run_dir))
    yield from unusable
    if config.prepare.name is not None:
        yield from unwritable("prepare.folder", config.prepare.folder)
    if config.refit.directory is not None:
        yield from unwritable("refit.directory", config.refit.directory)
    if not unusable:
        yield from _earlier_run(config)
    yield from _resume(config)


def _earlier_run(config: Config) -> Iterator[Problem]:
    """What keeps a run from going on in a folder that is there."""
    folder = Path(os.path.abspath(config.run_dir))
    reason = unlistable(folder) if folder.exists() else None
    if reason is not None:
        yield Problem(f"run_dir={config.run_dir}", reason)
        return
    lock = folder / LOCK_FILE
    if lock.exists() and not os.access(lock, os.W_OK):
        yield Problem(f"run_dir={config.run_dir}", f"{lock} is another user's; choose another run_dir")
        return
    try:
        changes_since_last_start(folder, config)
    except ConfigError as error:
        yield from error.problems
    except OSError as error:
        yield Problem(f"run_dir={config.run_dir}", f"{error.filename} cannot be read: {error.strerror}")


def _resume(config: Config) -> Iterator[Problem]:
    resume, folder = config.checkpointing.resume, Path(config.run_dir, "checkpoints")
    names = (re.fullmatch(r"step_(\d+)", name) for name in (os.listdir(folder) if os.path.isdir(folder) else ()))
    steps = [int(match[1]) for match in names if match]
    subject = f"checkpointing.resume={resume}"
    if resume == "none" and steps:
        text = f"would begin anew, and {folder} has checkpoints up to step {max(steps)}; choose another run_dir"
        yield Problem(subject, f"{text}, or delete them")
    if resume in ("auto", "none") or steps:
        return
    reason = unlistable(resume)
    if reason is not None:
        yield Problem(subject, f"{reason}; give auto, none or the path of a checkpoint")
    elif not (Path(resume) / POLICY_FOLDER).is_dir():
        yield Problem(
            subject, f"is not a checkpoint: it has no folder {POLICY_FOLDER}; give RUN_DIR/checkpoints/step_N"
        )
    elif config.value_model is not None and not (Path(resume) / VALUE_FOLDER).is_dir():
        yield Problem(subject, f"{resume} is not a checkpoint of PPO: it has no value model")
