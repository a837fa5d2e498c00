"""Images in agents' calls: token ids of the model's processor, digests, and what is refused with status 400."""

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI
from PIL import Image
from transformers import AutoProcessor

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.trajectory import Span
from megatron_grpo.data.image_prompts import RunImages
from megatron_grpo.data.prompt_renderer import PromptFormat
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.image_store import decode_image, digest_image
from megatron_grpo.models.source import COUNTING_VOCABULARY, PREPARED_MODELS
from megatron_grpo.prepare.counting import make_processor
from megatron_grpo.rollouts.call_images import CallImages
from megatron_grpo.rollouts.conversation import CALL_BYTES, TOKEN_BYTES, Conversation
from tests.support.asked_endpoint import open_endpoint
from tests.support.image_models import draw_picture, save

VISION = parse_model_shape(PREPARED_MODELS["counting"]).vision
assert VISION is not None
FIRST, SECOND = draw_picture(2, 3), draw_picture(1, 4, seed=1)
EOS = COUNTING_VOCABULARY["<eos>"]


class CountingEngine:
    """Counts three, whatever it sees."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest, settings: SamplingSettings) -> GenerationOutput:
        self.requests.append(request)
        token_ids = np.array([COUNTING_VOCABULARY["3"], EOS], dtype=np.int32)
        logprobs = np.array([-0.5, -0.5], dtype=np.float32)
        return GenerationOutput(
            token_ids=token_ids, logprobs=logprobs, text="3", stop_reason="stop", spans=[Span(0, 2, 1)]
        )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_processor().save_pretrained(folder)
    return folder


@asynccontextmanager
async def open_rollout(
    model: Path, store: Path, *, takes_images: bool = True
) -> AsyncIterator[tuple[AsyncOpenAI, Conversation, CountingEngine]]:
    assert VISION is not None
    run = RunImages(store=store, model=model, vision=VISION, max_images=3, max_tokens=20)
    engine: Any = CountingEngine()
    async with open_endpoint(str(model)) as endpoint:
        renderer = endpoint.get_renderer("task", PromptFormat(takes_images=takes_images))
        images, settings = CallImages(run) if takes_images else None, SamplingSettings(max_new_tokens=8)
        conversation = Conversation(engine, settings, renderer, lambda turn: turn, 100, endpoint.texts, images)
        with endpoint.open_rollout(conversation) as access:
            yield AsyncOpenAI(base_url=access.base_url, api_key=access.token, max_retries=0), conversation, engine


def make_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def ask(*images: bytes, text: str = "how many") -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": make_url(image)}} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


async def chat(client: AsyncOpenAI, messages: list[Any]) -> list[Any]:
    """The conversation with the answer."""
    answer = await client.chat.completions.create(model="policy", messages=messages)
    return [*messages, answer.choices[0].message.model_dump(exclude_none=True)]


async def test_the_conversation_is_that_of_the_processor(model: Path, tmp_path: Path) -> None:
    """transformers' processor makes the same ids of the complete_messages conversation at once."""
    async with open_rollout(model, tmp_path) as (client, conversation, engine):
        messages = await chat(client, [ask(FIRST)])
        await chat(client, [*messages, ask(SECOND, FIRST, text="now")])
    slot = {"type": "image"}
    complete_messages = [
        {"role": "user", "content": [slot, {"type": "text", "text": "how many"}]},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": [slot, slot, {"type": "text", "text": "now"}]},
    ]
    processor = AutoProcessor.from_pretrained(model)
    text = processor.apply_chat_template(complete_messages, add_generation_prompt=True)
    expected = processor(text=[text], images=[decode_image(image) for image in (FIRST, SECOND, FIRST)])
    first, second = engine.requests
    assert second.prompt_ids.tolist() == expected["input_ids"][0]
    assert second.prompt_ids[: len(first.prompt_ids)].tolist() == first.prompt_ids.tolist()
    assert [[1, image.rows, image.columns] for image in second.images] == expected["image_grid_thw"].tolist()
    assert [image.digest for image in second.images] == [*map(digest_image, (FIRST, SECOND, FIRST))]
    assert {file.name for file in tmp_path.iterdir()} == {*map(digest_image, (FIRST, SECOND))}
    (segment,) = conversation.list_segments()
    assert segment.images == second.images


async def test_each_segment_has_the_images_of_its_context(model: Path, tmp_path: Path) -> None:
    async with open_rollout(model, tmp_path) as (client, conversation, engine):
        messages = await chat(client, [ask(FIRST)])
        for image in (SECOND, FIRST):
            await chat(client, [*messages, ask(image, text="now")])
        await chat(client, [ask(SECOND)])
        await chat(client, [ask(FIRST, text="how many"), messages[1], {"role": "user", "content": "no"}])
    segments = conversation.list_segments()
    digests = [[image.digest for image in segment.images] for segment in segments]
    first, second = map(digest_image, (FIRST, SECOND))
    assert digests == [[first, second], [first, first], [second], [first]]
    assert VISION is not None
    for segment in segments:
        count = int(np.isin(np.concatenate(segment.pieces), VISION.placeholders).sum())
        assert count == sum(image.count_tokens(VISION) for image in segment.images)
    assert [len(request.images) for request in engine.requests] == [1, 2, 2, 1, 1]


async def test_another_image_in_an_earlier_turn_begins_another_conversation(model: Path, tmp_path: Path) -> None:
    async with open_rollout(model, tmp_path) as (client, conversation, _):
        messages = await chat(client, [ask(FIRST)])
        await chat(client, [ask(draw_picture(2, 3, seed=5)), *messages[1:], {"role": "user", "content": "now"}])
    assert len(conversation.list_segments()) == 2


