"""Checks of the files of models: config.json, weights and tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from megatron_grpo.config.data_schema import DataConfig, TaskConfig
from megatron_grpo.config.errors import Problem, to_text
from megatron_grpo.config.paths import LFS_POINTER, check_readable, is_lfs_pointer
from megatron_grpo.config.schema import Config
from megatron_grpo.models import source
from megatron_grpo.models.checkpoint_model import find_checkpoint_model
from megatron_grpo.models.families import (
    build_weight_map,
    exchange_head,
    explain_other_family,
    find_family,
    is_carried,
    is_further_prediction,
)
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.heads import LOGITS, POLICY_HEADS, VALUE
from megatron_grpo.models.quantized_weights import describe_values, read_quantization
from megatron_grpo.models.shape import ModelShape, read_config_json
from megatron_grpo.models.stored_tensors import FLOATS, HEAD, list_stored_tensors
from megatron_grpo.models.tokenizer_files import TOKENIZER_FILE, read_end_tokens, read_settings, read_token_ids
from megatron_grpo.models.weight_map import index_tensors

# Most tensors that a message names.
_MAX_NAMED = 3


def find_weight_problems(folder: Path, shape: ModelShape) -> Iterator[str]:
    """Check the weights in a folder; yields a problem of each kind."""
    try:
        tensors = list_stored_tensors(folder)
        quantization = read_quantization(read_config_json(folder / "config.json"))
        if quantization is not None:
            tensors = describe_values(tensors, quantization)
    except ValueError as error:
        yield str(error)
        return
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    required_shapes = {name: expected for name, expected, is_required in _list_tensors(shape) if is_required}
    missing = [name for name in required_shapes if name not in shapes]
    if missing:
        further = f", and {len(missing) - 1} others that config.json implies" if len(missing) > 1 else ""
        yield f"the folder has no tensor {missing[0]}{further}"
    # Packed weights have other shapes than config.json implies, so they are reported before shapes are compared.
    packed = next((name for name in required_shapes if name in tensors and tensors[name].dtype not in FLOATS), None)
    if packed is not None:
        text = f"{packed} is stored as {tensors[packed].dtype}: weights that are quantized so cannot be read; convert"
        text += " the model to bfloat16 first, as docs/layouts.md shows"
        yield text
        return
    for name, expected in required_shapes.items():
        if name in shapes and shapes[name] != expected:
            yield f"{name} has shape {list(shapes[name])}, but config.json implies {list(expected)}"
            return
    # Tensors that the model derives: a tied head equals the embedding, and the value head replaces it.
    derived = ["rotary_emb.inv_freq", "rotary.inv_freq"]
    if shape.tied_embeddings or shape.head.is_scalar:
        derived.append(HEAD)
    unknown = tensors.keys() - {name for name, _, _ in _list_tensors(shape)}
    unread = [name for name in sorted(unknown) if not name.endswith(tuple(derived))]
    unread = [name for name in unread if not is_carried(name, shape)]
    if unread:
        advice = "correct architectures in config.json, or remove them from the files"
        text = f"the folder holds {len(unread)} tensor(s) that a model of its config.json does not have, which would be"
        text += f" lost: {', '.join(unread[:_MAX_NAMED])}; {advice}"
        yield text


def _list_tensors(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Yield (name, shape, whether it is required) of tensors."""
    entries, sizes = build_weight_map(shape), shape.sizes
    for name, key in index_tensors(entries, shape).items():
        yield name, key.tensor.measure(sizes), not entries[key.row].zero_if_absent


def list_unused_tensors(config: Config) -> Iterator[Problem]:
    """Remark on tensors in the policy's folder that are not trained."""
    path = config.policy.model.path
    if source.is_hub_name(path) or source.is_made_before_run(config, path):
        return
    folder = source.find_local_folder(path)
    assert folder is not None, "other checks report a model that is not there"
    shape = source.read_policy_shape(config, folder)
    carried = [name for name in list_stored_tensors(folder) if is_carried(name, shape)]
    if carried:
        text = f"holds {len(carried)} tensor(s) beside the language model, which are not trained,"
        text += f" and which an export copies as they are: {sorted(carried)[0]}, …"
        yield Problem(f"policy.model.path={path}", text)


