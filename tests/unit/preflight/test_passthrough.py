"""Fields that are passed on to Megatron-Core and vLLM, and settings of speed and memory: what is refused at start."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from megatron_grpo.config.compose import compose_typed
from megatron_grpo.config.passthrough import OWNED
from megatron_grpo.preflight.load import check_overrides, compose_config
from tests.support.config_problems import problems_of

ARGS = "generation.engine_args"
MEGATRON: dict[str, dict[str, tuple[Any, str]]] = {
    "policy.megatron": {
        "atention_softmax_in_fp32": (False, "did you mean policy.megatron.attention_softmax_in_fp32?"),
        "zzz": (1, "is not a field of Megatron-Core's TransformerConfig"),
        "_cpu_offloading_context": (1, "is not a field of Megatron-Core's TransformerConfig"),
        "attention_softmax_in_fp32": (3, "must be true or false"),
        "cuda_graph_warmup_steps": (True, "must be int"),
        "moe_router_dtype": ("fp33", "must be one of fp32, fp64 or null"),
        "attention_backend": ("fast", "must be one of flash, fused, unfused, local, auto"),
        "timers": ("f", "takes a Optional[Callable], which a configuration cannot hold"),
        "cpu_offloading": (True, ""),
    },
    "policy.ddp": {
        "bucket_sise": (3, "did you mean policy.ddp.bucket_size?"),
        "bucket_size": ("many", "must be int or null"),
        "grad_reduce_in_fp32": (True, ""),
    },
    "policy.megatron_optimizer": {
        "exp_avg_dtype": ("half", "must be one of float32, bfloat16, float16"),
        "main_grads_dtype": ("bfloat16", ""),
    },
}
"""By section and field: a value, and what is said of it; "": nothing."""
VLLM: dict[str, dict[str, tuple[Any, str]]] = {
    ARGS: {
        "block_sise": (16, f"did you mean {ARGS}.block_size?"),
        "zzz": (1, "is not an argument of the installed vLLM"),
        "_api_process_count": (1, "is not an argument of the installed vLLM"),
        "block_size": ("many", "must be int or null"),
        "num_gpu_blocks_override": (True, "must be int or null"),
        "swa_bounded_replay": (1, "must be true or false"),
        "kv_cache_dtype": ("fp9", "must be one of auto, float16, bfloat16, fp8"),
        "attention_backend": ("FAST", "must be one of FLASH_ATTN, "),
        "cudagraph_capture_sizes": ([1, "x"], "must be list of int or null"),
        "compilation_config": ({"mod": 3}, "has mod, which is not a setting of it; did you mean mode?"),
        "profiler_config": (3, "must be a mapping"),
        "cpu_offload_gb": (1, ""),
        "structured_outputs_config": ({"backend": "guidance"}, ""),
        "logits_processors": (["package.module.Processor"], ""),
        "quantization_config": ({"any": 1}, ""),
        "max_cudagraph_capture_size": (None, ""),
    }
}


def test_fields_against_the_libraries_own_classes() -> None:
    from megatron_grpo.generation.engine_arguments import find_passed_field_problems as vllm_problems
    from megatron_grpo.trainer.model.megatron_config import find_passed_field_problems as megatron_problems

    for table, problems_in in ((MEGATRON, megatron_problems), (VLLM, vllm_problems)):
        values = {section: {name: value for name, (value, _) in fields.items()} for section, fields in table.items()}
        field_problems = {problem.key: problem.text for problem in problems_in(values)}
        expected = {
            f"{section}.{name}": text for section, fields in table.items() for name, (_, text) in fields.items()
        }
        assert field_problems.keys() == {key for key, text in expected.items() if text}
        for key, text in field_problems.items():
            assert expected[key] in text, key


def test_what_the_run_sets_itself_is_a_field_of_the_libraries() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    kinds: list[type] = [TransformerConfig, DistributedDataParallelConfig, OptimizerConfig, AsyncEngineArgs]
    for (section, owned), kind in zip(OWNED.items(), kinds, strict=True):
        assert not owned.keys() - kind.__dataclass_fields__.keys(), section  # type: ignore[attr-defined]


def test_a_wrong_field_is_refused_at_start_and_a_library_that_is_missing_is_named(
    base_overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def run(command: list[str], **keywords: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, f"a line of the library\n{json.dumps([['a=1', 'is wrong']])}\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert problems_of([*base_overrides, f"{ARGS}.block_size=16"]) == {"a=1": "is wrong"}
    assert [command[-1].count("generation.engine_arguments") for command in commands] == [1]
    monkeypatch.setattr(
        subprocess, "run", lambda command, **keywords: subprocess.CompletedProcess(command, 1, "", "Error: why")
    )
    text = problems_of([*base_overrides, f"{ARGS}.block_size=16"])[f"{ARGS}.block_size=16"]
    assert text == "cannot be checked: vLLM cannot be imported here: Error: why"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = problems_of([*base_overrides, "policy.ddp.bucket_size=16"])["policy.ddp.bucket_size=16"]
    assert text == "cannot be checked: Megatron-Core is not installed here"


@pytest.mark.parametrize("form", ["{}", "+{}", "++{}"])
def test_fields_are_given_as_any_other_key(
    base_overrides: list[str], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form != "{}":  # the form is read before any library is asked
        answer = subprocess.CompletedProcess([], 0, "[]\n")
        monkeypatch.setattr(subprocess, "run", lambda command, **keywords: answer)
    fields = ["policy.megatron.attention_softmax_in_fp32=false", f"{ARGS}.compilation_config={{cudagraph_mode: NONE}}"]
    config = compose_config([*base_overrides, *(form.format(field) for field in fields)])
    assert config.policy.megatron == {"attention_softmax_in_fp32": False}
    assert config.generation.engine_args == {"compilation_config": {"cudagraph_mode": "NONE"}}
    assert config.policy.ddp == {}


def test_no_field_passed_on_starts_no_process(base_overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *command, **keywords: pytest.fail("a process"))
    assert check_overrides(base_overrides).problems == []


def test_composing_alone_leaves_fields_as_they_are(base_overrides: list[str]) -> None:
    composed = compose_typed([*base_overrides, "policy.megatron.nonsense=1"])
    assert composed.problems == []
    assert composed.values["policy"]["megatron"] == {"nonsense": 1}
