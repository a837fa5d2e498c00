"""Checks of engines: devices, sequence lengths, shared GPUs and refits."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.schema import Config, ParallelConfig
from megatron_grpo.models.families import FAMILIES, build_weight_map
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_map import can_travel_in_fp8
from megatron_grpo.preflight.layout_checks import find_layout_problems
from megatron_grpo.preflight.rules import Rule, evaluate_rules, list_conflicts
from megatron_grpo_kernels.fp8_format import BLOCK

# Sizes of attention heads that vLLM's CPU build has kernels for.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)

CPU_DELTA_SIZES = (128, 128)
"""Sizes of a delta net's keys and values that vLLM's CPU build has kernels for."""
TORCHVISION_FAMILIES = ("qwen3_5", "qwen3_5_moe")
"""Families whose module in vLLM imports torchvision, as all models that see images do; its CPU build lacks it."""


@evaluate_rules
def find_engine_problems(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    """Check that devices, model (None: unknown) and vLLM support the engines' settings."""
    yield from list_conflicts(config, "engines")
    has_engines = config.needs_generation and not config.generation.server.urls
    if has_engines and shape is not None and config.generation.engine.speculative.uses_mtp:
        families = ", ".join(family.name for family in FAMILIES.values() if family.proposes_tokens)
        text = f"proposes tokens with layers of the model that vLLM has for {families}, and the model is {shape.family}"
        is_unsupported = not FAMILIES[shape.family].proposes_tokens
        yield is_unsupported, "generation.engine.speculative.method=", f"{text}; use ngram"
    if config.cluster.gpus == 0 and shape is not None and shape.indexer is not None:
        text = f"is a {shape.family} model, whose sparse attention vLLM has on GPUs alone; use them, or"
        yield has_engines, "policy.model.path=", f"{text} generation.server.urls"
    if config.cluster.gpus == 0 and shape is not None and shape.latent is None:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        for size in sorted({shape.find_heads(layer).head_dim for layer in range(shape.layers)}):
            text = f"has heads of {size}, for which vLLM has no attention on a CPU; it has {sizes}"
            yield has_engines and size not in CPU_HEAD_SIZES, "policy.model.path=", text
        if has_engines and (delta := shape.delta) is not None:
            dims = f"{delta.key_dim} and {delta.value_dim}"
            text = f"has delta nets with heads of {dims} (linear_key_head_dim, linear_value_head_dim), which vLLM"
            is_unsupported = (delta.key_dim, delta.value_dim) != CPU_DELTA_SIZES
            yield is_unsupported, "policy.model.path=", f"{text} computes on a CPU only for heads of 128"
            text = "delta nets are computed by vLLM on a CPU only in bfloat16; use generation.engine.dtype=bfloat16"
            yield config.engine_dtype != "bfloat16", f"generation.engine.dtype={config.engine_dtype}", text
        if has_engines and (shape.family in TORCHVISION_FAMILIES or shape.text_prefix):
            kind = "model that sees images" if shape.text_prefix else f"{shape.family} model"
            text = f"is a {kind}, whose module in vLLM imports torchvision, and that is not installed"
            text += "; run requirements/install_cpu.sh .venv, or install torchvision's build for this torch"
            yield find_spec("torchvision") is None, "policy.model.path=", text


