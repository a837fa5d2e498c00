"""A reward model's scores against transformers computing each conversation by itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast, Qwen3Config

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import RewardModelConfig
from megatron_grpo.environments import reward_model
from megatron_grpo.environments.reward_model import RewardModel, model_problem

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


def expected(folder: Path, texts: list[str]) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        return [float(model(torch.tensor([[ord(sign) - 32 for sign in text]])).logits[0, 0]) for text in texts]


@pytest.mark.parametrize("batch_tokens", [4, 40, 1000])
def test_scores_do_not_depend_on_what_they_are_computed_with(folder: Path, batch_tokens: int) -> None:
    assert model_problem(str(folder)) is None
    prompts, completions = ["one", "a longer one", "x"], [" two three four five", "", "y"]
    model = RewardModel(str(folder), RewardModelConfig(batch_tokens=batch_tokens), 0)
    texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    assert model.rewards(prompts, completions) == pytest.approx(expected(folder, texts), abs=1e-5)


def test_a_conversation_is_rendered_by_the_models_own_template(folder: Path) -> None:
    prompts: list[Any] = [[{"role": "user", "content": "hi"}]]
    completions: list[Any] = [[{"role": "assistant", "content": "ho"}]]
    model = RewardModel(str(folder), RewardModelConfig(), 0)
    (rendered,) = expected(folder, ["<user>hi<assistant>ho"])
    assert model.rewards(prompts, completions) == pytest.approx([rendered], abs=1e-5)
    cut = RewardModel(str(folder), RewardModelConfig(max_tokens=5), 0)
    assert cut.rewards(prompts, completions) == pytest.approx(expected(folder, ["nt>ho"]), abs=1e-5)
    model._tokenizer.chat_template = None
    with pytest.raises(RunError, match="has no chat template"):
        model.rewards(prompts, completions)


def test_a_reward_model_may_be_one_of_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_model, "local_folder", lambda name: folder if name == "org/there" else None)
    monkeypatch.setattr(reward_model, "download_config", lambda name: f"no {name}")
    monkeypatch.setattr(reward_model, "model_folder", lambda name, key: folder if name == "org/there" else None)
    assert model_problem("org/there") is None
    assert model_problem("org/gone") == (
        "is not a folder here, nor in the Hugging Face cache, and the hub says: no org/gone"
    )
    made: list[Any] = []
    actor = SimpleNamespace(remote=lambda *arguments: made.append(arguments))
    monkeypatch.setattr(reward_model.ray, "remote", lambda **_: lambda _: actor)
    client, _ = reward_model.start_reward_model("org/there", RewardModelConfig(num_workers=2))
    assert [arguments[0] for arguments in made] == [str(folder)] * 2
    assert client.path == "org/there"
