"""Engines that received every message intact and hold something else all the same: what the canary finds, and names."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from transformers import Qwen3MoeConfig

from megatron_grpo.algorithms.placement import Placement, publish
from megatron_grpo.batch.generation_requests import SamplingSettings
from megatron_grpo.config.schema import LoraConfig, ModelConfig, ParallelConfig, PolicyConfig, RefitConfig
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.model.lora import AdaptedLinear
from megatron_grpo.trainer.model_ranks import MegatronPolicy
from megatron_grpo.weight_sync import shard_sender
from megatron_grpo.weight_sync.refit_calls import RefitError
from megatron_grpo.weight_sync.refit_checks import BOUNDS, Canary, draw_canary
from megatron_grpo.weight_sync.transport import WeightTransport, make_transport
from tests.integration.test_refit import ray_cluster
from tests.integration.vllm_helpers import START_S, VOCAB, engines, generate, gpus, make_model, request

__all__ = ["ray_cluster"]  # a fixture of every test here

pytestmark = [pytest.mark.slow, pytest.mark.ci]  # the canary follows the refits of all other runs too

REFIT = RefitConfig(bucket_mib=0.02, timeout_s=120.0, canary_share=1.0, weight_check_period=1)
MIXTURE = partial(Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True)


@pytest.fixture(scope="module")
def pair(
    ray_cluster: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[MegatronPolicy, VllmGeneration]]:
    """A mixture of experts with trained adapters, in two stages, and an engine of two ranks that split experts."""
    folder = tmp_path_factory.mktemp("models")
    base = make_model(folder / "base", seed=0, family=MIXTURE)
    trained = make_model(folder / "trained", seed=1, family=MIXTURE)
    settings = RankSettings(
        config=PolicyConfig(
            model=ModelConfig(path=str(trained)),
            parallel=ParallelConfig(pipeline=2),
            lora=LoraConfig(rank=2, target_modules=["linear_qkv", "linear_proj"]),
            precision="float32",
            threads=1,
        ),
        shape=read_model_shape(trained),
        folder=str(trained),
        decay_steps=1,
        temperature=0.7,
    )
    policy = MegatronPolicy(settings, actor_options=lambda rank: gpus(1), startup_timeout_s=START_S)
    policy.start()
    worker = {"worker_extension_cls": "tests.integration.faulty_worker.FaultyWorker"}
    try:
        with engines(base, tensor=2, engine_args=worker) as generation:
            policy.wait_ready()
            ray.get(policy.submit(_train_adapters))
            yield policy, generation
    finally:
        policy.shutdown()


@pytest.fixture(autouse=True)
def healthy(pair: tuple[MegatronPolicy, VllmGeneration]) -> Iterator[None]:
    yield
    _place_fault(pair[1], "none")
    ray.get(pair[0].submit(_merge_adapters, True))
    ray.get(pair[0].submit(_merge_wrongly, None))


def _transport(pair: tuple[MegatronPolicy, VllmGeneration], **changes: Any) -> WeightTransport:
    config = replace(REFIT, **changes)
    transport = make_transport(*pair, config, Path(), Canary(config, draw_canary(7, VOCAB, 32)))
    transport.connect()
    return transport


def test_a_healthy_engine_serves(pair: tuple[MegatronPolicy, VllmGeneration]) -> None:
    transport = _transport(pair)
    for version in (1, 2):
        report = transport.admit(transport.publish(version))
        assert 0 < report.checks["canary_logprob_error"] < 1e-4
        assert report.checks["weight_check_s"] > 0
        _answer(pair[1])


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("flipped", "model.layers.1.self_attn.o_proj.weight"),
        ("swapped", r"model.layers.1.mlp.experts.0 .*worker [01]: model.layers.1.mlp.experts.1"),
        ("stale", "model.layers.0.post_attention_layernorm.weight"),
    ],
)
def test_a_wrong_tensor_is_named_and_never_served(
    fault: str, name: str, pair: tuple[MegatronPolicy, VllmGeneration]
) -> None:
    transport = _transport(pair)
    if fault == "stale":
        transport.publish(10)
        ray.get(pair[0].submit(_move_norms))
    _place_fault(pair[1], fault)
    with pytest.raises(RefitError, match=rf"generation engine 0, worker [01]: {name} differs") as failure:
        transport.publish(11)
    assert str(failure.value).count(" differs from ") <= 4, "nothing else is named"
    with pytest.raises(RuntimeError, match="version 11 was not committed"):
        _answer(pair[1])


def test_the_canary_alone_finds_it_and_the_weights_are_compared_then(
    pair: tuple[MegatronPolicy, VllmGeneration],
) -> None:
    transport = _transport(pair, weight_check_period=None)
    publish(transport, Placement(), 20, StepTimer())
    _place_fault(pair[1], "swapped")
    with pytest.raises(RefitError) as error:
        publish(transport, Placement(), 21, StepTimer())
    assert "generation engine 0 must not serve: with version 21 of the weights" in str(error.value)
    assert "worker 1: model.layers.1.mlp.experts.1 differs" in str(error.value)
    with pytest.raises(RuntimeError, match="version 21 of the weights has not passed the canary"):
        _answer(pair[1])
    _place_fault(pair[1], "none")
    publish(transport, Placement(), 22, StepTimer())
    _answer(pair[1])


def test_an_engine_that_mixes_up_the_sequences_of_a_batch_never_serves(
    pair: tuple[MegatronPolicy, VllmGeneration],
) -> None:
    """All its weights are right, and a sequence alone is computed rightly."""
    transport = _transport(pair)
    publish(transport, Placement(), 24, StepTimer())
    _place_fault(pair[1], "positions")
    with pytest.raises(RefitError) as error:
        publish(transport, Placement(), 25, StepTimer())
    assert "generation engine 0 must not serve: with version 25 of the weights" in str(error.value)
    assert "sequence by sequence, in the order in which they are packed" in str(error.value)
    assert "all weights are the policy's as the kernels hold them, so the computation differs" in str(error.value)


@pytest.mark.parametrize(("token", "versions", "tokens"), [(18, [51], "20 tokens, from token 16"), (6, [51, 52], "31")])
def test_a_row_of_the_embedding_that_few_tokens_use_is_noticed(
    token: int, versions: list[int], tokens: str, pair: tuple[MegatronPolicy, VllmGeneration]
) -> None:
    """In two sequences at once; in one, which a near tie of experts may explain, by the second canary."""
    transport = _transport(pair, weight_check_period=None)
    config, sequences = replace(REFIT, weight_check_period=None), draw_canary(7, VOCAB, 32)
    canary = Canary(config, sequences, BOUNDS["float32"], limits_tokens=True, has_ties=True)
    canary.record_noise(3e-6)
    transport._checks.canary = canary
    publish(transport, Placement(), 50, StepTimer())
    _place_fault(pair[1], f"row {token}")
    for version in versions[:-1]:
        publish(transport, Placement(), version, StepTimer())
    with pytest.raises(RefitError) as error:
        publish(transport, Placement(), versions[-1], StepTimer())
    assert "the medians agree, but log-probabilities of single tokens of the canary differ" in str(error.value)
    assert f"of {tokens}" in str(error.value)
    assert f"behind id {token})" in str(error.value)
    assert "all weights are the policy's as the kernels hold them, so the computation differs" in str(error.value)


@pytest.mark.parametrize("period", [1, None], ids=["weights", "canary"])
def test_adapters_that_are_not_merged(period: int | None, pair: tuple[MegatronPolicy, VllmGeneration]) -> None:
    transport = _transport(pair, weight_check_period=period)
    ray.get(pair[0].submit(_merge_adapters, False))
    with pytest.raises(RefitError) as error:
        publish(transport, Placement(), 30, StepTimer())
    named = {f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "qkvo"}
    assert all(f"worker 0: {name} differs" in str(error.value) for name in named), error
    assert str(error.value).count("differs from the policy's by") == 2 * len(named), "on two workers, and nothing else"


@pytest.mark.parametrize("fault", ["left out", "twice", "without scale", "stale", "in the first layer alone"])
def test_adapters_that_are_merged_wrongly_are_named_before_anything_is_served(
    fault: str, pair: tuple[MegatronPolicy, VllmGeneration]
) -> None:
    """Both sides' fingerprints are then those of the wrong weights, and need not be taken."""
    transport = _transport(pair, weight_check_period=None, canary=False)
    publish(transport, Placement(), 40, StepTimer())
    ray.get(pair[0].submit(_merge_wrongly, fault))
    with pytest.raises(RefitError) as error:
        publish(transport, Placement(), 41, StepTimer())
    named = {f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "qkvo"}
    if fault == "in the first layer alone":
        named = {name for name in named if "layers.1." in name}
    assert str(error.value).startswith("version 41 is not served: policy rank ")
    assert set(re.findall(r"model\.[a-z0-9_.]+", str(error.value))) == named
    with pytest.raises(RuntimeError, match="version 41 was not committed"):
        _answer(pair[1])


