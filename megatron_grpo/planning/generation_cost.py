"""Generation by vLLM: memory of an engine, lengths of responses, seconds of prefill and decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.config.schema import Config
from megatron_grpo.models.shape import MambaShape, ModelShape
from megatron_grpo.planning.costs import time_collective, time_local_reduce, time_tree
from megatron_grpo.planning.engine_shards import split_engine
from megatron_grpo.platform.hardware import Hardware
from megatron_grpo.preflight.refit_memory import estimate_slot_bytes

BLOCK_TOKENS = 16
"""Tokens of a block of the KV cache, vLLM's default on GPUs."""
_GRAPHS_BYTES = 1.5e9  # of a rank, assumed: captured graphs, workspaces of attention
_PROFILED_TOKENS = 8192  # of the pass with which vLLM measures activations (`engine_arguments.GPU_BATCH_TOKENS`)
_VOCABULARY_MULTIPLE = 64  # vLLM pads vocabularies to a multiple of it
_WIDTH = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the samples of a step."""

    prompt: float
    """Mean tokens of a prompt."""
    responses: NDArray[np.float64]
    """[samples]: tokens of each response."""
    source: str
    """Where the lengths come from, for the plan's list of assumptions."""

    @property
    def totals(self) -> NDArray[np.float64]:
        """[samples]: tokens of prompt and response together."""
        return self.prompt + self.responses


def make_log_normal_lengths(mean: float, sigma: float, samples: int, longest: int, prompt: float) -> Lengths:
    """Make responses whose lengths are quantiles of a log-normal distribution.

    Args:
        mean: mean tokens of the responses, of which the longest are cut off; at most `longest`.
        sigma: standard deviation of the logarithm of a length before the cut; 0: all alike.
        samples: number of responses.
        longest: most tokens of a response; longer ones are cut off.
        prompt: mean tokens of a prompt.
    """
    quantiles = (np.arange(samples) + 0.5) / samples
    spread = np.exp(sigma * np.array([NormalDist().inv_cdf(quantile) for quantile in quantiles]))

    def cut_lengths(median: float) -> NDArray[np.float64]:
        return np.asarray(np.clip(np.rint(median * spread), 1, longest), dtype=np.float64)

    # What a run reports as its mean is that of the cut responses: bisection finds the median before the cut.
    low, high = 0.0, float(longest) / spread[0]
    for _ in range(60):
        median = (low + high) / 2
        low, high = (median, high) if cut_lengths(median).mean() < mean else (low, median)
    source = f"responses of {mean:g} tokens on average, log-normal with sigma {sigma:g}, at most {longest}"
    return Lengths(prompt, cut_lengths(high), source)


def read_recorded_lengths(run_dir: Path, samples: int) -> Lengths:
    """Read the lengths of a run's last step, as `samples` quantiles.

    Raises:
        FileNotFoundError: the run has no rollouts.
    """
    from megatron_grpo.batch.rollout_files import find_recorded_steps, read_rollouts

    last = max(find_recorded_steps(run_dir), default=0)
    rows = list(read_rollouts(run_dir, last))
    sampled = np.array([sum(end - begin for begin, end, _ in row["spans"]) for row in rows], dtype=np.float64)
    totals = np.array([len(row["token_ids"]) for row in rows], dtype=np.float64)
    quantiles = (np.arange(samples) + 0.5) / samples
    chosen = np.asarray(np.quantile(sampled, quantiles, method="inverted_cdf"), dtype=np.float64)
    return Lengths(float((totals - sampled).mean()), chosen, f"responses of {run_dir}, step {last}")


