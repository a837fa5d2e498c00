"""The prompts of a run: rows are looked at before training, so that a bad one does not end it in the middle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_grpo.config.data_schema import DatasetConfig
from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.data.datasets import AllTaskProcessedDataset, StreamLoader, UsableRows, open_stream
from megatron_grpo.data.loader import Batches, PromptLoader, Visits
from megatron_grpo.data.processors import DataProcessor, DatumSpec, TaskDataSpec, task_of
from megatron_grpo.data.rows import Examined, examined
from megatron_grpo.data.specs import processor_name, processor_of, processor_problems, rendering_of, task_spec

BATCH_ROWS = 1000
"""Rows that are tokenised together, on all cores."""


def count_left_out(dataset: AllTaskProcessedDataset, rows: int) -> int:
    """How many of the first rows get a loss_multiplier of 0.

    Args:
        dataset: the prompts.
        rows: how many of them are looked at.

    Raises:
        ValueError: a row makes no prompt and is not to be left out; the message is the dataset's.
    """
    return sum(_of_part(dataset, range(begin, min(begin + BATCH_ROWS, rows))) for begin in range(0, rows, BATCH_ROWS))


def _of_part(dataset: AllTaskProcessedDataset, part: range) -> int:
    together = _together(dataset, part) if getattr(dataset.tokenizer, "is_fast", False) else None
    return sum(dataset[idx]["loss_multiplier"] == 0 for idx in part) if together is None else together


def _together(dataset: AllTaskProcessedDataset, part: range) -> int | None:
    """How many rows of a part are left out, their prompts tokenised together; None: some row may make no prompt."""
    texts: dict[str, list[str]] = defaultdict(list)
    for idx in part:
        row = dataset.dataset[idx]
        task = task_of(row, dataset.default_task_data_spec.task_name)
        try:
            spec, process = dataset.task_data_processors[task]
            render = rendering_of(process)
            if render is None:
                return None
            texts[task].append(render(row, spec, dataset.tokenizer, idx))
        except (ValueError, LookupError, TypeError, AttributeError):
            return None
    counts = [
        _too_long(own, dataset.task_data_processors[task][0], dataset.tokenizer, dataset.max_seq_length)
        for task, own in texts.items()
    ]
    return None if None in counts else sum(count for count in counts if count is not None)


def _too_long(texts: list[str], spec: TaskDataSpec, tokenizer: Any, longest: int) -> int | None:
    """How many rendered prompts of a task are left out for their length; None: one has no tokens, or is refused."""
    found = tokenizer(
        texts,
        add_special_tokens=not spec.apply_chat_template,
        return_attention_mask=False,
        return_token_type_ids=False,
    )["input_ids"]
    too_long = sum(len(one) > longest for one in found)
    if not all(found) or (too_long and spec.long_prompts == "error"):
        return None
    return too_long if spec.long_prompts == "filter" else 0


@dataclass(frozen=True, slots=True)
class PromptData:
    """What a run reads from its files of prompts."""

    loader: Batches
    """Batches of training prompts, resumable."""
    val_prompts: list[DatumSpec]
    eos_token_id: int | None
    notes: list[str]
    """What to tell the user about the files."""
    columns: dict[str, set[str]] = field(default_factory=dict)
    """Names of the columns of each task's rows; empty while streaming, where nobody has seen them all."""


@dataclass(frozen=True, slots=True)
class HeldOutPrompts:
    """The usable prompts of one set."""

    prompts: list[DatumSpec]
    eos_token_id: int | None
    notes: list[str]
    """What to tell the user about the set."""


