"""Every path reads the same conversations alike: prompts, rows, pairs, reward models and the calls of agents."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from jinja2 import TemplateError

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.trajectory import Span
from megatron_grpo.config.data_schema import RewardModelConfig
from megatron_grpo.config.errors import RunError
from megatron_grpo.data.omissions import find_omissions
from megatron_grpo.data.processors import TaskDataSpec, math_data_processor
from megatron_grpo.data.prompt_renderer import PromptFormat, PromptRenderer
from megatron_grpo.data.supervised_rows import (
    preference_data_processor,
    score_data_processor,
    supervised_data_processor,
)
from megatron_grpo.environments.reward_model import RewardModel
from megatron_grpo.rollouts.call_prompts import BadCallError
from megatron_grpo.rollouts.responses_protocol import read_messages
from tests.support.direct_conversation import DirectConversation
from tests.support.released.layout import Layout
from tests.support.released.table import ADD, BY_NAME
from tests.support.released.templates import read_released_template

Messages = list[dict[str, Any]]
LONGEST = 4000
SPEC = TaskDataSpec(task_name="math", answer_key=None, prompt_key="messages")


def user(content: Any = "Quail?") -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any = "Answer.", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def message(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def call(arguments: Any) -> list[dict[str, Any]]:
    return [{"id": "call00001", "type": "function", "function": {"name": "add", "arguments": arguments}}]


SUM = {"a": 8253, "b": 1}
RESULT = message("tool", "Walrus", name="add", tool_call_id="call00001")


@dataclass(frozen=True)
class Case:
    """A conversation as data has it, and as transformers reads it."""

    messages: Messages
    """The last one is the response to score or to learn."""
    plain: Messages | None = None
    """The same with joined parts, arguments as objects and no keys that templates do not know; None: as it is."""
    tools: Any = None
    learnt: list[str] = field(default_factory=lambda: ["Answer."])
    """Texts of the turns of the assistant that are learnt from the whole conversation."""

    @property
    def canonical(self) -> Messages:
        return self.messages if self.plain is None else self.plain

    @property
    def given_roles(self) -> Messages:
        """The plain messages by the roles of the data, which some templates know."""
        pairs = zip(self.canonical, self.messages, strict=True)
        return [plain | {"role": turn["role"]} for plain, turn in pairs]


CALLED = [user(), assistant("", tool_calls=call(SUM)), RESULT, assistant()]
CASES: dict[str, Case] = {
    "a question": Case([user(), assistant()]),
    "a system message": Case([message("system", "Yak"), user(), assistant()]),
    "a developer's message": Case(
        [message("developer", "Yak"), user(), assistant()], [message("system", "Yak"), user(), assistant()]
    ),
    "a developer's later message": Case(
        [user(), assistant("First."), message("developer", "Yak"), user("Newt?"), assistant()],
        [user(), assistant("First."), message("system", "Yak"), user("Newt?"), assistant()],
        learnt=["First.", "Answer."],
    ),
    "two turns": Case([user(), assistant("First."), user("Newt?"), assistant()], learnt=["First.", "Answer."]),
    "parts of text": Case(
        [user([{"type": "text", "text": "Quail?"}]), assistant([{"type": "text", "text": "Answer."}])],
        [user(), assistant()],
    ),
    "null keys": Case([user() | {"name": None, "tool_calls": None}, assistant(tool_calls=[])], [user(), assistant()]),
    "a call and its result": Case(CALLED, tools=[ADD], learnt=["add", "Answer."]),
    "arguments as text": Case(
        [user(), assistant("", tool_calls=call(json.dumps(SUM))), RESULT, assistant()],
        CALLED,
        tools=[ADD],
        learnt=["add", "Answer."],
    ),
    "tools as text": Case(CALLED, tools=json.dumps([ADD]), learnt=["add", "Answer."]),
    "a list of tools as texts": Case(CALLED, tools=[json.dumps(ADD)], learnt=["add", "Answer."]),
    "tools without calls": Case([user(), assistant()], tools=[ADD]),
    "the older names of calls and results": Case(
        [
            user(),
            assistant("", function_call={"name": "add", "arguments": json.dumps(SUM)}),
            message("function", "Walrus", name="add"),
            assistant(),
        ],
        [
            user(),
            assistant("", tool_calls=[{"type": "function", "function": {"name": "add", "arguments": SUM}}]),
            message("tool", "Walrus", name="add"),
            assistant(),
        ],
        learnt=["add", "Answer."],
    ),
    "a role that nobody knows": Case([user(), message("context", "Walrus"), assistant()]),
    "a weight of 0": Case(
        [user(), assistant("First.", weight=0), user("Newt?"), assistant(weight=1)],
        [user(), assistant("First."), user("Newt?"), assistant()],
    ),
    "a mask of 0": Case(
        [user(), assistant("First.", loss_mask=0), user("Newt?"), assistant(loss_mask=1)],
        [user(), assistant("First."), user("Newt?"), assistant()],
    ),
    "a turn not to be trained": Case(
        [user(), assistant("First.", train=False), user("Newt?"), assistant(trainable=True)],
        [user(), assistant("First."), user("Newt?"), assistant()],
    ),
    "thoughts": Case([user(), assistant(reasoning_content="Otter")], learnt=["OtterAnswer."]),
    "thoughts by a newer name": Case(
        [user(), assistant(reasoning="Otter")], [user(), assistant(reasoning_content="Otter")], learnt=["OtterAnswer."]
    ),
    "thoughts of gpt-oss": Case(
        [user(), assistant(thinking="Otter")], [user(), assistant(reasoning_content="Otter")], learnt=["OtterAnswer."]
    ),
}
WORDS = ("Yak", "Quail?", "Newt?", "First.", "Answer.", "Walrus", "Otter")
NAMES = ["qwen2_5", "qwen3", "llama_3_1", "phi_4", "gemma_3", "glm_4_5", "mistral_small", "gpt_oss", "minimax_m2"]


def render(layout: Layout, case: Case, count: int, **options: Any) -> str | None:
    """transformers' rendering of the first messages; None: it is refused, or a message, call or tool is missing."""
    tools = None if case.tools is None else [ADD]
    for messages in (case.given_roles[:count], case.canonical[:count]):
        if layout.name == "gpt_oss":  # its thoughts have a name of their own
            names = {"reasoning_content": "thinking"}
            messages = [{names.get(key, key): value for key, value in message.items()} for message in messages]
        try:
            text = layout.render(messages, tools=tools, **options)
            without_tools = layout.render(messages, **options)
        except (TemplateError, TypeError, KeyError, AttributeError):
            continue
        words = [word for word in WORDS for message in messages if word in str(message["content"])]
        words += ["8253" for message in messages if "tool_calls" in message]
        if all(word in text for word in words) and (tools is None or text != without_tools):
            return text
    return None


