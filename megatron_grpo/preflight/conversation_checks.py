"""Loads a run's prompts, and checks its chat templates with a sample conversation of each task."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_grpo.config.data_schema import BUILT_IN, REWARD_FUNCTIONS, EnvironmentConfig
from megatron_grpo.config.errors import ConfigError, Problem, RunError, to_text
from megatron_grpo.config.schema import Config
from megatron_grpo.data import specs
from megatron_grpo.data.chat_messages import ChatMessage, read_row_tools
from megatron_grpo.data.conversation_tokens import encode_scored
from megatron_grpo.data.load_prompts import PromptData, load_prompt_data
from megatron_grpo.data.loader import PromptLoader
from megatron_grpo.data.omissions import find_omissions
from megatron_grpo.data.processors import DatumSpec, TaskDataSpec
from megatron_grpo.data.prompt_renderer import FORMAT_KEY, PromptFormat, PromptRenderer
from megatron_grpo.data.tokenizer import load_tokenizer, quote_difference
from megatron_grpo.environments.registry import import_environment_class
from megatron_grpo.models.tokenizer_files import TOKENIZER_FILE, read_settings

_QUESTION = {"role": "user", "content": "sample question"}
_ANSWER = {"role": "assistant", "content": "sample answer"}
_THOUGHT = "sample thought"
_REASONED = {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER['content']}"}
_FOLLOW_UP = {"role": "user", "content": "another question"}
_RESULTS = [
    {"role": "tool", "name": "sample_tool", "tool_call_id": f"call0000{number}", "content": f"sampleresult{number}"}
    for number in (1, 2)
]
# First rows whose prompts are compared with the text of their tokens.
_ROWS_DECODED = 8
# Forms in which released templates write today's date.
_DATE_FORMS = ("%Y-%m-%d", "%d %b %Y", "%d %B %Y", "%B %d, %Y")
# A tag at the end of a prompt that opens the model's thoughts: <think>, [THINK]; not <|assistant|>, nor </think>.
_OPENING_TAG = re.compile(r"(?i)(<\w+>|[<\[](?!/|\|?end)[^\s<>\[\]]*(?:think|thought|reason)[^\s<>\[\]]*[>\]])\s*$")
# Types of environments that look for an answer wherever it stands, and for no tag.
_WITHOUT_TAGS = frozenset(BUILT_IN) - {"format"}


def load_examined_prompts(config: Config, model: Path, tokenizer: Any = None, rows: Any = None) -> PromptData:
    """Load the prompts of a run (`load_prompt_data`), and check its conversations.

    Raises ConfigError if a file, a row, or the chat template cannot be used.
    """
    data = load_prompt_data(config, model, tokenizer, rows)
    problems, remarks = examine_conversations(config, data.tokenizer) if config.reads_prompts else ([], [])
    if problems:
        raise ConfigError(problems)
    if not config.method.rows:  # rows to learn from are checked one by one as they are read
        remarks += [*_find_changed_prompts(config, data), *_find_unscored_prompts(config, data)]
    return replace(data, notes=[*data.notes, *(f"{remark.subject} {remark.text}" for remark in remarks)])


def _load_first_prompts(data: PromptData) -> Iterator[tuple[int, DatumSpec]]:
    """Load the prompts of the first rows, with the numbers of the rows."""
    if not isinstance(data.loader, PromptLoader):
        return
    for row in range(_ROWS_DECODED):
        with suppress(ValueError, IndexError):  # the row is to be left out, or there are no more
            (prompt,) = data.loader.load_prompts([row])
            yield row, prompt


def _find_unscored_prompts(config: Config, data: PromptData) -> Iterator[Problem]:
    """Remark on conversations that a reward model's chat template cannot show."""
    folders = [(task, path) for task, environment in config.env.items() for path in environment.reward_model_folders]
    for task, path in folders:
        if not (Path(path) / TOKENIZER_FILE).is_file():  # of the hub, or a checkpoint that is not exported yet
            continue
        settings = read_settings(Path(path) / "config.json").get(FORMAT_KEY) or {}
        renderer = PromptRenderer(load_tokenizer(path), PromptFormat(**settings))
        for row, prompt in _load_first_prompts(data):
            if prompt["task_name"] != task or isinstance(prompt["prompt"], str):
                continue
            try:
                tools = read_row_tools(prompt["extra_env_info"])
                encode_scored(renderer, prompt["prompt"], [_ANSWER], tools, needs_thoughts=False)
            except ValueError as error:
                yield Problem(f"env.{task}.reward_funcs={path}", f"cannot score the prompt of row {row}: {error}")
                break


