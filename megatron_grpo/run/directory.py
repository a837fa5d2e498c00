"""The folder of a run: names of its files, its lock, and the configuration of its last start."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from megatron_grpo.cluster.heartbeat import HEARTBEATS_FOLDER, identify_machine, read_heartbeats
from megatron_grpo.cluster.process_log import DRIVER, LOGS_FOLDER
from megatron_grpo.config.algorithms import choose_imported, find_algorithm
from megatron_grpo.config.conversion import convert_values, refuse_other_loops
from megatron_grpo.config.errors import ConfigError, Problem, RunError, to_text
from megatron_grpo.config.hiding import hide_secrets
from megatron_grpo.config.keys import build_values, flatten
from megatron_grpo.config.loop_names import translate_key
from megatron_grpo.config.loop_schema import LOOPS
from megatron_grpo.config.outside_files import open_to_append, parse_yaml, read_json, read_yaml
from megatron_grpo.config.overrides import is_composition
from megatron_grpo.config.schema import MISSING, Config
from megatron_grpo.config.started_values import find_untrusted_values
from megatron_grpo.config.suggestions import describe_unknown_key
from megatron_grpo.data.identity import find_training_difference, find_validation_differences, identify, read_identity
from megatron_grpo.data.specs import find_task_templates, list_conversation_formats
from megatron_grpo.models.checkpoint_model import POLICY_FOLDER as POLICY_FOLDER
from megatron_grpo.models.source import adopt_families, compute_model_digest, find_local_folder, is_made_before_run
from megatron_grpo.observability.run_files import CONFIG_FILE, write_json, write_text
from megatron_grpo.run.engine_requests import forget_requests
from megatron_grpo.run.user_code import keep_user_code, list_code_changes

DATA_FILE = "data.json"  # digests of the run's data (`DataIdentity`)
# The chat template of the run's prompts, if it is not the model folder's; exports have it.
TEMPLATE_FILE = "chat_template.jinja"
FORMAT_FILE = "conversation_format.json"  # settings that the scores of a reward model depend on; exports have them
ENGINES_FILE = "engines.json"  # settings that each engine reported when it started
LOCK_FILE = ".lock"
ALIVE_S = 60.0  # a driver that has written its heartbeat within these seconds is alive
STOP_FILE = "stop"  # a file that the user puts into a run's folder to end and save training after the current step
LAUNCH_FOLDER = "launch"  # in a run's folder: what was submitted, and the record of each launch
RECORD_FILE = "launches.jsonl"  # in this folder
# A file that a run leaves in its folder if it ended because its job's time was nearly up: the job is queued again.
OUT_OF_TIME_FILE = "out_of_time"
MODEL_FILE = "model.json"  # path and digest of the model that the run began with
# Folder of PPO's value model inside a checkpoint, beside POLICY_FOLDER.
VALUE_FOLDER = "megatron_value"
# Keys that identify a run, beside the content of its model and its training data. All others may change on a resume.
IDENTITY = (
    *("algorithm", *(f"{loop}.seed" for loop in LOOPS), "debug.train"),
    *("data.response_key", "data.chosen_key", "data.rejected_key"),
    *("data.from_rollouts", "data.min_reward", "data.best_of_group"),
)


@contextmanager
def lock_run_directory(path: str) -> Iterator[Path]:
    """Create or reopen a run's folder and lock it.

    A new folder is removed if it stays empty. RunError: another driver holds the lock, or the folder is not writable.
    """
    folder = Path(os.path.abspath(path))
    try:
        new_folders = [path for path in (folder, *folder.parents) if not path.exists()]  # the innermost first
        # Only the user who starts the run may look into it: it holds prompts, responses and weights.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = open_to_append(folder / LOCK_FILE)
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
        for file in (STOP_FILE, OUT_OF_TIME_FILE):  # of an earlier start
            (folder / file).unlink(missing_ok=True)
        forget_requests(folder)
        unused_files = {LOCK_FILE}
        try:
            yield folder
        except ConfigError:
            unused_files.add(LOGS_FOLDER)  # the message has the reason, too
            raise
        finally:
            if folder in new_folders and folder.is_dir() and unused_files >= set(os.listdir(folder)):
                shutil.rmtree(folder / LOGS_FOLDER, ignore_errors=True)
                (folder / LOCK_FILE).unlink(missing_ok=True)
                with suppress(OSError):  # another process uses one of them by now
                    for new_folder in new_folders:
                        new_folder.rmdir()


def is_in_use(path: str) -> bool:
    """True if a live run holds the lock of the folder."""
    try:
        with open(os.open(Path(path, LOCK_FILE), os.O_RDONLY | os.O_NONBLOCK)) as lock:  # it may be a pipe
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def is_alive(run_dir: Path) -> bool:
    """True if the run's driver lives here, or has written its heartbeat lately elsewhere."""
    driver = read_heartbeats(run_dir / LOGS_FOLDER / HEARTBEATS_FOLDER).get(DRIVER)
    if driver is None:
        return False
    return is_in_use(str(run_dir)) if driver.machine == identify_machine() else time.time() - driver.beat < ALIVE_S


