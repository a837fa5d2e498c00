"""Reward functions for the addition data, as a user would write them."""

from typing import Any


def right(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """1 for the digits of the answer."""
    return [float(completion == digits) for completion, digits in zip(completions, answer, strict=True)]


def three_digits(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float | None]:
    """1 for an answer of three digits; no opinion on sums that begin with 1."""
    return [
        None if prompt.startswith("1") else float(len(completion) == 3)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def right_if_even(completions: list[str], answer: list[str], **kwargs: Any) -> list[float | None]:
    """1 for the digits of the answer; no opinion where they are an odd number."""
    return [
        None if int(digits) % 2 else float(text == digits) for text, digits in zip(completions, answer, strict=True)
    ]
