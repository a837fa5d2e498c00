"""An environment whose turns show pictures: squares to count, more in every turn."""

from __future__ import annotations

import random
from typing import Any

from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn, Turn
from megatron_grpo.environments.interface import Environment
from megatron_grpo.prepare.pictures import LARGEST, QUESTION, draw_squares


class ShowingEnvironment(Environment):
    """Shows a further picture after each answer; the reward is the share of right counts.

    A row whose answer is no number has no reward.
    """

    multi_turn = True

    def __init__(self, turns: int = 2) -> None:
        self.turns = turns

    def reset(self, prompt: str | list[dict[str, str]], extra_env_info: dict[str, Any]) -> dict[str, Any]:
        return {"expected": [extra_env_info["answer"]], "answers": []}

    def step(self, state: dict[str, Any], response: str) -> Turn:
        expected, answers = state["expected"], [*state["answers"], response]
        if len(answers) == self.turns:
            return Turn(state={"expected": expected, "answers": answers})
        randomness = random.Random(f"{expected}{len(answers)}")
        squares = randomness.randint(1, LARGEST)
        image = {"type": "image_url", "image_url": {"url": draw_squares(squares, randomness)}}
        message = {"role": "user", "content": [image, {"type": "text", "text": QUESTION}]}
        return Turn(done=False, state={"expected": [*expected, str(squares)], "answers": answers}, messages=[message])

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        scores = []
        for request in requests:
            pairs = zip(request.state["expected"], request.state["answers"], strict=False)
            is_number = request.state["expected"][0].isdigit()
            shares = [float(is_number and expected == answer) for expected, answer in pairs]
            scores.append(EnvironmentReturn(reward=sum(shares) / self.turns, correct=sum(shares) == self.turns))
        return scores
