"""Checks of engines: devices, sequence lengths, shared GPUs and refits."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.schema import Config, ParallelConfig
from megatron_grpo.models.families import build_weight_map, find_family, list_families
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_layouts import list_engine_stages
from megatron_grpo.models.weight_map import can_travel_in_fp8
from megatron_grpo.preflight.layout_checks import find_layout_problems
from megatron_grpo.preflight.rules import Rule, evaluate_rules
from megatron_grpo_kernels.fp8_format import BLOCK

# Sizes of attention heads that vLLM's CPU build has kernels for.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)

CPU_DELTA_SIZES = (128, 128)
"""Sizes of a delta net's keys and values that vLLM's CPU build has kernels for."""
TORCHVISION_FAMILIES = ("qwen3_5", "qwen3_5_moe")
"""Families whose module in vLLM imports torchvision, as all models that see images do; its CPU build lacks it."""
CPU_LATENT_SIZES = (512, 64)
"""Lengths of latent attention's short vector and rotated part that vLLM's CPU build has a kernel for."""
CPU_EXPERT_MULTIPLE = 32
"""Least factor of the sizes of an expert's matrices in vLLM's CPU build."""
_ELSEWHERE = "use GPUs, or generation.server.urls"


@evaluate_rules
def find_engine_problems(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    """Check that devices, model (None: unknown) and vLLM support the engines' settings."""
    yield from _check_engine_settings(config)
    reason = explain_fixed_engines(config)
    text = f"engines come and go with Ray's nodes, and those of this run stay: {reason}; use false"
    yield config.generation.elastic and reason, "generation.elastic=", text
    has_engines = config.needs_generation and not config.generation.server.urls
    if has_engines and shape is not None and config.generation.engine.speculative.uses_mtp:
        families = ", ".join(family.name for family in list_families() if family.proposes_tokens)
        is_unsupported = not find_family(shape.family).proposes_tokens
        text = f"proposes tokens with layers of the model that vLLM has for {families},"
        text += f" and the model is {shape.family}; use ngram"
        yield is_unsupported, "generation.engine.speculative.method=", text
    if has_engines and config.cluster.gpus == 0 and shape is not None:
        yield from _check_cpu_attention(config, shape)
        yield from _check_cpu_experts(config, shape)
        yield from _check_cpu_stages(config, shape)
        kind = "model that sees images" if shape.is_text_part else f"{shape.family} model"
        text = f"is a {kind}, whose module in vLLM imports torchvision, and that is not installed; run"
        text += " requirements/install_cpu.sh .venv, or install torchvision's build for this torch"
        needs_torchvision = shape.family in TORCHVISION_FAMILIES or shape.is_text_part
        yield needs_torchvision and find_spec("torchvision") is None, "policy.model.path=", text


def explain_fixed_engines(config: Config) -> str | None:
    """Say why a run's engines stay; None: they need not."""
    if config.generation.server.urls:
        return "they are the servers of generation.server.urls"
    if config.generation.is_colocated:
        return "they share the policy's devices (generation.placement=colocated)"
    if not config.debug.train:
        return "nothing is trained (debug.train=false), so that no refit brings weights to a new one"
    return None


def _check_engine_settings(config: Config) -> Iterator[Rule]:
    generation, engine, on_cpu = config.generation, config.generation.engine, config.cluster.gpus == 0
    is_speculative = engine.speculative.num_speculative_tokens > 0
    text = "vLLM's batch-invariant kernels are for GPUs, and this is a run on CPU; a response repeats to the bit there"
    text += " when the same requests come together, as they do in each step"
    yield on_cpu and engine.batch_invariant, "generation.engine.batch_invariant=", text
    text = "a CPU engine cannot repeat a response whose prompt is cut into pieces; leave it out"
    yield on_cpu and engine.enable_chunked_prefill, "generation.engine.enable_chunked_prefill=", text
    text = "fails on a CPU in the installed vLLM with speculative decoding, unless generation.top_p is below 1;"
    text += " use null"
    is_unsupported = on_cpu and is_speculative and generation.top_k is not None and generation.top_p == 1
    yield is_unsupported, "generation.top_k=", text
    text = "the installed vLLM proposes tokens on the last stage only, and the others fail over it; use 1"
    yield is_speculative and generation.parallel.pipeline > 1, "generation.parallel.pipeline=", text
    tokens, longest = engine.max_num_batched_tokens, config.policy.max_total_sequence_length
    if tokens is not None:
        text = f"is less than policy.max_total_sequence_length={longest}, and prompts are not cut into pieces"
        cuts_prompts = not on_cpu if engine.enable_chunked_prefill is None else engine.enable_chunked_prefill
        yield tokens < longest and not cuts_prompts, "generation.engine.max_num_batched_tokens=", text
        count = generation.sequences_per_engine
        text = f"is less than a token for each of the {count} responses decoded together"
        yield tokens < count, "generation.engine.max_num_batched_tokens=", text


