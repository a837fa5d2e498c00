"""Models with images of several sizes in one pack compute what transformers computes, in every layout."""

import json
from pathlib import Path

import pytest
import torch

from megatron_grpo import verify
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.hf_folder import HFFolderReader
from megatron_grpo.trainer.vision_tower import load_tower
from tests.support.image_models import make_image_model

COMMON = ["sequences=8", "longest=24", "steps=1", "--json"]  # of one to four images
LAYOUTS = {
    "qwen2_5_vl": "tp2,cp2,pp2,dp2,pp2vp2,tp2cp2,tp2pp2,pp2cp2,tp2sp",
    "qwen3_vl": "tp2,cp2,pp2,dp2,pp2vp2,tp2cp2,tp2pp2,pp2cp2,tp2sp",
    "qwen3_vl_moe": "tp2,cp2,pp2,ep2,tp2ep2,tp2pp2",
}


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


@pytest.mark.parametrize(("name", "tower"), [("qwen3_vl", "true"), ("qwen3_vl_moe", "false")])
def test_one_rank(name: str, tower: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_image_model(tmp_path / "model", name=name)
    assert len(run_verify(tmp_path / "model", capsys, "layouts=[tp1]", f"tower={tower}")) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layouts"), [("qwen2_5_vl", "tp2,pp2,tp2cp2"), ("qwen3_vl", "tp2sp,cp2,dp2"), ("qwen3_vl_moe", "ep2,tp2")]
)
def test_a_trained_tower(name: str, layouts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = {"num_hidden_layers": 4} if name == "qwen2_5_vl" else {}
    make_image_model(tmp_path / "model", name=name, **text)
    rows = run_verify(tmp_path / "model", capsys, f"layouts=[{layouts}]", "packing=both", "tower=true")
    assert len(rows) == 2 * (1 + len(layouts.split(",")))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text: dict[str, object] = {}
    if name == "qwen2_5_vl":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
        text = {"num_hidden_layers": 4, "num_attention_heads": 4, "rope_parameters": rope}
    make_image_model(tmp_path / "model", name=name, **text)
    rows = run_verify(tmp_path / "model", capsys, f"layouts=[{LAYOUTS[name]}]", "packing=both")
    assert len(rows) == 2 * (1 + len(LAYOUTS[name].split(",")))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_tower_is_that_of_the_folder_and_is_not_trained(name: str, tmp_path: Path) -> None:
    model = make_image_model(tmp_path, name=name)
    tower = load_tower(tmp_path, read_model_shape(tmp_path), torch.float32)
    expected = dict(model.model.visual.named_parameters())
    for name, parameter in tower.named_parameters():
        assert torch.equal(parameter, expected[name])
        assert not parameter.requires_grad
    stored = {name.removeprefix("model.") for name, _ in HFFolderReader(tmp_path).iterate() if "visual." in name}
    assert stored == {f"visual.{name}" for name in expected}
