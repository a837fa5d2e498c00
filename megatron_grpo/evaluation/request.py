"""Reads and checks the command line of an evaluation."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_grpo.cluster.machines import fill_in_address, fill_in_gpus
from megatron_grpo.config.command_line import parse_arguments
from megatron_grpo.config.compose import compose_typed
from megatron_grpo.config.data_schema import DatasetConfig
from megatron_grpo.config.errors import ConfigError, Problem, to_text
from megatron_grpo.config.overrides import is_composition
from megatron_grpo.config.passthrough import check_owned_fields, select_passed_fields
from megatron_grpo.config.schema import Config
from megatron_grpo.config.secret_values import find_secret_problems
from megatron_grpo.config.section import PathText, Positive, Temperature
from megatron_grpo.config.started_values import TRUST
from megatron_grpo.data.sources import is_named_set
from megatron_grpo.data.specs import find_spec_problems
from megatron_grpo.evaluation.results import SAMPLES_FILE
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.source import adopt_families, find_model_shape
from megatron_grpo.preflight import machine_checks as machine
from megatron_grpo.preflight.data_checks import examine_rows
from megatron_grpo.preflight.engine_checks import check_sequences, find_engine_problems
from megatron_grpo.preflight.image_checks import check_sampled_images
from megatron_grpo.preflight.layout_checks import (
    check_devices,
    check_engines,
    count_engine_gpus,
    count_reward_model_gpus,
)
from megatron_grpo.preflight.model_file_checks import explain_unusable_model
from megatron_grpo.preflight.reward_checks import check_environments, check_system_prompts
from megatron_grpo.preflight.rules import Rule, evaluate_rules
from megatron_grpo.preflight.sampling_checks import check_requests, check_servers
from megatron_grpo.run.checkpoints import resolve_checkpoint
from megatron_grpo.run.directory import POLICY_FOLDER, load_run_config

DATA_KEY = "data.val_path"


@dataclass(frozen=True, slots=True)
class EvaluatedSet:
    """A set of prompts to evaluate on."""

    key: str
    """Key of the configuration that names the set's path."""
    rows: DatasetConfig


def _name_sets(config: Config, paths: Sequence[str]) -> dict[str, EvaluatedSet]:
    """Name the sets at paths, or the configuration's validation sets.

    The name is NAME of data.val_sets.NAME, else that of the file, or the complete path if files have the same name.
    """
    data = config.data
    if not paths:
        sets = [EvaluatedSet(key, dataset) for key, dataset in data.validation_sets.items()]
    else:
        sets = [
            EvaluatedSet(DATA_KEY, DatasetConfig(path=path, subset=data.subset, split=data.val_split))
            for path in map(os.path.expanduser, paths)
        ]
    names = []
    for evaluated in sets:
        path = evaluated.rows.path
        file_name = Path(path).name if is_named_set(path) or os.path.isdir(path) else Path(path).stem
        names.append(file_name if evaluated.key == DATA_KEY else evaluated.key.split(".")[2])
    return {
        (name if names.count(name) == 1 or evaluated.key != DATA_KEY else evaluated.rows.path): evaluated
        for name, evaluated in zip(names, sets, strict=True)
    }


def _find_set_problems(config: Config, sets: dict[str, EvaluatedSet]) -> Iterator[Problem]:
    if not sets:
        text = "is missing: a file, a folder, a hub name, or [file,file], with the prompts to respond to"
        yield Problem(DATA_KEY, text)
    for evaluated in sets.values():
        subject = f"{evaluated.key}={evaluated.rows.path}"
        report = examine_rows(config, subject, evaluated.rows)
        # The problem of a row names its line and stays; that of a set names the path alone and gets the key.
        for problem in report.problems:
            yield Problem(subject, problem.text) if problem.subject == evaluated.rows.path else problem
        if not report.problems and not report.rows:
            yield Problem(subject, "has no rows")


