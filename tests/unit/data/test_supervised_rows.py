"""Tokens in the loss of a conversation are those of its assistant turns, in released templates and against TRL's."""

import re
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from megatron_grpo.config.data_schema import PREFERENCE, SUPERVISED, DataConfig, DatasetConfig
from megatron_grpo.data.chat_template import render_chat
from megatron_grpo.data.processors import TaskDataSpec
from megatron_grpo.data.prompt_renderer import PromptFormat, PromptRenderer
from megatron_grpo.data.rows import RowCheck
from megatron_grpo.data.supervised_rows import (
    encode_conversation,
    find_label_problem,
    labelled_data_processor,
    preference_data_processor,
    score_data_processor,
    supervised_data_processor,
)
from megatron_grpo.models.source import VOCABULARY
from megatron_grpo.prepare.models import make_tokenizer
from tests.support.foreign_tokenizers import byte_level
from tests.support.released.layout import Layout
from tests.support.released.table import BY_NAME, LAYOUTS, SYSTEM, USER, calls, results
from tests.support.released.templates import read_released_template

ANSWER = {"role": "assistant", "content": "There are 12."}
SECOND = [{"role": "user", "content": "And one more?"}, {"role": "assistant", "content": "So 13."}]
THOUGHTFUL = {"role": "assistant", "content": "<think>\nhmm\n</think>\n\nThere are 12."}
TOOLS = [USER, {"role": "assistant", "content": "", "tool_calls": calls(1)}, *results(1), ANSWER]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER, ANSWER],
    "system": [SYSTEM, USER, ANSWER],
    "two": [USER, ANSWER, *SECOND],
    "thought": [USER, THOUGHTFUL],
    "tools": TOOLS,
}
REFUSED = {
    "one": {"qwen3_5", "r1_distill_llama", "r1_distill_qwen", "minimax_m2", "glm_5", "nemotron_3_nano"}
    | {"qwen3_next_thinking"},
    "thought": {"r1_distill_llama", "r1_distill_qwen", "minimax_m2", "glm_4", "glm_5"},
}
"""Templates whose prompts open thoughts that the whole conversation has otherwise, or that drop thoughts."""
OTHER_ENDS = {"gpt_oss", "olmo_3"}
"""Templates whose turns end with another token where they are not the last."""
ENDLESS = {"glm_4_5", "glm_4", "glm_5"}
"""Templates whose turns end where the next begins, so that the last turn of a conversation has no end."""


def encode(layout: Layout, messages: list[dict[str, Any]]) -> list[tuple[str, list[int]]]:
    """(role, token ids) of the parts."""
    parts = encode_conversation(PromptRenderer(layout.oracle, PromptFormat()), messages, None)
    return [(part["role"], part["token_ids"]) for part in parts]


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_turns_follow_the_tokens_that_are_sampled_after(name: str) -> None:
    """Against transformers' rendering of the whole conversation and of each prompt, in all released templates."""
    messages, accepted = CONVERSATIONS[name], set()
    for layout in LAYOUTS:
        try:
            parts = encode(layout, messages)
        except ValueError:
            continue
        accepted.add(layout.name)
        truth = layout.truth
        full_ids = truth.encode(layout.render(messages, add_generation_prompt=False), add_special_tokens=False).ids
        full_ids += [layout.id(layout.end)] if layout.name in ENDLESS else []
        ids = [token for _, part in parts for token in part]
        assert ids == full_ids[: len(ids)], layout.name
        position, turns = 0, iter([n for n, message in enumerate(messages) if message["role"] == "assistant"])
        for role, part in parts:
            if role == "assistant":
                number = next(turns)
                prompt = truth.encode(layout.render(messages[:number]), add_special_tokens=False).ids
                assert ids[:position] == prompt, f"{layout.name}: the prompt that the turn is sampled after"
                text = truth.decode(part, skip_special_tokens=False)
                assert messages[number]["content"].rpartition("\n")[2] in text
                end = (layout.tool_end or layout.end) if "tool_calls" in messages[number] else layout.end
                assert layout.name in OTHER_ENDS or text.endswith(end), layout.name
            position += len(part)
        assert next(turns, None) is None
    assert len(accepted) >= (10 if name == "tools" else 20)
    if name in REFUSED:
        assert {layout.name for layout in LAYOUTS} - accepted == REFUSED[name]


