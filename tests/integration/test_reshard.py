"""Refits shard to shard into vLLM engines of every layout: the same bits as from a broadcast, and from a folder."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from megatron_grpo.batch.generation_requests import SamplingSettings
from megatron_grpo.config.generation_schema import RefitMode
from megatron_grpo.config.schema import ParallelConfig, RefitConfig
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.models.hf_weights import load_hf_weights
from megatron_grpo.trainer.model_ranks import MegatronPolicy
from megatron_grpo.weight_sync.transport import make_transport
from tests.integration.test_refit import assert_serves, ray_cluster, start_policy
from tests.integration.vllm_helpers import Oracle, engines, generate, make_config, make_model, request

__all__ = ["ray_cluster"]  # a fixture of every test here

REFIT = RefitConfig(bucket_mib=0.02, timeout_s=60.0)
"""Buckets so small that layers straddle them and the embedding comes in strips."""


@dataclass(frozen=True)
class Case:
    family: str
    training: ParallelConfig
    generation: dict[str, int]


CASES = {"tp2_to_pp2": Case("dense", ParallelConfig(tensor=2), {"pipeline": 2})}
RARE = {
    "pp2_to_tp2": Case("dense", ParallelConfig(pipeline=2), {"tensor": 2}),
    "ep2_to_ep2": Case("experts", ParallelConfig(data=2, expert=2), {"tensor": 2, "expert": 2}),
    "dp2_to_two_engines": Case("dense", ParallelConfig(data=2), {"data": 2}),
    "pp2vp2_to_tp2pp2": Case("deep", ParallelConfig(pipeline=2, virtual_pipeline=2), {"tensor": 2, "pipeline": 2}),
    "tp2pp2_to_one": Case("dense", ParallelConfig(tensor=2, pipeline=2), {}),
    "tp2ep2_to_split_experts": Case("experts", ParallelConfig(tensor=2, expert=2, sequence=True), {"tensor": 2}),
    "ep2_to_pp2": Case("experts", ParallelConfig(data=2, expert=2), {"pipeline": 2}),
    "latent_tp2_to_pp2": Case("latent", ParallelConfig(tensor=2, sequence=True), {"pipeline": 2}),
    "latent_ep2_to_ep2": Case("latent", ParallelConfig(data=2, expert=2), {"tensor": 2, "expert": 2}),
}
PROMPTS = [[2 + i, 3, 5 + i, 7] for i in range(6)]


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    "case", [*CASES.values(), *(pytest.param(c, marks=pytest.mark.slow) for c in RARE.values())], ids=[*CASES, *RARE]
)
def test_the_engine_holds_the_same_bits_as_after_a_broadcast_and_as_from_a_folder(case: Case, tmp_path: Path) -> None:
    """The bits that the engine began with come back once the policy has the folder's weights."""
    family = case.family
    base = make_model(tmp_path / "base", seed=0, family=family)
    trained = make_model(tmp_path / "trained", seed=1, family=family)
    policy = start_policy(trained, case.training)
    try:
        with engines(base, **case.generation) as generation:
            policy.wait_ready()
            loaded = answers(generation)
            resharded = after("reshard", policy, generation, version=1)
            assert not np.array_equal(resharded, loaded), "another model"
            assert_serves(generation, Oracle(trained), version=1)
            become(policy, base)
            assert np.array_equal(after("broadcast", policy, generation, version=2), loaded)
            become(policy, trained)
            assert np.array_equal(after("broadcast", policy, generation, version=3), resharded)
            # Leftovers of another way of loading are no obstacle, nor is a second version.
            become(policy, base)
            assert np.array_equal(after("reshard", policy, generation, version=4), loaded)
    finally:
        policy.shutdown()


