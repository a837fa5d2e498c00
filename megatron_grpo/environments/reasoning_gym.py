"""Scores of reasoning_gym: each task judges its answers."""

from __future__ import annotations

import ast
import inspect
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

from megatron_grpo.config.errors import RunError
from megatron_grpo.data.gym_rows import ENTRY, GymEntry, GymError, create_dataset, import_library
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn
from megatron_grpo.environments.interface import Environment
from megatron_grpo.environments.plain_answers import is_plain

ANSWER_TIMEOUT_S = 5.0  # an answer whose scoring takes longer is wrong
_BEGIN, _END = "<answer>", "</answer>"
_EVALUATORS = {"eval", "exec", "parse_expr", "sympify"}


class ReasoningGymEnvironment(Environment):
    """Reward from 0 to 1 by the task's scorer; correct at 1.

    The answer is the text between the last <answer> and </answer>, or the whole response without them. Some scorers
    evaluate answers as Python; their tasks accept only literals and small formulas.
    """

    needs_columns = (ENTRY,)

    def __init__(self) -> None:
        try:
            import_library()
        except GymError as error:
            raise RunError(str(error)) from error
        self._datasets: dict[tuple[str, str], Any] = {}

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        rewards = [self._score_answer(request.extra_env_info[ENTRY], request.response) for request in requests]
        return [EnvironmentReturn(reward=reward, correct=reward >= 1) for reward in rewards]

    def _score_answer(self, entry: GymEntry, response: str) -> float:
        answer = find_tagged_answer(response).strip()
        if is_evaluating(entry.task) and not is_plain(answer):
            return 0.0
        key = entry.task, repr(sorted(entry.options.items()))
        if key not in self._datasets:
            self._datasets[key] = create_dataset(entry.task, entry.options)
        try:
            with limit_time(ANSWER_TIMEOUT_S):
                return float(self._datasets[key].score_answer(answer, dict(entry.item)))
        except Exception:  # noqa: BLE001 - scorers raise anything about answers that they do not expect
            return 0.0


@cache
def is_evaluating(task: str) -> bool:
    """True if the task's scorer may evaluate an answer as Python."""
    dataset, _ = import_library().factory.DATASETS[task]
    module: Any = inspect.getmodule(dataset)
    calls = (node.func for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Call))
    names = {call.id if isinstance(call, ast.Name) else getattr(call, "attr", "") for call in calls}
    # A function of the task itself may have the name of sympy's.
    return any(getattr(vars(module).get(name), "__module__", "") != module.__name__ for name in names & _EVALUATORS)


@contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after `seconds`; main thread only."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    handler = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def find_tagged_answer(response: str) -> str:
    """Find the text between the last <answer> and </answer>; else the response."""
    # In linear time, also for many tags without an end.
    answer, position = response, 0
    while (begin := response.find(_BEGIN, position)) >= 0:
        position = response.find(_END, begin)
        if position < 0:
            break
        answer = response[begin + len(_BEGIN) : position]
    return answer
