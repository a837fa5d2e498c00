"""Released layouts walked through from the prompt to the reward's text, against transformers' own rendering."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.special_tokens import decode_response, find_stop_conditions, find_unstopped_turn_end
from megatron_grpo.batch.trajectory import Span, StopReason
from megatron_grpo.config.generation_schema import GenerationConfig
from megatron_grpo.data.processors import TaskDataSpec, math_data_processor
from megatron_grpo.data.prompt_renderer import PromptFormat, PromptRenderer
from megatron_grpo.data.tokenizer import load_tokenizer
from tests.support.direct_conversation import DirectConversation
from tests.support.released.layout import Layout
from tests.support.released.table import ADD, LAYOUTS, SYSTEM, TRICKY, USER, calls, results

pytestmark = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)

ANSWER = "There are 2023 of them,\n  naïvely counted: 12."
SETTINGS_OF_SAMPLING = SamplingSettings(max_new_tokens=100)
FOLLOW_UP = {"role": "user", "content": "And without\n\n the 3 kittens? 🐈"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("released")


@pytest.fixture
def tokenizer(layout: Layout, folders: Path) -> Any:
    return _load(layout, folders)


@cache
def _load(layout: Layout, folders: Path) -> Any:
    return load_tokenizer(layout.write(folders / layout.name))


def renderer_of(tokenizer: Any, **settings: Any) -> PromptRenderer:
    return PromptRenderer(tokenizer, PromptFormat(**settings))


def tokens_after(layout: Layout, full_text: str, turn: str, end: str) -> list[int]:
    """Tokens of a whole conversation after the model's turn, without the end token if the template writes it too."""
    before, is_shown, after = full_text.rpartition(turn)
    assert is_shown, f"transformers' rendering has no {turn!r}"
    ahead, is_end, behind = after.partition(end)
    if is_end and not ahead.strip():
        after = behind
    begin = layout.ids(before + turn + end)
    both = layout.ids(before + turn + end + after)
    assert both[: len(begin)] == begin, "an end token stands between"
    return both[len(begin) :]


SETTINGS: Sequence[Mapping[str, Any]] = ({}, {"system_prompt": SYSTEM["content"]}, {"tools": [ADD]})


@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "system", "tools"])
def test_prompts(layout: Layout, tokenizer: Any, settings: dict[str, Any]) -> None:
    messages = [SYSTEM, USER] if "system_prompt" in settings else [USER]
    for variables in ({}, layout.kwargs):
        expected = layout.render(messages, tools=settings.get("tools"), **variables)
        spec = TaskDataSpec(task_name="x", chat_template_kwargs=variables, **settings)
        datum = math_data_processor({"prompt": TRICKY, "answer": "1"}, spec, tokenizer, 10_000, 0)
        assert datum["message_log"][0]["content"] == expected
        assert datum["message_log"][0]["token_ids"] == layout.ids(expected)
    if layout.shows_tools and "tools" in settings:
        assert "Adds two whole numbers." in expected


@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "system", "tools"])
def test_a_later_turn_of_the_user(layout: Layout, tokenizer: Any, settings: dict[str, Any]) -> None:
    messages = [SYSTEM, USER] if "system_prompt" in settings else [USER]
    conversation = [*messages, {"role": "assistant", "content": ANSWER}, FOLLOW_UP]
    for variables in ({}, layout.kwargs):
        renderer = renderer_of(tokenizer, chat_template_kwargs=variables, **settings)
        full_text = layout.render(conversation, tools=settings.get("tools"), **variables)
        expected = tokens_after(layout, full_text, ANSWER, layout.end)
        assert renderer.encode_later_turn([FOLLOW_UP], layout.id(layout.end)) == expected
        earlier = conversation[len(messages) - 1 : -2]
        assert renderer.encode_continuation(earlier, [FOLLOW_UP], layout.id(layout.end)) == expected


