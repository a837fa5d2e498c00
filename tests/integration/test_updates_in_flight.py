"""Weights that change under responses: every token's version, and that it was drawn as that version draws."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.trajectory import Span
from megatron_grpo.config.loop_schema import AsyncGRPOConfig
from megatron_grpo.config.schema import ModelConfig, ParallelConfig, PolicyConfig, RefitConfig
from megatron_grpo.generation.engine_interface import Engine
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.hf_weights import load_hf_weights
from megatron_grpo.models.routed_experts import RoutedForm
from megatron_grpo.rollouts.engine_choice import Engines
from megatron_grpo.rollouts.engine_client import EngineClient
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.model_ranks import MegatronPolicy
from megatron_grpo.weight_sync.transport import WeightTransport, make_transport
from tests.integration.test_refit import ray_cluster
from tests.integration.vllm_helpers import START_S, Oracle, engines, generate, make_model, request
from tests.support.forced_routing import own_routing

__all__ = ["ray_cluster"]  # a fixture of every test here

MODELS, PROMPT_TOKENS, TOKENS, MAX_LENGTH = 3, 200, 150, 400
BLOCK = 128
"""Tokens of a block of vLLM's cache on a CPU: what a prompt finds there, it finds whole."""
SETTINGS = SamplingSettings(max_new_tokens=TOKENS)
UPDATES, ROUNDS = 3, 10
"""Updates under the same responses, and attempts at meeting them under way on a machine that may be busy."""
ASLEEP_S = 0.3
LAYOUTS: dict[str, tuple[dict[str, int], bool]] = {
    "recomputed": ({}, True),
    "asleep": ({}, True),
    "kept": ({}, False),
    "recomputed-pp2": ({"pipeline": 2}, True),
    "kept-pp2": ({"pipeline": 2}, False),
    "recomputed-two-engines": ({"data": 2}, True),
}
"""Layout of the engines, and whether the cache is recomputed; "asleep": they sleep before each update, too."""


def longer(**sizes: Any) -> PretrainedConfig:
    """A model for sequences of several blocks of the cache."""
    return Qwen3Config(**(sizes | {"max_position_embeddings": MAX_LENGTH}))


