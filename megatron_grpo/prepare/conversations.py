"""Tiny models that hold conversations, not well yet: with a calculator, and in a game beside sums."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from pathlib import Path
from typing import Any

from megatron_grpo.prepare.addition import answer, split_problems
from megatron_grpo.prepare.folder import MODEL_FOLDER, TRAIN_FILE, VAL_FILE, make_folder, save_model
from megatron_grpo.weights.source import CALL_BEGIN, CALL_END, CONVERSATION_VOCABULARY, EOS, PAD, PREPARED_MODELS

RECIPE: dict[str, Any] = {
    "version": 1,
    "seed": 1,
    "val_problems": 256,
    "warmup_share": 0.45,
    "warmup_batch_problems": 64,
    "warmup_lr_ramp_steps": 20,
    "warmup_steps_max": 600,
    "probe_problems": 256,
    "probe_from_step": 20,
}
"""What decides, with the model's configuration and the target, what is made; as in addition.py."""

WARM_UP = {
    "calculator": {"lr": 1e-3, "target_reward": 0.037, "probe_period_steps": 1},
    "two_tasks": {"lr": 3e-3, "target_reward": 0.17, "probe_period_steps": 5},
}
"""The warm-up of each ends when conversations that it has not seen come out as they should with the target probability.
Calling a tool is learnt all at once, so that the first is taught slowly and looked at often."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A problem, and a conversation in which it is solved."""

    row: dict[str, Any]
    """Of the file of prompts."""
    turns: tuple[tuple[str, bool], ...]
    """What is said after the prompt, and whether the model says it; it ends each of its turns."""


def prepare_conversations(name: str, folder: str | Path) -> None:
    """Make a model and its problems, unless this recipe's are there already, as `addition.prepare` does.

    Args:
        name: calculator or two_tasks.
        folder: folder to make; replaced when another recipe made it.
    """
    recipe = {**RECIPE, **WARM_UP[name], "config": PREPARED_MODELS[name]}

    def make(made: Path) -> float:
        warmup, train, val = split_lessons(name)
        for file, lessons in ((TRAIN_FILE, train), (VAL_FILE, val)):
            (made / file).write_text("".join(json.dumps(lesson.row) + "\n" for lesson in lessons))
        return _make_model(name, made / MODEL_FOLDER, warmup, train, val)

    make_folder(name, Path(folder), recipe, make)


def split_lessons(name: str) -> tuple[list[Lesson], list[Lesson], list[Lesson]]:
    """Lessons to warm up with, to train on and to validate with: no problem is in two of them."""
    if name == "calculator":
        return _split(list(_products()))
    sums = split_problems()
    games = _split(list(_games()))
    held_out = RECIPE["val_problems"]
    of_sums = sums[0], sums[1][: len(games[1])], sums[2][:held_out]  # a step samples as many of either
    both = [[*map(_sum, some), *games[part]] for part, some in enumerate(of_sums)]
    return both[0], both[1], both[2]


def _split(lessons: list[Lesson]) -> tuple[list[Lesson], list[Lesson], list[Lesson]]:
    random.Random(RECIPE["seed"]).shuffle(lessons)
    val, rest = lessons[: RECIPE["val_problems"]], lessons[RECIPE["val_problems"] :]
    warmup = round(len(rest) * RECIPE["warmup_share"])
    return rest[:warmup], rest[warmup:], val


def _products() -> Iterator[Lesson]:
    """Products of two digits by two that have four: where the calculator's result ends, the model's answer begins."""
    for left, right in product(range(10, 100), repeat=2):
        result = str(left * right)
        if len(result) == 4:
            row = {"prompt": f"{left}*{right}=", "answer": result, "task_name": "tools"}
            yield Lesson(row, ((f"{CALL_BEGIN}{left}*{right}{CALL_END}", True), (result, False), (result, True)))


def _sum(problem: tuple[int, int]) -> Lesson:
    row = {"prompt": f"{problem[0]}+{problem[1]}=", "answer": answer(*problem), "task_name": "addition"}
    return Lesson(row, ((answer(*problem), True),))


def _games() -> Iterator[Lesson]:
    """Countdown with three numbers, sums and differences, with the first solution in order."""
    for numbers in product(range(1, 10), repeat=3):
        solutions: dict[int, tuple[tuple[str, bool], ...]] = {}
        for left, right, last in permutations(numbers):
            for first in (left + right, left - right):
                for target in (first + last, first - last):
                    if first >= 0 and target > 0 and target not in solutions:
                        solutions[target] = (
                            (f"{left}{'+' if first == left + right else '-'}{right}", True),
                            (f"{last},{first}=", False),
                            (f"{first}{'+' if target == first + last else '-'}{last}", True),
                        )
        for target, turns in solutions.items():
            row = {"prompt": f"{','.join(map(str, numbers))}:{target}=", "answer": target, "numbers": numbers}
            yield Lesson({**row, "target": target, "task_name": "countdown"}, turns)


