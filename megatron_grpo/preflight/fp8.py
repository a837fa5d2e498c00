"""Checks of FP8 (policy.fp8) against the model, the layout, and the machine."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Iterator

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.models.shape import ModelShape

_ASKING_S = 20.0


def fp8_problems(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    """What keeps the policy from FP8, wherever it runs; nothing when it is off.

    Args:
        config: a configuration whose values are all of their types and in their ranges.
        shape: sizes of the policy's model; None: they are not known here.
    """
    fp8 = config.policy.fp8
    if fp8.format == "off":
        return
    yield from _recipe(config)
    if fp8.on_device:
        yield from _on_device(config)
    if shape is not None:
        yield from _sizes(config, shape)
        yield from _outer_layers(config, shape)


def fp8_machine_problems(config: Config) -> Iterator[Problem]:
    """What this machine lacks for FP8: a package, or a GPU that is new enough, as far as it can be asked."""
    fp8 = config.policy.fp8
    if not fp8.on_device or config.cluster.gpus == 0:
        return
    subject = f"policy.fp8.format={fp8.format}"
    if importlib.util.find_spec("transformer_engine") is None:
        text = "needs Transformer Engine, which is not installed: pip install 'transformer-engine[pytorch]', or use off"
        yield Problem(subject, text)
    have = gpu_capability()
    if have is not None and have < fp8.least_capability:
        least, there = (".".join(map(str, capability)) for capability in (fp8.least_capability, have))
        fix = "off" if have < (8, 9) else "recipe=tensorwise"
        text = f"recipe={fp8.recipe} needs GPUs of compute capability {least}, and this machine has {there}; use {fix}"
        yield Problem(subject, text)


def gpu_capability() -> tuple[int, int] | None:
    """Compute capability of this machine's oldest GPU, as the driver's tool tells it; None: it does not tell."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_ASKING_S, check=True).stdout
        pairs = [line.strip().split(".") for line in found.splitlines() if line.strip()]
        return min((int(major), int(minor)) for major, minor in pairs)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _recipe(config: Config) -> Iterator[Problem]:
    fp8 = config.policy.fp8
    if fp8.recipe != "delayed":
        return
    if fp8.simulate:
        text = "has scales of earlier steps, which are not simulated; use tensorwise, blockwise or mxfp8"
        yield Problem("policy.fp8.recipe=delayed", text)
    for name in ("first_layers_bf16", "last_layers_bf16"):
        if getattr(fp8, name):
            text = "has no place in Megatron-Core's delayed recipe; use 0, or policy.fp8.recipe=tensorwise"
            yield Problem(f"policy.fp8.{name}={getattr(fp8, name)}", text)


def _on_device(config: Config) -> Iterator[Problem]:
    policy, fp8 = config.policy, config.policy.fp8
    subject = f"policy.fp8.format={fp8.format}"
    if config.cluster.gpus == 0:
        text = "needs GPUs, and this is a run on CPU; use off, or policy.fp8.simulate=true for its numerics"
        yield Problem(subject, text)
    if policy.precision != "bfloat16":
        yield Problem(subject, f"needs policy.precision=bfloat16, not {policy.precision}")
    if policy.lora.rank:
        text = "acts on all weights, and adapters leave these to torch's products; use off, or policy.lora.rank=0"
        yield Problem(subject, text)
    if fp8.parameters and not policy.optimizer.distributed:
        text = "needs policy.optimizer.distributed=true, which keeps the float32 weights beside them"
        yield Problem("policy.fp8.parameters=True", text)
    if fp8.parameters and fp8.recipe == "mxfp8":
        text = "is not supported with recipe=mxfp8, which needs two copies of each weight; use false"
        yield Problem("policy.fp8.parameters=True", text)


def _sizes(config: Config, shape: ModelShape) -> Iterator[Problem]:
    """Sides of a rank's matrices: whole blocks, or what the products take."""
    fp8, parallel = config.policy.fp8, config.policy.parallel
    queries = shape.attention_heads * shape.head_dim
    keys_and_values = 2 * shape.key_value_heads * shape.head_dim
    sides = {
        "hidden size": (shape.hidden, 1),
        "width of all heads": (queries, parallel.tensor),
        "width of queries, keys and values": (queries + keys_and_values, parallel.tensor),
        "feed-forward width": (shape.ffn_hidden, parallel.tensor),
    }
    if shape.experts is not None:
        sides["experts' width"] = (shape.experts.ffn_hidden, parallel.expert_tensor)
    for what, (size, ranks) in sides.items():
        if size % (ranks * fp8.block):
            split = f" over {ranks} ranks" if ranks > 1 else ""
            other = "; use fewer ranks or recipe=tensorwise" if fp8.block > 16 else "; use off"
            text = f"{fp8.recipe} takes multiples of {fp8.block}, and the model's {what} is {size}{split}{other}"
            yield Problem(f"policy.fp8.recipe={fp8.recipe}", text)
            return


def _outer_layers(config: Config, shape: ModelShape) -> Iterator[Problem]:
    fp8 = config.policy.fp8
    most = shape.layers if fp8.simulate else shape.layers // config.policy.parallel.pipeline
    for name in ("first_layers_bf16", "last_layers_bf16"):
        if getattr(fp8, name) > most:
            what = "the model has" if fp8.simulate else "a pipeline rank has"
            yield Problem(f"policy.fp8.{name}={getattr(fp8, name)}", f"is more than the {most} layers that {what}")
