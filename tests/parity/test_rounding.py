"""What verify takes for rounding: models that round much pass, and small faults in any family do not."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_grpo.verification.double_precision import DoublePrecision
from megatron_grpo.verification.hf_model import load_eager_model
from megatron_grpo.verification.problem import SMALL, TINY, Truth, compute_truth, make_batch, make_model, prepare_model
from megatron_grpo.verification.ranks import RankResults, Row, Task, compare_layout
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.test_families import measure_on_rank

BATCH = make_batch(SMALL["vocab_size"], sequences=8, longest=40, seed=0)


def compare(folders: list[Path], truths: list[Truth]) -> list[Row]:
    """Compare what a rank computes of folders with truths."""
    tasks = [Task(str(folder), Layout().parallel, True, BATCH, 1, 0, 600.0) for folder in folders]
    (results,) = run_on_ranks(Layout(), measure_on_rank, tasks, timeout_s=600.0)
    return [
        compare_layout("tp1", True, [RankResults(**result)], truth, BATCH, None)
        for result, truth in zip(results, truths, strict=True)
    ]


def scale_tensor(folder: Path, ending: str, factor: float) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith(ending):
            tensors[name] = tensors[name] * factor
    save_file(tensors, file, {"format": "pt"})


def make_tied(family: str, folder: Path, factor: float) -> Path:
    """A model whose embedding is its head, and large: logits of some hundreds."""
    make_model({"model_type": family, **SMALL, **TINY[family], "tie_word_embeddings": True}, folder, seed=0)
    scale_tensor(folder, "embed_tokens.weight", factor)
    return folder


def make_deep_delta_net(folder: Path) -> Path:
    layers = ["linear_attention"] * 3 + ["full_attention"]
    sizes = {"hidden_size": 256, "num_hidden_layers": 8, "layer_types": layers * 2, "mlp_only_layers": []}
    return make_model({"model_type": "qwen3_next", **SMALL, **TINY["qwen3_next"], **sizes}, folder, seed=0)


def test_models_that_round_much_pass(tmp_path: Path) -> None:
    folders = [
        make_tied("qwen3", tmp_path / "qwen3", 10.0),
        make_tied("qwen2", tmp_path / "qwen2", 30.0),
        make_deep_delta_net(tmp_path / "delta"),
    ]
    rows = compare(folders, [compute_truth(folder, BATCH) for folder in folders])
    assert [row.faults for row in rows] == [[], [], []]
    assert min(row.logprob for row in rows) > 1e-5
    assert max(row.logprob for row in rows) > 5e-5, "beyond any fixed tolerance that finds small faults"


def change_epsilon(folder: Path, family: str) -> None:
    change_entry(folder, {"nemotron_h": "layer_norm_epsilon"}.get(family, "rms_norm_eps"), lambda value: value + 1e-5)


def change_rope_base(folder: Path, _family: str) -> None:
    raw = json.loads((folder / "config.json").read_text())
    rope = raw["rope_parameters"]
    for part in [rope, *(part for part in rope.values() if isinstance(part, dict))]:
        if "rope_theta" in part:
            part["rope_theta"] = part["rope_theta"] * 1.001
    (folder / "config.json").write_text(json.dumps(raw))


def change_scale(folder: Path, _family: str) -> None:
    scale_tensor(folder, "layers.1.self_attn.o_proj.weight", 1.001)
    scale_tensor(folder, "layers.1.mixer.out_proj.weight", 1.001)
    scale_tensor(folder, "layers.1.linear_attn.out_proj.weight", 1.001)


def change_entry(folder: Path, key: str, change: Callable[[float], float]) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw[key] = change(raw[key])
    (folder / "config.json").write_text(json.dumps(raw))


FAULTS: list[tuple[str, Callable[[Path, str], None]]] = [
    *((family, change_epsilon) for family in ("qwen3", "gemma3", "qwen3_5", "nemotron_h", "olmo3", "llama4")),
    *((family, change_rope_base) for family in ("qwen3", "llama", "gemma3", "qwen3_next", "deepseek_v3", "glm4_moe")),
    *((family, change_scale) for family in ("qwen2", "mixtral", "gpt_oss", "qwen3_5_moe", "minimax_m2")),
]


def test_small_faults_fail(tmp_path: Path) -> None:
    truths: dict[str, Truth] = {}
    folders = []
    for number, (family, plant) in enumerate(FAULTS):
        folder = prepare_model(f"tiny:{family}", False, tmp_path / str(number), 0)
        truths[family] = truths.get(family) or compute_truth(folder, BATCH)
        plant(folder, family)
        folders.append(folder)
    rows = compare(folders, [truths[family] for family, _ in FAULTS])
    for (family, plant), row in zip(FAULTS, rows, strict=True):
        numbers = [text for text in row.faults if text.startswith(("logprob", "gradient"))]
        assert numbers, f"{family}: {plant.__name__} is taken for rounding: {row}"


def test_a_small_fault_of_a_model_with_large_logits_fails(tmp_path: Path) -> None:
    folder = make_tied("qwen3", tmp_path, 10.0)
    truth = compute_truth(folder, BATCH)
    scale_tensor(folder, "layers.1.self_attn.o_proj.weight", 1.001)
    (row,) = compare([folder], [truth])
    assert any(text.startswith(("logprob", "gradient")) for text in row.faults)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "nemotron_h", "gpt_oss", "deepseek_v32", "gemma4_moe"])
def test_the_truth_is_in_float64_throughout(family: str, tmp_path: Path) -> None:
    """No call of torch yields another floating-point type, whatever the family converts to."""
    folder = prepare_model(f"tiny:{family}", False, tmp_path, 0)
    dtypes = set()

    class Recorder(DoublePrecision):
        def __torch_function__(self, *args: Any, **kwargs: Any) -> Any:
            result = super().__torch_function__(*args, **kwargs)
            if isinstance(result, torch.Tensor) and result.is_floating_point():
                dtypes.add(result.dtype)
            return result

    with Recorder():
        model = load_eager_model(folder, torch.float64).double()
        dtypes.clear()
        model(torch.arange(1, 30)[None], use_cache=False)
    assert dtypes == {torch.float64}


def test_missing_and_infinite_results_fail(tmp_path: Path) -> None:
    folder = prepare_model("tiny:llama", False, tmp_path, 0)
    truth = compute_truth(folder, BATCH)
    logprobs = dict(enumerate(truth.logprobs.float().split(BATCH.lengths)))
    gradients = {name: tensor.float() for name, tensor in truth.gradients.items()}
    exact = RankResults(logprobs=logprobs, weights=truth.weights, gradients=gradients, losses=[truth.loss])
    assert compare_layout("tp1", True, [exact], truth, BATCH, None).passed
    lacking = replace(exact, gradients={name: value for name, value in gradients.items() if "norm" not in name})
    assert not compare_layout("tp1", True, [lacking], truth, BATCH, None).passed
    broken = replace(exact, logprobs=logprobs | {2: logprobs[2] * float("nan")})
    assert any("inf" in text for text in compare_layout("tp1", True, [broken], truth, BATCH, None).faults)
    doubled = replace(exact, weights={name: value * 2 for name, value in truth.weights.items()})
    assert compare_layout("tp1", True, [doubled], truth, BATCH, None).faults == ["exported weights differ"]
