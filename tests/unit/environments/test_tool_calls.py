"""The parser of tool calls is that of the model: it reads the calls that the released template writes."""

from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config.data_schema import EnvironmentConfig
from megatron_grpo.config.errors import RunError
from megatron_grpo.data.prompt_renderer import PromptFormat, PromptRenderer
from megatron_grpo.data.tokenizer import load_tokenizer
from megatron_grpo.environments.interface import EnvironmentSettings
from megatron_grpo.environments.registry import create_environment
from megatron_grpo.environments.tools import write_call
from tests.support.released.table import BY_NAME

PARSERS = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5": "qwen3_coder",
    "llama_3_1": "llama3_json",
    "mistral_nemo": "mistral",
    "glm_4_5": "glm45",
    "gpt_oss": "openai",
}
"""vLLM's parser of each layout's calls."""


def create(name: str, parser: str, folder: Path) -> Any:
    settings = EnvironmentSettings(tokenizer=str(BY_NAME[name].write(folder / name)), prompts=PromptFormat())
    return create_environment(EnvironmentConfig(type="tools", options={"parser": parser, "compare": "exact"}), settings)


@pytest.mark.parametrize("name", PARSERS)
def test_the_parser_of_the_model_is_accepted(name: str, tmp_path: Path) -> None:
    create(name, PARSERS[name], tmp_path)


WRONG = [("llama_3_1", "hermes"), ("qwen3_5", "hermes"), ("glm_4_5", "hermes"), ("mistral_nemo", "hermes")]


@pytest.mark.parametrize(("name", "parser"), [*WRONG, ("gpt_oss", "hermes"), ("qwen3", "openai")])
def test_another_parser_is_refused(name: str, parser: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=rf"options.parser={parser} finds no tool call in what .*calculator.*; give the"):
        create(name, parser, tmp_path)


@pytest.mark.parametrize(
    "call",
    [
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary to=functions.calculator "
        '<|constrain|>json<|message|>{"expression": "3*4"}',
        ' to=functions.calculator<|channel|>commentary json<|message|>{"expression": "3*4"}<|call|>',
        '<|channel|>commentary to=functions.calculator<|message|>{"expression": "3*4"}',
    ],
)
def test_calls_of_gpt_oss_are_executed_and_its_final_text_is_the_answer(call: str, tmp_path: Path) -> None:
    environment = create("gpt_oss", "openai", tmp_path)
    turn = environment.step(environment.reset("", {}), call)
    assert [(message["name"], message["content"]) for message in turn.messages] == [("calculator", "12")]
    thought = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
    final = environment.step(turn.state, f"{thought}<|channel|>final<|message|>12")
    assert final.done
    assert final.state.answer == "12"
    assert environment.step(turn.state, "<|channel|><|channel|>").done, "malformed text has no calls"


def test_a_parser_that_needs_other_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"options.parser=llama3_json does not fit the model's tokenizer.*python_tag"):
        create("qwen3", "llama3_json", tmp_path)


@pytest.mark.parametrize("name", ["phi_4", "r1_distill_llama", "gemma_3"])
def test_a_template_without_calls_is_not_judged(name: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(BY_NAME[name].write(tmp_path))
    assert write_call(PromptRenderer(tokenizer, PromptFormat()), "calculator") is None