@pytest.mark.parametrize(
    ("template", "layout"),
    [("qwen2_5", "qwen2_5"), ("qwen3", "qwen2_5"), ("llama3", "llama_3_1"), ("gemma3", "gemma_3")],
)
@pytest.mark.parametrize("name", ["one", "two"])
def test_the_tokens_are_those_that_trl_marks(template: str, layout: str, name: str) -> None:
    """TRL's templates for training have {% generation %} around what it learns, which may have a blank at the end."""
    tokenizer: PreTrainedTokenizerFast = BY_NAME[layout].oracle
    messages = CONVERSATIONS[name]
    marked = tokenizer.apply_chat_template(
        messages,
        chat_template=read_released_template(f"{template}_training"),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    pairs = zip(marked["input_ids"], marked["assistant_masks"], strict=True)
    expected = tokenizer.decode([token for token, is_learnt in pairs if is_learnt])
    renderer = PromptRenderer(tokenizer, PromptFormat(chat_template=read_released_template(f"{template}_training")))
    parts = encode_conversation(renderer, messages, None)
    learnt = tokenizer.decode([token for part in parts if part["role"] == "assistant" for token in part["token_ids"]])
    assert "".join(learnt.split()) == "".join(expected.split())


MIDDLE = [USER, ANSWER, {"role": "system", "content": "Be brief."}, *SECOND]
"""An instruction between the turns."""


@pytest.mark.parametrize("name", ["one", "two", "system", "tools", "middle"])
def test_a_turn_without_an_end_learns_the_beginning_of_the_next_message(name: str) -> None:
    """GLM stops where the next message begins: TRL's template for training marks these tokens, the released one not."""
    layout, messages = BY_NAME["glm_4_5"], {**CONVERSATIONS, "middle": MIDDLE}[name]
    marked = layout.oracle.apply_chat_template(
        messages,
        chat_template=read_released_template("glm4moe_training"),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    pairs = zip(marked["input_ids"], marked["assistant_masks"], strict=True)
    expected = layout.oracle.decode([token for token, is_learnt in pairs if is_learnt])
    learnt = layout.oracle.decode(
        [token for role, part in encode(layout, messages) if role == "assistant" for token in part]
    )
    assert "".join(learnt.split()) == "".join(expected.split())
    assert learnt.count("<|") == sum(message["role"] == "assistant" for message in messages)


ROLES = {
    "tokens": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}",
    "lines": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}",
    "plain": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
}
PROMPTS = {"tokens": "<|assistant|>", "lines": "<|assistant|>\n", "plain": "assistant: "}


@pytest.mark.parametrize(("form", "end"), [("tokens", "<|user|>"), ("lines", "\n<|user|>"), ("plain", "")])
def test_turns_of_a_template_without_ends(form: str, end: str) -> None:
    """Where no token begins a message there is nothing to stop at."""
    core = byte_level(["<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>"])
    template = ROLES[form] + "{% if add_generation_prompt %}" + PROMPTS[form] + "{% endif %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>", chat_template=template)
    parts = encode_conversation(PromptRenderer(tokenizer, PromptFormat()), CONVERSATIONS["two"], None)
    learnt = [tokenizer.decode(part["token_ids"]) for part in parts if part["role"] == "assistant"]
    ends = [end or "\n"] * 2
    assert learnt == [f"There are 12.{ends[0]}", f"So 13.{ends[1]}"]


