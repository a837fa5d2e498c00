"""What of refit.fp8_blocks is refused before anything starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_grpo.config.schema import Config
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.preflight.engine_checks import find_refit_problems
from tests.support.config_problems import SMALL

SHAPE = replace(parse_model_shape(SMALL), hidden=256, head_dim=128, ffn_hidden=512)
"""Eight heads and four key/value heads in four layers."""


def config(**base_overrides: Any) -> Config:
    config = Config()
    config.policy.precision = "bfloat16"
    config.generation.engine_args = {"quantization": "fp8_per_block"}
    config.refit.fp8_blocks = True
    for name, value in base_overrides.items():
        setattr(config.refit, name, value)
    return config


def problems(config: Config) -> list[str]:
    refit_problems = list(find_refit_problems(config, SHAPE))
    assert {problem.subject for problem in refit_problems} <= {"refit.fp8_blocks=True"}
    return [problem.text for problem in refit_problems]


def test_what_fits_is_taken() -> None:
    assert problems(config()) == []
    assert problems(config(fp8_blocks=False, mode="broadcast")) == []
    assert list(find_refit_problems(config(), None)) == []


def test_another_mode_or_another_engine_is_refused_with_what_to_do() -> None:
    assert problems(config(mode="broadcast")) == [
        "refit.mode=broadcast sends tensors as vLLM's loader reads them; use reshard"
    ]
    plain = config()
    plain.generation.engine_args = {}
    [text] = problems(plain)
    assert "+generation.engine_args.quantization=fp8_per_block" in text
    wide = config()
    wide.policy.precision = "float32"
    assert problems(wide) == ["such engines compute in bfloat16; give generation.engine.dtype=bfloat16"]
    wide.generation.engine.dtype = "bfloat16"
    assert problems(wide) == []


def test_a_block_that_two_ranks_share_is_named() -> None:
    settings = config()
    settings.generation.parallel.tensor = 8
    [text] = problems(settings)
    assert "gate_proj.weight on engine ranks: 0 to 64 of (512, 256) (and " in text
    assert text.endswith("use fewer tensor-parallel ranks, or false")
