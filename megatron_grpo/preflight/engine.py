"""Checks of the engines' settings against the devices that they run on and against each other."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config


def engine_problems(config: Config) -> Iterator[Problem]:
    """Settings of vLLM's engines that their devices have not, or that vLLM would refuse when it starts."""
    if config.cluster.gpus == 0:
        yield from _on_cpu(config)
    yield from _tokens_of_a_pass(config)
    yield from _speculation(config)


def recorded_routing_problems(config: Config) -> Iterator[Problem]:
    """What keeps engines from recording the experts of tokens, for policy.moe.replay_routing, wherever they run."""
    if config.policy.moe.replay_routing and config.generation.engine.speculative.num_speculative_tokens:
        text = "records experts of tokens that speculative decoding takes back; use false for one of them"
        yield Problem("policy.moe.replay_routing=True", text)


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


def _tokens_of_a_pass(config: Config) -> Iterator[Problem]:
    generation, longest = config.generation, config.policy.max_total_sequence_length
    tokens = generation.engine.max_num_batched_tokens
    if tokens is None:
        return
    subject, together = f"generation.engine.max_num_batched_tokens={tokens}", generation.sequences_per_engine
    chunked = generation.engine.enable_chunked_prefill
    if chunked is None:
        chunked = config.cluster.gpus > 0
    if tokens < longest and not chunked:
        text = f"is less than policy.max_total_sequence_length={longest}, and prompts are not cut into pieces"
        yield Problem(subject, text)
    if tokens < together:
        yield Problem(subject, f"is less than a token for each of the {together} responses decoded together")


def _speculation(config: Config) -> Iterator[Problem]:
    tokens, pipeline = config.generation.engine.speculative.num_speculative_tokens, config.generation.parallel.pipeline
    if not tokens:
        return
    if pipeline > 1:
        text = "the installed vLLM proposes tokens on the last stage only, and the others fail over it; use 1"
        yield Problem(f"generation.parallel.pipeline={pipeline}", text)