class Recorder:
    """An engine that keeps the prompts."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    async def generate(self, request: GenerationRequest, settings: SamplingSettings) -> GenerationOutput:
        self.prompts.append(request.prompt_ids.tolist())
        sampled = np.array([5], dtype=np.int32)
        logprobs = np.zeros(1, dtype=np.float32)
        return GenerationOutput(
            token_ids=sampled, logprobs=logprobs, text="x", stop_reason="stop", spans=[Span(0, 1, 0)]
        )


def ask(layout: Layout, messages: Messages, tools: Any) -> list[int]:
    engine: Any = Recorder()
    renderer = PromptRenderer(layout.oracle, PromptFormat())
    conversation = DirectConversation(
        engine, SamplingSettings(max_new_tokens=4), renderer, lambda number: number, LONGEST
    )
    asyncio.run(conversation.chat(messages, tools))
    (prompt,) = engine.prompts
    return list(prompt)


def to_items(messages: Messages) -> Messages:
    """Messages as items of the protocol of responses."""
    items: Messages = []
    for message in messages:
        for one_call in message.get("tool_calls") or []:
            function = one_call["function"]
            items.append({"type": "function_call", "call_id": one_call["id"], **function})
        if message["role"] == "tool":
            items.append(
                {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
            )
        elif message["content"]:
            items.append({"role": message["role"], "content": message["content"]})
    return items


def tokens_of(log: Any) -> list[int]:
    return [token for part in log for token in part["token_ids"]]


def score(layout: Layout, messages: Messages, tools: Any) -> list[int]:
    """The tokens that a reward model of this tokenizer scores."""
    model = RewardModel.__new__(RewardModel)
    model._config = RewardModelConfig()
    model._texts = PromptRenderer(layout.oracle, PromptFormat(apply_chat_template=False))
    model._conversations = PromptRenderer(layout.oracle, PromptFormat())
    return model._encode(messages[:-1], messages[-1:], tools)


def read_prompts(layout: Layout, case: Case) -> dict[str, Callable[[], list[int]]]:
    """The prompt before the last message, by each path that samples after it."""
    prompt, listed = case.messages[:-1], None if case.tools is None else [ADD]
    row = {"messages": prompt, "tools": case.tools}

    def read_row() -> list[int]:
        renderer = PromptRenderer(layout.oracle, PromptFormat())
        if omissions := [part for part in find_omissions(renderer, prompt, tools=listed) if not part.are_thoughts]:
            raise ValueError(f"remarked on: {omissions}")  # what the start of a run says
        return tokens_of(math_data_processor(row, SPEC, layout.oracle, LONGEST, 0)["message_log"])

    paths = {"prompt": read_row, "chat": lambda: ask(layout, prompt, listed)}
    if not any("function_call" in message or message["role"] == "function" for message in prompt):
        paths["responses"] = lambda: ask(layout, read_messages({"input": to_items(prompt)}, {}), listed)
    return paths


def read_whole(layout: Layout, case: Case) -> dict[str, Callable[[], list[int]]]:
    """The whole conversation by both sides of a reward model."""
    messages, tokenizer = case.messages, layout.oracle
    pair = {"chosen": messages, "rejected": [*messages[:-1], assistant("Worse.")], "tools": case.tools}
    return {
        "scored row": lambda: tokens_of(score_data_processor(pair, SPEC, tokenizer, LONGEST, 0)["message_log"]),
        "reward model": lambda: score(layout, messages, case.tools),
    }


@pytest.mark.parametrize("name", NAMES)
def test_paths_agree_with_transformers(name: str) -> None:
    """Each path has the tokens of transformers' own rendering, or all refuse what a template leaves out."""
    layout, accepted = BY_NAME[name], set()
    for title, case in CASES.items():
        prompt = render(layout, case, len(case.messages) - 1)
        full_text = render(layout, case, len(case.messages), add_generation_prompt=False)
        lacks_thoughts = "thoughts" in title and "Otter" not in str(full_text)
        for expected, paths in ((prompt, read_prompts(layout, case)), (full_text, read_whole(layout, case))):
            for path, read in paths.items():
                # Thoughts to learn from have to be in the text; a reward model may score responses without them.
                if expected is None or (lacks_thoughts and path == "scored row"):
                    with pytest.raises((ValueError, RunError, BadCallError)):
                        print(name, title, path, layout.oracle.decode(read()))
                    continue
                assert read() == layout.ids(expected), f"{name}: {title}, {path}"
                accepted.add(title)
    assert len(accepted) >= 10, accepted


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_pairs_learn_the_same_turns(name: str) -> None:
    """Tokens are those of transformers, and those in the loss are of the turns that the row names."""
    layout, learnt_titles = BY_NAME[name], set()
    for title, case in CASES.items():
        full_text = render(layout, case, len(case.messages), add_generation_prompt=False)
        row: Mapping[str, Any] = {"messages": case.messages, "tools": case.tools}
        try:
            log = supervised_data_processor(dict(row), SPEC, layout.oracle, LONGEST, 0)["message_log"]
        except ValueError:  # also where a turn begins otherwise than it is sampled
            continue
        assert full_text is not None, f"{name}: {title} is learnt without a part"
        assert "thoughts" not in title or "Otter" in full_text, f"{name}: {title} is learnt without its thoughts"
        ids = tokens_of(log)
        # Turns of GLM-4.5 end with the beginning of the next message, which the text of a whole conversation lacks.
        full_ids = layout.ids(full_text) + ([layout.id(layout.end)] if name == "glm_4_5" else [])
        assert ids == full_ids[: len(ids)], f"{name}: {title}"
        texts = [layout.oracle.decode(part["token_ids"]) for part in log if part["role"] == "assistant"]
        assert len(texts) == len(case.learnt), f"{name}: {title}"
        for text, words in zip(texts, case.learnt, strict=True):
            assert all(word in text for word in WORDS if word in words), f"{name}: {title} {text}"
        learnt_titles.add(title)
        pair = {"chosen": case.messages, "rejected": [*case.messages[:-1], assistant("Worse.")], "tools": case.tools}
        spec = TaskDataSpec(task_name="math", answer_key=None)
        chosen = preference_data_processor(pair, spec, layout.oracle, LONGEST, 0)["message_log"]
        assert tokens_of(chosen) == ids, f"{name}: {title}, pair"
        assert chosen[-1] == log[-1]
    assert len(learnt_titles) >= (0 if name == "minimax_m2" else 8), learnt_titles


