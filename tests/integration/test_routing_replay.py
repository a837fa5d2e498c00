"""The experts that vLLM returns, against transformers and the trainer, on a CPU: our recorder, vLLM's scheduler.

vLLM's own recording on GPUs has not run here.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3MoeConfig

from megatron_grpo.batch.generation_requests import GenerationOutput, SamplingSettings
from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.config.generation_schema import SpeculativeConfig
from megatron_grpo.config.schema import ModelConfig, MoeConfig, PolicyConfig
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.routed_experts import RoutedForm
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.rank import PolicyRank
from tests.integration.vllm_helpers import (
    VOCAB,
    engines,
    generate,
    make_model,
    request,
    start_ray,
)
from tests.parity.ranks import Layout, run_on_ranks
from tests.support.forced_routing import own_routing

pytestmark = pytest.mark.slow

PROMPTS = [[2 + (7 * i + j) % (VOCAB - 2) for j in range(3 + i)] for i in range(6)]
BLOCK = 128
"""Tokens of a block of vLLM's KV cache on a CPU."""
LONG = [2 + 5 * j % (VOCAB - 2) for j in range(BLOCK + 9)]
MAX_LENGTH = BLOCK + 40
PROPOSED = {"speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=3)}


def moe(**sizes: object) -> PretrainedConfig:
    """A Qwen3-MoE whose second layer, and second pipeline stage's first, has no experts."""
    further_sizes = {"num_hidden_layers": 4, "mlp_only_layers": [1, 2], "max_position_embeddings": 256}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return Qwen3MoeConfig(**{**sizes, **further_sizes, **experts})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "moe", seed=0, family=moe)


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    start_ray()
    yield
    ray.shutdown()


def form_of(path: Path) -> RoutedForm:
    return RoutedForm.from_shape(read_model_shape(path))


def expect_own_routing(path: Path, prompt: list[int], output: GenerationOutput) -> None:
    """The recorded experts are those of transformers in float32, of every token but the last."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.tensor([*prompt, *output.token_ids.tolist()])
    expected = own_routing(model, ids)[:-1].sort(dim=-1).values.numpy()
    assert output.routed is not None
    routed = np.sort(form_of(path).unpack(output.routed), axis=-1)
    assert routed.shape == (len(ids) - 1, 2, 2)
    np.testing.assert_array_equal(routed, expected)


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, PROPOSED], ids=["one rank", "tp2", "speculation"])
def test_recorded_experts_are_those_of_transformers(layout: dict[str, Any], model: Path) -> None:
    form = form_of(model)
    assert form == RoutedForm(layers=(0, 3), top_k=2, experts=8)
    settings = SamplingSettings(max_new_tokens=20)
    with engines(model, routed=form, max_length=MAX_LENGTH, **layout) as generation:
        prompts = [*PROMPTS, LONG, LONG, [*LONG, 3]]  # the last ones begin alike
        requests = [request(prompt, seed=number, max_new_tokens=20) for number, prompt in enumerate(prompts)]
        for _ in range(2):
            for prompt, output in zip(prompts, generate(generation, requests, settings), strict=True):
                expect_own_routing(model, prompt, output)
        stop = SamplingSettings(max_new_tokens=20, stop_strings=("a", "b", "c", "d"))
        outputs = generate(generation, requests, stop)
        assert any(output.stop_reason == "stop" for output in outputs)
        for prompt, output in zip(prompts, outputs, strict=True):
            expect_own_routing(model, prompt, output)


def logprobs_on_rank(
    _layout: Layout, path: Path, precision: str, prompts: list[list[int]], outputs: list[GenerationOutput], replay: bool
) -> NDArray[np.float32]:
    """Log-probabilities of all sampled tokens under the policy, one response after the other."""
    form = form_of(path)
    config = PolicyConfig(model=ModelConfig(path=str(path)), precision=precision, moe=MoeConfig(replay_routing=replay))
    rank = PolicyRank(RankSettings(config=config, shape=read_model_shape(path), folder=str(path), decay_steps=1))
    lengths = [len(prompt) + len(output.token_ids) for prompt, output in zip(prompts, outputs, strict=True)]
    ids = [np.concatenate([prompt, output.token_ids]) for prompt, output in zip(prompts, outputs, strict=True)]
    sampled = [np.arange(length) >= len(prompt) for prompt, length in zip(prompts, lengths, strict=True)]
    routed = form.concatenate([(n, output.routed) for n, output in zip(lengths, outputs, strict=True)])
    fields = TokenFields(
        token_ids=torch.from_numpy(np.concatenate(ids).astype(np.int32)),
        sampled=torch.from_numpy(np.concatenate(sampled)),
        routed_experts=torch.from_numpy(rank.routing.select_layers(routed)) if replay else None,
    )
    logprobs = rank.compute_logprobs(TokenBatch(lengths, fields), [list(range(len(lengths)))])
    return logprobs[fields.sampled].numpy()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_replay_brings_training_no_further_from_generation(precision: str, model: Path) -> None:
    """In float32 they agree anyway; in bfloat16 some routers decide otherwise, and replayed ones do not."""
    form = form_of(model)
    prompts = PROMPTS * 8
    requests = [request(prompt, seed=number, max_new_tokens=40) for number, prompt in enumerate(prompts)]
    with engines(model, routed=form, precision=precision) as generation:
        outputs = generate(generation, requests, SamplingSettings(max_new_tokens=40))
    sampled = np.concatenate([output.logprobs for output in outputs])
    plain, replayed = (
        np.abs(run_on_ranks(Layout(), logprobs_on_rank, model, precision, prompts, outputs, replay)[0] - sampled)
        for replay in (False, True)
    )
    print(
        f"{precision}: mean |difference| {plain.mean():.2e}, replayed {replayed.mean():.2e}; "
        f"largest {plain.max():.2e}, replayed {replayed.max():.2e}; {len(sampled)} tokens"
    )
    if precision == "float32":
        assert max(plain.max(), replayed.max()) < 1e-4
    else:
        assert replayed.mean() <= plain.mean()
