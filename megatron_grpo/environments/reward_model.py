"""Reward models: Hugging Face models for sequence classification, each run with torch in its own processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from megatron_grpo.cluster.futures import explain_error
from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.process_log import begin_process_log
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.paths import is_hub_name
from megatron_grpo.data.chat_template import render_chat
from megatron_grpo.data.tokenizer import load_tokenizer
from megatron_grpo.models.source import download_config, fetch_model_folder, find_local_folder

if TYPE_CHECKING:
    from megatron_grpo.config.data_schema import RewardModelConfig

RESTARTS = 3
"""Most times that Ray restarts a process of a reward model."""


def find_model_problem(path: str) -> str | None:
    """Reason why a folder or hub name is not a reward model; None: it is one, judging by its config.json."""
    folder = Path(path)
    if is_hub_name(path):
        reason = None if find_local_folder(path) else download_config(path)
        if reason is not None:
            return f"is not a folder here, nor in the Hugging Face cache, and the hub says: {reason}"
        found = find_local_folder(path)
        assert found is not None
        folder = found
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
    """Ray actor: one copy of the model and its tokenizer, on a GPU if torch finds one, else on the CPU."""

    def __init__(self, path: str, config: RewardModelConfig, number: int) -> None:
        """Load the model from a folder; `number` names the log of the process."""
        begin_process_log(f"reward model {Path(path).name} worker {number}")
        import torch
        from transformers import AutoModelForSequenceClassification

        self._config = config
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._tokenizer = load_tokenizer(path)
        self._model, loading = AutoModelForSequenceClassification.from_pretrained(
            path,
            dtype=getattr(torch, config.precision),
            num_labels=1,
            trust_remote_code=False,
            output_loading_info=True,
        )
        if loading["missing_keys"]:  # transformers draws these at random, with a warning
            raise RunError(f"reward model {path} has no weights for {', '.join(sorted(loading['missing_keys']))}")
        pad_id = self._model.config.get_text_config().pad_token_id
        self._vocabulary = self._model.get_input_embeddings().num_embeddings
        # Some configurations say -1: an id that no text has, so that it is the same as none.
        self._pad_id = pad_id if pad_id is not None and 0 <= pad_id < self._vocabulary else None
        self._model.to(self._device).eval()

    @phase("reward model")
    def rewards(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float | None]:
        """Score each conversation, rendered with the model's own chat template; plain texts are concatenated.

        A score does not depend on the other texts of the call: it is what transformers computes for the text alone. A
        text without tokens has no score (None).

        Raises:
            RunError: the prompts are conversations, and the model's tokenizer has no chat template.
        """
        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        token_ids = [self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        if self._config.max_tokens is not None:
            token_ids = [ids[-self._config.max_tokens :] for ids in token_ids]
        scores: list[float | None] = [None] * len(texts)
        numbers = [number for number, ids in enumerate(token_ids) if ids]
        for batch in _batches([len(token_ids[number]) for number in numbers], self._config.batch_tokens):
            batch_ids = [token_ids[numbers[index]] for index in batch]
            for index, score in zip(batch, self._scores(batch_ids), strict=True):
                scores[numbers[index]] = score
        return scores

    def _scores(self, token_ids: Sequence[list[int]]) -> list[float]:
        """Scores of some texts in one forward pass, if they can be padded without an effect on the scores.

        Decoder models score the last token that is not config.pad_token_id, and look at the ids, not at the attention
        mask. So the padding is that id; without one, transformers scores the last token of a single text, and the
        padding is an id that none of the texts has, which config.pad_token_id is set to for this pass. The tokenizer's
        padding token is never used: it is often the token that ends a conversation.
        """
        import torch

        pad_id = self._padding(token_ids)
        if len(token_ids) > 1 and pad_id is None:
            return [score for ids in token_ids for score in self._scores([ids])]
        longest = max(map(len, token_ids))
        ids = [[*one, *[pad_id or 0] * (longest - len(one))] for one in token_ids]
        mask = [[1] * len(one) + [0] * (longest - len(one)) for one in token_ids]
        if self._pad_id is None:
            self._model.config.get_text_config().pad_token_id = pad_id if len(token_ids) > 1 else None
        with torch.inference_mode():
            logits = self._model(
                input_ids=torch.tensor(ids, device=self._device),
                attention_mask=torch.tensor(mask, device=self._device),
            ).logits
        return [float(score) for score in logits[:, 0]]

    def _padding(self, token_ids: Sequence[list[int]]) -> int | None:
        """The id to pad these texts with; None: each has to be scored by itself."""
        if self._model.config.is_encoder_decoder:  # these find a text's end by its number of end tokens
            return None
        if self._pad_id is not None:
            return self._pad_id
        used = {token_id for ids in token_ids for token_id in ids}
        return next((token_id for token_id in range(self._vocabulary) if token_id not in used), None)

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return f"{prompt}{completion}"
        if self._tokenizer.chat_template is None:
            raise RunError("the reward model's tokenizer has no chat template, and the prompts are conversations")
        return render_chat(self._tokenizer, [*prompt, *completion])


def _batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Batch the numbers of texts of similar length: at most `tokens` tokens with padding, but at least one text."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):  # the first is the longest
        if batch and (len(batch) + 1) * max(lengths[batch[0]], 1) > tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


class RewardModelClient:
    """A reward model as an async reward function: an object that is called with prompts and completions."""

    def __init__(self, path: str, workers: Sequence[Any]) -> None:
        """`path`: the model's folder, for messages; `workers`: Ray actors (`RewardModel`) that hold the model."""
        self.path, self._workers = path, list(workers)

    async def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float | None]:
        """Compute the rewards, divided equally over the model's processes."""
        share = -(-len(prompts) // len(self._workers))
        begins = range(0, len(prompts), share)
        calls = [
            worker.rewards.remote(prompts[begin : begin + share], completions[begin : begin + share])
            for worker, begin in zip(self._workers, begins, strict=False)
        ]
        return [reward for rewards in await asyncio.gather(*calls) for reward in rewards]

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until every process has loaded the model; RunError after timeout_s seconds."""
        try:
            ray.get([worker.__ray_ready__.remote() for worker in self._workers], timeout=timeout_s)
        except ray.exceptions.RayError as error:
            raise RunError(f"reward model {self.path}: a process {explain_error(error)} as it started") from error


def start_reward_model(path: str, config: RewardModelConfig) -> tuple[RewardModelClient, list[Any]]:
    """Begin to start the processes of a reward model; returns its client and the processes, which the caller ends.

    Raises:
        RunError: a model of the hub cannot be downloaded.
    """
    folder = str(fetch_model_folder(path, "reward_funcs"))
    options = {"num_cpus": 0, "num_gpus": config.gpus, "max_restarts": RESTARTS, "max_task_retries": 1}
    actor = ray.remote(**options)(RewardModel)
    workers = [actor.remote(folder, config, number) for number in range(config.num_workers)]
    return RewardModelClient(path, workers), workers
