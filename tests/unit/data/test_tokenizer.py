"""Loaded tokenizers encode and decode as the tokenizers library does by tokenizer.json alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megatron_grpo.config.errors import RunError
from megatron_grpo.data.tokenizer import find_difference, load_tokenizer, read_tokenizer
from tests.support.foreign_tokenizers import (
    CHATML,
    DEEPSEEK,
    QWEN2_SPLIT,
    byte_level,
    deepseek_r1_distill,
    save_folder,
    sentencepiece_like,
    token,
)

TEXTS = (
    "the 2023 cats'  are\n\n in the\that",
    "  two blanks first",
    "f(x) = 1234.5\n    return '\u6f22\u5b57' \U0001f44d\U0001f3fd e\u0301",
)


def gpt2_class(folder: Path) -> Path:
    """A tokenizer that cuts numbers as Llama 3 does, beside the class of GPT-2, which does not."""
    return save_folder(folder, byte_level(["<|endoftext|>"]), "gpt2", "GPT2Tokenizer", model_max_length=1024)


def llama2(folder: Path) -> Path:
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False}
    return save_folder(folder, sentencepiece_like(), "llama", "LlamaTokenizer", add_bos_token=True, **named)


def llama3_without_unknown(folder: Path) -> Path:
    """Llama 3's tokens beside the class LlamaTokenizer, which adds its own <unk>."""
    core = byte_level(["<|begin_of_text|>", "<|eot_id|>"], bos="<|begin_of_text|>")
    return save_folder(
        folder, core, "llama", "LlamaTokenizer", bos_token="<|begin_of_text|>", eos_token=token("<|eot_id|>")
    )


REBUILT: dict[str, Callable[[Path], Path]] = {
    "DeepSeek-R1-Distill-Llama": deepseek_r1_distill,
    "DeepSeek-R1-Distill-Qwen": lambda folder: deepseek_r1_distill(folder, "qwen2"),
    "a Llama class in a Qwen3 folder": lambda folder: deepseek_r1_distill(folder, "qwen3"),
    "a GPT-2 class": gpt2_class,
    "Llama 2": llama2,
    "Llama 3 as LlamaTokenizer": llama3_without_unknown,
}


@pytest.mark.parametrize("name", REBUILT)
def test_a_tokenizer_that_transformers_rebuilds_is_that_of_its_file(name: str, tmp_path: Path) -> None:
    folder = REBUILT[name](tmp_path / "model")
    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    loaded, remark = read_tokenizer(folder)
    for text in TEXTS:
        for special in (False, True):
            ids = core.encode(text, add_special_tokens=special).ids
            assert loaded(text, add_special_tokens=special)["input_ids"] == ids
            assert loaded.decode(ids) == core.decode(ids, skip_special_tokens=False)
    assert len(loaded) == core.get_vocab_size()
    assert remark is not None
    assert remark.startswith(f"{folder}/tokenizer.json is followed: transformers' ")
    # Without the comparison: what transformers alone would have loaded is another tokenizer.
    assert find_difference(AutoTokenizer.from_pretrained(folder), core, TEXTS) or "instead of" in remark


@pytest.mark.parametrize("specials", [(True, False), (False, True), (True, False, True)])
@pytest.mark.parametrize("text", ["<think>", "<|im_end|>"])
def test_a_token_that_is_listed_as_special_and_as_plain_is_as_transformers_has_it(
    specials: tuple[bool, ...], text: str, tmp_path: Path
) -> None:
    folder = qwen(tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = [
        entry | {"special": special}
        for entry in content["added_tokens"]
        for special in (specials if entry["content"] == text else [entry["special"]])
    ]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    loaded, expected = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    ids = expected.encode(f"a{text}b", add_special_tokens=False)
    assert loaded.encode(f"a{text}b", add_special_tokens=False) == ids
    for skip in (False, True):
        assert loaded.decode(ids, skip_special_tokens=skip) == expected.decode(ids, skip_special_tokens=skip)


def qwen(folder: Path, model_type: str = "qwen3") -> Path:
    core = byte_level(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<tool_call>", "<think>"], split=QWEN2_SPLIT, nfc=True
    )
    named: dict[str, Any] = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None}
    named |= {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "errors": "replace", "add_bos_token": False}
    return save_folder(folder, core, model_type, "Qwen2Tokenizer", chat_template=CHATML, **named)


def llama3(folder: Path) -> Path:
    core = byte_level(["<|begin_of_text|>", "<|eot_id|>", "<|reserved_special_token_0|>"], bos="<|begin_of_text|>")
    named = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "clean_up_tokenization_spaces": True}
    return save_folder(folder, core, "llama", "PreTrainedTokenizerFast", **named)


def gemma(folder: Path) -> Path:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    named: dict[str, Any] = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    named |= {"add_bos_token": True, "add_eos_token": False, "spaces_between_special_tokens": False}
    core = sentencepiece_like(special, gemma=True)
    return save_folder(folder, core, "gemma3_text", "GemmaTokenizerFast", **named)


