"""An agent's calls as segments: every token as it was given or sampled, against an engine that writes a script."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.trajectory import Span
from megatron_grpo.data.prompt_renderer import PromptFormat, PromptRenderer
from megatron_grpo.rollouts.call_prompts import BadCallError
from megatron_grpo.rollouts.conversation import TooManyCallsError
from tests.support.direct_conversation import DirectConversation

TEMPLATE = (
    "{% for message in messages %}<start>{{ message['role'] }}:{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant:{% endif %}"
)
SPECIAL = ["<unk>", "<start>", "<end>", "ab"]
"""The last is a word of two letters, which is also the token of these letters side by side."""
LETTERS = "abcdefghijklmnopqrstuvwxyz:␂␃"
END = SPECIAL.index("<end>")
SETTINGS = SamplingSettings(max_new_tokens=8)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {text: number for number, text in enumerate([*SPECIAL, *LETTERS])}
    core = Tokenizer(models.BPE(vocabulary, [("a", "b")], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    fast_tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", chat_template=TEMPLATE)
    fast_tokenizer.add_special_tokens({"additional_special_tokens": ["<start>", "<end>"]})
    return fast_tokenizer


class Script:
    """Answers with these tokens, one answer a call."""

    def __init__(self, tokenizer: Any, answers: Sequence[list[int]]) -> None:
        self._tokenizer, self._answers = tokenizer, list(answers)
        self.asked: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest, settings: SamplingSettings) -> GenerationOutput:
        self.asked.append(request)
        tokens = self._answers[len(self.asked) - 1]
        await asyncio.sleep(0)
        return GenerationOutput(
            token_ids=np.array(tokens, dtype=np.int32),
            logprobs=-np.arange(len(tokens), dtype=np.float32),
            text=self._tokenizer.decode(tokens, skip_special_tokens=True),
            stop_reason="stop" if tokens[-1] == END else "length",
            spans=[Span(0, len(tokens), 5)],
        )


@pytest.fixture
def talk(tokenizer: Any) -> Callable[..., tuple[DirectConversation, Script]]:
    def begin(*answers: list[int], longest: int = 200) -> tuple[DirectConversation, Script]:
        engine = Script(tokenizer, answers)
        return DirectConversation(
            engine, SETTINGS, PromptRenderer(tokenizer, PromptFormat()), lambda turn: 100 + turn, longest
        ), engine

    return begin


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def test_a_chat_goes_on_from_the_very_tokens_that_were_sampled(talk: Any, tokenizer: Any) -> None:
    # "a" and "b" as two tokens: put into tokens again, this text would be one.
    apart = [tokenizer.convert_tokens_to_ids("a"), tokenizer.convert_tokens_to_ids("b")]
    assert ids(tokenizer, "ab") == [SPECIAL.index("ab")]
    conversation, engine = talk([*apart, END], apart)
    first = await conversation.chat([user("hi")], None, None)
    assert first.output.text == "ab"
    answered = {"role": "assistant", "content": [{"type": "text", "text": "ab"}], "tool_calls": None}
    await conversation.chat([user("hi"), answered, user("more")], None, None)
    begin = ids(tokenizer, "<start>user:hi<end><start>assistant:")
    between = ids(tokenizer, "<start>user:more<end><start>assistant:")  # the end was sampled
    assert engine.asked[0].prompt_ids.tolist() == begin
    assert engine.asked[1].prompt_ids.tolist() == [*begin, *apart, END, *between]
    assert [request.seed for request in engine.asked] == [100, 101]
    assert conversation.last.tokens.tolist() == [*begin, *apart, END, *between, *apart]


async def test_an_agents_turns_are_rendered_by_the_task_and_by_its_call(tokenizer: Any) -> None:
    template = (
        "{% for t in tools or [] %}{{ t.name }}{% endfor %}"
        "{% for m in messages %}<start>{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<start>{{ mood }}:{% endif %}"
    )
    prompts = PromptFormat(chat_template=template, chat_template_kwargs={"mood": "x"}, tools=[{"name": "f"}])
    engine = Script(tokenizer, [[7, END], [8, END], [9, END]])
    talk = DirectConversation(engine, SETTINGS, PromptRenderer(tokenizer, prompts), lambda turn: turn, 200)
    messages: list[dict[str, Any]] = [user("hi")]
    for tools, variables in ((None, None), ([{"name": "g"}], {"mood": "y"}), (None, None)):
        answer = await talk.chat(messages, tools, None, variables)
        messages += [{"role": "assistant", "content": answer.output.text}, user([{"type": "text", "text": "more"}])]
    segments = [[tokenizer.decode(piece) for piece in segment.pieces[::2]] for segment in talk.list_segments()]
    assert segments == [
        ["f<start>hi<end><start>x:", "<start>more<end><start>e<end><start>more<end><start>x:"],
        ["g<start>hi<end><start>d<end><start>more<end><start>y:"],
    ], "other tools stand before what was sampled"


async def test_the_end_of_a_message_that_was_cut_off_is_given_not_sampled(talk: Any, tokenizer: Any) -> None:
    letter = tokenizer.convert_tokens_to_ids("c")
    conversation, engine = talk([letter], [letter, END])
    await conversation.chat([user("hi")], None, 1)
    await conversation.chat([user("hi"), {"role": "assistant", "content": "c"}, user("x")], None, None)
    between = ids(tokenizer, "<end><start>user:x<end><start>assistant:")
    assert engine.asked[1].prompt_ids.tolist()[-len(between) - 1 :] == [letter, *between]
    assert engine.asked[0].max_new_tokens == 1


async def test_completions_go_on_as_text_and_as_tokens(talk: Any, tokenizer: Any) -> None:
    conversation, engine = talk([5, 6, END], [7], [8])
    first = await conversation.complete("xy", None)
    await conversation.complete("xy" + first.output.text + "z", None)
    await conversation.complete([*conversation.last.tokens.tolist(), 9], None)
    begin = ids(tokenizer, "xy")
    assert engine.asked[1].prompt_ids.tolist() == [*begin, 5, 6, END, *ids(tokenizer, "z")]
    assert engine.asked[2].prompt_ids.tolist() == [*engine.asked[1].prompt_ids.tolist(), 7, 9]


@pytest.mark.parametrize(
    ("second", "context"),
    [
        (
            [user("hi"), {"role": "assistant", "content": "b"}, user("x")],
            "user:hi<end><start>assistant:b<end><start>user:x",
        ),
        ([user("hi")], "user:hi"),
        (
            [user("ho"), {"role": "assistant", "content": "c"}, user("x")],
            "user:ho<end><start>assistant:c<end><start>user:x",
        ),
    ],
    ids=["edited answer", "second answer", "edited question"],
)
async def test_a_call_that_continues_nothing_begins_a_segment(
    talk: Any, tokenizer: Any, second: list[dict[str, str]], context: str
) -> None:
    letter = tokenizer.convert_tokens_to_ids("c")
    conversation, engine = talk([letter, END], [END], [letter])
    await conversation.chat([user("hi")])
    await conversation.chat(second)
    await conversation.chat([user("hi"), {"role": "assistant", "content": "c"}, user("x")])
    assert engine.asked[1].prompt_ids.tolist() == ids(tokenizer, f"<start>{context}<end><start>assistant:")
    first, second_segment = conversation.list_segments()
    between = ids(tokenizer, "<start>user:x<end><start>assistant:")
    begin = ids(tokenizer, "<start>user:hi<end><start>assistant:")
    assert [piece.tolist() for piece in first.pieces] == [begin, [letter, END], between, [letter]]
    assert [piece.tolist() for piece in second_segment.pieces] == [engine.asked[1].prompt_ids.tolist(), [END]]


async def test_a_shortened_history_continues_the_response_that_it_still_has(talk: Any, tokenizer: Any) -> None:
    apart = [tokenizer.convert_tokens_to_ids("a"), tokenizer.convert_tokens_to_ids("b")]
    letter = tokenizer.convert_tokens_to_ids("c")
    conversation, _ = talk([*apart, END], [letter, END], [letter])
    messages = [user("hi"), {"role": "assistant", "content": "ab"}]
    await conversation.chat([user("hi")])
    await conversation.chat([*messages, user("x")])
    await conversation.chat([*messages, user("y")])
    first, branch = conversation.list_segments()
    begin = ids(tokenizer, "<start>user:hi<end><start>assistant:")
    between = ids(tokenizer, "<start>user:y<end><start>assistant:")
    assert [piece.tolist() for piece in branch.pieces] == [[*begin, *apart, END, *between], [letter]]
    assert len(first.outputs) == 2


async def test_a_call_without_room_is_refused_and_leaves_nothing(talk: Any, tokenizer: Any) -> None:
    conversation, engine = talk([tokenizer.convert_tokens_to_ids("c"), END], [END], longest=80)
    answered = [user("hi"), {"role": "assistant", "content": "c"}]
    await conversation.chat([user("hi")])
    with pytest.raises(BadCallError, match="leave no room within"):
        await conversation.chat([*answered, user("x" * 60)])
    await conversation.chat([*answered, user("x")])
    assert len(engine.asked) == 2
    assert len(conversation.list_segments()) == 1


async def test_calls_at_the_same_time_have_a_limit(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{TooManyCallsError.__module__}.OPEN_CALLS", 2)
    engine = Script(tokenizer, [[5], [6], [7]])
    conversation = DirectConversation(
        engine, SETTINGS, PromptRenderer(tokenizer, PromptFormat()), lambda turn: turn, 100
    )
    calls = (conversation.complete("a") for _ in range(3))
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(answer, TooManyCallsError) for answer in answers] == [False, False, True]
    assert [request.seed for request in engine.asked] == [0, 1], "every response has a seed of its own"


def test_tokens_that_the_model_has_not_are_refused(talk: Any) -> None:
    conversation, _ = talk([END])
    with pytest.raises(BadCallError, match="outside the model's vocabulary"):
        asyncio.run(conversation.complete([1, 10**6], None))


async def test_after_its_end_a_call_under_way_is_given_up(tokenizer: Any) -> None:
    class Forever:
        def __init__(self) -> None:
            self.cancelled = False

        async def generate(self, request: GenerationRequest, settings: SamplingSettings) -> GenerationOutput:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled = True
                raise
            raise AssertionError("it is not answered")

    engine = Forever()
    conversation = DirectConversation(
        engine, SETTINGS, PromptRenderer(tokenizer, PromptFormat()), lambda turn: turn, 100
    )
    call = asyncio.create_task(conversation.complete("a", None))
    await asyncio.sleep(0.01)
    conversation.end()
    with pytest.raises(BadCallError, match="the rollout is over"):
        await call
    with pytest.raises(BadCallError, match="the rollout is over"):
        await conversation.complete("a", None)
    assert engine.cancelled
    assert not conversation.responses


GENERIC = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<start>{{ m.role }}:{{ m.content }}<end>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<start>assistant:{% endif %}"
)
"""A template that shows neither system messages nor results nor tools."""


@pytest.mark.parametrize(
    ("message", "tools", "field"),
    [
        ({"role": "developer", "content": "be brief"}, None, "message 1, of the role developer"),
        ({"role": "context", "content": "a b"}, None, "message 1, of the role context"),
        ({"role": "tool", "content": "a b", "tool_call_id": "call00001"}, None, "message 1, of the role tool"),
        (user("more"), [{"name": "f"}], "the tools"),
    ],
)
def test_a_call_whose_message_the_template_leaves_out_is_refused(
    tokenizer: Any, message: dict[str, Any], tools: Any, field: str
) -> None:
    """The model would answer without it, and the agent would not know."""
    engine = Script(tokenizer, [[7, END], [8, END]])
    prompts = PromptFormat(chat_template=GENERIC, system_prompt=None)
    talk = DirectConversation(engine, SETTINGS, PromptRenderer(tokenizer, prompts), lambda turn: turn, 200)
    with pytest.raises(BadCallError, match=f"the chat template leaves out {field}, so the model would not see it"):
        asyncio.run(talk.chat([message, user("hi")], tools))
    assert not engine.asked
    asyncio.run(talk.chat([user("hi")]))
    answered = {"role": "assistant", "content": talk.last.output.text}
    later = field.replace("message 1", "message 3")
    with pytest.raises(BadCallError, match=f"leaves out {later}"):
        asyncio.run(talk.chat([user("hi"), answered, message, user("more")], tools))


async def test_a_call_that_ends_in_the_assistants_turn_is_continued(talk: Any, tokenizer: Any) -> None:
    """As a prompt of the data; the tokens of later calls go on from those that were sampled."""
    conversation, engine = talk([7, END], [8, END])
    opened = [user("hi"), {"role": "assistant", "content": "a"}]
    first = await conversation.chat(opened)
    await conversation.chat([*opened, {"role": "assistant", "content": first.output.text}, user("more")])
    begin = ids(tokenizer, "<start>user:hi<end><start>assistant:a")
    assert engine.asked[0].prompt_ids.tolist() == begin
    between = ids(tokenizer, "<start>user:more<end><start>assistant:")
    assert engine.asked[1].prompt_ids.tolist() == [*begin, 7, END, *between]