def _check_cpu_attention(config: Config, shape: ModelShape) -> Iterator[Rule]:
    """Check that vLLM's CPU build has kernels for the model's attention.

    Layers that stand in the place of attention are checked too.
    """
    subject = "policy.model.path="
    text = f"is a {shape.family} model, whose sparse attention vLLM has on GPUs alone; {_ELSEWHERE}"
    yield shape.indexer is not None, subject, text
    if shape.latent is None:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        for size in sorted({shape.find_heads(layer).head_dim for layer in range(shape.layers)}):
            text = f"has heads of {size}, for which vLLM has no attention on a CPU; it has {sizes}"
            yield size not in CPU_HEAD_SIZES, subject, text
    else:
        sizes = f"{shape.latent.rank} and {shape.latent.rope_dim}"
        is_other = (shape.latent.rank, shape.latent.rope_dim) != CPU_LATENT_SIZES
        text = f"has latent attention of {sizes} (kv_lora_rank, qk_rope_head_dim),"
        text += f" which vLLM computes on a CPU only for 512 and 64; {_ELSEWHERE}"
        yield is_other and shape.indexer is None, subject, text
    if (delta := shape.delta) is not None:
        dims = f"{delta.key_dim} and {delta.value_dim}"
        is_unsupported = (delta.key_dim, delta.value_dim) != CPU_DELTA_SIZES
        text = f"has delta nets with heads of {dims} (linear_key_head_dim, linear_value_head_dim),"
        text += " which vLLM computes on a CPU only for heads of 128"
        yield is_unsupported, subject, text
        text = "delta nets are computed by vLLM on a CPU only in bfloat16; use generation.engine.dtype=bfloat16"
        yield config.engine_dtype != "bfloat16", f"generation.engine.dtype={config.engine_dtype}", text


def _check_cpu_experts(config: Config, shape: ModelShape) -> Iterator[Rule]:
    """Check that vLLM's CPU build has kernels for the model's experts."""
    experts, subject = shape.experts, "policy.model.path="
    if experts is None:
        return
    text = f"has experts without gates, for which vLLM has no kernel on a CPU; {_ELSEWHERE}"
    yield not shape.has_gates, subject, text
    if not shape.has_gates:
        return
    text = f"is a {shape.family} model, whose way to choose experts vLLM has on GPUs alone; {_ELSEWHERE}"
    yield shape.family == "minimax_m2", subject, text  # by sigmoid scores, without groups
    multiples = f"vLLM's kernel on a CPU takes multiples of {CPU_EXPERT_MULTIPLE}"
    text = f"has experts that read vectors of {shape.hidden} (hidden_size), and {multiples}; {_ELSEWHERE}"
    yield shape.hidden % CPU_EXPERT_MULTIPLE, subject, text
    if shape.activation != "clamped_swiglu":  # vLLM fills up the matrices of other experts
        return
    rows, parallel = experts.ffn_hidden, config.generation.parallel
    text = f"has experts of {rows} rows (intermediate_size), and {multiples} for {shape.family}; {_ELSEWHERE}"
    yield rows % CPU_EXPERT_MULTIPLE, subject, text
    rows_of_rank = rows if parallel.expert > 1 else rows // parallel.tensor
    is_cut = rows % CPU_EXPERT_MULTIPLE == 0 and rows_of_rank % CPU_EXPERT_MULTIPLE
    text = f"leaves {rows_of_rank} rows of each expert to a rank, and {multiples} for {shape.family}; use 1, or"
    text += f" generation.parallel.expert={parallel.tensor}"
    yield is_cut, "generation.parallel.tensor=", text


