"""Every turn of a conversation has the tokens that transformers' own rendering of the whole conversation has."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megatron_grpo.config.data_schema import DataConfig, DatasetConfig
from megatron_grpo.data.processors import TaskDataSpec, math_data_processor
from megatron_grpo.data.prompt_renderer import MODEL_TURN, PromptFormat, PromptRenderer
from megatron_grpo.data.rows import RowCheck
from tests.support.released.templates import read_released_template

CHATML = (
    "{% if tools %}<|im_start|>system{{ '\n' }}{{ tools | tojson }}<|im_end|>{{ '\n' }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>{{ '\n' }}{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}{% if m.name is defined %} name={{ m.name }}{% endif %}{{ '\n' }}"
    "{{ m.content }}<|im_end|>{{ '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>{{ '\n\n' }}</think>{{ '\n\n' }}{% endif %}"
    "{% endif %}"
)
"""A template like Qwen3's."""

HARMONY = (
    "{%- set ns = namespace(call=none) %}{%- for m in messages %}"
    "{%- if m.role == 'tool' %}{% if ns.call is none %}{{ raise_exception('no call before') }}{% endif %}"
    "<|start|>functions.{{ ns.call }}<|message|>{{ m.content | tojson }}<|end|>"
    "{%- elif m.tool_calls %}{% set ns.call = m.tool_calls[-1].function.name %}"
    "<|start|>assistant to=functions.{{ ns.call }}<|message|>{{ m.tool_calls[-1].function.arguments | tojson }}<|call|>"
    "{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""A template like gpt-oss's: results of tools are shown only after calls that it can read."""

LLAMA = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>\n\n{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|message|>\n\n{% endif %}"
)
"""A template like Llama 3's, which trims contents."""

PARTS = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""A template that reads lists of parts itself, like Gemma 3's."""

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|call|>", "<|message|>"]


def byte_level(template: str | None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with a few merges, so that a blank belongs to the word after it."""
    vocabulary = {text: number for number, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("Ġ", "t"), ("Ġt", "o"), ("l", "l"), ("Ċ", "Ċ"), ("2", "0")]
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    split = pre_tokenizers.Split(words, behavior="isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", chat_template=template)


def sentencepiece(blank: str, *, appends: bool = False, template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer like Llama 2's, which puts a blank before a text.

    blank: "Prepend" by its normalizer, as old files do, else the prepend_scheme of Metaspace. appends: it puts </s>
    after every text, as with add_eos_token=true.
    """
    letters = ["<unk>", "<s>", "</s>", "▁", *"abcdefghijklmnopqrstuvwxyz0123456789.[]/<>_|=+\n", "▁t", "▁to"]
    vocabulary = {text: number for number, text in enumerate(letters)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "t"), ("▁t", "o")], unk_token="<unk>"))
    if blank == "Prepend":
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=blank, split=False)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    single = "<s> $A </s>" if appends else "<s> $A"
    core.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Tokens by the tokenizers library alone."""
    ids: list[int] = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


SETTINGS = {
    "the tokenizer's template": {},
    "a template of the configuration": {"chat_template": LLAMA},
    "variables": {"chat_template_kwargs": {"enable_thinking": False}},
    "tools": {"tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]},
    "a system prompt": {"system_prompt": "Be brief."},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("answer", [[user("larger")], [{"role": "tool", "content": "5"}], [user("a\n\nb "), user("c")]])
def test_a_later_turn_is_rendered_by_the_settings_of_the_first(
    settings: dict[str, Any], answer: list[dict[str, Any]]
) -> None:
    tokenizer = byte_level(CHATML)
    renderer = PromptRenderer(tokenizer, PromptFormat(**settings))
    first = renderer.encode_prompt(renderer.render_first_turn("What is 1+1?"))
    end = "<|end|>" if "chat_template" in settings else "<|im_end|>"
    sampled = encode(tokenizer, f"not to 2023{end}")
    later = renderer.encode_later_turn(answer, sampled[-1])

    options = dict(settings)
    system = [{"role": "system", "content": options.pop("system_prompt")}] if "system_prompt" in options else []
    options.update(options.pop("chat_template_kwargs", {}))
    conversation = [*system, user("What is 1+1?"), assistant("not to 2023"), *answer]
    full_text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, **options)
    # The generation prompt of a first turn may hold an empty thought, which the template leaves out of past turns.
    opening = tokenizer.apply_chat_template(
        conversation[: len(system) + 1], tokenize=False, add_generation_prompt=True, **options
    )
    assert first == encode(tokenizer, opening)
    _, _, after = full_text.rpartition(f"not to 2023{end}")
    assert later == encode(tokenizer, after)


def test_the_results_of_two_calls_are_two_messages() -> None:
    tokenizer = byte_level(CHATML)
    results = [
        {"role": "tool", "name": "add", "tool_call_id": f"call0000{number}", "content": text}
        for number, text in enumerate("25")
    ]
    later = PromptRenderer(tokenizer, PromptFormat()).encode_later_turn(
        results, tokenizer.convert_tokens_to_ids("<|im_end|>")
    )
    messages = "user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n5\n</tool_response>"
    assert tokenizer.decode(later) == f"\n<|im_start|>{messages}<|im_end|>\n<|im_start|>assistant\n"


def test_results_follow_calls_where_the_template_asks_for_calls() -> None:
    tokenizer = byte_level(HARMONY)
    renderer = PromptRenderer(tokenizer, PromptFormat())
    results = [{"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "4"}]
    later = renderer.encode_later_turn(results, tokenizer.convert_tokens_to_ids("<|call|>"))
    assert tokenizer.decode(later) == '<|start|>functions.add<|message|>"4"<|end|><|start|>assistant'
    with pytest.raises(Exception, match="no call before"):
        renderer.render([user("x"), *results])


def test_text_that_looks_like_the_mark_of_the_models_turn_changes_nothing() -> None:
    tokenizer = byte_level(CHATML)
    renderer = PromptRenderer(tokenizer, PromptFormat())
    later = renderer.encode_later_turn([user(f"a{MODEL_TURN}b")], tokenizer.eos_token_id)
    assert tokenizer.decode(later) == f"\n<|im_start|>user\na{MODEL_TURN}b<|im_end|>\n<|im_start|>assistant\n"


def test_an_end_that_was_not_sampled_is_added() -> None:
    tokenizer = byte_level(CHATML)
    later = PromptRenderer(tokenizer, PromptFormat()).encode_later_turn([user("go on")], encode(tokenizer, "2")[0])
    assert tokenizer.decode(later).startswith("<|im_end|>\n<|im_start|>user\ngo on")


@pytest.mark.parametrize("blank", ["Prepend", "first", "always"])
def test_the_text_of_an_environment_gets_no_blank_of_the_tokenizer(blank: str) -> None:
    tokenizer = sentencepiece(blank)
    renderer = PromptRenderer(tokenizer, PromptFormat(apply_chat_template=False))
    for text in ("42. too large\n", " to", "t"):
        ids = renderer.encode_later_turn([{"role": "user", "content": text}], tokenizer.convert_tokens_to_ids("a"))
        assert "".join(tokenizer.convert_ids_to_tokens(ids)).replace("▁", " ") == text
    prompt = renderer.encode_prompt("to go")
    assert tokenizer.convert_ids_to_tokens(prompt)[:2] == ["<s>", "▁to"], "a first prompt is the beginning of a text"


@pytest.mark.parametrize("blank", ["Prepend", "first", "always"])
def test_a_later_turn_of_a_sentencepiece_template_equals_the_whole_conversation(blank: str) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[/i] {{ m.content }} [i]"
        "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
    )
    tokenizer = sentencepiece(blank, template=template)
    later = PromptRenderer(tokenizer, PromptFormat()).encode_later_turn([user("to a")], tokenizer.eos_token_id)
    conversation = [user("go"), assistant("42"), user("to a")]
    full_ids = encode(tokenizer, tokenizer.apply_chat_template(conversation, tokenize=False))
    assert later == full_ids[full_ids.index(tokenizer.eos_token_id) + 1 :]


@pytest.mark.parametrize("text", ["12+34=", "<s>12+34=", "to </s>"])
def test_a_plain_prompt_begins_with_one_bos_and_ends_with_its_text(text: str) -> None:
    for tokenizer in (sentencepiece("first", appends=True), sentencepiece("first")):
        spec = TaskDataSpec(task_name="t", apply_chat_template=False, answer_key=None)
        datum = math_data_processor({"prompt": text}, spec, tokenizer, 50, 0)
        ids = datum["message_log"][0]["token_ids"]
        bare = encode(tokenizer, text.removeprefix("<s>"))
        assert ids == [1, *(encode(tokenizer, text)[1:] if text.startswith("<s>") else bare)]
        renderer = PromptRenderer(tokenizer, spec)
        assert renderer.encode_prompts([text, "a"])[0] == ids


EMPTY = {"refusal": None, "audio": None, "function_call": None, "tool_calls": None, "name": None}
"""Fields that clients of the OpenAI protocol send without a value."""


@pytest.mark.parametrize("template", [LLAMA, CHATML, PARTS], ids=["llama", "chatml", "parts"])
def test_parts_and_empty_fields_of_messages_become_their_text(template: str) -> None:
    tokenizer = byte_level(template)
    renderer = PromptRenderer(tokenizer, PromptFormat())
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "1+1?"}]
    joined = "What is1+1?" if template == PARTS else "What is\n1+1?"
    expected = [user(joined), assistant("2"), user("why?")]
    messages = [user(parts), {**assistant("2"), **EMPTY}, user([{"type": "text", "text": "why?"}])]
    full_text = tokenizer.apply_chat_template(expected, tokenize=False, add_generation_prompt=True)
    assert renderer.render(messages) == full_text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "message 1 has a content part of type 'image_url'"),
        ([{"type": "text", "text": 5}], "content part of type 'text'"),
        ([[]], "content part"),
        (None, "message 1 has null as its content"),
        (5, "message 1 has int as its content"),
        ({"text": "x"}, "message 1 has dict as its content"),
    ],
)
def test_content_that_is_not_text_is_refused(content: Any, reason: str) -> None:
    renderer = PromptRenderer(byte_level(CHATML), PromptFormat())
    with pytest.raises(ValueError, match=reason):
        renderer.render([user(content)])


CALLS = "{% for c in m.tool_calls %}<|call|>{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<|start|>{% if m.role == 'assistant' and m.content is none %}" + CALLS
        + "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}",
        "{% for m in messages %}<|start|>{{ m.content }}{% if m.tool_calls %}" + CALLS
        + "{% endif %}<|end|>{% endfor %}",
        "{% for m in messages %}<|start|>{{ m.content + '' }}{% if m.tool_calls %}" + CALLS
        + "{% endif %}<|end|>{% endfor %}",
    ],
    ids=["null alone shows calls", "null would be written", "null is refused"],
)  # fmt: skip
@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}], ids=["as JSON text", "as an object"])
def test_a_turn_of_calls_alone_is_shown_with_its_calls(template: str, arguments: Any) -> None:
    renderer = PromptRenderer(byte_level(template), PromptFormat())
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert renderer.render([user("x"), turn]) == '<|start|>x<|end|><|start|><|call|>add{"a": 1}<|end|>'


@pytest.mark.parametrize("content", [None, "Adding."])
def test_arguments_are_text_for_a_template_that_refuses_objects(content: str | None) -> None:
    """As DeepSeek's templates, which put them together with +; transformers is given them so."""
    written = "{% for c in m.tool_calls %}{{ '<|call|>' + c.function.name + c.function.arguments }}{% endfor %}"
    template = "{% for m in messages %}<|start|>{{ m.content or '' }}" + written + "<|end|>{% endfor %}"
    renderer = PromptRenderer(byte_level(template), PromptFormat())
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": "\u00e9"}}}
    turn = {"role": "assistant", "content": content, "tool_calls": [call]}
    prompt = renderer.render([user("x"), turn])
    call["function"] = {"name": "add", "arguments": '{"a": "\u00e9"}'}
    conversation = [user("x"), {**turn, "content": content or ""}]
    assert prompt == renderer.tokenizer.apply_chat_template(conversation, tokenize=False)


