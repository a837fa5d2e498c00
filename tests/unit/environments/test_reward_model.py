"""A reward model's scores against transformers computing each conversation by itself."""

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from megatron_grpo.config.data_schema import RewardModelConfig
from megatron_grpo.config.errors import ResponseError, RunError
from megatron_grpo.data import prompt_renderer
from megatron_grpo.data.processors import TaskDataSpec
from megatron_grpo.data.supervised_rows import score_data_processor
from megatron_grpo.environments import reward_model
from megatron_grpo.environments.environment_worker import is_outside
from megatron_grpo.environments.reward_model import RewardModel, find_model_problem

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward_model")
    core = Tokenizer(models.WordLevel({chr(code): code - 32 for code in range(32, 127)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="~", chat_template=CHAT).save_pretrained(path)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_labels=1,
        pad_token_id=94,
    )
    model = AutoModelForSequenceClassification.from_config(config)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(path)
    return path


def expected_rewards(folder: Path, texts: list[str]) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        return [float(model(torch.tensor([[ord(sign) - 32 for sign in text]])).logits[0, 0]) for text in texts]


@pytest.mark.parametrize("batch_tokens", [4, 40, 1000])
def test_scores_do_not_depend_on_what_they_are_computed_with(folder: Path, batch_tokens: int) -> None:
    assert find_model_problem(str(folder)) is None
    prompts, completions = ["one", "a longer one", "x"], [" two three four five", "", "y"]
    model = RewardModel(str(folder), RewardModelConfig(batch_tokens=batch_tokens), 0)
    texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    assert model.compute_rewards(prompts, completions) == pytest.approx(expected_rewards(folder, texts), abs=1e-5)


def test_a_conversation_is_rendered_by_the_models_own_template(folder: Path) -> None:
    prompts: list[Any] = [[{"role": "user", "content": "hi"}]]
    completions: list[Any] = [[{"role": "assistant", "content": "ho"}]]
    model = RewardModel(str(folder), RewardModelConfig(), 0)
    (rendered,) = expected_rewards(folder, ["<user>hi<assistant>ho"])
    assert model.compute_rewards(prompts, completions) == pytest.approx([rendered], abs=1e-5)
    cut = RewardModel(str(folder), RewardModelConfig(max_tokens=5), 0)
    assert cut.compute_rewards(prompts, completions) == pytest.approx(expected_rewards(folder, ["nt>ho"]), abs=1e-5)
    model._tokenizer.chat_template = None
    with pytest.raises(RunError, match="has no chat template") as caught:
        model.compute_rewards(prompts, completions)
    assert is_outside(caught.value), "no response is to blame"


@pytest.mark.parametrize(
    ("text", "error", "reason"),
    [
        ("refused", ResponseError, "refuses the conversation: no$"),
        ("endless", ResponseError, "was not done with one conversation"),
        ("large", MemoryError, ""),
    ],
)
def test_a_text_that_the_template_cannot_write_may_be_to_blame(
    folder: Path, text: str, error: type[Exception], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_renderer, "render_chat", partial(prompt_renderer.render_chat, seconds=0.3))
    model = RewardModel(str(folder), RewardModelConfig(), 0)
    model._tokenizer.chat_template = (
        "{% for m in messages %}{% if m.content == 'refused' %}{{ raise_exception('no') }}{% endif %}"
        "{% if m.content == 'large' %}{{ 'a'.ljust(6000000000) | length }}{% endif %}"
        "{% if m.content == 'endless' %}" + "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3 + "{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    prompt = [{"role": "user", "content": "hi"}]
    with pytest.raises(error, match=reason or None) as caught:
        model.compute_rewards([prompt], [[{"role": "assistant", "content": text}]])
    assert not is_outside(caught.value)
    assert model.compute_rewards([prompt], [[{"role": "assistant", "content": "ho"}]])[0] is not None


SHOWING = "{% for t in tools or [] %}[{{ t.name }}]{% endfor %}{% for m in messages %}{% if m.role != 'context' %}"
SHOWING += "<{{ m.role }}{{ mood }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
SHOWING += "{{ c.function.arguments | tojson }}{% endfor %}{% endif %}{% endfor %}"


def test_conversations_are_scored_as_they_were_in_training(folder: Path, tmp_path: Path) -> None:
    """Tokens of the rows of algorithm=reward_model and of scoring are the same, with the settings of the export."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    settings = {"system_prompt": "Judge.", "chat_template_kwargs": {"mood": "!"}, "tools": [{"name": "f"}]}
    config = json.loads((tmp_path / "config.json").read_text()) | {"conversation_format": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = RewardModel(str(tmp_path), RewardModelConfig(), 0)
    model._tokenizer.chat_template = SHOWING
    call = {"type": "function", "function": {"name": "g", "arguments": '{"x": 1}'}}
    prompt = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7"},
    ]
    completion = [{"role": "assistant", "content": "ho"}]
    spec = TaskDataSpec(task_name="math", answer_key=None, **settings)
    row = {"prompt": prompt, "chosen": completion, "rejected": [{"role": "assistant", "content": "no"}]}
    for tools in (None, [{"name": "own"}]):
        parts = score_data_processor(row | {"tools": tools}, spec, model._tokenizer, 400, 0)["message_log"]
        trained = "".join(part["content"] for part in parts)
        name = "f" if tools is None else "own"
        assert trained == f'[{name}]<system!>Judge.<user!>hi<assistant!>g{{"x": 1}}<tool!>7<assistant!>ho'
        scores = model.compute_rewards([prompt], [completion], [tools])
        assert scores == pytest.approx(expected_rewards(folder, [trained]), abs=1e-5)
    with pytest.raises(RunError, match="leaves out message 1, of the role context"):
        model.compute_rewards([[{"role": "context", "content": "a"}, *prompt]], [completion])


def test_an_open_turn_is_scored_as_one(folder: Path) -> None:
    opened = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "h"}]
    model = RewardModel(str(folder), RewardModelConfig(), 0)
    scores = model.compute_rewards([opened], [[{"role": "assistant", "content": "o"}]])
    assert scores == pytest.approx(expected_rewards(folder, ["<user>hi<assistant>ho"]), abs=1e-5)


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}~{% endfor %}"
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_labels": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
EOS, QUESTION_MARK = 94, 31
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, **HEADS, bos_token_id=None, eos_token_id=EOS),
    "qwen3": Qwen3Config(**SIZES, **HEADS, head_dim=8, eos_token_id=EOS),
    "mistral": MistralConfig(**SIZES, **HEADS, eos_token_id=EOS),
    "gemma2": Gemma2Config(**SIZES, **HEADS, head_dim=8, eos_token_id=EOS),
    "gpt2": GPT2Config(
        vocab_size=96, n_embd=32, n_layer=2, n_head=4, num_labels=1, bos_token_id=None, eos_token_id=EOS
    ),
    "bert": BertConfig(**SIZES, num_attention_heads=4, pad_token_id=0),
}
CASES = [  # family, config.pad_token_id, pad_token of the tokenizer, side on which the tokenizer pads
    *((family, None, None, "right") for family in FAMILIES if family != "bert"),
    ("llama", None, "~", "left"),  # the usual pad = eos, of the tokenizer alone
    ("qwen3", EOS, "~", "right"),  # a model that TRL trained: it scores the token before the last ~, here too
    ("mistral", QUESTION_MARK, "?", "left"),  # a padding token that texts contain, also at their end
    ("llama", -1, None, "right"),
    ("gemma2", 0, "~", "right"),
    ("bert", 0, " ", "right"),
]


def save_model(folder: Path, family: str, pad_id: int | None, pad_token: str | None, side: str) -> None:
    core = Tokenizer(models.WordLevel({chr(code): code - 32 for code in range(32, 127)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = {} if pad_token is None else {"pad_token": pad_token}
    PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="~", chat_template=TURNS, padding_side=side, **special
    ).save_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(FAMILIES[family])
    head = next(module for name, module in model.named_children() if name in ("score", "classifier"))
    torch.nn.init.normal_(head.weight)
    model.config.pad_token_id = pad_id
    model.save_pretrained(folder)


@pytest.mark.parametrize(("family", "pad_id", "pad_token", "side"), CASES)
@pytest.mark.parametrize("batch_tokens", [1, 10_000])
def test_scores_are_those_of_transformers_for_one_text(
    tmp_path: Path, family: str, pad_id: int | None, pad_token: str | None, side: str, batch_tokens: int
) -> None:
    save_model(tmp_path, family, pad_id, pad_token, side)
    prompts: list[Any] = [[{"role": "user", "content": "What is 1+1?"}]] * 4
    completions: list[Any] = [
        [{"role": "assistant", "content": text}] for text in ("2", "two of them", "why?? ~", "It is 2.")
    ]
    model = RewardModel(str(tmp_path), RewardModelConfig(batch_tokens=batch_tokens), 0)
    texts = [f"<user>What is 1+1?~<assistant>{turn[0]['content']}~" for turn in completions]
    assert model.compute_rewards(prompts, completions) == pytest.approx(expected_rewards(tmp_path, texts), abs=1e-5)
    plain = ["a?", "", "bcd~", "efgh?~"]
    with_tokens = expected_rewards(tmp_path, [text for text in plain if text])
    scores = model.compute_rewards([""] * 4, plain)
    assert scores[1] is None, "a text without tokens has no score"
    assert [score for score in scores if score is not None] == pytest.approx(with_tokens, abs=1e-5)


def test_texts_that_use_every_token_are_scored_alone(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", None, None, "right")
    texts = ["".join(chr(code) for code in range(32, 127)) + "a", "ab", "~"]
    model = RewardModel(str(tmp_path), RewardModelConfig(), 0)
    model._vocabulary = 95  # the embedding has a row more than there are characters
    assert model.compute_rewards([""] * 3, texts) == pytest.approx(expected_rewards(tmp_path, texts), abs=1e-5)


def test_a_folder_without_the_head_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunError, match=r"has no weights for score\.weight"):
        RewardModel(str(tmp_path), RewardModelConfig(), 0)


def test_a_reward_model_may_be_one_of_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_model, "find_local_folder", lambda name: folder if name == "org/there" else None)
    monkeypatch.setattr(reward_model, "download_config", lambda name: f"no {name}")
    monkeypatch.setattr(reward_model, "fetch_model_folder", lambda name, key: folder if name == "org/there" else None)
    assert find_model_problem("org/there") is None
    assert find_model_problem("org/gone") == (
        "is not a folder here, nor in the Hugging Face cache, and the hub says: no org/gone"
    )
    environments: list[Any] = []
    actor = SimpleNamespace(remote=lambda *arguments: environments.append(arguments))
    monkeypatch.setattr(reward_model.ray, "remote", lambda **_: lambda _: actor)
    client, _ = reward_model.start_reward_model("org/there", RewardModelConfig(num_workers=2))
    assert [arguments[0] for arguments in environments] == [str(folder)] * 2
    assert client.path == "org/there"


def test_only_checkpoints_of_reward_models_are_reward_models(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step_3"
    (checkpoint / "megatron").mkdir(parents=True)
    for algorithm, problem in (("reward_model", None), ("grpo", "is a checkpoint of a policy; give one of algorithm=")):
        config = {"algorithm": algorithm, "policy": {"model": {"path": "org/model"}}}
        (tmp_path / "config.yaml").write_text(json.dumps(config))
        reason = find_model_problem(str(checkpoint))
        assert reason is problem or (reason is not None and reason.startswith(str(problem)))
