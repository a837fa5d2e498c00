"""Writes a checkpoint as a Hugging Face model, whole or quantised, or as peft adapters, for the export command."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed import HashStore

from megatron_grpo.batch.special_tokens import find_stop_conditions, find_unstopped_turn_end
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.generation_schema import GenerationConfig
from megatron_grpo.config.schema import LoraConfig, PolicyConfig, QuantizationFormat
from megatron_grpo.data.prompt_renderer import FORMAT_KEY, PromptFormat, PromptRenderer
from megatron_grpo.data.tokenizer import load_tokenizer
from megatron_grpo.models.adapter_check import check_adapters
from megatron_grpo.models.families import INSIDE, is_carried, is_further_prediction, list_carried, name_reward_model
from megatron_grpo.models.families.reading import find_model_type, is_untied_by_weights
from megatron_grpo.models.hf_folder import HFFolderReader, new_folder, save_tensors, write_hf_folder
from megatron_grpo.models.hf_weights import iter_adapter_tensors, iter_hf_tensors, load_hf_weights
from megatron_grpo.models.shape import LEAST_TIME_STEP, ModelShape, read_config_json
from megatron_grpo.models.stored_tensors import FLOATS, list_stored_tensors
from megatron_grpo.models.tokenizer_files import TOKENIZER_FILE

if TYPE_CHECKING:
    from megatron_grpo.trainer.model.build import DecoderModel


def export_checkpoint(
    checkpoint: Path,
    source: Path,
    shape: ModelShape,
    output: Path,
    *,
    precision: Literal["float32", "bfloat16"],
    lora: LoraConfig,
    adapters_of: str | None,
    quantization: QuantizationFormat | None,
    chat_template: str | None = None,
    conversation_format: Mapping[str, Any] | None = None,
) -> None:
    """Load the model in this process and write it; a failure leaves no output.

    Args:
        checkpoint: Megatron's distributed checkpoint, `megatron` in checkpoints/step_N.
        source: folder of the model that the run started from.
        adapters_of: write the adapters alone, for the base model of this name; None: merge them into a whole model.
        quantization: 8-bit format of the layers' matrices; None: they stay in `precision`.
        chat_template: template of the run's prompts, for a whole model; None: that of `source`.
        conversation_format: settings of conversations in training, for a reward model.

    Raises:
        RunError: the checkpoint cannot be loaded into the model, the output cannot be written, or a merged weight is
            not what its layer computes with.
        ValueError: the model's folder cannot be read, or the output was created meanwhile.
    """
    from megatron_grpo.trainer.parallel import destroy_parallel, initialize_parallel

    config = PolicyConfig(precision=precision, lora=lora)
    initialize_parallel(config.parallel, rank=0, store=HashStore(), seed=0, timeout_s=600)
    try:
        chunks = _load_model(config, shape, checkpoint, source, merges_adapters=bool(lora.rank) and adapters_of is None)
        try:
            if adapters_of is not None:
                write_peft_folder(chunks, shape, lora, adapters_of, output)
                return
            settings = find_changed_settings(source, shape)
            if shape.head.is_scalar:
                settings |= build_classifier_settings(source, shape) | {FORMAT_KEY: dict(conversation_format or {})}
            tensors = ((name, value) for name, value in iter_hf_tensors(chunks, shape) if value is not None)
            if quantization is not None:
                settings["quantization_config"] = build_quantization_config(quantization, shape)
            quantized = tensors if quantization is None else quantize_tensors(tensors, quantization)
            quantized = chain(quantized, read_carried_tensors(source, shape, getattr(torch, precision)))
            ends = None if shape.head.is_scalar else find_end_tokens(source, chat_template)
            write_hf_folder(quantized, source, output, settings=settings, chat_template=chat_template, end_tokens=ends)
        except (OSError, SafetensorError) as error:
            raise RunError(f"output={output} cannot be written: {error}") from None
    finally:
        destroy_parallel()


def _load_model(
    config: PolicyConfig, shape: ModelShape, checkpoint: Path, source: Path, *, merges_adapters: bool
) -> list[DecoderModel]:
    from megatron.core import dist_checkpointing

    from megatron_grpo.trainer.checkpoint import build_sharded_weights, errors_in_one_line, load_weights
    from megatron_grpo.trainer.model.build import build_model
    from megatron_grpo.trainer.plain_pickles import open_checkpoint

    chunks = build_model(config, shape)
    if merges_adapters:
        load_hf_weights(chunks, shape, source)
    with errors_in_one_line(f"{checkpoint} cannot be loaded as {source}"):
        metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=open_checkpoint(checkpoint))
        state = dist_checkpointing.load({"model": build_sharded_weights(chunks, metadata)}, str(checkpoint))
        load_weights(chunks, state["model"])
    if merges_adapters and (faults := check_adapters(chunks, shape).faults):
        raise RunError(f"{checkpoint} is not exported: {'; '.join(faults)}")
    return chunks


def read_carried_tensors(source: Path, shape: ModelShape, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Read the tensors that an export copies.

    They are as in the folder, but quantized ones, which come as plain numbers of type `dtype`.
    """
    stored = list_stored_tensors(source)
    for name, tensor in HFFolderReader(source).iterate(partial(is_carried, shape=shape)):
        is_plain = name in stored and stored[name].dtype in FLOATS
        yield name, tensor if is_plain else tensor.to(dtype)


