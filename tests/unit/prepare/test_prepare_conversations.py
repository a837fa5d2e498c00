"""Lessons of the conversations are what the real environments make of them, and known before they are made."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from megatron_grpo.data.prompt_renderer import PromptFormat, PromptRenderer
from megatron_grpo.data.scores import EnvironmentRequest
from megatron_grpo.data.tokenizer import load_tokenizer
from megatron_grpo.environments.interface import Environment, EnvironmentSettings
from megatron_grpo.environments.registry import create_environment
from megatron_grpo.models.source import CONVERSATION_VOCABULARY, EOS, PAD
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.prepare.lessons import RECIPES, TRAIN_FILE, VAL_FILE, Lesson, split_lessons
from megatron_grpo.prepare.models import encode_lessons, prepare

NAMES = ["calculator", "two_tasks"]


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is made under the folder's name, by a warm-up of one step."""
    path = tmp_path_factory.mktemp("prepare") / request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECIPES[path.name], "warmup_steps_max", 1)
        prepare(path.name, path)
    return path


def test_held_out_problems_are_nowhere_else(folder: Path) -> None:
    files = [(folder / name).read_text().splitlines() for name in (TRAIN_FILE, VAL_FILE)]
    rows = [json.loads(line) for lines in files for line in lines]
    prompts = [row["prompt"] for row in (*(lesson.row for lesson in split_lessons(folder.name)[0]), *rows)]
    assert len(set(prompts)) == len(prompts)


def test_the_tokenizer_makes_of_a_conversation_what_the_model_was_taught(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    lessons = split_lessons(folder.name)[2][::16]
    tokens, masks = encode_lessons(lessons, CONVERSATION_VOCABULARY)
    renderer = PromptRenderer(load_tokenizer(folder / "model"), PromptFormat(apply_chat_template=False))
    end = CONVERSATION_VOCABULARY[EOS]
    for lesson, ids, mask in zip(lessons, tokens, masks, strict=True):
        expected, by_model = tokenizer(lesson.row["prompt"])["input_ids"], 0
        for text, model in lesson.turns:
            turn = renderer.encode_later_turn([{"role": "tool", "content": text}], end)
            expected += [*turn, end] if model else turn
            by_model += (len(turn) + 1) * model
            assert tokenizer.decode(turn) == text
        assert ids[: len(expected)].tolist() == expected
        assert set(ids[len(expected) :].tolist()) <= {CONVERSATION_VOCABULARY[PAD]}
        assert int(mask.sum()) == by_model
        assert torch.equal(mask[: len(lesson.row["prompt"])], torch.zeros(len(lesson.row["prompt"]), dtype=torch.bool))


def test_a_lesson_is_what_its_environment_would_say(folder: Path) -> None:
    recipe = {"calculator": "quickstart_tools", "two_tasks": "quickstart_two_tasks"}[folder.name]
    sections = compose_config([f"+exp={recipe}"]).env
    settings = EnvironmentSettings(tokenizer=str(folder / "model"))
    environments = {task: create_environment(section, settings) for task, section in sections.items()}
    for lesson in split_lessons(folder.name)[2][::8]:
        assert solves(lesson, environments[lesson.row["task_name"]])


def solves(lesson: Lesson, environment: Environment) -> bool:
    """Whether the environment answers the model's turns with the others, ends with the last, and rewards it."""
    extra = {"<reference>": str(lesson.row["answer"]), **lesson.row}
    state = environment.reset(lesson.row["prompt"], extra)
    turns = [*lesson.turns, (None, False)]
    for (text, by_model), (following, _) in pairwise(turns):
        if by_model and environment.multi_turn:
            turn = environment.step(state, str(text))
            state = turn.state
            assert turn.done is (following is None)
            assert turn.done or turn.text == following
    response = "".join(str(text) for text, by_model in lesson.turns if by_model)
    request = EnvironmentRequest(
        prompt=lesson.row["prompt"], response=response, stop_reason="stop", extra_env_info=extra, state=state
    )
    (score,) = environment.score([request])
    return score.reward == 1.0
