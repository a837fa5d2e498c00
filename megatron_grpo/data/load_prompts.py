"""Reads the sets of a run: loaders of training prompts, and held-out prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from megatron_grpo.batch import special_tokens
from megatron_grpo.config.data_schema import CurriculumConfig, DatasetConfig
from megatron_grpo.config.errors import ConfigError, Problem, format_count
from megatron_grpo.config.paths import SCRIPT_STREAM
from megatron_grpo.config.schema import Config
from megatron_grpo.data.curriculum import CurriculumLoader, read_levels
from megatron_grpo.data.datasets import AllTaskProcessedDataset
from megatron_grpo.data.image_conversations import ImageConversationProcessor
from megatron_grpo.data.image_prompts import ImagePromptProcessor, ImageSource, make_run_images
from megatron_grpo.data.loader import BatchLoader, PromptLoader, Prompts, PromptSampler, StreamLoader, open_stream
from megatron_grpo.data.processors import DataProcessor, DatumSpec, find_task, math_data_processor
from megatron_grpo.data.prompt_renderer import PromptRenderer
from megatron_grpo.data.rows import describe_too_few_rows, examine_set, find_row_kinds, join_reasons
from megatron_grpo.data.specs import ROW_PROCESSORS, find_rendering, make_processors, make_task_spec
from megatron_grpo.data.supervised_rows import recorded_data_processor
from megatron_grpo.data.table_values import StreamedRows
from megatron_grpo.data.tokenizer import find_difference, load_tokenizer, make_sample_texts, read_tokenizer
from megatron_grpo.models.tokenizer_files import TOKENIZER_FILE, read_vocabulary_size

BATCH_ROWS = 1000  # tokenised together, on all cores


def count_left_out(dataset: AllTaskProcessedDataset, rows: int) -> int:
    """Count how many of the first `rows` rows get loss_multiplier 0.

    ValueError: a row makes no prompt, and is not to be left out.
    """
    is_fast, left_out = getattr(dataset.tokenizer, "is_fast", False), 0
    for begin in range(0, rows, BATCH_ROWS):
        part = range(begin, min(begin + BATCH_ROWS, rows))
        count = _count_too_long(dataset, part) if is_fast else None
        left_out += sum(dataset[idx]["loss_multiplier"] == 0 for idx in part) if count is None else count
    return left_out


def _count_too_long(dataset: AllTaskProcessedDataset, part: range) -> int | None:
    # None: the rows have to be processed one by one, because a user's processor makes some prompts, whose lengths only
    # it knows, or because a row may be refused, and then the message has to name it.
    by_task: dict[str, list[str]] = defaultdict(list)
    for idx in part:
        row = dataset.dataset[idx]
        task = find_task(row, dataset.default_task_data_spec.task_name)
        try:
            spec, process = dataset.task_data_processors[task]
            render = find_rendering(process)
            if render is None:
                return None
            by_task[task].append(render(row, spec, dataset.tokenizer, idx))
        except (ValueError, LookupError, TypeError, AttributeError):
            return None
    left_out = 0
    for task, texts in by_task.items():
        spec, _ = dataset.task_data_processors[task]
        prompts = PromptRenderer(dataset.tokenizer, spec).encode_prompts(texts)
        too_long = sum(len(token_ids) > dataset.max_seq_length for token_ids in prompts)
        exceeds_vocab = dataset.vocab is not None and max(map(max, filter(None, prompts)), default=0) >= dataset.vocab
        if not all(prompts) or exceeds_vocab or (too_long and spec.long_prompts == "error"):
            return None
        left_out += too_long if spec.long_prompts == "filter" else 0
    return left_out


@dataclass(frozen=True, slots=True)
class PromptData:
    """A run's training prompts, validation prompts and tokenizer."""

    loader: BatchLoader
    val_prompts: list[DatumSpec]
    stops: special_tokens.StopConditions
    notes: list[str]  # remarks about the files for the user
    tokenizer: Any = None  # tokenizer of the prompts, from transformers; None: a recording replaces the prompts
    val_rows: list[DatumSpec] = field(default_factory=list)  # of the held-out loss, where rows are learnt from
    demonstrations: list[DatumSpec] = field(default_factory=list)  # rows to learn beside samples
    hinted_prompts: Prompts | None = None  # training prompts with the hint of a policy that teaches itself


