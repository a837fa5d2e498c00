"""The folder of a run: names of its files, its lock, and the configuration of its last start."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from megatron_grpo.cluster.process_log import LOGS_FOLDER
from megatron_grpo.config.errors import ConfigError, Problem, RunError
from megatron_grpo.config.keys import flatten
from megatron_grpo.config.schema import MISSING, Config
from megatron_grpo.data.identity import find_training_difference, find_validation_differences, identify, read_identity
from megatron_grpo.data.specs import find_task_templates
from megatron_grpo.models.source import compute_model_digest, find_local_folder, is_made_before_run
from megatron_grpo.observability.run_files import write_json, write_text

CONFIG_FILE = "config.yaml"
DATA_FILE = "data.json"
"""File with the digests of the run's data (`DataIdentity`)."""
TEMPLATE_FILE = "chat_template.jinja"
"""File with the chat template of the run's prompts, if it is not the model folder's; exports have it."""
ENGINES_FILE = "engines.json"
"""File with the settings that each engine reported when it started."""
LOCK_FILE = ".lock"
STOP_FILE = "stop"
"""A file that the user puts into a run's folder to end and save training after the current step."""
POLICY_FOLDER = "megatron"
"""Folder of the policy's distributed checkpoint inside a checkpoint."""
VALUE_FOLDER = "megatron_value"
"""Folder of the value model's distributed checkpoint inside a checkpoint of PPO."""
MODEL_FILE = "model.json"
"""File with the path and the digest of the model that the run began with."""
IDENTITY = ("algorithm", "grpo.seed", "ppo.seed", "debug.train")
"""Keys that identify a run, beside the content of its model and its training data.

All other keys may change between start and resume."""


@contextmanager
def lock_run_directory(path: str) -> Iterator[Path]:
    """Create or reopen a run's folder and lock it.

    A new folder is removed if it stays empty.

    Raises:
        RunError: another driver holds the lock, or the folder cannot be written.
    """
    folder = Path(os.path.abspath(path))
    try:
        new_folders = [path for path in (folder, *folder.parents) if not path.exists()]  # the innermost first
        # Only the user who starts the run may look into it: it holds prompts, responses and weights.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (folder / LOCK_FILE).open("a")
    except OSError as error:
        raise RunError(f"run_dir={folder} cannot be written: {error.filename}: {error.strerror}") from None
    # The kernel releases the lock when the driver dies, however it dies.
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = os.fstat(lock.fileno()).st_nlink > 0  # 0: removed by a start that just failed
        except OSError:
            is_locked = False
        if not is_locked:
            raise RunError(f"run_dir={folder} is in use by another run that is still alive")
        (folder / STOP_FILE).unlink(missing_ok=True)  # it was for an earlier start
        unused_files = {LOCK_FILE}
        try:
            yield folder
        except ConfigError:
            unused_files.add(LOGS_FOLDER)  # the message has the reason, too
            raise
        finally:
            _remove_if_unused(folder, new_folders, unused_files)


def is_in_use(path: str) -> bool:
    """Tell whether a live run holds the lock of the folder."""
    try:
        with Path(path, LOCK_FILE).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _remove_if_unused(folder: Path, new_folders: Sequence[Path], unused_files: Set[str]) -> None:
    """Remove new folders that have at most the unused files."""
    if folder not in new_folders or not folder.is_dir() or not unused_files >= set(os.listdir(folder)):
        return
    shutil.rmtree(folder / LOGS_FOLDER, ignore_errors=True)
    (folder / LOCK_FILE).unlink(missing_ok=True)
    for path in new_folders:
        try:
            path.rmdir()
        except OSError:  # another process uses it by now
            return


def record_start(folder: Path, config: Config, tokenizer: Any = None) -> None:
    """Write configuration, chat template and data digests into a run's folder.

    The link `latest` beside the folder then points at it.

    Raises:
        ConfigError: the training data is not that of the run in the folder, because it changed during the start-up.
    """
    identity = identify(config)
    compare_data(folder, config)  # once more: the data may have changed since the check
    if identity.is_comparable:
        write_json(folder / DATA_FILE, identity.as_json())
    if not (folder / MODEL_FILE).exists() and (digest := _compute_digest(config)) is not None:
        write_json(folder / MODEL_FILE, {"path": config.policy.model.path, "digest": digest})
    templates = {*find_task_templates(config, tokenizer).values()}
    template = templates.pop() if len(templates) == 1 else None
    (folder / TEMPLATE_FILE).unlink(missing_ok=True)
    if template is not None:
        write_text(folder / TEMPLATE_FILE, template)
    write_text(folder / CONFIG_FILE, yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))
    link = folder.parent / "latest"
    if folder.name == link.name or (link.exists() and not link.is_symlink()):
        return
    # Renamed into place, so that `latest` always points at a run, also while two runs start.
    temporary = folder.parent / f".latest.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(folder.name)
    temporary.rename(link)