def _find_changed_prompts(config: Config, data: PromptData) -> Iterator[Problem]:
    """Remark on rows whose prompt lacks a message, or has other tokens."""
    kinds = set[Any]()
    for row, prompt in _load_first_prompts(data):
        processor = specs.find_processor(specs.find_processor_name(config.data, prompt["task_name"]))
        if specs.find_rendering(processor) is None:
            continue
        text = "".join(message["content"] for message in prompt["message_log"])
        ids = [token for message in prompt["message_log"] for token in message["token_ids"]]
        decoded, expected = ("".join(version.split()) for version in (data.tokenizer.decode(ids), text))  # no blanks
        remarks: dict[Any, str] = {}
        renderer = PromptRenderer(data.tokenizer, specs.make_task_spec(config.data, prompt["task_name"]))
        if not isinstance(prompt["prompt"], str) and renderer.format.apply_chat_template:
            omissions = find_omissions(renderer, prompt["prompt"], tools=read_row_tools(prompt["extra_env_info"]))
            if omissions:
                text = f"lacks {', '.join(map(str, omissions))}: the chat template leaves it out;"
                text += " give one that shows it in data.chat_template"
                remarks[frozenset(omission.role for omission in omissions)] = text
        if decoded != expected and not prompt.get("images"):  # whose placeholders are repeated
            difference = quote_difference(decoded, expected)
            remarks["changed"] = f"reaches the model as another text, because its tokenizer changes it: {difference}"
        for kind in remarks.keys() - kinds:
            kinds.add(kind)
            yield Problem(f"data: row {row}", remarks[kind])


def examine_conversations(config: Config, tokenizer: Any) -> tuple[list[Problem], list[Problem]]:
    """Render a sample conversation of every task; returns problems and remarks.

    This finds what rows do not show: settings that the template does not read, and faults of later turns. It is a
    problem if rollouts would fail or the model would not see the environment's answers, else a remark.
    """
    problems: list[Problem] = []
    remarks: list[Problem] = []
    for task, environment in config.env.items():
        spec = specs.make_task_spec(config.data, task)
        renderer = PromptRenderer(tokenizer, spec)
        if not (spec.apply_chat_template and renderer.has_template):
            continue
        try:
            prompt = renderer.render_first_turn([_QUESTION])
        except Exception:  # noqa: BLE001 - a template may require other messages than the sample; rows show errors
            continue
        remarks += _find_unread_settings(partial(_name_key, config, task), renderer, spec, prompt)
        if not config.needs_generation:
            continue
        remarks += _find_opened_tags(task, environment, prompt)
        answers = _make_later_messages(environment)
        text = _explain_refusal(renderer, answers)
        if text is not None:
            # The environment of a user may write tokens of its own instead of messages.
            findings = problems if environment.type in BUILT_IN else remarks
            findings.append(Problem(f"env.{task}.type={environment.type}", text))
        if answers or environment.agent_func is not None:
            remarks += _find_changed_turns(f"env.{task}", renderer, prompt)
    if len({*specs.find_task_templates(config, tokenizer).values()}) > 1:
        text = "differ between tasks, so exported models keep the template of the folder that the run began with"
        remarks.append(Problem("data.tasks: chat templates", text))
    if len(specs.list_conversation_formats(config)) > 1:
        text = "have settings of their own, so the reward model scores conversations without system prompt and tools"
        remarks.append(Problem("data.tasks", text))
    return problems, list(dict.fromkeys(remarks))


def _name_key(config: Config, task: str, name: str) -> str:
    setting: Any = config.data.tasks.get(task)
    for part in name.split("."):
        setting = setting.get(part) if isinstance(setting, Mapping) else getattr(setting, part, None)
    return f"data.{name}" if setting is None else f"data.tasks.{task}.{name}"


def _make_later_messages(environment: EnvironmentConfig) -> Sequence[ChatMessage]:
    """Make sample answers of an environment; empty if it never answers."""
    if environment.type == REWARD_FUNCTIONS:
        return []
    try:
        environment_class = import_environment_class(environment.type)
    except RunError:  # `check_scoring` reports it
        return []
    if not environment_class.multi_turn:
        return []
    return _RESULTS if environment_class.answer_role == "tool" else [_FOLLOW_UP]


