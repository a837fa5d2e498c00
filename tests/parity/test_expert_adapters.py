"""Adapters of experts in every layout: gradients and steps against a plain merged model, checkpoints, and peft."""

import hashlib
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import get_pg_rank, get_pg_size
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor

from megatron_grpo.config.schema import LoraConfig
from megatron_grpo.models.adapter_check import check_adapters
from megatron_grpo.models.hf_weights import iter_adapter_tensors
from megatron_grpo.models.megatron_names import iterate_layers, name_in_model
from megatron_grpo.trainer.hf_export import write_peft_folder
from megatron_grpo.trainer.model.lora import AdaptedGroupedLinear, AdaptedLinear, Adapter
from megatron_grpo.trainer.rank import PolicyRank
from tests.parity.adapters import make_lora_rank
from tests.parity.fused_layers import use_grouped_experts
from tests.parity.on_rank import expect_close, expect_logprobs
from tests.parity.policy_training import hf_loss, make_batch, train_arguments
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import fetch, merge, rank_share, whole_tensors
from tests.support.rare import rare
from tests.support.tiny_models import TinyModel, logprobs_of_logits, make_tiny_model

LORA = LoraConfig(rank=3, alpha=7.0, target_modules=["linear_proj", "linear_fc1", "linear_fc2"])
LAYOUTS = [
    Layout(),
    Layout(data=2, expert=2),
    Layout(tensor=2, sequence=True),
    Layout(tensor=2, sequence=True, expert=2),
    Layout(pipeline=2),
    Layout(expert=2, expert_tensor=2, data=4),
]
MODELS = ("qwen3_moe", "deepseek_v3")
"""Experts alone; and a dense layer, a layer with shared experts, and latent attention."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    folder = tmp_path_factory.mktemp("experts")
    return {name: make_tiny_model(name, folder) for name in (*MODELS, "mixtral")}


def iterate_adapters(rank: PolicyRank) -> Iterator[tuple[str, Adapter]]:
    """The rank's adapters by the layer's name in the whole model."""
    for chunk in rank.chunks:
        experts = 0 if rank.shape.experts is None else rank.shape.experts.count
        first = chunk.pg_collection.ep.rank() * experts // chunk.pg_collection.ep.size()
        for layer, _, layer_module in iterate_layers(chunk):
            for name, module in layer_module.named_modules():
                if isinstance(module, (AdaptedLinear, AdaptedGroupedLinear)):
                    for number, adapter in enumerate(module.adapters):
                        yield f"{layer}.{name_in_model(name, first, number)}", adapter


def fill_b(rank: PolicyRank) -> None:
    """Put numbers into B that depend on the layer's name alone; a rank takes its rows of the whole matrix."""
    for name, adapter in iterate_adapters(rank):
        splits = adapter.split_matrix == "lora_b"
        size, part = (get_pg_size(adapter.tp_group), get_pg_rank(adapter.tp_group)) if splits else (1, 0)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        full_matrix = 0.3 * torch.randn(
            len(adapter.lora_b) * size, LORA.rank, generator=torch.Generator().manual_seed(seed)
        )
        matrices = full_matrix.chunk(2) if "fc1" in name else (full_matrix,)
        adapter.lora_b.data.copy_(torch.cat([matrix.chunk(size)[part] for matrix in matrices]))


def whole_adapters(rank: PolicyRank, value: Any = Tensor.detach) -> dict[str, Tensor]:
    """A and B, or what `value` makes of them, under peft's names without its prefix."""
    tensors = iter_adapter_tensors(rank.gather_chunks(), rank.shape, value)
    return {name: tensor.clone() for name, tensor in tensors if tensor is not None}


