"""Specifications of prompts by task: processors, forms of public datasets, configured files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Any, TypeVar

from megatron_grpo.config.data_schema import (
    LABELLED,
    PREFERENCE,
    SCORED,
    SUPERVISED,
    DataConfig,
    PromptConfig,
    TaskConfig,
)
from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.config.paths import import_object
from megatron_grpo.config.schema import Config
from megatron_grpo.data.chat_messages import parse_tools
from megatron_grpo.data.math_text import list_boxes
from megatron_grpo.data.processors import DataProcessor, TaskDataSpec, math_data_processor, render_prompt
from megatron_grpo.data.supervised_rows import (
    labelled_data_processor,
    preference_data_processor,
    recorded_data_processor,
    score_data_processor,
    supervised_data_processor,
)

# A function that adds `prompt` and `answer` to a row; ValueError for a row of another dataset.
RowForm = Callable[[dict[str, Any]], dict[str, Any]]
T = TypeVar("T")


def from_gsm8k(row: dict[str, Any]) -> dict[str, Any]:
    """Convert GSM8K (openai/gsm8k): question, worked answer ending with `#### 72`."""
    solution = _read_text(row, "answer")
    _, mark, answer = solution.rpartition("####")
    if not mark or not answer.strip():
        raise ValueError("column 'answer' has no final answer after ####")
    question, answer = _read_text(row, "question"), answer.strip().replace(",", "")
    return {**row, "prompt": question, "answer": answer, "solution": solution}


def from_math(row: dict[str, Any]) -> dict[str, Any]:
    """Convert MATH and DeepScaleR: problem, and answer or boxed solution."""
    answer = row.get("answer")
    if answer is None or (isinstance(answer, str) and not answer.strip()):
        answer = find_last_box(_read_text(row, "solution"))
        if answer is None:
            raise ValueError("there is no column 'answer', and column 'solution' has no \\boxed{...}")
    return {**row, "prompt": _read_text(row, "problem"), "answer": str(answer).strip()}


def from_dapo_math(row: dict[str, Any]) -> dict[str, Any]:
    """Convert DAPO-Math-17k: messages, and reward_model.ground_truth."""
    prompt, reward = row.get("prompt"), row.get("reward_model")
    if not isinstance(prompt, list | str) or not prompt:
        raise ValueError("column 'prompt' is neither a text nor a list of messages")
    answer = reward.get("ground_truth") if isinstance(reward, dict) else row.get("solution")
    if answer is None or not str(answer).strip():
        raise ValueError("column 'reward_model' has no ground_truth")
    return {**row, "prompt": prompt, "answer": str(answer).strip()}


def from_openmathinstruct2(row: dict[str, Any]) -> dict[str, Any]:
    """Convert OpenMathInstruct-2: problem and expected_answer, without the solution."""
    columns = {name: value for name, value in row.items() if name != "generated_solution"}
    return {**columns, "prompt": _read_text(row, "problem"), "answer": _read_text(row, "expected_answer").strip()}


def from_tldr(row: dict[str, Any]) -> dict[str, Any]:
    """Convert TL;DR (trl-lib/tldr): a post, and a person's summary."""
    return {**row, "prompt": _read_text(row, "prompt"), "answer": _read_text(row, "completion").strip()}


def from_countdown(row: dict[str, Any]) -> dict[str, Any]:
    """Convert Countdown (Jiayi-Pan/Countdown-Tasks-3to4): `nums` that make `target`."""
    numbers, target = row.get("nums"), row.get("target")
    if not isinstance(numbers, list) or not numbers or not all(map(_is_integer, numbers)):
        raise ValueError("column 'nums' is not a list of whole numbers")
    if not _is_integer(target):
        raise ValueError("column 'target' is not a whole number")
    prompt = (
        f"Use each of the numbers {', '.join(map(str, numbers))} exactly once, with +, -, * and / and parentheses, to "
        f"make {target}. Think first, then give the expression between <answer> and </answer>, for example "
        "<answer> (1 + 2) / 3 </answer>."
    )
    return {**row, "prompt": prompt, "answer": str(target)}


