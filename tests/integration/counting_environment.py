"""An environment of several turns for tests: it counts them, and says their number."""

from dataclasses import dataclass, replace
from typing import Any

from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn, Turn
from megatron_grpo.environments.interface import Environment


@dataclass(frozen=True)
class Seen:
    """A state of a class that only the environment's processes need to know."""

    turns: tuple[str, ...] = ()


class CountingEnvironment(Environment):
    """Ends after some turns; the reward is their number."""

    multi_turn = True

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    def reset(self, prompt: str | list[dict[str, str]], extra_env_info: dict[str, Any]) -> Seen:
        return Seen()

    def step(self, state: Seen, response: str) -> Turn:
        state = replace(state, turns=(*state.turns, response))
        return Turn(done=len(state.turns) == self.turns, state=state, text=f"x{len(state.turns)}y")

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        assert all("".join(request.state.turns) == request.response for request in requests)
        return [EnvironmentReturn(reward=float(len(request.state.turns)), correct=True) for request in requests]