def record_engines(folder: Path, settings: Sequence[Mapping[str, Any]]) -> None:
    """Write the settings that each engine reported into a run's folder."""
    write_json(folder / ENGINES_FILE, list(settings))


def read_config_file(file: Path) -> dict[str, Any]:
    """Read the configuration that `record_start` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file cannot be read or is not a configuration; the text names it.
    """
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{file} is damaged: it is not UTF-8 text") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from None
    if values is None:
        raise ValueError(f"{file} is empty")
    if not isinstance(values, dict):
        raise ValueError(f"{file} is damaged: it does not hold the configuration of a run")
    return values


def compare_with_last_start(folder: Path, config: Config) -> list[str]:
    """List the changes since the run's last start, one a key.

    Raises:
        ConfigError: the folder belongs to another run, or its configuration cannot be read.
    """
    file = folder / CONFIG_FILE
    try:
        before = dict(flatten(read_config_file(file)))
        if "algorithm" not in before:
            raise ValueError(f"{file} is damaged: it does not hold the configuration of a run")
    except FileNotFoundError:
        return []
    except ValueError as error:
        advice = (
            "it tells whose folder this is. Put it back, choose another run_dir, or delete it if this is the same run"
        )
        raise ConfigError([Problem(f"run_dir={folder}", f"{error}; {advice}")]) from None
    now = dict(flatten(dataclasses.asdict(config)))
    differences = (
        f"its {key} is {before.get(key)}, this one's is {now[key]}" for key in IDENTITY if before.get(key) != now[key]
    )
    reason = next(differences, None) or _describe_model_difference(folder, str(before.get("policy.model.path")), config)
    if reason is not None:
        raise ConfigError([Problem(f"run_dir={folder}", f"holds another run: {reason}; choose another run_dir")])
    remarks = compare_data(folder, config)
    changed_keys = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    return [*(f"{key}: {before.get(key)} -> {now.get(key)}" for key in changed_keys), *remarks]


def _describe_model_difference(folder: Path, path: str, config: Config) -> str | None:
    """Say how the model is another than that of the run."""
    now, subject = config.policy.model.path, f"policy.model.path={config.policy.model.path}"
    try:
        digest = json.loads((folder / MODEL_FILE).read_bytes())["digest"]
    except (OSError, ValueError, LookupError, TypeError):
        digest = None
    current = _compute_digest(config)
    # Paths count only where one of the contents is not known.
    if None not in (digest, current):
        reason = f"{subject} is another model than the run began with, or its files have changed since"
        return None if digest == current else reason
    return None if path == now else f"its policy.model.path is {path}, this one's is {now}"


def _compute_digest(config: Config) -> str | None:
    """Compute the digest of the policy's model, if it exists."""
    path = config.policy.model.path
    is_elsewhere = path == MISSING or is_made_before_run(config, path)
    model = None if is_elsewhere else find_local_folder(path)
    return None if model is None else compute_model_digest(model)


def compare_data(folder: Path, config: Config) -> list[str]:
    """List the changes of the data since the last start.

    Raises:
        ConfigError: the training data is another, so the position to continue from would mean other rows.
    """
    subject, advice = f"run_dir={folder}", "choose another run_dir"
    try:
        before, now = read_identity(folder / DATA_FILE), identify(config)
    except ValueError as error:
        text = f"{error}; put it back, {advice}, or delete it if you are sure that the data is the same"
        raise ConfigError([Problem(subject, text)]) from None
    if before is not None:
        reason = find_training_difference(before, now)
        if reason is not None:
            raise ConfigError([Problem(subject, f"holds another run: {reason}; put it back as it was, or {advice}")])
        return find_validation_differences(before, now)
    remarks = _compare_data_paths(folder, config)
    return remarks if now.is_comparable else []


def _compare_data_paths(folder: Path, config: Config) -> list[str]:
    """Compare the paths of the data, for folders without digests."""
    try:
        path = dict(flatten(read_config_file(folder / CONFIG_FILE))).get("data.train_path")
    except FileNotFoundError:
        return []
    now = config.data.train_path
    if path != now and not (os.path.exists(now) and os.path.realpath(str(path)) == os.path.realpath(now)):
        text = f"holds another run: its data.train_path is {path}, this one's is {now}; choose another run_dir"
        raise ConfigError([Problem(f"run_dir={folder}", text)])
    return [f"{folder / DATA_FILE} is missing: whether the data is that of the earlier start is not known"]
