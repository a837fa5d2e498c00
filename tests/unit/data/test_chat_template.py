"""Chat templates that have no end: they are ended at the deadline, in every thread, and nothing else is."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megatron_grpo.config.errors import RunError
from megatron_grpo.data.chat_template import render_chat
from megatron_grpo.data.processors import TaskDataSpec, render_prompt
from megatron_grpo.data.prompt_renderer import PromptFormat, PromptRenderer
from tests.support.released.table import BY_NAME

MESSAGES = [{"role": "user", "content": "hello"}]
LOOP = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
RECURSION = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
WITHOUT_RANGE = "{% set l = 'x' * 9999 %}" + "{% for a in l %}" * 4 + "{% endfor %}" * 4
HUGE_RANGE = "{% for a in range(10 ** 12) %}{% endfor %}"


def tokenizer(template: str) -> Any:
    core = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template)


@pytest.mark.parametrize("template", [LOOP, RECURSION, WITHOUT_RANGE])
def test_a_template_without_end_is_ended(template: str) -> None:
    began = time.monotonic()
    with pytest.raises(RunError, match=r"the chat template was not done with one conversation after 0\.3 s"):
        render_chat(tokenizer(template), MESSAGES, seconds=0.3)
    assert time.monotonic() - began < 5
    assert render_chat(tokenizer("{{ messages[0].content }}"), MESSAGES, seconds=5) == "hello"


def test_threads_have_their_own_deadlines() -> None:
    endless, short = tokenizer(LOOP), tokenizer("{% for a in range(2000) %}{% endfor %}done")

    def render(seconds: float) -> str:
        try:
            return render_chat(endless if seconds < 1 else short, MESSAGES, seconds=seconds)
        except RunError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(render, [0.2, 60, 0.3, 60, 0.4, 60, 60, 60]))
    assert texts[1] == texts[3] == texts[5] == texts[6] == "done"
    assert [("0.2 s" in texts[0]), ("0.3 s" in texts[2]), ("0.4 s" in texts[4])] == [True] * 3


def test_no_deadline_is_left_behind() -> None:
    """A deadline that passes just as the template is done ends nothing that follows."""
    plain = tokenizer("{{ messages[0].content }}")
    render_chat(plain, MESSAGES)
    threads = threading.active_count()
    for _ in range(300):
        try:
            assert render_chat(plain, MESSAGES, seconds=0.00002) == "hello"
        except RunError:
            continue
    time.sleep(0.1)
    assert threading.active_count() < threads + 20
    assert sum(range(100_000)) == 4999950000


def test_a_huge_range_is_a_message_of_its_row() -> None:
    spec = TaskDataSpec(task_name="math", chat_template=HUGE_RANGE)
    with pytest.raises(ValueError, match="row 7: the tokenizer's chat template refuses the prompt: Range too big"):
        render_prompt({"prompt": "a"}, spec, tokenizer(HUGE_RANGE), 7)


@pytest.mark.parametrize(
    ("expression", "named"),
    [
        ("9 ** (9 ** 9)", "number"),
        ("2 ** 999999 * 2 ** 999999", "number"),
        ("'ab' * 10 ** 9", "text"),
        ("10 ** 9 * [1]", "text"),
    ],
)
def test_arithmetic_that_cannot_be_interrupted_is_bounded(expression: str, named: str) -> None:
    with pytest.raises(OverflowError, match=f"a {named} in the template has more than"):
        render_chat(tokenizer("{{ " + expression + " }}"), MESSAGES, seconds=5)
    assert render_chat(tokenizer("{{ 2 ** 10 * 3 }}{{ '-' * 3 }}{{ 2 * 1.5 }}"), MESSAGES) == "3072---3.0"


def call_weather(arguments: Any, **content: Any) -> list[dict[str, Any]]:
    """A user's question, a call, and its result."""
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    turn = {"role": "assistant", **content, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": "wet"}
    return [{"role": "user", "content": "Rain?"}, turn, result]


@pytest.mark.parametrize("name", ["r1_distill_qwen", "r1_distill_llama", "qwen2_5", "qwen3", "gpt_oss"])
@pytest.mark.parametrize("city", ["Ulm", None, "None", "null"])
def test_calls_are_shown_whether_their_content_is_null_empty_or_missing(name: str, city: str | None) -> None:
    """DeepSeek's templates show calls beside null alone; servers and datasets write any of the three."""
    renderer = PromptRenderer(BY_NAME[name].oracle, PromptFormat())
    texts = {
        renderer.render(call_weather(arguments, **content))
        for content in ({"content": None}, {"content": ""}, {})
        for arguments in ({"city": city}, json.dumps({"city": city}))
    }
    (text,) = texts
    assert "get_weather" in text
    assert "wet" in text
    assert f'"city": {json.dumps(city)}' in text


def test_a_template_that_writes_null_gets_an_empty_content() -> None:
    tokenizer = BY_NAME["qwen2_5"].oracle
    template = (
        "{% for m in messages %}{{ m.content | tojson if m.content is not string else m.content }}"
        "{% for c in m.tool_calls %}<{{ c.function.name }}>{% endfor %};{% endfor %}"
    )
    renderer = PromptRenderer(tokenizer, PromptFormat(chat_template=template))
    assert renderer.render(call_weather({}, content=None)) == "Rain?;<get_weather>;wet;"
