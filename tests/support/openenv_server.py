"""An OpenEnv server for tests, of openenv-core: `python openenv_server.py PORT`. A number has to be guessed."""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    message: str


class Hint(Observation):
    text: str


class Guessing(Environment):
    """Rewards a guess by its distance; the right one ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number = self.guesses = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
        self.number, self.guesses = seed or 0, 0
        return Hint(text="guess")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        self.guesses += 1
        distance = self.number - int(action.message)
        text = f"{self.guesses}: {'larger' if distance > 0 else 'smaller'}"
        return Hint(text=text, reward=-0.25 if distance else 1.0, done=not distance)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=3)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
