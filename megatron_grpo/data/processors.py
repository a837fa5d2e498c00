"""From a row of a file to a prompt in token ids."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError

from megatron_grpo.data.interfaces import REFERENCE, DatumSpec, TaskDataSpec


def math_data_processor(
    datum_dict: dict[str, Any], task_data_spec: TaskDataSpec, tokenizer: Any, max_seq_length: int, idx: int
) -> DatumSpec:
    """A row with a prompt and a reference answer.

    The message log holds one entry, the whole rendered prompt: chat templates may treat a message differently by what
    follows it, so only the conversation as a whole has well-defined tokens. A chat template writes the special tokens
    itself; a plain prompt gets those that the tokenizer adds to any text (for many tokenizers none).

    Args:
        datum_dict: the row; its prompt is a text, or a list of {role, content} messages for a chat template.
        task_data_spec: names of the columns and how the prompt is rendered.
        tokenizer: a Hugging Face tokenizer.
        max_seq_length: prompts of more tokens get loss_multiplier 0; they keep their tokens.
        idx: number of the row in the data, which the prompt is known by.

    Returns:
        The prompt; extra_env_info holds the row's other columns as they are and, where there is a reference answer,
        that as text under REFERENCE, and as it is under "answer" unless a column has that name.

    Raises:
        ValueError: the prompt has no tokens, or the tokenizer has no chat template, or one that refuses the prompt.
    """
    prompt = datum_dict[task_data_spec.prompt_key]
    text = _render_chat(prompt, task_data_spec, tokenizer, idx) if task_data_spec.apply_chat_template else prompt
    token_ids = tokenizer(text, add_special_tokens=not task_data_spec.apply_chat_template)["input_ids"]
    if not token_ids:
        raise ValueError(f"row {idx}: the prompt {text!r} has no tokens")
    extra = {key: value for key, value in datum_dict.items() if key != task_data_spec.prompt_key}
    if task_data_spec.answer_key is not None:
        answer = datum_dict[task_data_spec.answer_key]
        extra = {"answer": answer, **extra, REFERENCE: str(answer)}
    return DatumSpec(
        message_log=[{"role": "user", "content": text, "token_ids": token_ids}],
        length=len(token_ids),
        extra_env_info=extra,
        loss_multiplier=1.0 if len(token_ids) <= max_seq_length else 0.0,
        idx=idx,
        task_name=datum_dict.get("task_name", task_data_spec.task_name),
        prompt=prompt,
    )


def _render_chat(prompt: str | list[dict[str, str]], spec: TaskDataSpec, tokenizer: Any, idx: int) -> str:
    if tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template; set data.apply_chat_template=false for plain prompts")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if spec.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": spec.system_prompt})
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ValueError(f"row {idx}: the tokenizer's chat template refuses the prompt: {error}") from error
    return text
