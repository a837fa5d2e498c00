"""Checks of this machine: GPUs, Ray, packages, the sandbox and the folders of a run."""

from __future__ import annotations

import importlib.util
import json
import netrc
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from megatron_grpo.cluster.machines import (
    check_address,
    check_reachable,
    count_visible_gpus,
    explain_origin,
    read_environment_address,
)
from megatron_grpo.config.errors import ConfigError, Problem, to_text
from megatron_grpo.config.passthrough import select_passed_fields
from megatron_grpo.config.paths import check_readable, check_writable
from megatron_grpo.config.run_schema import ADDRESS_VARIABLE
from megatron_grpo.config.schema import Config, PPOConfig
from megatron_grpo.environments.sandbox.sandbox import SandboxUnavailableError, open_sandbox
from megatron_grpo.models.source import find_model_shape
from megatron_grpo.platform.hooks import find_untried_versions
from megatron_grpo.preflight.data_checks import check_prompt_files, check_recording
from megatron_grpo.preflight.distillation_checks import find_teacher_tokenizer_problems
from megatron_grpo.preflight.model_file_checks import find_model_problems, list_unused_tensors
from megatron_grpo.preflight.node_checks import find_delta_problems, find_fp8_machine_problems, find_node_remarks
from megatron_grpo.preflight.rules import Rule, evaluate_rules
from megatron_grpo.run.directory import LOCK_FILE, POLICY_FOLDER, VALUE_FOLDER, compare_with_last_start, is_in_use
from megatron_grpo.run.uploads import explain_unusable_storage

# What of this machine a run will meet: all of it, its files, as under Slurm, or nothing.
Reach = Literal["machine", "files", "nothing"]

# By prefix of the section: the library that receives the fields, its package, and our module that checks them.
_LIBRARIES = {
    "policy.": ("Megatron-Core", "megatron.core", "megatron_grpo.trainer.model.megatron_config"),
    "generation.": ("vLLM", "vllm", "megatron_grpo.generation.engine_arguments"),
}
# The program that imports a library. It prints the problems last, because the import may print lines of its own.
_CHECK = """
import dataclasses, json, sys
from {module} import find_passed_field_problems
print()
print(json.dumps([dataclasses.astuple(problem) for problem in find_passed_field_problems(json.load(sys.stdin))]))
"""


def find_folder_problems(config: Config) -> Iterator[Problem]:
    """Check run_dir, prepare.folder, refit.directory and the checkpoint to start from."""
    if not config.run_dir.strip():
        yield Problem("run_dir=", "is empty; give a folder")
        return
    unusable = list(check_writable("run_dir", config.run_dir))
    yield from unusable
    if config.prepare.name is not None:
        yield from check_writable("prepare.folder", config.prepare.folder)
    if config.refit.directory is not None:
        yield from check_writable("refit.directory", config.refit.directory)
    if not unusable:
        yield from _find_run_dir_problems(config)
    yield from _find_resume_problems(config)


def _find_run_dir_problems(config: Config) -> Iterator[Problem]:
    folder, subject = Path(os.path.abspath(config.run_dir)), f"run_dir={config.run_dir}"
    lock = folder / LOCK_FILE
    reason = check_readable(folder, "folder") if folder.exists() else None
    if reason is not None:
        yield Problem(subject, reason)
    elif lock.exists() and not os.access(lock, os.W_OK):
        yield Problem(subject, f"{lock} is another user's; choose another run_dir")
    elif is_in_use(config.run_dir):
        yield Problem(subject, "is in use by another run that is still alive")
    else:
        try:
            compare_with_last_start(folder, config)
        except ConfigError as error:
            yield from error.problems
        except OSError as error:
            yield Problem(subject, f"{error.filename} cannot be read: {error.strerror}")


