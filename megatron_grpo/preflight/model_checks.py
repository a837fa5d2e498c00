"""Checks of adapters, FP8, quantization, recomputation and optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from megatron_grpo.config.policy_schema import StateTarget
from megatron_grpo.config.schema import Config
from megatron_grpo.models.adapter_names import is_adapted
from megatron_grpo.models.families import FAMILIES, build_weight_map
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.preflight.node_checks import read_gpu_capability
from megatron_grpo.preflight.rules import Rule, evaluate_rules, list_conflicts

# Modules that Megatron-Core can recompute only with functions of Transformer Engine.
_TE_MODULES = ("layernorm", "moe_act", "mla_up_proj")
_EXPERT_MODULES = ("moe", "moe_act", "shared_experts")


@evaluate_rules
def find_adapter_problems(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    """Check settings beside adapters; shape None: unknown."""
    lora = config.policy.lora
    if not lora.rank:
        return
    targets = f"policy.lora.target_modules=[{','.join(lora.target_modules)}]"
    yield len(set(lora.target_modules)) < len(lora.target_modules), targets, "names a layer twice; name each once"
    yield from list_conflicts(config, "adapters")
    if shape is None:
        return
    usable = ",".join(name for name in lora.target_modules if name != "linear_qkv") or "linear_proj"
    text = f"latent attention has no linear_qkv; use [{usable}]"
    yield shape.latent is not None and "linear_qkv" in lora.target_modules, targets, text
    of_states = [name for name in lora.target_modules if name in get_args(StateTarget)]
    text = f"the model has no delta nets and no Mamba; leave out {', '.join(of_states)}"
    yield shape.delta is None and shape.mamba is None and of_states, targets, text
    yield from _check_lone_adapters(config, shape)


def _check_lone_adapters(config: Config, shape: ModelShape) -> Iterator[Rule]:
    """Check adapters that refits send alone."""
    lora = config.policy.lora
    if config.refit.adapters != "alone" or not config.needs_generation:
        return
    adapted = [entry for entry in build_weight_map(shape) if entry.per_expert and is_adapted(entry, lora)]
    text = "vLLM's CPU build has no adapters of experts; use merged, or leave linear_fc1 and linear_fc2 out of "
    yield adapted and config.cluster.gpus == 0, "refit.adapters=", f"{text}policy.lora.target_modules"
    text = f"engines get the experts of {shape.family} as one tensor, whose adapters are not sent alone; use merged"
    yield any(entry.is_stacked for entry in adapted), "refit.adapters=", text


@evaluate_rules
def find_fp8_problems(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    """Check settings beside FP8; shape None: unknown."""
    fp8 = config.policy.fp8
    if fp8.format == "off":
        return
    yield from list_conflicts(config, "fp8")
    if shape is None:
        return
    if fp8.is_on_device and not shape.fits_transformer_engine:
        text = f"Transformer Engine's layers do not express {shape.family}; use off, with precision=fp8_engines if "
        yield True, "policy.fp8.format=", f"{text}the engines are to compute in FP8"
        return
    yield from _check_fp8_sizes(config, shape)
    if fp8.simulate:
        layers, owner = shape.layers, "the model"
    else:
        layers, owner = shape.layers // config.policy.parallel.pipeline, "a pipeline rank"
    text = f"is more than the {layers} layers that {owner} has"
    yield fp8.first_layers_bf16 > layers, "policy.fp8.first_layers_bf16=", text
    yield fp8.last_layers_bf16 > layers, "policy.fp8.last_layers_bf16=", text


@evaluate_rules
def find_fp8_machine_problems(config: Config) -> Iterator[Rule]:
    """Check that the GPUs of this machine support the recipe of FP8."""
    fp8 = config.policy.fp8
    if not fp8.is_on_device or config.cluster.gpus == 0:
        return
    capability = read_gpu_capability()
    if capability is not None and capability < fp8.least_capability:
        least, lowest = (".".join(map(str, pair)) for pair in (fp8.least_capability, capability))
        advice = "off" if capability < (8, 9) else "recipe=tensorwise"
        text = f"recipe={fp8.recipe} needs GPUs of compute capability {least}, and this machine has {lowest}"
        yield True, "policy.fp8.format=", f"{text}; use {advice}"


def _check_fp8_sizes(config: Config, shape: ModelShape) -> Iterator[Rule]:
    """Check that a rank's matrices are multiples of the recipe's block."""
    fp8, parallel = config.policy.fp8, config.policy.parallel
    sides = {"hidden size": (shape.hidden, 1)}
    sides |= {f"width of {side}": (size, parallel.tensor) for side, size in _list_head_widths(shape).items()}
    if (latent := shape.latent) is not None:
        sides |= {"q_lora_rank": (latent.query_rank or 0, 1), "kv_lora_rank": (latent.rank, 1)}
    if shape.count_layers("dense"):
        sides["feed-forward width"] = (shape.ffn_hidden, parallel.tensor)
    if (delta := shape.delta) is not None:
        outputs = delta.value_heads * delta.value_dim
        sides["width of delta nets' input"] = (delta.channels + outputs + 2 * delta.value_heads, parallel.tensor)
        sides["width of delta nets' output"] = (outputs, parallel.tensor)
    if shape.experts is not None:
        sides["experts' width"] = (shape.experts.ffn_hidden, parallel.expert_tensor)
        sides["shared expert's width"] = (shape.experts.shared_ffn_hidden, parallel.tensor)
    # Kernels of Transformer Engine refuse other sizes at the first forward pass, minutes after the start.
    for side, (size, ranks) in sides.items():
        if size % (ranks * fp8.block):
            split = f" over {ranks} ranks" if ranks > 1 else ""
            advice = "; use fewer ranks or recipe=tensorwise" if fp8.block > 16 else "; use off"
            text = f"{fp8.recipe} takes multiples of {fp8.block}, and the model's {side} is {size}{split}{advice}"
            yield True, "policy.fp8.recipe=", text
            return
    # In the matrix that makes a key's rotated part too, the last block of rows may be a part of one.
    rows = 0 if latent is None else latent.rank + latent.rope_dim
    text = f"the rows that make a short vector and a rotated key are {rows}, and no multiple of 16; use off"
    yield rows % 16 != 0, "policy.fp8.format=", text


def _list_head_widths(shape: ModelShape) -> dict[str, int]:
    """List the sizes of attention's matrices that tensor parallelism splits."""
    heads, key_value_heads, latent = shape.attention_heads, shape.key_value_heads, shape.latent
    if latent is None:
        widths = {"all heads": heads, "queries, keys and values": heads + 2 * key_value_heads}
        return {side: count * shape.head_dim for side, count in widths.items()}
    return {
        "all heads": heads * latent.value_dim,
        "queries": heads * (latent.plain_dim + latent.rope_dim),
        "keys and values": heads * (latent.plain_dim + latent.value_dim),
    }


