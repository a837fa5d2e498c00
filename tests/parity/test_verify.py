"""The verify command, on real ranks: layouts that are equal pass, and one that is not is told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import Qwen3Config

from megatron_grpo import verify
from megatron_grpo.proof import ranks as compare


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        pytest.param("qwen3", ["tp2sp"], marks=pytest.mark.slow),
        pytest.param("qwen3", ["cp2dp2"], marks=pytest.mark.slow),
        pytest.param("deepseek_v3", ["ep2etp2"], marks=pytest.mark.slow),
        pytest.param("gemma3", ["pp2cp2"], marks=pytest.mark.slow),
        pytest.param("qwen3_moe", ["pp2vp2", "ep2"], marks=pytest.mark.slow),
        pytest.param("mixtral", ["tp2ep2"], marks=pytest.mark.slow),
        pytest.param("deepseek_v3", ["tp2"], marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layouts_of_a_tiny_model_pass(model: str, layouts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"model=tiny:{model}", f"layouts=[{','.join(layouts)}]", "packing=both", "steps=2", "--json"]
    assert verify.main(arguments) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["layout"], row["packed"]) for row in rows] == [
        (layout, packed) for layout in ("tp1", *layouts) for packed in (True, False)
    ]
    for row in rows:
        assert row["passed"]
        assert row["exact"]
        assert row["logprob"] <= 2e-5
        assert 0 < row["gradient"] <= 1e-4
        assert row["step_s"] > 0
    assert len({row["final_loss"] for row in rows}) > 1, "losses after the steps are compared, which rounding moves"


def test_a_difference_past_its_tolerance_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(compare.TOLERANCES, "logprob", 1e-12)
    assert verify.main(["layouts=[tp1,pp2]", "steps=1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("layout ")
    assert [line.split()[0] for line in lines[1:]] == ["tp1", "pp2"]
    assert all(re.search(r" FAILED  (model\.|lm_head)[\w.]+$", line) for line in lines[1:])


def test_a_large_model_is_verified_by_a_small_copy_of_its_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = Qwen3Config(
        hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, architectures=["Qwen3ForCausalLM"]
    )
    large.save_pretrained(tmp_path)
    assert verify.main([f"model={tmp_path}", "shrink=true", "layouts=tp2", "steps=1", "--json"]) == 0
    assert all(row["passed"] for row in json.loads(capsys.readouterr().out)["rows"])
