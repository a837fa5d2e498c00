"""The interface of environments, which answer the model turn by turn and score its responses."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.config.data_schema import SandboxConfig
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn, ModelAccess, Turn

if TYPE_CHECKING:
    from megatron_grpo.config.schema import Config
    from megatron_grpo.environments.sandbox.sandbox import Sandbox


class Environment(ABC):
    """Runs inside a Ray actor, one instance per process, on the main thread, one call at a time.

    An environment of a single turn writes `score` and nothing else. One of several turns sets `multi_turn` and writes
    `reset` and `step` as well. These return the state of a rollout, which travels with the rollout, so that any process
    can continue it, also after another one has died.

    An environment with an agent sets `agent` and writes `act`, in which the environment calls the model.
    """

    multi_turn: bool = False
    """Whether `reset` and `step` are called."""
    agent: bool = False
    """Whether `act` makes the turns; needs generation.endpoint.enabled."""
    reads_token_ids: bool = False
    """Whether `score` needs the token ids of responses; they are sent to the process only then."""

    @classmethod
    def option_problems(cls, options: dict[str, Any]) -> list[tuple[str, str]]:
        """Problems of options that have the constructor's types, each as NAME=VALUE and the reason.

        Called before a run starts and before an environment is made.

        Args:
            options: the options of the configuration, converted.
        """
        return []

    def reset(self, prompt: str | list[dict[str, str]], extra_env_info: dict[str, Any]) -> Any:
        """The first state of a rollout.

        Args:
            prompt: the prompt as it is in the data.
            extra_env_info: the row's columns, and the reference answer under `REFERENCE`.
        """
        return None

    def step(self, state: Any, response: str) -> Turn:
        """The turn after a response: an observation and another turn, or the end of the rollout.

        Args:
            state: state of the rollout, from `reset` or the turn before.
            response: the model's text in this turn.
        """
        return Turn(done=True, state=state)

    def act(self, prompt: str | list[dict[str, str]], extra_env_info: dict[str, Any], access: ModelAccess) -> Any:
        """Run an agent to its end; returns the state of the rollout, for `score`.

        The calls to the model at `access` make up the rollout: one conversation, in which every call repeats all
        messages so far and adds some. An exception makes the rollout a failed one.

        Args:
            prompt: as of `reset`, like extra_env_info.
            access: address of the model for this rollout.
        """
        raise NotImplementedError

    @abstractmethod
    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        """Scores in the order of the requests, which are samples of one prompt: usually all of them, at times one.

        Must not raise because of a model's text. If it does raise, each request is scored once more by itself, and
        requests for which it raises again are failed rollouts.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSettings:
    """Settings of the run, for environments whose constructor has a parameter `settings`."""

    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """Limits of programs, and the isolation that is required for them."""
    tokenizer: str | None = None
    """Folder of the policy's tokenizer; None: the run has none, as in tests."""
    apply_chat_template: bool = False
    """Whether prompts and the texts of environments are rendered with the tokenizer's chat template."""
    import_folders: tuple[str, ...] = ()
    """Folders that the user's modules are imported from."""

    def open_sandbox(self) -> Sandbox:
        """The sandbox that programs run in.

        Raises:
            SandboxUnavailableError: this machine allows less isolation than is required.
        """
        from megatron_grpo.environments.sandbox.sandbox import open_sandbox

        return open_sandbox(self.sandbox)

    def load_tokenizer(self) -> Any:
        """The policy's tokenizer, from transformers."""
        from transformers import AutoTokenizer  # here: seconds to import, and most environments need none

        assert self.tokenizer is not None, "an environment with texts for the model needs the run's tokenizer"
        return AutoTokenizer.from_pretrained(self.tokenizer)


def environment_settings(config: Config, model: Path) -> EnvironmentSettings:
    """The settings of a run whose policy, with its tokenizer, is in a folder."""
    return EnvironmentSettings(
        sandbox=config.sandbox,
        tokenizer=str(model),
        apply_chat_template=config.data.apply_chat_template,
        import_folders=import_folders(),
    )


def import_folders() -> tuple[str, ...]:
    """Folders of the user's modules: the working folder, and those of PYTHONPATH, which other machines may not set."""
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return tuple(dict.fromkeys(os.path.abspath(folder) for folder in (os.getcwd(), *named) if folder))


def make_importable(folders: Sequence[str]) -> None:
    """Add folders to the end of this process's import path, where their files hide no installed module.

    The launchers start Python without the working folder on its path (-P), and so does Ray on other machines.
    """
    sys.path += [folder for folder in folders if folder not in sys.path]
