"""The problems that prepared models learn: sums, products, Countdown games."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from megatron_grpo.config.gym_schema import GymConfig
from megatron_grpo.data.gym_rows import GymRows
from megatron_grpo.models.source import CALL_BEGIN, CALL_END
from megatron_grpo.prepare.pictures import draw_counting_rows

TRAIN_FILE, VAL_FILE = "train.jsonl", "val.jsonl"
ANSWER_DIGITS = 3

_RECIPES_FILE = Path(__file__).with_name("recipes.yaml")
RECIPES: dict[str, dict[str, Any]] = yaml.safe_load(_RECIPES_FILE.read_text(encoding="utf-8"))  # by name of the model


@dataclass(frozen=True, slots=True)
class Lesson:
    """A problem with a conversation that solves it."""

    row: dict[str, Any]  # of the problem in the file of prompts
    turns: tuple[tuple[str, bool], ...]
    """(text, whether the model writes it) of each turn after the prompt; the model ends each of its turns."""


# Lessons of the warm-up, of training and of validation; no problem is in two of them.
Split = tuple[list[Lesson], list[Lesson], list[Lesson]]


def split_lessons(name: str) -> Split:
    """Make and split the lessons of a prepared model, one of RECIPES."""
    recipe = RECIPES[name]
    if name == "calculator":
        return _split_randomly(_make_products(), recipe)
    if name == "preference":
        return _split_randomly(_make_pairs(recipe["seed"]), recipe)
    if name == "labelled":
        return _split_randomly(_make_labelled(recipe["seed"]), recipe)
    if name == "addition_text":
        return _split_text_sums(recipe)
    if name == "counting":
        return _split_pictures(recipe)
    if name != "two_tasks":
        return _split_randomly(_make_sums(), recipe)
    sums, games = split_lessons("addition"), _split_randomly(_make_games(), recipe)
    # Training has as many sums as games, so that a step samples equally many of both.
    warmup, train, val = sums[0], sums[1][: len(games[1])], sums[2][: recipe["val_problems"]]
    return warmup + games[0], train + games[1], val + games[2]


@cache
def make_prompt_rows(name: str) -> dict[str, list[dict[str, Any]]]:
    """Make the prompt files of a prepared model: rows by file name."""
    _, train, val = split_lessons(name)
    return {file: [lesson.row for lesson in lessons] for file, lessons in ((TRAIN_FILE, train), (VAL_FILE, val))}


def _split_randomly(problems: Iterable[Lesson], recipe: Mapping[str, Any]) -> Split:
    lessons = list(problems)
    random.Random(recipe["seed"]).shuffle(lessons)
    val, remaining = lessons[: recipe["val_problems"]], lessons[recipe["val_problems"] :]
    warmup = recipe.get("warmup_problems") or round(len(remaining) * recipe["warmup_share"])
    return remaining[:warmup], remaining[warmup:], val


def _split_pictures(recipe: Mapping[str, Any]) -> Split:
    counts = [recipe[key] for key in ("warmup_problems", "train_problems", "val_problems")]
    rows = draw_counting_rows(sum(counts), recipe["seed"])
    warmup, train, val = ([Lesson(row, ((row["answer"], True),)) for row in islice(rows, count)] for count in counts)
    return warmup, train, val


def _make_sums() -> Iterator[Lesson]:
    """Make all sums of two two-digit numbers: "37+58=" has the answer "095"."""
    for a, b in product(range(10, 100), repeat=2):
        answer = f"{a + b:0{ANSWER_DIGITS}}"
        yield Lesson({"prompt": f"{a}+{b}=", "answer": answer, "task_name": "addition"}, ((answer, True),))


def _make_pairs(seed: int) -> Iterator[Lesson]:
    """Make the sums, each with a wrong answer that differs in one digit."""
    randomness = random.Random(seed)
    for lesson in _make_sums():
        digits = list(lesson.row["answer"])
        position = randomness.randrange(ANSWER_DIGITS)
        digits[position] = randomness.choice([digit for digit in "0123456789" if digit != digits[position]])
        yield Lesson({**lesson.row, "wrong": "".join(digits)}, lesson.turns)


def _make_labelled(seed: int) -> Iterator[Lesson]:
    """Make the sums, each with a labelled response."""
    for number, lesson in enumerate(_make_pairs(seed)):
        wrong, is_right = lesson.row.pop("wrong"), number % 2 == 0
        response = lesson.row["answer"] if is_right else wrong
        yield Lesson({**lesson.row, "response": response, "label": is_right}, lesson.turns)


def _split_text_sums(recipe: Mapping[str, Any]) -> Split:
    """Split the sums that reasoning_gym asks for; its held-out rows are for validation."""
    rows = GymRows(TypeAdapter(GymConfig).validate_python(recipe["gym"]), "test").rows
    held_out = {row["prompt"]: str(row["answer"]) for row in rows}
    sums = {f"Calculate {a} + {b}.": str(a + b) for a, b in product(range(101), repeat=2)}
    lessons = {prompt: _make_text_sum(prompt, answer) for prompt, answer in {**sums, **held_out}.items()}
    val = [lessons.pop(prompt) for prompt in held_out]
    warmup, train, _ = _split_randomly(lessons.values(), {**recipe, "val_problems": 0})
    return warmup, train, val


def _make_text_sum(prompt: str, answer: str) -> Lesson:
    return Lesson({"prompt": prompt, "answer": answer, "task_name": "reasoning_gym"}, ((answer, True),))


def _make_products() -> Iterator[Lesson]:
    """Make the four-digit products of two two-digit numbers."""
    for a, b in product(range(10, 100), repeat=2):
        result = str(a * b)
        if len(result) == 4:  # one length, so that the result's last token is known
            row = {"prompt": f"{a}*{b}=", "answer": result, "task_name": "tools"}
            yield Lesson(row, ((f"{CALL_BEGIN}{a}*{b}{CALL_END}", True), (result, False), (result, True)))


def _make_games() -> Iterator[Lesson]:
    """Make Countdown games with three numbers, each with its first solution."""
    for numbers in product(range(1, 10), repeat=3):
        solutions: dict[int, tuple[tuple[str, bool], ...]] = {}
        for a, b, c in permutations(numbers):
            for result in (a + b, a - b):
                for target in (result + c, result - c):
                    if result >= 0 and target > 0 and target not in solutions:
                        solutions[target] = (
                            (f"{a}{'+' if result == a + b else '-'}{b}", True),
                            (f"{c},{result}=", False),
                            (f"{result}{'+' if target == result + c else '-'}{c}", True),
                        )
        for target, turns in solutions.items():
            row = {"prompt": f"{','.join(map(str, numbers))}:{target}=", "answer": target, "numbers": numbers}
            yield Lesson({**row, "target": target, "task_name": "countdown"}, turns)