def _explain_refusal(renderer: PromptRenderer, messages: Sequence[ChatMessage]) -> str | None:
    """Explain why an environment's answers would not reach the model."""
    if not all(_can_write(renderer.tokenizer, str(message["content"])) for message in messages):
        return None  # a tokenizer for one task cannot write the sample
    advice = "give a template that shows them in data.chat_template"
    # One answer first, then several: templates that show one result of a tool may drop or refuse a second.
    for count in range(1, len(messages) + 1):
        answers = messages[:count]
        answer_kind = f"messages of the role {answers[0]['role']}, by which this environment answers"
        answer_kind = answer_kind if count == 1 else f"several {answer_kind}"
        try:
            text = renderer.tokenizer.decode(renderer.encode_later_turn(answers, last_token=-1))
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            return f"the chat template refuses {answer_kind}: {error}; {advice}"
        if any(str(message["content"]) not in text for message in answers):
            return f"the chat template leaves out {answer_kind}; {advice}"
    return None


def _can_write(tokenizer: Any, text: str) -> bool:
    try:
        return text in tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception:  # noqa: BLE001 - the tokenizers library raises bare exceptions
        return False


def _find_unread_settings(
    key: Callable[[str], str], renderer: PromptRenderer, spec: TaskDataSpec, prompt: str
) -> Iterator[Problem]:
    """Remark on settings without effect, and on dates in prompts."""

    def render_with(**changes: Any) -> str:
        return PromptRenderer(renderer.tokenizer, replace(spec, **changes)).render_first_turn([_QUESTION])

    if spec.tools and render_with(tools=None) == prompt:
        yield Problem(key("tools"), "changes no prompt: the chat template does not show definitions of tools")
    if spec.system_prompt and spec.system_prompt.strip() not in prompt:
        yield Problem(key("system_prompt"), "is not in the prompts: the chat template leaves it out")
    template = renderer.format.chat_template or renderer.tokenizer.chat_template
    source = "\n".join(map(str, template.values())) if isinstance(template, Mapping) else str(template)
    for name, value in spec.chat_template_kwargs.items():
        without_setting = {key: value for key, value in spec.chat_template_kwargs.items() if key != name}
        if name not in source and render_with(chat_template_kwargs=without_setting) == prompt:
            text = "changes no prompt: the chat template does not read it"
            yield Problem(f"{key(f'chat_template_kwargs.{name}')}={to_text(value)}", text)
    if "strftime_now" in source and any(time.strftime(form) in prompt for form in _DATE_FORMS):
        name = "chat_template_kwargs.date_string" if "date_string" in source else "chat_template"
        text = "can set a fixed date: the template writes today's into prompts, so a run resumed tomorrow has others"
        yield Problem(key(name), text)


def _find_opened_tags(task: str, environment: EnvironmentConfig, prompt: str) -> Iterator[Problem]:
    """Remark on a tag that every prompt opens, which responses lack."""
    tag = _OPENING_TAG.search(prompt)
    if tag is None or environment.type in _WITHOUT_TAGS:
        return
    pattern = environment.options.get("pattern")
    section, reader = f"env.{task}.type={environment.type}", f"a reward that looks for {tag[1]}"
    if environment.type == "format":
        if tag[1] not in str(pattern):
            return
        section, reader = f"env.{task}.options.pattern={pattern}", "the pattern"
    text = f"the chat template ends every prompt with {tag[1]}, so no response has it, and {reader} does not find it;"
    text += " match what follows it (docs/rewards.md)"
    yield Problem(section, text)


def _find_changed_turns(section: str, renderer: PromptRenderer, prompt: str) -> Iterator[Problem]:
    """Remark on conversations that change when they are rendered anew."""
    changes = []
    try:
        if not renderer.render([_QUESTION, _ANSWER, _FOLLOW_UP]).startswith(prompt):
            changes.append("renders the first prompt otherwise")
        reasoned = renderer.render([_QUESTION, _REASONED, _FOLLOW_UP])
        if _ANSWER["content"] in reasoned and _THOUGHT not in reasoned:
            changes.append("leaves out what the model thought before its answers")
    except Exception:  # noqa: BLE001 - `_explain_refusal` reports what the environment's own answers meet
        return
    if changes:
        text = f"has several turns, and in later ones the chat template {' and '.join(changes)}; a rollout keeps its"
        text += " tokens, so a server that renders the conversation again has other prompts"
        yield Problem(section, text)
