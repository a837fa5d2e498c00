"""Profiles of GPUs: peak speeds, the network between GPUs, and the shares of the peaks that are reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from megatron_grpo.config.schema import Config


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of peak speeds that kernels reach, and fixed costs.

    The defaults were chosen from what is known of the libraries, before any plan was compared with a measured step,
    except for `hidden_tensor`. benchmarks/plan_rows.py measures how far they are off; `calibrate` fits them to a run.
    """

    matmul: float = 0.80
    """Of the peak, by a large product whose tiles fill the GPU."""
    matmul_fp8: float = 0.65
    """Of the FP8 peak, by such a product in FP8."""
    inner: int = 300
    """Length of the inner dimension at which a product reaches half of its speed: start and end of a tile."""
    grouped: float = 0.65
    """Of the peak, by the products of the experts of a layer."""
    attention: float = 0.55
    """Of the bfloat16 peak, by causal fused attention, whose masked half is not counted."""
    memory: float = 0.80
    """Of the memory's speed, by kernels that only move numbers."""
    nvlink: float = 0.70
    """Of NVLink's speed, by collectives within a domain; without NVLink, of PCIe's."""
    network: float = 0.75
    """Of a port's speed, by collectives between domains."""
    refit: float = 0.53
    """Speed of a refit's messages between many pairs of ranks on several nodes, relative to collectives. Chosen on a
    row of benchmarks/plan_rows.yaml with `fitted`."""
    refit_s: float = 0.2
    """Seconds of a refit besides its messages: calls to all processes, pauses of engines, the commit. Chosen on a row
    of benchmarks/plan_rows.yaml with `fitted`."""
    refit_piece_s: float = 20e-6
    """Seconds of the host for each slice that a rank packs or unpacks, measured on a CPU core (15 and 20 us)."""
    kernel_s: float = 3e-6
    """Seconds of the smallest kernel."""
    launch_s: float = 13.5e-6
    """Seconds of the host for each operator; a pass takes at least as long as its launches. Published for a
    linear layer of torch in a DGX H100 (issue 2053 of Transformer Engine, which has gb200's number, too)."""
    message_s: float = 15e-6
    """Seconds of a collective in addition to its bytes."""
    hidden: float = 0.9
    """Share of a message that disappears behind other work where the configuration overlaps the two."""
    hidden_tensor: float = 0.5
    """Share of a tensor-parallel message that disappears behind a product: products in pieces are slower, and share
    multiprocessors and memory with the message. Chosen on the rows of benchmarks/plan_rows.yaml with `fitted`."""
    unequal: float = 0.65
    """Speed of passes over samples of different lengths, relative to those over equal sequences: replicas and stages
    wait for the longest microbatch, and every microbatch has another shape. Chosen on a row of
    benchmarks/plan_rows.yaml with `fitted`."""
    decode_memory: float = 0.70
    """Of the memory's speed, by the kernels of a decoding step."""
    decode_step_s: float = 1.5e-3
    """Seconds of an engine for each decoding step besides its kernels: scheduling, sampling, the host."""
    decode_message_s: float = 8e-6
    """Seconds of an all-reduce of a decoding step in addition to its bytes."""
    decode_layer_s: float = 20e-6
    """Seconds of a layer of a decoding step besides its bytes and operations: about seven kernels of a captured graph.
    A layer's experts take as many again: router, top-k, order of the tokens, two products, activation, weighted sum."""
    decode_sequence_s: float = 70e-6
    """Seconds of an engine's host for each sequence of a decoding step: scheduling, its token, its log-probability.
    Chosen on two rows of benchmarks/plan_rows.yaml with `fitted`."""
    decode_inner: int = 200
    """As `inner`, of the experts' products of a decoding step, which read much and compute little. Chosen on a row of
    benchmarks/plan_rows.yaml with `fitted`."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A GPU and its network; network speeds are of one direction."""

    name: str
    flops: Mapping[str, float]
    """Operations a second of products, by the type of their operands: float32, bfloat16, fp8 (left out: no units)."""
    memory_gib: float
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float
    """0: the GPU has no NVLink, and GPUs of a host exchange messages over PCIe."""
    network_bytes_per_s: float
    gpus_per_domain: int
    """GPUs that NVLink joins, or without it a host; global ranks are numbered domain by domain."""
    sms: int
    gpus_per_host: int = 0
    """GPUs of a host, where NVLink joins those of several hosts; 0: a domain is a host."""
    pcie_bytes_per_s: float = 0.0
    """Speed between two GPUs of a host without NVLink; not used with NVLink."""
    capability: float = 0.0
    """Compute capability; 0: not known."""
    host_memory_gib: float = 0.0
    """Memory of the host, for each of its GPUs; 0: not known."""
    host_bytes_per_s: float = 50e9
    """Speed at which a GPU exchanges tensors with host memory."""
    reserve_gib: float = 2.5
    """Memory that no tensor gets: CUDA's context, cuBLAS, NCCL's buffers of the process groups."""
    fragmentation: float = 0.03
    """Share of the tensors' memory that the allocator holds in addition."""
    efficiency: Efficiency = field(default_factory=Efficiency)

    @property
    def local_bytes_per_s(self) -> float:
        """Speed between GPUs of a domain: NVLink, or PCIe without it."""
        return self.nvlink_bytes_per_s or self.pcie_bytes_per_s

    def as_dict(self) -> dict[str, Any]:
        """Convert to the entry of a YAML file, without the name."""
        entries = asdict(self) | {"flops": dict(self.flops)}
        del entries["name"]
        return entries


