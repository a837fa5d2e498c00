"""Requests to an environment and its answers: one response to score, one score, one turn."""

from __future__ import annotations

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
    observation: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """[tokens], int32: what the model reads, in tokens, from an environment that makes them itself; appended to the
    sequence as it is, never trained on."""


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
