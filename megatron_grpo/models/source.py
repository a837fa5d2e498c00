"""Location of a model (a folder, a hub name, or a folder that is made before the run), its sizes and identity."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from xxhash import xxh3_128

from megatron_grpo.config.errors import Problem, RunError, to_text
from megatron_grpo.config.outside_files import read_json, require_regular_files
from megatron_grpo.config.paths import is_hub_name, list_import_folders
from megatron_grpo.config.schema import MISSING, Config
from megatron_grpo.models import families
from megatron_grpo.models.checkpoint_model import find_checkpoint_model
from megatron_grpo.models.families import exchange_head
from megatron_grpo.models.families.reading import include_tower, parse_model_shape, read_model_shape
from megatron_grpo.models.heads import POLICY_HEADS
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.tokenizer_files import TOKENIZER_FILE, read_token_ids

PAD, EOS = "<pad>", "<eos>"
# Token ids of the prepared models that do addition, and of those that hold conversations.
VOCABULARY = {token: i for i, token in enumerate([*"0123456789+=", PAD, EOS, "<bos>", "<unk>"])}
CALL_BEGIN = '<tool_call>{"name": "calculator", "arguments": {"expression": "'
CALL_END = '"}}</tool_call>'
CONVERSATION_VOCABULARY = {
    token: i for i, token in enumerate([*"0123456789+-*=,:", CALL_BEGIN, CALL_END, PAD, EOS, "<bos>", "<unk>"])
}
_COUNTING = [*"0123456789=? abcdefghijklmnopqrstuvwxyzH", PAD, EOS, "<bos>", "<unk>"]
IMAGE_MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
COUNTING_VOCABULARY = {token: i for i, token in enumerate([*_COUNTING, *IMAGE_MARKS])}

# Contents of the config.json of each prepared model, by prepare.name.
PREPARED_MODELS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("prepared_models.yaml").read_text(encoding="utf-8")
)
PREPARED_FOLDER = "model"  # of the model inside prepare.folder
WITH_TEACHER = ("distillation",)  # recipes that also make a teacher, by prepare.name
WITH_TEMPLATE = ("counting",)  # recipes whose tokenizer has a chat template
TEACHER_FOLDER = "teacher"  # of its teacher there, with a recipe that makes one
# Deadline in seconds for the hub's first answer.
_PROBE_S = 10.0
# Parts of each weights file that a digest reads, evenly spaced, so that hundreds of gigabytes take a second.
_CHUNKS, _CHUNK_BYTES = 4, 1 << 18
_HUB_COPIES = ["consolidated*"]  # of the same weights, in Mistral's own format
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


def find_local_folder(path: str) -> Path | None:
    """Find a model's folder on this machine, perhaps in the hub's cache.

    That of a checkpoint is its export, and before that is made the model that its run began with: sizes and tokenizer
    are the same. ValueError: the checkpoint's run cannot be read, or a pipe is among the model's files.
    """
    if not is_hub_name(path):
        model = find_checkpoint_model(path)
        if model is not None:
            return model.export if model.export.is_dir() else find_local_folder(model.origin)
        if not os.path.isdir(path):
            return None
        require_regular_files(Path(path))
        return Path(path)
    from huggingface_hub import try_to_load_from_cache  # here: its import takes longer than all others together

    cached = try_to_load_from_cache(path, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def download_config(path: str) -> str | None:
    """Download a hub model's config.json; return the reason when that fails."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    try:
        # One request first: a download makes five, and logs a line for each, before it gives up.
        get_hf_file_metadata(hf_hub_url(path, "config.json"), timeout=_PROBE_S)
        hf_hub_download(path, "config.json")
    except list_hub_errors() as error:
        return _describe_error(error)
    return None


def fetch_model_folder(path: str, key: str = "policy.model.path") -> Path:
    """Find or download a complete model's folder.

    RunError: the download failed. ValueError: it is a checkpoint whose run cannot be read, or has a pipe.
    """
    if not is_hub_name(path):
        try:
            model = find_checkpoint_model(path)
        except ValueError as error:
            raise ValueError(f"{key}={to_text(path)} {error}") from None
        folder = Path(path) if model is None else model.export
        require_regular_files(folder)
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_COPIES))
    except list_hub_errors() as error:
        raise RunError(f"{key}={path} could not be downloaded: {_describe_error(error)}") from error


def require_folder(folder: str) -> None:
    """Raise RunError unless this machine has the driver's model folder."""
    if not Path(folder, "config.json").is_file():
        raise RunError(
            f"{socket.gethostname()} has no model in {folder}: models have to be on a filesystem that all machines of "
            "a run share, those of the hub too (environment variable HF_HOME)"
        )