def held_out_prompts(config: Config, model: Path, key: str, one: DatasetConfig) -> HeldOutPrompts:
    """Read, render and tokenize the rows of one set as those of validation are, all of them.

    Args:
        config: how rows become prompts.
        model: folder with the tokenizer.
        key: the key of its path, for messages.
        one: the set.

    Raises:
        ConfigError: the set or a row in it cannot be used, or no row is short enough.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    notes: list[str] = []
    dataset, usable = _read(config, key, one, tokenizer, notes, {})
    if not usable:
        raise ConfigError([Problem(f"{key}={one.path}", "has no usable row")])
    return HeldOutPrompts(_usable(dataset, f"{key}={one.path}"), tokenizer.eos_token_id, notes)


def load_prompt_data(config: Config, model: Path, tokenizer: Any = None) -> PromptData:
    """Read, render and tokenize the rows of the training and validation sets.

    Args:
        config: the sets, and how their rows become prompts.
        model: folder with the tokenizer.
        tokenizer: one to use in its place; None: there is none.

    Raises:
        ConfigError: a file or a row in it cannot be used, or too few rows are short enough.
    """
    if tokenizer is None:
        from transformers import AutoTokenizer  # here: seconds to import, spent while the other processes start

        tokenizer = AutoTokenizer.from_pretrained(model)
    notes: list[str] = []
    columns: dict[str, set[str]] = {}
    loader = _stream(config, tokenizer) if config.data.streaming else _loader(config, tokenizer, notes, columns)
    val_prompts = list(chain.from_iterable(_validation(config, tokenizer, notes, columns)))
    return PromptData(loader, val_prompts, tokenizer.eos_token_id, notes, columns)


def _loader(config: Config, tokenizer: Any, notes: list[str], columns: dict[str, set[str]]) -> PromptLoader:
    """Batches of the training sets, mixed by their weights."""
    parts, usable = [], 0
    for key, one in config.data.training.items():
        part, found = _read(config, key, one, tokenizer, notes, columns)
        parts.append(part)
        usable += min(found, one.visits(found))
    wanted, subjects = config.prompts_per_generation_batch, ", ".join(config.data.training)
    if usable < wanted:
        text = f"has {usable} usable rows, fewer than the {wanted} prompts that are sampled together"
        (first, *others) = [f"{key}={one.path}" for key, one in config.data.training.items()]
        raise ConfigError([Problem(first if not others else subjects, text)])
    weights = [one.weight for one in config.data.training.values()]
    visits = Visits([len(part) for part in parts], weights, shuffle=config.data.shuffle, seed=config.loop.seed)
    whole = parts[0] if len(parts) == 1 else JoinedPrompts(parts)
    return PromptLoader(whole, prompts_per_batch=wanted, order=visits)


def _validation(
    config: Config, tokenizer: Any, notes: list[str], columns: dict[str, set[str]]
) -> Iterator[list[DatumSpec]]:
    """The validation prompts of each set, at most max_val_samples of each."""
    for key, one in config.data.validation.items():
        held_out, usable = _read(config, key, one, tokenizer, notes, columns)
        if not usable:
            raise ConfigError([Problem(f"{key}={one.path}", "has no usable row")])
        prompts = _usable(held_out, f"{key}={one.path}")[: config.loop.max_val_samples]
        name = key.split(".")[2] if key != "data.val_path" else None
        yield prompts if name is None else [{**prompt, "dataset": name} for prompt in prompts]


def _usable(dataset: AllTaskProcessedDataset, subject: str) -> list[DatumSpec]:
    """The prompts of a set that are not left out.

    Raises:
        ConfigError: a row makes no prompt.
    """
    try:
        prompts = [dataset[idx] for idx in range(len(dataset))]
    except ValueError as error:
        raise ConfigError([Problem(subject, str(error))]) from error
    return [prompt for prompt in prompts if prompt["loss_multiplier"] > 0]


def _read(
    config: Config, key: str, one: DatasetConfig, tokenizer: Any, notes: list[str], columns: dict[str, set[str]]
) -> tuple[AllTaskProcessedDataset, int]:
    """The prompts of a set, and how many of them are not known to be too long; remarks on those that are."""
    data, subject = config.data, f"{key}={one.path}"
    looked = examined(one, data, {name: env.type for name, env in config.env.items()})
    if looked.report.problems:
        raise ConfigError(looked.report.problems)
    notes += [f"{remark.subject} {remark.text}" for remark in looked.report.remarks]
    for task, names in looked.report.columns.items():
        columns.setdefault(task, set()).update(names)
    if not looked.report.rows:
        raise ConfigError([Problem(subject, "has no rows")])
    dataset = _processed(config, one, looked, tokenizer)
    try:
        rendered = min(len(dataset), data.rows_rendered_at_start)
        left_out = count_left_out(dataset, rendered)
    except ValueError as error:
        raise ConfigError([Problem(subject, str(error))]) from error
    if dataset.refused:
        notes.append(f"{len(dataset.refused)} rows of {subject} are left out: {next(iter(dataset.refused.values()))}")
        left_out -= len(dataset.refused)
    if left_out:
        among = f"{len(dataset)} rows" if rendered == len(dataset) else f"first {rendered} rows"
        notes.append(
            f"{left_out} of the {among} of {subject} are left out: their prompts have more "
            f"than data.max_input_seq_length={data.max_input_seq_length} tokens"
        )
    return dataset, len(dataset) - left_out - len(dataset.refused)


def _processed(config: Config, one: DatasetConfig, looked: Examined, tokenizer: Any) -> AllTaskProcessedDataset:
    """The rows of a set as prompts.

    Raises:
        ConfigError: a processor cannot be imported.
    """
    assert looked.source is not None, "rows were looked at"
    data, default = config.data, one.task_name or config.data.task_name
    return AllTaskProcessedDataset(
        UsableRows(looked.source, looked.usable),
        tokenizer,
        task_spec(data, default),
        _processors(config),
        data.max_input_seq_length,
        skip_refused=data.bad_rows == "skip",
    )


def _processors(config: Config) -> dict[str, tuple[TaskDataSpec, DataProcessor]]:
    """What makes prompts of the rows of each task.

    Raises:
        ConfigError: a processor cannot be imported.
    """
    data, problems = config.data, list(processor_problems(config.data))
    if problems:
        raise ConfigError(problems)
    return {task: (task_spec(data, task), processor_of(processor_name(data, task))) for task in config.env}


def _stream(config: Config, tokenizer: Any) -> StreamLoader:
    ((key, one),) = config.data.training.items()
    try:
        stream = open_stream(one)
    except ValueError as error:
        raise ConfigError([Problem(f"{key}={one.path}", str(error))]) from None
    environments: Mapping[str, str] = {name: env.type for name, env in config.env.items()}
    data, default = config.data, one.task_name or config.data.task_name
    prompts = AllTaskProcessedDataset(
        [], tokenizer, task_spec(data, default), _processors(config), data.max_input_seq_length
    )
    return StreamLoader(
        stream,
        config=one,
        data=data,
        environments=environments,
        process=prompts,
        prompts_per_batch=config.prompts_per_generation_batch,
        seed=config.loop.seed,
    )


class JoinedPrompts:
    """Several sets of prompts, one after the other, numbered through."""

    def __init__(self, parts: list[AllTaskProcessedDataset]) -> None:
        self._parts = parts
        self._begins = [sum(len(part) for part in parts[:number]) for number in range(len(parts))]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __getitem__(self, idx: int, /) -> DatumSpec:
        number = max(place for place, begin in enumerate(self._begins) if begin <= idx)
        begin = self._begins[number]
        return {**self._parts[number][idx - begin], "idx": idx}