def record_start(folder: Path, config: Config, tokenizer: Any = None) -> None:
    """Write configuration, user's code, chat template and digests into a run's folder.

    The link `latest` beside the folder then points at it. Raises ConfigError if the training data is not that of the
    run in the folder: it changed during the start-up.
    """
    identity = identify(config)
    compare_data(folder, config)  # once more: the data may have changed since the check
    if identity.is_comparable:
        write_json(folder / DATA_FILE, dataclasses.asdict(identity))
    if not (folder / MODEL_FILE).exists() and (digest := _compute_digest(config)) is not None:
        write_json(folder / MODEL_FILE, {"path": config.policy.model.path, "digest": digest})
    (folder / TEMPLATE_FILE).unlink(missing_ok=True)
    templates = {*find_task_templates(config, tokenizer).values()}
    if len(templates) == 1 and (template := templates.pop()) is not None:
        write_text(folder / TEMPLATE_FILE, template)
    (folder / FORMAT_FILE).unlink(missing_ok=True)
    formats = list_conversation_formats(config)
    if len(formats) == 1 and formats[0]:
        write_json(folder / FORMAT_FILE, formats[0])
    keep_user_code(folder, config)
    write_text(folder / CONFIG_FILE, yaml.safe_dump(build_values(config), sort_keys=False))
    link = folder.parent / "latest"
    if folder.name == link.name or (link.exists() and not link.is_symlink()):
        return
    # Renamed into place, so that `latest` always points at a run, also while two runs start.
    temporary = folder.parent / f".latest.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(folder.name)
    temporary.rename(link)


def read_config_file(file: Path) -> dict[str, Any]:
    """Read the configuration that `record_start` wrote.

    Raises FileNotFoundError, or ValueError if the file cannot be read or is not a configuration; the text names it.
    """
    try:
        values = read_yaml(file)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    if values is None:
        raise ValueError(f"{file} is empty")
    if not isinstance(values, dict):
        raise ValueError(f"{file} is damaged: it does not hold the configuration of a run")
    return values


def compare_with_last_start(folder: Path, config: Config) -> list[str]:
    """List the changes since the run's last start, one a key.

    Raises ConfigError if the folder belongs to another run, or its configuration cannot be read.
    """
    file, subject = folder / CONFIG_FILE, f"run_dir={folder}"
    try:
        recorded = read_config_file(file)
        if "algorithm" not in recorded:
            raise ValueError(f"{file} is damaged: it does not hold the configuration of a run")
    except FileNotFoundError:
        return []
    except ValueError as error:
        advice = "Put it back, choose another run_dir, or delete it if this is the same run"
        raise ConfigError([Problem(subject, f"{error}; it tells whose folder this is. {advice}")]) from None
    refuse_other_loops(recorded, config.algorithm)  # an earlier version recorded the keys of all algorithms
    values = build_values(config)
    before = dict(flatten({section: value for section, value in recorded.items() if section in values}))
    now = dict(flatten(values))
    # Keys that an earlier version did not have were at their defaults.
    defaults = dict(flatten(build_values(Config(algorithm=config.algorithm))))
    before |= {key: value for key, value in now.items() if key not in before and defaults.get(key) == value}
    changed_keys = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    key = next((key for key in IDENTITY if key in changed_keys and key in before), None)  # not in older runs
    reason = None if key is None else f"its {key} is {before.get(key)}, this one's is {now[key]}"
    reason = reason or _describe_model_difference(folder, before, config)
    if reason is not None:
        raise ConfigError([Problem(subject, f"holds another run: {reason}; choose another run_dir")])
    remarks = [*compare_data(folder, config), *list_code_changes(folder, config)]
    # An earlier version may have recorded a secret.
    return [*(hide_secrets(f"{key}: {before.get(key)} -> {now.get(key)}") for key in changed_keys), *remarks]