@evaluate_rules
def _find_resume_problems(config: Config) -> Iterator[Rule]:
    resume, folder = config.checkpointing.resume, Path(config.run_dir, "checkpoints")
    names = (re.fullmatch(r"step_(\d+)", name) for name in (os.listdir(folder) if os.path.isdir(folder) else ()))
    steps, subject = [int(match[1]) for match in names if match], "checkpointing.resume="
    text = f"would begin anew, and {folder} has checkpoints up to step {max(steps, default=0)}; choose another run_dir,"
    text += " or delete them"
    yield resume == "none" and steps, subject, text
    if resume in ("auto", "none") or steps:
        return
    reason = check_readable(resume, "folder")
    yield reason, subject, f"{reason}; give auto, none or the path of a checkpoint"
    # Files inside are verified at the start, since that may take minutes; only the folder's form is checked here.
    lacks_policy = not os.path.isdir(Path(resume) / POLICY_FOLDER)
    text = f"is not a checkpoint: it has no folder {POLICY_FOLDER}; give RUN_DIR/checkpoints/step_N"
    yield reason is None and lacks_policy, subject, text
    lacks_value = config.value_model is not None and not os.path.isdir(Path(resume) / VALUE_FOLDER)
    yield not lacks_policy and lacks_value, subject, f"{resume} is not a checkpoint of PPO: it has no value model"


def find_sandbox_problems(config: Config) -> Iterator[Problem]:
    """Check that this machine can isolate programs as the sandbox requires."""
    kinds = [(environment.type, environment.options.get("tools")) for environment in config.env.values()]
    has_python = any(kind == "tools" and isinstance(tools, list) and "python" in tools for kind, tools in kinds)
    if not (has_python or "code" in dict(kinds)) or config.cluster.ray_address is not None:
        return
    try:
        open_sandbox(config.sandbox)
    except SandboxUnavailableError as error:
        subject = f"sandbox.required={config.sandbox.required}"
        yield Problem(subject, str(error).removeprefix(subject).strip())


def examine_machine(
    config: Config, *, reads_rows: bool = True, reach: Reach = "machine"
) -> tuple[list[Problem], list[Problem]]:
    """Check what a run needs of this machine; returns problems and remarks.

    Args:
        config: configuration of the run.
        reads_rows: whether rows and recorded rollouts are read.
        reach: what of this machine the run will meet; with "files" its GPUs, network and packages are not examined.
    """
    is_here = reach == "machine"
    problems = list(_find_launcher_problems()) if is_here else []
    if problems:
        return problems, []
    # The checks below are independent of each other, so that one message has all their problems.
    files: list[Problem] = []
    remarks: list[Problem] = []
    if reads_rows:
        files, remarks = check_prompt_files(config) if config.reads_prompts else check_recording(config)
    lacking_gpus, lacking_models = list(find_gpu_problems(config)) if is_here else [], list(find_model_problems(config))
    problems = [
        *lacking_gpus,
        *(find_cluster_problems(config) if is_here else ()),
        # Nodes with GPUs may have other packages than a machine without them.
        *(_find_installation_problems(config) if is_here and not lacking_gpus else ()),
        *find_login_problems(config),
        *(lacking_models or find_teacher_tokenizer_problems(config)),
        *files,
        *find_folder_problems(config),
    ]
    if not problems:  # the weights can be read
        remarks += list_unused_tensors(config)
    if not is_here:
        return problems, remarks
    remarks += find_node_remarks(config)
    address = read_environment_address()
    if address is not None and config.cluster.ray_address == address:
        text = f"is {ADDRESS_VARIABLE} of the environment: the run joins that cluster; unset it to start Ray here"
        remarks.append(Problem(f"cluster.ray_address={address}", text))
    for name, version, tried_versions in find_untried_versions():
        text = f"is not among the versions that megatron_grpo was tried with, {tried_versions}"
        remarks.append(Problem(f"{name} {version}", text))
    return problems, remarks


def _find_installation_problems(config: Config) -> Iterator[Problem]:
    """Check packages, the sandbox, and settings against the installed libraries and GPUs."""
    if config.cluster.ray_address is None:
        has_engines = config.needs_generation and not config.generation.server.urls
        yield from find_missing_libraries(trains=config.debug.train, samples=has_engines)
        yield from find_delta_problems(config, find_model_shape(config))
    yield from find_package_problems(config)
    yield from find_fp8_machine_problems(config)
    if config.needs_generation:
        yield from find_sandbox_problems(config)
    yield from find_library_problems(select_passed_fields(config))


