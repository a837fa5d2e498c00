"""Memory beside weights and caches: of a refit on an engine's GPU, of recorded experts in the host."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import psutil

from megatron_grpo.config.schema import Config
from megatron_grpo.models.adapter_names import choose_slot_rank, measure_adapters
from megatron_grpo.models.families import build_weight_map
from megatron_grpo.models.routed_experts import RoutedForm
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_map import WeightEntry, can_travel_in_fp8, list_experts
from megatron_grpo.platform.hardware import Hardware
from megatron_grpo.preflight.rules import Rule, evaluate_rules

# Bytes that a communicator of NCCL takes on a GPU for all peers on other machines together, measured with NCCL 2.28 and
# 64 channels (github.com/NVIDIA/nccl/issues/2363); half of that with 32 channels.
NCCL_POOL = 512 * 2**20
# Bytes that NCCL takes for each peer on the same machine, to send and to receive: 32 channels, with a buffer of 2 MiB
# or of 10 MiB each, as counted on 8 x H100 (github.com/NVIDIA/nccl/issues/1685).
NCCL_SENDING, NCCL_RECEIVING = 32 * 2 * 2**20, 32 * 10 * 2**20
GPU_BYTES = 80e9
"""Memory assumed of a GPU that the configuration does not name."""
_BLACKWELL = 10.0  # compute capability


def estimate_nccl_bytes(config: Config, peers: int, per_peer: int) -> int:
    """Estimate the memory of a refit's communicator on a rank's GPU, in bytes.

    `peers`: number of ranks that the rank exchanges messages with; `per_peer`: NCCL_SENDING or NCCL_RECEIVING.
    """
    if config.cluster.gpus_per_node == 0 or config.generation.is_colocated or config.refit.mode == "files":
        return 0
    # Only peers on the same machine have buffers of their own, so the bytes do not grow with the number of machines.
    peers_on_machine = min(peers, (config.cluster.gpus or 8) - 1)
    return NCCL_POOL + peers_on_machine * per_peer


def needs_conversion(config: Config, shape: ModelShape, gpu: Hardware | None) -> bool:
    """True if engines compute with another form of the weights than they receive.

    Workers report it themselves (`engine_layers.has_converted_layers`). `gpu`: of the plan; None: Hopper.
    """
    arguments = config.generation.engine_args
    if config.cluster.gpus_per_node == 0 or config.refit.adapters == "alone":
        return False
    if arguments.get("quantization") is not None or shape.experts is None:
        return arguments.get("quantization") is not None
    backend = arguments.get("moe_backend", "auto")
    # vLLM prefers kernels of FlashInfer on Blackwell, except for the clamped activation, which they lack.
    is_on_blackwell = gpu is not None and gpu.capability >= _BLACKWELL
    return backend != "triton" and (backend != "auto" or (is_on_blackwell and shape.activation != "clamped_swiglu"))


def estimate_open_bytes(config: Config, shape: ModelShape, gpu: Hardware | None) -> int:
    """Estimate an engine rank's bytes for the conversion of a layer in a refit.

    Layers arrive one after another (`transfer_plan.plan_messages`). While one is converted, a rank has its weights as
    they arrive, and their converted form before that is copied into the memory of the previous weights. 0: engines
    compute with the weights that they receive.
    """
    if not needs_conversion(config, shape, gpu):
        return 0
    is_quantised = config.generation.engine_args.get("quantization") is not None
    width = 1 if config.refit.fp8_blocks else 2 if config.engine_dtype == "bfloat16" else 4
    ranks, largest = config.generation.parallel.tensor, 0
    converted = [
        entry for entry in build_weight_map(shape) if entry.per_expert or (is_quantised and can_travel_in_fp8(entry))
    ]
    for kinds in {shape.list_kinds(layer) for layer in range(shape.layers)}:
        entries = [entry for entry in converted if entry.kind in kinds]
        largest = max(largest, sum(_count_rank_elements(entry, shape, ranks) for entry in entries))
    return 2 * width * largest


def estimate_slot_bytes(config: Config, shape: ModelShape) -> int:
    """Estimate an engine rank's bytes of slots for adapters.

    They are part of vLLM's share. Tensor parallelism splits one of A and B, or experts with expert
    parallelism; every stage has its layers' share.
    """
    if config.refit.adapters != "alone" or not config.policy.lora.rank:
        return 0
    parallel, lora = config.generation.parallel, config.policy.lora
    slot = replace(lora, rank=choose_slot_rank(lora.rank))
    elements = 0
    for name, (rows, columns) in measure_adapters(shape, slot).items():
        is_whole = parallel.expert == 1 or ".experts." not in name
        is_split = not is_whole or (".lora_A." in name) == name.split(".")[-3].startswith(("o_", "down", "out", "w2"))
        elements += math.ceil(rows * columns / (parallel.tensor if is_split else 1))
    width = 2 if config.engine_dtype == "bfloat16" else 4
    return math.ceil(width * elements / parallel.pipeline)


def _count_rank_elements(entry: WeightEntry, shape: ModelShape, ranks: int) -> int:
    """Count an engine rank's elements of a parameter, of all its experts."""
    elements = sum(math.prod(tensor.measure(shape.sizes)) for tensor in entry.hf) * len(list_experts(entry, shape))
    # With expert parallelism a rank has whole experts, and as many elements of them as without it.
    return math.ceil(elements / ranks) if entry.per_expert or entry.axis is not None else elements