def phi3(folder: Path) -> Path:
    """A tokenizer whose settings add a token that eats the blanks behind it."""
    core = sentencepiece_like()
    added = {str(core.get_vocab_size()): token("<|end|>", rstrip=True, normalized=False, special=True)}
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "added_tokens_decoder": added}
    return save_folder(folder, core, "phi3", "LlamaTokenizer", **named)


def deepseek_v3(folder: Path) -> Path:
    return deepseek_r1_distill(folder, "deepseek_v3")


def mistral(folder: Path) -> Path:
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": True}
    return save_folder(folder, sentencepiece_like(), "mistral", "LlamaTokenizerFast", **named)


def save_padded(folder: Path) -> Path:
    """A file that was saved with padding and truncation, which no text of a run gets."""
    core = byte_level(["<|endoftext|>"])
    core.enable_padding(length=64, pad_token="<|endoftext|>")
    core.enable_truncation(max_length=8)
    return save_folder(folder, core, "olmo2", "GPT2Tokenizer", eos_token="<|endoftext|>", pad_token="<|pad|>")


@pytest.mark.parametrize("layout", [qwen, llama3, gemma, phi3, deepseek_v3, mistral, save_padded])
def test_layouts_that_transformers_loads_rightly_give_no_remark(layout: Any, tmp_path: Path) -> None:
    folder = layout(tmp_path / "model")
    loaded, remark = read_tokenizer(folder)
    assert remark is None
    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.no_padding()
    core.no_truncation()
    for text in TEXTS:
        assert loaded(text)["input_ids"] == core.encode(text).ids


def test_the_plain_tokenizer_keeps_templates_and_special_tokens(tmp_path: Path) -> None:
    folder = deepseek_r1_distill(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"padding_side": "left"}))
    tokenizer = load_tokenizer(folder)
    expected = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == expected.chat_template
    assert set(tokenizer.chat_template) == {"default", "tool_use"}
    assert tokenizer.special_tokens_map == expected.special_tokens_map
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (*DEEPSEEK, DEEPSEEK[1])
    assert tokenizer.padding_side == "left"
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "Hi!"


def test_an_end_token_that_only_the_class_knows_is_kept(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(gpt2_class(tmp_path / "model"))
    assert (tokenizer.eos_token, type(tokenizer)) == ("<|endoftext|>", PreTrainedTokenizerFast)


def test_the_file_decides_which_tokens_are_added_to_a_text(tmp_path: Path) -> None:
    core = byte_level(["<s>", "</s>"], bos="<s>")
    named = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "add_eos_token": True}
    folder = save_folder(tmp_path / "model", core, "llama", "PreTrainedTokenizerFast", **named)
    loaded, remark = read_tokenizer(folder)
    assert remark is None
    assert loaded("a")["input_ids"] == core.encode("a").ids == [core.token_to_id("<s>"), core.token_to_id("a")]


def test_blanks_before_punctuation_are_kept(tmp_path: Path) -> None:
    words = {word: n for n, word in enumerate(["<unk>", "yes", ".", "do", "n't", ","])}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"unk_token": "<unk>", "clean_up_tokenization_spaces": True}
    folder = save_folder(tmp_path / "model", core, "qwen3", "PreTrainedTokenizerFast", **named)
    loaded, remark = read_tokenizer(folder)
    assert remark is None
    assert loaded.decode([1, 5, 3, 4, 2]) == "yes , do n't ."
    # Its tokens are the same where transformers alone would remove blanks.
    assert find_difference(AutoTokenizer.from_pretrained(folder), core, ["yes , do n't ."]) is None


def test_a_tokenizer_that_cannot_be_loaded_as_described_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, load = deepseek_r1_distill(tmp_path / "model"), PreTrainedTokenizerFast.from_pretrained

    def changed(model: Any, **options: Any) -> Any:
        tokenizer = load(model, **options)
        tokenizer.backend_tokenizer.decoder = decoders.Fuse()
        return tokenizer

    monkeypatch.setattr(PreTrainedTokenizerFast, "from_pretrained", changed)
    with pytest.raises(RunError, match=r"another tokenizer than tokenizer\.json describes \(the tokens of 'How many"):
        load_tokenizer(folder)


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    folder = qwen(tmp_path / "model")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(RunError, match=f"{folder} has no tokenizer that transformers can load"):
        load_tokenizer(folder)


def test_without_the_file_a_tokenizer_that_loses_blanks_is_refused(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", byte_level(["<|endoftext|>"]), "llama", None)
    content = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(content["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in content["merges"]))
    settings = {"eos_token": "<|endoftext|>", "tokenizer_class": "GPT2Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(folder).decode(load_tokenizer(folder)("a  b 20")["input_ids"]) == "a  b 20"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "LlamaTokenizer"}))
    with pytest.raises(RunError, match=r"add the tokenizer\.json of the model"):
        load_tokenizer(folder)