def _find_launcher_problems() -> Iterator[Problem]:
    """Check that torchrun or accelerate did not start several of these processes."""
    rank, count = os.environ.get("LOCAL_RANK"), os.environ.get("WORLD_SIZE", "1")
    if rank is not None and "RANK" in os.environ and count != "1":
        text = "torchrun and accelerate launch start a whole run in each process; start it once, with python,"
        text += " since the run starts its own processes"
        yield Problem(f"LOCAL_RANK={rank} WORLD_SIZE={count}", text)


@evaluate_rules
def find_gpu_problems(config: Config) -> Iterator[Rule]:
    """Check that this machine has the GPUs of a node."""
    cluster, visible = config.cluster, count_visible_gpus()
    count = f"only {visible} CUDA GPU(s)" if visible else "no CUDA GPU"
    text = f"this machine has {count}; start the run on such nodes, or give cluster.ray_address of a cluster of them"
    yield cluster.ray_address is None and visible < cluster.gpus, "cluster.gpus_per_node=", text


@evaluate_rules
def find_cluster_problems(config: Config) -> Iterator[Rule]:
    """Check the address of the Ray cluster, and ask it for an answer."""
    address = config.cluster.ray_address
    if address is None:
        text = "needs cluster.ray_address of a Ray cluster over the nodes; launchers/slurm_pyxis.sbatch starts one"
        yield config.cluster.num_nodes > 1, "cluster.num_nodes=", text
        return
    reason = check_address(address)
    if reason is None and (failure := check_reachable(address)) is not None:
        reason = f"no Ray cluster answers there: {failure}"
    yield reason, "cluster.ray_address=", f"{reason}{explain_origin(address)}"
    text = "this machine has no CUDA GPU, and those of the Ray cluster are not counted; give their number, or 0 for CPU"
    text += explain_origin(address)
    yield reason is None and config.cluster.gpus_per_node is None, "cluster.gpus_per_node=", text


@evaluate_rules
def find_package_problems(config: Config) -> Iterator[Rule]:
    """Check for the packages, and the driver's GPU, that settings need."""
    policy, logger, has_gpus = config.policy, config.logger, config.cluster.gpus > 0
    is_local, uses_triton = config.cluster.ray_address is None, policy.logprob_kernel == "fused"
    te, te_advice = "transformer_engine", "pip install 'transformer-engine[pytorch]', or use off"
    otlp, otlp_advice = "opentelemetry.sdk", "pip install opentelemetry-sdk opentelemetry-exporter-otlp, or use null"
    muon, muon_advice = "emerging_optimizers", "pip install emerging-optimizers, or use adamw"
    packages: list[tuple[str, object, str, str]] = [
        ("policy.fp8.format", policy.fp8.is_on_device and has_gpus, te, te_advice),
        ("logger.wandb.enabled", logger.wandb.enabled, "wandb", "pip install wandb, or set it to false"),
        ("logger.mlflow.enabled", logger.mlflow.enabled, "mlflow", "pip install mlflow, or set it to false"),
        ("logger.swanlab.enabled", logger.swanlab.enabled, "swanlab", "pip install swanlab, or set it to false"),
        ("logger.rl_insight.enabled", logger.rl_insight.enabled, "rl_insight", "pip install rl-insight, or use false"),
        ("logger.otlp_endpoint", logger.otlp_endpoint is not None, otlp, otlp_advice),
    ]
    if is_local:
        fusion = policy.gradient_accumulation_fusion
        packages += [
            ("policy.gradient_accumulation_fusion", fusion, "fused_weight_gradient_mlp_cuda", "leave it out"),
            ("policy.optimizer.name", policy.optimizer.name == "muon", muon, muon_advice),
            ("value.optimizer.name", config.value.optimizer.name == "muon", muon, muon_advice),
            ("policy.optimizer.precision_aware", policy.optimizer.precision_aware, te, "leave it out"),
            ("value.optimizer.precision_aware", config.value.optimizer.precision_aware, te, "leave it out"),
            ("policy.quantization", policy.quantization, "modelopt", "pip install nvidia-modelopt, or use null"),
            ("policy.logprob_kernel", uses_triton, "triton", "pip install triton, or use chunked or auto"),
        ]
    storage = config.checkpointing.upload_to
    reason = explain_unusable_storage(storage) if storage is not None else None
    yield reason, "checkpointing.upload_to=", f"{reason}"
    for key, is_needed, package, advice in packages:
        text = f"needs the package {package}, which is not installed here: {advice}"
        yield is_needed and not _is_installed(package), f"{key}=", text
    text = "Triton compiles for GPUs, and cluster.gpus_per_node=0; use chunked or auto, or set TRITON_INTERPRET=1"
    text += " in the environment to have it interpreted, slowly, as tests do"
    cannot_compile = uses_triton and not has_gpus and os.environ.get("TRITON_INTERPRET") != "1"
    yield cannot_compile and not (is_local and not _is_installed("triton")), "policy.logprob_kernel=", text
    text = "the driver estimates advantages, and this machine, where it runs, has no CUDA GPU; use false"
    loop = config.loop
    is_on_gpu = isinstance(loop, PPOConfig) and loop.calculate_advantages_on_gpu
    yield is_on_gpu and not count_visible_gpus(), "ppo.calculate_advantages_on_gpu=", text


