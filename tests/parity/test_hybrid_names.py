"""A HybridModel of Megatron-Core, whose form is two constants and the halves of layers, holds the same weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.models import megatron_names
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.hf_weights import iter_hf_tensors, load_hf_weights
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_map import pad_vocab
from megatron_grpo.platform.device import detect_platform
from megatron_grpo.trainer.hidden_states import _iter_points
from megatron_grpo.trainer.model.attention import RotaryAtPositions
from megatron_grpo.trainer.model.build import build_model
from megatron_grpo.trainer.model.experts import DecoderLayer, mark_experts
from megatron_grpo.trainer.model.layer_spec import TorchModules, build_mixer, build_mlp
from megatron_grpo.trainer.model.layers import RMSNorm
from megatron_grpo.trainer.model.megatron_config import build_transformer_config
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.test_logprobs import megatron_logits, microbatches
from tests.support.tiny_models import TinyModel, logprobs_of_logits, make_tiny_model

SYMBOLS = {"attention": "*", "latent": "+", "dense": "-", "experts": "E"}
"""Of kinds of layers, in Megatron-Core's patterns of hybrid stacks."""


def build_hybrid(config: PolicyConfig, shape: ModelShape) -> HybridModel:
    """The rank's shard, of the same mixers and feed-forward networks as those of `build_model`."""
    settings = replace(build_transformer_config(config, shape, detect_platform()), is_hybrid_model=True)
    modules, layers = TorchModules(), dict[str, ModuleSpec]()
    pattern = []
    for number in range(shape.layers):
        kinds = shape.list_kinds(number)
        mixer, mlp = (next(kind for kind in SYMBOLS if kind in half & kinds) for half in (MIXERS, MLPS))
        pattern.append(SYMBOLS[mixer] + SYMBOLS[mlp])
        parts = TransformerLayerSubmodules(**build_mixer(shape, kinds, modules))
        layers["mla_layer" if mixer == "latent" else "attention_layer"] = ModuleSpec(TransformerLayer, submodules=parts)
        parts, is_dense = TransformerLayerSubmodules(**build_mlp(shape, kinds, modules)), mlp == "dense"
        layer = ModuleSpec(MLPLayer if is_dense else DecoderLayer, submodules=parts)
        layers["mlp_layer" if is_dense else "moe_layer"] = layer
    stages = config.parallel.pipeline
    per_stage = shape.layers // stages
    stack = ModuleSpec(hybrid_block.HybridStack, submodules=hybrid_block.HybridStackSubmodules(**layers))
    model = HybridModel(
        settings,
        stack,
        pad_vocab(shape, config.parallel.tensor),
        shape.max_positions,
        hybrid_layer_pattern="|".join("".join(pattern[n * per_stage : (n + 1) * per_stage]) for n in range(stages)),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=int(shape.rope_theta),
    )
    mark_experts(model)
    model.rotary_pos_emb = RotaryAtPositions(model.rotary_pos_emb)
    return model


MIXERS, MLPS = {"attention", "latent"}, {"dense", "experts"}


def compare_on_rank(layout: Layout, folder: Path) -> tuple[list[Tensor], dict[str, Tensor], list[str], list[str]]:
    """Log-probabilities, exported tensors, and the points of hidden states, beside those of the product's model."""
    shape = read_model_shape(folder)
    config = PolicyConfig(parallel=layout.parallel, precision="float32")
    (product,) = build_model(config, shape)
    points = [name for name, _ in _iter_points(product)]
    form: dict[str, Any] = {"HALVES": (("mixer",), ("mlp",)), "FINAL_NORM": "final_norm"}
    with patch.multiple(megatron_names, **form), patch.object(hybrid_block, "TENorm", RMSNorm):
        model = build_hybrid(config, shape)
        load_hf_weights([model], shape, folder)
        logits = megatron_logits(model, microbatches(), None)
        exported = {name: tensor.clone() for name, tensor in iter_hf_tensors([model], shape) if tensor is not None}
        hybrid_points = [name for name, _ in _iter_points(model)]
    logprobs = [logprobs_of_logits(values, ids) for values, ids in zip(logits, microbatches(), strict=False)]
    return logprobs, exported, points, hybrid_points


@pytest.mark.slow
def test_a_hybrid_stack_holds_the_weights_of_the_same_families(tmp_path: Path) -> None:
    layout = Layout(tensor=2, pipeline=2, sequence=True)
    for name in ("qwen3_tied", "qwen2_tied", "qwen3_moe", "deepseek_v3"):
        tiny: TinyModel = make_tiny_model(name, tmp_path)
        exported: dict[str, Tensor] = {}
        for logprobs, tensors, points, hybrid_points in run_on_ranks(layout, compare_on_rank, tiny.path):
            exported |= tensors
            assert hybrid_points == points
            for ids, actual in zip(microbatches(), logprobs, strict=False):
                torch.testing.assert_close(actual, tiny.logprobs(ids), atol=2e-5, rtol=0)
        stored = tiny.tensors()
        assert exported.keys() == stored.keys()
        assert all(torch.equal(exported[key], tensor) for key, tensor in stored.items())
