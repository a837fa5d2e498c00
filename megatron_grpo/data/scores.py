"""Requests to an environment, and its answers: scores and turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch.images import StoredImage
from megatron_grpo.batch.trajectory import StopReason

LARGEST_REWARD = float(np.finfo(np.float32).max)  # advantages are computed in float32


def is_reward(value: float) -> bool:
    """Whether a number can be a reward: finite, also as float32."""
    return abs(value) <= LARGEST_REWARD  # false for NaN


# Names of the arguments of reward functions and agents that are not columns. A column of such a name is not passed.
AGENT_RESULT = "agent_result"  # of reward functions: the agent's return value for each rollout
REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
AGENT_ARGUMENTS = ("prompt", "access")
INSTANCE = "self"  # Python's own argument of a callable object


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Progress of the run, under TRL's names: completed steps and epochs, and their limits."""

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    num_train_epochs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRequest:
    """One response to score.

    Example:
        EnvironmentRequest(
            prompt="2+3=", response="5", stop_reason="stop", extra_env_info={"answer": "5", "<reference>": "5"}
        )
    """

    prompt: str | list[dict[str, str]]
    response: str
    """Text that the model wrote; the texts of several turns follow one another."""
    stop_reason: StopReason
    extra_env_info: dict[str, Any]
    """Data of the prompt's row (`DatumSpec`): its other columns, and the reference answer."""
    state: Any = None
    """State of this rollout, from the environment's `reset` and `step`; None in an environment of a single turn."""
    response_ids: NDArray[np.int32] | None = None
    """The response as it was sampled: [sampled tokens], int32. None unless the environment asks for it."""
    trainer_state: TrainerState = field(default_factory=TrainerState)


@dataclass(slots=True)
class EnvironmentReturn:
    """The score of one response.

    Example:
        EnvironmentReturn(reward=1.0, correct=True, metrics={"steps": 3.0})
    """

    reward: float | None
    """Reward of the response; None: no reward function gave one, and the response is left out of the loss."""
    correct: bool | None
    """Whether the response is correct; None: the environment cannot say."""
    parts: dict[str, float] = field(default_factory=dict)
    """Reward of each reward function that gave one, unweighted, when the reward is the sum of several."""
    fault: str | None = None
    """Reason why the response itself could not be scored, such as a judge that refuses it; the reward is then 0."""
    errors: int = 0
    """Number of reward functions that failed for the response, and count as if they had given no reward."""
    retries: int = 0
    """Calls for the response's group that failed and were repeated; of a group, its first response has the number."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further metrics; a step reports their means over its responses as env/NAME. suspect/NAME keeps its name, and
    above 0 marks the response as suspect in the report: its reward may be undeserved."""
    notes: dict[str, str] = field(default_factory=dict)
    """Notes on the response, for readers of the step's file of rollouts."""


@dataclass(slots=True, kw_only=True)
class Turn:
    """An environment's answer to a response.

    Example: the conversation goes on
        Turn(done=False, state={"tries": 1}, text="Too low. Guess again.")
    """

    done: bool = True
    """True: the rollout is over and can be scored."""
    state: Any = None
    """State that the environment gets back in its next call for this rollout; it is sent between processes."""
    reward: float | None = None
    """Reward of the response, added to that of `score`, which counts for the last turn; None: it has none of its own.
    grpo.turn_credit decides which tokens it counts for."""
    text: str = ""
    """Text that the model reads next. It becomes the observation: with data.apply_chat_template as a message of the
    conversation, rendered by the tokenizer's chat template, else unchanged."""
    role: str = "user"
    """Role of the text's message in the chat template: "user" or "tool"."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages that the model reads next, in place of `text` and `role`: {role, content, further keys for the chat
    template}; without a template the contents are joined by line breaks. A content may be a list of parts, and a part
    {"type": "image", "image": ...} shows an image (docs/environments.md)."""
    observation: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """The observation from an environment that tokenizes it itself: [tokens], int32. It is appended to the sequence
    unchanged, and never trained on."""


@dataclass(slots=True, kw_only=True)
class EncodedTurn(Turn):
    """A turn with tokens for its texts, and stored images."""

    images: list[StoredImage] = field(default_factory=list)
    """Images that the observation shows, in the order of their placeholders."""
    ending: str = ""
    """Reason why the rollout ends without the observation; empty: it goes on."""


@dataclass(frozen=True, slots=True)
class ResponseFault:
    """Answer of an environment whose code failed over a response, and no server did."""

    reason: str


ScoreOrError = EnvironmentReturn | str
"""The score of a sample, or a line of text with the reason why there is none."""


@dataclass(frozen=True, slots=True)
class ModelAccess:
    """An OpenAI-compatible address of one rollout, for example for `openai.OpenAI`."""

    base_url: str
    """URL that ends in /v1. It contains the rollout's name, a secret of this rollout."""
    token: str = field(repr=False)
    """Bearer token; any text if the endpoint needs none."""
    model: str