def parse_countdown_game(row: Mapping[str, Any]) -> tuple[list[int], int]:
    """Parse the numbers and the target of a game; ValueError: not whole numbers."""
    column = next((name for name in ("numbers", "nums") if row.get(name) is not None), None)
    if column is None or row.get("target") is None:
        missing = "'numbers' or 'nums'" if column is None else "'target'"
        raise ValueError(f"has no column {missing}, which a countdown game needs; it has {', '.join(map(str, row))}")
    numbers, target = row[column], row["target"]
    is_list = isinstance(numbers, list | tuple) and bool(numbers)
    if not is_list or not all(_is_integer(number) and number >= 0 for number in numbers):
        raise ValueError(f"column {column!r} is not a list of whole numbers of at least 0, as a countdown game needs")
    if not _is_integer(target):
        raise ValueError("column 'target' is not a whole number, as a countdown game needs")
    return list(numbers), target


ROW_FORMS: dict[str, RowForm] = {  # by their names in data.processor
    "gsm8k": from_gsm8k,
    "math": from_math,
    "dapo_math": from_dapo_math,
    "openmathinstruct2": from_openmathinstruct2,
    "tldr": from_tldr,
    "countdown": from_countdown,
}


# Processors of algorithms that learn from rows, by the kind of the rows.
ROW_PROCESSORS: dict[str, DataProcessor] = {
    SUPERVISED: supervised_data_processor,
    LABELLED: labelled_data_processor,
    PREFERENCE: preference_data_processor,
    SCORED: score_data_processor,
}


def find_processor(name: str | None, make: DataProcessor = math_data_processor) -> DataProcessor:
    """Find a processor by its name in data.processor; ValueError: it is unusable.

    `make` is the processor of rows that data.processor leaves as they are, or converts.
    """
    if name is None:
        return make
    if name in ROW_FORMS:
        return partial(_convert_and_make, ROW_FORMS[name], make)
    module, _, function = name.rpartition(".")
    processor: DataProcessor = import_object(module, function)
    if not callable(processor):
        raise ValueError(f"is {type(processor).__name__}, which cannot be called")
    return processor


def find_rendering(processor: DataProcessor) -> Callable[[dict[str, Any], TaskDataSpec, Any, int], str] | None:
    """Find the renderer of a built-in processor of prompts; None: another processor."""
    if isinstance(processor, partial) and processor.args[-1] is math_data_processor:
        return partial(_convert_and_make, processor.args[0], render_prompt)
    return render_prompt if processor is math_data_processor else None


def is_built_in(processor: DataProcessor) -> bool:
    """True for a processor of the package, whose results need no check."""
    function = processor.func if isinstance(processor, partial) else processor
    return function in (_convert_and_make, math_data_processor, recorded_data_processor, *ROW_PROCESSORS.values())


def _convert_and_make(form: RowForm, make: Callable[..., Any], row: dict[str, Any], *arguments: Any) -> Any:
    return make(form(row), *arguments)


def find_last_box(text: str) -> str | None:
    """Find the content of the last complete \\boxed{...}, with nested braces."""
    # A box that is not closed is passed over: the text may be cut off within it.
    return next((content for content in list_boxes(text) if content is not None), None)


def _read_text(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"column {column!r} is not text; the row has {', '.join(map(str, row)) or 'none'}")
    return value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def make_task_spec(data: DataConfig, task: str) -> TaskDataSpec:
    """Make a task's prompt specification; ValueError: a configured file is bad."""
    config = data.tasks.get(task, TaskConfig())
    has_form = find_processor_name(data, task) in ROW_FORMS
    # A task's system prompt, text or file, comes before the run's.
    system = _choose(config.system_prompt, _read(config.system_prompt_file, str))
    return TaskDataSpec(
        task_name=task,
        prompt_key="prompt" if has_form else _choose(config.prompt_key, data.prompt_key) or "",
        answer_key="answer" if has_form else _choose(config.answer_key, data.answer_key),
        response_key=data.response_key,
        chosen_key=data.chosen_key,
        rejected_key=data.rejected_key,
        label_key=data.label_key,
        apply_chat_template=bool(_choose(config.apply_chat_template, data.apply_chat_template)),
        system_prompt=_choose(system, _choose(data.system_prompt, _read(data.system_prompt_file, str))),
        prompt=_read(config.prompt_file or data.prompt_file, str),
        chat_template=_read(config.chat_template or data.chat_template, str),
        chat_template_kwargs={**data.chat_template_kwargs, **config.chat_template_kwargs},
        tools=_read(config.tools or data.tools, parse_tools),
        long_prompts=data.long_prompts,
    )


