"""Rows with images to learn from: tokens of the model's processor, of which the responses are learnt."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoProcessor

from megatron_grpo.algorithms.supervised import make_trajectories
from megatron_grpo.config.data_schema import PREFERENCE, SUPERVISED, DataConfig, DatasetConfig
from megatron_grpo.data.chat_messages import ASSISTANT
from megatron_grpo.data.image_conversations import ImageConversationProcessor
from megatron_grpo.data.image_prompts import ImageSource
from megatron_grpo.data.image_rows import MARK
from megatron_grpo.data.processors import DatumSpec, Message, TaskDataSpec
from megatron_grpo.data.rows import SetReport, examine_set
from megatron_grpo.data.specs import ROW_PROCESSORS
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.image_store import decode_image
from megatron_grpo.models.source import PREPARED_MODELS
from megatron_grpo.prepare.counting import make_processor
from tests.support.image_models import draw_picture

VISION = parse_model_shape(PREPARED_MODELS["counting"]).vision
assert VISION is not None
PICTURES = [draw_picture(2, 3), draw_picture(1, 4, seed=1)]
PLACE = {"type": "image"}
SPEC = TaskDataSpec(task_name="counting", response_key="answer")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_processor().save_pretrained(folder)
    return folder


def make(
    model: Path, row: dict[str, Any], kind: str = SUPERVISED, spec: TaskDataSpec = SPEC, longest: int = 99
) -> DatumSpec:
    assert VISION is not None
    source = ImageSource(
        column="image", folder=model, store=model / "images", model=model, vision=VISION, max_images=8, max_tokens=20
    )
    process = ImageConversationProcessor(source, ROW_PROCESSORS[kind])
    return process(row, spec, AutoProcessor.from_pretrained(model).tokenizer, longest, 7)


def encode(model: Path, messages: list[dict[str, Any]], images: list[bytes]) -> list[int]:
    """The processor's tokens of a whole conversation."""
    processor = AutoProcessor.from_pretrained(model)
    text = processor.apply_chat_template(messages)
    inputs = processor(text=[text], images=[decode_image(image) for image in images])
    token_ids: list[int] = inputs["input_ids"][0]
    return token_ids


def join(messages: list[Message]) -> list[int]:
    return [token for message in messages for token in message["token_ids"]]


