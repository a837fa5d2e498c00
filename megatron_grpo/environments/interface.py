"""Interface of environments, and their settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_grpo.config.data_schema import SandboxConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.config.started_values import list_code_folders
from megatron_grpo.data.image_prompts import RunImages
from megatron_grpo.data.prompt_renderer import PromptFormat
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn, ModelAccess, ScoreOrError, Turn
from megatron_grpo.data.specs import make_task_spec
from megatron_grpo.data.tokenizer import load_tokenizer
from megatron_grpo.environments.sandbox.sandbox import Sandbox, open_sandbox

STARTUP_S = 900.0  # deadline in seconds for the start of an environment process, and of all rollout workers


class Environment(ABC):
    """Base class of environments, which answer and score responses.

    Each environment process has one instance and calls it on its main thread, one call at a time.

    A single-turn environment defines only `score`. A multi-turn environment sets `multi_turn` and also defines `reset`
    and `step`. They return the state of a rollout, which travels with the rollout, so that another process can
    continue it, even after one has died. An environment with an agent sets `agent` and defines `act`.
    """

    multi_turn: bool = False
    """Whether `reset` and `step` are called."""
    answer_role: str = "user"
    """Role of the messages with which `step` answers; for "tool" the start checks that the chat template shows them."""
    agent: bool = False
    """Whether `act` runs the turns; this needs generation.endpoint.enabled."""
    needs_columns: tuple[str, ...] = ()
    """Columns that every row of the task must have; checked before a run starts."""
    reads_token_ids: bool = False
    """Whether requests of `score` have `response_ids`."""

    @classmethod
    def option_problems(cls, options: dict[str, Any]) -> list[tuple[str, str]]:
        """Find problems of converted options, each as NAME=VALUE and the reason.

        Called before a run starts and before an environment is made.
        """
        return []

    def reset(self, prompt: str | list[dict[str, str]], extra_env_info: dict[str, Any]) -> Any:
        """Return the first state of a rollout.

        `prompt` stands as in the data; `extra_env_info` has the row's other columns, and the reference answer under
        `REFERENCE`.
        """
        return None

    def step(self, state: Any, response: str) -> Turn:
        """Answer the model's text with another turn, or end the rollout."""
        return Turn(done=True, state=state)

    def act(self, prompt: str | list[dict[str, str]], extra_env_info: dict[str, Any], access: ModelAccess) -> Any:
        """Run an agent to its end; returns the rollout's state.

        The agent's calls to the model at `access` make up the rollout: one conversation, in which every call repeats
        all messages so far and adds new ones. If `act` raises, the rollout fails.
        """
        raise NotImplementedError

    @abstractmethod
    def score(self, requests: list[EnvironmentRequest]) -> Sequence[ScoreOrError]:
        """Return the scores of one prompt's samples, in order.

        Usually these are all samples of the prompt, at times only some. A text in place of a score is the reason why
        this response alone has none; its rollout fails. If `score` raises, it is called again with the same requests,
        and if it raises again, all these rollouts fail.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSettings:
    """Settings of the run, for constructors with a parameter `settings`."""

    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """Limits of programs, and the level of isolation that they need."""
    tokenizer: Any = None
    """The policy's tokenizer, or its folder; None in tests."""
    prompts: PromptFormat = field(default_factory=lambda: PromptFormat(apply_chat_template=False))
    """Rendering of the task's prompts and of the environment's texts."""
    import_folders: tuple[str, ...] = ()
    """Folders that the user's modules are imported from."""
    images: RunImages | None = None
    """How the run takes images, which turns may show; None: it takes none."""

    def open_sandbox(self) -> Sandbox:
        """Open a sandbox; SandboxUnavailableError if isolation falls short."""
        return open_sandbox(self.sandbox)

    def load_tokenizer(self) -> Any:
        assert self.tokenizer is not None, "an environment with texts for the model needs the run's tokenizer"
        return load_tokenizer(self.tokenizer) if isinstance(self.tokenizer, str) else self.tokenizer


def score_zero_or_one(verdicts: Iterable[bool]) -> list[EnvironmentReturn]:
    """Make the scores: 1 if correct, else 0."""
    return [EnvironmentReturn(reward=float(correct), correct=correct) for correct in verdicts]


def make_environment_settings(
    config: Config, task: str, tokenizer: Any, images: RunImages | None = None
) -> EnvironmentSettings:
    return EnvironmentSettings(
        sandbox=config.sandbox,
        tokenizer=tokenizer,
        prompts=replace(make_task_spec(config.data, task), takes_images=images is not None),
        import_folders=list_code_folders(config),
        images=images,
    )


@dataclass(frozen=True, slots=True)
class EnvironmentStatus:
    """Answer of an environment process that is ready."""

    node_id: str  # Ray's id of its machine
    pid: int
    multi_turn: bool
    has_agent: bool
    reads_token_ids: bool
