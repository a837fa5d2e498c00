"""Checks of adapters, FP8, quantization, recomputation and optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from megatron_grpo.config.adapter_targets import StateTarget
from megatron_grpo.config.loop_schema import SampledLoopConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.models.adapter_names import is_adapted
from megatron_grpo.models.families import build_weight_map, find_family
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.preflight.rules import Rule, evaluate_rules, list_trained_models

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
    yield not lora.target_modules, targets, "leaves nothing to train; name a layer, or set policy.lora.rank=0"
    text = f"with policy.lora.rank={lora.rank} the reference policy is the base model itself, which does not move; use"
    text += " false, or train all weights with policy.lora.rank=0"
    loop = config.loop
    yield isinstance(loop, SampledLoopConfig) and loop.sync_ref_model, "LOOP.sync_ref_model=", text
    if config.refit.adapters == "alone":
        text = "sends no weights, which refit.fp8_blocks=true would round; use merged, or refit.fp8_blocks=false"
        yield config.refit.fp8_blocks, "refit.adapters=", text
        text = "needs engines of the run's own, which start with a slot for adapters; use merged"
        yield config.generation.server.urls, "refit.adapters=", text
        text = "needs slots of vLLM's, which take policy.lora.rank up to 512; use merged, or a lower rank"
        yield lora.rank > 512, "refit.adapters=", text
    text = "adapters leave the base model as it is; use 0"
    yield config.policy.moe.bias_update_rate > 0, "policy.moe.bias_update_rate=", text
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
    text = "vLLM's CPU build has no adapters of experts; use merged,"
    text += " or leave linear_fc1 and linear_fc2 out of policy.lora.target_modules"
    yield adapted and config.cluster.gpus == 0, "refit.adapters=", text
    text = f"engines get the experts of {shape.family} as one tensor, whose adapters are not sent alone; use merged"
    yield any(entry.is_stacked for entry in adapted), "refit.adapters=", text


@evaluate_rules
def find_fp8_problems(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    """Check settings beside FP8; shape None: unknown."""
    fp8 = config.policy.fp8
    if fp8.format == "off":
        return
    yield from _check_fp8_settings(config)
    if shape is None:
        return
    if fp8.is_on_device and not shape.fits_transformer_engine:
        text = f"Transformer Engine's layers do not express {shape.family}; use off,"
        text += " with precision=fp8_engines if the engines are to compute in FP8"
        yield True, "policy.fp8.format=", text
        return
    yield from _check_fp8_sizes(config, shape)
    if fp8.simulate:
        layers, owner = shape.layers, "the model"
    else:
        layers, owner = shape.layers // config.policy.parallel.pipeline, "a pipeline rank"
    text = f"is more than the {layers} layers that {owner} has"
    yield fp8.first_layers_bf16 > layers, "policy.fp8.first_layers_bf16=", text
    yield fp8.last_layers_bf16 > layers, "policy.fp8.last_layers_bf16=", text


def _check_fp8_settings(config: Config) -> Iterator[Rule]:
    policy, fp8 = config.policy, config.policy.fp8
    if fp8.recipe == "delayed":
        text = "has scales of earlier steps, which are not simulated; use tensorwise, blockwise or mxfp8"
        yield fp8.simulate, "policy.fp8.recipe=", text
        text = "has no place in Megatron-Core's delayed recipe; use 0, or policy.fp8.recipe=tensorwise"
        yield fp8.first_layers_bf16 > 0, "policy.fp8.first_layers_bf16=", text
        yield fp8.last_layers_bf16 > 0, "policy.fp8.last_layers_bf16=", text
    if fp8.simulate:
        return
    text = "needs GPUs, and this is a run on CPU; use off, or policy.fp8.simulate=true for its numerics"
    yield config.cluster.gpus == 0, "policy.fp8.format=", text
    text = f"needs policy.precision=bfloat16, not {policy.precision}"
    yield policy.precision != "bfloat16", "policy.fp8.format=", text
    text = "needs Transformer Engine's layers, and layers with adapters are torch's; use off, or policy.lora.rank=0"
    yield policy.lora.rank > 0, "policy.fp8.format=", text
    if not fp8.parameters:
        return
    text = "needs policy.optimizer.distributed=true, which keeps the float32 weights beside them"
    yield not policy.optimizer.distributed, "policy.fp8.parameters=", text
    text = "is not supported with recipe=mxfp8, which needs two copies of each weight; use false"
    yield fp8.recipe == "mxfp8", "policy.fp8.parameters=", text


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
    text = "rounds the same products as policy.fp8; use null, or policy.fp8.format=off"
    yield config.policy.fp8.format != "off", "policy.quantization=", text
    text = "rounds weights that are trained, and adapters leave them as they are; use null, or policy.lora.rank=0"
    yield config.policy.lora.rank > 0, "policy.quantization=", text
    if shape is None:
        return
    kinds = {"for a mixture of experts": shape.experts, "with latent attention": shape.latent}
    unsupported = [text for text, part in {**kinds, "with delta nets": shape.delta}.items() if part is not None]
    yield unsupported, "policy.quantization=", f"is not supported {', '.join(unsupported)}; use null"


@evaluate_rules
def find_training_problems(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    """Check settings of speed and memory; shape None: unknown."""
    yield from _check_speed(config)
    yield from _check_optimizers(config)
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


def _check_speed(config: Config) -> Iterator[Rule]:
    """Check communication beside computation, and kernels."""
    policy, on_cpu = config.policy, config.cluster.gpus == 0
    if policy.overlap_param_gather:
        key, overlaps = "policy.overlap_param_gather=", policy.overlap_grad_reduce
        is_off = on_cpu if overlaps is None else not overlaps
        yield is_off, key, "needs policy.overlap_grad_reduce=true"
        for section, model in list_trained_models(config).items():
            yield not model.optimizer.distributed, key, f"needs {section}.optimizer.distributed=true"
    if policy.gradient_accumulation_fusion:
        key = "policy.gradient_accumulation_fusion="
        reason = "takes the gradient of the weight itself, and the product is with a rounded one; use null"
        yield policy.quantization is not None, key, f"with policy.quantization={policy.quantization}: {reason}"
        yield policy.fp8.is_simulated, key, f"with policy.fp8.simulate=True: {reason}"
        yield on_cpu, key, "needs GPUs; use null, which is true where it can be"
    loss = config.loss_fn
    options = {
        "kl_score_function_gradient": loss.kl_score_function_gradient,
        "objective=fipo": loss.objective == "fipo",
    }
    for option, needs_sums in options.items():
        text = f"excludes loss_fn.{option}: torch has no deterministic running sums on GPUs"
        yield policy.deterministic and needs_sums and not on_cpu, "policy.deterministic=", text


def _check_optimizers(config: Config) -> Iterator[Rule]:
    """Check where optimizers keep their state, and what Muon cannot do."""
    on_cpu = config.cluster.gpus == 0
    for section, model in list_trained_models(config).items():
        optimizer, key = model.optimizer, f"{section}.optimizer"
        text = "without GPUs all is in host memory already; leave it out, or give cluster.gpus_per_node"
        yield on_cpu and optimizer.cpu_offload > 0, f"{key}.cpu_offload=", text
        text = "needs GPUs; leave it out, or give cluster.gpus_per_node"
        yield on_cpu and optimizer.precision_aware, f"{key}.precision_aware=", text
        is_whole, text = not on_cpu and not optimizer.distributed, f"needs {key}.distributed=true"
        yield is_whole and optimizer.cpu_offload > 0, f"{key}.cpu_offload=", text
        yield is_whole and optimizer.precision_aware, f"{key}.precision_aware=", text
        if optimizer.name == "muon":
            text = f"excludes {key}.cpu_offload: Megatron-Core's optimizer in host memory is AdamW; use cpu_offload=0,"
            text += " or adamw"
            yield optimizer.cpu_offload > 0, f"{key}.name=", text
            text = f"excludes {key}.precision_aware, which is Transformer Engine's Adam; use precision_aware=false,"
            text += " or adamw"
            yield optimizer.precision_aware, f"{key}.name=", text
    if config.policy.optimizer.name == "muon":
        rank, fp8 = config.policy.lora.rank, config.policy.fp8
        text = f"is for the model's matrices, and policy.lora.rank={rank} trains adapters alone; use adamw"
        yield rank > 0, "policy.optimizer.name=", text
        text = "excludes policy.fp8.parameters: only Megatron-Core's distributed AdamW keeps weights in FP8;"
        text += " use parameters=false"
        yield fp8.parameters and not fp8.simulate, "policy.optimizer.name=", text


def _check_reward_model(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    """Check that an export of a reward model is one of transformers' models."""
    if shape is None or config.method.head != "score":
        return
    text = f"is of {shape.family}, and transformers has no ForSequenceClassification of it, which an export would be;"
    text += " give a model of another family"
    yield not find_family(shape.family).has_reward_models, "policy.model.path=", text
    text = "is a model that also sees images, of which no reward model is made; give a model of text alone"
    yield shape.is_text_part, "policy.model.path=", text


def _check_muon(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    """Check settings of Muon against the model."""
    models = {key: (model.optimizer, model.parallel) for key, model in list_trained_models(config).items()}
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
        key, tensor = f"{section}.optimizer.name=", parallel.tensor
        text = f"muon orthogonalizes queries, keys and values apart, and {section}.parallel.tensor={tensor} splits"
        text += f" {heads} key/value heads; use at most {heads}, or policy.megatron_optimizer.muon_split_qkv=false"
        yield splits and tensor > heads, key, text
        text = "muon orthogonalizes queries, keys and values apart, and the sizes of this model's heads differ by"
        text += " layer; give policy.megatron_optimizer.muon_split_qkv=false"
        yield splits and len(sizes) > 1, key, text
        text = f"muon with {section}.optimizer.distributed=true has no place for the experts' biases; use false"
        yield shape.experts is not None and shape.experts.bias and optimizer.distributed, key, text
