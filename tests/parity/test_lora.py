"""Adapters in every layout: gradients, log-probabilities and steps against peft; checkpoints; what is exported."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from peft import PeftModel
from torch import Tensor

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import LoraConfig
from megatron_grpo.export import main
from megatron_grpo.run.checkpoint_files import write_driver_files
from tests.parity.adapters import LORA, adapted_layers, make_lora_rank
from tests.parity.lora import (
    expect_gradients_of_adapters,
    fill_b,
    join,
    list_matrices,
    own_parts,
    peft_oracle,
    rows_of,
)
from tests.parity.on_rank import expect_close, expect_logprobs, load_on_rank, split_by_sequence
from tests.parity.policy_training import MAX_GRAD_NORM, OPTIMIZER, hf_loss, make_batch, train_arguments
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import fetch, merge, parameters_of, rank_share, whole_tensors
from tests.support.rare import rare
from tests.support.tiny_models import TinyModel, logprobs_of_logits, make_tiny_model

LAYOUTS = [
    Layout(),
    Layout(tensor=2, sequence=True),
    Layout(tensor=4),
    Layout(pipeline=2),
    Layout(context=2),
    Layout(data=2),
]
"""Four tensor-parallel ranks are more than the models' two key/value heads."""


def gradients_on_rank(
    layout: Layout, models: list[TinyModel], settings: dict[str, Any]
) -> list[tuple[dict[str, Tensor], dict[str, Tensor], float]]:
    """A and B, their gradients, and the norm of the whole gradient, by model."""
    results = []
    for model in models:
        rank = make_lora_rank(layout, model, distributed=False, **settings)
        fill_b(rank)
        share, microbatches, loss_fn, counts = train_arguments(layout)
        rank.compute_gradients(fetch(rank, share, loss_fn), microbatches, loss_fn, counts)
        values, gradients = (own_parts(rank, gradients) for gradients in (False, True))
        results.append((values, gradients, rank.optimizer.compute_grad_norm()))
        trained = sum(parameter.requires_grad for parameter in parameters_of(rank))
        assert trained == 2 * len(adapted_layers(rank))
    return results


def expect_gradients_of_peft(layout: Layout, models: list[TinyModel], **settings: Any) -> None:
    by_rank = run_on_ranks(layout, gradients_on_rank, models, settings)
    for index, model in enumerate(models):
        values, gradients = (join([result[index][part] for result in by_rank], layout) for part in (0, 1))
        oracle = peft_oracle(model, values)
        hf_loss(oracle).backward()
        expect_gradients_of_adapters(model, oracle, values, gradients)
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
        assert [result[index][2] for result in by_rank] == pytest.approx([norm] * layout.ranks, rel=1e-4)


@pytest.mark.parametrize("layout", [*LAYOUTS[:2], *rare(LAYOUTS[2:3]), *LAYOUTS[3:]], ids=str)
def test_gradients_of_adapters_equal_peft(layout: Layout, tiny_models: dict[str, TinyModel]) -> None:
    expect_gradients_of_peft(layout, [tiny_models["qwen3_tied"], tiny_models["qwen2_tied"]])


def test_gradients_of_adapters_in_an_interleaved_pipeline(tmp_path: Path) -> None:
    layout = Layout(pipeline=2, virtual_pipeline=2, count_loss=True)
    expect_gradients_of_peft(layout, [make_tiny_model("qwen3_deep", tmp_path)])


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(pipeline=2)], ids=str)
def test_recomputed_layers_have_gradients_too(layout: Layout, tiny_models: dict[str, TinyModel]) -> None:
    expect_gradients_of_peft(layout, [tiny_models["qwen3_tied"]], activation_checkpointing=True)


def steps_on_rank(layout: Layout, model: TinyModel) -> dict[str, Any]:
    """Three optimizer steps from B = 0, and log-probabilities of policy and reference before and after them."""
    rank = make_lora_rank(layout, model)
    batch, microbatches, order = rank_share(make_batch(), layout)
    batch = fetch(rank, batch, None)

    results: dict[str, Any] = {"start": own_parts(rank, gradients=False), "before": whole_tensors(rank)}
    for _ in range(3):
        rank.train(*train_arguments(layout))
    return results | {
        "end": own_parts(rank, gradients=False),
        "after": whole_tensors(rank),
        "policy": split_by_sequence(rank.compute_logprobs(batch, microbatches), batch, order),
        "reference": split_by_sequence(rank.compute_reference_logprobs(batch, microbatches), batch, order),
        "again": split_by_sequence(rank.compute_logprobs(batch, microbatches), batch, order),
    }