def encode(lessons: Sequence[Lesson]) -> tuple[Any, Any]:
    """Conversations in token ids, and which of them the model says.

    Returns:
        [lessons, longest], int64, shorter ones filled up; and bool of the same shape.
    """
    import torch

    vocabulary = CONVERSATION_VOCABULARY
    tokens, said = [], []
    for lesson in lessons:
        ids, own = _ids(lesson.row["prompt"]), [False] * len(_ids(lesson.row["prompt"]))
        for text, by_model in lesson.turns:
            turn = _ids(text) + [vocabulary[EOS]] * by_model
            ids += turn
            own += [by_model] * len(turn)
        tokens.append(ids)
        said.append(own)
    longest = max(map(len, tokens))
    padded = [ids + [vocabulary[PAD]] * (longest - len(ids)) for ids in tokens]
    return torch.tensor(padded), torch.tensor([own + [False] * (longest - len(own)) for own in said])


def _ids(text: str) -> list[int]:
    """Token ids of a text: the calls' beginning and end are a token each, and so is every other character."""
    ids = []
    while text:
        piece = next((one for one in (CALL_BEGIN, CALL_END) if text.startswith(one)), text[0])
        ids.append(CONVERSATION_VOCABULARY[piece])
        text = text[len(piece) :]
    return ids


def _make_model(
    name: str, folder: Path, warmup: Sequence[Lesson], unseen: Sequence[Lesson], val: Sequence[Lesson]
) -> float:
    """Train, save with the tokenizer, and return the greedy accuracy on the validation lessons."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    threads, random_state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)  # several round their sums differently
    torch.manual_seed(RECIPE["seed"])
    try:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**PREPARED_MODELS[name]))
        probe = random.Random(RECIPE["seed"]).sample(list(unseen), RECIPE["probe_problems"])
        _warm_up(model, warmup, WARM_UP[name], lambda: expected_reward(model, probe))
        right = _by_lesson(model, val, lambda logprobs, chosen: logprobs.argmax(dim=-1) == chosen).all(dim=1)
        accuracy = float(right.float().mean())
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(random_state)
    save_model(folder, model, PREPARED_MODELS[name], CONVERSATION_VOCABULARY)
    return accuracy


def _warm_up(
    model: Any, lessons: Sequence[Lesson], settings: Mapping[str, float], measure: Callable[[], float]
) -> None:
    """Supervised training on random batches, loss on what the model says, until what is measured reaches the target."""
    import torch
    from torch.nn import functional as F

    tokens, said = encode(lessons)
    order = torch.Generator().manual_seed(RECIPE["seed"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"], betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(RECIPE["warmup_steps_max"]):
        optimizer.param_groups[0]["lr"] = settings["lr"] * min(1.0, (step + 1) / RECIPE["warmup_lr_ramp_steps"])
        chosen = torch.randint(len(tokens), (RECIPE["warmup_batch_problems"],), generator=order)
        batch, own = tokens[chosen], said[chosen, 1:]
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits  # position t predicts token t + 1
        loss = F.cross_entropy(logits[own], batch[:, 1:][own])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        probe = step >= RECIPE["probe_from_step"] and step % settings["probe_period_steps"] == 0
        if probe and measure() >= settings["target_reward"]:
            return


def expected_reward(model: Any, lessons: Sequence[Lesson]) -> float:
    """Mean probability that everything a Hugging Face model says is exactly what the lesson has it say."""
    import torch

    def logprob(logprobs: Any, chosen: Any) -> Any:
        return logprobs.gather(-1, chosen[..., None])[..., 0]

    with torch.no_grad():
        return float(_by_lesson(model, lessons, logprob).sum(dim=1).exp().mean())


def _by_lesson(model: Any, lessons: Sequence[Lesson], measure: Callable[[Any, Any], Any]) -> Any:
    """[lessons, longest - 1]: `measure` of log-probabilities and tokens where the model speaks, else 0, or true."""
    import torch

    tokens, said = encode(lessons)
    with torch.no_grad():
        logprobs = model(input_ids=tokens[:, :-1], use_cache=False).logits.log_softmax(dim=-1)
    values = measure(logprobs, tokens[:, 1:])
    return torch.where(said[:, 1:], values, torch.ones_like(values) if values.dtype == torch.bool else 0.0)
