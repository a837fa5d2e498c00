"""Command lines of verify, damaged rollouts, the model that layouts compute, and results of transformers."""

import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GlmMoeDsaConfig

from megatron_grpo import doctor, replay, report, verify
from megatron_grpo.batch.rollout_files import locate_rollouts_file, read_recorded_rollouts, read_rollouts
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import ParallelConfig
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.planning.generation_cost import read_recorded_lengths
from megatron_grpo.verification.formula_layouts import measure_sensitivity
from megatron_grpo.verification.problem import EXPERTS, SMALL, compute_truth, make_batch, prepare_model
from megatron_grpo.verify import read_layouts, read_request
from tests.support.hf_configs import read_released
from tests.support.message_table import read_rows
from tests.support.recorded_run import make_recorded_run
from tests.support.released_configs import GEMMA3_1B, in_the_new_spelling

PADDING = 20


def make_model(folder: Path, **changes: object) -> Path:
    """A small random model, the same one for the same sizes."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**SMALL, **changes})).save_pretrained(folder)
    return folder


def test_the_row_of_the_padding_token_gets_its_gradient(tmp_path: Path) -> None:
    batch = make_batch(SMALL["vocab_size"], 8, 32, 0)
    ids = batch.fields.token_ids
    assert ids is not None
    assert (ids == PADDING).any()
    without = compute_truth(make_model(tmp_path, model_type="qwen2"), batch).gradients
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pad_token_id": PADDING}))
    gradients = compute_truth(tmp_path, batch).gradients
    assert gradients.keys() == without.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, without[name], msg=name)


def test_experts_may_have_any_width(tmp_path: Path) -> None:
    sizes = {**EXPERTS, "intermediate_size": 66, "sliding_window": None}
    batch = make_batch(SMALL["vocab_size"], 4, 16, 0)
    truth = compute_truth(make_model(tmp_path, model_type="mixtral", **sizes), batch)
    assert truth.gradients["model.layers.0.block_sparse_moe.experts.0.w1.weight"].shape == (66, SMALL["hidden_size"])


def test_a_failure_of_transformers_is_one_message(tmp_path: Path) -> None:
    folder = make_model(tmp_path, model_type="qwen2")
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(RunError, match=f"^transformers cannot compute {tmp_path}: SafetensorError: [^\\n]*$"):
        compute_truth(folder, make_batch(SMALL["vocab_size"], 4, 16, 0))


@pytest.mark.parametrize("raw", [GEMMA3_1B, in_the_new_spelling(GEMMA3_1B)], ids=["old", "new"])
def test_a_small_copy_has_layers_with_a_window_and_without(raw: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": "gemma3_text"}))
    small = read_model_shape(prepare_model(str(tmp_path), True, tmp_path / "small", 0))
    assert small.layers == 4
    assert set(small.windowed) == {True, False}
    assert small.window == 16
    assert small.softmax_scale == 1 / 16


@pytest.mark.parametrize(
    "keys",
    [
        {"index_topk_freq": 4, "index_skip_topk_offset": 3, "head_dim": 192},
        {"index_topk_pattern": "FFF" + "SSSF" * 18 + "SSS"},
        {},
    ],
)
def test_a_small_glm_shares_indexers_as_the_large_one(keys: dict[str, Any], tmp_path: Path) -> None:
    """GLM-5.2 says it three times: by kinds, by their frequency, and by where they begin."""
    types = GlmMoeDsaConfig(**{**read_released("glm_5"), **keys}).indexer_types
    (tmp_path / "config.json").write_text(json.dumps({**read_released("glm_5"), **keys, "indexer_types": types}))
    large = read_model_shape(tmp_path)
    small = read_model_shape(prepare_model(str(tmp_path), True, tmp_path / "small", 0))
    assert set(small.indexer.layers) == set(large.indexer.layers)
    assert small.indexer.layers[-1] == large.indexer.layers[-1]


@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (8, 4)])
def test_a_small_copy_has_one_group_of_experts_if_the_model_has(groups: int, top_groups: int, tmp_path: Path) -> None:
    raw = read_released("moonlight_16b_a3b") | {"n_group": groups, "topk_group": top_groups}
    raw |= {"num_experts_per_tok": 8, "n_routed_experts": 64}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    small = read_model_shape(prepare_model(str(tmp_path), True, tmp_path / "small", 0))
    assert (small.experts.groups > 1) == (groups > 1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tp2", ParallelConfig(tensor=2)),
        ("TP2pp2", ParallelConfig(tensor=2, pipeline=2)),
        ("tp4cp2sp", ParallelConfig(tensor=4, context=2, sequence=True)),
        ("dp2cp2", ParallelConfig(data=2, context=2)),
    ],
)
def test_a_layout_is_read_from_its_name(name: str, expected: ParallelConfig) -> None:
    assert read_layouts("layouts", name) == [(name, expected)]


def test_a_request_says_what_is_verified() -> None:
    request = read_request(
        ["model=tiny:llama", "layouts=[tp2, cp2dp2]", "packing=both", "steps=2", "timeout_s=9.5", "--json"]
    )
    assert (request.model, request.packing, request.steps, request.timeout_s, request.json) == (
        "tiny:llama",
        (True, False),
        2,
        9.5,
        True,
    )
    assert [name for name, _ in request.layouts] == ["tp2", "cp2dp2"]
    assert read_request([]).packing == (True,)


@pytest.mark.parametrize(("argument", "text"), read_rows("problem", "what_means_nothing_is_said_so"))
def test_what_means_nothing_is_said_so(argument: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        read_request([argument])
    assert verify.main([argument]) == 2
    assert capsys.readouterr().err.startswith("verify: ")


@pytest.mark.parametrize(
    ("arguments", "text"), read_rows("problem", "what_the_model_does_not_bear_is_refused_before_a_process_starts")
)
def test_what_the_model_does_not_bear_is_refused_before_a_process_starts(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify.main(arguments) == 2
    assert text in capsys.readouterr().err


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def clear_file(file: Path) -> None:
    file.write_bytes(b"")


def overwrite_column(file: Path) -> None:
    """The contents of a column are gone, the metadata at the end is not."""
    content = bytearray(file.read_bytes())
    content[4 : len(content) // 3] = bytes(len(content) // 3 - 4)
    file.write_bytes(content)


def without_a_column(file: Path) -> None:
    pq.write_table(pq.read_table(file).drop_columns(["logprobs"]), file)


@pytest.fixture(scope="module")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_recorded_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def run_dir(recorded_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(recorded_run, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("damage", [cut_off, clear_file, overwrite_column, without_a_column])
@pytest.mark.parametrize(
    ("command", "arguments"), [(doctor.main, ["step=1"]), (replay.main, ["step=1", "device=cpu"]), (report.main, [])]
)
def test_commands_name_a_damaged_file(
    damage: Callable[[Path], None],
    command: Callable[[Sequence[str]], int],
    arguments: list[str],
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = locate_rollouts_file(run_dir, 1)
    damage(file)
    assert command([str(run_dir), *arguments]) == 2
    errors = capsys.readouterr().err
    assert f"{file} is damaged or was not written to its end: " in errors
    assert "copy it again from where the run wrote it, or move it out" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("damage", [cut_off, clear_file, overwrite_column, without_a_column])
def test_functions_name_a_damaged_file(damage: Callable[[Path], None], run_dir: Path) -> None:
    file = locate_rollouts_file(run_dir, 1)
    damage(file)
    for read in (lambda: list(read_rollouts(run_dir, 1)), lambda: read_recorded_lengths(run_dir, 8)):
        with pytest.raises(ValueError, match=f"^{file} is damaged or was not written to its end: "):
            read()
    with pytest.raises(ValueError, match=r"^(is damaged or was not written to its end: |was written by )"):
        read_recorded_rollouts(file)


def test_sensitivity_has_what_factors_without_gradient_change() -> None:
    """Of -sg(exp(sum)) log pi: (number of tokens) times and once the factor, by token."""
    logprobs = torch.tensor([0.0, -0.1, -0.3, 0.0, -0.2], dtype=torch.float64)

    def loss(pieces: list[Tensor]) -> Tensor:
        return torch.stack([-(piece.sum().exp().detach() * piece).sum() for piece in pieces]).sum()

    expected = 2 * math.exp(-0.4) * abs(1 - 0.4) + math.exp(-0.2) * abs(1 - 0.2)
    assert measure_sensitivity(loss, logprobs, [3, 2]) == pytest.approx(expected, rel=1e-4)
