"""The folder of a prepared model and its prompts: made as a whole or not at all, and made anew by another recipe."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_grpo.weights.source import EOS, PAD

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
