"""Sampling from prompts with images with vLLM, against transformers."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from torch import Tensor

from megatron_grpo.batch.generation_requests import GenerationRequest, SamplingSettings
from megatron_grpo.batch.images import StoredImage
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.generation.vllm_images import EngineImages
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.image_store import store_image
from megatron_grpo.models.source import PREPARED_MODELS
from megatron_grpo.verification.random_pictures import load_whole_model, make_model_inputs
from tests.integration.vllm_helpers import engines, generate, start_ray
from tests.support.image_models import draw_picture, make_image_model

pytest.importorskip("torchvision")  # vLLM's module of these models imports it
VISION = parse_model_shape(PREPARED_MODELS["counting"]).vision
assert VISION is not None
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose likeliest token is often the placeholder."""
    folder = tmp_path_factory.mktemp("models") / "base"
    assert VISION is not None
    model = make_image_model(folder)
    with torch.no_grad():
        model.model.language_model.embed_tokens.weight[list(VISION.placeholders)] *= 4.0  # of the head, too
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def generation(folder: Path, store: Path) -> Iterator[VllmGeneration]:
    assert VISION is not None
    start_ray()
    with engines(folder, images=EngineImages(str(store), VISION, 3)) as started:
        yield started
    ray.shutdown()


def add_image(store: Path, rows: int, columns: int, seed: int) -> StoredImage:
    return StoredImage(store_image(store, draw_picture(rows, columns, seed)), 2 * rows, 2 * columns)


def make_prompt(*parts: StoredImage | int) -> tuple[list[int], list[StoredImage]]:
    """Token ids of images and texts, and the images."""
    assert VISION is not None
    ids: list[int] = []
    for part in parts:
        is_image = isinstance(part, StoredImage)
        ids += [VISION.image_token] * part.count_tokens(VISION) if is_image else [46, part, 47, 11]
    return ids, [part for part in parts if isinstance(part, StoredImage)]


@torch.no_grad()
def compute_logprobs(
    model: Any, folder: Path, store: Path, prompt: tuple[list[int], Sequence[StoredImage]], response: Sequence[int]
) -> Tensor:
    """Log-probabilities of a response's tokens over all tokens but the placeholders."""
    assert VISION is not None
    ids = torch.tensor([*prompt[0], *response])
    logits = model(**make_model_inputs(ids, prompt[1], VISION, folder, store), use_cache=False).logits[0]
    logits = logits[len(prompt[0]) - 1 : -1] / TEMPERATURE
    logits[:, list(VISION.placeholders)] = -torch.inf
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def test_responses_have_the_probabilities_of_transformers_and_no_placeholder(
    folder: Path, store: Path, generation: VllmGeneration
) -> None:
    assert VISION is not None
    first, second = add_image(store, 2, 3, 0), add_image(store, 3, 1, 1)
    prompts = [make_prompt(1, first, 2), make_prompt(first, 3, second), make_prompt(4)]
    requests = [
        GenerationRequest(prompt_ids=np.array(ids, dtype=np.int32), seed=seed, max_new_tokens=8, images=images)
        for ids, images in prompts
        for seed in range(3)
    ]
    settings = SamplingSettings(max_new_tokens=8, temperature=TEMPERATURE)
    outputs = generate(generation, requests, settings)
    model = load_whole_model(folder, torch.float32)
    for number, output in enumerate(outputs):
        assert not set(output.token_ids.tolist()) & set(VISION.placeholders)
        expected = compute_logprobs(model, folder, store, prompts[number // 3], output.token_ids.tolist())
        torch.testing.assert_close(torch.from_numpy(output.logprobs), expected, atol=2e-5, rtol=0)
    again = generate(generation, requests, settings)
    assert [output.token_ids.tolist() for output in again] == [output.token_ids.tolist() for output in outputs]


def test_another_image_under_the_same_tokens_is_seen(folder: Path, store: Path, generation: VllmGeneration) -> None:
    """Caches of prefixes and of features tell images of one size apart."""
    model, settings = (
        load_whole_model(folder, torch.float32),
        SamplingSettings(max_new_tokens=4, temperature=TEMPERATURE),
    )
    for seed in (5, 6):
        prompt = make_prompt(1, add_image(store, 2, 2, seed), 2)
        (output,) = generate(
            generation,
            [GenerationRequest(prompt_ids=np.array(prompt[0], np.int32), seed=0, max_new_tokens=4, images=prompt[1])],
            settings,
        )
        expected = compute_logprobs(model, folder, store, prompt, output.token_ids.tolist())
        torch.testing.assert_close(torch.from_numpy(output.logprobs), expected, atol=2e-5, rtol=0)
