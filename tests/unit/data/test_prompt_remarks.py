"""What is said of a model's tokenizer when the prompts of a run are read."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megatron_grpo.config.errors import ConfigError
from megatron_grpo.data.load_prompts import load_prompt_data
from megatron_grpo.data.tokenizer import load_tokenizer
from megatron_grpo.preflight.load import compose_config
from tests.support.config_problems import SMALL
from tests.support.foreign_tokenizers import CHATML, QWEN2_SPLIT, byte_level, deepseek_r1_distill, save_folder


def with_vocabulary(model: Path, size: int) -> Path:
    (model / "config.json").write_text(json.dumps(SMALL | {"vocab_size": size}))
    return model


def base_model(model: Path, size: int = 300) -> Path:
    """A model whose chat template ends turns by <|im_end|>, and its tokenizer texts by <|endoftext|>."""
    core = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], split=QWEN2_SPLIT, nfc=True)
    save_folder(model, core, "qwen3", "Qwen2Tokenizer", eos_token="<|endoftext|>", chat_template=CHATML)
    return with_vocabulary(model, size)


def test_an_end_of_turn_that_ends_no_response_is_remarked_on(base_overrides: list[str], model: Path) -> None:
    end = load_tokenizer(base_model(model)).convert_tokens_to_ids("<|im_end|>")

    def read(*overrides: str) -> Any:
        return load_prompt_data(compose_config([*base_overrides, *overrides]), model)

    (note,) = read().notes
    assert note.startswith("the chat template ends the model's messages with <|im_end|>, which ends no response")
    assert note.endswith(f"give generation.stop_token_ids=[{end}]")
    silent = ["data.apply_chat_template=false", f"generation.stop_token_ids=[{end}]"]
    silent.append('generation.stop_strings=["<|im_end|>"]')
    for override in silent:
        assert read(override).notes == []
    assert end in read(silent[-1]).stops.token_ids
    assert read(silent[-1]).stops.strings == ()


def test_a_template_of_one_task_is_looked_at(base_overrides: list[str], model: Path, tmp_path: Path) -> None:
    base_model(model)
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}{{ m.role + m.content + '<|endoftext|>' }}{% endfor %}")
    assert load_prompt_data(compose_config([*base_overrides, f"data.chat_template={file}"]), model).notes == []
    task = [f"data.chat_template={file}", "data.tasks.math.chat_template_kwargs.enable_thinking=false"]
    assert load_prompt_data(compose_config([*base_overrides, *task]), model).notes == []


def test_a_tokenizer_that_is_loaded_otherwise_is_remarked_on(base_overrides: list[str], model: Path) -> None:
    with_vocabulary(deepseek_r1_distill(model), 300)
    (note,) = load_prompt_data(compose_config(base_overrides), model).notes
    assert note.startswith(f"{model}/tokenizer.json is followed: transformers' LlamaTokenizer")


def test_a_prompt_with_a_token_that_the_model_lacks_is_refused(
    base_overrides: list[str], model: Path, rows: Path
) -> None:
    number = load_tokenizer(base_model(model, 269)).convert_tokens_to_ids("<|im_end|>")
    plain = [*base_overrides, "data.apply_chat_template=false"]
    load_prompt_data(compose_config(plain), model)
    with rows.open("a") as file:
        file.write(json.dumps({"prompt": "1<|im_end|>", "answer": "1"}) + "\n")
    text = f"the prompt has the token '<|im_end|>' with number {number}, and the model has 269 tokens"
    with pytest.raises(ConfigError, match=text.replace("|", r"\|")):
        load_prompt_data(compose_config(plain), model)
    skipped = load_prompt_data(compose_config([*plain, "data.bad_rows=skip"]), model)
    assert text in skipped.notes[0]


def test_a_scripts_tokenizer_that_reads_texts_otherwise_is_refused(base_overrides: list[str], model: Path) -> None:
    with_vocabulary(deepseek_r1_distill(model), 300)
    config = compose_config(base_overrides)
    rebuilt = AutoTokenizer.from_pretrained(model)  # as scripts load it
    with pytest.raises(ConfigError, match=r"tokenizer +is another tokenizer than that of .*leave it out"):
        load_prompt_data(config, model, rebuilt)
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    assert load_prompt_data(config, model, tokenizer).loader
