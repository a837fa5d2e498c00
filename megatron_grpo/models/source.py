"""Where a model is: a folder, a hub name, or one that is made before the run; and what its sizes are."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.hub import is_hub_name
from megatron_grpo.config.schema import MISSING, Config
from megatron_grpo.models.families import shape_of_config, shape_of_folder
from megatron_grpo.models.prepared import PREPARED_MODELS
from megatron_grpo.models.shape import ModelShape

PREPARED_FOLDER = "model"
"""Folder of the model inside prepare.folder."""
_PROBE_S = 10.0
"""Deadline for the hub's first answer."""
_WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


def local_folder(path: str) -> Path | None:
    """The folder with the model's config.json on this machine, from the hub's cache if need be; None: not here."""
    if not is_hub_name(path):
        return Path(path) if os.path.isdir(path) else None
    from huggingface_hub import try_to_load_from_cache  # here: it takes longer to import than everything else together

    cached = try_to_load_from_cache(path, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def download_config(path: str) -> str | None:
    """Download a hub model's config.json into the cache; the reason when that fails."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    try:
        # First a single question: downloading asks five times, and writes a line each time, before it gives up.
        get_hf_file_metadata(hf_hub_url(path, "config.json"), timeout=_PROBE_S)
        hf_hub_download(path, "config.json")
    except _hub_errors() as error:
        return _reason(error)
    return None


def model_folder(path: str, key: str = "policy.model.path") -> Path:
    """The folder of the complete model, downloaded into the hub's cache first when it is not there yet.

    Args:
        path: a folder or a hub name.
        key: name of the key that says which model, for the message.

    Raises:
        RunError: the model cannot be downloaded.
    """
    if not is_hub_name(path):
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=_WANTED))
    except _hub_errors() as error:
        raise RunError(f"{key}={path} could not be downloaded: {_reason(error)}") from error


def _hub_errors() -> tuple[type[Exception], ...]:
    """What downloading raises: answers of the hub, no connection to it, no room for the files."""
    from huggingface_hub.errors import HfHubHTTPError

    # Its bases are the errors of whichever HTTP library the hub's package is built on.
    return (*(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)), OSError)


def _reason(error: Exception) -> str:
    """The first line of a message, or what kind of error it is."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


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
    sets = [*config.data.training.values(), *config.data.validation.values()]
    return any(made_before_the_run(config, path) for path in (config.policy.model.path, *(one.path for one in sets)))


def made_before_the_run(config: Config, path: str) -> bool:
    """Whether a path lies where things are made before the run, so that it does not have to exist yet."""
    return config.prepare.name is not None and Path(path).is_relative_to(config.prepare.folder)