_OPTIONS = {
    "checkpoint": PathText,
    "output": PathText,
    "k": list[Positive],
    "samples": Positive,
    "temperature": Temperature,
    "compare": PathText,
    TRUST: bool,
}
# Keys of a run that an evaluation reads: it connects to no teacher and to no tracker.
_SECTIONS = ("policy.", "data.", "env.", "sandbox.", "cluster.", "generation.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """The command line of an evaluation, checked."""

    checkpoint: Path
    """A checkpoint of a run, or a folder in Hugging Face format."""
    is_run: bool
    """True for a checkpoint of a run, whose weights are exported first."""
    output: Path
    sets: dict[str, EvaluatedSet]
    """Sets of prompts, by their name in the results."""
    k: tuple[int, ...]
    samples: int
    """Responses to each prompt."""
    temperature: float
    compare: Path | None
    """Folder of an earlier evaluation to compare with."""
    config: Config
    """The configuration of the checkpoint's run with overrides, or one composed from the command line."""


def read_request(arguments: Sequence[str]) -> EvaluationRequest:
    """Read the request of a command line.

    Raises:
        ConfigError: the command line has problems; the text names every key.
        ValueError: the configuration of the checkpoint's run cannot be read.
    """
    parsed = parse_arguments(arguments, _OPTIONS, is_override=_is_override)
    checkpoint, output = (Path(parsed.require(name, "PATH")) for name in ("checkpoint", "output"))
    checkpoint = resolve_checkpoint(checkpoint)
    is_run = (checkpoint / POLICY_FOLDER).is_dir()
    if not is_run and not (checkpoint / "config.json").is_file():
        text = "is neither a checkpoint (RUN_DIR/checkpoints/step_N) nor a folder in Hugging Face format"
        raise ConfigError([Problem(f"checkpoint={checkpoint}", text)])
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError([Problem(f"output={output}", "already exists; give the path of a new folder")])
    files, overrides = [], []
    for override in parsed.overrides:
        key, _, value = override.partition("=")
        if key == DATA_KEY:
            files += [path.strip() for path in value.removeprefix("[").removesuffix("]").split(",") if path.strip()]
        else:
            overrides.append(override)
    if is_run:
        run_dir, is_trusted = checkpoint.resolve().parent.parent, parsed.options.get(TRUST, False)
        config = load_run_config(run_dir, overrides, is_trusted=is_trusted, sections=_SECTIONS)
    else:
        config = _compose(checkpoint, overrides)
    sets = _name_sets(config, files)
    problems = list(_find_server_problems(config)) or find_evaluation_problems(config)
    # Rows are read as the configuration says, so they are examined only if it is valid.
    problems = problems or list(_find_set_problems(config, sets))
    if problems:
        raise ConfigError(problems)
    samples = parsed.options.get("samples", 1)
    temperature = _choose_temperature(parsed.options.get("temperature"), samples, config)
    compare = Path(parsed.options["compare"]) if "compare" in parsed.options else None
    if compare is not None and not (compare / SAMPLES_FILE).is_file():
        raise ConfigError([Problem(f"compare={compare}", f"has no {SAMPLES_FILE}; give the output of an evaluation")])
    return EvaluationRequest(
        checkpoint=checkpoint,
        is_run=is_run,
        output=output,
        sets=sets,
        k=_sort_ks(parsed.options.get("k", [1]), samples),
        samples=samples,
        temperature=temperature,
        compare=compare,
        config=config,
    )


def _is_override(name: str) -> bool:
    return name.startswith("+") or "." in name or is_composition(name)


def _compose(folder: Path, overrides: Sequence[str]) -> Config:
    composed = compose_typed([*overrides, f"policy.model.path={folder}"])
    # An evaluation needs no training rows.
    problems = [problem for problem in composed.problems if problem.key != "data.train_path"]
    if problems or composed.config is None:
        raise ConfigError(composed.rename_problems(problems))
    if problems := adopt_families(composed.config):
        raise ConfigError(problems)
    return composed.config


def _find_server_problems(config: Config) -> Iterator[Problem]:
    urls = config.generation.server.urls
    if urls:
        text = (
            "serve the weights that a run gave them last, and an evaluation starts engines of its own for the "
            "checkpoint; add generation.server.urls=[]"
        )
        yield Problem(f"generation.server.urls={to_text(urls)}", text)


def _sort_ks(ks: Sequence[int], samples: int) -> tuple[int, ...]:
    numbers = sorted(set(ks))
    if numbers[-1] > samples:
        text = f"needs samples={numbers[-1]} or more; samples={samples}"
        raise ConfigError([Problem(f"k=[{','.join(map(str, ks))}]", text)])
    return tuple(numbers)


def _choose_temperature(requested: float | None, samples: int, config: Config) -> float:
    """Choose the temperature: by default 0 for one response, else training's."""
    if requested is None:
        return 0.0 if samples == 1 else config.generation.temperature
    if requested == 0 and samples > 1:
        raise ConfigError([Problem("temperature=0", f"makes all samples={samples} of a prompt equal; give samples=1")])
    return requested


def find_evaluation_problems(config: Config) -> list[Problem]:
    """Check the configuration and the machine for sampling and scoring alone."""
    fill_in_address(config.cluster)
    fill_in_gpus(config.cluster)
    shape = find_model_shape(config)
    arguments = {key: values for key, values in select_passed_fields(config).items() if key.startswith("generation.")}
    path, has_score = config.policy.model.path, config.method.head == "score"
    is_local = config.cluster.ray_address is None
    problems = [
        *find_secret_problems(config),
        *explain_unusable_model(f"policy.model.path={path}", path, has_score=has_score),
        *_find_config_problems(config, shape),
        *find_engine_problems(config, shape),
        *check_owned_fields(arguments),
        *find_spec_problems(config.data),
    ]
    return problems or [
        *(list(machine.find_gpu_problems(config)) or machine.find_cluster_problems(config)),
        *(machine.find_missing_libraries(trains=False, samples=not config.generation.server.urls) if is_local else ()),
        *machine.find_sandbox_problems(config),
        *machine.find_library_problems(arguments),
    ]


@evaluate_rules
def _find_config_problems(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    yield from check_devices(config, count_engine_gpus(config) | count_reward_model_gpus(config), ())
    if shape is not None:
        yield from check_engines(config, shape)
    yield from check_sequences(config, shape)
    yield from check_system_prompts(config)
    yield from check_sampled_images(config, shape)
    yield from check_requests(config)
    yield from check_servers(config)
    yield from check_environments(config)
