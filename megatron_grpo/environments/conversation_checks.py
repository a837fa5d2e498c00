"""Checks of chat templates: a sample conversation of each task, from the first prompt to the results of tools."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_grpo.config.data_schema import REWARD_FUNCTIONS, EnvironmentConfig
from megatron_grpo.config.errors import ConfigError, Problem, RunError
from megatron_grpo.config.schema import Config
from megatron_grpo.data.load_prompts import PromptData, load_prompt_data
from megatron_grpo.data.loader import PromptLoader
from megatron_grpo.data.processors import TaskDataSpec
from megatron_grpo.data.prompt_renderer import ChatMessage, PromptRenderer
from megatron_grpo.data.specs import processor_name, processor_of, rendering_of, task_spec
from megatron_grpo.data.tokenizer import from_difference
from megatron_grpo.environments.registry import environment_class
from megatron_grpo.environments.tools import ToolEnvironment

_QUESTION = {"role": "user", "content": "sample question"}
_ANSWER = {"role": "assistant", "content": "sample answer"}
_THOUGHT = "sample thought"
_REASONED = {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER['content']}"}
_FOLLOW_UP = {"role": "user", "content": "another question"}
_RESULTS = [
    {"role": "tool", "name": "sample_tool", "tool_call_id": f"call0000{number}", "content": f"sampleresult{number}"}
    for number in (1, 2)
]
_ROWS_DECODED = 8
"""First rows whose prompts are compared with the text of their tokens."""
_DATE_FORMS = ("%Y-%m-%d", "%d %b %Y", "%d %B %Y", "%B %d, %Y")
"""Forms in which released templates write today's date."""


def load_examined_prompts(config: Config, model: Path, tokenizer: Any = None) -> PromptData:
    """The prompts of a run, whose conversations pass the checks of this module; arguments as `load_prompt_data`.

    Raises:
        ConfigError: a file, a row, or the chat template cannot be used.
    """
    data = load_prompt_data(config, model, tokenizer)
    problems, remarks = examine_conversations(config, data.tokenizer)
    if problems:
        raise ConfigError(problems)
    remarks += _changed_prompts(config, data)
    return replace(data, notes=[*data.notes, *(f"{remark.subject} {remark.text}" for remark in remarks)])


def _changed_prompts(config: Config, data: PromptData) -> Iterator[Problem]:
    """The remark that the tokens of a row's prompt are other text than the prompt, blanks aside."""
    if not isinstance(data.loader, PromptLoader):
        return
    for row in range(_ROWS_DECODED):
        try:
            (prompt,) = data.loader.prompts([row])
        except (ValueError, IndexError):  # the row is to be left out, or there are no more
            continue
        if rendering_of(processor_of(processor_name(config.data, prompt["task_name"]))) is None:
            continue
        text = "".join(message["content"] for message in prompt["message_log"])
        ids = [token for message in prompt["message_log"] for token in message["token_ids"]]
        decoded, expected = ("".join(one.split()) for one in (data.tokenizer.decode(ids), text))
        if decoded != expected:
            difference = from_difference(decoded, expected)
            yield Problem(f"data: row {row}", f"is other text for the model, whose tokenizer changes it: {difference}")
            return


def examine_conversations(config: Config, tokenizer: Any) -> tuple[list[Problem], list[Problem]]:
    """Render sample conversations of every task by its chat template, as a run would.

    Takes milliseconds. The rows themselves are rendered by `load_prompt_data`; this is about what rows do not show:
    settings that the template does not read, and later turns.

    Args:
        config: the tasks, their environments and how prompts are rendered.
        tokenizer: the tokenizer of the run, from transformers.

    Returns:
        Problems, with which rollouts would fail or the model would not see what it is answered; and remarks.
    """
    problems: list[Problem] = []
    remarks: list[Problem] = []
    for task, environment in config.env.items():
        spec = task_spec(config.data, task)
        renderer = PromptRenderer(tokenizer, spec)
        if not (spec.apply_chat_template and renderer.has_template):
            continue
        try:
            prompt = renderer.render_first_turn([_QUESTION])
        except Exception:  # noqa: BLE001 - a template may require other messages than the sample; rows show errors
            continue
        section = _section(config, task)
        remarks += _unread_settings(section, renderer, spec, prompt)
        answers = _later_messages(environment)
        for role, messages in answers.items():
            text = _refusal(renderer, role, messages)
            if text is not None:
                problems.append(Problem(f"env.{task}.type={environment.type}", text))
        if answers or environment.agent_func is not None:
            remarks += _changed_turns(f"env.{task}", renderer, prompt)
    return problems, list(dict.fromkeys(remarks))


