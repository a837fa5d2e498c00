"""transformers made to send tokens through given experts: what replayed routing is compared with."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHTopkRouter
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextTopKRouter

from megatron_grpo.verification.hf_model import read_routing

SIGMOIDS = (DeepseekV3TopkRouter, Glm4MoeTopkRouter, MiniMaxM2TopKRouter, NemotronHTopkRouter)
SOFTMAXES = (Qwen3MoeTopKRouter, GptOssTopKRouter, Qwen3_5MoeTopKRouter, Qwen3NextTopKRouter)
GATES = (Llama4Router, Gemma4TextRouter, *SOFTMAXES, *SIGMOIDS)


def gates(model: PreTrainedModel) -> list[nn.Module]:
    """The routers of a model, layer by layer."""
    return [module for module in model.modules() if isinstance(module, GATES)]


@torch.no_grad()
def own_routing(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """The experts that a model chooses: [tokens] of one sequence to [tokens, layers with experts, top_k], int64.

    Within `forced`, what each router would choose where the layers before it are forced.
    """
    chosen: list[Tensor] = []
    hooks = [
        gate.register_forward_hook(lambda gate, _, output: chosen.append(read_routing(gate, output)[2]), prepend=True)
        for gate in gates(model)
    ]
    model(token_ids.long()[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1)


@contextmanager
def forced(model: PreTrainedModel, routed: Tensor) -> Iterator[None]:
    """While open, the model sends the tokens of one sequence through these experts.

    Args:
        model: with `GATES`.
        routed: [tokens, layers with experts, top_k], integers; -1 in all of a token's: it chooses itself.
    """
    hooks = []
    for layer, gate in enumerate(gates(model)):
        hooks.append(gate.register_forward_hook(_Forcing(routed[:, layer].long())))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Forcing:
    """Replaces what a gate chose by given experts, [tokens, top_k], int64, and weighs those as the gate would have."""

    def __init__(self, experts: Tensor) -> None:
        self._experts = experts

    def __call__(self, gate: Any, _inputs: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits, _, preferred = read_routing(gate, output)
        experts = torch.where(self._experts < 0, preferred, self._experts)
        if isinstance(gate, Llama4Router):
            return torch.zeros_like(logits).scatter(1, experts, logits.gather(1, experts).sigmoid()), logits
        if isinstance(gate, Gemma4TextRouter):
            weights = output[0].gather(1, experts)
            return output[0], weights / weights.sum(1, keepdim=True) * gate.per_expert_scale[experts], experts
        sigmoid = isinstance(gate, SIGMOIDS)
        scores = (logits.sigmoid() if sigmoid else logits.softmax(-1)).gather(1, experts)
        if getattr(gate, "norm_topk_prob", True):  # some always do, and have no factor either
            scores = scores / (scores.sum(-1, keepdim=True) + (1e-20 if sigmoid else 0.0))
        return logits, scores * getattr(gate, "routed_scaling_factor", 1.0), experts
