"""Makes tiny models that solve some problems, for recipes without downloads."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.models.source import (
    CALL_BEGIN,
    CALL_END,
    CONVERSATION_VOCABULARY,
    EOS,
    PAD,
    PREPARED_FOLDER,
    PREPARED_MODELS,
    TEACHER_FOLDER,
    VOCABULARY,
)
from megatron_grpo.prepare.character_tokenizer import make_tokenizer
from megatron_grpo.prepare.counting import make_counting_model
from megatron_grpo.prepare.lessons import RECIPES, Lesson, make_prompt_rows, split_lessons

RECIPE_FILE = "recipe.json"


def prepare(name: str, folder: str | Path) -> None:
    """Make a model and its data, unless the folder has them; about 10 s.

    Writes model/ (Hugging Face format, float32), train.jsonl and val.jsonl; with a recipe for distillation also
    teacher/. The folder appears whole or not at all, and
    replaces a folder that another recipe made. `name`: one of PREPARED_MODELS.
    """
    target, recipe = Path(folder), {**RECIPES[name], "config": PREPARED_MODELS[name]}
    recipe_hash = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
    if _is_made(target, recipe_hash):
        return
    begin = time.monotonic()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as temporary:
        new = Path(temporary) / target.name
        new.mkdir()
        for file, rows in make_prompt_rows(name).items():
            (new / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
        accuracies = make_counting_model(new / PREPARED_FOLDER) if name == "counting" else _make_models(name, new)
        record = {"hash": recipe_hash, "recipe": recipe, "accuracy": accuracies}
        (new / RECIPE_FILE).write_text(json.dumps(record, indent=2) + "\n")
        if target.exists() and not _is_made(target, recipe_hash):
            os.replace(target, new.with_name("old"))
        try:
            os.replace(new, target)
        except OSError:
            if not _is_made(target, recipe_hash):  # else a faster process has made the same
                raise
    seconds = time.monotonic() - begin
    results = " and ".join(f"{folder} with {accuracy:.0%}" for folder, accuracy in accuracies.items())
    print(f"made in {target}: {results} of held-out problems right, {seconds:.0f} s", flush=True)


def _is_made(target: Path, recipe_hash: str) -> bool:
    try:
        recorded_hash = json.loads((target / RECIPE_FILE).read_text())["hash"]
    except (OSError, json.JSONDecodeError, KeyError):
        return False
    return bool(recorded_hash == recipe_hash)


def _save_model(folder: Path, model: Any, config: dict[str, Any], vocabulary: Mapping[str, int]) -> None:
    # As released models are written, in float32, so that the same code loads both.
    from transformers.core_model_loading import revert_weight_conversion

    from megatron_grpo.models.hf_folder import save_tensors

    folder.mkdir()
    make_tokenizer(vocabulary, config["max_position_embeddings"]).save_pretrained(folder)
    stored = revert_weight_conversion(model, model.state_dict())
    weights = {name: tensor.contiguous() for name, tensor in stored.items() if name != "lm_head.weight"}  # tied
    save_tensors(weights, folder / "model.safetensors", {"format": "pt"})
    token_ids = {"eos_token_id": vocabulary[EOS], "pad_token_id": vocabulary[PAD]}
    generation = {"do_sample": True, "temperature": 1.0, **token_ids}
    for file, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / file).write_text(json.dumps(content, indent=2) + "\n")


def _make_models(name: str, folder: Path) -> dict[str, float]:
    # Returns each model's greedy accuracy on the validation lessons, by its folder.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    recipe, (warmup, unseen, val) = RECIPES[name], split_lessons(name)
    if "warmup_problems" in recipe:
        vocabulary, probe = VOCABULARY, unseen[: recipe["probe_problems"]]
    else:  # a random sample covers several tasks
        vocabulary = CONVERSATION_VOCABULARY
        probe = random.Random(recipe["seed"]).sample(unseen, recipe["probe_problems"])
    threads, random_state = torch.get_num_threads(), torch.get_rng_state()
    # One thread: several threads would round sums differently, and are no faster on matrices this small.
    torch.set_num_threads(1)
    torch.manual_seed(recipe["seed"])
    try:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**PREPARED_MODELS[name]))
        accuracies = {}
        for saved_folder in _warm_up(model, name, vocabulary, warmup, probe):
            _save_model(folder / saved_folder, model, PREPARED_MODELS[name], vocabulary)
            accuracies[saved_folder] = float(score_turns(model, val, vocabulary)[1].float().mean())
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(random_state)
    return accuracies


def _warm_up(
    model: Any, name: str, vocabulary: Mapping[str, int], lessons: list[Lesson], probe: list[Lesson]
) -> Iterator[str]:
    """Train a model; yields a folder each time it is to be saved."""
    import torch
    from torch.nn import functional as F

    recipe, (tokens, mask) = RECIPES[name], encode_lessons(lessons, vocabulary)
    lr, teacher_steps = recipe["lr"] if "lr" in recipe else recipe["warmup_lr"], recipe.get("teacher_steps", 0)
    order = torch.Generator().manual_seed(recipe["seed"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    def train_batch(rate: float) -> None:
        optimizer.param_groups[0]["lr"] = rate
        chosen = torch.randint(len(tokens), (recipe["warmup_batch_problems"],), generator=order)
        batch, targets = tokens[chosen], mask[chosen, 1:]
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits  # position t predicts token t + 1
        loss = F.cross_entropy(logits[targets], batch[:, 1:][targets])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    for step in range(recipe["warmup_steps_max"]):
        train_batch(lr * min(1.0, (step + 1) / recipe["warmup_lr_ramp_steps"]))
        is_probed = step >= recipe["probe_from_step"] and step % recipe["probe_period_steps"] == 0
        # The expected reward is the mean probability that the model samples exactly a lesson's turns. The warm-up stops
        # at the target, so that the run has something left to learn.
        if is_probed and float(score_turns(model, probe, vocabulary)[0].exp().mean()) >= recipe["target_reward"]:
            break
    yield PREPARED_FOLDER
    for remaining in range(teacher_steps, 0, -1):
        train_batch(lr * max(0.1, remaining / teacher_steps))
    if teacher_steps:
        yield TEACHER_FOLDER


def score_turns(model: Any, lessons: Sequence[Lesson], vocabulary: Mapping[str, int]) -> tuple[Any, Any]:
    """Compute log-probabilities of lessons' turns, and whether greedy sampling writes them."""
    # [lessons], float32; and bool.
    import torch

    tokens, mask = encode_lessons(lessons, vocabulary)
    with torch.no_grad():
        logprobs = model(input_ids=tokens[:, :-1], use_cache=False).logits.log_softmax(dim=-1)
    targets, mask = tokens[:, 1:], mask[:, 1:]
    target_logprobs = logprobs.gather(-1, targets[..., None])[..., 0]
    is_likeliest = logprobs.argmax(dim=-1) == targets
    return torch.where(mask, target_logprobs, 0.0).sum(dim=1), (is_likeliest | ~mask).all(dim=1)


def encode_lessons(lessons: Sequence[Lesson], vocabulary: Mapping[str, int]) -> tuple[Any, Any]:
    """Encode conversations: [lessons, longest], int64, padded; and the mask of the model's tokens."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    tokens, masks = [], []
    for lesson in lessons:
        ids = _encode_text(lesson.row["prompt"], vocabulary)
        mask = [False] * len(ids)
        for text, is_of_model in lesson.turns:
            turn = _encode_text(text, vocabulary) + [vocabulary[EOS]] * is_of_model
            ids += turn
            mask += [is_of_model] * len(turn)
        tokens.append(torch.tensor(ids))
        masks.append(torch.tensor(mask))
    return pad_sequence(tokens, batch_first=True, padding_value=vocabulary[PAD]), pad_sequence(masks, batch_first=True)


def _encode_text(text: str, vocabulary: Mapping[str, int]) -> list[int]:
    # Each begin or end mark of a call is one token, and so is every other character.
    pieces = re.findall(f"{re.escape(CALL_BEGIN)}|{re.escape(CALL_END)}|.", text)
    return [vocabulary.get(piece, vocabulary["<unk>"]) for piece in pieces]