@pytest.mark.parametrize("template", ["phi3", "phi3_5"])
@pytest.mark.parametrize("answer", ["yes", "e", "end", "<", "|", "|>", "d|", "n", "<|end"])
def test_a_turn_ends_with_its_own_end_whatever_its_text(template: str, answer: str) -> None:
    """Phi's end of a turn is followed by the end of a text, and answers may be letters of either."""
    core = byte_level(["<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|endoftext|>", chat_template=read_released_template(template)
    )
    for later in ([], SECOND):
        messages = [USER, {"role": "assistant", "content": answer}, *later]
        parts = encode_conversation(PromptRenderer(tokenizer, PromptFormat()), messages, None)
        learnt = [tokenizer.decode(part["token_ids"]) for part in parts if part["role"] == "assistant"]
        assert learnt[0] == f"{answer}<|end|>"


def test_dropped_thoughts_are_refused() -> None:
    with pytest.raises(ValueError, match="leaves out the thoughts of message 2, the assistant's"):
        encode(BY_NAME["qwen3"], [USER, THOUGHTFUL, *SECOND])


def test_other_beginnings_are_refused() -> None:
    with pytest.raises(ValueError, match="renders what precedes message 2, the assistant's, otherwise"):
        encode(BY_NAME["r1_distill_qwen"], [USER, ANSWER])


@pytest.mark.parametrize("greetings", [1, 2])
def test_turns_that_no_prompt_precedes_are_named(greetings: int) -> None:
    """A greeting behind the system message, before the first question."""
    hello = {"role": "assistant", "content": "Hello!"}
    with pytest.raises(ValueError, match=r"refuses what precedes message 2, .* as a prompt, .*No user query found"):
        encode(BY_NAME["qwen3_5"], [SYSTEM, *[hello] * greetings, USER, ANSWER])
    # The whole conversation has no question either.
    with pytest.raises(ValueError, match="refuses the conversation: No user query found"):
        encode(BY_NAME["qwen3_5"], [SYSTEM, *[hello] * greetings])


def test_a_response_alone_is_learnt_after_a_conversation() -> None:
    renderer = PromptRenderer(BY_NAME["qwen2_5"].oracle, PromptFormat())
    parts = encode_conversation(renderer, [USER, ANSWER, SECOND[0]], "So 13.")
    assert [(part["role"], part["content"]) for part in parts][1:] == [("assistant", "So 13.<|im_end|>")]
    assert parts == encode_conversation(renderer, [USER, ANSWER, SECOND[0]], [SECOND[1]])


def supervised_spec(**settings: Any) -> TaskDataSpec:
    return TaskDataSpec(task_name="addition", answer_key=None, **{"apply_chat_template": False, **settings})


def test_a_plain_response_ends_with_the_end_of_sequence() -> None:
    tokenizer = make_tokenizer(VOCABULARY, 64)
    row = {"prompt": "12+30=", "answer": "042"}
    datum = supervised_data_processor(row, supervised_spec(response_key="answer"), tokenizer, 32, 7)
    expected = [
        [VOCABULARY[letter] for letter in "12+30="],
        [*(VOCABULARY[letter] for letter in "042"), VOCABULARY["<eos>"]],
    ]
    assert [message["token_ids"] for message in datum["message_log"]] == expected
    assert [message["role"] for message in datum["message_log"]] == ["user", "assistant"]
    assert (datum["length"], datum["loss_multiplier"], datum["idx"]) == (10, 1.0, 7)
    too_long = supervised_data_processor(row, supervised_spec(response_key="answer"), tokenizer, 9, 7)
    assert too_long["loss_multiplier"] == 0
    with pytest.raises(ValueError, match=r"row 7: the conversation has 10 tokens, more than .*=9"):
        supervised_data_processor(row, supervised_spec(response_key="answer", long_prompts="error"), tokenizer, 9, 7)


@pytest.mark.parametrize(
    ("row", "settings", "problem"),
    [
        ({"prompt": "2+3="}, {"response_key": "response"}, r"no column 'response' \(data.response_key\)"),
        ({"prompt": "2+3=", "response": 5}, {"response_key": "response"}, "column 'response' is neither a text nor"),
        ({"prompt": "2+3="}, {}, "its response is in another; name that in data.response_key"),
        ({"prompt": [{"role": "user", "content": "a"}]}, {}, "has no message of the assistant to learn from"),
        ({"prompt": [USER, ANSWER]}, {"apply_chat_template": False}, "needs data.apply_chat_template=true"),
        ({"messages": [USER, ANSWER]}, {}, r"no column 'prompt' \(data.prompt_key\)"),
    ],
)
def test_rows_without_a_response_are_named(row: dict[str, Any], settings: dict[str, Any], problem: str) -> None:
    check = RowCheck(DatasetConfig(path="rows.jsonl"), DataConfig(**settings), {"math": SUPERVISED})
    refusal = check.convert(row)
    assert isinstance(refusal, str)
    assert re.search(problem, refusal), refusal


def test_pairs_may_have_their_prompt_in_common() -> None:
    """A row of conversations, as TRL takes them, is the pair of the row with the prompt in a column."""
    tokenizer = BY_NAME["qwen2_5"].oracle
    spec = TaskDataSpec(task_name="math", answer_key=None)
    worse = {"role": "assistant", "content": "There are 11."}
    rows = [
        {"chosen": [SYSTEM, USER, ANSWER], "rejected": [SYSTEM, USER, worse]},
        {"prompt": [SYSTEM, USER], "chosen": [ANSWER], "rejected": [worse]},
        {"prompt": [SYSTEM, USER], "chosen": ANSWER["content"], "rejected": worse["content"]},
    ]
    data = [preference_data_processor(row, spec, tokenizer, 1000, 0) for row in rows]
    assert data[0] == data[1] == data[2]
    learnt = [[part["content"] for part in log if part["role"] == "assistant"] for log in pair_of(data[0])]
    assert learnt == [["There are 12.<|im_end|>"], ["There are 11.<|im_end|>"]]
    assert data[0]["message_log"][0] == data[0]["rejected"][0], "the prompt"


@pytest.mark.parametrize("longer", ["chosen", "rejected"])
@pytest.mark.parametrize("process", [preference_data_processor, score_data_processor])
def test_a_pair_is_as_long_as_its_longer_response(process: Any, longer: str) -> None:
    spec = TaskDataSpec(task_name="math", answer_key=None)
    row = {"prompt": [USER], "chosen": "There are 12.", "rejected": "There are 11."}
    row[longer] = "Let me count them one by one: there are a dozen."
    tokenizer = BY_NAME["qwen2_5"].oracle
    datum = process(row, spec, tokenizer, 1000, 0)
    longest = max(sum(len(part["token_ids"]) for part in log) for log in pair_of(datum))
    assert (datum["length"], datum["loss_multiplier"]) == (longest, 1.0)
    assert process(row, spec, tokenizer, longest, 0)["loss_multiplier"] == 1.0
    assert process(row, spec, tokenizer, longest - 1, 0)["loss_multiplier"] == 0.0


def pair_of(datum: Any) -> list[Any]:
    return [datum["message_log"], datum["rejected"]]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a", "chosen": "b"}, r"no column 'rejected' \(data.rejected_key\)"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are equal, so that nothing can be learnt"),
        ({"chosen": "b", "rejected": "c"}, "its responses are no conversations from which it could be taken"),
        ({"chosen": [USER, ANSWER], "rejected": [SYSTEM, ANSWER]}, "its responses begin with different messages"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "column 'rejected' is neither a text nor"),
    ],
)
def test_rows_that_are_no_pairs_are_named(row: dict[str, Any], problem: str) -> None:
    refusal = RowCheck(DatasetConfig(path="rows.jsonl"), DataConfig(), {"math": PREFERENCE}).convert(row)
    assert isinstance(refusal, str)
    assert re.search(problem, refusal), refusal