def find_changed_settings(source: Path, shape: ModelShape) -> dict[str, Any]:
    """Find the entries of config.json that differ for the exported weights."""
    settings: dict[str, Any] = {}
    raw = read_config_json(source / "config.json")
    if is_untied_by_weights(source):
        settings["tie_word_embeddings"] = False
        if shape.text_prefix:
            settings["text_config"] = {**raw["text_config"], "tie_word_embeddings": False}
    # Some folders announce layers that predict further tokens (MTP), and have none.
    if not any(is_further_prediction(name, shape) for name in list_stored_tensors(source)):
        settings |= {
            key: 0 for key in ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules") if raw.get(key)
        }
    # Training has no lower bound of Mamba's time steps (docs/layouts.md); `mamba_dt_min` replaces `time_step_min`.
    if shape.mamba is not None:
        names = ("time_step_min", *(["mamba_dt_min"] if "mamba_dt_min" in raw else []))
        settings |= dict.fromkeys(names, LEAST_TIME_STEP)
    # Code of the model is not exported, so transformers has to know the model by itself.
    if raw.get("auto_map"):
        settings["auto_map"] = {}
    if find_model_type(raw) != raw.get("model_type"):
        settings["model_type"] = find_model_type(raw)
    return settings


def find_end_tokens(source: Path, chat_template: str | None) -> list[int] | None:
    """Find the tokens that end responses, with the end of the template's turns.

    None: the folder's end tokens suffice, or it has no template. Without the end of a turn, which training has taught,
    a server would let the model write the user's next turn, too.
    """
    if not (source / TOKENIZER_FILE).is_file():
        return None
    tokenizer = load_tokenizer(source)
    renderer = PromptRenderer(tokenizer, PromptFormat(chat_template=chat_template))
    if not renderer.has_template:
        return None
    stops = find_stop_conditions(GenerationConfig(), tokenizer, source)
    end = find_unstopped_turn_end(tokenizer, stops, partial(renderer.render, add_generation_prompt=False))
    return None if end is None else [*stops.token_ids, end[1]]


def build_classifier_settings(source: Path, shape: ModelShape) -> dict[str, Any]:
    """Build the entries of config.json that make a model a sequence classifier.

    transformers scores the last token that is not `pad_token_id`. So this entry is null where the tokenizer pads with
    the token that ends conversations.
    """
    tokenizer = load_tokenizer(str(source))
    pad_id = tokenizer.pad_token_id
    is_usable = pad_id is not None and pad_id != tokenizer.eos_token_id and pad_id < shape.vocab
    return {
        "architectures": [name_reward_model(shape)],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "pad_token_id": pad_id if is_usable else None,
    }


@torch.no_grad()
def write_peft_folder(
    chunks: Sequence[Any], shape: ModelShape, lora: LoraConfig, base_model: str, output: str | Path
) -> None:
    """Write a whole model's adapters as a folder, new or empty, for peft."""
    # Copies, because matrices of one Megatron parameter share its A, and safetensors refuses to write shared memory.
    tensors = {
        f"base_model.model.{name}": tensor.to("cpu", copy=True).contiguous()  # in peft's wrapper
        for name, tensor in iter_adapter_tensors(chunks, _name_in_memory(shape), Tensor.detach)
        if tensor is not None
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "bias": "none",
        "use_rslora": False,
        "inference_mode": True,
    }
    with new_folder(output) as folder:
        save_tensors(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _name_in_memory(shape: ModelShape) -> ModelShape:
    """Name a vision model's text part as transformers' modules, for peft."""
    return replace(shape, text_prefix=INSIDE) if shape.is_text_part else shape


def quantize_rows(weight: Tensor, quantization: QuantizationFormat) -> tuple[Tensor, Tensor]:
    """Round a matrix to 8 bits with one scale a row.

    A scale is max |x| / 127 (int8) or / 448 (fp8); ties go to even. Returns the matrix, [rows, columns], int8 or
    float8_e4m3fn, and the scales that restore it by multiplication, [rows, 1], float32.
    """
    values, bound = weight.float(), 127.0 if quantization == "int8" else 448.0
    largest = values.abs().amax(dim=1, keepdim=True)
    largest = torch.where(largest > 2.0**-24, largest, torch.ones_like(largest))  # else zeros, as in modelopt
    scaled = (values * (bound / largest)).clamp(-bound, bound)  # rounding may push the product past the bound
    numbers = scaled.round().to(torch.int8) if quantization == "int8" else scaled.to(torch.float8_e4m3fn)
    return numbers, largest / bound


def quantize_tensors(
    tensors: Iterable[tuple[str, Tensor]], quantization: QuantizationFormat
) -> Iterator[tuple[str, Tensor]]:
    """Quantise the matrices of layers (no experts), each followed by its scales."""
    for name, tensor in tensors:
        if ".layers." in name and tensor.dim() == 2:
            numbers, scales = quantize_rows(tensor, quantization)
            yield name, numbers
            yield f"{name}_scale", scales
        else:
            yield name, tensor


def build_quantization_config(quantization: QuantizationFormat, shape: ModelShape | None = None) -> dict[str, Any]:
    """Build `quantization_config` of config.json: weights scaled by row, inputs dynamically by token."""
    carried = () if shape is None else list_carried(shape)  # stay as they are
    is_int8 = quantization == "int8"
    number = {"num_bits": 8, "type": "int" if is_int8 else "float", "symmetric": True}
    scheme = {
        "targets": ["Linear"],
        "weights": {**number, "strategy": "channel", "dynamic": False},
        "input_activations": {**number, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if is_int8 else "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head", *dict.fromkeys(f"re:.*{name.removeprefix('model.')[:-1]}.*" for name in carried)],
    }
