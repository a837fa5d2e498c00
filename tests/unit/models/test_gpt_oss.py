"""gpt-oss: the released config.json, and attention with sinks against its formula."""

import json
from typing import Any

import pytest
import torch

from megatron_grpo.models.families import measure_tensors, read_model_shape
from megatron_grpo.trainer.model.attention import _attend_with_sinks
from tests.support.hf_configs import config_folder

RELEASED: dict[str, Any] = json.loads((config_folder("openai/gpt-oss-20b") / "config.json").read_text())


@pytest.mark.parametrize(("name", "layers", "experts"), [("20b", 24, 32), ("120b", 36, 128)])
def test_released_models(name: str, layers: int, experts: int) -> None:
    shape = read_model_shape(config_folder(f"openai/gpt-oss-{name}"))
    assert shape.experts is not None
    assert (shape.layers, shape.experts.count, shape.experts.top_k, shape.head_dim) == (layers, experts, 4, 64)
    assert (shape.window, shape.windowed) == (128, (True, False) * (layers // 2))
    assert shape.softmax_scale == pytest.approx(64**-0.5 * 1.3465735902799727**2)
    assert shape.fits_transformer_engine
    tensors = measure_tensors(shape)
    assert tensors["model.layers.0.mlp.experts.gate_up_proj"] == (experts, 2880, 5760)
    assert tensors["model.layers.0.self_attn.sinks"] == (64,)


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize(("heads", "groups", "width"), [(8, 2, 16), (3, 1, 5), (5, 5, 4)])
def test_a_sink_takes_a_share_of_attention(heads: int, groups: int, width: int, *, is_masked: bool) -> None:
    """softmax over [scores, sink], the sink's column dropped; gradients of all four too."""
    torch.manual_seed(0)
    tokens, scale = 7, 0.37
    queries = torch.randn(2, heads, tokens, width, dtype=torch.float64, requires_grad=True)
    keys, values = (torch.randn(2, groups, tokens, width, dtype=torch.float64, requires_grad=True) for _ in range(2))
    sinks = torch.randn(heads, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if is_masked:
        mask = mask & torch.ones(tokens, tokens, dtype=torch.bool).triu(-2)
    actual = _attend_with_sinks(sinks, queries, keys, values, mask[None, None] if is_masked else None, scale)
    every_key, every_value = (tensor.repeat_interleave(heads // groups, dim=1) for tensor in (keys, values))
    scores = (queries @ every_key.transpose(2, 3) * scale).masked_fill(~mask, -torch.inf)
    column = sinks.view(1, heads, 1, 1).expand(2, heads, tokens, 1)
    expected = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1] @ every_value
    torch.testing.assert_close(actual, expected)
    weights, inputs = torch.randn_like(expected), (sinks, queries, keys, values)
    gradients = (torch.autograd.grad((one * weights).sum(), inputs) for one in (actual, expected))
    torch.testing.assert_close(*gradients)
