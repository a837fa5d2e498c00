"""Makes the folder of a tiny model and of its problems, some of which it solves: tasks without downloads."""

from __future__ import annotations

import hashlib
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.prepare.lessons import ADDITION_RECIPE, RECIPES, Lesson, encode, split_lessons
from megatron_grpo.weights.source import CONVERSATION_VOCABULARY, EOS, PAD, PREPARED_MODELS, VOCABULARY

MODEL_FOLDER, TRAIN_FILE, VAL_FILE, RECIPE_FILE = "model", "train.jsonl", "val.jsonl", "recipe.json"


def make_folder(name: str, target: Path, recipe: Mapping[str, Any], make: Callable[[Path], float]) -> None:
    """Have a folder made, unless this recipe's is there already.

    Args:
        name: of the recipe, for the message.
        target: folder to make; replaced when another recipe made it.
        recipe: all that decides what is made, in types that JSON has.
        make: fills an empty folder, and returns the accuracy of its model.
    """
    wanted = recipe_hash(recipe)
    if _is_made(target, wanted):
        return
    started = time.monotonic()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as temporary:
        made = Path(temporary) / target.name
        made.mkdir()
        accuracy = make(made)
        (made / RECIPE_FILE).write_text(json.dumps({"hash": wanted, "recipe": recipe}, indent=2) + "\n")
        _move_into_place(made, target, wanted)
    seconds = time.monotonic() - started
    print(f"made the {name} model in {target}: {accuracy:.0%} of held-out problems right, {seconds:.0f} s", flush=True)


def recipe_hash(recipe: Mapping[str, Any]) -> str:
    """Identifies what a recipe makes."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def save_model(folder: Path, model: Any, config: dict[str, Any], vocabulary: Mapping[str, int]) -> None:
    """Write a Hugging Face model in the form of released ones, float32, with its tokenizer.

    Args:
        folder: made here.
        model: the model.
        config: its config.json.
        vocabulary: token ids by text.
    """
    from safetensors.torch import save_file

    folder.mkdir()
    _tokenizer(vocabulary, config["max_position_embeddings"]).save_pretrained(folder)
    save_file(_released_weights(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {
        "do_sample": True,
        "temperature": 1.0,
        "eos_token_id": vocabulary[EOS],
        "pad_token_id": vocabulary[PAD],
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def _is_made(target: Path, wanted: str) -> bool:
    """Whether the folder holds what the recipe with this hash makes."""
    try:
        found = json.loads((target / RECIPE_FILE).read_text())["hash"]
    except (OSError, json.JSONDecodeError, KeyError):
        return False
    return bool(found == wanted)


def _move_into_place(made: Path, target: Path, wanted: str) -> None:
    """Rename; what another recipe left is moved aside first, and a process that was faster with this one wins."""
    if target.exists() and not _is_made(target, wanted):
        os.replace(target, made.with_name("old"))
    try:
        os.replace(made, target)
    except OSError:
        if not _is_made(target, wanted):
            raise


def _released_weights(model: Any) -> dict[str, Any]:
    """The weights of a Hugging Face model under the names that released models have on disk.

    In memory the experts of a layer are two tensors, [experts, gate and up width, hidden] and [experts, hidden, width];
    on disk each expert has three matrices.
    """
    weights = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(".experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                for part, matrix in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    weights[f"{name.removesuffix('gate_up_proj')}{expert}.{part}.weight"] = matrix.contiguous()
        elif name.endswith(".experts.down_proj"):
            for expert, matrix in enumerate(tensor):
                weights[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = matrix.contiguous()
        elif name != "lm_head.weight":  # tied
            weights[name] = tensor
    return weights


def _tokenizer(vocabulary: Mapping[str, int], longest: int) -> Any:
    """One token for each character, or for each longer text of the vocabulary; for a model with so many positions."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel(dict(vocabulary), unk_token="<unk>"))
    special = (EOS, PAD, "<bos>", "<unk>")
    longer = [f"{_escaped(text)}" for text in vocabulary if len(text) > 1 and text not in special]
    core.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*longer, "."])), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=EOS,
        pad_token=PAD,
        unk_token="<unk>",
        model_max_length=longest,
        clean_up_tokenization_spaces=False,
    )


def _escaped(text: str) -> str:
    """A text as a regular expression of the tokenizers library, which knows no escape of letters and blanks."""
    return "".join(f"\\{character}" if character in r"\^$.|?*+()[]{}" else character for character in text)


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
