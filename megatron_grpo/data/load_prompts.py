"""The prompts of a run: every row is looked at before training, so that a bad one does not end it in the middle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.data.datasets import AllTaskProcessedDataset
from megatron_grpo.data.interfaces import DatumSpec, TaskDataSpec
from megatron_grpo.data.jsonl import read_prompts
from megatron_grpo.data.loader import PromptLoader
from megatron_grpo.data.processors import math_data_processor


@dataclass(frozen=True, slots=True)
class PromptData:
    """What a run reads from its files of prompts."""

    loader: PromptLoader
    """Batches of training prompts, resumable."""
    val_prompts: list[DatumSpec]
    eos_token_id: int | None
    notes: list[str]
    """What to tell the user about the files."""


@dataclass(frozen=True, slots=True)
class HeldOutPrompts:
    """The usable prompts of one file."""

    prompts: list[DatumSpec]
    eos_token_id: int | None
    notes: list[str]
    """What to tell the user about the file."""


def held_out_prompts(config: Config, model: Path, path: str) -> HeldOutPrompts:
    """Read, render and tokenize the rows of one file as those of data.val_path are, all of them.

    Args:
        config: how rows become prompts.
        model: folder with the tokenizer.
        path: the file.

    Raises:
        ConfigError: the file or a row in it cannot be used, or no row is short enough.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    notes: list[str] = []
    data = replace(config.data, val_path=path)
    dataset, usable = _read(replace(config, data=data), "val_path", tokenizer, notes)
    if not usable:
        raise ConfigError([Problem(f"data.val_path={path}", "has no usable row")])
    prompts = [prompt for prompt in (dataset[idx] for idx in range(len(dataset))) if prompt["loss_multiplier"] > 0]
    return HeldOutPrompts(prompts, tokenizer.eos_token_id, notes)


def load_prompt_data(config: Config, model: Path) -> PromptData:
    """Read, render and tokenize the rows of data.train_path and data.val_path.

    Args:
        model: folder with the tokenizer.

    Raises:
        ConfigError: a file or a row in it cannot be used, or too few rows are short enough.
    """
    from transformers import AutoTokenizer  # here: seconds to import, spent while the other processes start

    tokenizer = AutoTokenizer.from_pretrained(model)
    notes: list[str] = []
    training, usable = _read(config, "train_path", tokenizer, notes)
    wanted = config.prompts_per_generation_batch
    if usable < wanted:
        text = f"has {usable} usable rows, fewer than the {wanted} prompts that are sampled together"
        raise ConfigError([Problem(f"data.train_path={config.data.train_path}", text)])
    loader = PromptLoader(training, prompts_per_batch=wanted, shuffle=config.data.shuffle, seed=config.loop.seed)
    val_prompts: list[DatumSpec] = []
    if config.data.val_path is not None:
        held_out, usable = _read(config, "val_path", tokenizer, notes)
        if not usable:
            raise ConfigError([Problem(f"data.val_path={config.data.val_path}", "has no usable row")])
        prompts = (held_out[idx] for idx in range(len(held_out)))
        val_prompts = [prompt for prompt in prompts if prompt["loss_multiplier"] > 0][: config.loop.max_val_samples]
    return PromptData(loader, val_prompts, tokenizer.eos_token_id, notes)


def _read(config: Config, key: str, tokenizer: Any, notes: list[str]) -> tuple[AllTaskProcessedDataset, int]:
    """The prompts of a file, and how many of them are not too long; remarks on those that are."""
    data, path = config.data, getattr(config.data, key)
    spec = TaskDataSpec(
        task_name=data.task_name,
        prompt_key=data.prompt_key,
        answer_key=data.answer_key,
        apply_chat_template=data.apply_chat_template,
        system_prompt=data.system_prompt,
    )
    processors = dict.fromkeys(config.env, (spec, math_data_processor))
    try:
        rows = read_prompts(path, spec, task_names=set(config.env))
        dataset = AllTaskProcessedDataset(rows, tokenizer, spec, processors, data.max_input_seq_length)
        usable = sum(dataset[idx]["loss_multiplier"] > 0 for idx in range(len(dataset)))
    except ValueError as error:
        raise ConfigError([Problem(f"data.{key}={path}", str(error))]) from error
    if usable < len(rows):
        notes.append(
            f"{len(rows) - usable} of the {len(rows)} rows of data.{key}={path} are left out: their prompts have more "
            f"than data.max_input_seq_length={data.max_input_seq_length} tokens"
        )
    return dataset, usable
