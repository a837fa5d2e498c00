"""Fields that are passed on to Megatron-Core, and settings of speed and memory: what is refused before a start."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from megatron_grpo.config.compose import compose_typed
from megatron_grpo.preflight.load import check_overrides, compose_config
from megatron_grpo.preflight.passthrough import CLASSES, megatron_fields
from megatron_grpo.preflight.passthrough import MEGATRON_OWNED as OWNED
from tests.support.config_problems import problems_of


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("policy.megatron.atention_softmax_in_fp32=false", "did you mean policy.megatron.attention_softmax_in_fp32?"),
        ("policy.megatron.zzz=1", "is no field of Megatron-Core's TransformerConfig"),
        ("policy.megatron._cpu_offloading_context=1", "is no field of Megatron-Core's TransformerConfig"),
        ("policy.megatron.attention_softmax_in_fp32=3", "must be true or false"),
        ("policy.megatron.cuda_graph_warmup_steps=true", "must be int"),
        ("policy.megatron.moe_router_dtype=fp33", "must be one of fp32, fp64 or null"),
        ("policy.megatron.attention_backend=fast", "must be one of flash, fused, unfused, local, auto"),
        (
            "policy.megatron.timers=f",
            "takes a Optional[Callable], which a configuration cannot hold",
        ),
        ("policy.megatron.num_layers=2", "is set by the run itself: comes from the model's config.json"),
        ("policy.megatron.tensor_model_parallel_size=2", "give policy.parallel.tensor"),
        ("policy.ddp.bucket_sise=3", "did you mean policy.ddp.bucket_size?"),
        ("policy.ddp.bucket_size=many", "must be int or null"),
        ("policy.ddp.use_distributed_optimizer=true", "give policy.optimizer.distributed"),
        ("policy.megatron_optimizer.lr=1.0", "give policy.optimizer.lr"),
        ("policy.megatron_optimizer.exp_avg_dtype=half", "must be one of float32, bfloat16, float16"),
        ("policy.recompute_modules=[mlp,mlp]", "names a module twice"),
        ("policy.recompute_modules=[moe]", "the model has no experts; leave out moe"),
        ("policy.recompute_modules=[layernorm]", "only by Transformer Engine"),
        ("policy.recompute_modules=[attention]", "is an element of what must be list of one of core_attn, mlp"),
        ("policy.optimizer.cpu_offload=0.5", "without GPUs everything is in host memory already"),
        ("policy.optimizer.precision_aware=true", "needs GPUs"),
        ("policy.gradient_accumulation_fusion=true", "needs GPUs"),
        ("policy.overlap_param_gather=true", "needs policy.overlap_grad_reduce=true"),
    ],
)
def test_refused_before_anything_starts(given: list[str], override: str, text: str) -> None:
    ((subject, message),) = problems_of([*given, override]).items()
    assert subject.startswith(override.partition("=")[0])
    assert text in message


@pytest.mark.parametrize("form", ["{}", "+{}", "++{}"])
def test_fields_are_given_as_any_other_key(given: list[str], form: str) -> None:
    fields = ["policy.megatron.attention_softmax_in_fp32=false", "policy.megatron_optimizer.exp_avg_dtype=bfloat16"]
    policy = compose_config([*given, *(form.format(one) for one in fields)]).policy
    assert policy.megatron == {"attention_softmax_in_fp32": False}
    assert policy.megatron_optimizer == {"exp_avg_dtype": "bfloat16"}
    assert policy.ddp == {}


def test_a_whole_section_of_fields_and_the_value_models(given: list[str]) -> None:
    config = compose_config([*given, "algorithm=ppo", "policy.ddp={bucket_size: 4096}"])
    assert config.value_model is not None
    assert config.value_model.ddp == {"bucket_size": 4096}
    assert check_overrides([*given, "policy.ddp.bucket_size=4096"]).problems == []


def test_recomputing_everything_and_something_is_refused(given: list[str]) -> None:
    overrides = [*given, "policy.recompute_modules=[mlp]", "policy.activation_checkpointing=true"]
    assert "choose one of them" in problems_of(overrides)["policy.recompute_modules=[mlp]"]


def test_what_the_run_sets_itself_is_a_field_of_megatron_core() -> None:
    for section, owned in OWNED.items():
        assert not owned.keys() - megatron_fields(*CLASSES[section]).keys(), section


def test_fields_read_from_the_source_are_those_of_the_classes() -> None:
    """Against the classes themselves, in a process of its own: they import torch."""
    names: dict[str, Any] = {section: sorted(megatron_fields(*CLASSES[section])) for section in CLASSES}
    code = "import dataclasses, importlib\n" + "\n".join(
        f"kind = getattr(importlib.import_module('megatron.core.{module}'), '{name}')\n"
        f"assert sorted(f.name for f in dataclasses.fields(kind)) == {names[section]}, '{name}'"
        for section, (module, name) in CLASSES.items()
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_checking_fields_imports_no_torch(given: list[str]) -> None:
    arguments = [*given, "policy.megatron.attention_softmax_in_fp32=false"]
    code = (
        f"import sys; from megatron_grpo.preflight.load import compose_config; compose_config({arguments});"
        "assert not {'torch', 'megatron.core'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_composing_alone_leaves_fields_as_they_are(given: list[str]) -> None:
    composed = compose_typed([*given, "policy.megatron.nonsense=1"])
    assert composed.problems == []
    assert composed.values["policy"]["megatron"] == {"nonsense": 1}