class MergedModel:
    """The model in transformers with the weights W + (alpha / rank) B A, float64; A and B are leaves."""

    def __init__(self, model: TinyModel, adapters: dict[str, Tensor]) -> None:
        self.model = model.load().double()
        self.model.set_experts_implementation("eager")  # torch's grouped products take no float64
        self.leaves = {name: tensor.double().requires_grad_() for name, tensor in adapters.items()}
        self.weights = dict(self.model.named_parameters())

    def merge(self) -> dict[str, Tensor]:
        """All weights that adapters change, under the names in memory."""
        stacked: dict[str, dict[int, dict[str, Tensor]]] = {}
        weights: dict[str, Tensor] = {}
        for name in self.leaves:
            if not name.endswith(".lora_A.weight"):
                continue
            matrix = name.removesuffix(".lora_A.weight")
            added = self.leaves[f"{matrix}.lora_B.weight"] @ self.leaves[name] * (LORA.alpha / LORA.rank)
            layer, is_expert, rest = matrix.partition(".experts.")
            if is_expert:
                number, _, part = rest.partition(".")
                stacked.setdefault(f"{layer}.experts", {}).setdefault(int(number), {})[part] = added
            else:
                weights[f"{matrix}.weight"] = self.weights[f"{matrix}.weight"] + added
        for layer, experts in stacked.items():
            gate_up = [torch.cat([parts["gate_proj"], parts["up_proj"]]) for _, parts in sorted(experts.items())]
            down = [parts["down_proj"] for _, parts in sorted(experts.items())]
            for part, values in (("gate_up_proj", gate_up), ("down_proj", down)):
                weights[f"{layer}.{part}"] = self.weights[f"{layer}.{part}"] + torch.stack(values)
        return weights

    def __call__(self, token_ids: Tensor, **options: Any) -> Any:
        return torch.func.functional_call(self.model, self.merge(), (token_ids,), options)


def gradients_on_rank(
    layout: Layout, model: TinyModel, is_grouped: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor], float, list[str]]:
    """A and B, their gradients, the norm of the whole gradient, and faults of published weights."""
    with use_grouped_experts(is_grouped):
        rank = make_lora_rank(layout, model, LORA, distributed=False)
    modules = [module for chunk in rank.chunks for module in chunk.modules()]
    has_experts = any(isinstance(module, MoELayer) for module in modules)  # some stage may have none
    assert any(isinstance(module, AdaptedGroupedLinear) for module in modules) == (is_grouped and has_experts)
    fill_b(rank)
    share, microbatches, loss_fn, counts = train_arguments(layout)
    rank.compute_gradients(fetch(rank, share, loss_fn), microbatches, loss_fn, counts)
    faults = check_adapters(rank.gather_chunks(), rank.shape).faults
    gradients = whole_adapters(rank, attrgetter("main_grad"))
    return whole_adapters(rank), gradients, rank.optimizer.compute_grad_norm(), faults


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_grouped", [False, True], ids=["single", "grouped"])
@pytest.mark.parametrize("layout", [LAYOUTS[3], *rare([*LAYOUTS[:3], *LAYOUTS[4:]])], ids=str)
def test_gradients_equal_those_through_merged_weights(
    layout: Layout, is_grouped: bool, name: str, models: dict[str, TinyModel]
) -> None:
    by_rank = run_on_ranks(layout, gradients_on_rank, models[name], is_grouped)
    values, gradients = (merge([result[part] for result in by_rank]) for part in (0, 1))
    assert any(".experts.3." in key for key in values)
    assert any("shared_experts" in key for key in values) == (name == "deepseek_v3")
    oracle = MergedModel(models[name], values)
    hf_loss(oracle).backward()
    squares, shared = 0.0, {}
    for key, leaf in oracle.leaves.items():
        if key.endswith("lora_A.weight"):  # merged matrices share A
            shared_key = key.replace("gate_proj", "fc1").replace("up_proj", "fc1")
            shared[shared_key] = shared.get(shared_key, 0) + leaf.grad
            continue
        error = (gradients[key].double() - leaf.grad).norm() / leaf.grad.norm()
        assert error < 1e-4, f"{key}: relative error {error:.1e}"
        squares += float(leaf.grad.square().sum())
    for shared_key, expected in shared.items():
        error = (gradients[shared_key.replace("fc1", "gate_proj")].double() - expected).norm() / expected.norm()
        assert error < 1e-4, f"{shared_key}: relative error {error:.1e}"
        squares += float(expected.square().sum())
    assert [result[2] for result in by_rank] == pytest.approx([squares**0.5] * layout.ranks, rel=1e-4)
    assert not any(faults for _, _, _, faults in by_rank)


def steps_on_rank(
    layout: Layout, model: TinyModel, is_grouped: bool, folder: Path | None, loads: bool
) -> dict[str, dict[str, Tensor] | dict[int, Tensor]]:
    """Two steps and a checkpoint, or the checkpoint; then a step. Weights, and log-probabilities of both policies."""
    with use_grouped_experts(is_grouped):
        rank = make_lora_rank(layout, model, LORA)
    results: dict[str, Any] = {"start": whole_adapters(rank)}
    if loads:
        rank.checkpoint.load(str(folder))
    else:
        for _ in range(2):
            rank.train(*train_arguments(layout))
        if folder is not None:
            rank.checkpoint.save(str(folder))
    rank.train(*train_arguments(layout))
    share, microbatches, order = rank_share(make_batch(), layout)
    batch = fetch(rank, share, None)
    reference = rank.compute_reference_logprobs(batch, microbatches)
    if reference is not None:
        results["reference"] = dict(zip(order, reference.split(batch.lengths), strict=True))
    return results | {"end": whole_adapters(rank), "weights": whole_tensors(rank)}