def find_task_templates(config: Config, tokenizer: Any = None) -> dict[str, str | None]:
    """Find each task's chat template; None: the model's. `tokenizer` is a script's."""
    templates: dict[str, str | None] = {}
    for task in config.env:
        spec = make_task_spec(config.data, task)
        if not spec.apply_chat_template:
            continue
        template = spec.chat_template or getattr(tokenizer, "chat_template", None)
        if isinstance(template, Mapping):  # as transformers chooses among several
            name = "tool_use" if spec.tools and "tool_use" in template else "default"
            template = template.get(name)
        templates[task] = template
    return templates


def list_conversation_formats(config: Config) -> list[dict[str, Any]]:
    """List the settings, each once, that scores of the trained model depend on."""
    formats: list[dict[str, Any]] = []
    for task in config.env if config.method.head == "score" else ():
        spec = make_task_spec(config.data, task)
        names = ("system_prompt", "chat_template_kwargs", "tools") if spec.apply_chat_template else ()
        settings = {name: getattr(spec, name) for name in names if getattr(spec, name)}
        if settings not in formats:
            formats.append(settings)
    return formats


def find_processor_name(data: DataConfig, task: str) -> str | None:
    """Find the name of the processor of a task's rows."""
    return data.tasks.get(task, TaskConfig()).processor or data.processor


def find_spec_problems(data: DataConfig) -> Iterator[Problem]:
    """Find problems of configured files and processor names."""
    for section, config in _list_sections(data).items():
        # A user's processor may use the text of prompt_file in any way.
        is_opaque = _is_import_path(config.processor or data.processor or "")
        parsers: dict[str, Callable[[str], object]] = {
            "prompt_file": str if is_opaque else _check_prompt_text,
            "system_prompt_file": str,
            "chat_template": str,
            "tools": parse_tools,
        }
        for name, parse in parsers.items():
            file = getattr(config, name)
            try:
                _read(file, parse)
            except ValueError as error:
                yield Problem(f"{section}.{name}={file}", str(error))
        if config.system_prompt is not None and config.system_prompt_file is not None:
            text = f"and {section}.system_prompt are the same setting; give one of them"
            yield Problem(f"{section}.system_prompt_file", text)
        processor = config.processor
        if processor is not None and processor not in ROW_FORMS and not _is_import_path(processor):
            text = f"is not a processor; choose {', '.join(ROW_FORMS)}, or a function as package.module.function"
            yield Problem(f"{section}.processor={processor}", text)


def find_processor_problems(data: DataConfig) -> Iterator[Problem]:
    """Find processors that cannot be imported or called; imports them."""
    for section, config in _list_sections(data).items():
        try:
            find_processor(config.processor)
        except ValueError as error:
            yield Problem(f"{section}.processor={config.processor}", str(error))


def make_processors(
    data: DataConfig, tasks: Iterable[str], make: DataProcessor = math_data_processor
) -> dict[str, tuple[TaskDataSpec, DataProcessor]]:
    """Make each task's specification and processor; ConfigError: one cannot be imported."""
    if problems := list(find_processor_problems(data)):
        raise ConfigError(problems)
    return {task: (make_task_spec(data, task), find_processor(find_processor_name(data, task), make)) for task in tasks}


def _list_sections(data: DataConfig) -> dict[str, PromptConfig]:
    return {"data": data, **{f"data.tasks.{name}": task for name, task in data.tasks.items()}}


def _is_import_path(name: str) -> bool:
    return "." in name and all(part.isidentifier() for part in name.split("."))


def _choose(value: T | None, otherwise: T | None) -> T | None:
    return otherwise if value is None else value


def _read(file: str | None, parse: Callable[[str], T]) -> T | None:
    # `parse` converts the text; its ValueError says why it cannot.
    if file is None:
        return None
    try:
        return parse(Path(file).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text") from None


def _check_prompt_text(text: str) -> str:
    try:
        fields = [field for _, field, _, _ in Formatter().parse(text) if field is not None]
    except ValueError as error:
        raise ValueError(f"has a brace too many: {error}; write braces of the text as {{{{ and }}}}") from None
    if not fields:
        raise ValueError("has neither {} nor a {column}, so all prompts would be the same; write {} for the prompt")
    return text
