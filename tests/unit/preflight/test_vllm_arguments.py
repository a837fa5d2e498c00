"""Arguments that are passed on to vLLM, and settings of its engines: what is refused before a start."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from megatron_grpo.preflight.load import compose_config
from megatron_grpo.preflight.passthrough import VLLM_OWNED as OWNED
from megatron_grpo.preflight.passthrough import settings_of, vllm_arguments
from tests.support.config_problems import problems_of

ARGS = "generation.engine_args"


@pytest.mark.parametrize(
    ("override", "text"),
    [
        (f"{ARGS}.block_sise=16", f"did you mean {ARGS}.block_size?"),
        (f"{ARGS}.zzz=1", "is no argument of the installed vLLM"),
        (f"{ARGS}._api_process_count=1", "is no argument of the installed vLLM"),
        (f"{ARGS}.block_size=many", "must be int or null"),
        (f"{ARGS}.block_size=true", "must be int or null"),
        (f"{ARGS}.swa_bounded_replay=1", "must be true or false"),
        (f"{ARGS}.kv_cache_dtype=fp9", "must be one of auto, float16, bfloat16, fp8"),
        (f"{ARGS}.attention_backend=FAST", "must be one of FLASH_ATTN, "),
        (f"{ARGS}.cudagraph_capture_sizes=[1,x]", "must be list of int or null"),
        (f"{ARGS}.compilation_config=3", "must be a mapping"),
        (f"{ARGS}.compilation_config={{mod: 3}}", "has mod, which is no setting of it; did you mean mode?"),
        (f"{ARGS}.model=x", "is set by the run itself: the model and its tokenizer are those of policy.model.path"),
        (f"{ARGS}.tensor_parallel_size=2", "give generation.parallel.tensor"),
        (f"{ARGS}.seed=2", "from grpo.seed"),
        (f"{ARGS}.trust_remote_code=true", "code that comes with a model is never run"),
        (f"{ARGS}.speculative_config={{method: eagle}}", "give generation.engine.speculative"),
        ("generation.engine.batch_invariant=true", "are for GPUs"),
        ("generation.engine.enable_chunked_prefill=true", "a CPU engine cannot repeat a response"),
        ("generation.engine.max_num_batched_tokens=300", "is less than policy.max_total_sequence_length=2048"),
    ],
)
def test_refused_before_anything_starts(given: list[str], override: str, text: str) -> None:
    ((subject, message),) = problems_of([*given, override]).items()
    assert subject.startswith(override.partition("=")[0])
    assert text in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 32),
        ("cpu_offload_gb", 1),
        ("kv_cache_dtype", "fp8"),
        ("attention_backend", "FLASH_ATTN"),
        ("structured_outputs_config", {"backend": "guidance"}),
        ("compilation_config", {"cudagraph_mode": "NONE"}),
        ("logits_processors", ["package.module.Processor"]),
        ("block_size", None),
    ],
)
def test_passed_on_as_given(given: list[str], name: str, value: Any) -> None:
    written = "null" if value is None else str(value).replace("'", "")
    assert compose_config([*given, f"{ARGS}.{name}={written}"]).generation.engine_args == {name: value}


def test_settings_of_gpus(given: list[str]) -> None:
    on_gpus = [*given, "cluster.gpus_per_node=8", "generation.engine.batch_invariant=true"]
    assert compose_config([*on_gpus, "generation.engine.max_num_batched_tokens=300"]).generation.engine.batch_invariant
    unchunked = [*on_gpus, "generation.engine.max_num_batched_tokens=300"]
    (text,) = problems_of([*unchunked, "generation.engine.enable_chunked_prefill=false"]).values()
    assert "prompts are not cut into pieces" in text
    (text,) = problems_of([*on_gpus, "generation.engine.max_num_batched_tokens=255"]).values()
    assert "the 256 responses decoded together" in text


def test_what_the_run_sets_itself_is_an_argument_of_vllm() -> None:
    assert not OWNED.keys() - vllm_arguments().keys()


def test_arguments_read_from_the_source_are_those_of_the_class() -> None:
    """Against the classes themselves, in a process of its own: they import torch."""
    names = sorted(vllm_arguments())
    nested = {name: sorted(known) for name in names if (known := settings_of(name)) is not None}
    nested.pop("distributed_executor_backend")  # its classes are no settings
    code = (
        "import dataclasses, typing\n"
        "from vllm.engine.arg_utils import AsyncEngineArgs\n"
        "fields = {f.name: f.type for f in dataclasses.fields(AsyncEngineArgs) if not f.name.startswith('_')}\n"
        f"assert sorted(fields) == {names}\n"
        f"for name, known in {nested}.items():\n"
        "    kinds = [k for k in (fields[name], *typing.get_args(fields[name])) if dataclasses.is_dataclass(k)]\n"
        "    found = {f.name for k in kinds for f in dataclasses.fields(k) if not f.name.startswith('_')}\n"
        "    assert set(known) >= found, (name, found - set(known))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_checking_arguments_imports_no_torch(given: list[str]) -> None:
    arguments = [*given, f"{ARGS}.block_size=16"]
    code = (
        f"import sys; from megatron_grpo.preflight.load import compose_config; compose_config({arguments});"
        "assert not {'torch', 'vllm'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
