"""Small models that stand for large ones: every kind of layer is in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_grpo.proof.models import prepare_model
from megatron_grpo.weights.families import shape_of_folder
from tests.support.gemma3_config import OLD, in_the_new_spelling


@pytest.mark.parametrize("raw", [OLD, in_the_new_spelling(OLD)], ids=["old", "new"])
def test_a_small_copy_has_layers_with_a_window_and_without(raw: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": "gemma3_text"}))
    small = shape_of_folder(prepare_model(str(tmp_path), True, tmp_path / "small", 0))
    assert small.layers == 4
    assert set(small.windowed) == {True, False}
    assert small.window == 16
    assert small.softmax_scale == 1 / 16