def test_pairs_to_score_are_the_texts_that_reward_models_get() -> None:
    """The whole rendering, with the line break behind the last turn, and the margin."""
    tokenizer, spec = BY_NAME["qwen2_5"].oracle, TaskDataSpec(task_name="math", answer_key=None)
    worse = {"role": "assistant", "content": "There are 11."}
    row = {"prompt": [SYSTEM, USER], "chosen": [ANSWER], "rejected": [worse], "margin": 2}
    datum = score_data_processor(row, spec, tokenizer, 1000, 0)
    for log, answer in zip(pair_of(datum), (ANSWER, worse), strict=True):
        text = render_chat(tokenizer, [SYSTEM, USER, answer])
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert [token_id for part in log for token_id in part["token_ids"]] == expected
    assert datum["margin"] == 2.0
    with pytest.raises(ValueError, match="row 7: margin='much' is no number"):
        score_data_processor({**row, "margin": "much"}, spec, tokenizer, 1000, 7)


@pytest.mark.parametrize(
    ("name", "chosen", "rejected"),
    [
        ("qwen2_5", {"content": "12", "score": 9}, {"content": "12", "score": 1}),
        ("llama_3_1", {"content": "12"}, {"content": "12 \n"}),
        ("qwen3", {"content": "12"}, {"content": [{"type": "text", "text": "12"}]}),
    ],
)
@pytest.mark.parametrize("process", [preference_data_processor, score_data_processor])
def test_responses_that_differ_in_nothing_the_model_sees_are_no_pair(
    name: str, chosen: dict[str, Any], rejected: dict[str, Any], process: Any
) -> None:
    """Keys that the template does not read, blanks that it strips, and text parts."""
    spec, tokenizer = TaskDataSpec(task_name="math", answer_key=None), BY_NAME[name].oracle
    pair = {key: [{"role": "assistant", **turn}] for key, turn in (("chosen", chosen), ("rejected", rejected))}
    with pytest.raises(ValueError, match=r"row 5: .*'chosen' and 'rejected' have the same tokens once"):
        process({"prompt": [USER], **pair}, spec, tokenizer, 1000, 5)


