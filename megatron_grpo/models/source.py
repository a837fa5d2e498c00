"""Where a model is: a folder, a hub name, or one that is made before the run; and what its sizes are."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import MISSING, Config
from megatron_grpo.models.families import shape_of_config, shape_of_folder
from megatron_grpo.models.prepared import PREPARED_MODELS
from megatron_grpo.models.shape import ModelShape

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


def is_hub_name(path: str) -> bool:
    """Whether this names a model of the Hugging Face hub ("Qwen/Qwen3-8B") rather than a folder."""
    return _HUB_NAME.fullmatch(path) is not None and not Path(path).parent.exists()


def local_folder(path: str) -> Path | None:
    """The folder with the model's config.json on this machine, from the hub's cache if need be; None: not here."""
    if not is_hub_name(path):
        return Path(path) if Path(path).is_dir() else None
    from huggingface_hub import try_to_load_from_cache  # here: it takes longer to import than everything else together

    cached = try_to_load_from_cache(path, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def model_folder(path: str, key: str = "policy.model.path") -> Path:
    """The folder of the complete model, downloaded into the hub's cache first when it is not there yet.

    Args:
        path: a folder or a hub name.
        key: where the configuration says it, for the message.

    Raises:
        RunError: it cannot be downloaded.
    """
    if not is_hub_name(path):
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=_WANTED))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise RunError(f"{key}={path} could not be downloaded: {reason}") from error


def known_shape(config: Config) -> ModelShape | None:
    """Sizes of the policy's model as far as this machine knows them; None: the model is not here (yet)."""
    if made_before_the_run(config, config.policy.model.path):
        assert config.prepare.name is not None
        return shape_of_config(PREPARED_MODELS[config.prepare.name])
    if config.policy.model.path == MISSING:
        return None
    folder = local_folder(config.policy.model.path)
    if folder is None:
        return None
    try:
        return shape_of_folder(folder)
    except ValueError:
        return None  # the check of files says what is wrong with it


def known_value_shape(config: Config) -> ModelShape | None:
    """Sizes of value.model.path, a reward model perhaps, as far as this machine knows them; None: it is not here."""
    assert config.value.model.path is not None
    folder = local_folder(config.value.model.path)
    if folder is None:
        return None
    try:
        return shape_of_folder(folder, reward_models=True)
    except ValueError:
        return None  # the check of files says what is wrong with it


def is_prepared(config: Config) -> bool:
    """Whether something that the run reads is made before it, by megatron_grpo.prepare."""
    read = (config.policy.model.path, config.data.train_path, config.data.val_path)
    return any(path is not None and made_before_the_run(config, path) for path in read)


def made_before_the_run(config: Config, path: str) -> bool:
    """Whether a path lies where things are made before the run, so that it does not have to exist yet."""
    return config.prepare.name is not None and Path(path).is_relative_to(config.prepare.folder)
