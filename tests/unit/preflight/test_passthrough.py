"""Fields that are passed on to Megatron-Core and vLLM, and settings of speed and memory: what is refused at start."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from megatron_grpo.config.compose import compose_typed
from megatron_grpo.config.passthrough import OWNED
from megatron_grpo.preflight.load import check_overrides, compose_config
from tests.support.config_problems import problems_of, setting_problems_of

ARGS = "generation.engine_args"
SETTINGS = [
    ("policy.recompute_modules=[mlp,mlp]", "names a module twice"),
    ("policy.recompute_modules=[moe]", "the model has no experts; leave out moe"),
    ("policy.recompute_modules=[layernorm]", "only by Transformer Engine"),
    ("policy.recompute_modules=[attention]", "is an element of what must be list of one of core_attn, mlp"),
    ("policy.optimizer.cpu_offload=0.5", "without GPUs all is in host memory already"),
    ("policy.optimizer.precision_aware=true", "needs GPUs"),
    ("policy.gradient_accumulation_fusion=true", "needs GPUs"),
    ("policy.overlap_param_gather=true", "needs policy.overlap_grad_reduce=true"),
    ("generation.engine.batch_invariant=true", "are for GPUs"),
    ("generation.engine.enable_chunked_prefill=true", "a CPU engine cannot repeat a response"),
    ("generation.engine.max_num_batched_tokens=300", "is less than policy.max_total_sequence_length=2048"),
]
OF_THE_RUN = {
    "policy.megatron.num_layers=2": "is set by the run itself: comes from the model's config.json",
    "policy.megatron.tensor_model_parallel_size=2": "give policy.parallel.tensor",
    "policy.ddp.use_distributed_optimizer=true": "give policy.optimizer.distributed",
    "policy.megatron_optimizer.lr=1.0": "give policy.optimizer.lr",
    f"{ARGS}.model=x": "is set by the run itself: the model and its tokenizer are those of policy.model.path",
    f"{ARGS}.tensor_parallel_size=2": "give generation.parallel.tensor",
    f"{ARGS}.seed=2": "from grpo.seed",
    f"{ARGS}.trust_remote_code=true": "code that comes with a model is never run",
    f"{ARGS}.speculative_config={{method: eagle}}": "give generation.engine.speculative",
}
"""Fields that are passed on but are the run's own, checked together: a process imports each library once."""
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


@pytest.mark.parametrize(("override", "text"), SETTINGS)
def test_refused_before_anything_starts(given: list[str], override: str, text: str) -> None:
    ((subject, message),) = problems_of([*given, override]).items()
    assert subject.startswith(override.partition("=")[0])
    assert text in message


def test_fields_that_are_the_runs_own_are_refused(given: list[str]) -> None:
    problems = problems_of([*given, *OF_THE_RUN])
    assert len(problems) == len(OF_THE_RUN)
    for override, text in OF_THE_RUN.items():
        (message,) = (
            problem for subject, problem in problems.items() if subject.startswith(override.partition("=")[0])
        )
        assert text in message


def test_fields_against_the_libraries_own_classes() -> None:
    from megatron_grpo.generation.engine_arguments import find_passed_field_problems as vllm_problems
    from megatron_grpo.trainer.model.megatron_config import find_passed_field_problems as megatron_problems

    for table, problems_in in ((MEGATRON, megatron_problems), (VLLM, vllm_problems)):
        values = {section: {name: value for name, (value, _) in fields.items()} for section, fields in table.items()}
        found = {problem.key: problem.text for problem in problems_in(values)}
        expected = {
            f"{section}.{name}": text for section, fields in table.items() for name, (_, text) in fields.items()
        }
        assert found.keys() == {key for key, text in expected.items() if text}
        for key, text in found.items():
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
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def run(command: list[str], **others: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, f"a line of the library\n{json.dumps([['a=1', 'is wrong']])}\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert problems_of([*given, f"{ARGS}.block_size=16"]) == {"a=1": "is wrong"}
    assert [command[-1].count("generation.engine_arguments") for command in commands] == [1]
    monkeypatch.setattr(
        subprocess, "run", lambda command, **others: subprocess.CompletedProcess(command, 1, "", "Error: why")
    )
    text = problems_of([*given, f"{ARGS}.block_size=16"])[f"{ARGS}.block_size=16"]
    assert text == "cannot be checked: vLLM cannot be imported here: Error: why"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = problems_of([*given, "policy.ddp.bucket_size=16"])["policy.ddp.bucket_size=16"]
    assert text == "cannot be checked: Megatron-Core is not installed here"


@pytest.mark.parametrize("form", ["{}", "+{}", "++{}"])
def test_fields_are_given_as_any_other_key(given: list[str], form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if form != "{}":  # the form is read before any library is asked
        answer = subprocess.CompletedProcess([], 0, "[]\n")
        monkeypatch.setattr(subprocess, "run", lambda command, **others: answer)
    fields = ["policy.megatron.attention_softmax_in_fp32=false", f"{ARGS}.compilation_config={{cudagraph_mode: NONE}}"]
    config = compose_config([*given, *(form.format(one) for one in fields)])
    assert config.policy.megatron == {"attention_softmax_in_fp32": False}
    assert config.generation.engine_args == {"compilation_config": {"cudagraph_mode": "NONE"}}
    assert config.policy.ddp == {}


def test_a_whole_section_of_fields_and_the_value_models(given: list[str]) -> None:
    config = compose_config([*given, "algorithm=ppo", "policy.ddp={bucket_size: 4096}"])
    assert config.value_model is not None
    assert config.value_model.ddp == {"bucket_size": 4096}


def test_recomputing_everything_and_something_is_refused(given: list[str]) -> None:
    overrides = [*given, "policy.recompute_modules=[mlp]", "policy.activation_checkpointing=true"]
    assert "choose one of them" in problems_of(overrides)["policy.recompute_modules=[mlp]"]


def test_settings_of_gpus(given: list[str]) -> None:
    on_gpus = [*given, "cluster.gpus_per_node=8", "generation.engine.batch_invariant=true"]
    assert compose_config([*on_gpus, "generation.engine.max_num_batched_tokens=300"]).generation.engine.batch_invariant
    unchunked = [*on_gpus, "generation.engine.max_num_batched_tokens=300"]
    (text,) = setting_problems_of([*unchunked, "generation.engine.enable_chunked_prefill=false"]).values()
    assert "prompts are not cut into pieces" in text
    (text,) = setting_problems_of([*on_gpus, "generation.engine.max_num_batched_tokens=255"]).values()
    assert "the 256 responses decoded together" in text


def test_no_field_passed_on_starts_no_process(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *command, **others: pytest.fail("a process"))
    assert check_overrides(given).problems == []


def test_composing_alone_leaves_fields_as_they_are(given: list[str]) -> None:
    composed = compose_typed([*given, "policy.megatron.nonsense=1"])
    assert composed.problems == []
    assert composed.values["policy"]["megatron"] == {"nonsense": 1}
