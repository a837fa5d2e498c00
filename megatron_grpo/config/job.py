"""Reads jobs: flat YAML files (`job=FILE`) whose fields each set a key."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from megatron_grpo.config.errors import Problem, suggest_name, to_text
from megatron_grpo.config.keys import find_key, is_section, load_tables, read_keys
from megatron_grpo.config.loop_names import translate_key
from megatron_grpo.config.loop_schema import LOOPS
from megatron_grpo.config.outside_files import YAML_BYTES, parse_yaml
from megatron_grpo.config.overrides import MAX_NESTING
from megatron_grpo.config.suggestions import describe_counterpart

# By field of a job, and of its environment: the key that it sets. An environment's other fields are keys of env.<name>.
SETTING_OF_FIELD, DATA_OF_FIELD = load_tables("job_fields.yaml").values()
# The field for data and scoring: the name of an environment, or a mapping with its name and fields.
ENVIRONMENT = "environment"


def read_job_file(path: str) -> dict[Hashable, Any]:
    """Read a job file's fields; ValueError: the reason, without the file's name."""
    file = Path(os.path.expanduser(path))
    try:
        if not file.is_file():
            raise ValueError("no such file; give a YAML file of fields such as ratio_clip_max")
        if file.stat().st_size > YAML_BYTES:
            raise ValueError(f"has {file.stat().st_size / 2**20:.0f} MiB; a job is a few fields in YAML")
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text") from None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    content = parse_yaml(text, MAX_NESTING)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"must be a mapping of fields, not {type(content).__name__}")
    return content


@dataclass(slots=True)
class Job:
    """The content of a job file."""

    file: str = ""
    environment: str | None = None  # task name; None: the recipe's environments
    settings: dict[str, Any] = field(default_factory=dict)  # values by key; shared loop keys have GRPO's name
    fields: dict[str, str] = field(default_factory=dict)  # by key, the field that set it
    needs_no_validation: bool = False  # True if the job has its own training data but no held-out prompts
    is_environment_name: bool = False  # True if `environment` is a name alone, without fields
    command_line_keys: set[str] = field(default_factory=set)
    """Keys on the command line, which override those of the job."""
    problems: list[Problem] = field(default_factory=list)

    def has_option(self, options: Sequence[str]) -> bool:
        """True for an environment of conf/env whose type the job keeps."""
        return self.environment in options and f"env.{self.environment}.type" not in self.settings

    def apply(self, composed: DictConfig, options: Sequence[str]) -> list[Problem]:
        """Write the settings into a composed configuration; return the environment's problems.

        `options` are the environments in conf/env; any other one replaces those of the recipe.
        """
        if self.environment is not None and not self.has_option(options):
            if self.is_environment_name and self.environment not in composed.env:
                names = sorted({*options, *map(str, composed.env)})
                text = f"no such environment; there is {', '.join(names)}, or give a mapping that describes one"
                return [Problem(f"{self.file}: {ENVIRONMENT}={self.environment}", text)]
            if not self.is_environment_name:
                OmegaConf.update(composed, "env", {self.environment: {}}, merge=False, force_add=True)
        settings = self.settings
        if self.needs_no_validation and "data.val_path" not in self.command_line_keys:
            # The prompts of the recipe's validation belong to another task.
            settings = {"data.val_path": None, **settings}
        for key, value in settings.items():
            # A shared key has one value in both sections, whichever algorithm runs.
            for name in {translate_key(loop, key) for loop in LOOPS}:
                OmegaConf.update(composed, name, value, force_add=True)
        return []


def read_job(arguments: Sequence[str], overrides: Mapping[str, str]) -> Job:
    """Read the job of arguments job=FILE; empty if there are none.

    `overrides` are the values of the other arguments by key, under either algorithm's name; they override the job.
    """
    job = Job(command_line_keys={translate_key("grpo", key) for key in overrides})
    if not arguments:
        return job
    job.file = arguments[-1].partition("=")[2]
    try:
        content = read_job_file(job.file)
    except ValueError as error:
        job.problems.append(Problem(f"job={job.file}", str(error)))
        content = {}
    for name, value in content.items():
        if name == ENVIRONMENT:
            _read_environment(job, value)  # adds settings for the data and for env.<name>
        elif name in SETTING_OF_FIELD:
            _add_setting(job, name, SETTING_OF_FIELD[name], value)
        else:
            job.problems.append(_describe_unknown_field(job, str(name), [*SETTING_OF_FIELD, ENVIRONMENT]))
    if len(arguments) > 1:
        job.problems.append(Problem(" ".join(arguments), "one run takes one job"))
    # The command line overrides a job, as it overrides a recipe.
    job.settings = {key: value for key, value in job.settings.items() if key not in job.command_line_keys}
    job.fields = {key: name for key, name in job.fields.items() if key in job.settings}
    if "env" in job.command_line_keys:
        job.environment = None
    return job


def _read_environment(job: Job, value: Any) -> None:
    job.is_environment_name = isinstance(value, str)
    fields = {"name": value} if isinstance(value, str) else value
    if not isinstance(fields, Mapping):
        text = "must be the name of an environment, or a mapping with its name"
        job.problems.append(Problem(f"{job.file}: {ENVIRONMENT}={to_text(value)}", text))
        return
    name = fields.get("name", fields.get("type"))
    if not isinstance(name, str) or not name.isidentifier():
        text = "must be the name of the environment, in letters, digits and underscores"
        job.problems.append(Problem(f"{job.file}: {ENVIRONMENT}.name={to_text(name)}", text))
        return
    job.environment = name
    job.settings["data.task_name"], job.fields["data.task_name"] = name, f"{ENVIRONMENT}.name"
    environment_keys = {key.rpartition(".")[2] for key in read_keys() if key.startswith("env.<name>.")}
    known_fields = ["name", *DATA_OF_FIELD, *sorted(environment_keys)]
    for part, part_value in fields.items():
        key = f"env.{name}.{part}" if part in environment_keys else DATA_OF_FIELD.get(part)
        if key is not None:
            _add_setting(job, f"{ENVIRONMENT}.{part}", key, part_value)
        elif part != "name":
            job.problems.append(_describe_unknown_field(job, str(part), known_fields, f"{ENVIRONMENT}."))
    job.needs_no_validation = "dataset" in fields and "validation_dataset" not in fields


def _add_setting(job: Job, name: str, key: str, value: Any) -> None:
    if _is_plain(value):
        job.settings[key], job.fields[key] = value, name
        return
    text = f"must be {read_keys()[find_key(key) or ''].type} (it sets {key})"
    job.problems.append(Problem(f"{job.file}: {name}={to_text(value)}", text))


def _is_plain(value: object) -> bool:
    # YAML also knows sets, bytes and dates; a text with ${ would be resolved as the value of another key.
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float) or (isinstance(value, str) and "${" not in value)


def _describe_unknown_field(job: Job, name: str, fields: Sequence[str], prefix: str = "") -> Problem:
    advice = describe_counterpart(name, "grpo") if not prefix else None
    if advice is None and not prefix and (find_key(name) or is_section(name)):
        advice = "a job is flat and has fields of its own; keys go on the command line or into a recipe"
    text = suggest_name(name, fields, f"{prefix}{{}}") if advice is None else f"; {advice}"
    return Problem(f"{job.file}: {prefix}{name}", f"unknown field{text}")
