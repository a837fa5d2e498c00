"""Ray actor that runs an environment and tokenizes its texts."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import islice
from typing import Any, TypeVar

import ray

from megatron_grpo.batch.environment_metrics import name_reported_metrics
from megatron_grpo.batch.images import Images, StoredImage
from megatron_grpo.cluster.futures import wrap_for_pickling
from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.process_log import begin_process_log
from megatron_grpo.config.data_schema import EnvironmentConfig
from megatron_grpo.config.errors import ResponseError, RunError
from megatron_grpo.config.outside_text import describe_error, make_line, make_name, make_note
from megatron_grpo.data.image_prompts import TooManyImagesError
from megatron_grpo.data.image_rows import attach_images
from megatron_grpo.data.prompt_renderer import PromptRenderer
from megatron_grpo.data.scores import (
    EncodedTurn,
    EnvironmentRequest,
    EnvironmentReturn,
    ModelAccess,
    ResponseFault,
    ScoreOrError,
    is_reward,
)
from megatron_grpo.environments.interface import STARTUP_S, EnvironmentSettings, EnvironmentStatus
from megatron_grpo.environments.observations import ObservationEncoder, fill_turn
from megatron_grpo.environments.process_guard import start_guard
from megatron_grpo.environments.registry import create_environment
from megatron_grpo.environments.reward_model import RewardModelClient
from megatron_grpo.environments.states import pack_state, unpack_state
from megatron_grpo.environments.user_functions import find_place

Value = TypeVar("Value")
MAX_NOTES = 100  # of a response; further ones are left out, with a message
_warn_once = cache(logging.getLogger(__name__).warning)

# Deadline in seconds for loading a reward model, shorter than that of the process that waits for it, so that the error
# names the model.
REWARD_MODEL_STARTUP_S = STARTUP_S - 100.0


class InvalidScoresError(ResponseError):
    """An environment returned something else than a score per response."""


class EnvironmentWorker:
    """Ray actor of one environment.

    It is synchronous, so that the environment runs on the main thread, where Python delivers signals. A method returns
    an exception of the environment as a line of text.
    States travel pickled, so that only environment processes need their classes.
    """

    def __init__(
        self,
        name: str,
        config: EnvironmentConfig,
        settings: EnvironmentSettings,
        rewards: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        begin_process_log(f"environment {name} worker {os.getpid()}")
        self._name, self._config, self._settings, self._rewards = name, config, settings, rewards or {}

    @cached_property
    def _encoder(self) -> ObservationEncoder:
        renderer = PromptRenderer(self._settings.load_tokenizer(), self._settings.prompts)
        return ObservationEncoder(renderer, self._settings.images)

    def start(self) -> EnvironmentStatus:
        """Make the environment; must be called first."""
        start_guard()
        for reward in self._rewards.values():
            if isinstance(reward, RewardModelClient):
                reward.wait_ready(REWARD_MODEL_STARTUP_S)
        self._environment = create_environment(self._config, self._settings, self._rewards)
        return EnvironmentStatus(
            node_id=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            multi_turn=self._environment.multi_turn,
            has_agent=self._environment.agent,
            reads_token_ids=self._environment.reads_token_ids,
        )

    @phase("score")
    def run(self, call: tuple[Callable[..., Any], tuple[Any, ...]]) -> Any:
        """Run a call of `EnvironmentClient`; returns its answer, pickled.

        call: a method of this class, and its arguments.
        """
        method, arguments = call
        return wrap_for_pickling(method(self, *arguments))

    def reset(self, prompt: str | list[dict[str, str]], extra_env_info: dict[str, Any]) -> bytes | str:
        """Return a rollout's first state, packed, or an error message."""
        return self._catch_errors(lambda: pack_state(self._environment.reset(prompt, extra_env_info)))

    def step(
        self, state: bytes, response: str, last_token: int, images: Images = ()
    ) -> EncodedTurn | ResponseFault | str:
        """Answer a response that ends with `last_token`.

        `images`: of the conversation so far.
        """
        return self._catch_faults(partial(self._make_turn, state, response, last_token, images))

    def _make_turn(self, state: bytes, response: str, last_token: int, earlier: Images) -> EncodedTurn:
        turn = self._environment.step(unpack_state(state), response)
        observation = fill_turn(turn.observation, [], self._settings.images)
        images, ending = list[StoredImage](), ""
        # With a chat template an empty text (such as the output of a program) is a message too: without it the model
        # would continue after the end of its own message.
        is_message = self._settings.prompts.apply_chat_template and not len(observation)
        if not turn.done and (turn.text or turn.messages or is_message):
            messages = turn.messages or [{"role": turn.role, "content": turn.text}]
            try:
                observation, images = self._encoder.encode(messages, last_token, earlier)
            except TooManyImagesError as error:
                ending = f"with the next turn of environment {self._name} the conversation {error}"
        reward = None if turn.reward is None else float(turn.reward)  # NumPy's and torch's numbers too
        if reward is not None and not is_reward(reward):
            name = type(self._environment).__name__
            text = f"{name}.step returned the reward {reward}; None says that a turn has no reward of its own"
            raise InvalidScoresError(text)
        return EncodedTurn(
            done=turn.done,
            state=pack_state(turn.state),
            reward=reward,
            observation=observation,
            images=images,
            ending=ending,
        )

    def act(
        self, prompt: Any, extra_env_info: dict[str, Any], access: ModelAccess, images: Images = ()
    ) -> bytes | ResponseFault | str:
        """Run the agent; returns the rollout's state as `reset` does.

        `images`: of the prompt, which the agent gets as data URLs.
        """
        if images:
            assert self._settings.images is not None, "the run takes images"
            store = self._settings.images.store
            prompt = attach_images(prompt, [(store / image.digest).read_bytes() for image in images])
        return self._catch_faults(lambda: pack_state(self._environment.act(prompt, extra_env_info, access)))

    def score(self, requests: list[EnvironmentRequest]) -> list[ScoreOrError] | ResponseFault | str:
        """Score a prompt's samples together, or return an error message."""
        return self._catch_faults(partial(self._score, requests))

    def _score(self, requests: list[EnvironmentRequest]) -> list[ScoreOrError]:
        requests = [replace(request, state=request.state and unpack_state(request.state)) for request in requests]
        scores = self._environment.score(requests)
        name, count = f"{type(self._environment).__name__}.score", len(requests)
        if not isinstance(scores, Sequence) or isinstance(scores, str):
            raise InvalidScoresError(
                f"{name} returned {type(scores).__name__} for {count} responses, not a list of scores"
            )
        if len(scores) != count:
            raise InvalidScoresError(f"{name} returned {len(scores)} scores for {count} responses")
        for score in scores:
            if not isinstance(score, EnvironmentReturn | str):
                raise InvalidScoresError(
                    f"{name} returned {type(score).__name__}, not EnvironmentReturn; {count} are expected"
                )
        texts = f"environment {self._name}: "
        return [
            make_line(texts + score) if isinstance(score, str) else self._convert_score(name, score) for score in scores
        ]

    def _convert_score(self, name: str, score: EnvironmentReturn) -> EnvironmentReturn:
        reward = None if score.reward is None else float(score.reward)
        if not all(map(is_reward, [*score.parts.values(), *([] if reward is None else [reward])])):
            raise InvalidScoresError(f"{name} returned the reward {reward}; None says that a response has no reward")
        if len(score.notes) > MAX_NOTES:
            _warn_once(f"environment {self._name}: a response has more than {MAX_NOTES} notes; the others are left out")
        return replace(  # with Python's types: files refuse those of NumPy and torch
            score,
            reward=reward,
            correct=None if score.correct is None else bool(score.correct),
            parts={make_name(str(name)): float(part) for name, part in score.parts.items()},
            metrics=name_reported_metrics(score.metrics),
            notes={
                make_name(str(name)): make_note(note if isinstance(note, str) else repr(note))
                for name, note in islice(score.notes.items(), MAX_NOTES)
            },
        )

    def _catch_errors(self, call: Callable[[], Value]) -> Value | str:
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - a user's environment may raise anything; the rollout fails with this message
            return self._describe(error)

    def _catch_faults(self, call: Callable[[], Value]) -> Value | ResponseFault | str:
        """Catch errors of code that reads a response; a text if a server failed."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - as above
            return self._describe(error) if is_outside(error) else ResponseFault(self._describe(error))

    def _describe(self, error: Exception) -> str:
        if isinstance(error, RunError):
            return make_line(f"environment {self._name}: {error}")
        location = find_place(error, self._environment)
        return make_line(f"environment {self._name}: {describe_error(error)} ({location})")


def is_outside(error: BaseException) -> bool:
    """True if a server failed or a module is missing."""
    # Clients such as httpx and openai raise errors of their own while they handle the connection's, and may hide it.
    causes: list[BaseException] = []
    while error not in causes:
        if isinstance(error, RunError | ConnectionError | TimeoutError | ImportError) and not isinstance(
            error, ResponseError
        ):
            return True
        causes.append(error)
        error = error.__cause__ or error.__context__ or error
    return False
