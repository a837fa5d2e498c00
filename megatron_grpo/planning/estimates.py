"""Arithmetic of a layout before any dry run: bytes that a rank and a host hold, seconds of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_grpo.config.schema import Config, PolicyConfig
from megatron_grpo.models.adapter_names import measure_adapters
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_layouts import split_policy
from megatron_grpo.planning import generation_cost
from megatron_grpo.planning.generation_cost import count_expert_parameters, find_lengths
from megatron_grpo.platform.hardware import Hardware
from megatron_grpo.preflight.refit_memory import count_routed_bytes, count_token_bytes

_CHUNK_TOKENS = 64  # of a chunk of Mamba's states, as in `trainer.model.mamba`
_FILE_WIDTH = 2  # bytes of a number in the model's files
_TOKEN_BYTES = 40  # of a token in the object store: its number, log-probabilities, masks, and fields of the loss
_WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}  # bytes


def count_static_bytes(config: Config, shape: ModelShape) -> int:
    """Count bytes of weights, gradients and optimizer state of the fullest rank.

    Padding is left out; with adapters only weights are counted.
    """
    # A parameter trained in bfloat16 takes 2 bytes as weight, 4 as gradient, and 12 in the optimizer: main weight and
    # two moments, which a distributed optimizer splits over replicas. In float32 the weight is the main weight. With
    # Muon the layers' matrices have one moment.
    policy, parallel = config.policy, config.policy.parallel
    ranks_per_stage, parts = parallel.world_size // parallel.pipeline, parallel.expert * parallel.expert_tensor
    weight, gradient, layer_state = count_parameter_bytes(policy)
    *_, vocabulary_state = count_parameter_bytes(policy, is_vocabulary=True)
    copies = 2 if config.uses_reference and not config.reference.offload and not policy.lora.rank else 1
    worst = 0.0
    for shard in split_policy(parallel, shape)[::ranks_per_stage]:
        dense, routed = count_layer_parameters(shape, shard.layers)
        matrices = _count_vocabulary_matrices(shard.has_embedding, shard.has_output, shape)
        vocabulary = matrices * shape.vocab * shape.hidden / parallel.tensor
        replicas, total = parallel.data * parallel.context, 0.0
        for parameters, copied, state in (
            (vocabulary, replicas, vocabulary_state),
            (dense / parallel.tensor, replicas, layer_state),
            (routed / parts, ranks_per_stage // parts, layer_state),
        ):
            split = copied if policy.optimizer.distributed else 1
            trained = 0.0 if policy.lora.rank else gradient + state * (1 - policy.optimizer.cpu_offload) / split
            total += parameters * (copies * weight + trained)
        worst = max(worst, total)
    return int(worst)


def _count_vocabulary_matrices(has_embedding: bool, has_head: bool, shape: ModelShape) -> int:
    return int(has_embedding) + int(has_head and not (shape.tied_embeddings and has_embedding))


def count_parameter_bytes(policy: PolicyConfig, *, is_vocabulary: bool = False) -> tuple[float, float, float]:
    """Count a trained parameter's bytes: as weight, gradient, in the optimizer.

    They are lower bounds where fields of Megatron-Core change them. `is_vocabulary`: of embedding and head.
    """
    fields = policy.megatron_optimizer
    weight = 1.0 if policy.fp8.is_on_device and policy.fp8.parameters else float(_WIDTH[policy.precision])
    reduced = policy.ddp.get("grad_reduce_in_fp32", True) and policy.precision != "float32"
    gradient = _WIDTH.get(str(fields.get("main_grads_dtype", "float32")), 4) if reduced else _WIDTH[policy.precision]
    main = _WIDTH.get(str(fields.get("main_params_dtype", "float32")), 2)
    names = ("exp_avg_dtype", "exp_avg_sq_dtype")[: 1 if policy.optimizer.name == "muon" and not is_vocabulary else 2]
    moments = sum(_WIDTH.get(str(fields.get(name, "float32")), 1) for name in names)
    return weight, float(gradient), float(moments + (main if policy.precision != "float32" else 0))


def count_host_bytes(config: Config, shape: ModelShape) -> float:
    """Count bytes of tensors in host memory, over all nodes."""
    policy, parallel, engines = config.policy, config.policy.parallel, config.generation.parallel
    parameters = _count_parameters(shape)
    weight, _, state = count_parameter_bytes(policy)
    # Replicas of dense matrices; those of experts are split over more ranks, and have as many replicas or fewer.
    copies = parallel.data * parallel.context
    dense = parameters - count_layer_parameters(shape, range(shape.layers))[1]
    copied_parameters = dense * copies + (parameters - dense) * max(
        1, copies * parallel.tensor // (parallel.expert * parallel.expert_tensor)
    )
    trained = 0.0 if policy.lora.rank else 1.0
    split = 1.0 if policy.optimizer.distributed else copied_parameters / parameters
    offload = policy.optimizer.cpu_offload
    # Optimizer state on the host is a main weight, a gradient and two moments, 4 bytes each.
    total = trained * parameters * split * 16 * offload
    if config.uses_reference and config.reference.offload and not policy.lora.rank:
        total += copied_parameters * weight
    # Where engines share the GPUs, policy and engines leave them to each other and keep their tensors on the host.
    if config.generation.is_colocated and config.needs_generation:
        total += copied_parameters * weight + trained * parameters * split * state * (1 - offload)
        total += parameters * _WIDTH[config.engine_dtype] * engines.data
    if config.has_checkpoints and config.checkpointing.async_save:  # copies weights and optimizer state
        total += count_checkpoint_bytes(config, shape)
    return total + count_replayed_bytes(config, shape)


def count_checkpoint_bytes(config: Config, shape: ModelShape) -> int:
    """Count bytes of a checkpoint: weights and optimizer state.

    They are those of adapters alone where there are some. A value model counts as one of the policy's sizes.
    """
    models = [config.policy, *([config.value_model] if config.value_model is not None else [])]
    parameters, total = _count_parameters(shape), 0.0
    for policy in models:
        weight, _, state = count_parameter_bytes(policy)
        adapters = measure_adapters(shape, policy.lora).values() if policy.lora.rank else ()
        trained = sum(rows * columns for rows, columns in adapters) if policy.lora.rank else parameters
        total += trained * (weight + state)
    return int(total)


def count_loaded_bytes(config: Config, shape: ModelShape) -> int:
    """Count bytes of the model's files that ranks read.

    Each replica reads its copy of dense matrices.
    """
    parallel, parameters = config.policy.parallel, _count_parameters(shape)
    dense = parameters - count_layer_parameters(shape, range(shape.layers))[1]
    return int(_FILE_WIDTH * (parameters - dense + dense * parallel.data * parallel.context))


def count_store_bytes(config: Config, shape: ModelShape) -> float:
    """Count bytes in Ray's object stores, over all nodes.

    Recorded experts are left out. Tokens are where they were sampled and where they are learnt, as are a teacher's
    outputs.
    """
    if config.plan.workload != "rl":
        return 0.0
    age = config.async_sampling.max_trajectory_age_steps if config.async_sampling.enabled else 0
    tokens, outputs = float(find_lengths(config).totals.mean()) * config.samples_per_step, 0
    if config.named_teachers or config.teaches_itself:
        top = config.distillation.topk_logits_k
        outputs = 2 * shape.hidden if top is None else 4 * (2 * top + 1)
    return 2 * tokens * (_TOKEN_BYTES * (2 + age) + outputs)


def _count_parameters(shape: ModelShape) -> float:
    layers = sum(count_layer_parameters(shape, range(shape.layers)))
    return layers + _count_vocabulary_matrices(True, True, shape) * shape.vocab * shape.hidden


def count_replayed_bytes(config: Config, shape: ModelShape) -> float:
    """Count bytes of recorded experts in host memory, over all nodes."""
    if config.plan.workload != "rl" or not count_token_bytes(config, shape):
        return 0.0
    return count_routed_bytes(config, shape, float(find_lengths(config).totals.mean()))


def count_layer_parameters(shape: ModelShape, layers: Sequence[int]) -> tuple[float, float]:
    """Count parameters of layers without their routed experts, and of these experts."""
    dense, routed = sum(generation_cost.count_layer_parameters(shape, layer, 1) for layer in layers), 0.0
    if shape.experts is not None:
        with_experts = sum(map(shape.has_experts, layers))
        routed += with_experts * shape.experts.count * count_expert_parameters(shape)
        dense += with_experts * shape.hidden * shape.experts.count
    return dense, routed


def estimate_activation_bytes(config: Config, shape: ModelShape) -> float:
    """Estimate bytes of activations of the fullest stage, roughly."""
    # Microbatches in flight keep activations for the backward pass. With recomputation a layer keeps its input, and one
    # layer at a time all of it; without, every layer keeps the inputs of its products and norms, queries, keys, values
    # and the output of attention.
    policy, parallel = config.policy, config.policy.parallel
    tokens = policy.microbatch_tokens / parallel.context
    rows = parallel.tensor if parallel.sequence else 1
    layers = max(
        len(shard.layers) for shard in split_policy(parallel, shape)[:: parallel.world_size // parallel.pipeline]
    )
    in_flight = (
        parallel.pipeline if parallel.virtual_pipeline == 1 else parallel.pipeline * (1 + 1 / parallel.virtual_pipeline)
    )
    width, sizes = _WIDTH[policy.precision], [shape.find_heads(layer) for layer in range(shape.layers)]
    heads = shape.attention_heads * max(size.head_dim for size in sizes)
    keys = 2 * max(size.key_value_heads * size.head_dim for size in sizes)
    layer_numbers = (
        5 * shape.hidden / rows + (2 * heads + keys) / parallel.tensor + 4 * shape.ffn_hidden / parallel.tensor
    )
    if shape.experts is not None:
        experts = shape.experts
        wide = experts.top_k * (3 * shape.hidden + 4 * experts.ffn_hidden) / parallel.tensor
        wide += 4 * experts.shared_ffn_hidden / parallel.tensor
        layer_numbers = 5 * shape.hidden / rows + (2 * heads + keys) / parallel.tensor + wide
    if shape.mamba is not None:  # of its chunks' tokens, every head keeps three numbers in float32 for each pair
        pairs = 6 * shape.mamba.heads * _CHUNK_TOKENS
        mamba = 5 * shape.hidden / rows + (pairs + 4 * generation_cost.count_mamba_width(shape.mamba)) / parallel.tensor
        layer_numbers = max(layer_numbers, mamba)
    saved_numbers = shape.hidden / rows if policy.activation_checkpointing else layer_numbers
    logits = 2 * 4 * 2**26  # two chunks of logits in float32, as large as those of the chunked kernel
    return float(width * tokens * (layers * in_flight * saved_numbers + layer_numbers) + logits)


def estimate_step_s(config: Config, shape: ModelShape, hardware: Hardware, tokens: float | None = None) -> float:
    """Estimate seconds of an optimizer step, roughly, to order layouts.

    Args:
        config: the run's configuration.
        shape: sizes of the model.
        hardware: the GPUs.
        tokens: tokens of all samples of a step; None: those of `find_lengths`.
    """
    policy, parallel = config.policy, config.policy.parallel
    tokens = float(find_lengths(config).totals.sum()) if tokens is None else tokens
    passes = 4.0 if policy.activation_checkpointing else 3.0
    experts = shape.experts
    dense, routed = count_layer_parameters(shape, range(shape.layers))
    active = shape.vocab * shape.hidden + dense
    active += routed * experts.top_k / experts.count if experts is not None else 0.0
    # Products run at half of the peak. Messages of tensor, context and expert parallelism are not hidden, and run at
    # the speed of the slowest link between their ranks.
    compute = 2 * passes * active * tokens / parallel.world_size / (0.5 * hardware.flops["bfloat16"])
    stage_tokens = tokens / parallel.data / parallel.context / parallel.pipeline * shape.layers

    def find_speed(ranks: int) -> float:
        within = ranks <= hardware.gpus_per_domain
        return hardware.local_bytes_per_s if within else hardware.network_bytes_per_s

    token_bytes = 2.0 * shape.hidden
    messages_s = 4 * stage_tokens * token_bytes * (parallel.tensor - 1) / parallel.tensor / hardware.local_bytes_per_s
    turns = parallel.context - 1
    sizes = [shape.find_heads(layer) for layer in range(shape.layers)]
    features = sum(size.key_value_heads * size.head_dim for size in sizes) / shape.layers
    key_bytes = 2.0 * 2 * features / parallel.tensor
    messages_s += turns * stage_tokens * key_bytes / find_speed(parallel.tensor * parallel.context)
    if experts is not None and parallel.expert > 1:
        copied_bytes = stage_tokens / parallel.tensor * experts.top_k * token_bytes
        messages_s += 2 * copied_bytes * (parallel.expert - 1) / parallel.expert / find_speed(parallel.expert)
    microbatches = max(1, math.ceil(tokens / parallel.data / policy.microbatch_tokens))
    bubble = (parallel.pipeline - 1) / parallel.virtual_pipeline / microbatches
    # An interleaved schedule pads the microbatches to a multiple of the stages.
    padding = math.ceil(microbatches / parallel.pipeline) * parallel.pipeline / microbatches
    return (compute + passes * messages_s) * (1 + bubble) * (padding if parallel.virtual_pipeline > 1 else 1.0)
