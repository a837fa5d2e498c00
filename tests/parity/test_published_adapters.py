"""What leaves a policy with adapters after three steps, to engines and as an exported model, is the merged model.

These tests also run under other versions of Python (`test_other_pythons.py`), with nothing but a runtime environment.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.schema import OptimizerConfig
from megatron_grpo.export import main
from megatron_grpo.models.families import measure_tensors
from megatron_grpo.models.hf_weights import BoundEntry, iter_hf_tensors
from megatron_grpo.models.weight_layouts import split_policy
from megatron_grpo.run.checkpoint_files import write_driver_files
from megatron_grpo.trainer.rank import PolicyRank
from megatron_grpo.weight_sync.boxes import to_slices
from megatron_grpo.weight_sync.file_writer import connect_folder, send_files
from megatron_grpo.weight_sync.pieces import lay_out_pieces, read_ranges, split_messages
from megatron_grpo.weight_sync.shard_sender import ShardSender
from megatron_grpo.weight_sync.transfer_plan import choose_wire_dtypes, plan_messages
from tests.parity.adapters import LORA, MATRICES, adapted_layers, make_lora_rank
from tests.parity.policy_training import train_arguments
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import merge
from tests.support.engine_table import table_boxes
from tests.support.tiny_models import TinyModel

Precision = Literal["float32", "bfloat16"]
LAYOUTS = [Layout(), Layout(tensor=2, sequence=True, pipeline=2)]
BUCKET_BYTES = 4096
BORDERLINE = 2
"""Most elements of a matrix in bfloat16 that the order of sums may change."""


@dataclass
class RecordedLinks:
    """Links that keep the pieces which a rank sends to the only rank of an engine, by tensor."""

    rank: PolicyRank
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Float32; NaN where nothing was sent."""

    def __post_init__(self) -> None:
        shape, config = self.rank.shape, self.rank.config
        dtypes = choose_wire_dtypes(shape, config.precision, fp8_blocks=False)
        sources, engine = split_policy(config.parallel, shape), table_boxes(GenerationParallelConfig(), shape)
        pieces = plan_messages(shape, sources, engine, 1, dtypes, BUCKET_BYTES)
        self.messages = split_messages(pieces[pieces["source"] == dist.get_rank()])
        laid = [lay_out_pieces(message, [getattr(torch, name) for name in dtypes]) for message in self.messages]
        self.packed_pieces, self.sizes = [tensor for tensor, _ in laid], [size for _, size in laid]
        self.is_relayed = [False] * len(self.messages)

    def send(self, fill: Callable[[int, Tensor], None], version: int) -> None:
        tensors = list(measure_tensors(self.rank.shape).items())
        for number, pieces in enumerate(self.messages):
            message = torch.zeros(self.sizes[number], dtype=torch.uint8)
            fill(number, message)
            for piece, packed in zip(pieces, self.packed_pieces[number], strict=True):
                name, shape = tensors[piece["tensor"]]
                full_tensor = self.tensors.setdefault(name, torch.full(shape, torch.nan))
                full_tensor[to_slices(read_ranges(piece))] = packed.view_values(message).float()


def expected_weight(layers: dict[int, Any], bound: BoundEntry) -> Tensor:
    """W + (alpha / rank) B A where the parameter's layer has an adapter, in float64, rounded once."""
    weight, layer = bound.parameter.detach(), layers.get(id(bound.parameter))
    if layer is None:
        return weight
    return (weight.double() + LORA.alpha / LORA.rank * (layer.lora_b.double() @ layer.lora_a.double())).to(weight.dtype)


def publish_on_rank(
    layout: Layout, model: TinyModel, precision: Precision, folder: Path
) -> dict[str, dict[str, Tensor]]:
    """Three steps and a checkpoint: the merged model, and what refits through links and through a folder send."""
    rank = make_lora_rank(layout, model, precision=precision, optimizer=OptimizerConfig(lr=1e-4))
    for _ in range(3):
        rank.train(*train_arguments(layout))
    rank.checkpoint.save(str(folder / "checkpoints" / "step_3" / "megatron"))
    layers = {id(layer.weight): layer for layer in adapted_layers(rank).values()}
    tensors = iter_hf_tensors(rank.gather_chunks(), rank.shape, partial(expected_weight, layers))
    links: Any = RecordedLinks(rank)
    with torch.no_grad():
        ShardSender(rank, split_policy(layout.parallel, rank.shape)[dist.get_rank()], links).send(1)
    refit = folder / "refit"
    refit.mkdir(exist_ok=True)
    connect_folder(rank, refit, BUCKET_BYTES)
    send_files(rank, "000001", True)
    return {
        "expected": {name: tensor.clone() for name, tensor in tensors if tensor is not None},
        "reshard": links.tensors,
    }


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_refit_and_export_publish_the_merged_model(
    layout: Layout, precision: Precision, tiny_models: dict[str, TinyModel], tmp_path: Path
) -> None:
    model, checkpoint = tiny_models["qwen3_tied"], tmp_path / "checkpoints" / "step_3"
    (checkpoint / "megatron").mkdir(parents=True)
    by_rank = run_on_ranks(layout, publish_on_rank, model, precision, tmp_path, timeout_s=400.0)
    expected = merge([rank_tensors["expected"] for rank_tensors in by_rank])
    adapted = {
        f"model.layers.{layer}.{matrix}.weight"
        for layer in range(model.shape.layers)
        for matrices in MATRICES.values()
        for matrix in matrices
    }
    for name, base in model.tensors().items():
        changed = int((expected[name] != base.to(expected[name].dtype)).sum())
        assert changed > 10 * BORDERLINE if name in adapted else changed == 0, (name, changed)
    resharded = {name: torch.full_like(tensor, torch.nan, dtype=torch.float32) for name, tensor in expected.items()}
    for rank_tensors in by_rank:
        for name, part in rank_tensors["reshard"].items():
            resharded[name] = torch.where(part.isnan(), resharded[name], part)
    expect_equal(resharded, expected)
    expect_equal(TinyModel("files", tmp_path / "refit" / "000001").tensors(), expected)
    adapters = {"rank": LORA.rank, "alpha": LORA.alpha, "target_modules": LORA.target_modules}
    policy = {"model": {"path": str(model.path)}, "precision": precision, "lora": adapters}
    OmegaConf.save({"policy": policy}, tmp_path / "config.yaml")
    write_driver_files(
        checkpoint, 3, {"save_state": {"total_steps": 3}, "metrics": {}, "batch_cache": []}, {"epoch": 0}
    )
    assert main([f"checkpoint={checkpoint}", f"output={tmp_path / 'hf'}"]) == 0
    expect_equal(TinyModel("exported", tmp_path / "hf").tensors(), expected)


def expect_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Up to the order of float32 sums, for which few elements of bfloat16 may be rounded to the other side."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor.dtype == torch.float32:
            torch.testing.assert_close(actual[name], tensor, atol=1e-7, rtol=1e-6, msg=name)
        else:
            assert int((actual[name].float() != tensor.float()).sum()) <= BORDERLINE, name
