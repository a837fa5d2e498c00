"""Tiny models that add two-digit numbers, not well yet, and problems to teach them more: a task without downloads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from megatron_grpo.prepare.folder import MODEL_FOLDER, TRAIN_FILE, VAL_FILE, make_folder, save_model
from megatron_grpo.weights.source import EOS, PREPARED_MODELS, VOCABULARY

ANSWER_DIGITS = 3
PROMPT_TOKENS = len("37+58=")

RECIPE: dict[str, Any] = {
    "version": 1,
    "seed": 1,
    "val_problems": 512,
    "warmup_problems": 3000,
    "warmup_batch_problems": 64,
    "warmup_lr": 3e-3,
    "warmup_lr_ramp_steps": 20,
    "warmup_steps_max": 400,
    "target_reward": 0.22,
    "probe_problems": 512,
    "probe_from_step": 100,
    "probe_period_steps": 5,
}
"""What decides, with the model's configuration, what is made.

The learning rate of the warm-up is high and stays so to its end: weights that a decaying rate has settled in a narrow
valley are thrown out of it by the first steps of reinforcement learning. The warm-up ends when a sample of the model
is right with the target probability on problems that it has not seen, not after a number of steps: rounding differs
between machines, and at that rate it decides when the model gets there. Its greedy accuracy is then 0.35 to 0.45.
"""

Problem = tuple[int, int]


def prepare(name: str, folder: str | Path) -> None:
    """Make a model and its data, unless this recipe's are there already; about ten seconds.

    Writes model/ (Hugging Face format, float32), train.jsonl and val.jsonl. Validation problems are in neither the
    training file nor the warm-up. The folder appears as a whole or not at all.

    Args:
        name: which of PREPARED_MODELS.
        folder: folder to make; replaced when another recipe made it.
    """

    def make(made: Path) -> float:
        warmup, train, val = split_problems()
        write_problems(made / TRAIN_FILE, train)
        write_problems(made / VAL_FILE, val)
        return _make_model(PREPARED_MODELS[name], made / MODEL_FOLDER, warmup, train, val)

    make_folder(name, Path(folder), recipe(name), make)


def recipe(name: str) -> dict[str, Any]:
    """All that decides what `prepare` makes under a name."""
    return {**RECIPE, "config": PREPARED_MODELS[name]}


def split_problems() -> tuple[list[Problem], list[Problem], list[Problem]]:
    """Warm-up, training and validation problems: disjoint, and together all pairs of two-digit numbers."""
    problems = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(RECIPE["seed"]).shuffle(problems)
    val, rest = problems[: RECIPE["val_problems"]], problems[RECIPE["val_problems"] :]
    return rest[: RECIPE["warmup_problems"]], rest[RECIPE["warmup_problems"] :], val


def write_problems(path: Path, problems: list[Problem]) -> None:
    """One row a problem: {"prompt": "37+58=", "answer": "095", "task_name": "addition"}."""
    rows = ({"prompt": f"{a}+{b}=", "answer": answer(a, b), "task_name": "addition"} for a, b in problems)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def answer(a: int, b: int) -> str:
    """The sum in three digits."""
    return f"{a + b:0{ANSWER_DIGITS}}"


def _make_model(
    config: dict[str, Any], folder: Path, warmup: list[Problem], unseen: list[Problem], val: list[Problem]
) -> float:
    """Train, save with the tokenizer, and return the greedy accuracy on the validation problems.

    Args:
        config: config.json of the model.
        folder: folder that the model is written to.
        warmup: problems to learn from.
        unseen: problems that decide when to stop.
        val: problems to report the accuracy on.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    threads, random_state = torch.get_num_threads(), torch.get_rng_state()
    # One thread: several round their sums differently, and are no faster on matrices this small.
    torch.set_num_threads(1)
    torch.manual_seed(RECIPE["seed"])
    try:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        _warm_up(model, warmup, unseen)
        accuracy = greedy_accuracy(model, val)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(random_state)
    save_model(folder, model, config, VOCABULARY)
    return accuracy


def _warm_up(model: Any, problems: list[Problem], unseen: list[Problem]) -> None:
    """Supervised training on random batches, loss on the answer only, until the target reward on unseen problems."""
    import torch
    from torch.nn import functional as F

    tokens = _encode(problems)
    order = torch.Generator().manual_seed(RECIPE["seed"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RECIPE["warmup_lr"], betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(RECIPE["warmup_steps_max"]):
        optimizer.param_groups[0]["lr"] = RECIPE["warmup_lr"] * min(1.0, (step + 1) / RECIPE["warmup_lr_ramp_steps"])
        batch = tokens[torch.randint(len(tokens), (RECIPE["warmup_batch_problems"],), generator=order)]
        # Position t predicts token t + 1, so the answer's first digit is predicted by the prompt's last token.
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits[:, PROMPT_TOKENS - 1 :]
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, PROMPT_TOKENS:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        probe = step >= RECIPE["probe_from_step"] and step % RECIPE["probe_period_steps"] == 0
        if probe and expected_reward(model, unseen[: RECIPE["probe_problems"]]) >= RECIPE["target_reward"]:
            return


def expected_reward(model: Any, problems: list[Problem]) -> float:
    """Mean probability that a response sampled from a Hugging Face model is exactly the answer and its end."""
    import torch

    tokens = _encode(problems)
    with torch.no_grad():
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[:, PROMPT_TOKENS - 1 :]
    logprobs = logits.log_softmax(dim=-1).gather(-1, tokens[:, PROMPT_TOKENS:, None])[..., 0]
    return float(logprobs.sum(dim=1).exp().mean())


def greedy_accuracy(model: Any, problems: list[Problem]) -> float:
    """Share of problems to which a Hugging Face model's likeliest tokens are exactly the answer and its end."""
    import torch

    expected = _encode(problems)
    tokens = expected[:, :PROMPT_TOKENS]
    with torch.no_grad():
        while tokens.shape[1] < expected.shape[1]:
            chosen = model(input_ids=tokens, use_cache=False).logits[:, -1].argmax(dim=-1, keepdim=True)
            tokens = torch.cat([tokens, chosen], dim=1)
    return float((tokens == expected).all(dim=1).float().mean())


def _encode(problems: list[Problem]) -> Any:
    """[problems, prompt + answer + end], int64: all problems are equally long."""
    import torch

    texts = [f"{a}+{b}={answer(a, b)}" for a, b in problems]
    return torch.tensor([[VOCABULARY[character] for character in text] + [VOCABULARY[EOS]] for text in texts])
