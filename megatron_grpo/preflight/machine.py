"""Checks of what a configuration asks of this machine: GPUs, packages, Ray, models, files, folders."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_grpo.cluster.gpus import visible_gpus
from megatron_grpo.cluster.ray_address import malformed, unreachable
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.folders import folder_problems
from megatron_grpo.preflight.fp8 import fp8_machine_problems
from megatron_grpo.preflight.model_files import model_problems
from megatron_grpo.preflight.prompt_files import check_prompt_files
from megatron_grpo.preflight.quantization import quantization_machine_problems
from megatron_grpo.preflight.recording import check_recording
from megatron_grpo.preflight.sandbox import sandbox_problems


@dataclass(slots=True)
class MachineReport:
    """What this machine says to a configuration."""

    problems: list[Problem] = field(default_factory=list)
    remarks: list[Problem] = field(default_factory=list)
    """What may be meant, and may not."""


def machine_problems(config: Config) -> list[Problem]:
    """Everything that is missing here."""
    return examine_machine(config).problems


def examine_machine(config: Config) -> MachineReport:
    """Look at all that a run needs. Without its GPUs, only that: the files are looked for where the run will be."""
    missing_gpus = list(_gpus(config))
    if missing_gpus:
        return MachineReport(missing_gpus)
    files, remarks = check_prompt_files(config) if config.generates else check_recording(config)
    problems = [
        *_reached(config),
        *_driver_gpu(config),
        *_packages(config),
        *_kernels(config),
        *fp8_machine_problems(config),
        *quantization_machine_problems(config),
        *(sandbox_problems(config) if config.generates else ()),
        *model_problems(config),
        *files,
        *folder_problems(config),
    ]
    return MachineReport(problems, remarks)


def cluster_problems(config: Config) -> list[Problem]:
    """What stands against the GPUs and the nodes of `cluster` as seen from this machine."""
    return list(_gpus(config)) or list(_reached(config))


def _reached(config: Config) -> Iterator[Problem]:
    yield from _nodes(config)
    yield from _ray(config)


def _gpus(config: Config) -> Iterator[Problem]:
    cluster = config.cluster
    if cluster.gpus == 0 or cluster.ray_address is not None:
        return
    there = visible_gpus()
    if there < cluster.gpus:
        have = f"only {there} CUDA GPU(s)" if there else "no CUDA GPU"
        yield Problem(
            f"cluster.gpus_per_node={cluster.gpus}",
            f"this machine has {have}; start the run on such nodes, or give cluster.ray_address of a cluster of them",
        )


def _nodes(config: Config) -> Iterator[Problem]:
    if config.cluster.num_nodes > 1 and config.cluster.ray_address is None:
        text = "needs cluster.ray_address of a Ray cluster over the nodes; launchers/slurm_pyxis.sbatch starts one"
        yield Problem(f"cluster.num_nodes={config.cluster.num_nodes}", text)


def _ray(config: Config) -> Iterator[Problem]:
    address = config.cluster.ray_address
    if address is None:
        return
    reason = malformed(address)
    if reason is None:
        silent = unreachable(address)
        reason = None if silent is None else f"no Ray cluster answers there: {silent}"
    if reason is not None:
        yield Problem(f"cluster.ray_address={address}", reason)
    elif config.cluster.gpus_per_node is None:
        text = "this machine has no CUDA GPU to count, and the Ray cluster's may have; give their number, or 0 for CPU"
        yield Problem("cluster.gpus_per_node=null", text)


def _driver_gpu(config: Config) -> Iterator[Problem]:
    if config.ppo.calculate_advantages_on_gpu and not visible_gpus():
        text = "the driver estimates advantages, and this machine, where it runs, has no CUDA GPU; use false"
        yield Problem("ppo.calculate_advantages_on_gpu=True", text)


def _kernels(config: Config) -> Iterator[Problem]:
    if config.policy.logprob_kernel != "fused":
        return
    subject = "policy.logprob_kernel=fused"
    if config.cluster.ray_address is None and importlib.util.find_spec("triton") is None:
        yield Problem(subject, "needs the triton package: pip install triton, or use chunked or auto")
    elif config.cluster.gpus == 0 and os.environ.get("TRITON_INTERPRET") != "1":
        text = (
            "Triton compiles for GPUs, and cluster.gpus_per_node=0; use chunked or auto, or set TRITON_INTERPRET=1 in "
            "the environment to have it interpreted, slowly, as tests do"
        )
        yield Problem(subject, text)


def _packages(config: Config) -> Iterator[Problem]:
    wanted = {
        "policy.gradient_accumulation_fusion": (
            "fused_weight_gradient_mlp_cuda",
            config.policy.gradient_accumulation_fusion,
        ),
        "policy.optimizer.precision_aware": ("transformer_engine", config.policy.optimizer.precision_aware),
        "value.optimizer.precision_aware": ("transformer_engine", config.value.optimizer.precision_aware),
    }
    for key, (package, asked) in wanted.items():
        if asked and config.cluster.ray_address is None and importlib.util.find_spec(package) is None:
            yield Problem(f"{key}=True", f"needs the package {package}, which is not installed here; leave it out")
    if config.logger.wandb.enabled and importlib.util.find_spec("wandb") is None:
        yield Problem("logger.wandb.enabled=True", "needs the wandb package: pip install wandb, or set it to false")
    if config.logger.mlflow.enabled and importlib.util.find_spec("mlflow") is None:
        yield Problem("logger.mlflow.enabled=True", "needs the mlflow package: pip install mlflow, or set it to false")