def find_model_problems(config: Config) -> Iterator[Problem]:
    """Check policy.model.path, value.model.path and those of teachers."""
    paths = {"policy.model.path": config.policy.model.path, "value.model.path": config.value.model.path}
    paths |= {f"{section}.model.path": teacher.model.path for section, teacher in config.teacher_models.items()}
    heads = {"policy.model.path": POLICY_HEADS[config.method.head], "value.model.path": VALUE}
    for key, path in paths.items():
        if path is None:
            continue
        subject, head = f"{key}={path}", heads.get(key, LOGITS)
        if source.is_made_before_run(config, path):
            prepared_folders = source.list_prepared_folders(config)
            if Path(path) not in prepared_folders:
                text = (
                    f"prepare.name={config.prepare.name} makes {' and '.join(inner.name for inner in prepared_folders)}"
                )
                yield Problem(subject, text)
            continue
        unusable = list(explain_unusable_model(subject, path, has_score=head.is_scalar))
        yield from unusable
        if unusable or source.is_hub_name(path):  # weights of a hub model are downloaded at the start
            continue
        folder = source.find_local_folder(path)
        assert folder is not None
        shape = read_model_shape(folder, reward_models=head.is_scalar)
        family_key = key.replace(".path", ".family")
        family = config.families.get(family_key)
        mismatch = None if family is None else explain_other_family(shape, family)
        if mismatch is not None:
            yield Problem(f"{family_key}={family}", mismatch)
        if any(folder.glob("*.safetensors")):
            expected = exchange_head(shape, head)
            yield from (Problem(subject, text) for text in find_weight_problems(folder, expected))
        else:
            text = "the folder holds no *.safetensors; convert the weights with transformers' save_pretrained"
            yield Problem(subject, text)
        if key.startswith("policy."):
            yield from find_draft_problems(config, folder, shape)
            yield from find_slot_problems(config, folder)
            yield from find_tokenizer_problems(subject, folder, config, shape.vocab)


def find_draft_problems(config: Config, folder: Path, shape: ModelShape) -> Iterator[Problem]:
    """Check that a folder has layers with which engines can propose tokens."""
    if not (config.generation.engine.speculative.uses_mtp and find_family(shape.family).proposes_tokens):
        return
    try:
        has_layers = any(is_further_prediction(name, shape) for name in list_stored_tensors(folder))
        raw = read_config_json(folder / "config.json")
    except ValueError:  # other checks report files that cannot be read
        return
    text = ""
    if not has_layers:
        text = f"{folder} has no layers that predict further tokens (MTP); give a folder with them, as the released"
        text += " models have, or use ngram"
    elif raw.get("num_nextn_predict_layers") == 0:
        text = (
            f"{folder / 'config.json'} has num_nextn_predict_layers=0, and vLLM makes no such layer; write the number"
        )
        text += " of layers in the folder, or use ngram"
    elif "quantization_config" in raw:
        text = f"{folder} has quantized weights, and engines of a run compute with plain ones; convert the model to"
        text += " bfloat16 first, as docs/layouts.md shows, or use ngram"
    if text:
        yield Problem("generation.engine.speculative.method=mtp", text)


def find_slot_problems(config: Config, folder: Path) -> Iterator[Problem]:
    """Check that engines with a slot for adapters hold the policy's base model."""
    is_alone = config.refit.adapters == "alone" and config.policy.lora.rank and config.needs_generation
    if is_alone and read_quantization(read_config_json(folder / "config.json")) is not None:
        text = f"{folder} has quantized weights, which engines would compute with, and the policy with plain ones; "
        text += "convert the model to bfloat16 first, as docs/layouts.md shows, or use merged"
        yield Problem("refit.adapters=alone", text)


def explain_unusable_model(subject: str, path: str, *, has_score: bool = False) -> Iterator[Problem]:
    """Say why a folder or hub name has no trainable model."""
    if source.is_hub_name(path):
        reason = None if source.find_local_folder(path) else source.download_config(path)
        text = f"no such folder here, nor in the Hugging Face cache, and the hub says: {reason}"
    else:
        reason = check_readable(path, "folder")
        advice = "; give a folder in Hugging Face format, or a hub name such as Qwen/Qwen3-8B"
        text = f"{reason}{advice if reason == 'no such folder' else ''}"
    if reason is not None:
        yield Problem(subject, text)
        return
    try:
        folder = source.find_local_folder(path)
        if folder is None:
            text = "is a checkpoint, and the model that its run began with is not there; it has settings and tokenizer"
            yield Problem(subject, text)
            return
        read_model_shape(folder, reward_models=has_score)
        checkpoint = None if source.is_hub_name(path) else find_checkpoint_model(path)
        if checkpoint is not None and checkpoint.head.is_scalar and not has_score:
            yield Problem(subject, "is a checkpoint of a reward model, which predicts no tokens; give one of a policy")
    except ValueError as error:
        yield Problem(subject, str(error))


