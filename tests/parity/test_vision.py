"""A Qwen2.5-VL with images of several sizes in one pack computes what transformers computes, in every layout."""

import json
from pathlib import Path

import pytest
import torch

from megatron_grpo import verify
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.hf_folder import HFFolderReader
from megatron_grpo.trainer.vision_tower import load_tower
from tests.support.image_models import make_image_model

COMMON = ["sequences=6", "longest=24", "steps=1", "--json"]


def run_verify(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    code = verify.main([f"model={folder}", *COMMON, *arguments])
    output = capsys.readouterr().out
    assert code == 0, output
    rows: list[dict[str, object]] = json.loads(output)["rows"]
    return rows


def test_two_ranks_share_the_tokens_of_an_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_image_model(tmp_path / "model")
    rows = run_verify(tmp_path / "model", capsys, "layouts=[tp2sp]", "packing=both")
    assert [(row["layout"], row["packed"]) for row in rows] == [
        ("tp1", True),
        ("tp1", False),
        ("tp2sp", True),
        ("tp2sp", False),
    ]


@pytest.mark.slow
def test_every_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    make_image_model(tmp_path / "model", num_hidden_layers=4, num_attention_heads=4, rope_parameters=rope)
    layouts = "layouts=[tp2,cp2,pp2,dp2,pp2vp2,tp2cp2,tp2pp2,pp2cp2,tp2sp]"
    rows = run_verify(tmp_path / "model", capsys, layouts)
    assert len(rows) == 10


def test_the_tower_is_that_of_the_folder_and_is_not_trained(tmp_path: Path) -> None:
    model = make_image_model(tmp_path)
    tower = load_tower(tmp_path, read_model_shape(tmp_path), torch.float32)
    expected = dict(model.model.visual.named_parameters())
    for name, parameter in tower.named_parameters():
        assert torch.equal(parameter, expected[name])
        assert not parameter.requires_grad
    stored = {name for name, _ in HFFolderReader(tmp_path).iterate() if name.startswith("visual.")}
    assert stored == {f"visual.{name}" for name in expected}
