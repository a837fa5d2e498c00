"""Megatron-Core's gated delta net for packed sequences: on a CPU too, and with results that repeat."""

from __future__ import annotations

import copy
import inspect
import logging
from dataclasses import fields
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common, gdn
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.transformer import ModuleSpec, TransformerConfig
from torch import Tensor

from megatron_grpo.trainer.model.delta_rule import compute_delta_rule, convolve_packed, normalize_vectors

logger = logging.getLogger(__name__)


class DeltaNet(GatedDeltaNet):
    """A gated delta net whose state begins anew with every packed sequence.

    Context-parallel ranks exchange their tokens for heads: each computes whole sequences of its share of the heads, so
    the key heads have to be a multiple of tensor * context.
    """

    def __init__(self, config: TransformerConfig, submodules: GatedDeltaNetSubmodules, **keywords: Any) -> None:
        has_kernels = common.HAVE_FLA and find_spec("fla") is not None and gdn.causal_conv1d is not convolve_packed
        is_dry = config.platform.name == "dry"  # a dry run stands in for the kernels of its GPU
        self._uses_torch = not is_dry and (not has_kernels or config.deterministic_mode)
        if self._uses_torch:
            _use_torch_functions()
        config = copy.copy(config)
        config.deterministic_mode = False  # Megatron-Core's own rule for it refuses packed sequences
        # Adapters and rounding make a linear layer a partial (`layers.apply_mixin`), which Megatron-Core refuses here.
        parts = {field.name: getattr(submodules, field.name) for field in fields(submodules)}
        for name, part in parts.items():
            if isinstance(part, partial):
                parts[name] = ModuleSpec(part.func, params=part.keywords)
        super().__init__(config, GatedDeltaNetSubmodules(**parts), **keywords)
        # In float32, as vLLM has it: the decay is an exponential of an exponential of this number.
        log: Any = torch.nn.Parameter(self.get_parameter("A_log").data.float())
        log.tensor_model_parallel, log.partition_dim, log.partition_stride = True, 0, 1
        self.A_log = log

    def reset_parameters(self) -> None:
        """Draw nothing: all values are loaded."""

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        if self._uses_torch:
            self.gated_delta_rule = compute_delta_rule

    def forward(self, hidden_states: Tensor, *_: Any, packed_seq_params: Any = None, **__: Any) -> Any:
        """Mix the tokens of each sequence: [tokens, 1, hidden], and no bias."""
        ends = packed_seq_params.cu_seqlens_q
        assert ends is not None, "the microbatch was made for a model without delta nets"
        # The torch layers' own sequences have another format.
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
        return super().forward(hidden_states, None, packed_seq_params=packed)

    def _apply_gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        # Not compiled: the norm sums gradients over ranks, and a compiled function may be that of another layout.
        normed: Tensor = inspect.unwrap(GatedDeltaNet._apply_gated_norm)(self, x, gate)
        return normed

    def _resolve_cu_seqlens(self, cu_seqlens_padded: Any, cu_seqlens_actual: Tensor, *_: Any, **__: Any) -> Tensor:
        return cu_seqlens_actual  # Megatron-Core would wait for the GPU to compare it with the number of tokens

    def sharded_state_dict(self, prefix: str = "", *arguments: Any, **keywords: Any) -> dict[str, Any]:
        state: dict[str, Any] = super().sharded_state_dict(prefix, *arguments, **keywords)
        adapter = f"{prefix}in_proj.lora_b"
        if adapter in state:  # its rows are the matrix's, whose sections tensor parallelism cuts one by one
            sections, names = list(self.in_proj_split_sections), self.in_proj_split_names
            state[adapter] = _split_tensor_factory(state[adapter], sections, names, 0)
        return state


@cache
def _use_torch_functions() -> None:
    if not common.HAVE_FLA and torch.cuda.is_available():
        logger.warning("flash-linear-attention is not installed: delta nets fall back to plain torch, which is slower")
    common.HAVE_FLA, common.l2norm, gdn.causal_conv1d = True, normalize_vectors, convolve_packed
