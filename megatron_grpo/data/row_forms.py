"""How rows of public datasets, whose columns have names of their own, become rows with a prompt and an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_grpo.config.importing import imported
from megatron_grpo.data.interfaces import DataProcessor, DatumSpec, TaskDataSpec
from megatron_grpo.data.processors import math_data_processor, rendered

RowForm = Callable[[dict[str, Any]], dict[str, Any]]
"""A row of a dataset -> the same with `prompt` and `answer`; ValueError when it is not of the dataset's shape."""


def gsm8k(row: dict[str, Any]) -> dict[str, Any]:
    """GSM8K (openai/gsm8k): question, and a worked answer whose last line is `#### 72`."""
    solution = _text(row, "answer")
    _, mark, answer = solution.rpartition("####")
    if not mark or not answer.strip():
        raise ValueError("column 'answer' has no final answer after ####")
    return {**row, "prompt": _text(row, "question"), "answer": answer.strip().replace(",", ""), "solution": solution}


def math(row: dict[str, Any]) -> dict[str, Any]:
    """MATH and DeepScaleR: problem, and an answer, or a solution with the answer in its last box."""
    answer = row.get("answer")
    if answer is None or (isinstance(answer, str) and not answer.strip()):
        answer = last_box(_text(row, "solution"))
        if answer is None:
            raise ValueError("there is no column 'answer', and column 'solution' has no \\boxed{...}")
    return {**row, "prompt": _text(row, "problem"), "answer": str(answer).strip()}


def dapo_math(row: dict[str, Any]) -> dict[str, Any]:
    """DAPO-Math-17k: a prompt of messages, and the answer in reward_model.ground_truth."""
    prompt = row.get("prompt")
    reward = row.get("reward_model")
    if not isinstance(prompt, list | str) or not prompt:
        raise ValueError("column 'prompt' is neither a text nor a list of messages")
    answer = reward.get("ground_truth") if isinstance(reward, dict) else row.get("solution")
    if answer is None or not str(answer).strip():
        raise ValueError("column 'reward_model' has no ground_truth")
    return {**row, "prompt": prompt, "answer": str(answer).strip()}


def openmathinstruct2(row: dict[str, Any]) -> dict[str, Any]:
    """OpenMathInstruct-2 (nvidia/OpenMathInstruct-2): problem and expected_answer; the solution is not passed on."""
    others = {name: value for name, value in row.items() if name != "generated_solution"}
    return {**others, "prompt": _text(row, "problem"), "answer": _text(row, "expected_answer").strip()}


def tldr(row: dict[str, Any]) -> dict[str, Any]:
    """TL;DR (trl-lib/tldr): a post as the prompt, and a person's summary as the completion."""
    return {**row, "prompt": _text(row, "prompt"), "answer": _text(row, "completion").strip()}


def countdown(row: dict[str, Any]) -> dict[str, Any]:
    """Countdown (Jiayi-Pan/Countdown-Tasks-3to4): the numbers `nums` that are to make the number `target`."""
    numbers, target = row.get("nums"), row.get("target")
    if not isinstance(numbers, list) or not numbers or not all(map(_is_whole, numbers)):
        raise ValueError("column 'nums' is no list of whole numbers")
    if not _is_whole(target):
        raise ValueError("column 'target' is no whole number")
    prompt = (
        f"Use each of the numbers {', '.join(map(str, numbers))} exactly once, with +, -, * and / and parentheses, to "
        f"make {target}. Think first, then give the expression between <answer> and </answer>, for example "
        "<answer> (1 + 2) / 3 </answer>."
    )
    return {**row, "prompt": prompt, "answer": str(target)}


ROW_FORMS: dict[str, RowForm] = {
    "gsm8k": gsm8k,
    "math": math,
    "dapo_math": dapo_math,
    "openmathinstruct2": openmathinstruct2,
    "tldr": tldr,
    "countdown": countdown,
}
"""By the name that data.processor has for them."""


def processor_of(name: str | None) -> DataProcessor:
    """The processor that data.processor names: one of the above, or a function by its import path.

    Raises:
        ValueError: it cannot be imported, or not be called.
    """
    if name is None:
        return math_data_processor
    if name in ROW_FORMS:
        return _Formed(ROW_FORMS[name])
    module, _, function = name.rpartition(".")
    found: DataProcessor = imported(module, function)
    if not callable(found):
        raise ValueError(f"is {type(found).__name__}, which cannot be called")
    return found


def rendering_of(processor: DataProcessor) -> Callable[[dict[str, Any], TaskDataSpec, Any, int], str] | None:
    """What makes the text of a prompt, before it is tokenised, as a processor does; None: only a user's own knows.

    Args:
        processor: what `processor_of` has found.
    """
    if processor is math_data_processor:
        return rendered
    return processor.rendered if isinstance(processor, _Formed) else None


class _Formed:
    """A processor of rows that have to be brought into form first."""

    def __init__(self, form: RowForm) -> None:
        self._form = form

    def rendered(self, row: dict[str, Any], spec: TaskDataSpec, tokenizer: Any, idx: int) -> str:
        """The text of the row's prompt, as `processors.rendered` makes it."""
        return rendered(self._form(row), spec, tokenizer, idx)

    def __call__(self, row: dict[str, Any], spec: TaskDataSpec, tokenizer: Any, longest: int, idx: int) -> DatumSpec:
        return math_data_processor(self._form(row), spec, tokenizer, longest, idx)


def last_box(text: str) -> str | None:
    """What stands in the last complete \\boxed{...} of a text, whatever nests in it; None: there is none."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth, begin = 0, start + len("\\boxed")
        for place in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[begin + 1 : place]
        start = text.rfind("\\boxed{", 0, start)
    return None


def _text(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"column {column!r} is no text; the row has {', '.join(map(str, row)) or 'none'}")
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
