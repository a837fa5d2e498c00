"""Images that turns show: token ids of the model's processor, digests in the store, and limits over all turns."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoProcessor

from megatron_grpo.batch.images import StoredImage
from megatron_grpo.data.image_prompts import ImagePromptProcessor, ImageSource, RunImages
from megatron_grpo.data.processors import TaskDataSpec
from megatron_grpo.data.prompt_renderer import PromptFormat
from megatron_grpo.data.scores import EncodedTurn, ResponseFault, Turn
from megatron_grpo.environments import environment_worker as worker_module
from megatron_grpo.environments.environment_worker import EnvironmentWorker
from megatron_grpo.environments.interface import EnvironmentSettings
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.image_store import decode_image, digest_image
from megatron_grpo.models.source import COUNTING_VOCABULARY, PREPARED_MODELS
from megatron_grpo.prepare.counting import make_processor
from tests.support.image_models import draw_picture
from tests.support.showing_environment import ShowingEnvironment

VISION = parse_model_shape(PREPARED_MODELS["counting"]).vision
assert VISION is not None
EOS = COUNTING_VOCABULARY["<eos>"]
FIRST, SECOND = draw_picture(2, 3), draw_picture(1, 4, seed=1)
Shows = Callable[[Any], EncodedTurn | ResponseFault | str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_processor().save_pretrained(folder)
    return folder


def make_run(model: Path, store: Path) -> RunImages:
    assert VISION is not None
    return RunImages(store=store, model=model, vision=VISION, max_images=3, max_tokens=20)


@pytest.fixture
def show(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shows:
    """The turn of an environment whose message has this content, behind a prompt with the first picture."""
    monkeypatch.setattr(worker_module, "begin_process_log", lambda _: None)
    run = make_run(model, tmp_path / "images")
    settings = EnvironmentSettings(tokenizer=str(model), prompts=PromptFormat(takes_images=True), images=run)
    worker = EnvironmentWorker("plots", worker_module.EnvironmentConfig(), settings)
    worker._environment = environment = ShowingEnvironment()

    def step(content: Any) -> EncodedTurn | ResponseFault | str:
        turn = Turn(done=False, messages=[{"role": "user", "content": content}])
        monkeypatch.setattr(environment, "step", lambda state, response: turn)
        state = worker.reset("", {"answer": "3"})
        assert isinstance(state, bytes)
        return worker.step(state, "3", EOS, [StoredImage(digest_image(FIRST), 4, 6)])

    return step


def show_part(content: bytes) -> dict[str, Any]:
    return {"type": "image", "image": content}


FORMS: list[Any] = [
    show_part(SECOND),
    {"type": "image", "image": {"bytes": SECOND, "path": None}},
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(SECOND).decode()}"}},
    {"type": "input_image", "image_url": f"data:image/png;base64,{base64.b64encode(SECOND).decode()}"},
    {"type": "image", "image": decode_image(SECOND)},
]


@pytest.mark.parametrize("part", FORMS)
def test_the_conversation_is_that_of_the_processor(part: Any, show: Shows, model: Path, tmp_path: Path) -> None:
    """transformers' processor makes the same ids of the whole conversation at once."""
    turn = show([{"type": "text", "text": "no"}, part, {"type": "text", "text": "how many"}])
    assert isinstance(turn, EncodedTurn)
    run = make_run(model, tmp_path / "images")
    source = ImageSource(**vars(run), column="image", folder=tmp_path)
    processor = AutoProcessor.from_pretrained(model)
    row = {"prompt": "how many", "answer": 3, "image": FIRST}
    datum = ImagePromptProcessor(source)(row, TaskDataSpec(task_name=""), processor.tokenizer, 99, 0)
    slot = {"type": "image"}
    conversation = [
        {"role": "user", "content": [slot, {"type": "text", "text": "how many"}]},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": [{"type": "text", "text": "no"}, slot, {"type": "text", "text": "how many"}]},
    ]
    text = processor.apply_chat_template(conversation, add_generation_prompt=True)
    expected = processor(text=[text], images=[decode_image(FIRST), decode_image(SECOND)])
    sampled = [COUNTING_VOCABULARY["3"], EOS]
    assert [*datum["message_log"][0]["token_ids"], *sampled, *turn.observation] == expected["input_ids"][0]
    grids = [[1, image.rows, image.columns] for image in [*datum["images"], *turn.images]]
    assert grids == expected["image_grid_thw"].tolist() == [[1, 4, 6], [1, 2, 8]]
    stored = decode_image((run.store / turn.images[0].digest).read_bytes())
    assert np.array_equal(np.asarray(stored), np.asarray(decode_image(SECOND)))


