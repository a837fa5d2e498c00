"""Checks of adapters, FP8, quantisation-aware training, recomputation and optimizers against model and devices."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Iterator, Mapping

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config, OptimizerConfig
from megatron_grpo.weights.shape import ModelShape


def adapter_problems(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    """Settings that cannot be combined with adapters; with shape None, checks that need the model are left out."""
    lora = config.policy.lora
    if not lora.rank:
        return
    targets = f"policy.lora.target_modules=[{','.join(lora.target_modules)}]"
    if not lora.target_modules:
        yield Problem(targets, "leaves nothing to train; name a layer, or set policy.lora.rank=0")
    if len(set(lora.target_modules)) < len(lora.target_modules):
        yield Problem(targets, "names a layer twice; name each once")
    if config.loop.sync_ref_model:
        text = f"with policy.lora.rank={lora.rank} the reference policy is the base model itself, which does not move; "
        fix = "use false, or train all weights with policy.lora.rank=0"
        yield Problem(f"{config.algorithm}.sync_ref_model=True", text + fix)
    if rate := config.policy.moe.bias_update_rate:
        yield Problem(f"policy.moe.bias_update_rate={rate:g}", "adapters leave the base model as it is; use 0")
    if shape is None:
        return
    if shape.latent is not None and "linear_qkv" in lora.target_modules:
        others = ",".join(name for name in lora.target_modules if name != "linear_qkv") or "linear_proj"
        yield Problem(targets, f"latent attention has no linear_qkv; use [{others}]")
    if shape.experts is not None and {"linear_fc1", "linear_fc2"} & {*lora.target_modules}:
        text = "the matrices of experts take no adapters; use [linear_qkv,linear_proj] and leave them as they are"
        yield Problem(targets, text)


_NVIDIA_SMI_TIMEOUT_S = 20.0


def fp8_problems(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    """Settings that FP8 cannot be combined with; with shape None, checks that need the model are left out."""
    fp8 = config.policy.fp8
    if fp8.format == "off":
        return
    if fp8.recipe == "delayed":
        yield from _delayed(config)
    if fp8.on_device:
        yield from _on_device(config)
    if shape is None:
        return
    if fp8.on_device and not shape.fits_transformer_engine:
        text = f"Transformer Engine's layers do not express {shape.family}; use off, with precision=fp8_engines if "
        yield Problem(f"policy.fp8.format={fp8.format}", f"{text}the engines are to compute in FP8")
        return
    yield from _sizes(config, shape)
    yield from _outer_layers(config, shape)


def fp8_machine_problems(config: Config) -> Iterator[Problem]:
    """Missing requirements of FP8 on this machine: Transformer Engine, or a GPU of the needed compute capability."""
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
    """Lowest compute capability of this machine's GPUs, from nvidia-smi; None: unknown."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=True)
        pairs = [line.strip().split(".") for line in found.stdout.splitlines() if line.strip()]
        return min((int(major), int(minor)) for major, minor in pairs)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _delayed(config: Config) -> Iterator[Problem]:
    fp8 = config.policy.fp8
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
    """Sizes of a rank's matrices that are not multiples of the recipe's block."""
    fp8, parallel = config.policy.fp8, config.policy.parallel
    heads, key_value_heads = shape.attention_heads, shape.key_value_heads
    sides = {
        "hidden size": (shape.hidden, 1),
        "width of all heads": (heads * shape.head_dim, parallel.tensor),
        "width of queries, keys and values": ((heads + 2 * key_value_heads) * shape.head_dim, parallel.tensor),
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


def quantization_problems(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    """Settings that exclude quantisation-aware training; with shape None, checks that need the model are left out."""
    policy = config.policy
    if policy.quantization is None:
        return
    subject = f"policy.quantization={policy.quantization}"
    if policy.fp8.format != "off":
        yield Problem(subject, "rounds the same products as policy.fp8; use null, or policy.fp8.format=off")
    if policy.lora.rank:
        text = "rounds weights that are trained, and adapters leave them as they are; use null, or policy.lora.rank=0"
        yield Problem(subject, text)
    if shape is not None and shape.experts is not None:
        yield Problem(subject, "is not supported for a mixture of experts; use null")
    elif shape is not None and shape.latent is not None:
        yield Problem(subject, "is not supported with latent attention; use null")


def quantization_machine_problems(config: Config) -> Iterator[Problem]:
    """A missing package for quantisation-aware training on this machine."""
    quantization = config.policy.quantization
    if quantization is None or config.cluster.ray_address is not None:
        return
    if importlib.util.find_spec("modelopt") is None:
        text = "needs a package that is not installed here: pip install nvidia-modelopt, or use null"
        yield Problem(f"policy.quantization={quantization}", text)


_OF_TRANSFORMER_ENGINE = ("layernorm", "moe_act", "mla_up_proj")
"""Modules that Megatron-Core can recompute only with functions of Transformer Engine."""
_OF_EXPERTS = ("moe", "moe_act", "shared_experts")


def training_problems(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    """Settings of speed and memory that exclude each other, or do not fit the devices or the model (None: unknown)."""
    optimizers = {"policy": config.policy.optimizer}
    if config.loop.has_value_model:
        optimizers["value"] = config.value.optimizer
    yield from _recomputation(config, shape)
    yield from _overlap(config, optimizers)
    yield from _fused_gradients(config)
    if config.policy.deterministic and config.loss_fn.kl_score_function_gradient and config.cluster.gpus:
        text = "excludes loss_fn.kl_score_function_gradient: torch has no deterministic running sums on GPUs"
        yield Problem("policy.deterministic=True", text)
    for section, optimizer in optimizers.items():
        yield from _optimizer(config, section, optimizer)


def _fused_gradients(config: Config) -> Iterator[Problem]:
    policy, subject = config.policy, "policy.gradient_accumulation_fusion=True"
    if not policy.gradient_accumulation_fusion:
        return
    rounding = {f"quantization={policy.quantization}": policy.quantization, "fp8.simulate=True": policy.fp8.simulated}
    for setting, rounds in rounding.items():
        if rounds:
            text = "takes the gradient of the weight itself, and the product is with a rounded one; use null"
            yield Problem(subject, f"with policy.{setting}: {text}")
    if config.cluster.gpus == 0:
        yield Problem(subject, "needs GPUs; use null, which is true where it can be")


def _recomputation(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    modules = config.policy.recompute_modules
    key = f"policy.recompute_modules=[{','.join(modules)}]"
    if modules and config.policy.activation_checkpointing:
        yield Problem(key, "policy.activation_checkpointing=true recomputes whole layers; choose one of them")
    if len(set(modules)) < len(modules):
        yield Problem(key, "names a module twice")
    engine = [module for module in modules if module in _OF_TRANSFORMER_ENGINE]
    if engine and config.cluster.gpus == 0:
        text = f"{', '.join(engine)} can be recomputed only by Transformer Engine, which needs GPUs; leave out"
        yield Problem(key, text)
    if shape is None:
        return
    lacking = [module for module in modules if module in _OF_EXPERTS and shape.experts is None]
    if lacking:
        yield Problem(key, f"the model has no experts; leave out {', '.join(lacking)}")
    if "mla_up_proj" in modules and shape.latent is None:
        yield Problem(key, "the model has no latent attention; leave out mla_up_proj")


def _overlap(config: Config, optimizers: Mapping[str, OptimizerConfig]) -> Iterator[Problem]:
    policy = config.policy
    if not policy.overlap_param_gather:
        return
    reduces = config.cluster.gpus > 0 if policy.overlap_grad_reduce is None else policy.overlap_grad_reduce
    if not reduces:
        yield Problem("policy.overlap_param_gather=True", "needs policy.overlap_grad_reduce=true")
    for section, optimizer in optimizers.items():
        if not optimizer.distributed:
            yield Problem("policy.overlap_param_gather=True", f"needs {section}.optimizer.distributed=true")


def _optimizer(config: Config, section: str, optimizer: OptimizerConfig) -> Iterator[Problem]:
    asked = {
        f"{section}.optimizer.cpu_offload={optimizer.cpu_offload:g}": optimizer.cpu_offload > 0,
        f"{section}.optimizer.precision_aware=True": optimizer.precision_aware,
    }
    for key, wanted in asked.items():
        if wanted and config.cluster.gpus == 0:
            text = "without GPUs everything is in host memory already" if "offload" in key else "needs GPUs"
            yield Problem(key, f"{text}; leave it out, or give cluster.gpus")
        elif wanted and not optimizer.distributed:
            yield Problem(key, f"needs {section}.optimizer.distributed=true")
