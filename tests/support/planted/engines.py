"""Engines that compute something else than the policy: choices of tokens, forward passes, changes of the model."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.planted.plants import Choose, Forward
from tests.support.recorded_runs import EOS, RecordedRun, last_logits


def truncate_probabilities(mass: float) -> Choose:
    """Keep the likeliest tokens that have a share of the probability."""

    def choose(logits: Tensor) -> Tensor:
        values, order = logits.sort(descending=True)
        before = values.softmax(-1).cumsum(-1) - values.softmax(-1)
        return torch.empty_like(logits).scatter_(0, order, values.masked_fill(before >= mass, -torch.inf))

    return choose


def likeliest(count: int) -> Choose:
    return lambda logits: logits.masked_fill(logits < logits.topk(count).values[-1], -torch.inf)


def min_p(share: float) -> Choose:
    return lambda logits: logits.masked_fill(logits.softmax(-1) < share * logits.softmax(-1).max(), -torch.inf)


def cap_logits(cap: float) -> Choose:
    return lambda logits: cap * torch.tanh(logits / cap)


def add_biases(biases: dict[int, float]) -> Choose:
    def choose(logits: Tensor) -> Tensor:
        changed = logits.clone()
        for token, number in biases.items():
            changed[token] += number
        return changed

    return choose


def changing(change: Callable[[Tensor, list[int], list[int]], Tensor]) -> Callable[[RecordedRun], Forward]:
    """An engine whose logits depend on tokens: arguments are logits, all tokens, and those of the response."""
    return lambda _: lambda model, ids, prompt: change(last_logits(model, ids, prompt), ids, ids[prompt:])


def repetition_penalised(factor: float) -> Callable[[RecordedRun], Forward]:
    """An engine that makes tokens less likely that the prompt or the response has."""

    def penalise(logits: Tensor, ids: list[int], _: list[int]) -> Tensor:
        sampled = torch.zeros_like(logits, dtype=torch.bool)
        sampled[ids] = True
        return torch.where(sampled, torch.where(logits > 0, logits / factor, logits * factor), logits)

    return changing(penalise)


def presence_penalised(penalty: float) -> Callable[[RecordedRun], Forward]:
    """An engine that makes tokens less likely that the response has."""

    def penalise(logits: Tensor, _: list[int], response: list[int]) -> Tensor:
        logits[list(set(response))] -= penalty
        return logits

    return changing(penalise)


def frequency_penalised(penalty: float) -> Callable[[RecordedRun], Forward]:
    def penalise(logits: Tensor, _: list[int], response: list[int]) -> Tensor:
        return logits - penalty * torch.bincount(torch.tensor(response, dtype=torch.int64), minlength=len(logits))

    return changing(penalise)


def of_least_length(length: int) -> Callable[[RecordedRun], Forward]:
    """An engine that does not end a response before it has some tokens."""

    def keep_on(logits: Tensor, _: list[int], response: list[int]) -> Tensor:
        if len(response) < length:
            logits[EOS] = -torch.inf
        return logits

    return changing(keep_on)


def stale_prefix(run: RecordedRun) -> Forward:
    """An engine whose prefix cache has the prompts' keys and values from the version before."""
    before = AutoModelForCausalLM.from_pretrained(run.versions[-2], dtype=torch.float32).eval()

    def forward(model: Any, ids: list[int], prompt: int) -> Tensor:
        cached = prompt - 4  # whole blocks
        past = before(torch.tensor([ids[:cached]]), use_cache=True).past_key_values
        logits: Tensor = model(torch.tensor([ids[cached:]]), past_key_values=past).logits[0, -1].float()
        return logits

    return forward


def with_scale(layer: int, factor: float) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.model.layers[layer].self_attn.scaling *= factor

    return change


def with_epsilon(path: str, epsilon: float) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.get_submodule(path).variance_epsilon = epsilon

    return change


def with_base(layer: int, base: float) -> Callable[[Any], None]:
    """One layer has rotary embeddings of another base, with the usual formula."""

    def change(model: Any) -> None:
        config = model.config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        frequencies = base ** -(torch.arange(0, width, 2).float() / width)

        def turn(_: Any, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            length = options["hidden_states"].shape[1]
            angles = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)[None]
            return inputs, {**options, "position_embeddings": (angles.cos(), angles.sin())}

        model.model.layers[layer].self_attn.register_forward_pre_hook(turn, with_kwargs=True)

    return change
