"""What environments say becomes exactly what the chat template puts there, and nothing of the model's is repeated."""

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_grpo.data.image_prompts import RunImages
from megatron_grpo.data.prompt_renderer import PromptFormat, PromptRenderer
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn, ResponseFault, Turn
from megatron_grpo.data.tokenizer import load_tokenizer
from megatron_grpo.environments import environment_worker as worker_module
from megatron_grpo.environments.environment_worker import EnvironmentWorker
from megatron_grpo.environments.interface import Environment, EnvironmentSettings, make_environment_settings
from megatron_grpo.models.vision_shape import VisionShape
from megatron_grpo.preflight.load import compose_config

TEMPLATE = (
    "{% for m in messages %}<s> {{ m['role'] }} : {{ m['content'] }} <e> {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant : {% endif %}"
)
WORDS = ["<s>", "<e>", "<unk>", "user", "assistant", "tool", ":", "go", "on", "42", "yes", "no"]
IDS = {word: number for number, word in enumerate(WORDS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of whole words with a chat template."""
    path = tmp_path_factory.mktemp("words")
    core = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<e>", unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def words(ids: Any) -> str:
    return " ".join(WORDS[number] for number in ids)


def test_the_conversation_is_that_of_the_template(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    renderer = PromptRenderer(tokenizer, PromptFormat())
    ended = renderer.encode_later_turn([{"role": "user", "content": "go on"}], IDS["<e>"])
    assert words(ended) == "<s> user : go on <e> <s> assistant :", "the end of the message was sampled"
    open_ended = renderer.encode_later_turn([{"role": "tool", "content": "42"}], IDS["yes"])
    assert words(open_ended) == "<e> <s> tool : 42 <e> <s> assistant :"
    conversation = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "yes"}]
    conversation.append({"role": "user", "content": "go on"})
    full_text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    before = "<s> user : go <e> <s> assistant : yes <e>"
    assert f"{before} {words(ended)}" == " ".join(full_text.split())


def test_without_a_template_the_text_is_appended_as_it_stands(folder: Path) -> None:
    renderer = PromptRenderer(load_tokenizer(folder), PromptFormat(apply_chat_template=False))
    assert words(renderer.encode_later_turn([{"role": "user", "content": "go on"}], IDS["go"])) == "go on"


class Talking(Environment):
    """Says one thing, then ends."""

    multi_turn = True

    def reset(self, prompt: str | list[dict[str, str]], extra_env_info: dict[str, Any]) -> Any:
        class Local:
            turns: tuple[str, ...] = ()

        return Local()

    def step(self, state: Any, response: str) -> Turn:
        if response == "no":
            raise KeyError("no")
        state.turns = (*state.turns, response)
        return Turn(done=len(state.turns) == 2, state=state, text="go on", role="tool")

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        return [EnvironmentReturn(reward=float(len(request.state.turns)), correct=None) for request in requests]


def test_a_process_keeps_states_to_itself_and_speaks_in_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "begin_process_log", lambda _: None)
    settings = EnvironmentSettings(tokenizer=str(folder), prompts=PromptFormat())
    worker = EnvironmentWorker("talking", worker_module.EnvironmentConfig(), settings)
    worker._environment = Talking()
    state = worker.reset("", {})
    assert isinstance(state, bytes)
    fault = worker.step(state, "no", 0)
    assert isinstance(fault, ResponseFault)
    assert fault.reason.startswith("environment talking: KeyError: 'no' (test_observations.py:")
    first = worker.step(state, "yes", IDS["<e>"])
    assert isinstance(first, Turn)
    assert (first.done, words(first.observation)) == (False, "<s> tool : go on <e> <s> assistant :")
    last = worker.step(first.state, "yes", IDS["<e>"])
    assert isinstance(last, Turn)
    assert (last.done, len(last.observation)) == (True, 0)
    job = [
        EnvironmentRequest(prompt="", response="", stop_reason="stop", extra_env_info={}, state=turn.state)
        for turn in (first, last)
    ]
    assert [scored.reward for scored in worker.score(job) if isinstance(scored, EnvironmentReturn)] == [1.0, 2.0]


def test_a_text_of_an_environment_cannot_stand_for_an_image(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "begin_process_log", lambda _: None)
    for token, is_refused in ((IDS["on"], True), (IDS["no"], False)):
        vision = VisionShape(image_token=token, placeholders=(token,), merge=2, rotary_axes=(0, 1, 2))
        images = RunImages(store=folder, model=folder, vision=vision, max_images=1, max_tokens=1)
        settings = EnvironmentSettings(tokenizer=str(folder), prompts=PromptFormat(), images=images)
        worker = EnvironmentWorker("talking", worker_module.EnvironmentConfig(), settings)
        worker._environment = Talking()
        state = worker.reset("", {})
        assert isinstance(state, bytes)
        answer = worker.step(state, "yes", IDS["<e>"])
        assert isinstance(answer, ResponseFault) == is_refused
        if isinstance(answer, ResponseFault):
            text = "its text has the placeholder of an image, and there is no image for it"
            assert answer.reason == f"environment talking: {text}"


class Silent(Talking):
    """Goes on without a word, and scores with numbers of numpy."""

    def step(self, state: Any, response: str) -> Turn:
        return Turn(done=False, state=state, role="tool")

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        positions: Any = np.array([0, 1])
        return [
            EnvironmentReturn(reward=positions[number], correct=positions[number] > 0)
            for number in range(len(requests))
        ]


def silent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> EnvironmentWorker:
    monkeypatch.setattr(worker_module, "begin_process_log", lambda _: None)
    settings = EnvironmentSettings(tokenizer=str(folder), prompts=PromptFormat())
    worker = EnvironmentWorker("silent", worker_module.EnvironmentConfig(), settings)
    worker._environment = Silent()
    return worker


def test_the_tokenizer_is_loaded_without_the_limit_of_a_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, usual, limits = silent(folder, monkeypatch), resource.getrlimit(resource.RLIMIT_AS), []
    load = EnvironmentSettings.load_tokenizer

    def record(settings: EnvironmentSettings) -> Any:
        limits.append(resource.getrlimit(resource.RLIMIT_AS))
        return load(settings)

    monkeypatch.setattr(EnvironmentSettings, "load_tokenizer", record)
    state = worker.reset("", {})
    assert isinstance(state, bytes)
    assert isinstance(worker.step(state, "yes", IDS["<e>"]), Turn)
    assert limits == [usual]


def test_tokens_that_an_environment_gives_as_a_list_are_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = silent(folder, monkeypatch)
    tokens: Any = [5, 7]
    monkeypatch.setattr(Silent, "step", lambda *_: Turn(done=False, state=None, observation=tokens))
    state = worker.reset("", {})
    assert isinstance(state, bytes)
    turn = worker.step(state, "yes", IDS["<e>"])
    assert isinstance(turn, Turn)
    assert (turn.observation.dtype, turn.observation.tolist()) == (np.int32, [5, 7])


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), np.float32("-inf"), -0.5, np.int64(2), None])
def test_a_turns_reward_is_a_finite_number(folder: Path, monkeypatch: pytest.MonkeyPatch, reward: Any) -> None:
    """A server may read NaN out of a file that its agent wrote."""
    worker = silent(folder, monkeypatch)
    monkeypatch.setattr(Silent, "step", lambda *_: Turn(done=True, reward=reward))
    state = worker.reset("", {})
    assert isinstance(state, bytes)
    turn = worker.step(state, "yes", IDS["<e>"])
    if reward is None or np.isfinite(reward):
        assert isinstance(turn, Turn)
        assert turn.reward == reward
    else:
        assert turn == ResponseFault(
            f"environment silent: Silent.step returned the reward {float(reward)}; None says that a turn has no reward "
            "of its own"
        )


def test_a_message_without_text_is_a_message(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = silent(folder, monkeypatch)
    state = worker.reset("", {})
    assert isinstance(state, bytes)
    turn = worker.step(state, "yes", IDS["<e>"])
    assert isinstance(turn, Turn)
    assert words(turn.observation) == "<s> tool : <e> <s> assistant :"


def test_scores_leave_the_process_as_plain_numbers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = [EnvironmentRequest(prompt="", response="", stop_reason="stop", extra_env_info={})] * 2
    scores = [score for score in silent(folder, monkeypatch).score(job) if isinstance(score, EnvironmentReturn)]
    assert [(type(score.reward), score.reward, score.correct) for score in scores] == [
        (float, 0.0, False),
        (float, 1.0, True),
    ]
    assert [type(score.correct) for score in scores] == [bool, bool]


def test_each_task_has_its_own_rendering(tmp_path: Path) -> None:
    (tmp_path / "guess.jinja").write_text("{{ messages[-1].content }}")
    overrides = [
        "+exp=quickstart_two_tasks",
        "data.apply_chat_template=true",
        "data.tasks.addition.apply_chat_template=false",
    ]
    overrides += [
        "data.chat_template_kwargs.enable_thinking=false",
        f"data.tasks.countdown.chat_template={tmp_path}/guess.jinja",
    ]
    config = compose_config(overrides)
    settings = {task: make_environment_settings(config, task, "folder") for task in config.env}
    assert {task: setting.tokenizer for task, setting in settings.items()} == {
        "addition": "folder",
        "countdown": "folder",
    }
    assert not settings["addition"].prompts.apply_chat_template
    countdown = settings["countdown"].prompts
    assert countdown.apply_chat_template
    assert countdown.chat_template == "{{ messages[-1].content }}"
    assert countdown.chat_template_kwargs == {"enable_thinking": False}


def test_a_tokenizer_of_a_script_is_that_of_the_environment(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert EnvironmentSettings(tokenizer=tokenizer).load_tokenizer() is tokenizer
    assert EnvironmentSettings(tokenizer=str(folder)).load_tokenizer().get_vocab() == tokenizer.get_vocab()