def _answer(generation: VllmGeneration) -> None:
    generate(generation, [request([2, 3, 4], seed=0, max_new_tokens=2)], SamplingSettings(max_new_tokens=2))


def _place_fault(generation: VllmGeneration, fault: str) -> None:
    plant = SimpleNamespace(__name__="plant")  # FaultyWorker.plant, whose module would import vLLM here
    ray.get(generation.engines[0]._call_workers.remote(plant, fault))


@torch.no_grad()
def _train_adapters(rank: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    for chunk in rank.chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith("lora_b"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)


@torch.no_grad()
def _move_norms(rank: Any) -> None:
    """As an optimizer step of a small learning rate does."""
    for chunk in rank.chunks:
        for name, parameter in chunk.named_parameters():
            if "norm" in name:
                parameter.mul_(1 + 1e-5)


def _merge_adapters(_: Any, merged: bool) -> None:
    """Let refits send the policy's weights with or without its adapters."""
    original = getattr(shard_sender, "merging_entries", shard_sender.bind_entries)
    bare = lambda *args: [replace(bound, adapted=None) for bound in original(*args)]  # noqa: E731
    vars(shard_sender).update(merging_entries=original, bind_entries=original if merged else bare)


def _merge_wrongly(rank: Any, fault: str | None) -> None:
    """Let layers with adapters publish another weight than they compute with; None: the right one again."""
    factors = {"left out": 0.0, "twice": 2.0, "stale": 0.99}
    for chunk in rank.chunks:
        for layer in chunk.decoder.layers:
            for module in layer.modules():
                if isinstance(module, AdaptedLinear):
                    vars(module).pop("merge_weight", None)
                    if fault == "without scale":
                        vars(module)["merge_weight"] = partial(_scaled_merge, module, 1 / module.scale)
                    elif fault is not None and not (fault == "in the first layer alone" and layer.layer_number == 1):
                        vars(module)["merge_weight"] = partial(_scaled_merge, module, factors.get(fault, 0.0))


def _scaled_merge(layer: Any, factor: float) -> torch.Tensor:
    added: torch.Tensor = factor * layer.scale * (layer.lora_b.float() @ layer.lora_a.float())
    return (layer.weight.float() + added).to(layer.weight.dtype)
