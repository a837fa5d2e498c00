"""Sampling options in vLLM on a CPU, against transformers' distributions changed by hand."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
import torch
from torch import Tensor

from megatron_grpo.batch.generation_requests import GenerationOutput, SamplingSettings
from megatron_grpo.config.generation_schema import StructuredConfig
from megatron_grpo.generation.engine_interface import Engine
from megatron_grpo.generation.vllm_generation import VllmGeneration
from tests.integration.test_generation import model, oracle
from tests.integration.vllm_helpers import EOS, LETTERS, Oracle, engines, generate, request, start_ray

__all__ = ["model", "oracle"]  # fixtures of tests here
pytestmark = pytest.mark.slow  # tests/unit/preflight/test_engines.py reads the options with every `make test`

PROMPT = [2, 5, 9, 4]
TOKENS = 10
SAMPLES = 12
TOGETHER = 8

Change = Callable[[Tensor, list[int]], Tensor]
"""(logits [vocabulary], response so far) -> logits [vocabulary] that the next token is drawn from."""


@pytest.fixture(scope="module")
def generation(model: Path) -> Iterator[VllmGeneration]:
    """Of which 8 responses are decoded together, with an argument that is passed on."""
    start_ray()
    config = {"attention_config": {"flash_attn_version": 2}, "block_size": 32}
    with engines(model, pipeline=2, generation_batch_size=TOGETHER, engine_args=config) as started:
        yield started
    ray.shutdown()


def repetition(logits: Tensor, response: list[int]) -> Tensor:
    sampled = torch.tensor(sorted({*PROMPT, *response}))
    changed = logits.clone()
    for token in sampled.tolist():
        changed[token] = logits[token] / 1.7 if logits[token] > 0 else logits[token] * 1.7
    return changed


def presence(logits: Tensor, response: list[int]) -> Tensor:
    changed = logits.clone()
    for token in set(response):
        changed[token] -= 1.5
    return changed


def frequency(logits: Tensor, response: list[int]) -> Tensor:
    changed = logits.clone()
    for token, count in Counter(response).items():
        changed[token] -= 0.6 * count
    return changed


def min_p(logits: Tensor, _: list[int]) -> Tensor:
    probabilities = logits.softmax(dim=0)
    return logits.masked_fill(probabilities < 0.3 * probabilities.max(), -torch.inf)


def bad_words(logits: Tensor, response: list[int]) -> Tensor:
    """Neither "c", nor "b" after "a"."""
    changed = logits.clone()
    changed[2 + LETTERS.index("c")] = -torch.inf
    if response and response[-1] == 2 + LETTERS.index("a"):
        changed[2 + LETTERS.index("b")] = -torch.inf
    return changed


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        (SamplingSettings(max_new_tokens=TOKENS, repetition_penalty=1.7), repetition),
        (SamplingSettings(max_new_tokens=TOKENS, presence_penalty=1.5), presence),
        (SamplingSettings(max_new_tokens=TOKENS, frequency_penalty=0.6), frequency),
        (SamplingSettings(max_new_tokens=TOKENS, bad_words=("c", "ab")), bad_words),
        (SamplingSettings(max_new_tokens=TOKENS, min_p=0.3), min_p),
    ],
    ids=["repetition", "presence", "frequency", "bad words", "min_p"],
)
def test_log_probabilities_are_of_what_is_drawn_from(
    generation: VllmGeneration, oracle: Oracle, settings: SamplingSettings, change: Change
) -> None:
    for output in responses(generation, settings):
        ids = output.token_ids.tolist()
        logits = oracle.distributions(PROMPT, ids)
        expected = [
            change(row, ids[:position]).log_softmax(dim=0)[ids[position]] for position, row in enumerate(logits)
        ]
        assert output.logprobs == pytest.approx([float(value) for value in expected], abs=1e-4)
        assert min(output.logprobs) > -100, "nothing was drawn that the filter leaves out"


@pytest.mark.parametrize(
    ("structure", "fits"),
    [
        (StructuredConfig(regex="[a-f]{3}[0-9]{2}"), lambda text: re.fullmatch("[a-f]{3}[0-9]{2}", text) is not None),
        (StructuredConfig(choice=["abc", "x9"]), lambda text: text in ("abc", "x9")),
        (StructuredConfig(json_schema='{"enum": [7, 42]}'), lambda text: text in ("7", "42")),
    ],
    ids=["regex", "choice", "schema"],
)
def test_responses_have_the_form(
    generation: VllmGeneration, oracle: Oracle, structure: StructuredConfig, fits: Callable[[str], bool]
) -> None:
    outputs = responses(generation, SamplingSettings(max_new_tokens=TOKENS, structured=structure))
    assert all(fits(output.text) and output.stop_reason == "stop" for output in outputs)
    for output in outputs:
        ids = output.token_ids.tolist()
        logits = oracle.distributions(PROMPT, ids)
        texts = ["".join(LETTERS[identifier - 2] for identifier in ids[:position]) for position in range(len(ids))]
        for row, position, text in zip(logits, range(len(ids)), texts, strict=True):
            allowed = [token for token in range(len(row)) if _may_follow(structure, text, token)]
            logprob = row[allowed].log_softmax(dim=0)[allowed.index(ids[position])]
            assert output.logprobs[position] == pytest.approx(float(logprob), abs=1e-4)


def _may_follow(structure: StructuredConfig, text: str, token: int) -> bool:
    """By hand, what may come after a text: the letters of the forms above, and their end."""
    letter = LETTERS[token - 2] if token > EOS else ""
    if structure.regex is None:
        texts = structure.choice or ("7", "42")
        if token == EOS:
            return text in texts
        return bool(letter) and any(choice.startswith(text + letter) for choice in texts)
    if len(text) == 5:
        return token == EOS
    return bool(letter) and letter in ("abcdef" if len(text) < 3 else "0123456789")


def responses(generation: VllmGeneration, settings: SamplingSettings) -> list[GenerationOutput]:
    requests = [request(PROMPT, seed=seed, max_new_tokens=TOKENS) for seed in range(SAMPLES)]
    return generate(generation, requests, settings)


def test_equal_seeds_give_equal_responses(generation: VllmGeneration) -> None:
    settings = SamplingSettings(max_new_tokens=TOKENS, repetition_penalty=1.2, temperature=0.8)
    first, second = (responses(generation, settings) for _ in range(2))
    assert [output.token_ids.tolist() for output in first] == [output.token_ids.tolist() for output in second]
    assert [output.logprobs.tolist() for output in first] == [output.logprobs.tolist() for output in second]


def test_a_form_that_cannot_be_is_one_clear_error(generation: VllmGeneration) -> None:
    """And the engine goes on."""
    wrong = StructuredConfig(json_schema=json.dumps({"type": "nonsense"}))
    with pytest.raises(RuntimeError, match="generation engine 0"):
        responses(generation, SamplingSettings(max_new_tokens=4, structured=wrong))
    assert len(responses(generation, SamplingSettings(max_new_tokens=4))) == SAMPLES


def test_engines_count_what_they_do(generation: VllmGeneration) -> None:
    ray.get(generation.submit(Engine.take_counts))
    outputs = responses(generation, SamplingSettings(max_new_tokens=TOKENS))
    (counts,) = ray.get(generation.submit(Engine.take_counts))
    assert (counts.running, counts.waiting) == (TOGETHER, SAMPLES - TOGETHER)
    assert counts.tokens == sum(len(output.token_ids) for output in outputs)
    assert counts.prefix_tokens == SAMPLES * len(PROMPT)
    assert 0 < counts.kv_cache_usage < 1
    assert counts.busy_s > 0
    (counts,) = ray.get(generation.submit(Engine.take_counts))
    assert (counts.tokens, counts.busy_s) == (0, 0.0)