@evaluate_rules
def find_quantization_problems(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    """Check settings beside quantization-aware training; shape None: unknown."""
    if config.policy.quantization is None:
        return
    yield from list_conflicts(config, "quantization")
    if shape is None:
        return
    kinds = {"for a mixture of experts": shape.experts, "with latent attention": shape.latent}
    unsupported = [text for text, part in {**kinds, "with delta nets": shape.delta}.items() if part is not None]
    yield unsupported, "policy.quantization=", f"is not supported {', '.join(unsupported)}; use null"


@evaluate_rules
def find_training_problems(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    """Check settings of speed and memory; shape None: unknown."""
    yield from list_conflicts(config, "training")
    modules = config.policy.recompute_modules
    key = f"policy.recompute_modules=[{','.join(modules)}]"
    text = "policy.activation_checkpointing=true recomputes whole layers; choose one of them"
    yield modules and config.policy.activation_checkpointing, key, text
    yield len(set(modules)) < len(modules), key, "names a module twice"
    te_modules = [module for module in modules if module in _TE_MODULES]
    text = f"{', '.join(te_modules)} can be recomputed only by Transformer Engine, which needs GPUs; leave out"
    yield te_modules and config.cluster.gpus == 0, key, text
    yield from _check_muon(config, shape)
    yield from _check_reward_model(config, shape)
    if shape is None:
        return
    expert_modules = [module for module in modules if module in _EXPERT_MODULES and shape.experts is None]
    yield expert_modules, key, f"the model has no experts; leave out {', '.join(expert_modules)}"
    text = "the model has no latent attention; leave out mla_up_proj"
    yield "mla_up_proj" in modules and shape.latent is None, key, text


def _check_reward_model(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    """Check that an export of a reward model is one of transformers' models."""
    if shape is None or config.method.head != "score":
        return
    text = f"is of {shape.family}, and transformers has no ForSequenceClassification of it, which an export would be"
    yield not FAMILIES[shape.family].has_reward_models, "policy.model.path=", f"{text}; give a model of another family"
    text = "is a model that also sees images, of which no reward model is made; give a model of text alone"
    yield bool(shape.text_prefix), "policy.model.path=", text


def _check_muon(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    """Check settings of Muon against the model."""
    models = {"policy": (config.policy.optimizer, config.policy.parallel)}
    if config.method.has_value_model:
        models["value"] = config.value.optimizer, config.value.parallel
    passed = config.policy.megatron_optimizer
    fields = [name for name in passed if name in ("muon_split_qkv", "muon_coefficient_type")]
    uses_muon = any(optimizer.name == "muon" for optimizer, _ in models.values())
    text = "changes nothing without policy.optimizer.name=muon"
    yield fields and not uses_muon, f"policy.megatron_optimizer.{''.join(fields[:1])}=", text
    if shape is None:
        return
    sizes = {shape.find_heads(layer) for layer in range(shape.layers)}
    heads, splits = shape.key_value_heads, shape.latent is None and passed.get("muon_split_qkv", True)
    for section, (optimizer, parallel) in models.items():
        if optimizer.name != "muon":
            continue
        advice = "policy.megatron_optimizer.muon_split_qkv=false"
        text = "muon orthogonalizes queries, keys and values apart, and"
        key = f"{section}.optimizer.name="
        split = (
            f"{text} {section}.parallel.tensor={parallel.tensor} splits {heads} key/value heads; use at most {heads}"
        )
        yield splits and parallel.tensor > heads, key, f"{split}, or {advice}"
        yield splits and len(sizes) > 1, key, f"{text} the sizes of this model's heads differ by layer; give {advice}"
        text = f"muon with {section}.optimizer.distributed=true has no place for the experts' biases; use false"
        yield shape.experts is not None and shape.experts.bias and optimizer.distributed, key, text