def list_refit_parts(config: Config, shape: ModelShape | None, gpu: Hardware | None) -> dict[str, int]:
    """List a refit's bytes on an engine's GPU; shape None: unknown."""
    return {
        "NCCL": estimate_nccl_bytes(config, config.policy.parallel.world_size, NCCL_RECEIVING),
        "buffers": 2 * int(config.refit.bucket_mib * 2**20),
        "conversion of a layer": 0 if shape is None else estimate_open_bytes(config, shape, gpu),
    }


@evaluate_rules
def find_refit_remarks(config: Config, shape: ModelShape | None, gpu: Hardware | None) -> Iterator[Rule]:
    """Check that a refit fits beside vLLM's share of a GPU.

    While engines share GPUs with the policy, they have no KV cache during a refit, so vLLM's share is no limit.
    """
    if config.cluster.gpus_per_node == 0 or config.generation.is_colocated or not config.needs_generation:
        return
    memory, parts = GPU_BYTES if gpu is None else gpu.memory_gib * 2**30, list_refit_parts(config, shape, gpu)
    needed, free = sum(parts.values()), (1 - config.generation.engine.gpu_memory_utilization) * memory
    text = f"leaves {free / 1e9:.1f} GB of a GPU with {memory / 1e9:.0f} GB, and a refit takes up to "
    text += f"{needed / 1e9:.1f} GB of that (" + ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items())
    text += f"); use at most {find_largest_share(needed, memory):g}"
    yield free < needed, "generation.engine.gpu_memory_utilization=", text


def find_largest_share(needed: float, memory: float) -> float:
    """Find the largest gpu_memory_utilization, in hundredths, that leaves these bytes."""
    return int(100 * (1 - needed / memory)) / 100


def count_token_bytes(config: Config, shape: ModelShape | None) -> int:
    """Count bytes of a token's recorded experts; 0: nothing is recorded."""
    is_recorded = config.policy.moe.replay_routing and config.needs_generation and config.debug.train
    if not is_recorded or shape is None or shape.experts is None:
        return 0
    return RoutedForm.from_shape(shape).token_bytes


def count_routed_bytes(config: Config, shape: ModelShape | None, tokens_per_sample: float) -> float:
    """Count bytes of recorded experts in host memory, over all nodes.

    They are those of a step that trains. `tokens_per_sample`: of prompt and response together.
    """
    asynchronous, parallel = config.async_sampling, config.policy.parallel
    samples = config.loop.num_generations_per_prompt
    # A step's rollouts, and those of the steps that are sampled ahead.
    batches = 1 + (asynchronous.max_trajectory_age_steps if asynchronous.enabled else 0)
    rollouts = batches * config.prompts_per_generation_batch * samples
    # The step's sequences once more as partitions, and on ranks: those of a pipeline stage have their own layers, and
    # the others of a replica have all of its tokens.
    copies = (1 + parallel.tensor * parallel.context) * config.samples_per_step
    return float(count_token_bytes(config, shape) * tokens_per_sample * (rollouts + copies))


@evaluate_rules
def find_routed_remarks(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    """Check that recorded experts fit the machine of a run on one."""
    needed = count_routed_bytes(config, shape, config.policy.max_total_sequence_length)
    memory = psutil.virtual_memory().total
    text = (
        f"keeps up to {needed / 2**30:.0f} GiB of recorded experts in host memory ({count_token_bytes(config, shape)} "
        f"bytes a token, if all are of policy.max_total_sequence_length), and this machine has {memory / 2**30:.0f} GiB"
        "; lower the age of samples, prompts of a step, or the length"
    )
    yield config.cluster.num_nodes == 1 and needed > memory, "policy.moe.replay_routing=", text
