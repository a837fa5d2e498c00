"""The folder that export writes beside the weights, read again by transformers' own loader."""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from megatron_grpo.config.schema import GenerationConfig as EngineSettings
from megatron_grpo.generation.engine_arguments import VllmSettings, make_engine_arguments
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.hf_folder import save_tensors, write_hf_folder
from megatron_grpo.trainer.hf_export import find_changed_settings
from tests.support.forked import as_ordinary_user
from tests.support.tiny_models import make_tiny_model

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
WITH_TOOLS = "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}" + PLAIN
MESSAGES = [{"role": "user", "content": "2+3?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
WEIGHTS = [("model.norm.weight", torch.zeros(2, dtype=torch.bfloat16))]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users may enter."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


def write_model(folder: Path, template: Any, **config: Any) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="!")
    fast.chat_template = template
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **config}))
    GenerationConfig(eos_token_id=[3, 4]).save_pretrained(folder)


def render_messages(folder: Path) -> list[Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer.apply_chat_template(MESSAGES, tools=tools, tokenize=False) for tools in (None, TOOLS)]


@pytest.mark.parametrize(
    "template",
    [WITH_TOOLS, {"default": PLAIN, "tool_use": WITH_TOOLS}, {"default": PLAIN, "tool_use": WITH_TOOLS, "rag": PLAIN}],
    ids=["one", "two", "three"],
)
def test_prompts_are_rendered_as_before(template: Any, folder: Path) -> None:
    source, output = folder / "source", folder / "output"
    write_model(source, template)
    write_hf_folder(WEIGHTS, source, output)
    assert render_messages(source) == render_messages(output) == ["[user]2+3?", "<add>[user]2+3?"]
    assert GenerationConfig.from_pretrained(output).eos_token_id == [3, 4]