def list_hub_errors() -> tuple[type[Exception], ...]:
    """List the exceptions that a download from the hub raises."""
    from huggingface_hub.errors import HfHubHTTPError

    # Its bases are the errors of whichever HTTP library the hub's package is built on.
    return (*(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)), OSError)


def _describe_error(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def adopt_families(config: Config, sections: Sequence[str] = ("",), run_dir: Path | None = None) -> list[Problem]:
    """Make a run's own families known to all of its processes; report wrong ones.

    `sections`: beginnings of keys that the command reads; "" stands for all. `run_dir`: where the run's folder is now.
    """
    paths = {key: path for key, path in config.families.items() if key.startswith(tuple(sections))}
    return families.adopt_families(paths, list_import_folders(str(run_dir or config.run_dir), paths.values()))


def find_model_shape(config: Config) -> ModelShape | None:
    """Find the policy's sizes; None: no readable model here yet."""
    head = POLICY_HEADS[config.method.head]
    shape = find_folder_shape(config, config.policy.model.path, reward_models=head.is_scalar)
    return None if shape is None else exchange_head(shape, head)


def read_policy_shape(config: Config, folder: Path) -> ModelShape:
    """Read the policy's sizes from its folder; ValueError: no support."""
    head = POLICY_HEADS[config.method.head]
    shape = exchange_head(read_model_shape(folder, reward_models=head.is_scalar), head)
    return include_tower(shape, folder) if config.policy.train_vision_tower else shape


def find_folder_shape(config: Config, path: str, *, reward_models: bool = False) -> ModelShape | None:
    """Find the sizes of a model; None: no readable model here yet."""
    if path == MISSING:
        return None
    if is_made_before_run(config, path):
        assert config.prepare.name is not None
        return parse_model_shape(PREPARED_MODELS[config.prepare.name])
    try:
        folder = find_local_folder(path)
        return None if folder is None else read_model_shape(folder, reward_models=reward_models)
    except ValueError:
        return None  # preflight reports what is wrong with the files


def find_value_shape(config: Config) -> ModelShape | None:
    """Find the sizes of value.model.path; None: no readable model here yet."""
    assert config.value.model.path is not None
    return find_folder_shape(config, config.value.model.path, reward_models=True)


def is_prepared(config: Config) -> bool:
    """Whether a run reads a model or data that `prepare` makes."""
    sets = [*config.data.training_sets.values(), *config.data.validation_sets.values()]
    teachers = (teacher.model.path for teacher in config.teacher_models.values())
    paths = [config.policy.model.path, *teachers, *(dataset.path for dataset in sets)]
    return any(is_made_before_run(config, path) for path in paths)


def list_prepared_folders(config: Config) -> list[Path]:
    """List the models that `prepare` makes."""
    names = [PREPARED_FOLDER, *([TEACHER_FOLDER] if config.prepare.name in WITH_TEACHER else [])]
    return [Path(config.prepare.folder, name) for name in names]


def is_made_before_run(config: Config, path: str) -> bool:
    """Whether a path is in prepare.folder, and need not exist yet."""
    return config.prepare.name is not None and Path(path).is_relative_to(config.prepare.folder)


def compute_vocabulary_digest(folder: Path) -> str | None:
    """Digest all tokens with their ids (BLAKE2b); None: no readable tokenizer.json."""
    tokens = read_token_ids(folder)
    if tokens is None:
        return None
    return hashlib.blake2b(json.dumps(sorted(tokens.items())).encode(), digest_size=16).hexdigest()


def compute_model_digest(folder: Path) -> str | None:
    """Digest a model's config.json, vocabulary and weights; None: unreadable."""
    # Chat templates and generation settings are left out, since a run may change them between two starts. Weights that
    # were trained further differ nearly everywhere, so samples of each file tell them apart.
    digest = xxh3_128()
    try:
        config = read_json(folder / "config.json", links=True)
        digest.update(json.dumps(config, sort_keys=True).encode())
        vocabulary = folder / TOKENIZER_FILE
        digest.update(vocabulary.read_bytes() if vocabulary.is_file() else b"")
        files = sorted(folder.glob("*.safetensors"))
        for file in files:
            size = file.stat().st_size
            digest.update(f"{file.name} {size} ".encode())
            with file.open("rb") as stream:
                for number in range(_CHUNKS):
                    stream.seek(max(size - _CHUNK_BYTES, 0) * number // (_CHUNKS - 1))
                    digest.update(stream.read(_CHUNK_BYTES))
    except (OSError, ValueError):
        return None
    return digest.hexdigest() if files else None
