"""Responses that parsers or expressions cannot end count as malformed; the next response is judged as ever."""

import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_grpo.data.prompt_renderer import PromptFormat
from megatron_grpo.data.scores import EnvironmentRequest
from megatron_grpo.environments.interface import EnvironmentSettings
from megatron_grpo.environments.reasoning_gym import find_tagged_answer
from megatron_grpo.environments.tasks import FormatEnvironment
from megatron_grpo.environments.tools import ToolEnvironment

BEGIN, CALL, SEPARATOR, END = (f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end"))


def test_a_turn_that_the_parser_cannot_end_calls_nothing_limited(tmp_path: Path) -> None:
    core = Tokenizer(models.WordLevel({letter: n for n, letter in enumerate("abcdefghij")}, unk_token="j"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.add_special_tokens([BEGIN, "<｜tool▁calls▁end｜>", CALL, END, SEPARATOR])
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(tmp_path)
    settings = EnvironmentSettings(tokenizer=str(tmp_path), prompts=PromptFormat(apply_chat_template=False))
    tools = ToolEnvironment(settings=settings, parser="deepseek_v3", compare="exact")
    turn = tools.step(tools.reset("", {}), BEGIN + (CALL + SEPARATOR) * 2400)
    assert (turn.done, turn.state.calls) == (True, 0)
    right = f'{BEGIN}{CALL}function{SEPARATOR}calculator\n```json\n{{"expression": "3*4"}}\n```{END}'
    assert tools.step(tools.reset("", {}), right).text == "12"


@pytest.mark.parametrize("pattern", ["(a|a)*b", "(a+)+$", "(?:a*)*c"])
def test_an_expression_that_does_not_end_on_a_response_does_not_match_it(pattern: str) -> None:
    environment = FormatEnvironment(pattern=pattern)
    requests = [
        EnvironmentRequest(prompt="", response=text, stop_reason="stop", extra_env_info={})
        for text in ("a" * 60 + "!", "aab" if "b" in pattern else "aac" if "c" in pattern else "aa")
    ]
    assert [score.reward for score in environment.score(requests)] == [0.0, 1.0]


def test_the_tagged_answer_is_the_last_whole_one() -> None:
    assert find_tagged_answer("<answer>a</answer> or <answer>b<answer>c</answer><answer>d") == "b<answer>c"
    assert find_tagged_answer("no tags</answer>") == "no tags</answer>"
    began = time.process_time()
    find_tagged_answer("<answer>" * 200_000)
    assert time.process_time() - began < 1