@pytest.mark.parametrize("count", [1, 2])
def test_results_of_tools(layout: Layout, tokenizer: Any, count: int) -> None:
    renderer, end = renderer_of(tokenizer, tools=[ADD]), layout.tool_end or layout.end
    if layout.tool_role == "refused":
        with pytest.raises(Exception, match=r"(?i)alternate|roles are supported"):
            renderer.encode_later_turn(results(count), layout.id(end))
        return
    count = min(count, layout.calls) or count
    turn = {"role": "assistant", "content": "", "tool_calls": calls(count)}
    mark = layout.call_close
    if layout.calls == 0:
        turn, mark = {"role": "assistant", "content": ANSWER}, ANSWER
    full_text = layout.render([USER, turn, *results(count)], tools=[ADD])
    expected = tokens_after(layout, full_text, mark, end)
    assert renderer.encode_later_turn(results(count), layout.id(end)) == expected


def test_a_turn_that_reasons(layout: Layout, tokenizer: Any) -> None:
    """Templates drop the reasoning of earlier turns from a whole conversation; the sampled turn keeps its tokens."""
    reasoned = f"<think>\nCount.\n</think>\n\n{ANSWER}"
    full_text = layout.render([USER, {"role": "assistant", "content": reasoned}, FOLLOW_UP])
    expected = tokens_after(layout, full_text, ANSWER, layout.end)
    assert renderer_of(tokenizer).encode_later_turn([FOLLOW_UP], layout.id(layout.end)) == expected


def test_the_calls_of_an_agent(layout: Layout, tokenizer: Any) -> None:
    """Three calls are one sequence: what transformers renders for the whole, with the sampled tokens in their place."""
    second = "Then 9."
    engine = Script([[*layout.ids(text), layout.id(layout.end)] for text in (ANSWER, second, "")], layout)
    seed = iter(range(9)).__next__
    talk = DirectConversation(engine, SETTINGS_OF_SAMPLING, renderer_of(tokenizer), lambda _: seed(), 10_000)
    messages: list[dict[str, Any]] = [USER]
    expected = layout.ids(layout.render(messages))
    for answer, question in ((ANSWER, FOLLOW_UP), (second, USER)):
        asyncio.run(talk.chat(messages, None, None))
        assert engine.prompts[-1] == expected
        messages = [*messages, {"role": "assistant", "content": answer}, question]
        expected += [*layout.ids(answer), layout.id(layout.end)]
        expected += tokens_after(layout, layout.render(messages), answer, layout.end)
    asyncio.run(talk.chat(messages, None, None))
    assert engine.prompts[-1] == expected


class Script:
    """An engine that answers with these tokens, one answer a call."""

    def __init__(self, answers: Sequence[list[int]], layout: Layout) -> None:
        self._answers, self._layout = iter(answers), layout
        self.prompts: list[list[int]] = []

    async def generate(self, request: GenerationRequest, settings: SamplingSettings) -> GenerationOutput:
        self.prompts.append(request.prompt_ids.tolist())
        tokens = next(self._answers)
        return GenerationOutput(
            token_ids=np.array(tokens, dtype=np.int32),
            logprobs=np.zeros(len(tokens), dtype=np.float32),
            text=self._layout.truth.decode(tokens, skip_special_tokens=True),
            stop_reason="stop",
            spans=[Span(0, len(tokens), 1)],
        )


def test_ends_of_responses(layout: Layout, tokenizer: Any, folders: Path) -> None:
    """The ends of generation_config.json count, and an end of turn that is none of them is named."""
    stops = find_stop_conditions(GenerationConfig(), tokenizer, folders / layout.name)
    assert set(stops.token_ids) == layout.ends | {tokenizer.eos_token_id}
    render = partial(renderer_of(tokenizer).render, add_generation_prompt=False)
    end = layout.id(layout.end)
    assert find_unstopped_turn_end(tokenizer, stops, render) == (None if end in layout.ends else (layout.end, end))


