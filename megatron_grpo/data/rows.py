"""What keeps a row from being used, in words that name the column and the key that is about it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from megatron_grpo.config.errors import shown
from megatron_grpo.data.processors import TaskDataSpec, task_of
from megatron_grpo.data.specs import RowForm


def unusable_answer(kind: str, answer: Any) -> str | None:
    """Why no response can be right against an answer; None: one can.

    Args:
        kind: type of the environment ("math", "addition", "code"); others do not compare.
        answer: the reference answer as the row has it.
    """
    check = _CHECKS.get(kind)
    return None if check is None else check(answer)


def _math(answer: Any) -> str | None:
    if isinstance(answer, bool | list | dict):
        return f"is a JSON {_KINDS[type(answer)]}, and a response is text; write the answer as text"
    if isinstance(answer, float) and not math.isfinite(answer):
        return "is not a number that can be compared; write the answer as text"
    if isinstance(answer, float) and "e" in repr(answer):
        return f"becomes the text {answer!r}, which is not read as a number; write the answer as text"
    if isinstance(answer, str) and not answer.strip():
        return "is empty"
    return None


def _addition(answer: Any) -> str | None:
    is_digits = isinstance(answer, str) and answer.isascii() and answer.isdigit()
    is_sum = isinstance(answer, int) and not isinstance(answer, bool) and answer >= 0
    return None if is_digits or is_sum else "is not the digits of a sum, and a response has to be exactly that"


def _code(answer: Any) -> str | None:
    try:
        return None if code_tests(answer) else "is empty"
    except ValueError as error:
        return str(error)


def code_tests(answer: Any) -> list[str | tuple[str, str]]:
    """The tests that a reference answer of the code environment holds: Python statements, or (input, output).

    Args:
        answer: a text or a list of texts; a list of {"input", "output"}, or {"inputs": [...], "outputs": [...]}; or
            JSON text of a list or an object like these.

    Raises:
        ValueError: it is nothing of this.
    """
    if isinstance(answer, str) and answer.lstrip()[:1] in ("{", "["):
        try:
            answer = json.loads(answer)
        except RecursionError as error:  # thousands of brackets
            raise ValueError(f"is no JSON that can be read: {error}") from None
    if isinstance(answer, str):
        answer = [answer] if answer.strip() else []
    if isinstance(answer, dict) and _are_lists(answer.get("inputs"), answer.get("outputs")):
        pairs = zip(answer["inputs"], answer["outputs"], strict=True)
        answer = [{"input": given, "output": expected} for given, expected in pairs]
    if isinstance(answer, list):
        if all(isinstance(one, str) for one in answer):
            return list(answer)
        if all(isinstance(one, dict) and {"input", "output"} <= one.keys() for one in answer):
            return [(str(one["input"]), str(one["output"])) for one in answer]
    raise ValueError("is neither Python tests nor cases of input and output")


def _are_lists(*values: Any) -> bool:
    return all(isinstance(value, list) for value in values)


_CHECKS: dict[str, Callable[[Any], str | None]] = {"math": _math, "addition": _addition, "code": _code}
_KINDS = {bool: "boolean", list: "array", dict: "object"}

Row = dict[str, Any]


def parse_line(line: bytes) -> Row | str:
    """The object that a line of JSONL holds, or as text what keeps it from being one.

    Args:
        line: a line of the file, with or without its end.
    """
    try:
        text = line.decode().removeprefix("\ufeff")
        row = json.loads(text)
    except UnicodeDecodeError:
        return "is not UTF-8 text"
    except json.JSONDecodeError as error:
        return f"is not valid JSON: {error.msg} at column {error.colno}{_advice(error)}"
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        return f"is no JSON that can be read: {error}"
    if not isinstance(row, dict):
        return f"is {type(row).__name__}, not an object {{...}}"
    if "\\ud" in text or "\\uD" in text:
        return _broken_text(row) or row
    return row


class RowCheck:
    """Looks at rows one by one: whether there is a prompt, an answer that can be compared, and an environment."""

    def __init__(
        self,
        spec_of: Callable[[str], TaskDataSpec],
        default_task: str,
        environments: Mapping[str, str | None],
        form_of: Callable[[str], RowForm | None] = lambda task: None,
        own_processors: frozenset[str] = frozenset(),
    ) -> None:
        """
        Args:
            spec_of: what is said of a task's prompts; called once a task.
            default_task: task of rows without a task_name column.
            environments: type of each by task name, whose answers are checked; None: its answers are not.
            form_of: what brings a task's rows into form; None: they are in form.
            own_processors: tasks whose rows only a user's own processor understands.
        """
        self.default_task = default_task
        self._environments, self._own = environments, own_processors
        self._spec_of, self._form_of = spec_of, form_of
        self._known: dict[str, tuple[TaskDataSpec, RowForm | None]] = {}

    def task(self, row: Row) -> Any:
        """Task name of a row, whatever it is."""
        return task_of(row, self.default_task)

    def in_form(self, row: Row) -> Row | str:
        """The row in the form that its task has, or as text why it cannot be used."""
        task = self.task(row)
        if not isinstance(task, str) or task not in self._environments:
            # The columns first: who mistypes a file gives the wrong one, and its rows say more than its task does.
            own = self.default_task in self._own
            missing = None if own else _missing_column(row, self._of(self.default_task)[0])
            known = ", ".join(sorted(self._environments))
            return missing or f"task_name {task!r} is no environment; env has {known}"
        if task in self._own:
            return row
        spec, form = self._of(task)
        if form is not None:
            try:
                row = form(row)
            except ValueError as error:
                return f"is not of the form of data.processor: {error}"
        return self._problem(row, spec, self._environments[task]) or row

    def prompt(self, row: Row) -> Any:
        """The prompt of a row in form; of a row that only its own processor understands, the row."""
        task = self.task(row)
        return row if task in self._own else row[self._of(task)[0].prompt_key]

    def _of(self, task: str) -> tuple[TaskDataSpec, RowForm | None]:
        if task not in self._known:
            self._known[task] = (self._spec_of(task), self._form_of(task))
        return self._known[task]

    @staticmethod
    def _problem(row: Row, spec: TaskDataSpec, kind: str | None) -> str | None:
        missing = _missing_column(row, spec)
        if missing is not None:
            return missing
        prompt = row[spec.prompt_key]
        if isinstance(prompt, list) and not spec.apply_chat_template:
            return f"column {spec.prompt_key!r} is a list of messages, which needs data.apply_chat_template=true"
        if not ((isinstance(prompt, str) and prompt) or is_conversation(prompt)):
            return f"column {spec.prompt_key!r} is neither a text nor a list of {{role, content}} messages"
        if spec.answer_key is None or kind is None:
            return None
        reason = unusable_answer(kind, row[spec.answer_key])
        given = shown(json.dumps(row[spec.answer_key], default=str))
        return f"column {spec.answer_key!r} (data.answer_key) {reason}: {given}" if reason else None


def _missing_column(row: Row, spec: TaskDataSpec) -> str | None:
    for setting, column in (("prompt_key", spec.prompt_key), ("answer_key", spec.answer_key)):
        if column is not None and column not in row:
            return f"has no column {column!r} (data.{setting}); it has {', '.join(map(str, row)) or 'none'}"
    if spec.answer_key is not None and row[spec.answer_key] is None:
        return f"column {spec.answer_key!r} (data.answer_key) is null; every prompt needs a reference answer"
    return None


def _advice(error: json.JSONDecodeError) -> str:
    """What to do about a line that is no JSON, as far as it can be guessed."""
    text = error.doc.rstrip()
    if text[error.pos : error.pos + 1] == "'":
        return "; texts stand in double quotes"
    cut_off = error.pos >= len(text) or error.msg.startswith("Unterminated string")
    return "; is the file truncated?" if cut_off else ""


def _broken_text(row: Row) -> str | None:
    """The column with half of a surrogate pair in it, which JSON can write and no text can hold."""
    for name, value in row.items():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start].encode("unicode_escape").decode()
            name = name.encode("unicode_escape").decode()
            return f"column {name!r} has {half}, half of a pair that stands for one character; drop the row or the half"
    return None


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of {role, content} messages, and not empty."""
    return isinstance(value, list) and bool(value) and all(_is_message(turn) for turn in value)


def _is_message(turn: Any) -> bool:
    return isinstance(turn, dict) and all(isinstance(turn.get(key), str) for key in ("role", "content"))