def start_on_rank(layout: Layout, model: TinyModel) -> dict[str, Tensor]:
    return own_parts(make_lora_rank(layout, model), gradients=False)


def adamw_on_peft(model: TinyModel, start: dict[str, Tensor]) -> PeftModel:
    """Three steps of torch's AdamW on the adapters; matrices that are merged keep one A."""
    oracle = peft_oracle(model, start)
    shared: dict[str, list[Tensor]] = {}
    for name, lora_a, _, _ in list_matrices(oracle, start):
        shared.setdefault(name, []).append(lora_a)
    # One of each group is trained, with the gradient of all.
    trained = [lora_a for group in shared.values() for lora_a in group[:1]]
    trained += [lora_b for _, _, lora_b, _ in list_matrices(oracle, start)]
    adamw = torch.optim.AdamW(trained, betas=(0.9, 0.95), eps=OPTIMIZER.adam_eps, weight_decay=OPTIMIZER.weight_decay)
    for rate in (0.5e-2, 1e-2, 1e-2):
        oracle.zero_grad()
        hf_loss(oracle).backward()
        for group in shared.values():
            group[0].grad = torch.stack([lora_a.grad for lora_a in group]).sum(0)
        torch.nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM)
        for settings in adamw.param_groups:
            settings["lr"] = rate
        adamw.step()
        for group in shared.values():
            for lora_a in group[1:]:
                lora_a.data.copy_(group[0].data)
    return oracle


@pytest.mark.parametrize("layout", [LAYOUTS[1], *LAYOUTS[3:]], ids=str)
def test_steps_logprobs_and_reference_equal_peft(layout: Layout, tiny_models: dict[str, TinyModel]) -> None:
    """The policy is the merged model, the reference the base one; what is published is merged."""
    model = tiny_models["qwen3_tied"]
    by_rank = run_on_ranks(layout, steps_on_rank, model)
    start, end = (join([result[key] for result in by_rank], layout) for key in ("start", "end"))
    one_rank = join(run_on_ranks(Layout(), start_on_rank, model), Layout())
    assert all(torch.equal(start[name], value) for name, value in one_rank.items()), "A depends on the layout"
    assert not any(value.any() for name, value in start.items() if name.endswith("lora_b"))
    oracle = adamw_on_peft(model, start)
    for name, lora_a, lora_b, matrix in list_matrices(oracle, end):
        torch.testing.assert_close(end[f"{name}.lora_a"], lora_a.data, atol=2e-6, rtol=1e-4)
        torch.testing.assert_close(rows_of(model, matrix, end[f"{name}.lora_b"]), lora_b.data, atol=2e-6, rtol=1e-4)
    base = model.load().state_dict()
    for name, tensor in merge([result["before"] for result in by_rank]).items():
        assert torch.equal(tensor, base[name]), name
    merged_state = oracle.merge_and_unload().state_dict()
    after = merge([result["after"] for result in by_rank])
    assert (after["model.layers.0.mlp.down_proj.weight"] - base["model.layers.0.mlp.down_proj.weight"]).abs().max() > 0
    expect_close(after, {name: merged_state[name] for name in after})
    for key in ("policy", "again"):
        expect_logprobs([result[key] for result in by_rank], oracle.base_model.model, 3e-5)
    expect_logprobs([result["reference"] for result in by_rank], model.load(), 3e-5)