@pytest.mark.parametrize("stop_reason", ["stop", "length"])
def test_texts_for_rewards(layout: Layout, tokenizer: Any, stop_reason: StopReason) -> None:
    """Rewards read what was sampled, with the marks of thoughts, channels and calls, without the end of the turn."""
    written = f"<think>\nCount.\n</think>\n\n{ANSWER}{layout.call_text}"
    end = layout.id(layout.tool_end or layout.end)
    text = decode_response(tokenizer, [*layout.ids(written), end], stop_reason)
    sampled = layout.ids(written) if stop_reason == "stop" else [*layout.ids(written), end]
    assert text == layout.truth.decode(sampled, skip_special_tokens=False)
    if layout.call_text:
        assert layout.call_text.rpartition("\n")[2] in text
    if stop_reason == "stop":
        assert text == written


def test_a_turn_that_was_cut(layout: Layout, tokenizer: Any) -> None:
    """After a turn without an end token, the template's own follows."""
    full_text = layout.render([USER, {"role": "assistant", "content": ANSWER}, FOLLOW_UP])
    before, _, after = full_text.rpartition(ANSWER)
    expected = layout.ids(full_text)[len(layout.ids(before + ANSWER)) :]
    assert layout.truth.decode(expected, skip_special_tokens=False).split()[-1:] == after.split()[-1:]
    assert renderer_of(tokenizer).encode_later_turn([FOLLOW_UP], layout.ids(ANSWER)[-1]) == expected


@pytest.mark.parametrize("keeps_reasoning", [False, True], ids=["left out by the client", "sent back"])
def test_thinking_and_tool_calls_of_an_agent(layout: Layout, tokenizer: Any, keeps_reasoning: bool) -> None:
    """A segment goes on while transformers' rendering still has the thinking, else the rendering begins another."""
    thoughts = ("First 7 and 8.", "Then 9 of 10.", "Last.")
    has_calls = layout.calls > 0 and layout.tool_role == "shown"
    turns, ends = calls(layout.calls) if has_calls else [], [layout.tool_end or layout.end, layout.end, layout.end]
    written = [f"<think>\n{thought}\n</think>\n\n" for thought in thoughts]
    written[0] += layout.call_text if has_calls else ANSWER
    written[1] += ANSWER
    engine = Script([[*layout.ids(text), layout.id(end)] for text, end in zip(written, ends, strict=True)], layout)
    talk = DirectConversation(engine, SETTINGS_OF_SAMPLING, renderer_of(tokenizer), lambda number: number, 10_000)

    async def read(output: GenerationOutput, text: str, number: int) -> dict[str, Any]:
        reasoning = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), thoughts[number])
        is_call = has_calls and number == 0
        return {"role": "assistant", "content": "" if is_call else ANSWER, **reasoning} | (
            {"tool_calls": turns} if is_call else {}
        )

    messages: list[dict[str, Any]] = [USER]
    complete = list(messages)  # with the model's reasoning
    for later in (results(layout.calls) if has_calls else [FOLLOW_UP], [USER], []):
        rendered = layout.render(complete)
        response = asyncio.run(talk.chat(messages, read=read))
        path = response.path[:-1]
        prompt = engine.prompts[-1]
        is_kept = len(complete) > 1 and all(
            thoughts[talk.responses.index(step)] in rendered for step in talk.responses[:-1]
        )
        if is_kept:
            assert path[-1] is talk.responses[-2]
            begin = path[-1].tokens.tolist()
            rest = prompt[len(begin) :]
            assert prompt[: len(begin)] == begin
            assert rest == layout.ids(rendered)[-len(rest) :]
        else:
            assert prompt == layout.ids(rendered)
        answer = asyncio.run(read(response.output, "", len(talk.responses) - 1))
        sent = (
            answer
            if keeps_reasoning
            else {name: answer[name] for name in answer if name in ("role", "content", "tool_calls")}
        )
        messages, complete = [*messages, sent, *later], [*complete, answer, *later]
    sampled = [token for segment in talk.list_segments() for piece in segment.pieces[1::2] for token in piece.tolist()]
    expected = [token for response in talk.responses for token in response.output.token_ids.tolist()]
    assert sorted(sampled) == sorted(expected)