_SETTINGS_FILE = "tokenizer_config.json"
_FILES = (TOKENIZER_FILE, "tokenizer.model", _SETTINGS_FILE)
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def has_tokenizer(folder: Path) -> bool:
    """True if there are tokenizer files; the hub's cache may lack them."""
    return any((folder / name).is_file() for name in _FILES)


def find_tokenizer_problems(subject: str, folder: Path, config: Config, vocab: int) -> Iterator[Problem]:
    """Check the tokenizer's files, chat template and tokens, without transformers.

    `subject`: key and value that name the folder; `vocab`: number of the model's tokens.
    """
    files = [folder / name for name in _FILES if os.path.lexists(folder / name)]
    if not files:
        yield Problem(subject, f"the folder holds no tokenizer ({', '.join(_FILES)})")
    for file in files:
        reason = LFS_POINTER if is_lfs_pointer(file) else check_readable(file)
        if reason is not None:
            yield Problem(subject, f"{file}: {reason}")
            return
    yield from _find_tokenizer_code(subject, folder)
    if folder / _SETTINGS_FILE in files and not _has_chat_template(folder):
        data = config.data
        for task in dict.fromkeys([data.task_name, *config.env]):
            settings = data.tasks.get(task, TaskConfig())
            is_own = settings.apply_chat_template is not None
            section = f"data.tasks.{task}" if is_own else "data"
            is_chat = settings.apply_chat_template if is_own else data.apply_chat_template
            if is_chat and not (settings.chat_template or data.chat_template):
                advice = f"or give a file with one in {section}.chat_template"
                text = f"the tokenizer in {folder} has no chat template; use false for prompts as they are, {advice}"
                yield Problem(f"{section}.apply_chat_template=True", text)
                break  # other tasks have the same fault
    yield from _find_vocabulary_problems(subject, folder, config.data, vocab)


def _find_tokenizer_code(subject: str, folder: Path) -> Iterator[Problem]:
    """Check that the tokenizer is more than code of the model."""
    auto_map = read_settings(folder / _SETTINGS_FILE).get("auto_map")
    code = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else None
    if code and not any((folder / name).is_file() for name in (TOKENIZER_FILE, "tokenizer.model")):
        text = f"{folder / _SETTINGS_FILE}: the tokenizer is code of the model ({to_text(code)}), which is never run;"
        text += f" convert it to a {TOKENIZER_FILE} first, as docs/layouts.md shows"
        yield Problem(subject, text)


def _has_chat_template(folder: Path) -> bool:
    """True for a folder with a chat template or unreadable settings."""
    if any((folder / name).exists() for name in _TEMPLATE_FILES):
        return True
    try:
        content = json.loads((folder / _SETTINGS_FILE).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return True
    return not isinstance(content, dict) or bool(content.get("chat_template"))


def _find_vocabulary_problems(subject: str, folder: Path, data: DataConfig, vocab: int) -> Iterator[Problem]:
    """Check that the model has embeddings for common tokens."""
    limit = f"the model's tokens are numbered from 0 to {vocab - 1} (vocab_size in config.json)"
    name = "generation_config.json" if (folder / "generation_config.json").is_file() else "config.json"
    beyond = [number for number in read_end_tokens(folder) if not 0 <= number < vocab]
    if beyond:
        yield Problem(subject, f"eos_token_id of {name} has {beyond[0]}, and {limit}; give the model's own end token")
    tokens = read_token_ids(folder) or {}
    settings = read_settings(folder / "special_tokens_map.json") | read_settings(folder / _SETTINGS_FILE)
    advice = "give the model's own tokens, or a model whose embedding has a row for each token"
    for role in ("eos_token", "bos_token"):
        token = settings.get(role)
        token = token.get("content") if isinstance(token, dict) else token
        # A token that tokenizer.json lacks would get the number after its last.
        number = tokens.get(token, max(tokens.values()) + 1) if isinstance(token, str) and tokens else 0
        if number >= vocab:
            yield Problem(subject, f"the tokenizer's {role} {token} is token {number}, and {limit}; {advice}")
            return
    files = [data.chat_template, *(task.chat_template for task in data.tasks.values())]
    paths = [Path(file) for file in files if file] or [folder / "chat_template.jinja"]
    templates = [path.read_text(encoding="utf-8", errors="replace") for path in paths if path.is_file()]
    if not any(files):
        templates.append(str(settings.get("chat_template") or ""))
    for token, number in tokens.items():
        if number >= vocab and any(token in template for template in templates):
            yield Problem(subject, f"the chat template writes {token}, which is token {number}, and {limit}; {advice}")
            return