def save_on_rank(layout: Layout, model: TinyModel, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two steps, a checkpoint and a third: what is published at the checkpoint, and at the end."""
    rank = make_lora_rank(layout, model)
    for _ in range(2):
        rank.train(*train_arguments(layout))
    rank.checkpoint.save(str(folder))
    saved = whole_tensors(rank)
    rank.train(*train_arguments(layout))
    return saved, whole_tensors(rank)


def refusals_on_rank(layout: Layout, model: TinyModel, folder: Path, other_adapters: list[LoraConfig]) -> list[str]:
    """What loading a checkpoint says to other adapters."""
    texts = []
    for lora in other_adapters:
        with pytest.raises(RunError) as caught:
            make_lora_rank(layout, model, lora).checkpoint.load(str(folder))
        texts.append(str(caught.value))
    return texts


@pytest.mark.slow
def test_a_checkpoint_holds_adapters_alone_and_continues_in_other_layouts(
    tiny_models: dict[str, TinyModel], tmp_path: Path
) -> None:
    """To the bit in the same layout, to rounding in others."""
    model, folder = tiny_models["llama_untied"], tmp_path / "checkpoint"
    written_by = Layout(tensor=2, pipeline=2)
    folder.mkdir()
    by_rank = run_on_ranks(written_by, save_on_rank, model, folder)
    expected = merge([result[1] for result in by_rank])
    names = torch.distributed.checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    weights = [name for name in names if name.startswith("decoder.") or "embedding" in name or "output" in name]
    assert weights
    assert all(name.endswith(("lora_a", "lora_b")) for name in weights)
    assert any("optimizer" in name and "lora_a" in name for name in names)
    assert not any("word_embeddings" in name or "linear_qkv.weight" in name for name in names)
    for layout in (written_by, Layout(), Layout(data=2), Layout(tensor=4)):
        actual = merge(run_on_ranks(layout, partial(load_on_rank, make=make_lora_rank), model, folder, {}))
        tolerance = (0.0, 0.0) if layout == written_by else (2e-6, 1e-4)
        expect_close(actual, expected, *tolerance, where=str(layout))
    other_adapters = [LoraConfig(rank=2), replace(LORA, alpha=1.0), LoraConfig()]
    (refusals,) = run_on_ranks(Layout(), refusals_on_rank, model, folder, other_adapters)
    for refusal in refusals:
        assert re.search(r"was written with policy\.lora\.rank=3, alpha=7.*and this run has", refusal)


@pytest.mark.parametrize("name", ["qwen2_tied", pytest.param("qwen3_tied", marks=pytest.mark.slow)])
def test_what_is_exported_is_the_merged_model_and_an_adapter_that_peft_loads(
    name: str, tiny_models: dict[str, TinyModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, checkpoint = tiny_models[name], tmp_path / "run" / "checkpoints" / "step_2"
    (checkpoint / "megatron").mkdir(parents=True)
    policy = {"model": {"path": str(model.path)}, "precision": "float32"}
    adapters = {"rank": LORA.rank, "alpha": LORA.alpha, "target_modules": LORA.target_modules}
    OmegaConf.save({"policy": policy | {"lora": adapters}}, tmp_path / "run" / "config.yaml")
    by_rank = run_on_ranks(Layout(tensor=2, pipeline=2), save_on_rank, model, checkpoint / "megatron")
    published = merge([result[0] for result in by_rank])
    write_driver_files(
        checkpoint, 2, {"save_state": {"total_steps": 2}, "metrics": {}, "batch_cache": []}, {"epoch": 0}
    )
    assert main([f"checkpoint={checkpoint}", f"output={tmp_path / 'hf'}"]) == 0
    assert main([f"checkpoint={checkpoint}", f"output={tmp_path / 'peft'}", "format=peft"]) == 0
    merged_model = TinyModel("merged", tmp_path / "hf")
    for key, tensor in merged_model.tensors().items():
        torch.testing.assert_close(tensor, published[key], atol=0, rtol=0)
    loaded = PeftModel.from_pretrained(model.load(), str(tmp_path / "peft"))
    token_ids = make_batch().fields.token_ids.long().split(make_batch().lengths)[3][None]
    with torch.no_grad():
        logprobs = logprobs_of_logits(loaded(token_ids).logits, token_ids)
    torch.testing.assert_close(logprobs, merged_model.logprobs(token_ids), atol=2e-5, rtol=0)
    assert (logprobs - model.logprobs(token_ids)).abs().max() > 1e-2
    capsys.readouterr()
    assert main([f"checkpoint={checkpoint}", f"output={tmp_path / 'x'}", "format=zip"]) == 2
    assert "format=zip must be one of hf, peft, quantized" in capsys.readouterr().err
    OmegaConf.save({"policy": policy}, tmp_path / "run" / "config.yaml")
    assert main([f"checkpoint={checkpoint}", f"output={tmp_path / 'x'}", "format=peft"]) == 2
    assert "has no policy.lora.rank above 0, so there are no adapters" in capsys.readouterr().err