def mixture(**sizes: Any) -> PretrainedConfig:
    """A mixture of experts, of which a layer has none."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    depth = {"num_hidden_layers": 3, "mlp_only_layers": [1], "max_position_embeddings": MAX_LENGTH}
    return Qwen3MoeConfig(**(sizes | experts | depth))


class Versions:
    """Models of which the policy takes turns to be, and the version that each has been published as."""

    def __init__(self, folder: Path, family: Callable[..., PretrainedConfig] = longer) -> None:
        self.folders = [make_model(folder / str(seed), seed, family) for seed in range(MODELS)]
        self.models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in self.folders]
        self.number = {0: 0}
        """By version, the number of its model."""
        self._next = cycle([1, 2, 0])
        self._versions = count(1)
        self.policy = _start_policy(self.folders[0])

    def publish(self, transport: WeightTransport) -> int:
        """Make the policy another model and publish it."""
        number, version = next(self._next), next(self._versions)
        ray.get(self.policy.submit(become, str(self.folders[number])))
        transport.publish(version)
        self.number[version] = number
        return version

    def recomputed(self, token_ids: Sequence[int], span: Span) -> Tensor:
        """[tokens of the span]: log-probabilities by the model of the span alone, over everything before."""
        table = self._of(span).forward(torch.tensor([list(token_ids)])).logits[0].log_softmax(-1)
        return select_entries(table[span.start - 1 : span.end - 1], token_ids[span.start : span.end])

    def recompute_cached(self, token_ids: Sequence[int], spans: Sequence[Span], prompt: Span) -> Tensor:
        """[tokens of all spans]: by each span's model over the cache that the models before it have filled.

        Args:
            token_ids: prompt and response.
            spans: those of the response.
            prompt: the beginning of the prompt that is already in the cache, and by which version; it may be empty.
        """
        cache, position, rows = DynamicCache(), prompt.end, []
        if position:
            self._of(prompt).forward(torch.tensor([list(token_ids[:position])]), past_key_values=cache, use_cache=True)
        for span in spans:  # the last token that a model draws goes through the next one
            fed = torch.tensor([list(token_ids[position : span.end - 1])])
            logits = self._of(span).forward(fed, past_key_values=cache, use_cache=True).logits[0]
            rows.append(logits[span.start - 1 - position :].log_softmax(-1))
            position = span.end - 1
        return select_entries(torch.cat(rows), token_ids[spans[0].start :])

    def _of(self, span: Span) -> Any:
        return self.models[self.number[span.version]]


@pytest.fixture
def versions(tmp_path: Path) -> Iterator[Versions]:
    published = Versions(tmp_path)
    yield published
    published.policy.shutdown()


@pytest.mark.slow  # every layout starts engines and ranks of its own
@pytest.mark.parametrize("name", LAYOUTS)
@torch.no_grad()
def test_every_token_was_drawn_by_the_version_that_its_span_names(name: str, versions: Versions) -> None:
    layout, recompute = LAYOUTS[name]
    in_flight = AsyncGRPOConfig(enabled=True, recompute_kv_cache_after_weight_updates=recompute)
    prompts = [[2 + (3 * i + j * j) % 30 for j in range(PROMPT_TOKENS)] for i in range(4)]
    requests = [request(prompts[i % 4], seed=i, max_new_tokens=TOKENS) for i in range(24)]
    with engines(versions.folders[0], max_length=MAX_LENGTH, in_flight=in_flight, **layout) as generation:
        transport = make_transport(
            versions.policy, generation, RefitConfig(mode="broadcast", bucket_mib=0.05, timeout_s=60.0), Path()
        )
        transport.connect()
        most_spans = 0
        for _ in range(ROUNDS):
            before = max(versions.number)
            publish = _publish_asleep if name.startswith("asleep") else _publish
            outputs = while_publishing(generation, requests, partial(publish, generation, versions, transport))
            for sample_request, output in zip(requests, outputs, strict=True):
                _assert_drawn(sample_request, output, versions, None if recompute else before)
                most_spans = max(most_spans, len(output.spans))
            if most_spans > 2:
                break
        assert most_spans > 2, "no response met two updates"

        version = versions.publish(transport)  # prompts that are cached under other weights are not prompts of these
        oracle = Oracle(versions.folders[versions.number[version]])
        greedy = SamplingSettings(max_new_tokens=6, temperature=0.0)
        greedy_requests = [request(prompt, seed=0, max_new_tokens=6) for prompt in prompts]
        _prefix_hits(generation)
        outputs = generate(generation, greedy_requests, greedy)
        assert _prefix_hits(generation) == 0
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.token_ids.tolist() == oracle.greedy(prompt, 6)
            assert output.logprobs.tolist() == pytest.approx(
                oracle.logprobs(prompt, output.token_ids.tolist()), abs=1e-4
            )
            assert output.spans == [Span(0, len(output.token_ids), version)]
        generate(generation, greedy_requests, greedy)
        assert bool(_prefix_hits(generation)) == (not recompute), "a cache that is kept is found under its own weights"


@pytest.mark.slow
@torch.no_grad()
def test_tokens_keep_the_experts_of_the_version_that_drew_the_next_one(tmp_path: Path) -> None:
    """Each row of the record is that of transformers, which computes all earlier tokens with this version."""
    versions = Versions(tmp_path, mixture)
    form = RoutedForm.from_shape(read_model_shape(versions.folders[0]))
    in_flight = AsyncGRPOConfig(enabled=True, recompute_kv_cache_after_weight_updates=True)
    requests = [request([2 + (3 * i + j) % 30 for j in range(9)], seed=i, max_new_tokens=TOKENS) for i in range(12)]
    try:
        with engines(versions.folders[0], max_length=MAX_LENGTH, in_flight=in_flight, routed=form) as generation:
            refit = RefitConfig(mode="broadcast", bucket_mib=0.05, timeout_s=60.0)
            transport = make_transport(versions.policy, generation, refit, Path())
            transport.connect()
            most_spans = 0
            for _ in range(ROUNDS):
                publish = partial(_publish, generation, versions, transport)
                for sample_request, output in zip(
                    requests, while_publishing(generation, requests, publish), strict=True
                ):
                    most_spans = max(most_spans, len(output.spans))
                    assert_recorded(form.unpack(output.routed), sample_request, output, versions)
                if most_spans > 2:
                    break
            assert most_spans > 2, "no response met two updates"
    finally:
        versions.policy.shutdown()


def assert_recorded(
    chosen: Any, sample_request: GenerationRequest, output: GenerationOutput, versions: Versions
) -> None:
    prompt = len(sample_request.prompt_ids)
    token_ids = torch.tensor([*sample_request.prompt_ids.tolist(), *output.token_ids.tolist()])
    assert len(chosen) == len(token_ids) - 1
    first = 0
    for span in output.spans:  # the prompt's tokens are those of the first span
        last = prompt + span.end - 1
        expected = own_routing(versions.models[versions.number[span.version]], token_ids)[first:last]
        experts = torch.from_numpy(chosen[first:last]).sort(dim=-1).values
        assert torch.equal(experts.long(), expected.sort(dim=-1).values.long()), span
        first = last


def _prefix_hits(generation: VllmGeneration) -> int:
    """Prompt tokens that engines found in their caches since the last call."""
    return sum(counts.prefix_hits for counts in ray.get(generation.submit(Engine.take_counts)))


def _assert_drawn(
    sample_request: GenerationRequest, output: GenerationOutput, versions: Versions, before: int | None
) -> None:
    """Every token was drawn by its span's version.

    Args:
        sample_request: the request for one response.
        output: the response.
        versions: the models, and the version that each was published as.
        before: the version that was served when the first was asked, where the cache is kept: a prompt that waits for
            its turn while the weights change begins with what that version, or one until its turn, has cached of it.
    """
    start = len(sample_request.prompt_ids)
    token_ids = [*sample_request.prompt_ids.tolist(), *output.token_ids.tolist()]
    assert [span.start for span in output.spans] == [0, *(span.end for span in output.spans[:-1])]
    assert output.spans[-1].end == len(output.token_ids)
    assert [span.version for span in output.spans] == sorted({span.version for span in output.spans})
    spans = [Span(start + span.start, start + span.end, span.version) for span in output.spans]
    if before is None:
        possible = [torch.cat([versions.recomputed(token_ids, span) for span in spans])]
    else:
        cached = [Span(0, BLOCK, version) for version in range(before, spans[0].version)]
        possible = [versions.recompute_cached(token_ids, spans, prompt) for prompt in [Span(0, 0, before), *cached]]
    logprobs = output.logprobs.tolist()
    assert any(logprobs == pytest.approx(expected.tolist(), abs=1e-4) for expected in possible), (output.spans, before)


def _publish(_: VllmGeneration, versions: Versions, transport: WeightTransport) -> None:
    versions.publish(transport)


def _publish_asleep(generation: VllmGeneration, versions: Versions, transport: WeightTransport) -> None:
    """Publish as on shared devices, where the engines sleep while the models train."""
    generation.sleep()
    generation.submit(Engine.take_counts)
    time.sleep(ASLEEP_S)
    assert all(not counts.busy_s for counts in ray.get(generation.submit(Engine.take_counts))), "engines that sleep"
    generation.wake("weights")
    versions.publish(transport)
    generation.wake("kv_cache")


def while_publishing(
    generation: VllmGeneration, requests: list[GenerationRequest], publish: Callable[[], None]
) -> list[GenerationOutput]:
    """Responses to the requests, under which new weights are published some times.

    Half of the requests come while the first of these updates is under way.
    """

    async def scene() -> list[GenerationOutput]:
        pool = Engines([EngineClient(engine, index, "test") for index, engine in generation.engines.items()])
        placed = zip(pool.assign([1] * len(requests)), requests, strict=True)
        calls = [client.generate(sample_request, SETTINGS) for client, sample_request in placed]
        first = asyncio.gather(*calls[::2])
        await asyncio.sleep(0.1)
        publishing = asyncio.create_task(asyncio.to_thread(publish))
        await asyncio.sleep(0.01)
        second = asyncio.gather(*calls[1::2])
        answers = asyncio.gather(first, second)
        await publishing
        for _ in range(UPDATES - 1):
            await asyncio.sleep(0.1)
            await asyncio.to_thread(publish)
        early, late = await answers
        return [output for pair in zip(early, late, strict=True) for output in pair]

    return asyncio.run(scene())


def select_entries(table: Tensor, token_ids: Sequence[int]) -> Tensor:
    """[tokens]: of each row of [tokens, vocabulary] the entry of its token."""
    return table.gather(1, torch.tensor(list(token_ids))[:, None])[:, 0]


def become(rank: Any, folder: str) -> None:
    load_hf_weights(rank.chunks, rank.shape, folder)


def _start_policy(path: Path) -> MegatronPolicy:
    settings = RankSettings(
        config=PolicyConfig(
            model=ModelConfig(path=str(path)), parallel=ParallelConfig(), precision="float32", threads=1
        ),
        shape=read_model_shape(path),
        folder=str(path),
        decay_steps=1,
    )
    policy = MegatronPolicy(settings, actor_options=lambda rank: {"num_cpus": 0}, startup_timeout_s=START_S)
    policy.start()
    policy.wait_ready()
    return policy