def test_a_path_is_read_and_several_images_keep_their_order(show: Shows, tmp_path: Path) -> None:
    (tmp_path / "plot.png").write_bytes(SECOND)
    turn = show([{"type": "image", "path": str(tmp_path / "plot.png")}, show_part(FIRST)])
    assert isinstance(turn, EncodedTurn)
    assert [image.digest for image in turn.images] == [digest_image(SECOND), digest_image(FIRST)]
    assert VISION is not None
    assert list(turn.observation).count(VISION.image_token) == 4 + 6


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([show_part(SECOND[:60])], "its turn image 1 cannot be decoded"),
        ([show_part(b"text")], "its turn image 1 is no image that can be read; give PNG, JPEG, WEBP"),
        ([{"type": "image", "image": "http://host/a.png"}], "image 1 is a link (http://host/a.png), and nothing is"),
        ([{"type": "image", "path": "/none.png"}], "its turn image 1 is not there: /none.png"),
        ([{"type": "image"}], "its turn image 1 is a part without an image"),
        ([show_part(FIRST), {"type": "audio"}], "its turn message 1 has parts that are neither text nor image"),
        ([{"type": "text", "text": "<|image_pad|>"}], "its text has the placeholder of an image, and there is no"),
        ([show_part(FIRST), {"type": "text", "text": "<|video_pad|>"}], "its text has the placeholder of an image"),
    ],
)
def test_what_cannot_be_shown_is_one_message(content: Any, reason: str, show: Shows, tmp_path: Path) -> None:
    answer = show(content)
    assert isinstance(answer, ResponseFault)
    assert answer.reason.startswith("environment plots: ")
    assert reason in answer.reason


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        ([FIRST, SECOND, FIRST], "has 4 images, more than data.max_images=3"),
        ([b"text"] * 3, "has 4 images, more than data.max_images=3"),  # and none is decoded
        ([draw_picture(3, 5)], "has images of 21 tokens, more than data.max_image_tokens=20"),
    ],
)
def test_limits_hold_over_all_turns(images: list[bytes], reason: str, show: Shows, tmp_path: Path) -> None:
    turn = show([*map(show_part, images)])
    assert isinstance(turn, EncodedTurn)
    assert turn.ending.startswith(f"with the next turn of environment plots the conversation {reason}")
    assert (list(turn.images), len(turn.observation)) == ([], 0)
    assert not (tmp_path / "images").exists(), "what is not used is not stored"


def test_a_text_with_the_mark_of_rows_is_a_text(show: Shows) -> None:
    """A page that a tool shows may have such a tag."""
    turn = show("<image>")
    assert isinstance(turn, EncodedTurn)
    assert turn.images == []


def test_a_run_without_images_says_how_it_gets_them(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "begin_process_log", lambda _: None)
    settings = EnvironmentSettings(tokenizer=str(model), prompts=PromptFormat())
    worker = EnvironmentWorker("plots", worker_module.EnvironmentConfig(), settings)
    worker._environment = ShowingEnvironment()
    state = worker.reset("", {"answer": "3"})
    assert isinstance(state, bytes)
    answer = worker.step(state, "3", EOS)
    assert isinstance(answer, ResponseFault)
    assert answer.reason == (
        "environment plots: its turn shows an image, and data.image_key says that there are none; set it"
    )