def test_old_spellings_of_templates_are_carried(folder: Path) -> None:
    """In tokenizer_config.json as a list, and as a file of a processor."""
    source, output = folder / "source", folder / "output"
    write_model(source, PLAIN)
    (source / "chat_template.jinja").unlink()
    settings = json.loads((source / "tokenizer_config.json").read_text())
    named = {"default": PLAIN, "tool_use": WITH_TOOLS}
    settings["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    (source / "preprocessor_config.json").write_text("{}")
    write_hf_folder(WEIGHTS, source, output)
    assert render_messages(source) == render_messages(output) == ["[user]2+3?", "<add>[user]2+3?"]
    assert (output / "preprocessor_config.json").exists()


def test_a_source_that_may_only_be_read(folder: Path) -> None:
    source, output = folder / "source", folder / "output"
    write_model(source, {"default": PLAIN, "tool_use": WITH_TOOLS}, torch_dtype="float32")
    for path in (*source.rglob("*"), source):
        path.chmod(0o555 if path.is_dir() else 0o444)
    answer = as_ordinary_user(lambda: write_hf_folder(WEIGHTS, source, output))
    assert answer is None
    assert json.loads((output / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert render_messages(output) == render_messages(source)
    assert {path.stat().st_mode & 0o200 for path in output.rglob("*")} == {0o200}, "the copy may be changed"


def test_what_describes_other_weights_is_left_behind(folder: Path) -> None:
    source, output = folder / "source", folder / "output"
    write_model(source, PLAIN)
    for name in ("checkpoint-5/config.json", "checkpoint-5/tokenizer.json", "original/params.json", "original/a.pth"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("{}")
    for name in (
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "trainer_state.json",
        "params.json",
        ".gitattributes",
    ):
        (source / name).write_text("{}")
    write_hf_folder(WEIGHTS, source, output)
    tokenizer = {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}
    written = {str(path.relative_to(output)) for path in output.rglob("*")}
    assert written == tokenizer | {"config.json", "generation_config.json", "model.safetensors"}


@pytest.mark.parametrize(
    "spelled", [{"dtype": "float32", "torch_dtype": "float32"}, {"torch_dtype": "float32"}, {"dtype": "float32"}]
)
def test_every_spelling_of_the_dtype_is_that_of_the_weights(spelled: dict[str, str], folder: Path) -> None:
    source, output = folder / "source", folder / "output"
    write_model(source, PLAIN, **spelled)
    write_hf_folder(WEIGHTS, source, output)
    written = json.loads((output / "config.json").read_text())
    assert {key: written[key] for key in spelled} == dict.fromkeys(spelled, "bfloat16")


@pytest.mark.parametrize(("factor", "entries"), [(0.5, {"tie_word_embeddings": False}), (1.0, {})])
def test_a_head_of_its_own_is_said_to_be_one(factor: float, entries: dict[str, Any], tmp_path: Path) -> None:
    source = make_tiny_model("qwen3_tied", tmp_path).path
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * factor
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert find_changed_settings(source, read_model_shape(source)) == entries
    overrides = {"max_position_embeddings": 64}
    settings = VllmSettings(
        model_path=str(source),
        config=EngineSettings(engine_args={"hf_overrides": overrides}),
        precision="float32",
        max_total_sequence_length=8,
    )
    assert make_engine_arguments(settings)["hf_overrides"] == {**overrides, **entries}


def test_layers_that_predict_further_tokens_are_announced_where_they_are(tmp_path: Path) -> None:
    source = make_tiny_model("deepseek_v3", tmp_path).path
    raw = json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (source / "config.json").write_text(json.dumps(raw))
    shape = read_model_shape(source)
    assert find_changed_settings(source, shape)["num_nextn_predict_layers"] == 0
    file = source / "model.safetensors"
    save_file(load_file(file) | {f"model.layers.{shape.layers}.enorm.weight": torch.ones(2)}, file, {"format": "pt"})
    assert "num_nextn_predict_layers" not in find_changed_settings(source, shape)


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o775, 0o700])
@pytest.mark.parametrize("is_there", [False, True])
def test_files_have_the_permissions_of_their_folder(mode: int, is_there: bool, tmp_path: Path) -> None:
    """safetensors alone would make files that nobody else may read."""
    source, output = tmp_path / "source", tmp_path / "exported"
    write_model(source, {"default": PLAIN, "tool_use": WITH_TOOLS})
    if is_there:
        output.mkdir()
        output.chmod(mode)
    umask = os.umask(0o777 & ~mode if not is_there else 0o077)
    try:
        write_hf_folder(WEIGHTS, source, output, max_file_bytes=1)
    finally:
        os.umask(umask)
    assert output.stat().st_mode & 0o777 == mode
    entries = list(output.rglob("*"))
    assert (output / "model.safetensors") in entries
    assert any(entry.is_dir() for entry in entries)
    for entry in entries:
        assert entry.stat().st_mode & 0o777 == (mode if entry.is_dir() else mode & 0o666), entry


def test_links_of_a_model_carry_no_file_of_the_user(folder: Path) -> None:
    source, base = folder / "source", folder / "base"
    for model in (source, base):
        model.mkdir()
        write_model(model, PLAIN)
    (folder / "credentials").write_text("secret")
    for name, target in (
        ("chat_template.jinja", folder / "credentials"),
        ("notes.json", Path("/proc/self/environ")),
        ("special_tokens_map.json", base / "tokenizer_config.json"),
    ):
        (source / name).unlink(missing_ok=True)
        (source / name).symlink_to(target)
        with pytest.raises(ValueError, match=rf"{name} is a link out of the model's folder"):
            write_hf_folder(WEIGHTS, source, folder / "output")
        (source / name).unlink()
    assert not (folder / "output").exists()
    # Folders that share files with another model, and those of the hub's cache.
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.json").symlink_to(base / "tokenizer.json")
    write_hf_folder(WEIGHTS, source, folder / "output")
    assert not (folder / "output" / "tokenizer.json").is_symlink()
    snapshot, blobs = folder / "hub" / "snapshots" / "0abc", folder / "hub" / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(base.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    write_hf_folder(WEIGHTS, snapshot, folder / "of_hub")
    assert (folder / "of_hub" / "tokenizer.json").read_bytes() == (folder / "output" / "tokenizer.json").read_bytes()


def test_tensors_are_written_as_any_other_file(tmp_path: Path) -> None:
    umask = os.umask(0o027)
    try:
        save_tensors(dict(WEIGHTS), tmp_path / "model.safetensors")
    finally:
        os.umask(umask)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o640
