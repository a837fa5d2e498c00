"""The verify command, on real ranks: layouts that are equal pass, and one that is not is told."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
)

from megatron_grpo import verify
from megatron_grpo.verification import tolerances
from tests.support.hf_configs import read_configs


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
        assert row["logprob"] <= row["tolerances"]["logprob"] <= 5e-5
        assert 0 < row["gradient"] <= row["tolerances"]["gradient"] <= 1e-4
        assert row["step_s"] > 0
    assert len({row["final_loss"] for row in rows}) > 1, "losses after the steps are compared, which rounding moves"


def test_a_difference_past_its_tolerance_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tolerances.FACTORS, "logprob_rms", 1e-3)
    monkeypatch.setattr(tolerances, "FLOAT32_ULP", 0.0)
    assert verify.main(["layouts=[tp1,pp2]", "steps=1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "verifies model=tiny:qwen3"
    assert re.match(r"distances from transformers in float64; its own in float32: \d\.\de-0\d \(", lines[1])
    assert lines[2].startswith("layout ")
    rows, verdict = lines[3:-1], lines[-1]
    assert [line.split()[0] for line in rows] == ["tp1", "logprob_rms", "pp2", "logprob_rms"]
    assert all(re.search(r" FAILED  (model\.|lm_head)[\w.]+$", line) for line in rows[::2])
    assert all(re.fullmatch(r"    logprob_rms \d\.\de-07 > \d\.\de-10", line) for line in rows[1::2])
    assert verdict == "FAILED: 2 of 2 are further away than rounding explains"


def test_a_large_model_is_verified_by_a_small_copy_of_its_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = Qwen3Config(
        hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, architectures=["Qwen3ForCausalLM"]
    )
    large.save_pretrained(tmp_path)
    assert verify.main([f"model={tmp_path}", "shrink=true", "layouts=tp2", "steps=1", "--json"]) == 0
    assert all(row["passed"] for row in json.loads(capsys.readouterr().out)["rows"])


def random_model(config: PreTrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


_CONFIGS = read_configs("model_configs")
SIZES: dict[str, Any] = _CONFIGS["verify_sizes"]
LATENT: dict[str, Any] = _CONFIGS["verify_latent"]
ROUTERS: dict[str, PreTrainedConfig] = {
    "softmax, normalised": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=1),
    "one expert": MixtralConfig(**SIZES, num_local_experts=1, num_experts_per_tok=1),
    "softmax": Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=1, moe_intermediate_size=32),
    "sigmoid": DeepseekV3Config(**{**SIZES, **LATENT}, num_experts_per_tok=1),
}


@pytest.mark.parametrize(
    "router",
    [
        "softmax, normalised",
        "sigmoid",
        pytest.param("one expert", marks=pytest.mark.slow),
        pytest.param("softmax", marks=pytest.mark.slow),
    ],
)
def test_a_token_with_a_single_expert(router: str, tmp_path: Path) -> None:
    folder = random_model(ROUTERS[router], tmp_path)
    assert verify.main([f"model={folder}", "layouts=tp1", "steps=1"]) == 0


@pytest.mark.parametrize("case", ["rotary", pytest.param("head", marks=pytest.mark.slow)])
def test_a_folder_that_speaks_twice_is_computed_as_transformers_does(case: str, tmp_path: Path) -> None:
    tied = case == "head"
    folder = random_model(LlamaConfig(**SIZES, tie_word_embeddings=tied), tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    if tied:
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        raw["rope_scaling"] = {"rope_type": "linear", "factor": 4.0}
        (folder / "config.json").write_text(json.dumps(raw))
    assert verify.main([f"model={folder}", "layouts=tp1", "steps=1"]) == 0


def test_tensors_that_nothing_reads_end_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = random_model(LlamaConfig(**SIZES), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    norm = "model.layers.0.self_attn.q_norm.weight"
    save_file({**tensors, norm: torch.ones(16)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert verify.main([f"model={folder}", "layouts=tp1"]) == 2
    assert norm in capsys.readouterr().err


@pytest.mark.parametrize("shrink", [False, True])
def test_a_model_without_a_family_is_told_the_nearest_and_the_tensors_that_do_not_fit(
    shrink: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = random_model(OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2), tmp_path)
    assert verify.main([f"model={folder}", f"shrink={str(shrink).lower()}"]) == 2
    text = capsys.readouterr().err
    assert f"model={folder}: architecture OlmoeForCausalLM is not supported" in text
    assert "All of its tensors have names of " in text
    folder = random_model(StableLmConfig(**SIZES), tmp_path / "other")
    assert verify.main([f"model={folder}", f"shrink={str(shrink).lower()}"]) == 2
    text = capsys.readouterr().err
    assert re.search(r"The nearest family is \w+; without a row in its tables: .*model.norm.bias", text), text


@pytest.mark.parametrize("shrink", [False, True])
def test_a_model_that_transformers_does_not_know_is_told_the_nearest_family(
    shrink: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = random_model(LlamaConfig(**SIZES), tmp_path)
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"llama"', '"strange"').replace("Llama", "Strange"))
    assert verify.main([f"model={folder}", f"shrink={str(shrink).lower()}"]) == 2
    text = capsys.readouterr().err
    assert f"model={folder}: architecture StrangeForCausalLM is not supported" in text
    assert "All of its tensors have names of llama" in text
