"""Checks of engines: their devices, sequence lengths, shared GPUs (colocated), and refits in FP8 and over NCCL."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.layout import layout_problems
from megatron_grpo.weights.layouts import cut_blocks, engine_shards, training_shards
from megatron_grpo.weights.shape import ModelShape

NCCL_POOL = 512 * 2**20
"""Bytes of a GPU that a communicator of NCCL takes for all peers on other machines together, at most: seen with NCCL
2.28 and 64 channels (github.com/NVIDIA/nccl/issues/2363); with 32 channels it is half of that."""
NCCL_SENDING, NCCL_RECEIVING = 32 * 2 * 2**20, 32 * 10 * 2**20
"""Bytes that it takes for each peer on the same machine, to send and to receive: 32 channels, with a buffer of 2 MiB or
of 10 MiB each, as counted on 8 x H100 (github.com/NVIDIA/nccl/issues/1685)."""
GPU_BYTES = 80e9
"""Memory of the GPU that remarks assume."""


def nccl_bytes(config: Config, peers: int, per_peer: int) -> int:
    """Most bytes of a rank's GPU that the communicator of a refit takes; 0: the refit does not use NCCL.

    It is the same for any number of ranks: only peers on the same machine have buffers of their own.

    Args:
        config: the run's configuration.
        peers: ranks that it exchanges messages with.
        per_peer: NCCL_SENDING or NCCL_RECEIVING.
    """
    if config.cluster.gpus_per_node == 0 or config.generation.colocated or config.refit.mode == "files":
        return 0
    beside = (config.cluster.gpus or 8) - 1
    return NCCL_POOL + min(peers, beside) * per_peer


def refit_remarks(config: Config) -> Iterator[Problem]:
    """Memory that vLLM leaves for the refit's communicator, which is made after vLLM has taken its own."""
    share = config.generation.engine.gpu_memory_utilization
    needed = nccl_bytes(config, config.policy.parallel.world_size, NCCL_RECEIVING)
    if config.generates and (1 - share) * GPU_BYTES < needed:
        most = int((1 - needed / GPU_BYTES) * 100) / 100
        left = f"{(1 - share) * GPU_BYTES / 1e9:.1f} GB of a GPU with {GPU_BYTES / 1e9:.0f} GB"
        why = f"NCCL takes up to {needed / 1e9:.1f} GB of that when engines are linked to the policy"
        subject = f"generation.engine.gpu_memory_utilization={share:g}"
        yield Problem(subject, f"leaves {left}, and {why}; use at most {most:g}")


CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads that vLLM's CPU build has kernels for."""


