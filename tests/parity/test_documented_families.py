"""A new family is a short file: the two of docs/extending.md, run through the verify command."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Dots1Config, GlmConfig, PreTrainedConfig

from megatron_grpo import verify
from tests.support.documents import LIMITS, read_family_files
from tests.support.rare import rare

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "eos_token_id": 2,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "glm": GlmConfig(**SIZES, head_dim=8),
    "dots1": Dots1Config(
        **SIZES,
        moe_intermediate_size=32,
        n_routed_experts=4,
        n_shared_experts=2,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        sliding_window=None,
    ),
}
LAYOUTS = {"glm": ["tp2", "tp8", "pp3"], "dots1": ["tp2", "ep2"]}
"""With eight ranks, two share the matrix rows of a key/value head."""


def make_model(config: PreTrainedConfig, folder: Path) -> Path:
    """A model of random weights, norms and biases of the choice of experts included."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in name:
            tensor.data += torch.empty_like(tensor).uniform_(-0.5, 0.5)
        elif tensor.dim() > 1 or "correction_bias" in name:
            tensor.data.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", rare(["glm", "dots1"]))
def test_a_documented_family_computes_what_transformers_computes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = read_family_files()[name]
    assert len(file.splitlines()) < LIMITS[name]
    folder = make_model(CONFIGS[name], tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    Path(f"documented_{name}.py").write_text(file)
    assert verify.main([f"model={folder}", "layouts=[tp2]"]) == 2
    assert "ForCausalLM is not supported" in capsys.readouterr().err
    family, layouts = f"family=documented_{name}:FAMILY", ",".join(LAYOUTS[name])
    assert verify.main([f"model={folder}", family, f"layouts=[{layouts}]", "sequences=8", "steps=1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["layout"] for row in rows] == ["tp1", *LAYOUTS[name]]
    assert all(row["exact"] and row["logprob"] <= 2e-5 for row in rows)