def say(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_tokens_of_a_row_are_the_processors_and_its_response_is_learnt(model: Path) -> None:
    datum = make(model, {"prompt": f"{MARK} or {MARK}", "answer": "3", "image": PICTURES, "level": 2})
    question = [PLACE, {"type": "text", "text": " or "}, PLACE]
    assert join(datum["message_log"]) == encode(model, [say("user", question), say(ASSISTANT, "3")], PICTURES)
    learnt = [message["token_ids"] for message in datum["message_log"] if message["role"] == ASSISTANT]
    tokenizer = AutoProcessor.from_pretrained(model).tokenizer
    assert [tokenizer.decode(ids) for ids in learnt] == ["3<eos>"]
    (trajectory,) = make_trajectories(datum, 0)
    assert [(image.rows, image.columns) for image in trajectory.images] == [(4, 6), (2, 8)]
    assert trajectory.tokens == datum["length"]
    assert datum["prompt"] == [say("user", f"{MARK} or {MARK}")]
    assert datum["extra_env_info"] == {"level": 2}


def test_images_may_stand_in_every_turn_that_is_not_learnt(model: Path) -> None:
    messages = [say("user", [PLACE]), say(ASSISTANT, "1"), say("user", [PLACE]), say(ASSISTANT, "2")]
    datum = make(model, {"prompt": messages, "image": PICTURES}, spec=replace(SPEC, response_key=None))
    assert join(datum["message_log"]) == encode(model, messages, PICTURES)
    roles = [message["role"] for message in datum["message_log"]]
    assert roles == ["user", ASSISTANT, "user", ASSISTANT]


@pytest.mark.parametrize("has_prompt", [True, False])
def test_both_responses_of_a_pair_have_the_images(has_prompt: bool, model: Path) -> None:
    question = say("user", [PLACE, {"type": "text", "text": "how many"}])
    row: dict[str, Any] = {"prompt": "how many", "chosen": "3", "rejected": "4", "image": PICTURES[0]}
    if not has_prompt:
        pair = {"chosen": [question, say(ASSISTANT, "3")], "rejected": [question, say(ASSISTANT, "4")]}
        row = {"image": PICTURES[0], **pair}
    datum = make(model, row, PREFERENCE)
    for messages, answer in ((datum["message_log"], "3"), (datum["rejected"], "4")):
        assert join(messages) == encode(model, [question, say(ASSISTANT, answer)], PICTURES[:1])
    images = [trajectory.images for trajectory in make_trajectories(datum, 0)]
    assert images == [datum["images"]] * 2
    assert len(datum["images"]) == 1


def test_a_row_without_an_image_is_a_conversation_of_text(model: Path) -> None:
    datum = make(model, {"prompt": "how many", "answer": "3", "image": None})
    assert datum["images"] == []
    assert datum["length"] == len("how many=3") + 1


def test_a_long_conversation_is_left_out_whole(model: Path) -> None:
    row = {"prompt": "how many", "answer": "3", "image": PICTURES[0]}
    needed = make(model, row)["length"]
    assert make(model, row, longest=needed)["loss_multiplier"] == 1.0
    datum = make(model, row, longest=needed - 1)
    assert (datum["loss_multiplier"], datum["length"]) == (0.0, needed)
    with pytest.raises(ValueError, match=f"row 7: the conversation has {needed} tokens, more than"):
        make(model, row, spec=replace(SPEC, long_prompts="error"), longest=needed - 1)


@pytest.mark.parametrize(
    ("row", "kind", "reason"),
    [
        (
            {"prompt": "how", "answer": "3 <|image_pad|>", "image": None},
            SUPERVISED,
            "a turn that is learnt has an image",
        ),
        ({"prompt": "how <|image_pad|>", "answer": "3", "image": None}, SUPERVISED, "has 0 images, and the rendered"),
        ({"prompt": "how <|video_pad|>", "answer": "3", "image": None}, SUPERVISED, "has 1 placeholder tokens"),
        (
            {"prompt": "how", "answer": "3", "image": [draw_picture(4, 6)]},
            SUPERVISED,
            "more than data.max_image_tokens",
        ),
        ({"prompt": "how", "answer": "3", "image": [PICTURES[0][:60]]}, SUPERVISED, "image 1 cannot be decoded"),
        ({"prompt": f"{MARK}{MARK}", "answer": "3", "image": PICTURES[0]}, SUPERVISED, "1 images in its column, and 2"),
    ],
)
def test_what_cannot_be_learnt_is_refused(row: dict[str, Any], kind: str, reason: str, model: Path) -> None:
    with pytest.raises(ValueError, match=f"row 7: .*{reason}"):
        make(model, row, kind)


def test_a_pair_shows_the_same_images(model: Path, tmp_path: Path) -> None:
    for number, picture in enumerate(PICTURES):
        (tmp_path / str(number)).write_bytes(picture)
    pair = [[say("user", [{**PLACE, "image": str(tmp_path / name)}]), say(ASSISTANT, name)] for name in "01"]
    with pytest.raises(ValueError, match="row 7: columns 'chosen' and 'rejected' show different images"):
        make(model, {"chosen": pair[0], "rejected": pair[1]}, PREFERENCE)


def test_a_prompt_file_is_put_around_the_question(model: Path) -> None:
    datum = make(model, {"prompt": "how", "answer": "3", "image": PICTURES[0]}, spec=replace(SPEC, prompt="{} many"))
    question = [PLACE, {"type": "text", "text": "how many"}]
    assert join(datum["message_log"]) == encode(model, [say("user", question), say(ASSISTANT, "3")], PICTURES[:1])


def examine(folder: Path, rows: list[dict[str, Any]], kind: str) -> SetReport:
    file = folder / f"{kind}{len(list(folder.iterdir()))}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(train_path=str(file), image_key="image", response_key="answer")
    return examine_set(DatasetConfig(path=str(file)), data, {"math": kind})


def test_rows_to_learn_from_are_checked_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PICTURES[0])
    part = say("user", [{**PLACE, "image": "a.png"}])
    rows = [
        {"prompt": "how many", "answer": "3", "image": "a.png"},
        {"prompt": [part], "answer": "3"},
        {"prompt": "how many", "answer": "3", "image": "b.png"},
        {"prompt": 3, "answer": "3", "image": "a.png"},
    ]
    report = examine(tmp_path, rows, SUPERVISED)
    assert list(report.usable) == [0, 1]
    assert "image 1 is not there" in report.problems[0].text
    assert "is neither a text nor a list" in report.problems[1].text
    pairs = [
        {"prompt": "how many", "chosen": "3", "rejected": "4", "image": "a.png"},
        {"chosen": [part, say(ASSISTANT, "3")], "rejected": [part, say(ASSISTANT, "4")]},
        {"chosen": [say("user", [PLACE]), say(ASSISTANT, "3")], "rejected": [part, say(ASSISTANT, "4")]},
    ]
    report = examine(tmp_path, pairs, PREFERENCE)
    assert list(report.usable) == [0, 1]
    assert "has 0 images in its column, and 1 places" in report.problems[0].text