def find_lengths(config: Config) -> Lengths:
    """Find the lengths of a step's samples: configured, or recorded.

    Raises:
        ValueError: plan.lengths_from has no rollouts.
    """
    plan, longest = config.plan, config.generation.max_new_tokens
    if plan.workload == "pretrain":
        tokens = config.policy.max_total_sequence_length
        number = plan.global_batch_samples or config.policy.train_global_batch_samples or config.samples_per_step
        return Lengths(0.0, np.full(number, float(tokens)), f"{number} sequences of {tokens} tokens")
    if plan.lengths_from is not None:
        try:
            return read_recorded_lengths(Path(plan.lengths_from), config.samples_per_step)
        except OSError as error:
            raise ValueError(f"plan.lengths_from={plan.lengths_from} has no rollouts: {error}") from None
    prompt = plan.prompt_tokens or max(config.data.max_input_seq_length // 4, 1)
    mean = plan.response_tokens or max(longest // 2, 1)
    return make_log_normal_lengths(mean, plan.response_sigma, config.samples_per_step, longest, prompt)


@dataclass(frozen=True, slots=True)
class EngineSize:
    """Sizes of the fullest rank of an engine."""

    weight_bytes: int
    kv_bytes_per_token: int
    """Bytes of the KV cache for each token of a sequence."""
    activation_bytes: int
    """Most bytes of tensors in a forward pass, with graphs and workspaces."""
    cache_blocks: int
    """Blocks of the KV cache that fit into generation.engine.gpu_memory_utilization; 0: the engine does not fit."""
    state_blocks: int = 0
    """Blocks that the states of a sequence's delta nets or Mamba take, however long it is."""

    @property
    def cache_tokens(self) -> int:
        """Tokens that the cache holds."""
        return self.cache_blocks * BLOCK_TOKENS

    def count_sequences(self, tokens: float) -> int:
        """Count sequences of this many tokens that the cache holds."""
        return self.cache_blocks // (math.ceil(tokens / BLOCK_TOKENS) + self.state_blocks)


def size_engine(config: Config, shape: ModelShape, hardware: Hardware) -> EngineSize:
    """Compute sizes of an engine's fullest rank by vLLM's arithmetic."""
    # vLLM gives the cache what gpu_memory_utilization leaves after weights and activations. It measures these with a
    # pass of max_num_batched_tokens tokens: the widest feed-forward, and logits in float32 of max_num_seqs tokens.
    generation, engine, parallel = config.generation, config.generation.engine, config.generation.parallel
    width, matrix_width = _find_widths(config)
    shards = split_engine(parallel, shape, has_draft=engine.speculative.uses_mtp)
    weights = estimate_slot_bytes(config, shape)
    weights += max(_count_weight_bytes(shape, shard, width, matrix_width) for shard in shards)
    kv_width = 1 if str(generation.engine_args.get("kv_cache_dtype", "auto")).startswith("fp8") else width
    layers = max(1, *(len(list_attention_layers(shape, shard.layers)) for shard in shards))
    kv = count_kv_bytes_per_token(shape, layers, parallel.tensor, kv_width)
    tokens = engine.max_num_batched_tokens or _PROFILED_TOKENS
    wide = 2 * shape.ffn_hidden / parallel.tensor + 3 * shape.hidden
    if shape.mamba is not None:
        wide = max(wide, 2 * count_mamba_width(shape.mamba) / parallel.tensor + 3 * shape.hidden)
    if shape.experts is not None:
        wide = max(wide, 3 * shape.hidden + shape.experts.top_k * (2 * shape.experts.ffn_hidden + shape.hidden))
    logits = 4 * 2 * engine.max_num_seqs * shape.vocab
    activations = int(width * tokens * wide + logits + _GRAPHS_BYTES)
    cache_bytes = hardware.memory_gib * 2**30 * engine.gpu_memory_utilization - weights - activations
    state = max(count_state_bytes(shape, shard.layers, parallel.tensor, width) for shard in shards)
    blocks = max(0, int(cache_bytes // (BLOCK_TOKENS * kv)))
    return EngineSize(weights, kv, activations, blocks, math.ceil(state / (BLOCK_TOKENS * kv)))


def _find_widths(config: Config) -> tuple[int, int]:
    """Find an engine's bytes of a number, and of one in matrices."""
    width = _WIDTH[config.engine_dtype]
    return width, 1 if str(config.generation.engine_args.get("quantization", "")).startswith("fp8") else width


def count_kv_bytes_per_token(shape: ModelShape, layers: int, tensor: int, width: int) -> int:
    """Count bytes of a rank's KV cache for each token."""
    if shape.latent is not None:  # one latent vector and the key's rotated part, which every rank has
        latent = layers * (shape.latent.rank + shape.latent.rope_dim) * width
        if (indexer := shape.indexer) is None:
            return latent
        # An indexer's key is kept in FP8, with a scale for 128 of its numbers.
        index = sum(indexer.layers) * (indexer.head_dim + math.ceil(indexer.head_dim / 128) * 4)
        return latent + math.ceil(layers * index / len(indexer.layers))
    sizes = list(map(shape.find_heads, list_attention_layers(shape, range(shape.layers))))
    features = sum(max(1, heads.key_value_heads // tensor) * heads.head_dim for heads in sizes)
    return math.ceil(layers * 2 * features * width / max(1, len(sizes)))  # of average layers


def list_attention_layers(shape: ModelShape, layers: Sequence[int]) -> list[int]:
    """List the layers that keep keys and values."""
    return [layer for layer in layers if shape.list_kinds(layer) & {"attention", "global", "latent"}]


def count_state_bytes(shape: ModelShape, layers: Sequence[int], tensor: int, width: int) -> int:
    """Count bytes of the states of a sequence on a rank."""
    # Matrices in float32, and inputs of convolutions.
    total = 0
    if (delta := shape.delta) is not None:
        state = 4 * delta.value_heads * delta.key_dim * delta.value_dim + width * (delta.kernel - 1) * delta.channels
        total += sum(map(shape.has_delta, layers)) * state
    if (mamba := shape.mamba) is not None:
        state = 4 * mamba.heads * mamba.head_dim * mamba.state + width * (mamba.kernel - 1) * mamba.channels
        total += sum(map(shape.has_mamba, layers)) * state
    return total // tensor


def count_mamba_width(mamba: MambaShape) -> int:
    """Count a token's features behind the first matrix of Mamba."""
    return mamba.heads * mamba.head_dim + mamba.channels + mamba.heads


def count_layer_parameters(shape: ModelShape, layer: int, tensor: int) -> float:
    """Count parameters of a layer's matrices on a rank.

    Routed experts and their router are left out.
    """
    kinds, total, matrices = shape.list_kinds(layer), 0.0, 3 if shape.has_gates else 2
    if "mixer" in kinds:
        total += count_mixer_parameters(shape, layer, tensor)
    if shape.experts is not None and "experts" in kinds:
        total += matrices * shape.hidden * shape.experts.shared_ffn_hidden / tensor
        total += 2 * shape.hidden * (shape.experts.latent or 0)  # every rank has all of them
    elif "dense" in kinds:
        total += matrices * shape.hidden * shape.ffn_hidden / tensor
    return total


def count_mixer_parameters(shape: ModelShape, layer: int, tensor: int) -> float:
    """Count a rank's parameters of attention, or what replaces it."""
    latent, hidden, heads = shape.latent, shape.hidden, shape.attention_heads
    if (delta := shape.delta) is not None and shape.has_delta(layer):
        outputs = delta.value_heads * delta.value_dim
        return hidden * (delta.channels + 2 * outputs + 2 * delta.value_heads) / tensor
    if (mamba := shape.mamba) is not None and shape.has_mamba(layer):
        return hidden * (count_mamba_width(mamba) + mamba.heads * mamba.head_dim) / tensor
    if latent is None:
        sizes, per_head = shape.find_heads(layer), 3 if shape.output_gate else 2
        key_value_heads = max(1, sizes.key_value_heads / tensor) * (1 if sizes.key_is_value else 2)
        return hidden * sizes.head_dim * (per_head * heads / tensor + key_value_heads)
    query = latent.plain_dim + latent.rope_dim
    down = hidden * (latent.rank + latent.rope_dim) + (hidden * latent.query_rank if latent.query_rank else 0)
    up = (latent.query_rank or hidden) * heads * query + latent.rank * heads * (latent.plain_dim + latent.value_dim)
    if (indexer := shape.indexer) is not None and indexer.layers[layer]:
        key_and_weights = hidden * (indexer.head_dim + indexer.heads)
        down += key_and_weights + (latent.query_rank or 0) * indexer.heads * indexer.head_dim
    return down + (up + heads * latent.value_dim * hidden) / tensor


def count_expert_parameters(shape: ModelShape) -> int:
    """Count parameters of one expert."""
    assert shape.experts is not None
    matrices = 3 if shape.has_gates else 2
    return matrices * shape.sizes["expert_hidden"] * shape.experts.ffn_hidden


def _count_weight_bytes(shape: ModelShape, shard: Any, width: int, matrix_width: int) -> int:
    """Count bytes of a rank's weights without norms."""
    tensor, total = shard.tensor.count, 0.0
    for layer in shard.layers:
        parameters, heads = count_layer_parameters(shape, layer, tensor), shape.find_heads(layer)
        if heads.key_is_value:  # vLLM keeps the matrix of keys twice
            parameters += shape.hidden * heads.head_dim * max(1, heads.key_value_heads / tensor)
        if shape.has_experts(layer):
            assert shape.experts is not None
            first, last = shard.experts
            parameters += (last - first) * count_expert_parameters(shape) / shard.expert_tensor.count
            total += width * shape.hidden * shape.experts.count
        total += matrix_width * parameters
    rows = math.ceil(shape.vocab / _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE / tensor
    matrices = int(shard.has_embedding) + int(shard.has_output and not shape.tied_embeddings)
    return int(total + matrices * width * rows * shape.hidden)


@dataclass(frozen=True)
class Decoder:
    """Seconds of an engine's forward passes, on each of its ranks."""

    shape: ModelShape
    hardware: Hardware
    tensor: int
    """Ranks among which matrices, or experts, are divided; pipeline stages follow each other and share nothing."""
    width: int
    weight_width: int
    has_whole_experts: bool = False
    """Whether a rank has some experts whole (expert parallelism), instead of a slice of each."""

    def time_step(self, sequences: float, context: float) -> float:
        """Seconds of a decoding step at mean length `context`.

        A roofline of the kernels, messages, the kernels' own time, and the host's work.
        """
        efficiency, shape = self.hardware.efficiency, self.shape
        cache = context * self._kv_bytes_per_token + 2 * self._state_bytes  # states are read and written
        read = self._count_read_bytes(sequences) + sequences * cache
        flops = 2.0 * sequences * self._active_parameters
        speed = self.hardware.flops["bfloat16"] * efficiency.matmul
        kernels = max(read / (self.hardware.memory_bytes_per_s * efficiency.decode_memory), flops / speed)
        messages = 2 * shape.layers * self._time_reduce(sequences)
        host = efficiency.decode_step_s + sequences * efficiency.decode_sequence_s
        layers = (shape.layers + self._expert_layers) * efficiency.decode_layer_s
        return float(kernels + messages + layers + host)

    def time_prefill(self, tokens: float, context: float) -> float:
        """Seconds of prompts in full passes; tokens see half of `context`."""
        efficiency, shape = self.hardware.efficiency, self.shape
        heads = shape.attention_heads / self.tensor
        attention = 2.0 * tokens * context * heads * self._head_dims
        speed = self.hardware.flops["bfloat16"] * efficiency.matmul
        products = 2.0 * tokens * self._active_parameters / speed
        messages = 2 * shape.layers * tokens / _PROFILED_TOKENS * self._time_reduce(_PROFILED_TOKENS)
        return float(products + attention / (self.hardware.flops["bfloat16"] * efficiency.attention) + messages)

    @cached_property
    def _kv_bytes_per_token(self) -> int:
        attending = len(list_attention_layers(self.shape, range(self.shape.layers)))
        return count_kv_bytes_per_token(self.shape, attending, self.tensor, self.width)

    @cached_property
    def _state_bytes(self) -> int:
        return count_state_bytes(self.shape, range(self.shape.layers), self.tensor, self.width)

    @cached_property
    def _head_dims(self) -> int:
        """Features of a head, summed over the layers with attention."""
        shape = self.shape
        return sum(shape.find_heads(layer).head_dim for layer in list_attention_layers(shape, range(shape.layers)))

    @cached_property
    def _expert_layers(self) -> int:
        return sum(map(self.shape.has_experts, range(self.shape.layers)))

    @cached_property
    def _active_parameters(self) -> float:
        """Parameters that a token is multiplied with, over all stages."""
        shape = self.shape
        total = sum(count_layer_parameters(shape, layer, self.tensor) for layer in range(shape.layers))
        if shape.experts is not None:
            total += self._expert_layers * shape.experts.top_k * count_expert_parameters(shape) / self.tensor
        return total + shape.hidden * shape.vocab / self.tensor

    def _count_read_bytes(self, sequences: float) -> float:
        """Count bytes of weights that a decoding step reads, over all stages.

        Experts count as the bytes that the memory could have moved in their time.
        """
        shape, experts = self.shape, self.shape.experts
        if experts is None:
            return self.weight_width * self._active_parameters
        # Only experts that some token chose are read: E (1 - (1 - k / E)^b) of E on average for b tokens.
        touched = experts.count * (1 - (1 - experts.top_k / experts.count) ** sequences)
        expert_size = self._expert_layers * count_expert_parameters(shape) / self.tensor
        dense = self._active_parameters - experts.top_k * expert_size
        return self.weight_width * (dense + touched * expert_size * self._expert_slowness)

    @cached_property
    def _expert_slowness(self) -> float:
        """Time of the experts' products, relative to that of reading them at full speed."""
        # The matrix behind the activation has this rank's slice as its inner dimension. With few features in a slice
        # a tile of the result is mostly start and end, as in `costs.time_product`. The matrices before it have the
        # hidden size as inner dimension, which is long.
        assert self.shape.experts is not None
        features = self.shape.experts.ffn_hidden / (1 if self.has_whole_experts else self.tensor)
        matrices = 3 if self.shape.has_gates else 2
        return (matrices - 1 + (features + self.hardware.efficiency.decode_inner) / features) / matrices

    def _time_reduce(self, tokens: float) -> float:
        """Seconds of a layer's all-reduce: vLLM's own kernel within a host, NCCL's between hosts."""
        if self.tensor == 1:
            return 0.0
        nbytes, efficiency = int(tokens * self.shape.hidden * self.width), self.hardware.efficiency
        ring = time_collective(self.hardware, "allreduce", nbytes, tuple(range(self.tensor)))
        if self.tensor > self.hardware.gpus_per_domain:
            latency = time_tree(self.tensor, self.hardware.gpus_per_domain)
        elif self.tensor > (self.hardware.gpus_per_host or self.tensor):
            latency = time_local_reduce(self.tensor)
        else:
            latency = efficiency.decode_message_s
        return ring - efficiency.message_s + latency


def build_decoder(config: Config, shape: ModelShape, hardware: Hardware) -> Decoder:
    """Build the model of a run's engines."""
    parallel = config.generation.parallel
    return Decoder(shape, hardware, parallel.tensor, *_find_widths(config), has_whole_experts=parallel.expert > 1)