def load_prompt_data(config: Config, model: Path, tokenizer: Any = None, rows: Any = None) -> PromptData:
    """Read, render and tokenize the training and validation sets.

    `tokenizer` replaces the tokenizer of the model's folder, and has to make the same tokens. `rows`: those that a
    script streams, for SCRIPT_STREAM. ConfigError: a file or a row in it cannot be used, or too few rows are short
    enough.
    """
    reader = PromptReader(config, model, tokenizer)
    loader = reader.make_stream(rows) if config.data.streaming else reader.make_loader()
    val_prompts = list(reader.read_validation()) if config.needs_generation else []
    val_rows = list(reader.read_validation(trains=True)) if config.method.rows else []
    demonstrations, hinted_prompts = list[DatumSpec](), None
    if (demonstration_config := config.demonstration_config) is not None:
        ((_, dataset),) = demonstration_config.data.training_sets.items()
        separate = PromptReader(demonstration_config, model, reader.tokenizer)
        demonstrations = separate.read_held_out("chord.train_path", dataset, trains=True)
        reader.notes += [note for note in separate.notes if note not in reader.notes]
    if config.teaches_itself:
        separate = PromptReader(config, model, reader.tokenizer, hint=config.distillation.hint_prompt)
        hinted_prompts = separate.read_hinted_prompts()
    return PromptData(
        loader, val_prompts, reader.stops, reader.notes, reader.tokenizer, val_rows, demonstrations, hinted_prompts
    )


