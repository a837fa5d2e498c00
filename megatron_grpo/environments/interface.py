"""The interface of environments, which answer the model turn by turn and score its responses."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_grpo.config.data_schema import SandboxConfig
from megatron_grpo.data.prompt_renderer import PromptFormat
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn, ModelAccess, Turn
from megatron_grpo.data.specs import task_spec
from megatron_grpo.data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from megatron_grpo.config.schema import Config
    from megatron_grpo.environments.sandbox.sandbox import Sandbox


class Environment(ABC):
    """Runs inside a Ray actor, one instance per process, on the main thread, one call at a time.

    A single-turn environment defines only `score`. A multi-turn environment sets `multi_turn` and also defines `reset`
    and `step`. These return the state of a rollout, which travels with the rollout, so that another process can
    continue it, also after one has died.

    An environment with an agent sets `agent` and defines `act`, in which the agent calls the model.
    """

    multi_turn: bool = False
    """Whether `reset` and `step` are called."""
    answer_role: str = "user"
    """Role of the messages with which `step` answers; "tool" has a start check that the chat template shows them."""
    agent: bool = False
    """Whether `act` runs the turns; needs generation.endpoint.enabled."""
    needs_columns: tuple[str, ...] = ()
    """Columns that every row of the environment's task must have; checked before a run starts."""
    reads_token_ids: bool = False
    """Whether `score` needs the token ids of responses, which are sent to the process only then."""

    @classmethod
    def option_problems(cls, options: dict[str, Any]) -> list[tuple[str, str]]:
        """Problems of options whose types fit the constructor, each as NAME=VALUE and the reason.

        Called before a run starts and before an environment is made.

        Args:
            options: the options of the configuration, converted.
        """
        return []

    def reset(self, prompt: str | list[dict[str, str]], extra_env_info: dict[str, Any]) -> Any:
        """Return the first state of a rollout.

        Args:
            prompt: the prompt as it is in the data.
            extra_env_info: columns of the row, and the reference answer under `REFERENCE`.
        """
        return None

    def step(self, state: Any, response: str) -> Turn:
        """Answer a response: an observation and another turn, or the end of the rollout.

        Args:
            state: state of the rollout, from `reset` or the previous turn.
            response: the model's text in this turn.
        """
        return Turn(done=True, state=state)

    def act(self, prompt: str | list[dict[str, str]], extra_env_info: dict[str, Any], access: ModelAccess) -> Any:
        """Run an agent to its end; returns the state of the rollout, for `score`.

        The calls to the model at `access` make up the rollout: one conversation, in which every call repeats all
        messages so far and adds new ones. If `act` raises, the rollout fails.

        Args:
            prompt: the prompt as it is in the data; extra_env_info as for `reset`.
            access: address of the model for this rollout.
        """
        raise NotImplementedError

    @abstractmethod
    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        """Return scores in the order of the requests, which are all samples of one prompt or, at times, one of them.

        Must not raise because of a model's text. If it raises, each request is scored again by itself; a request for
        which it raises again becomes a failed rollout.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSettings:
    """Settings of the run, for environments whose constructor has a parameter `settings`."""

    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """Limits of programs, and their required level of isolation."""
    tokenizer: Any = None
    """Folder of the policy's tokenizer, or the tokenizer that a script passed; None: there is none, as in tests."""
    prompts: PromptFormat = field(default_factory=lambda: PromptFormat(apply_chat_template=False))
    """Rendering of the task's prompts and of the environment's texts."""
    import_folders: tuple[str, ...] = ()
    """Folders that the user's modules are imported from."""

    def open_sandbox(self) -> Sandbox:
        """Open the sandbox in which programs run.

        Raises:
            SandboxUnavailableError: this machine does not allow the required isolation.
        """
        from megatron_grpo.environments.sandbox.sandbox import open_sandbox

        return open_sandbox(self.sandbox)

    def load_tokenizer(self) -> Any:
        """The policy's tokenizer; the one of a folder is loaded with transformers."""
        assert self.tokenizer is not None, "an environment with texts for the model needs the run's tokenizer"
        return load_tokenizer(self.tokenizer) if isinstance(self.tokenizer, str) else self.tokenizer


def make_environment_settings(config: Config, task: str, tokenizer: Any) -> EnvironmentSettings:
    """Settings of a run for the environment of a task; `tokenizer`: see `EnvironmentSettings`."""
    return EnvironmentSettings(
        sandbox=config.sandbox,
        tokenizer=tokenizer,
        prompts=task_spec(config.data, task),
        import_folders=list_import_folders(),
    )


def list_import_folders() -> tuple[str, ...]:
    """Folders of the user's modules: the working folder and PYTHONPATH, which other machines may not have set."""
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return tuple(dict.fromkeys(os.path.abspath(folder) for folder in (os.getcwd(), *named) if folder))


def make_importable(folders: Sequence[str]) -> None:
    """Append folders to this process's import path; at its end their files hide no installed module.

    The launchers, and Ray on other machines, start Python without the working folder on its path (-P).
    """
    sys.path += [folder for folder in folders if folder not in sys.path]
