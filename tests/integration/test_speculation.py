"""Engines that propose tokens, by the model's own layers (MTP) or from n-grams: what they sample is the model's.

The layers here propose the token that is likeliest after the last one alone, since their attention and experts add
nothing. The models are nearly such bigrams, too. So many proposals are accepted, and how many is computed from the
embedding and the head that the engine should have at that time.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from megatron_grpo.batch.generation_requests import SamplingSettings, compute_engine_metrics
from megatron_grpo.batch.trajectory import Span
from megatron_grpo.config.generation_schema import RefitMode, SpeculativeConfig
from megatron_grpo.config.schema import ParallelConfig, RefitConfig
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.weight_sync.transport import make_transport
from tests.integration.test_refit import ray_cluster, start_policy
from tests.integration.vllm_helpers import Oracle, engines, generate, make_model, request

pytestmark = pytest.mark.slow

__all__ = ["ray_cluster"]  # a fixture of every test here

HIDDEN, LAYERS, TOKENS, PROPOSED = 64, 2, 24, 2
FURTHER = f"model.layers.{LAYERS}."
PROMPTS = [[2 + i, 3, 5 + i, 7] for i in range(8)]
MTP = SpeculativeConfig(method="mtp", num_speculative_tokens=PROPOSED)
SAMPLING: list[dict[str, float]] = [{}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 5, "top_p": 0.9}]


@dataclass(frozen=True)
class Case:
    """A model, how its weights travel, and how near its engine comes to transformers in float32."""

    family: str
    mode: RefitMode = "reshard"
    tensor: int = 1
    precision: str = "float32"
    tolerance: float = 1e-4


CASES = {
    "glm4_moe": Case("glm4_moe"),
    "deepseek_v3": Case("latent", mode="broadcast", tensor=2),
    "qwen3_next": Case("qwen3_next_sparse", precision="bfloat16", tolerance=0.15),
}


def make_bigram_model(path: Path, seed: int, family: str) -> Path:
    """A model whose layers add little to the embedding, and one that proposes tokens and adds nothing."""
    file = make_model(path, seed, family) / "model.safetensors"
    tensors = load_file(file)
    outputs = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")
    for name, tensor in tensors.items():
        tensor *= (
            0.05 if name.endswith(outputs) else 3 if name in ("lm_head.weight", "model.embed_tokens.weight") else 1
        )
    last = f"model.layers.{LAYERS - 1}."
    layer = {name.removeprefix(last): tensor.clone() for name, tensor in tensors.items() if name.startswith(last)}
    for name, tensor in layer.items():
        tensor *= 0 if name.endswith(outputs) else 1
    norm, only_embedding = tensors["model.norm.weight"].clone(), torch.eye(HIDDEN, 2 * HIDDEN)
    if family == "qwen3_next_sparse":  # whose norms multiply by 1 + weight
        tensors |= {f"mtp.layers.0.{name}": tensor for name, tensor in layer.items()}
        tensors |= {"mtp.fc.weight": only_embedding, "mtp.norm.weight": norm}
        tensors |= {f"mtp.pre_fc_norm_{part}.weight": torch.zeros(HIDDEN) for part in ("hidden", "embedding")}
    else:
        tensors |= {FURTHER + name: tensor for name, tensor in layer.items()}
        tensors |= {f"{FURTHER}eh_proj.weight": only_embedding, f"{FURTHER}shared_head.norm.weight": norm}
        tensors |= {f"{FURTHER}{name}.weight": torch.ones(HIDDEN) for name in ("enorm", "hnorm")}
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def find_proposals(model: Path, layers: Path) -> list[int]:
    """The token that is proposed after each one, with the embedding and head of one folder and layers of another."""
    tensors, norms = load_file(model / "model.safetensors"), load_file(layers / "model.safetensors")
    norm = norms.get(f"{FURTHER}shared_head.norm.weight")
    scale = 1 + norms["mtp.norm.weight"] if norm is None else norm
    states = torch.nn.functional.rms_norm(tensors["model.embed_tokens.weight"], (HIDDEN,)) * scale
    proposals: list[int] = (states @ tensors["lm_head.weight"].T).argmax(dim=-1).tolist()
    return proposals


def compute_acceptance(responses: Sequence[list[int]], proposals: Sequence[int]) -> float:
    """Share of proposed tokens that greedy responses have."""
    drafted = accepted = 0
    for response in responses:
        last = 0
        while last < len(response) - 1:
            proposed = [proposals[response[last]]]
            proposed.append(proposals[proposed[0]])
            run = 0
            while response[last + 1 + run : last + 2 + run] == proposed[run : run + 1] != []:
                run += 1
            drafted, accepted, last = drafted + PROPOSED, accepted + run, last + run + 1  # and a token of the model's
    return accepted / drafted


def filter_logits(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """What sampling leaves of logits, [tokens, vocabulary], by transformers."""
    ids = torch.zeros(len(logits), 1, dtype=torch.long)
    if settings.top_k is not None:
        logits = TopKLogitsWarper(settings.top_k)(ids, logits)
    return TopPLogitsWarper(settings.top_p)(ids, logits) if settings.top_p < 1 else logits


def assert_samples(generation: VllmGeneration, oracle: Oracle, case: Case, version: int) -> None:
    """Log-probabilities of sampled tokens, proposed or not, are those of the model."""
    requests = [request(prompt, seed, TOKENS) for seed, prompt in enumerate(PROMPTS)]
    for options in SAMPLING:
        settings = SamplingSettings(max_new_tokens=TOKENS, **options)  # type: ignore[arg-type]
        for prompt, output in zip(PROMPTS, generate(generation, requests, settings), strict=True):
            ids = output.token_ids.tolist()
            logits = filter_logits(oracle.distributions(prompt, ids) / settings.temperature, settings)
            expected = logits.log_softmax(dim=-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=case.tolerance, rtol=0)
            assert output.spans == [Span(0, len(ids), version)]


def measure_acceptance(generation: VllmGeneration) -> tuple[list[list[int]], float]:
    """Greedy responses, and the share of proposed tokens that was accepted, as metrics have it."""
    ray.get(generation.engines[0].take_counts.remote())
    requests = [request(prompt, 0, TOKENS) for prompt in PROMPTS]
    outputs = generate(generation, requests, SamplingSettings(max_new_tokens=TOKENS, temperature=0.0))
    counts = ray.get(generation.engines[0].take_counts.remote())
    rate = compute_engine_metrics([counts])["engine_draft_acceptance_rate"]
    return [output.token_ids.tolist() for output in outputs], rate


@pytest.mark.parametrize("name", CASES)
def test_proposals_change_no_distribution_and_follow_the_refit(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    base = make_bigram_model(tmp_path / "base", 0, case.family)
    trained = make_bigram_model(tmp_path / "trained", 1, case.family)
    policy = start_policy(trained, ParallelConfig())
    try:
        with engines(base, tensor=case.tensor, precision=case.precision, speculative=MTP) as generation:
            policy.wait_ready()
            transport = make_transport(policy, generation, RefitConfig(mode=case.mode, timeout_s=120.0), Path())
            for version, model in enumerate([base, trained]):
                if version:
                    transport.connect()
                    transport.publish(version)
                oracle = Oracle(model)
                assert_samples(generation, oracle, case, version)
                responses, rate = measure_acceptance(generation)
                if case.precision == "float32":
                    assert responses == [oracle.greedy(prompt, TOKENS) for prompt in PROMPTS]
                # The layers are those of the first folder, while embedding and head are the model's of now.
                expected = compute_acceptance(responses, find_proposals(model, layers=base))
                assert rate == pytest.approx(expected, abs=0.1)
                assert expected > 0.3
            assert compute_acceptance(responses, find_proposals(base, layers=base)) < expected - 0.2, "a stale head"
    finally:
        policy.shutdown()


def test_an_engine_that_begins_with_placeholders_reads_the_layers_that_propose(tmp_path: Path) -> None:
    base = make_bigram_model(tmp_path / "base", 0, "glm4_moe")
    trained = make_bigram_model(tmp_path / "trained", 1, "glm4_moe")
    policy = start_policy(trained, ParallelConfig())
    try:
        with engines(base, speculative=MTP, awaits_refit=True) as generation:
            policy.wait_ready()
            transport = make_transport(policy, generation, RefitConfig(timeout_s=120.0), Path())
            transport.connect()
            transport.publish(1)
            assert_samples(generation, Oracle(trained), CASES["glm4_moe"], 1)
            responses, rate = measure_acceptance(generation)
            assert rate == pytest.approx(compute_acceptance(responses, find_proposals(trained, layers=base)), abs=0.1)
    finally:
        policy.shutdown()


def test_n_grams_change_no_distribution(tmp_path: Path) -> None:
    base = make_bigram_model(tmp_path / "base", 0, "glm4_moe")
    n_grams = SpeculativeConfig(num_speculative_tokens=PROPOSED, prompt_lookup_min=1)
    with engines(base, speculative=n_grams) as generation:
        assert_samples(generation, Oracle(base), CASES["glm4_moe"], version=0)
        responses, rate = measure_acceptance(generation)
    assert responses == [Oracle(base).greedy(prompt, TOKENS) for prompt in PROMPTS]
    assert rate > 0