@pytest.mark.parametrize(("template", "name"), [("qwen2_5", "qwen2_5"), ("qwen3", "qwen3"), ("llama3", "llama_3_1")])
def test_masks_are_those_of_trl(template: str, name: str) -> None:
    """TRL's templates for training mark what it learns, of conversations without marks of their own."""
    tokenizer, source, count = BY_NAME[name].oracle, read_released_template(f"{template}_training"), 0
    for title, case in CASES.items():
        if any(key in message for message in case.messages for key in ("weight", "loss_mask", "train")):
            continue
        tools = None if case.tools is None else [ADD]
        options: Any = {"return_dict": True, "return_assistant_tokens_mask": True, "tools": tools}
        try:
            row = {"messages": case.messages, "tools": case.tools}
            spec = TaskDataSpec(task_name="math", answer_key=None, prompt_key="messages", chat_template=source)
            log = supervised_data_processor(row, spec, tokenizer, LONGEST, 0)["message_log"]
        except ValueError:
            continue
        marked = tokenizer.apply_chat_template(case.canonical, chat_template=source, **options)
        pairs = zip(marked["input_ids"], marked["assistant_masks"], strict=True)
        expected = "".join(tokenizer.decode([token for token, is_learnt in pairs if is_learnt]).split())
        learnt = tokenizer.decode([token for part in log if part["role"] == "assistant" for token in part["token_ids"]])
        assert "".join(learnt.split()) == expected, title
        count += 1
    assert count >= 8