@pytest.mark.turns(2)
def test_engines_beside_a_policy_on_two_nodes_get_what_only_the_other_node_has(tmp_path: Path) -> None:
    """Each stage of the policy counts as a node: an engine's halves come from and through a rank."""
    base, trained = (make_model(tmp_path / name, seed=seed) for seed, name in enumerate(("base", "trained")))
    policy = start_policy(trained, ParallelConfig(pipeline=2))
    try:
        with engines(base, data=2, colocated=True) as generation:
            policy.wait_ready()
            policy.settings = replace(policy.settings, ranks_per_machine=1)
            assert not np.array_equal(answers(generation), after("reshard", policy, generation, version=1))
            assert_serves(generation, Oracle(trained), version=1)
            become(policy, base)
            after("reshard", policy, generation, version=2)
            assert_serves(generation, Oracle(base), version=2)
    finally:
        policy.shutdown()


BLOCKED = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 128,
    "moe_intermediate_size": 256,
    "num_experts": 32,
}
"""Of experts so many because vLLM's CPU kernel cannot multiply by the matrix that chooses them when they are 4."""
BLOCKED_CASES = {
    "dense": Case("dense", ParallelConfig(tensor=2), {"pipeline": 2}),
    "dense_pp2_to_tp2": Case("dense", ParallelConfig(pipeline=2), {"tensor": 2}),
    "experts_ep2_to_one": Case("experts", ParallelConfig(data=2, expert=2), {}),
}


@pytest.mark.slow
@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="vLLM multiplies by FP8 blocks with AMX")
@pytest.mark.parametrize("case", BLOCKED_CASES.values(), ids=BLOCKED_CASES)
def test_matrices_that_the_policy_rounds_are_those_that_vllm_would_have_rounded(case: Case, tmp_path: Path) -> None:
    """Of weights that FP8 has exactly, vLLM's own rounding of the folder is the oracle, to the last bit."""

    def family(**sizes: Any) -> Any:
        return make_config(case.family, BLOCKED, **sizes)

    base = make_model(tmp_path / "base", seed=0, family=family)
    trained = _in_fp8_exactly(make_model(tmp_path / "trained", seed=1, family=family))
    in_fp8 = {**case.generation, "precision": "bfloat16", "engine_args": {"quantization": "fp8_per_block"}}
    policy = start_policy(trained, case.training)
    try:
        with engines(trained, **in_fp8) as generation:
            loaded = answers(generation)
        with engines(base, **in_fp8) as generation:
            policy.wait_ready()
            assert not np.array_equal(answers(generation), loaded), "another model"
            for version, rounded in enumerate((True, False), start=1):
                transport = make_transport(policy, generation, replace(REFIT, fp8_blocks=rounded), Path())
                transport.connect()
                report = transport.publish(version)
                assert np.array_equal(answers(generation), loaded), rounded
                assert (report.bytes_sent < 2.2 * _parameters(trained)) == rounded, "float32 has 4 bytes"
    finally:
        policy.shutdown()


def _in_fp8_exactly(path: Path) -> Path:
    """A model whose layers' matrices are E4M3 numbers times 2^-10, in every block the largest, 448, among them."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".layers." in name and parameter.dim() >= 2 and "gate.weight" not in name:
                numbers = (parameter * 1024).clamp(-448, 448)
                numbers[..., ::128, ::128] = 448.0
                parameter.copy_(numbers.to(torch.float8_e4m3fn).float() / 1024)
    model.save_pretrained(path)
    return path


def _parameters(path: Path) -> int:
    return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(path).parameters())


def become(policy: MegatronPolicy, folder: Path) -> None:
    """Give the policy the weights of a folder."""
    ray.get(policy.submit(_load, str(folder)), timeout=60)


def _load(rank: Any, folder: str) -> None:
    load_hf_weights(rank.chunks, rank.shape, folder)


def after(mode: RefitMode, policy: MegatronPolicy, generation: VllmGeneration, version: int) -> np.ndarray:
    transport = make_transport(policy, generation, replace(REFIT, mode=mode), Path())
    transport.connect()
    assert transport.publish(version).version == version
    return answers(generation)


def answers(generation: VllmGeneration) -> np.ndarray:
    """[prompts, tokens]: log-probabilities of greedy responses, which depend on every weight."""
    requests = [request(prompt, seed=0, max_new_tokens=6) for prompt in PROMPTS]
    outputs = generate(generation, requests, SamplingSettings(max_new_tokens=6, temperature=0.0))
    return np.array([np.resize(output.logprobs, 6) for output in outputs])