@pytest.mark.parametrize("layout", [LAYOUTS[4], *rare([LAYOUTS[1], LAYOUTS[3], LAYOUTS[5]])], ids=str)
def test_steps_are_those_of_one_rank_and_the_reference_is_the_base_model(
    layout: Layout, models: dict[str, TinyModel], alone: list[dict[str, Any]]
) -> None:
    """The distributed optimizer shares experts and other adapters out; all layouts start with the same A."""
    model = models["deepseek_v3"]
    by_rank = run_on_ranks(layout, steps_on_rank, model, layout.expert == 2, None, False)
    for key, tensors in (("start", alone[0]["start"]), ("end", alone[0]["end"]), ("weights", alone[0]["weights"])):
        actual = merge([result[key] for result in by_rank])
        assert actual.keys() == tensors.keys()
        expect_close(actual, tensors, *((0.0, 0.0) if key == "start" else ()))
    expect_logprobs([result.get("reference", {}) for result in by_rank], model.load(), 3e-5)


@pytest.fixture(scope="module")
def alone(models: dict[str, TinyModel]) -> list[dict[str, Any]]:
    """Three steps on one rank."""
    results = run_on_ranks(Layout(), steps_on_rank, models["deepseek_v3"], False, None, False)
    base = models["deepseek_v3"].tensors()
    changed = {name for name, tensor in results[0]["weights"].items() if not torch.equal(tensor, base[name])}
    assert {f"{name.rpartition('.lora_')[0]}.weight" for name in results[0]["end"]} == changed
    return results


def test_a_checkpoint_continues_in_every_layout_and_form_of_experts(
    models: dict[str, TinyModel], alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    model, folder = models["deepseek_v3"], tmp_path / "checkpoint"
    folder.mkdir()
    written_by = Layout(tensor=2, sequence=True, expert=2)
    run_on_ranks(written_by, steps_on_rank, model, True, folder, False)
    names = torch.distributed.checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    weights = [name for name in names if name.startswith("decoder.")]
    assert any(".experts.experts.linear_fc1.lora_b" in name for name in weights)
    assert all(name.endswith(("lora_a", "lora_b")) for name in weights)
    for layout, is_grouped in ((written_by, True), (Layout(), False), (LAYOUTS[5], False), (Layout(pipeline=2), True)):
        results = run_on_ranks(layout, steps_on_rank, model, is_grouped, folder, True)
        actual = merge([values["end"] for values in results])
        expect_close(actual, alone[0]["end"], where=str(layout))


def export_on_rank(layout: Layout, model: TinyModel, folder: Path) -> dict[str, Tensor]:
    """Adapters that have moved, in a folder for peft; returns the merged model."""
    rank = make_lora_rank(layout, model, LORA)
    fill_b(rank)
    write_peft_folder(rank.gather_chunks(), rank.shape, LORA, str(model.path), folder)
    return whole_tensors(rank)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_peft_loads_what_is_exported(name: str, models: dict[str, TinyModel], tmp_path: Path) -> None:
    """Peft joins the experts' matrices, which are apart in the folder, as transformers does."""
    model = models[name]
    (weights,) = run_on_ranks(Layout(), export_on_rank, model, tmp_path / "peft")
    loaded = PeftModel.from_pretrained(model.load(), str(tmp_path / "peft"))
    (tmp_path / "merged").mkdir()
    save_file(weights, tmp_path / "merged" / "model.safetensors", {"format": "pt"})
    copy(model.path / "config.json", tmp_path / "merged")
    merged_model = TinyModel("merged", tmp_path / "merged")
    token_ids = make_batch().fields.token_ids.long().split(make_batch().lengths)[3][None]
    with torch.no_grad():
        actual = logprobs_of_logits(loaded(token_ids).logits, token_ids)
    torch.testing.assert_close(actual, merged_model.logprobs(token_ids), atol=2e-5, rtol=0)
    assert (actual - model.logprobs(token_ids)).abs().max() > 1e-2