@evaluate_rules
def find_length_problems(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    """Check that lengths fit each other and the model (None: unknown)."""
    yield from check_sequences(config, shape, has_responses=config.needs_generation)
    yield from list_conflicts(config, "lengths")


def check_sequences(config: Config, shape: ModelShape | None, *, has_responses: bool = True) -> Iterator[Rule]:
    """Check lengths of prompts and responses, and stop tokens; shape None: unknown.

    Without responses (`has_responses`) nothing is sampled, and their lengths are not read.
    """
    longest, subject = config.policy.max_total_sequence_length, "policy.max_total_sequence_length="
    prompt, response = config.data.max_input_seq_length, config.generation.max_new_tokens
    total = f"data.max_input_seq_length + generation.max_new_tokens = {prompt} + {response} = {prompt + response}"
    yield has_responses and prompt + response > longest, subject, f"{total} tokens do not fit"
    if shape is None:
        return
    text = f"the model has {shape.max_positions} positions; use at most that"
    yield 0 < shape.max_positions < longest, subject, text
    highest = max(config.generation.stop_token_ids, default=0)
    text = f"has {highest}, and the model's tokens are numbered from 0 to {shape.vocab - 1}"
    yield highest >= shape.vocab, "generation.stop_token_ids", text


@evaluate_rules
def find_placement_problems(config: Config) -> Iterator[Rule]:
    """Check settings beside generation.placement=colocated."""
    if not config.generation.is_colocated:
        return
    yield from list_conflicts(config, "colocated")
    if not config.cluster.gpus:
        return
    # Every rank of the policy shares its GPU with one rank of an engine, and with one of the value model at most.
    policy, engines = config.policy.parallel.world_size, config.generation.parallel
    ranks = engines.ranks_per_engine * engines.data
    size = f"tensor={engines.tensor} x pipeline={engines.pipeline} x data={engines.data}"
    comparison, idle = ("more", "") if ranks > policy else ("fewer", ", some of which no engine would use")
    advice = f"data={policy // engines.ranks_per_engine}" if policy % engines.ranks_per_engine == 0 else "other sizes"
    text = f"has {ranks} ranks ({size}), {comparison} than the {policy} GPUs of the policy that engines share{idle}"
    yield ranks != policy, "generation.parallel", f"{text}; use {advice}"
    # Engine n has the GPUs of the policy's ranks from n * ranks_per_engine on, and sees those of one node.
    text = (
        f"{engines.ranks_per_engine} GPUs of an engine do not divide the {config.cluster.gpus} of a node; use a divisor"
    )
    spans = policy > config.cluster.gpus and config.cluster.gpus % engines.ranks_per_engine > 0
    yield spans and ranks == policy, "generation.parallel", text
    ranks = 0 if config.value_model is None else config.value_model.parallel.world_size
    text = f"has {ranks} ranks, more than the {policy} GPUs of the policy that it shares; make it smaller"
    yield ranks > policy, "value.parallel", text
    for section, teacher in config.teacher_models.items():
        ranks = teacher.parallel.world_size
        text = f"has {ranks} ranks, more than the {policy} GPUs of the policy that it shares; make it smaller"
        yield ranks > policy, f"{section}.parallel", text


@evaluate_rules
def find_refit_problems(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    """Check settings beside refit.fp8_blocks; shape None: unknown."""
    if not config.refit.fp8_blocks:
        return
    yield from list_conflicts(config, "fp8_blocks")
    is_set = config.generation.engine_args.get("quantization") == "fp8_per_block"
    text = "is for engines that keep blocks in FP8; add +generation.engine_args.quantization=fp8_per_block"
    yield not is_set, "refit.fp8_blocks=", f"{text}, or use false"
    # A layout that does not fit the model has no cuts to look at; its own check reports it.
    if shape is not None and not any(find_layout_problems(config, shape)):
        cuts = list(find_cut_blocks(shape, config.policy.parallel, config.generation.parallel))
        first_cut = next(iter(cuts), "") + (f" (and {len(cuts) - 1} more)" if len(cuts) > 1 else "")
        text = f"ranks would share a block of 128 x 128: {first_cut}; use fewer tensor-parallel ranks, or false"
        yield cuts, "refit.fp8_blocks=", text


def find_cut_blocks(shape: ModelShape, policy: ParallelConfig, engine: GenerationParallelConfig) -> Iterator[str]:
    """Describe each matrix that a rank cuts inside a block."""
    # An FP8 block has one scale, computed from its largest number. Ranks that hold parts of one block would compute
    # different scales, and an engine's layer has room for one; a common scale would take a collective for each matrix
    # of a refit. So the ranks of neither side may cut a matrix inside a block.
    # What engines really keep is traced later, and the writer refuses parts of blocks (`model_writer`).
    engine_experts = 1 if engine.expert > 1 else engine.tensor
    counts = {"policy": (policy.tensor, policy.expert_tensor), "engine": (engine.tensor, engine_experts)}
    for entry in filter(can_travel_in_fp8, build_weight_map(shape)):
        for side, (tensor, expert_tensor) in counts.items():
            count = expert_tensor if entry.per_expert else tensor
            # Then vLLM keeps copies of the heads of keys and values, and the policy cuts them.
            if side == "engine" and entry.split in ("groups", "global_groups") and count > shape.sizes[entry.split]:
                continue
            for part in (part for rank in range(count) for part in entry.list_slices(shape, 0, rank, count)):
                bounds = [(*bounds, size) for bounds, size in zip(part.bounds, part.shape, strict=True)]
                if any(begin % BLOCK or (end % BLOCK and end != size) for begin, end, size in bounds):
                    cuts = [f"{begin} to {end}" for begin, end, size in bounds if (begin, end) != (0, size)]
                    yield f"{part.name} on {side} ranks: {' and '.join(cuts)} of {part.shape}"
