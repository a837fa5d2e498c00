"""Models with delta nets from Megatron ranks into a vLLM engine, which computes them in bfloat16 on a CPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from megatron_grpo.batch.generation_requests import SamplingSettings
from megatron_grpo.config.schema import ParallelConfig
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.weight_sync.transport import make_transport
from tests.integration.test_refit import PROMPTS, REFIT, TOKENS, ray_cluster, start_policy
from tests.integration.vllm_helpers import engines, generate, make_model, request

__all__ = ["ray_cluster"]  # a fixture of every test here

TOLERANCE = 0.15
"""Of a log-probability, against transformers in float32, from which transformers in bfloat16 is up to 0.08 away."""


def make_vision_model(path: Path, seed: int) -> Path:
    """A model that also sees images, with the text part of `qwen3_5` and its tokenizer."""
    make_model(path, seed, "qwen3_5")
    text = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"num_position_embeddings": 16, "patch_size": 4}
    tokens = {"image_token_id": 34, "video_token_id": 35, "vision_start_token_id": 36, "vision_end_token_id": 37}
    tied = {"tie_word_embeddings": text.config.tie_word_embeddings}
    model = Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=text.config.to_dict(), vision_config=vision, **tokens, **tied)
    )
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.save_pretrained(path)
    return path


class Oracle:
    """What transformers says of a folder's text model."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.no_grad()
    def logprobs(self, prompt: list[int], response: list[int]) -> list[float]:
        logits = self.model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()


def compare(generation: VllmGeneration, oracle: Oracle) -> float:
    """The largest difference of a sampled token's log-probability."""
    requests = [request(prompt, seed=number, max_new_tokens=TOKENS) for number, prompt in enumerate(PROMPTS)]
    outputs = generate(generation, requests, SamplingSettings(max_new_tokens=TOKENS, temperature=1.0))
    differences = []
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = oracle.logprobs(prompt, output.token_ids.tolist())
        differences += [abs(ours - theirs) for ours, theirs in zip(output.logprobs.tolist(), expected, strict=True)]
    return max(differences)


MAKERS: dict[str, Callable[[Path, int], Path]] = {
    "qwen3_5": lambda path, seed: make_model(path, seed, "qwen3_5"),
    "vision": make_vision_model,
    "qwen3_5_moe": lambda path, seed: make_model(path, seed, "qwen3_5_moe"),
    "qwen3_next": lambda path, seed: make_model(path, seed, "qwen3_next"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_generation_is_near_transformers_before_and_after_a_refit(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torchvision")  # vLLM's module of these models imports it
    base, trained = (MAKERS[name](tmp_path / folder, seed) for seed, folder in enumerate(("base", "trained")))
    layout = ParallelConfig(context=2) if name == "qwen3_5" else ParallelConfig(tensor=2, sequence=True)
    policy = start_policy(trained, layout)
    try:
        with engines(base, precision="bfloat16") as generation:
            assert compare(generation, Oracle(base)) < TOLERANCE
            assert compare(generation, Oracle(trained)) > 5 * TOLERANCE
            policy.wait_ready()
            transport = make_transport(policy, generation, REFIT, Path())
            transport.connect()
            for version in (1, 2):
                transport.publish(version)
                assert compare(generation, Oracle(trained)) < TOLERANCE
    finally:
        policy.shutdown()