def test_what_follows_the_last_learnt_turn_tells_a_reward_models_pair_apart_alone() -> None:
    """Log-probabilities of the same turn behind the same text are equal, whatever follows."""
    spec, tokenizer = TaskDataSpec(task_name="math", answer_key=None), BY_NAME["qwen2_5"].oracle
    later = [{"role": "user", "content": text} for text in ("Thanks!", "Wrong.")]
    row = {"prompt": [USER], "chosen": [ANSWER, later[0]], "rejected": [ANSWER, later[1]]}
    assert score_data_processor(row, spec, tokenizer, 1000, 0)["rejected"]
    with pytest.raises(ValueError, match="have the same tokens once"):
        preference_data_processor(row, spec, tokenizer, 1000, 0)


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        (True, None),
        (0, None),
        ("true", "column 'label' (data.label_key) is 'true'; write true for a desirable response, else false"),
        (None, "column 'label' (data.label_key) is None; write true"),
        (2, "column 'label' (data.label_key) is 2; write true"),
        (float("nan"), "column 'label' (data.label_key) is nan; write true"),
    ],
)
def test_a_response_has_a_label_that_is_true_or_false(label: Any, problem: str | None) -> None:
    row = {"prompt": "1+1=", "completion": "2", "label": label}
    spec = TaskDataSpec(task_name="math", response_key="completion", label_key="label", apply_chat_template=False)
    assert (find_label_problem(row, spec) or "").startswith(problem or "")
    if problem is None:
        processed = labelled_data_processor(row, spec, make_tokenizer(VOCABULARY, 64), 64, 3)
        assert processed["label"] is bool(label)
        assert processed["message_log"][-1]["content"] == "2"
    without = {name: value for name, value in row.items() if name != "label"}
    assert "data.label_key=null for rows of a better and a worse response" in str(find_label_problem(without, spec))
