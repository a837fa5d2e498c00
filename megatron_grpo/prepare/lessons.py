"""The problems that prepared models are taught: sums, products with a calculator, and Countdown games."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from pathlib import Path
from typing import Any

import yaml

from megatron_grpo.models.source import CALL_BEGIN, CALL_END, EOS, PAD

ANSWER_DIGITS = 3

RECIPES: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("recipes.yaml").read_text(encoding="utf-8")
)
"""Recipes by name of the model."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A problem with a conversation that solves it."""

    row: dict[str, Any]
    """The problem's row in the file of prompts."""
    turns: tuple[tuple[str, bool], ...]
    """For each turn after the prompt: its text, and whether the model writes it. The model ends each of its turns."""


Split = tuple[list[Lesson], list[Lesson], list[Lesson]]
"""Lessons of the warm-up, of training and of validation; no problem is in two of them."""


def split_lessons(name: str) -> Split:
    """The lessons of a prepared model, one of RECIPES."""
    recipe = RECIPES[name]
    if name == "calculator":
        return _split(list(_products()), recipe)
    if name != "two_tasks":
        return _split(_sums(), recipe)
    sums, games = split_lessons("addition"), _split(list(_games()), recipe)
    # Training has as many sums as games, so that a step samples equally many of both.
    warmup, train, val = sums[0], sums[1][: len(games[1])], sums[2][: recipe["val_problems"]]
    return warmup + games[0], train + games[1], val + games[2]


def _split(lessons: list[Lesson], recipe: Mapping[str, Any]) -> Split:
    random.Random(recipe["seed"]).shuffle(lessons)
    val, rest = lessons[: recipe["val_problems"]], lessons[recipe["val_problems"] :]
    warmup = recipe["warmup_problems"] if "warmup_problems" in recipe else round(len(rest) * recipe["warmup_share"])
    return rest[:warmup], rest[warmup:], val


def _sums() -> list[Lesson]:
    """All sums of two two-digit numbers: {"prompt": "37+58=", "answer": "095", "task_name": "addition"}."""
    lessons = []
    for left, right in product(range(10, 100), repeat=2):
        answer = f"{left + right:0{ANSWER_DIGITS}}"
        row = {"prompt": f"{left}+{right}=", "answer": answer, "task_name": "addition"}
        lessons.append(Lesson(row, ((answer, True),)))
    return lessons


def _products() -> Iterator[Lesson]:
    """Products of two-digit numbers that have four digits, so that the end of the calculator's result is known."""
    for left, right in product(range(10, 100), repeat=2):
        result = str(left * right)
        if len(result) == 4:
            row = {"prompt": f"{left}*{right}=", "answer": result, "task_name": "tools"}
            yield Lesson(row, ((f"{CALL_BEGIN}{left}*{right}{CALL_END}", True), (result, False), (result, True)))


def _games() -> Iterator[Lesson]:
    """Countdown games with three numbers, sums and differences; of several solutions the first is taken."""
    for numbers in product(range(1, 10), repeat=3):
        solutions: dict[int, tuple[tuple[str, bool], ...]] = {}
        for left, right, last in permutations(numbers):
            for first in (left + right, left - right):
                for target in (first + last, first - last):
                    if first >= 0 and target > 0 and target not in solutions:
                        solutions[target] = (
                            (f"{left}{'+' if first == left + right else '-'}{right}", True),
                            (f"{last},{first}=", False),
                            (f"{first}{'+' if target == first + last else '-'}{last}", True),
                        )
        for target, turns in solutions.items():
            row = {"prompt": f"{','.join(map(str, numbers))}:{target}=", "answer": target, "numbers": numbers}
            yield Lesson({**row, "target": target, "task_name": "countdown"}, turns)


def encode(lessons: Sequence[Lesson], vocabulary: Mapping[str, int]) -> tuple[Any, Any]:
    """Conversations as token ids, and a mask of the model's tokens.

    Returns:
        The token ids, [lessons, longest], int64, padded at the end; and the mask, bool, of the same shape.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    tokens, of_model = [], []
    for lesson in lessons:
        ids = _ids(lesson.row["prompt"], vocabulary)
        own = [False] * len(ids)
        for text, by_model in lesson.turns:
            turn = _ids(text, vocabulary) + [vocabulary[EOS]] * by_model
            ids += turn
            own += [by_model] * len(turn)
        tokens.append(torch.tensor(ids))
        of_model.append(torch.tensor(own))
    padded = pad_sequence(tokens, batch_first=True, padding_value=vocabulary[PAD])
    return padded, pad_sequence(of_model, batch_first=True)


def _ids(text: str, vocabulary: Mapping[str, int]) -> list[int]:
    """Token ids of a text: each begin or end mark of a call is one token, and so is every other character."""
    return [vocabulary[piece] for piece in re.findall(f"{re.escape(CALL_BEGIN)}|{re.escape(CALL_END)}|.", text)]