def engine_problems(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    """Settings of engines that devices or model (None: unknown) do not support, or that vLLM would refuse."""
    if config.cluster.gpus == 0:
        yield from _on_cpu(config)
        size = None if shape is None or shape.latent is not None else shape.head_dim
        if config.generates and not config.generation.server.urls and size not in (None, *CPU_HEAD_SIZES):
            text = f"has heads of {size}, for which vLLM has no attention on a CPU; it has "
            text += ", ".join(map(str, CPU_HEAD_SIZES))
            yield Problem(f"policy.model.path={config.policy.model.path}", text)
    yield from _batched_tokens(config)
    pipeline = config.generation.parallel.pipeline
    if config.generation.engine.speculative.num_speculative_tokens and pipeline > 1:
        text = "the installed vLLM proposes tokens on the last stage only, and the others fail over it; use 1"
        yield Problem(f"generation.parallel.pipeline={pipeline}", text)


def _on_cpu(config: Config) -> Iterator[Problem]:
    engine = config.generation.engine
    if engine.batch_invariant:
        text = (
            "vLLM's batch-invariant kernels are for GPUs, and this is a run on CPU; a response repeats "
            "to the bit there when the same requests come together, as they do in each step"
        )
        yield Problem("generation.engine.batch_invariant=True", text)
    if engine.enable_chunked_prefill:
        text = "a CPU engine cannot repeat a response whose prompt is cut into pieces; leave it out"
        yield Problem("generation.engine.enable_chunked_prefill=True", text)
    tokens = engine.speculative.num_speculative_tokens
    if tokens:
        text = "on a CPU the installed vLLM reports other log-probabilities than tokens are then drawn with; use 0"
        yield Problem(f"generation.engine.speculative.num_speculative_tokens={tokens}", text)


def _batched_tokens(config: Config) -> Iterator[Problem]:
    engine, longest = config.generation.engine, config.policy.max_total_sequence_length
    tokens, together = engine.max_num_batched_tokens, config.generation.sequences_per_engine
    if tokens is None:
        return
    subject = f"generation.engine.max_num_batched_tokens={tokens}"
    chunked = config.cluster.gpus > 0 if engine.enable_chunked_prefill is None else engine.enable_chunked_prefill
    if tokens < longest and not chunked:
        text = f"is less than policy.max_total_sequence_length={longest}, and prompts are not cut into pieces"
        yield Problem(subject, text)
    if tokens < together:
        yield Problem(subject, f"is less than a token for each of the {together} responses decoded together")


def length_problems(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    """Lengths that do not fit each other or the model; with shape None, checks that need the model are left out."""
    yield from sequence_problems(config, shape)
    policy, longest = config.policy, config.policy.max_total_sequence_length
    for key, tokens in (
        ("policy.microbatch_tokens", policy.microbatch_tokens),
        ("policy.logprob_microbatch_tokens", policy.logprob_microbatch_tokens),
        ("value.microbatch_tokens", config.value.microbatch_tokens),
    ):
        if tokens is not None and tokens < longest:
            text = f"the longest sequence, policy.max_total_sequence_length={longest}, does not fit"
            yield Problem(f"{key}={tokens}", text)


def sequence_problems(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    """Lengths of prompts and responses, and stop tokens, that do not fit the model; None leaves the model out."""
    longest = config.policy.max_total_sequence_length
    prompt, response = config.data.max_input_seq_length, config.generation.max_new_tokens
    subject = f"policy.max_total_sequence_length={longest}"
    if prompt + response > longest:
        total = f"data.max_input_seq_length + generation.max_new_tokens = {prompt} + {response} = {prompt + response}"
        yield Problem(subject, f"{total} tokens do not fit")
    if shape is None:
        return
    if 0 < shape.max_positions < longest:
        yield Problem(subject, f"the model has {shape.max_positions} positions; use at most that")
    beyond = [token for token in config.generation.stop_token_ids if token >= shape.vocab]
    if beyond:
        text = f"has {beyond[0]}, and the model's tokens are numbered from 0 to {shape.vocab - 1}"
        yield Problem("generation.stop_token_ids", text)


def placement_problems(config: Config) -> Iterator[Problem]:
    """Settings that cannot be combined with generation.placement=colocated."""
    if not config.generation.colocated:
        return
    if config.loop.async_grpo.enabled:
        text = "engines that sleep while models train cannot sample ahead of them; use separate, or "
        yield Problem("generation.placement=colocated", f"{text}{config.algorithm}.async_grpo.enabled=false")
    if not config.cluster.gpus:
        return
    if config.cluster.num_nodes > 1:
        have = f"the run has cluster.num_nodes={config.cluster.num_nodes}; use separate, or one node"
        text = f"weights reach engines in the memory of one node, and {have}"
        yield Problem("generation.placement=colocated", text)
    if config.refit.mode == "broadcast":
        text = "goes over NCCL, which has one rank a GPU, and with generation.placement=colocated there are two; "
        yield Problem("refit.mode=broadcast", f"{text}use reshard")
    if config.policy.fp8.parameters:
        text = "keeps weights in a form that cannot leave a GPU and come back, for generation.placement=colocated"
        yield Problem("policy.fp8.parameters=True", f"{text}; use false")
    yield from _layouts(config)


def _layouts(config: Config) -> Iterator[Problem]:
    """Every rank of the policy shares its GPU with one rank of an engine, and with one of the value model at most."""
    policy, engines = config.policy.parallel.world_size, config.generation.parallel
    ranks = engines.ranks_per_engine * engines.data
    if ranks != policy:
        size = f"tensor={engines.tensor} x pipeline={engines.pipeline} x data={engines.data}"
        have, left = ("more", "") if ranks > policy else ("fewer", ", some of which no engine would use")
        fix = f"data={policy // engines.ranks_per_engine}" if policy % engines.ranks_per_engine == 0 else "other sizes"
        text = f"has {ranks} ranks ({size}), {have} than the {policy} GPUs of the policy that engines share{left}; use "
        yield Problem("generation.parallel", f"{text}{fix}")
    if config.value_model is not None and config.value_model.parallel.world_size > policy:
        ranks = config.value_model.parallel.world_size
        text = f"has {ranks} ranks, more than the {policy} GPUs of the policy that it shares; make it smaller"
        yield Problem("value.parallel", text)


def refit_problems(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    """Settings that exclude refit.fp8_blocks; with shape None, checks that need the model are left out."""
    if not config.refit.fp8_blocks:
        return
    subject, engine = "refit.fp8_blocks=True", "fp8_per_block"
    if config.refit.mode != "reshard":
        yield Problem(subject, f"refit.mode={config.refit.mode} sends tensors as vLLM's loader reads them; use reshard")
    if config.generation.engine_args.get("quantization") != engine:
        add = f"add +generation.engine_args.quantization={engine}"
        yield Problem(subject, f"is for engines that keep blocks in FP8; {add}, or use false")
    if (config.generation.engine.dtype or config.policy.precision) != "bfloat16":
        yield Problem(subject, "such engines compute in bfloat16; give generation.engine.dtype=bfloat16")
    if shape is not None and not any(layout_problems(config, shape)):
        places = training_shards(config.policy.parallel, shape), engine_shards(config.generation.parallel, shape)
        cuts = list(cut_blocks(shape, *places))
        if cuts:
            more = f" (and {len(cuts) - 1} more)" if len(cuts) > 1 else ""
            text = f"ranks would share a block of 128 x 128: {cuts[0]}{more}; use fewer tensor-parallel ranks, or false"
            yield Problem(subject, text)
