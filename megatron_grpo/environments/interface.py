"""What an environment is: something that answers the model turn by turn, and scores what came of it."""

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
    `reset` and `step` as well. What it has to remember of a rollout is the state that these return: it travels with the
    rollout, so that any process can go on with it, also after another one has died.

    One with an agent sets `agent` and writes `act`: there the environment asks the model, rather than the other way
    round.
    """

    multi_turn: bool = False
    """Whether `reset` and `step` are asked at all."""
    agent: bool = False
    """Whether `act` makes the turns; needs generation.endpoint.enabled."""
    reads_token_ids: bool = False
    """Whether `score` is given the token ids of responses, which have to travel for it."""

    @classmethod
    def option_problems(cls, options: dict[str, Any]) -> list[tuple[str, str]]:
        """What is wrong with options that are of the constructor's types, each NAME=VALUE with the reason.

        It is asked before a run starts, where nothing is made yet.

        Args:
            options: those that are given, converted.
        """
        return []

    def reset(self, prompt: str | list[dict[str, str]], extra_env_info: dict[str, Any]) -> Any:
        """State of a rollout that begins.

        Args:
            prompt: the prompt as the data has it.
            extra_env_info: the row's columns, and the reference answer under `REFERENCE`.
        """
        return None

    def step(self, state: Any, response: str) -> Turn:
        """What follows a response: an observation and another turn, or the end.

        Args:
            state: state of the rollout, from `reset` or the turn before.
            response: what the model wrote in this turn.
        """
        return Turn(done=True, state=state)

    def act(self, prompt: str | list[dict[str, str]], extra_env_info: dict[str, Any], access: ModelAccess) -> Any:
        """Let an agent work until it is done; returns the state of the rollout, for `score`.

        The rollout is what the model was asked and answered at `access`, call by call: one conversation, in which every
        call repeats all messages so far and adds some. What is raised makes the rollout a failed one.

        Args:
            prompt: the prompt as the data has it.
            extra_env_info: the row's columns, and the reference answer under `REFERENCE`.
            access: where the model answers in this rollout.
        """
        raise NotImplementedError

    @abstractmethod
    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        """Scores in the order of the requests, which are samples of one prompt: usually all of them, at times one.

        Never raises for what a model wrote. If it does raise, each request is scored by itself once more, and those for
        which it raises again are failed rollouts.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSettings:
    """An environment whose constructor has a parameter `settings` gets this."""

    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """Limits of programs, and the isolation that is required for them."""
    tokenizer: str | None = None
    """Folder of the policy's tokenizer; None: the run has none, as in tests."""
    apply_chat_template: bool = False
    """Whether prompts are rendered with the tokenizer's chat template, and so are the texts of environments."""
    import_folders: tuple[str, ...] = ()
    """Where the user's modules are imported from."""

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

        assert self.tokenizer is not None, "an environment that speaks needs the run's tokenizer"
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
    """Where a user's modules may lie: the working folder, and PYTHONPATH's, which other machines may not have set."""
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return tuple(dict.fromkeys(os.path.abspath(folder) for folder in (os.getcwd(), *named) if folder))


def make_importable(folders: Sequence[str]) -> None:
    """Let this process import modules from folders too, after all others: nothing installed is hidden by a file there.

    The launchers start Python without the working folder on its path (-P), and so does Ray on other machines.
    """
    sys.path += [folder for folder in folders if folder not in sys.path]
