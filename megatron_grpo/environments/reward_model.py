"""Reward models: Hugging Face's sequence classifiers, in their own processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from megatron_grpo.cluster.futures import explain_error
from megatron_grpo.cluster.limited_calls import TEXT_BYTES, limit_memory
from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.process_log import begin_process_log
from megatron_grpo.config.data_schema import RewardModelConfig
from megatron_grpo.config.errors import ResponseError, RunError
from megatron_grpo.config.paths import is_hub_name
from megatron_grpo.data.chat_messages import parse_tools
from megatron_grpo.data.conversation_tokens import encode_scored
from megatron_grpo.data.prompt_renderer import FORMAT_KEY, PromptFormat, PromptRenderer
from megatron_grpo.data.tokenizer import load_tokenizer
from megatron_grpo.models.checkpoint_model import find_checkpoint_model
from megatron_grpo.models.source import download_config, fetch_model_folder, find_local_folder

RESTARTS = 3  # times that Ray may restart a process of a reward model


def find_model_problem(path: str) -> str | None:
    """Say why a path is no reward model, or None."""
    folder = Path(path)
    try:
        checkpoint = None if is_hub_name(path) else find_checkpoint_model(path)
    except ValueError as error:
        return str(error)
    if checkpoint is not None:
        text = "is a checkpoint of a policy; give one of algorithm=reward_model, or its export"
        return None if checkpoint.head.is_scalar else text
    if is_hub_name(path):
        reason = None if find_local_folder(path) else download_config(path)
        if reason is not None:
            return f"is not a folder here, nor in the Hugging Face cache, and the hub says: {reason}"
        folder = find_local_folder(path) or folder
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        kinds, labels = config["architectures"], config.get("num_labels", len(config.get("id2label") or (0, 1)))
    except OSError:
        return f"is not a folder of a model: {file} cannot be read"
    except (ValueError, KeyError, AttributeError, TypeError):
        return f"is not a folder of a model: {file} does not say what architectures it is for"
    if not any(str(kind).endswith("ForSequenceClassification") for kind in kinds):
        return f"is of {', '.join(map(str, kinds))}; a reward model is one for sequence classification"
    return None if labels == 1 else f"has {labels} labels; a reward model has one (num_labels, id2label)"


class RewardModel:
    """Ray actor with a copy of the model."""

    def __init__(self, path: str, config: RewardModelConfig, number: int) -> None:
        begin_process_log(f"reward model {Path(path).name} worker {number}")
        import torch
        from transformers import AutoModelForSequenceClassification

        self._config = config
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._tokenizer = load_tokenizer(path)
        dtype = getattr(torch, config.precision)
        self._model, loading = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=dtype, num_labels=1, trust_remote_code=False, output_loading_info=True
        )
        if loading["missing_keys"]:  # transformers draws these at random, with a warning
            raise RunError(f"reward model {path} has no weights for {', '.join(sorted(loading['missing_keys']))}")
        pad_id = self._model.config.get_text_config().pad_token_id
        self._vocabulary = self._model.get_input_embeddings().num_embeddings
        # Some configurations say -1, an id that no text has; it means that there is none.
        self._pad_id = pad_id if pad_id is not None and 0 <= pad_id < self._vocabulary else None
        self._model.to(self._device).eval()
        # Conversations as in training: its system prompt, tools and variables of the template.
        settings = getattr(self._model.config, FORMAT_KEY, None)
        self._conversations = PromptRenderer(self._tokenizer, PromptFormat(**(settings or {})))
        self._texts = PromptRenderer(self._tokenizer, PromptFormat(apply_chat_template=False))

    @phase("reward model")
    def compute_rewards(
        self, prompts: Sequence[Any], completions: Sequence[Any], tools: Sequence[Any] | None = None
    ) -> list[float | None]:
        """Score each conversation, or the joined texts of prompt and completion.

        A conversation, with the row's own tools if it has some, is read as rows are in training, with the model's own
        chat template. A score does not depend on the other texts of the call: it is what transformers computes for the
        text alone. A text without tokens has no score (None).

        RunError: there is no chat template. ResponseError: it refuses a conversation or leaves out a part of it.
        """
        rows = zip(prompts, completions, tools or [None] * len(prompts), strict=True)
        token_ids = [self._encode(*row) for row in rows]
        if self._config.max_tokens is not None:
            token_ids = [ids[-self._config.max_tokens :] for ids in token_ids]
        scores: list[float | None] = [None] * len(token_ids)
        for batch in _make_batches({i: len(ids) for i, ids in enumerate(token_ids) if ids}, self._config.batch_tokens):
            for index, score in zip(batch, self._score_batch([token_ids[index] for index in batch]), strict=True):
                scores[index] = score
        return scores

    def _encode(self, prompt: Any, completion: Any, tools: Any) -> list[int]:
        if isinstance(prompt, str) and not self._config.add_special_tokens:
            return self._texts.encode_rendered(f"{prompt}{completion}")
        renderer = self._texts if isinstance(prompt, str) else self._conversations
        if renderer is self._conversations and not renderer.has_template:
            raise RunError("the reward model's tokenizer has no chat template, and the prompts are conversations")
        try:
            own_tools = parse_tools(tools) if tools else None
            with limit_memory(TEXT_BYTES):
                messages = encode_scored(renderer, prompt, completion, own_tools, needs_thoughts=False)
        except ValueError as error:
            raise ResponseError(f"the reward model cannot read a conversation: {error}") from error
        return [token_id for message in messages for token_id in message["token_ids"]]

    def _score_batch(self, token_ids: Sequence[list[int]]) -> list[float]:
        """Score texts in one forward pass if padding allows it."""
        import torch

        pad_id = self._choose_padding(token_ids)
        if len(token_ids) > 1 and pad_id is None:
            return [score for ids in token_ids for score in self._score_batch([ids])]
        length = max(map(len, token_ids))
        padded_ids = torch.tensor([[*ids, *[pad_id or 0] * (length - len(ids))] for ids in token_ids])
        mask = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids in token_ids])
        # Decoder models score the last token that is not config.pad_token_id, and look at the ids, not at the attention
        # mask. So the padding is that id. Without such an id transformers scores the last token of a single text; then
        # the padding is an id that none of the texts has, and config.pad_token_id is set to it for this pass. The
        # tokenizer's padding token is never used: it is often the token that ends a conversation.
        if self._pad_id is None:
            self._model.config.get_text_config().pad_token_id = pad_id if len(token_ids) > 1 else None
        with torch.inference_mode():
            output = self._model(input_ids=padded_ids.to(self._device), attention_mask=mask.to(self._device))
        return [float(score) for score in output.logits[:, 0]]

    def _choose_padding(self, token_ids: Sequence[list[int]]) -> int | None:
        """Choose the id that pads these texts; None: padding would matter."""
        if self._model.config.is_encoder_decoder:  # these find a text's end by its number of end tokens
            return None
        if self._pad_id is not None:
            return self._pad_id
        used = {token_id for ids in token_ids for token_id in ids}
        return next((token_id for token_id in range(self._vocabulary) if token_id not in used), None)


def _make_batches(lengths: Mapping[int, int], tokens: int) -> Iterator[list[int]]:
    """Batch indices of texts of similar length, by padded tokens."""
    batch: list[int] = []
    for index in sorted(lengths, key=lengths.__getitem__, reverse=True):  # the first of a batch is the longest
        if batch and (len(batch) + 1) * lengths[batch[0]] > tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


class RewardModelClient:
    """A reward model as an async reward function."""

    def __init__(self, path: str, workers: Sequence[Any]) -> None:
        self.path, self._workers = path, list(workers)

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], tools: Sequence[Any] | None = None
    ) -> list[float | None]:
        share, columns = -(-len(prompts) // len(self._workers)), (prompts, completions, tools or [None] * len(prompts))
        calls = [
            worker.compute_rewards.remote(*(column[begin : begin + share] for column in columns))
            for worker, begin in zip(self._workers, range(0, len(prompts), share), strict=False)
        ]
        return [reward for rewards in await asyncio.gather(*calls) for reward in rewards]

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the processes are ready; RunError if one fails."""
        try:
            ray.get([worker.__ray_ready__.remote() for worker in self._workers], timeout=timeout_s)
        except ray.exceptions.RayError as error:
            raise RunError(f"reward model {self.path}: a process {explain_error(error)} as it started") from error


def start_reward_model(path: str, config: RewardModelConfig) -> tuple[RewardModelClient, list[Any]]:
    """Start a reward model without waiting for it; RunError: no download.

    The caller ends the returned Ray actors.
    """
    folder = str(fetch_model_folder(path, "reward_funcs"))
    options = {"num_cpus": 0, "num_gpus": config.gpus, "max_restarts": RESTARTS, "max_task_retries": 1}
    actor = ray.remote(**options)(RewardModel)
    workers = [actor.remote(folder, config, number) for number in range(config.num_workers)]
    return RewardModelClient(path, workers), workers