class PromptReader:
    """Reads the sets of a run, and collects notes for the user."""

    def __init__(
        self,
        config: Config,
        model: Path,
        tokenizer: Any = None,
        hint: str | None = None,
        image_store: Path | None = None,
    ) -> None:
        """Load the tokenizer.

        `hint`: text of a teacher's prompts (distillation.hint_prompt); None: the prompts are the run's. `image_store`:
        of the images of prompts; None: that of the run.
        """
        self.config, self.tokenizer, self.hint = config, tokenizer, hint
        self._images = make_run_images(config, model, image_store)
        self.notes: list[str] = []
        self._left_out: list[str] = []  # why rows of the sets that were read are not used
        if tokenizer is None:
            self.tokenizer, remark = read_tokenizer(model)
            self.notes += [] if remark is None else [remark]
        elif (model / TOKENIZER_FILE).is_file():
            # The engines and environments use the model's tokenizer, so a script's has to read every text as it does.
            of_model = load_tokenizer(model)
            texts = make_sample_texts(special_tokens.list_added_tokens(of_model))
            difference = find_difference(tokenizer, of_model, texts)
            if difference is not None:
                text = f"is another tokenizer than that of {model}: {difference}; leave it out to take the model's"
                raise ConfigError([Problem("tokenizer", text)])
        self._vocab = read_vocabulary_size(model)
        self.stops = special_tokens.find_stop_conditions(config.generation, self.tokenizer, model)
        self.notes += self._find_unstopped_turns() if config.needs_generation else ()

    def _find_unstopped_turns(self) -> Iterator[str]:
        # A turn whose last token stops nothing goes on to the token limit, with further turns of both sides in it.
        data, ends = self.config.data, set()
        for task in dict.fromkeys([data.task_name, *self.config.env]):
            spec = make_task_spec(data, task)
            renderer = PromptRenderer(self.tokenizer, spec)
            if spec.apply_chat_template and renderer.has_template:
                render = partial(renderer.render, add_generation_prompt=False)
                ends.add(special_tokens.find_unstopped_turn_end(self.tokenizer, self.stops, render))
        for token, number in sorted(filter(None, ends)):
            yield (
                f"the chat template ends the model's messages with {token}, which ends no response of this run: they "
                f"go on to generation.max_new_tokens; give generation.stop_token_ids=[{number}]"
            )

    def make_loader(self) -> BatchLoader:
        config, sets = self.config, self.config.data.training_sets
        self._left_out.clear()
        datasets, usable = [], 0
        for key, training_set in sets.items():
            dataset, usable_rows = self._read(key, training_set, trains=True)
            datasets.append(dataset)
            usable += min(usable_rows, training_set.count_visits(usable_rows))
        per_batch = config.prompts_per_generation_batch
        if usable < per_batch:
            text = describe_too_few_rows(config, format_count("usable row", usable))
            subjects = [f"{key}={training_set.path}" for key, training_set in sets.items()]
            subject = subjects[0] if len(sets) == 1 else ", ".join(sets)
            raise ConfigError([Problem(subject, join_reasons(text, self._left_out))])
        self.notes += self._find_unfinished_schedules(usable // per_batch)
        prompts = _join_prompts(datasets)
        if config.data.curriculum.column is not None:
            return self._make_curriculum(config.data.curriculum, prompts, datasets)
        order = PromptSampler(
            [len(dataset) for dataset in datasets],
            [training_set.weight for training_set in sets.values()],
            shuffle=config.data.shuffle,
            seed=config.loop.seed,
        )
        return PromptLoader(prompts, prompts_per_batch=per_batch, order=order)

    def read_hinted_prompts(self) -> Prompts:
        """Read the training prompts with the hint."""
        sets = self.config.data.training_sets.items()
        return _join_prompts([self._read(key, training_set, trains=True)[0] for key, training_set in sets])

    def _find_unfinished_schedules(self, steps_per_epoch: int) -> Iterator[str]:
        config, loop, name = self.config, self.config.loop, self.config.loop_name
        steps = steps_per_epoch * loop.max_num_epochs
        optimizers = {"policy": config.policy.optimizer}
        optimizers |= {"value": config.value.optimizer} if config.method.has_value_model else {}
        for section, optimizer in optimizers.items() if steps < loop.max_num_steps else ():
            if optimizer.depends_on_steps:
                yield (
                    f"{section}.optimizer: the schedule of the learning rate has {name}.max_num_steps="
                    f"{loop.max_num_steps} steps, and the rows are used up after {steps} ({name}.max_num_epochs="
                    f"{loop.max_num_epochs}), before it ends; give {name}.max_num_steps=-1 for one over the rows"
                )

    def _make_curriculum(
        self, config: CurriculumConfig, prompts: Prompts, datasets: Sequence[AllTaskProcessedDataset]
    ) -> CurriculumLoader:
        rows = (dataset.dataset[number] for dataset in datasets for number in range(len(dataset)))
        try:
            levels = read_levels(rows, str(config.column))
        except ValueError as error:
            raise ConfigError([Problem(f"data.curriculum.column={config.column}", str(error))]) from None
        per_batch, seed = self.config.prompts_per_generation_batch, self.config.loop.seed
        return CurriculumLoader(prompts, levels, config, prompts_per_batch=per_batch, seed=seed)

    def make_stream(self, rows: Any) -> StreamLoader:
        config, ((key, training_set),) = self.config, self.config.data.training_sets.items()
        is_of_script = training_set.path == SCRIPT_STREAM
        if is_of_script and rows is None:
            text = "stands for rows of a script; start the run with that script, or give a hub name"
            raise ConfigError([Problem(f"{key}={training_set.path}", text)])
        try:
            stream = StreamedRows(rows) if is_of_script else open_stream(training_set)
        except ValueError as error:
            raise ConfigError([Problem(f"{key}={training_set.path}", str(error))]) from None
        return StreamLoader(
            stream,
            config=training_set,
            data=config.data,
            environments=find_row_kinds(self.config, trains=False),
            prompts=self._make_prompts(training_set, [], trains=True),
            prompts_per_batch=config.prompts_per_generation_batch,
            seed=config.loop.seed,
        )

    def read_validation(self, *, trains: bool = False) -> Iterator[DatumSpec]:
        """Read at most max_val_samples prompts, or rows to learn, of each validation set."""
        for key, validation_set in self.config.data.validation_sets.items():
            is_named = key != "data.val_path"
            for prompt in self.read_held_out(key, validation_set, trains=trains)[: self.config.loop.max_val_samples]:
                yield {**prompt, "dataset": key.split(".")[2]} if is_named else prompt

    def read_held_out(self, key: str, config: DatasetConfig, *, trains: bool = False) -> list[DatumSpec]:
        """Read, render and tokenize a set as for validation, or as training does.

        `key`: of its path, for messages. ConfigError: the set or a row in it cannot be used, or all rows are too long.
        """
        self._left_out.clear()
        dataset, usable = self._read(key, config, trains=trains)
        subject = f"{key}={config.path}"
        if not usable:
            raise ConfigError([Problem(subject, join_reasons("has no usable row", self._left_out))])
        try:
            prompts = [dataset[idx] for idx in range(len(dataset))]
        except ValueError as error:
            raise ConfigError([Problem(subject, str(error))]) from error
        return [prompt for prompt in prompts if prompt["loss_multiplier"] > 0]

    def _read(self, key: str, config: DatasetConfig, *, trains: bool) -> tuple[AllTaskProcessedDataset, int]:
        """Read a set, for training or sampling, and count its usable prompts."""
        data, subject = self.config.data, f"{key}={config.path}"
        report = examine_set(config, data, find_row_kinds(self.config, trains=trains))
        if report.problems:
            raise ConfigError(report.problems)
        self.notes += [f"{remark.subject} {remark.text}" for remark in report.remarks]
        self._left_out += report.explain_left_out()
        if not report.rows:
            raise ConfigError([Problem(subject, join_reasons("has no rows", self._left_out))])
        source: Any = report.source  # not None, since it has no problems
        dataset = self._make_prompts(config, Subset(source, report.usable), trains=trains)
        try:
            rendered = min(len(dataset), data.rows_rendered_at_start)
            left_out = count_left_out(dataset, rendered)
        except ValueError as error:
            raise ConfigError([Problem(subject, str(error))]) from error
        refused = dataset.refused
        if refused:
            count, reason = format_count("row", len(refused)), next(iter(refused.values()))
            self._left_out.append(f"{count} left out: {reason}")
            self.notes.append(f"{count} of {subject} left out: {reason}")
            left_out -= len(refused)  # a refused prompt has loss_multiplier 0 as a long one has
        if left_out:
            among = "" if rendered == len(dataset) else "first "
            text = f"more than data.max_input_seq_length={data.max_input_seq_length} tokens in the prompt"
            if trains and self.config.method.rows:
                text = f"more than policy.max_total_sequence_length={dataset.max_seq_length} tokens"
            self._left_out.append(f"{left_out} of the {among}{format_count('row', rendered)} left out: {text}")
            self.notes.append(f"{left_out} of the {among}{format_count('row', rendered)} of {subject} left out: {text}")
        return dataset, len(dataset) - left_out - len(refused)

    def _make_prompts(
        self, config: DatasetConfig, rows: Subset[dict[str, Any]] | Sequence[dict[str, Any]], *, trains: bool
    ) -> AllTaskProcessedDataset:
        data, kind = self.config.data, self.config.row_kind if trains else None
        make: DataProcessor = ROW_PROCESSORS[kind] if kind else math_data_processor
        if self._images is not None and data.image_key is not None:
            folder = Path(config.path) if Path(config.path).is_dir() else Path(config.path).parent
            source = ImageSource(**vars(self._images), column=data.image_key, folder=folder.absolute())
            make = ImageConversationProcessor(source, make) if kind else ImagePromptProcessor(source)
        processors = make_processors(data, self.config.env, make)
        longest = self.config.policy.max_total_sequence_length if kind or self.hint else data.max_input_seq_length
        if self.hint:
            hint: dict[str, Any] = {"prompt": self.hint, "prompt_setting": "distillation.hint_prompt"}
            processors = {task: (replace(spec, **hint), processor) for task, (spec, processor) in processors.items()}
        if config.path == data.from_rollouts:
            processors = {task: (spec, recorded_data_processor) for task, (spec, _) in processors.items()}
        return AllTaskProcessedDataset(
            rows,
            self.tokenizer,
            make_task_spec(data, config.task_name or data.task_name),
            processors,
            longest,
            skip_refused=data.bad_rows == "skip",
            vocab=self._vocab,
        )


def _join_prompts(datasets: Sequence[AllTaskProcessedDataset]) -> Prompts:
    return datasets[0] if len(datasets) == 1 else JoinedPrompts(datasets)


class JoinedPrompts(ConcatDataset[DatumSpec]):
    """Several sets of prompts, numbered consecutively."""

    def __getitem__(self, idx: int) -> DatumSpec:
        # The number within its own set would repeat in another set, and with it the seeds of samples.
        prompt: DatumSpec = super().__getitem__(idx)
        return {**prompt, "idx": idx}
