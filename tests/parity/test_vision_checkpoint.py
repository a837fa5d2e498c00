"""Checkpoints of models that see images continue as if nothing had happened, and their exports are what was trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.export import main
from megatron_grpo.models.hf_folder import HFFolderReader
from megatron_grpo.run.checkpoint_files import write_driver_files
from megatron_grpo.trainer.rank import PolicyRank
from megatron_grpo.verification.problem import count_tokens, make_loss
from megatron_grpo.verification.random_pictures import load_whole_model
from tests.parity.adapters import LORA
from tests.parity.images import (
    MICROBATCHES,
    ImageModel,
    compute_logprobs,
    expect_outputs,
    make_image_batch,
    make_saved_model,
)
from tests.parity.on_rank import expect_close
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import merge, whole_tensors

SETTINGS: dict[str, dict[str, Any]] = {"tower": {"train_vision_tower": True}, "adapters": {"lora": LORA}, "frozen": {}}
Results = tuple[dict[str, Tensor], dict[str, Tensor], Tensor | None]


def continue_on_rank(
    layout: Layout, model: ImageModel, batch: TokenBatch, settings: dict[str, Any], checkpoint: Path, loads: bool
) -> Results:
    """Two steps and a checkpoint, or a loaded one; then a step. Weights before and after it, and log-probabilities."""
    rank = PolicyRank(model.make_settings(layout, **settings))
    if loads:
        rank.checkpoint.load(str(checkpoint))
    else:
        for _ in range(2):
            rank.train(batch, MICROBATCHES, make_loss(), count_tokens(batch))
        rank.checkpoint.save(str(checkpoint))
    saved = whole_tensors(rank)
    tokens = TokenBatch(batch.lengths, TokenFields(token_ids=batch.fields.token_ids), batch.images)
    logprobs = rank.compute_logprobs(tokens, MICROBATCHES)
    rank.train(batch, MICROBATCHES, make_loss(), count_tokens(batch))
    return saved, whole_tensors(rank), logprobs


def export(model: ImageModel, settings: dict[str, Any], run_dir: Path) -> Path:
    """Export the checkpoint of step 3 as the command does."""
    policy = {"model": {"path": str(model.path)}, "precision": "float32", **settings}
    if "lora" in settings:
        policy["lora"] = {"rank": LORA.rank, "alpha": LORA.alpha, "target_modules": LORA.target_modules}
    OmegaConf.save({"policy": policy}, run_dir / "config.yaml")
    checkpoint, output = run_dir / "checkpoints" / "step_3", run_dir / "exported"
    write_driver_files(
        checkpoint, 3, {"save_state": {"total_steps": 3}, "metrics": {}, "batch_cache": []}, {"epoch": 0}
    )
    assert main([f"checkpoint={checkpoint}", f"output={output}"]) == 0
    return output


@pytest.mark.parametrize(
    ("name", "kind", "layouts"),
    [
        ("qwen3_vl", "tower", (Layout(), Layout(tensor=2, sequence=True))),
        pytest.param("qwen2_5_vl", "tower", (Layout(pipeline=2), Layout()), marks=pytest.mark.slow),
        pytest.param("qwen3_vl_moe", "adapters", (Layout(), Layout(pipeline=2)), marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", "frozen", (Layout(tensor=2), Layout(context=2)), marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_continues_and_its_export_is_what_was_trained(
    name: str, kind: str, layouts: tuple[Layout, Layout], tmp_path: Path
) -> None:
    model, settings = make_saved_model(name, tmp_path), SETTINGS[kind]
    batch, checkpoint = make_image_batch(model), tmp_path / "run" / "checkpoints" / "step_3" / "megatron"
    checkpoint.mkdir(parents=True)
    arguments = (model, batch, settings, checkpoint)
    written: list[Results] = run_on_ranks(layouts[0], continue_on_rank, *arguments, False)
    saved, final = (merge([results[part] for results in written]) for part in (0, 1))
    for layout, tolerance in ((layouts[0], 0.0), (layouts[1], 1e-4)):
        loaded: list[Results] = run_on_ranks(layout, continue_on_rank, *arguments, True)
        actual = merge([results[1] for results in loaded])
        expect_close(actual, final, tolerance and 2e-6, tolerance, where=str(layout))

    output = export(model, settings, tmp_path / "run")
    exported, before = (dict(HFFolderReader(folder).iterate()) for folder in (output, model.path))
    assert exported.keys() == before.keys()
    for tensor_name, tensor in exported.items():
        assert torch.equal(tensor, saved.get(tensor_name, before[tensor_name])), tensor_name
    changed = any(not torch.equal(tensor, before[key]) for key, tensor in exported.items() if "visual." in key)
    assert changed == (kind == "tower")
    with torch.no_grad():
        expected = compute_logprobs(load_whole_model(output, torch.float32), model, batch)
    expect_outputs([results[2] for results in written], expected)