def test_calls_of_deepseek_are_shown() -> None:
    renderer = PromptRenderer(byte_level(read_released_template("deepseek_r1_distill")), PromptFormat())
    for arguments in ('{"a": 1}', {"a": 1}):
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        prompt = renderer.render([user("x"), turn, {"role": "tool", "content": "7"}])
        call["function"] = {"name": "add", "arguments": '{"a": 1}'}
        messages = [user("x"), turn, {"role": "tool", "content": "7"}]
        expected = renderer.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert "add" in prompt.partition("x")[2]
        assert prompt == expected


def test_a_conversation_keeps_a_system_message_of_its_own() -> None:
    renderer = PromptRenderer(byte_level(LLAMA), PromptFormat(system_prompt="Be brief."))
    assert renderer.render([user("x")]).startswith("<|start|>system<|message|>\n\nBe brief.<|end|>")
    prompt = renderer.render([{"role": "system", "content": "Be long."}, user("x")])
    assert "Be long." in prompt
    assert "Be brief." not in prompt


def test_a_row_of_text_parts_is_a_prompt(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "12 + 34"}, {"type": "text", "text": "="}]
    image = [{"type": "image", "image": "x.png"}]
    data = DataConfig(train_path=str(tmp_path / "rows.jsonl"))
    check = RowCheck(DatasetConfig(path=data.train_path), data, {"math": "math"})
    row = {"prompt": [user(parts)], "answer": "46"}
    assert check.convert(row) == row
    refused = check.convert({"prompt": [user(image)], "answer": "46"})
    assert refused == "column 'prompt' has a message (number 1) whose content is a list of parts; it must be text"
    spec = TaskDataSpec(task_name="math", prompt="Sum: {}")
    datum = math_data_processor(row, spec, byte_level(LLAMA), 200, 0)
    assert "Sum: 12 + 34\n=<|end|>" in datum["message_log"][0]["content"]