async def test_responses_take_images(model: Path, tmp_path: Path) -> None:
    async with open_rollout(model, tmp_path) as (client, _, engine):
        part: Any = {"type": "input_image", "image_url": make_url(FIRST), "detail": "auto"}
        content: Any = [part, {"type": "input_text", "text": "how many"}]
        first = await client.responses.create(model="policy", input=[{"role": "user", "content": content}])
        second = {**part, "image_url": make_url(SECOND)}
        await client.responses.create(
            model="policy",
            input=[{"role": "user", "content": [second, {"type": "input_text", "text": "now"}]}],
            previous_response_id=first.id,
        )
        again: Any = [{"role": "user", "content": [second, second]}]
        with pytest.raises(
            openai.BadRequestError, match=r"the conversation has 4 images, more than data\.max_images=3"
        ):
            await client.responses.create(model="policy", input=[*again, *again], previous_response_id=first.id)
    async with open_rollout(model, tmp_path) as (client, _, second_engine):
        await chat(client, [*await chat(client, [ask(FIRST)]), ask(SECOND, text="now")])
    assert [request.prompt_ids.tolist() for request in engine.requests] == [
        request.prompt_ids.tolist() for request in second_engine.requests
    ]
    assert engine.requests[1].images == second_engine.requests[1].images


def image_part(url: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


STORED = {"type": "image", "digest": digest_image(FIRST), "rows": 4, "columns": 6}
REFUSED: list[tuple[list[Any], str]] = [
    ([image_part("https://host/a.png")], "image 1 is a link (https://host/a.png), and nothing is fetched; give a data"),
    ([image_part("file:///etc/passwd")], "image 1 is no data URL; write data:image/png;base64,..."),
    ([image_part("/etc/passwd")], "image 1 is no data URL"),
    ([image_part(make_url(FIRST[:60]))], "image 1 cannot be decoded"),
    ([ask(FIRST), image_part(make_url(b"text"))], "image 2 is no image that can be read; give PNG, JPEG, WEBP"),
    ([image_part("data:image/png;base64,@@")], "image 1 is a data URL whose base64 is damaged"),
    ([image_part(make_url(save(Image.new("1", (9000, 9000)))))], "image 1 has 9000 x 9000 pixels, more than"),
    ([image_part(7)], "image 1 is int; give"),
    (
        [{"role": "user", "content": [{"type": "image", "digest": digest_image(FIRST), "rows": 4, "columns": 6}]}],
        "with",
    ),
    ([ask(*[b"text"] * 4)], "the conversation has 4 images, more than data.max_images=3"),
    ([ask(draw_picture(4, 6))], "the conversation has images of 24 tokens, more than data.max_image_tokens=20"),
    ([{"role": "user", "content": "<|image_pad|>"}], "its text has the placeholder of an image, and there is no image"),
    ([ask(FIRST, text="<|image_pad|>")], "its text has the placeholder of an image"),
    (
        [{"role": "user", "content": [*ask(FIRST)["content"], {"type": "audio"}]}],
        "message 1 has parts that are neither",
    ),
]


@pytest.mark.parametrize(("messages", "reason"), REFUSED)
async def test_what_cannot_be_used_is_refused(messages: list[Any], reason: str, model: Path, tmp_path: Path) -> None:
    async with open_rollout(model, tmp_path) as (client, _, engine):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="policy", messages=messages)
        assert reason in refused.value.body["message"]
        assert engine.requests == []
        await chat(client, [ask(FIRST)])  # the rollout goes on


async def test_a_text_part_does_not_stand_for_a_stored_image(model: Path, tmp_path: Path) -> None:
    async with open_rollout(model, tmp_path) as (client, _, engine):
        part = {**STORED, "type": "text", "text": "no"}
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": [part]}])
    assert engine.requests[0].images == []


async def test_token_ids_and_texts_have_no_images(model: Path, tmp_path: Path) -> None:
    async with open_rollout(model, tmp_path) as (client, _, engine):
        prompts: list[Any] = [[1, COUNTING_VOCABULARY["<|image_pad|>"]], "how<|image_pad|>"]
        for prompt in prompts:
            with pytest.raises(openai.BadRequestError, match="its text has the placeholder of an image"):
                await client.completions.create(model="policy", prompt=prompt)
        await client.completions.create(model="policy", prompt="how")
    assert len(engine.requests) == 1


async def test_a_run_without_images_refuses_them(model: Path, tmp_path: Path) -> None:
    async with open_rollout(model, tmp_path, takes_images=False) as (client, _, engine):
        with pytest.raises(openai.BadRequestError, match="only text parts can be read"):
            await client.chat.completions.create(model="policy", messages=[ask(FIRST)])
    assert engine.requests == []


async def test_a_call_may_be_larger_by_its_images(model: Path, tmp_path: Path) -> None:
    large = save(Image.fromarray(np.random.default_rng(0).integers(0, 256, (400, 400, 3), dtype=np.uint8)))
    assert len(make_url(large)) > CALL_BYTES + 100 * TOKEN_BYTES
    async with open_rollout(model, tmp_path) as (client, conversation, _):
        with pytest.raises(openai.BadRequestError, match="images of"):  # it is read
            await client.chat.completions.create(model="policy", messages=[ask(large)])
        junk = "a" * (conversation.most_bytes + 1)
        with pytest.raises(openai.BadRequestError, match=r"with this context window and data\.max_images"):
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": junk}])