def find_hardware(config: Config) -> Hardware | None:
    """Find the GPU that a configuration names: plan.hardware, else cluster.gpu.

    Raises:
        ValueError: the file of plan.hardware holds no profile.
    """
    name = config.plan.hardware or config.cluster.gpu
    return None if name is None else load_hardware(name)


def list_profiles() -> list[str]:
    """List the names of the package's profiles."""
    return list(_read_profiles())


@cache
def _read_profiles() -> dict[str, dict[str, Any]]:
    text = files("megatron_grpo.platform").joinpath("hardware.yaml").read_text(encoding="utf-8")
    profiles: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return profiles


def load_hardware(name: str) -> Hardware:
    """Load a profile by its name, or from a YAML file.

    The file has the form that `calibrate` writes, NAME: {flops: …}.

    Raises:
        ValueError: there is no such profile, or the file does not hold one; names what is wrong.
    """
    if name.endswith((".yaml", ".yml")):
        try:
            raw = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise ValueError(f"the hardware profile {name} cannot be read: {error}") from None
        if not isinstance(raw, dict) or len(raw) != 1 or not isinstance(next(iter(raw.values())), dict):
            raise ValueError(f"{name} holds no hardware profile: it needs one entry, NAME: {{flops: …}}")
        (entry,) = raw.items()
        return _build_hardware(*entry)
    profiles = _read_profiles()
    if name not in profiles:
        raise ValueError(f"cluster.gpu={name} is unknown; there are {', '.join(profiles)}, or a file NAME.yaml")
    return _build_hardware(name, profiles[name])


def _build_hardware(name: str, raw: dict[str, Any]) -> Hardware:
    entries, measured = {entry.name for entry in fields(Hardware)}, {entry.name for entry in fields(Efficiency)}
    raw = dict(raw)
    efficiency = raw.pop("efficiency", {})
    for key in (*(raw.keys() - entries), *(efficiency.keys() - measured)):
        raise ValueError(f"the hardware profile {name} has no entry {key}")
    # All other entries are numbers, but YAML reads 1e12, without a dot, as text.
    for key, value in [*raw.items(), *efficiency.items(), *dict(raw.get("flops", {})).items()]:
        if key != "flops" and (isinstance(value, bool) or not isinstance(value, int | float)):
            text = "; YAML takes 1e12 for text, write 1.0e+12" if isinstance(value, str) else ""
            raise ValueError(f"the hardware profile {name} has {key}={value!r}, which is not a number{text}")
    try:
        hardware = Hardware(name=name, **raw, efficiency=replace(Efficiency(), **efficiency))
    except TypeError as error:
        raise ValueError(f"the hardware profile {name} is not complete: {error}") from None
    if not hardware.local_bytes_per_s:
        raise ValueError(f"the hardware profile {name} has neither nvlink_bytes_per_s nor pcie_bytes_per_s above 0")
    return hardware