def _describe_model_difference(folder: Path, before: Mapping[str, Any], config: Config) -> str | None:
    try:
        digest = read_json(folder / MODEL_FILE)["digest"]
    except (OSError, ValueError, LookupError, TypeError):
        digest = None
    current, key = _compute_digest(config), "policy.model.path"
    path, now = before.get(key), config.policy.model.path
    # Paths count only where one of the contents is not known.
    if None in (digest, current):
        return None if path == now else f"its {key} is {path}, this one's is {now}"
    text = f"{key}={now} is another model than the run began with, or its files have changed since"
    return None if digest == current else text


def _compute_digest(config: Config) -> str | None:
    """Compute the digest of the policy's model, if it exists and can be read."""
    path = config.policy.model.path
    is_elsewhere = path == MISSING or is_made_before_run(config, path)
    try:
        model = None if is_elsewhere else find_local_folder(path)
    except ValueError:  # preflight says why it cannot be read
        model = None
    return None if model is None else compute_model_digest(model)


def compare_data(folder: Path, config: Config) -> list[str]:
    """List the changes of the data since the last start.

    Raises ConfigError if the training data is another, so that the position to continue from would mean other rows.
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
    # Without digests the paths are compared.
    try:
        path = dict(flatten(read_config_file(folder / CONFIG_FILE))).get("data.train_path")
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ConfigError(
            [Problem(subject, f"{error}; it tells whose folder this is. Put it back, or {advice}")]
        ) from None
    current = config.data.train_path
    is_same = os.path.exists(current) and os.path.realpath(str(path)) == os.path.realpath(current)
    if path != current and not is_same:
        text = f"holds another run: its data.train_path is {path}, this one's is {current}; {advice}"
        raise ConfigError([Problem(subject, text)])
    text = f"{folder / DATA_FILE} is missing: whether the data is that of the earlier start is not known"
    return [text] if now.is_comparable else []


def load_run_config(
    run_dir: Path, overrides: Sequence[str], *, is_trusted: bool = False, sections: Sequence[str] = ("",)
) -> Config:
    """Load the configuration of a run's last start, with changes.

    Raises ConfigError if an override (section.key=VALUE in YAML) is not understood or makes the configuration wrong,
    or if a recorded value starts something (see `override_values`), and ValueError if the folder has no configuration,
    or one that cannot be read.
    """
    file = run_dir / CONFIG_FILE
    try:
        values = read_config_file(file)
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist; a checkpoint has to stay in its run directory") from None
    config = override_values(values, overrides, str(file), run_dir, is_trusted=is_trusted, sections=sections)
    if problems := adopt_families(config, sections, run_dir):
        raise ConfigError(problems)
    return config


def override_values(
    values: dict[str, Any],
    overrides: Sequence[str],
    source: str,
    run_dir: Path | None = None,
    *,
    is_trusted: bool = False,
    sections: Sequence[str] = ("",),
) -> Config:
    """Build the configuration of recorded values, which `overrides` change.

    Args:
        values: the recorded values.
        overrides: changes, each section.key=VALUE.
        source: file that recorded the values, for messages.
        run_dir: folder of the run that recorded them, which keeps the user's code.
        is_trusted: recorded values may start programs, code and connections.
        sections: beginnings of the keys that may start something in this command; "" stands for all.

    Raises:
        ConfigError: a change is not understood or makes values wrong, or a recorded value starts something.
    """
    keys: list[str] = []
    try:
        if is_trusted and "algorithm" in values:
            find_algorithm(str(values["algorithm"]), None if run_dir is None else str(run_dir))  # imported here
    except ValueError as error:
        raise ConfigError([Problem(f"algorithm={to_text(values['algorithm'])}", str(error))]) from None
    algorithm = choose_imported(values.get("algorithm"))
    for override in overrides:
        name, _, text = override.partition("=")
        if override.startswith("+") or is_composition(name):
            advice = "cannot be composed with the recorded configuration of a run; change single keys, KEY=VALUE"
            raise ConfigError([Problem(override, advice)])
        # The algorithm's section has the shared keys.
        keys.append(translate_key(find_algorithm(algorithm).section, name))
        *parents, last = keys[-1].split(".")
        node: Any = values
        for section in parents:
            node = node.setdefault(section, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            raise ConfigError([describe_unknown_key(name, algorithm)])
        try:
            node[last] = parse_yaml(text)
        except ValueError:
            advice = "not understood; lists are written [a,b], and other signs need quotes around the value"
            raise ConfigError([Problem(f"{name}={to_text(text)}", advice)]) from None
    foreign = refuse_other_loops(values, algorithm)
    config, problems = convert_values(values, algorithm)
    if foreign or problems or config is None:
        raise ConfigError([*foreign, *problems] or [Problem(source, "is not the configuration of a run")])
    if not is_trusted and (problems := find_untrusted_values(config, source, keys, sections)):
        raise ConfigError(problems)
    return config