def _check_cpu_stages(config: Config, shape: ModelShape) -> Iterator[Rule]:
    """Check that every pipeline stage of a hybrid has attention, or none has."""
    # A worker without attention asks for another layout of the caches than those with it, and vLLM then gives up.
    kinds = [shape.list_kinds(layer) for layer in range(shape.layers)]
    has_attention = ["mixer" in layer_kinds and not layer_kinds & {"delta", "mamba"} for layer_kinds in kinds]
    stages = config.generation.parallel.pipeline

    def find_lacking(count: int) -> range | None:
        ranges = list_engine_stages(shape.layers, count)
        return next((layers for layers in ranges if not any(has_attention[layer] for layer in layers)), None)

    if 1 < stages <= shape.layers and any(has_attention) and (lacking := find_lacking(stages)) is not None:
        usable = max(count for count in range(1, stages) if find_lacking(count) is None)
        text = f"has a stage without attention, of the layers {lacking[0]} to {lacking[-1]},"
        text += f" which vLLM does not have on a CPU beside stages with attention; use {usable}"
        yield True, "generation.parallel.pipeline=", text


@evaluate_rules
def find_length_problems(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    """Check that lengths fit each other and the model (None: unknown)."""
    yield from check_sequences(config, shape, has_responses=config.needs_generation)
    longest = config.policy.max_total_sequence_length
    sizes = {
        "policy.microbatch_tokens": config.policy.microbatch_tokens,
        "policy.logprob_microbatch_tokens": config.policy.logprob_microbatch_tokens,
        "value.microbatch_tokens": config.value.microbatch_tokens,
    }
    text = f"the longest sequence, policy.max_total_sequence_length={longest}, does not fit"
    for key, tokens in sizes.items():
        yield tokens is not None and tokens < longest, f"{key}=", text


def check_sequences(config: Config, shape: ModelShape | None, *, has_responses: bool = True) -> Iterator[Rule]:
    """Check lengths of prompts and responses, and stop tokens; shape None: unknown.

    Without responses (`has_responses`) nothing is sampled, and their lengths are not read.
    """
    longest, subject = config.policy.max_total_sequence_length, "policy.max_total_sequence_length="
    prompt, response = config.data.max_input_seq_length, config.generation.max_new_tokens
    total = f"data.max_input_seq_length + generation.max_new_tokens = {prompt} + {response} = {prompt + response}"
    total += " tokens do not fit"
    yield has_responses and prompt + response > longest, subject, total
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
    asynchrony = config.async_sampling
    text = "has engines that lose their cache when they sleep; use separate, or"
    text += " LOOP.async_grpo.recompute_kv_cache_after_weight_updates=true"
    keeps_cache = asynchrony.enabled and not asynchrony.recompute_kv_cache_after_weight_updates
    yield keeps_cache, "generation.placement=", text
    if not config.cluster.gpus:
        return
    text = "goes over NCCL, which has one rank a GPU, and with generation.placement=colocated there are two;"
    text += " use reshard"
    yield config.refit.mode == "broadcast", "refit.mode=", text
    text = "keeps weights in a form that cannot leave a GPU and come back, for generation.placement=colocated;"
    text += " use false"
    yield config.policy.fp8.parameters, "policy.fp8.parameters=", text
    yield from _check_shared_gpus(config)


def _check_shared_gpus(config: Config) -> Iterator[Rule]:
    # Every rank of the policy shares its GPU with one rank of an engine, and with one of the value model at most.
    policy, engines = config.policy.parallel.world_size, config.generation.parallel
    ranks = engines.ranks_per_engine * engines.data
    size = f"tensor={engines.tensor} x pipeline={engines.pipeline} x data={engines.data}"
    comparison, idle = ("more", "") if ranks > policy else ("fewer", ", some of which no engine would use")
    advice = f"data={policy // engines.ranks_per_engine}" if policy % engines.ranks_per_engine == 0 else "other sizes"
    text = f"has {ranks} ranks ({size}), {comparison} than the {policy} GPUs of the policy that engines share{idle};"
    text += f" use {advice}"
    yield ranks != policy, "generation.parallel", text
    # Engine n has the GPUs of the policy's ranks from n * ranks_per_engine on, and sees those of one node.
    text = f"{engines.ranks_per_engine} GPUs of an engine do not divide the {config.cluster.gpus} of a node;"
    text += " use a divisor"
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
    text = f"refit.mode={config.refit.mode} sends tensors as vLLM's loader reads them; use reshard"
    yield config.refit.mode != "reshard", "refit.fp8_blocks=", text
    text = "such engines compute in bfloat16; give generation.engine.dtype=bfloat16"
    yield config.engine_dtype != "bfloat16", "refit.fp8_blocks=", text
    is_set = config.generation.engine_args.get("quantization") == "fp8_per_block"
    text = "is for engines that keep blocks in FP8; add +generation.engine_args.quantization=fp8_per_block,"
    text += " or use false"
    yield not is_set, "refit.fp8_blocks=", text
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
