"""Weights from Megatron ranks into vLLM engines of every layout, against transformers; and what happens on failure."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from megatron_grpo.batch.generation_requests import GenerationOutput, SamplingSettings
from megatron_grpo.batch.trajectory import Span
from megatron_grpo.config.schema import ModelConfig, ParallelConfig, PolicyConfig, RefitConfig
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.model_ranks import MegatronPolicy
from megatron_grpo.weight_sync.refit_calls import RefitError
from megatron_grpo.weight_sync.transport import make_transport
from tests.integration.vllm_helpers import (
    ON_GPUS,
    START_S,
    Oracle,
    engines,
    generate,
    gpus,
    kill_a_worker,
    make_model,
    request,
    start_ray,
)

POLICY_LAYOUTS = {"tp2": ParallelConfig(tensor=2), "pp2": ParallelConfig(pipeline=2)}
ENGINE_LAYOUTS = {"tp1": {"data": 2}, "tp2": {"tensor": 2}, "pp2": {"pipeline": 2}}
pytestmark = pytest.mark.slow  # with every `make test`, test_reshard.py compares a broadcast with what a folder gives

PROMPTS = [[2 + i, 3, 5 + i, 7] for i in range(6)]
TOKENS = 8
TOLERANCE = 5e-2 if ON_GPUS else 1e-4
"""Of a log-probability; attention on a GPU multiplies in TF32."""
REFIT = RefitConfig(mode="broadcast", bucket_mib=0.05, timeout_s=60.0, retries=0)
"""Buckets small enough that layers straddle them and the embedding comes in strips."""


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[None]:
    start_ray()
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "base", seed=0)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[MegatronPolicy, Oracle]]]:
    """Policies of all layouts, each with weights of its own, and what transformers makes of those."""
    folder = tmp_path_factory.mktemp("models")
    started = {}
    for seed, (name, layout) in enumerate(POLICY_LAYOUTS.items(), start=1):
        path = make_model(folder / name, seed=seed)
        started[name] = (start_policy(path, layout), Oracle(path))
    for policy, _ in started.values():
        policy.wait_ready()
    yield started
    for policy, _ in started.values():
        policy.shutdown()


@pytest.fixture(scope="module", params=["tp1", "tp2", "pp2"])
def generation(request: pytest.FixtureRequest, base: Path) -> Iterator[VllmGeneration]:
    with engines(base, **ENGINE_LAYOUTS[request.param]) as started:
        yield started


def test_generation_equals_transformers_after_each_refit(
    generation: VllmGeneration, base: Path, policies: dict[str, tuple[MegatronPolicy, Oracle]]
) -> None:
    assert_serves(generation, Oracle(base), version=0)
    for version, (policy, oracle) in enumerate(policies.values(), start=1):
        transport = make_transport(policy, generation, REFIT, Path())
        transport.connect()
        report = transport.publish(version)
        assert report.version == version
        assert report.buckets > 4
        workers = generation.config.parallel.ranks_per_engine
        assert report.tensors >= (2 * 11 + 2) * workers, "11 tensors a layer, the (tied) embedding, the last norm"
        assert_serves(generation, oracle, version)


def test_a_corrupted_bucket_is_refused_and_the_next_refit_heals(
    generation: VllmGeneration, policies: dict[str, tuple[MegatronPolicy, Oracle]]
) -> None:
    policy, oracle = policies["pp2"]
    transport = make_transport(policy, generation, REFIT, Path())
    transport.connect()
    transport.publish(10)
    ray.get(policy.submit(_damage_next_refit))
    with pytest.raises(RefitError, match=r"message \d+ from policy rank 1: checksum .* differs"):
        transport.publish(11)
    with pytest.raises(RuntimeError, match="refit of version 11 was not committed"):
        _generate(generation)
    transport.publish(12)
    assert_serves(generation, oracle, version=12)


def test_a_killed_engine_process_ends_the_refit_quickly(
    generation: VllmGeneration, policies: dict[str, tuple[MegatronPolicy, Oracle]]
) -> None:
    """Last of the module: the engine is gone afterwards."""
    policy, _ = policies["tp2"]
    transport = make_transport(policy, generation, REFIT, Path())
    transport.connect()
    kill_a_worker(generation)
    began = time.monotonic()
    with pytest.raises(RefitError, match=r"generation engine|policy rank"):
        transport.publish(20)
    with pytest.raises(RuntimeError, match="generation engine"):
        _generate(generation)
    assert time.monotonic() - began < 20


def start_policy(path: Path, layout: ParallelConfig) -> MegatronPolicy:
    settings = RankSettings(
        config=PolicyConfig(model=ModelConfig(path=str(path)), parallel=layout, precision="float32", threads=1),
        shape=read_model_shape(path),
        folder=str(path),
        decay_steps=1,
    )
    policy = MegatronPolicy(settings, actor_options=lambda rank: gpus(1), startup_timeout_s=START_S)
    policy.start()
    return policy


def _generate(generation: VllmGeneration) -> list[GenerationOutput]:
    requests = [request(prompt, seed=0, max_new_tokens=TOKENS) for prompt in PROMPTS]
    return generate(generation, requests, SamplingSettings(max_new_tokens=TOKENS, temperature=0.0))


def assert_serves(generation: VllmGeneration, oracle: Oracle, version: int) -> None:
    for prompt, output in zip(PROMPTS, _generate(generation), strict=True):
        token_ids = output.token_ids.tolist()
        table = oracle.distributions(prompt, token_ids).log_softmax(dim=-1)
        expected = table.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()
        assert output.logprobs.tolist() == pytest.approx(expected, abs=TOLERANCE)
        assert table.amax(dim=1).tolist() == pytest.approx(expected, abs=2 * TOLERANCE), "the likeliest tokens"
        assert output.spans == [Span(0, len(token_ids), version)]


def _damage_next_refit(rank: Any) -> None:
    """On the rank that sends stage 1: flip one bit of the first message after its checksum is written, once."""
    if torch.distributed.get_rank() != 1:
        return
    links = rank.weight_sender.links
    begin = links.begin

    def flip_once(number: int) -> Any:
        links.view_buffer(number)[100] ^= 1
        links.begin = begin
        return begin(number)

    links.begin = flip_once
