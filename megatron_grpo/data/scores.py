"""Requests to an environment and its answers: one response to score, one score, one turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.data.trajectory import StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """How far the run was when a response was asked for, under the names that TRL gives its reward functions."""

    global_step: int = 0
    """Steps that were completed."""
    max_steps: int = 0
    """Steps after which training ends."""
    epoch: float = 0.0
    """Passes over the training data that were completed."""
    num_train_epochs: int = 0
    """Passes over the training data after which training ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRequest:
    """One response to score."""

    prompt: str | list[dict[str, str]]
    response: str
    """Everything that the model wrote; of several turns, one after the other."""
    stop_reason: StopReason
    extra_env_info: dict[str, Any]
    """What the prompt's row says beside the prompt (`DatumSpec`): other columns, the reference answer."""
    state: Any = None
    """What the environment's `reset` and `step` made of this rollout; None in an environment of a single turn."""
    response_ids: NDArray[np.int32] | None = None
    """[sampled tokens], int32: the response as it was sampled; None in an environment that does not ask for it."""
    trainer_state: TrainerState = field(default_factory=TrainerState)


@dataclass(slots=True)
class EnvironmentReturn:
    """The score of one response."""

    reward: float | None
    """Reward of the response; None: no reward function gave one, and nothing is learnt from the response."""
    correct: bool | None
    """Whether the response is correct; None: the environment cannot say."""
    parts: dict[str, float] = field(default_factory=dict)
    """Reward of each reward function that gave one, unweighted, when the reward is the sum of several."""
    errors: int = 0
    """Reward functions that failed over the response and were taken to have no opinion."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Figures that the environment reports beside the reward; a step reports their means over its responses."""
    notes: dict[str, str] = field(default_factory=dict)
    """What people are to read of the response, in the file of the step's rollouts."""


def _no_tokens() -> NDArray[np.int32]:
    """[0], int32: an observation of nothing."""
    return np.empty(0, dtype=np.int32)


@dataclass(slots=True, kw_only=True)
class Turn:
    """An environment's answer to a response."""

    done: bool = True
    """Whether the rollout is over and can be scored."""
    state: Any = None
    """What the environment wants back in its next call about this rollout; travels between processes."""
    text: str = ""
    """What the model reads before it goes on. It becomes the observation: with data.apply_chat_template as a message
    of the conversation, in the form that the tokenizer's chat template gives it, else as it stands."""
    role: str = "user"
    """Whose message the text is, for the chat template: "user" or "tool"."""
    observation: NDArray[np.int32] = field(default_factory=_no_tokens)
    """[tokens], int32: what the model reads, in tokens, from an environment that makes them itself; appended to the
    sequence as it is, never trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringJob:
    """Some or all samples of one prompt, to score together: what they share travels once."""

    prompt: str | list[dict[str, str]]
    extra_env_info: dict[str, Any]
    responses: tuple[str, ...]
    stop_reasons: tuple[StopReason, ...]
    states: tuple[Any, ...]
    response_ids: tuple[NDArray[np.int32] | None, ...] = ()
    """Per sample [sampled tokens], int32; empty: the environment does not ask for them."""
    trainer_state: TrainerState = field(default_factory=TrainerState)

    @property
    def requests(self) -> list[EnvironmentRequest]:
        """A request for each sample of the job."""
        return [
            EnvironmentRequest(
                prompt=self.prompt,
                response=response,
                stop_reason=stop_reason,
                extra_env_info=self.extra_env_info,
                state=state,
                response_ids=ids,
                trainer_state=self.trainer_state,
            )
            for response, stop_reason, state, ids in self._samples()
        ]

    def singly(self) -> list[ScoringJob]:
        """The job taken apart: a job for each of its samples."""
        return [
            ScoringJob(
                prompt=self.prompt,
                extra_env_info=self.extra_env_info,
                responses=(response,),
                stop_reasons=(stop_reason,),
                states=(state,),
                response_ids=(ids,),
                trainer_state=self.trainer_state,
            )
            for response, stop_reason, state, ids in self._samples()
        ]

    def _samples(self) -> Iterator[tuple[str, StopReason, Any, NDArray[np.int32] | None]]:
        """Response, stop reason, state and token ids, [sampled tokens], int32, of each sample."""
        ids = self.response_ids or (None,) * len(self.responses)
        return zip(self.responses, self.stop_reasons, self.states, ids, strict=True)


Scored = EnvironmentReturn | str
"""The score of a sample, or in one line why there is none."""


@dataclass(frozen=True, slots=True)
class ModelAccess:
    """An OpenAI-compatible address that belongs to one rollout, for instance for an `openai.OpenAI`."""

    base_url: str
    """Ends in /v1. It holds the rollout's name, which nobody else knows."""
    token: str = field(repr=False)
    """Bearer token; any text where none is needed."""
    model: str
    """Name of the model, for the requests."""
