"""Makes a tiny model that solves some of its problems, and the files of problems: a task without downloads."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.prepare.folder import MODEL_FOLDER, TRAIN_FILE, VAL_FILE, make_folder, save_model
from megatron_grpo.prepare.lessons import ADDITION_RECIPE, RECIPES, Lesson, encode, split_lessons
from megatron_grpo.weights.source import CONVERSATION_VOCABULARY, PREPARED_MODELS, VOCABULARY


def prepare(name: str, folder: str | Path) -> None:
    """Make a model and its data, unless this recipe's are there already; about ten seconds.

    Writes model/ (Hugging Face format, float32), train.jsonl and val.jsonl. Validation problems are in neither the
    training file nor the warm-up. The folder appears as a whole or not at all.

    Args:
        name: which of PREPARED_MODELS.
        folder: folder to make; replaced when another recipe made it.
    """

    def make(made: Path) -> float:
        warmup, train, val = split_lessons(name)
        for file, lessons in ((TRAIN_FILE, train), (VAL_FILE, val)):
            (made / file).write_text("".join(json.dumps(lesson.row) + "\n" for lesson in lessons))
        return _make_model(name, made / MODEL_FOLDER, warmup, train, val)

    make_folder(name, Path(folder), {**RECIPES[name], "config": PREPARED_MODELS[name]}, make)


def _make_model(
    name: str, folder: Path, warmup: Sequence[Lesson], unseen: Sequence[Lesson], val: Sequence[Lesson]
) -> float:
    """Train, save with the tokenizer, and return the greedy accuracy on the validation lessons."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    recipe = RECIPES[name]
    vocabulary = vocabulary_of(name)
    threads, random_state = torch.get_num_threads(), torch.get_rng_state()
    # One thread: several round their sums differently, and are no faster on matrices this small.
    torch.set_num_threads(1)
    torch.manual_seed(recipe["seed"])
    try:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**PREPARED_MODELS[name]))
        _warm_up(model, recipe, vocabulary, warmup, _probe(recipe, unseen))
        accuracy = greedy_accuracy(model, val, vocabulary)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(random_state)
    save_model(folder, model, PREPARED_MODELS[name], vocabulary)
    return accuracy


def vocabulary_of(name: str) -> Mapping[str, int]:
    """Token ids by text of a prepared model."""
    return VOCABULARY if RECIPES[name] is ADDITION_RECIPE else CONVERSATION_VOCABULARY


def _probe(recipe: Mapping[str, Any], unseen: Sequence[Lesson]) -> Sequence[Lesson]:
    """The lessons whose expected reward ends the warm-up; of several tasks, a random sample."""
    if recipe is ADDITION_RECIPE:
        return unseen[: recipe["probe_problems"]]
    return random.Random(recipe["seed"]).sample(list(unseen), recipe["probe_problems"])


def _warm_up(
    model: Any,
    recipe: Mapping[str, Any],
    vocabulary: Mapping[str, int],
    lessons: Sequence[Lesson],
    probe: Sequence[Lesson],
) -> None:
    """Supervised training on random batches, loss on the model's tokens, until the probe's reward meets the target."""
    import torch
    from torch.nn import functional as F

    tokens, of_model = encode(lessons, vocabulary)
    lr = recipe.get("lr", recipe.get("warmup_lr"))
    order = torch.Generator().manual_seed(recipe["seed"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(recipe["warmup_steps_max"]):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / recipe["warmup_lr_ramp_steps"])
        chosen = torch.randint(len(tokens), (recipe["warmup_batch_problems"],), generator=order)
        batch, own = tokens[chosen], of_model[chosen, 1:]
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits  # position t predicts token t + 1
        loss = F.cross_entropy(logits[own], batch[:, 1:][own])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        measured = step >= recipe["probe_from_step"] and step % recipe["probe_period_steps"] == 0
        if measured and expected_reward(model, probe, vocabulary) >= recipe["target_reward"]:
            return


def expected_reward(model: Any, lessons: Sequence[Lesson], vocabulary: Mapping[str, int]) -> float:
    """Mean probability that all turns sampled from a Hugging Face model are exactly those of the lesson."""

    def logprob(logprobs: Any, chosen: Any) -> Any:
        return logprobs.gather(-1, chosen[..., None])[..., 0]

    return float(_of_model_tokens(model, lessons, vocabulary, logprob).sum(dim=1).exp().mean())


def greedy_accuracy(model: Any, lessons: Sequence[Lesson], vocabulary: Mapping[str, int]) -> float:
    """Share of lessons in which a Hugging Face model's likeliest tokens are exactly its turns and their ends."""
    right = _of_model_tokens(model, lessons, vocabulary, lambda logprobs, chosen: logprobs.argmax(dim=-1) == chosen)
    return float(right.all(dim=1).float().mean())


def _of_model_tokens(
    model: Any, lessons: Sequence[Lesson], vocabulary: Mapping[str, int], measure: Callable[[Any, Any], Any]
) -> Any:
    """[lessons, longest - 1]: `measure` of log-probabilities and tokens at the model's tokens, elsewhere 0 or True."""
    import torch

    tokens, of_model = encode(lessons, vocabulary)
    with torch.no_grad():
        logprobs = model(input_ids=tokens[:, :-1], use_cache=False).logits.log_softmax(dim=-1)
    values = measure(logprobs, tokens[:, 1:])
    return torch.where(of_model[:, 1:], values, torch.ones_like(values) if values.dtype == torch.bool else 0.0)
