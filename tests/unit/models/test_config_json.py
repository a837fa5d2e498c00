"""A config.json that people have edited: every mistake in it names the file and the key."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.models.families import read_model_shape
from tests.support.config_problems import SMALL
from tests.support.ordinary_user import as_ordinary_user


def reason(folder: Path, content: Any) -> str:
    file = folder / "config.json"
    file.write_bytes(content) if isinstance(content, bytes) else file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"config\.json") as caught:
        read_model_shape(folder)
    assert str(caught.value).startswith(str(file)), "it says which file"
    return str(caught.value).removeprefix(str(file))


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"]
)
def test_a_missing_size(tmp_path: Path, key: str) -> None:
    assert reason(tmp_path, {name: value for name, value in SMALL.items() if name != key}) == f": {key} is missing"


@pytest.mark.parametrize("value", ["many", 0, -4, 2.5, True, [4], {"a": 1}, float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["num_hidden_layers", "head_dim", "max_position_embeddings"])
def test_a_size_that_is_none(tmp_path: Path, key: str, value: Any) -> None:
    assert f"{key}=" in reason(tmp_path, SMALL | {key: value})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"architectures": "Qwen3ForCausalLM"}, "architectures=Qwen3ForCausalLM must be a list of names"),
        ({"architectures": [3]}, "must be a list of names"),
        ({"architectures": []}, "architecture (none) is not supported"),
        ({"rope_scaling": [1]}, "rope_scaling=[1] must be an object"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_type=linear needs factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "two"}}, "factor=two must be a number above 0"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}},
            "mscale=0.7 of the rotary embedding is not",
        ),
        ({"rope_theta": "large"}, "rope_theta=large must be a number above 0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0 must be a number above 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads=8 is not a multiple of num_key_value_heads=3"),
    ],
)
def test_what_does_not_fit(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    assert text in reason(tmp_path, SMALL | change)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"[1, 2]", "is not a JSON object but of type list"),
        (b"3", "is not a JSON object but of type int"),
        (b"", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"num_hidden_layers": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b"\xff\xfe", "is not UTF-8 text"),
    ],
)
def test_what_is_no_config_at_all(tmp_path: Path, content: bytes, text: str) -> None:
    assert text in reason(tmp_path, content)


def test_a_whole_float_counts_as_a_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"num_hidden_layers": 4.0}))
    assert read_model_shape(tmp_path).layers == 4


def test_a_folder_or_a_file_of_somebody_else() -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        folder = Path(name)
        file = folder / "config.json"
        file.write_text(json.dumps(SMALL))
        file.chmod(0)

        def told() -> str:
            try:
                read_model_shape(folder)
            except ValueError as error:
                return str(error)
            return ""

        assert as_ordinary_user(told) == f"{file} cannot be read: Permission denied"
        file.unlink()
        file.mkdir()
        assert told() == f"{file} cannot be read: Is a directory"
