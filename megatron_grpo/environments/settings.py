"""What an environment learns of the run that it is part of, beside the options of its own section."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.config.sandbox_schema import SandboxConfig

if TYPE_CHECKING:
    from megatron_grpo.config.schema import Config
    from megatron_grpo.environments.sandbox.sandbox import Sandbox


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
        from megatron_grpo.environments.sandbox.opening import open_sandbox

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