def _section(config: Config, task: str) -> str:
    """Key of the section that says how a task's prompts are rendered."""
    return f"data.tasks.{task}" if task in config.data.tasks else "data"


def _later_messages(environment: EnvironmentConfig) -> dict[str, Sequence[ChatMessage]]:
    """Sample answers of an environment to the model, by role; empty: it never answers, or an agent does."""
    if environment.type == REWARD_FUNCTIONS:
        return {}
    try:
        kind = environment_class(environment.type)
    except RunError:  # `check_scoring` reports it
        return {}
    if issubclass(kind, ToolEnvironment):
        return {"tool": _RESULTS}
    return {"user": [_FOLLOW_UP]} if kind.multi_turn else {}


def _refusal(renderer: PromptRenderer, role: str, messages: Sequence[ChatMessage]) -> str | None:
    """The reason why an environment's answers would not reach the model; None: they would."""
    advice = "give a template that renders them in data.chat_template, or take another model"
    for count in range(1, len(messages) + 1):
        answers = messages[:count]
        try:
            ids = renderer.encode_later_turn(answers, last_token=-1)
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            several = f"{count} messages" if count > 1 else "messages"
            return f"the chat template refuses {several} of the role {role}, its answers: {error}; {advice}"
        shown = renderer.tokenizer.decode(ids)
        if any(str(message["content"]) not in shown for message in answers):
            text = (
                f"the chat template leaves out messages of the role {role}, its answers, which the model would not see"
            )
            return f"{text}; {advice}"
    return None


def _unread_settings(section: str, renderer: PromptRenderer, spec: TaskDataSpec, prompt: str) -> Iterator[Problem]:
    """Remarks on settings of prompts that the chat template does not read, and on prompts that change by the day."""

    def rendered_without(**changes: Any) -> str:
        return PromptRenderer(renderer.tokenizer, replace(spec, **changes)).render_first_turn([_QUESTION])

    if spec.tools and rendered_without(tools=None) == prompt:
        yield Problem(f"{section}.tools", "changes no prompt: the chat template does not show definitions of tools")
    if spec.system_prompt and spec.system_prompt.strip() not in prompt:
        yield Problem(f"{section}.system_prompt", "is not in the prompts: the chat template leaves it out")
    source = _source(renderer)
    for name, value in spec.chat_template_kwargs.items():
        rest = {key: other for key, other in spec.chat_template_kwargs.items() if key != name}
        if name not in source and rendered_without(chat_template_kwargs=rest) == prompt:
            text = "changes no prompt: the chat template does not read it"
            yield Problem(f"{section}.chat_template_kwargs.{name}={value}", text)
    if "strftime_now" in source and any(time.strftime(form) in prompt for form in _DATE_FORMS):
        key = "chat_template_kwargs.date_string" if "date_string" in source else "chat_template"
        text = (
            "the chat template writes today's date into every prompt, so a run that goes on tomorrow has other prompts"
        )
        yield Problem(f"{section}.{key}", f"{text}; give a fixed one here")


def _source(renderer: PromptRenderer) -> str:
    """Text of the chat template."""
    template = renderer.format.chat_template or renderer.tokenizer.chat_template
    return "\n".join(map(str, template.values())) if isinstance(template, Mapping) else str(template)


def _changed_turns(section: str, renderer: PromptRenderer, prompt: str) -> Iterator[Problem]:
    """The remark that a conversation rendered anew differs from the tokens of a rollout."""
    changes = []
    try:
        if not renderer.render([_QUESTION, _ANSWER, _FOLLOW_UP]).startswith(prompt):
            changes.append("renders the first prompt otherwise")
        reasoned = renderer.render([_QUESTION, _REASONED, _FOLLOW_UP])
        if _ANSWER["content"] in reasoned and _THOUGHT not in reasoned:
            changes.append("leaves out what the model thought before its answers")
    except Exception:  # noqa: BLE001 - `_refusal` reports what the environment's own answers meet
        return
    if changes:
        text = f"once a conversation goes on, its chat template {' and '.join(changes)}; a rollout keeps all its tokens"
        yield Problem(
            section, f"{text}, so a server that renders the whole conversation gives the model another prompt"
        )
