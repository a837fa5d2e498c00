"""The dataset of prompts, and the check of what a user's processor returns."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from torch.utils.data import Dataset, Subset

from megatron_grpo.data.chat_messages import is_conversation
from megatron_grpo.data.image_conversations import ImageConversationProcessor
from megatron_grpo.data.image_prompts import ImagePromptProcessor
from megatron_grpo.data.processors import REFERENCE, DataProcessor, DatumSpec, Message, TaskDataSpec, find_task
from megatron_grpo.data.specs import is_built_in


def convert_datum(
    datum: Any, row: dict[str, Any], spec: TaskDataSpec, *, task: str, tasks: Container[str], idx: int
) -> DatumSpec:
    """Convert a processor's prompt, also from NeMo RL's form.

    A missing `prompt` is replaced by the row's, or by the text of the messages; a missing reference answer by NeMo RL's
    extra_env_info.ground_truth, or by the row's. Tokens may be tensors or arrays.

    Args:
        task: the row's task, for a prompt that names none.
        tasks: all task names.

    Raises:
        ValueError: a key is missing or has a wrong value; the text continues a message that begins with the processor.
    """
    if not isinstance(datum, Mapping):
        raise ValueError(f"returned {type(datum).__name__}, not a DatumSpec")
    for key in ("message_log", "extra_env_info", "loss_multiplier"):
        if key not in datum:
            raise ValueError(f"returned no {key}, only {', '.join(map(str, datum)) or 'an empty DatumSpec'}")
    messages = _convert_messages(datum["message_log"])
    length = sum(len(message["token_ids"]) for message in messages)
    try:
        multiplier = float(datum["loss_multiplier"])
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several numbers
        multiplier = -1.0
    if not 0.0 <= multiplier <= 1.0:
        value = repr(datum["loss_multiplier"])
        raise ValueError(f"returned loss_multiplier={value}: give a weight from 0 (left out) to 1 (counts fully)")
    if multiplier and not length:
        raise ValueError("returned a message_log without tokens")
    name = task if datum.get("task_name") is None else datum["task_name"]
    if not isinstance(name, str) or name not in tasks:
        raise ValueError(f"returned task_name={name!r}, which is not an environment")
    converted = DatumSpec(
        message_log=messages,
        length=length,
        extra_env_info={**_collect_extra_fields(datum), **_add_reference(datum["extra_env_info"], row, spec)},
        loss_multiplier=multiplier,
        idx=idx,
        task_name=name,
        prompt=_choose_prompt(datum.get("prompt"), row.get(spec.prompt_key), messages),
    )
    if datum.get("rejected") is not None:  # the worse response of a pair
        converted["rejected"] = _convert_messages(datum["rejected"])
    return converted


def _collect_extra_fields(datum: Mapping[str, Any]) -> dict[str, Any]:
    # In NeMo RL's DatumSpec __extra__ stands for further fields of any type; environments get all of them as columns.
    extra = datum.get("__extra__") or {}
    if not isinstance(extra, Mapping):
        raise ValueError(f"returned {type(extra).__name__} as __extra__, not a dict")
    further = {key: value for key, value in datum.items() if key not in (*DatumSpec.__annotations__, "__extra__")}
    return {**further, **extra}


def _convert_messages(log: Any) -> list[Message]:
    if not isinstance(log, list | tuple):
        raise ValueError(f"returned {type(log).__name__} as message_log, not a list of messages")
    messages: list[Message] = []
    for number, message in enumerate(log):
        name = f"message_log[{number}]"
        if not isinstance(message, Mapping) or "token_ids" not in message:
            raise ValueError(f"returned no token_ids in {name}")
        tokens = message["token_ids"]
        # Tensors and arrays become lists. The exact type, because True is an int as well.
        tokens = tokens.tolist() if hasattr(tokens, "tolist") else tokens
        if not isinstance(tokens, list | tuple) or not all(type(token) is int for token in tokens):
            raise ValueError(f"returned {name}.token_ids that are not a flat list of token numbers")
        role, content = str(message.get("role", "user")), str(message.get("content", ""))
        messages.append(Message(role=role, content=content, token_ids=list(tokens)))
    return messages


def _add_reference(env_info: Any, row: dict[str, Any], spec: TaskDataSpec) -> dict[str, Any]:
    if env_info is not None and not isinstance(env_info, Mapping):
        raise ValueError(f"returned {type(env_info).__name__} as extra_env_info, not a dict")
    extra = dict(env_info or {})
    column = None if spec.answer_key is None else row.get(spec.answer_key)
    # NeMo RL's processors put the reference answer under ground_truth.
    answer = extra["ground_truth"] if extra.get("ground_truth") is not None else column
    if REFERENCE in extra or spec.answer_key is None or answer is None:
        return extra
    return {"answer": answer, **extra, REFERENCE: str(answer)}


def _choose_prompt(returned: Any, column: Any, messages: list[Message]) -> str | list[dict[str, str]]:
    if returned is not None and not isinstance(returned, str) and not is_conversation(returned):
        kind = type(returned).__name__
        raise ValueError(f"returned {kind} as prompt, neither a text nor a list of {{role, content}}")
    for candidate in (returned, column):
        if isinstance(candidate, str) or is_conversation(candidate):
            return candidate
    return "".join(message["content"] for message in messages)


@dataclass(eq=False)
class AllTaskProcessedDataset(Dataset[DatumSpec]):
    """Rows of any mix of tasks as prompts."""

    dataset: Subset[dict[str, Any]] | Sequence[dict[str, Any]]
    """Rows; a Subset has the usable rows of a `Source`, which names their places in messages."""
    tokenizer: Any
    default_task_data_spec: TaskDataSpec  # specification whose task_name is used for rows without one
    task_data_processors: Mapping[str, tuple[TaskDataSpec, DataProcessor]]
    max_seq_length: int  # most tokens of a prompt; a longer one is flagged with loss_multiplier 0
    _: KW_ONLY
    skip_refused: bool = False  # flag a row that its processor refuses with loss_multiplier 0, too
    vocab: int | None = None  # number of the model's tokens; None: it is not known
    refused: dict[int, str] = field(default_factory=dict, init=False)  # reasons of refused rows, by row number

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int) -> DatumSpec:
        """Make the prompt of a row.

        With skip_refused, the prompt of a refused row is empty and has loss_multiplier 0.

        ValueError: no prompt can be made of the row, and skip_refused is false.
        """
        try:
            return self.make_prompt(self.dataset[idx], idx)
        except ValueError as error:
            reason = str(error)
            if isinstance(self.dataset, Subset):
                source: Any = self.dataset.dataset
                reason = f"{source.locate(self.dataset.indices[idx])}: {reason}"
            if not self.skip_refused:
                raise ValueError(reason) from error
            self.refused[idx] = reason
            task = self.default_task_data_spec.task_name
            return DatumSpec(
                message_log=[], length=0, extra_env_info={}, loss_multiplier=0.0, idx=idx, task_name=task, prompt=""
            )

    def make_prompt(self, row: dict[str, Any], idx: int) -> DatumSpec:
        """Make the prompt of a row, perhaps of another dataset.

        ValueError: nothing processes the row's task, or its processor refuses it, fails, or returns no prompt.
        """
        task = find_task(row, self.default_task_data_spec.task_name)
        try:
            spec, process = self.task_data_processors[task]
        except (KeyError, TypeError):
            tasks = ", ".join(sorted(self.task_data_processors)) or "none"
            raise ValueError(f'row {idx}: no data processor for task_name "{task}"; there is {tasks}') from None
        function = process if hasattr(process, "__qualname__") else type(process)
        name = f"row {idx}: its processor {function.__module__}.{function.__qualname__}"
        is_builtin = is_built_in(process) or isinstance(process, ImagePromptProcessor | ImageConversationProcessor)
        try:
            prompt = process(row, spec, self.tokenizer, self.max_seq_length, idx)
        except Exception as error:  # a user's own processor may raise anything
            if is_builtin and isinstance(error, ValueError):
                raise
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise ValueError(f"{name} raised {reason}") from error
        if not is_builtin:  # a user's processor may return anything
            try:
                prompt = convert_datum(prompt, row, spec, task=task, tasks=self.task_data_processors, idx=idx)
            except ValueError as error:
                raise ValueError(f"{name} {error}") from error
        messages = [*prompt["message_log"], *prompt.get("rejected", [])]
        largest = max((token for message in messages for token in message["token_ids"]), default=0)
        if self.vocab is not None and largest >= self.vocab:  # it has no embedding
            token = self.tokenizer.decode([largest])
            text = f"the prompt has the token {token!r} with number {largest}, and the model has {self.vocab} tokens"
            raise ValueError(f"row {idx}: {text} (vocab_size in config.json)")
        return prompt