@evaluate_rules
def find_login_problems(config: Config) -> Iterator[Rule]:
    """Check that servers of teachers and W&B have their keys before the start."""
    for section, teacher in config.named_teachers.items():
        variable = teacher.api_key_variable
        text = "names no variable of this environment, or an empty one; export it where the run is started"
        is_missing = variable is not None and not os.environ.get(variable, "").strip()
        yield is_missing, f"{section}.api_key_variable={variable}", text
    wandb = config.logger.wandb
    is_online = wandb.mode == "online" and os.environ.get("WANDB_MODE", "online") in ("online", "shared")
    has_key = any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"))
    # Without the package that problem is enough.
    if not (wandb.enabled and is_online and _is_installed("wandb")) or has_key:
        return
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        login = netrc.netrc(os.environ.get("NETRC") or os.path.expanduser("~/.netrc")).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        login = None
    text = f"needs a login of {host}, and there is none: run `wandb login`, set WANDB_API_KEY,"
    text += " or give logger.wandb.mode=offline"
    yield login is None, "logger.wandb.enabled=", text


def find_missing_libraries(*, trains: bool, samples: bool) -> Iterator[Problem]:
    """Find those of Megatron-Core and vLLM that are needed and not installed."""
    for is_needed, (library, package, _) in zip((trains, samples), _LIBRARIES.values(), strict=True):
        if is_needed and not _is_installed(package):
            text = "is not installed here: requirements/install_cpu.sh VENV, or install_cuda.sh for GPUs, installs the"
            yield Problem(library, f"{text} packages of a run")


def find_library_problems(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[Problem]:
    """Check passed-on fields, by section, against the installed libraries."""
    # A library is imported in another process: this takes seconds, loads torch and changes the environment.
    for prefix, (library, package, module) in _LIBRARIES.items():
        passed = {section: dict(values) for section, values in sections.items() if section.startswith(prefix)}
        if not any(passed.values()):
            continue
        reason = None if _is_installed(package) else f"{library} is not installed here"
        if reason is None:
            command, fields = [sys.executable, "-c", _CHECK.format(module=module)], json.dumps(passed, default=str)
            process = subprocess.run(command, input=fields, capture_output=True, text=True)
            if process.returncode == 0:
                yield from (Problem(*problem) for problem in json.loads(process.stdout.splitlines()[-1]))
                continue
            reason = f"{library} cannot be imported here: {(process.stderr.splitlines() or ['no reason'])[-1]}"
        for section, values in passed.items():
            for name, value in values.items():
                yield Problem(f"{section}.{name}={to_text(value)}", f"cannot be checked: {reason}")


def _is_installed(package: str) -> bool:
    parent = package.rpartition(".")[0]
    if not parent:
        return importlib.util.find_spec(package) is not None
    outer = importlib.util.find_spec(parent)  # that of the package itself would import the outer one
    return outer is not None and PathFinder.find_spec(package, outer.submodule_search_locations) is not None
