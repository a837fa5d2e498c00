"""vLLM's processes load the run's tokenizer, and its detokenizer finds stop strings with special tokens."""

import queue
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from megatron_grpo.batch.generation_requests import GenerationRequest, SamplingSettings
from megatron_grpo.config.errors import RunError
from megatron_grpo.data.tokenizer import load_tokenizer
from megatron_grpo.generation.vllm_plugin import require_same_tokenizer, wake_paused
from megatron_grpo.generation.vllm_requests import make_sampling_params
from tests.support.foreign_tokenizers import byte_level, deepseek_r1_distill, save_folder

TEXT = "the 2023  cats\n in the hat"

# vLLM's registry is changed for the whole process, so a process of its own looks at it.
_LOADS = """
import sys
from megatron_grpo.generation.vllm_plugin import register
register()
from vllm.tokenizers.registry import get_tokenizer
tokenizer = get_tokenizer(sys.argv[1], tokenizer_mode="hf")
print(type(tokenizer).__name__, tokenizer.truncation_side, tokenizer.max_token_id)
print(tokenizer.encode(sys.argv[2], add_special_tokens=False))
"""


@pytest.mark.slow
def test_processes_of_engines_and_servers_load_the_tokenizer_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = deepseek_r1_distill(tmp_path / "model")
    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    monkeypatch.setenv("MEGATRON_GRPO_SERVER", "1")
    command = [sys.executable, "-c", _LOADS, str(folder), TEXT]
    kind, ids = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-2:]
    assert kind.split() == ["CachedTokenizersBackend", "left", str(core.get_vocab_size() - 1)]
    assert ids == str(core.encode(TEXT, add_special_tokens=False).ids)


def test_another_tokenizer_in_vllm_ends_the_start(tmp_path: Path) -> None:
    folder = deepseek_r1_distill(tmp_path / "model")
    ours = load_tokenizer(folder)
    require_same_tokenizer(load_tokenizer(folder), ours)
    with pytest.raises(RunError, match=r"has another tokenizer .LlamaTokenizer. for this model than the run"):
        require_same_tokenizer(AutoTokenizer.from_pretrained(folder), ours)


@pytest.mark.parametrize("stop", ["a<|im_end|>", "<|im_end|>\n", "b\n"])
def test_stop_strings_with_special_tokens_are_found(stop: str, tmp_path: Path) -> None:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    core = byte_level(["<|endoftext|>", "<|im_end|>"])
    tokenizer = load_tokenizer(save_folder(tmp_path, core, "qwen2", "Qwen2Tokenizer", eos_token="<|endoftext|>"))
    prompt = np.array(core.encode("Hi").ids, dtype=np.int32)
    request = GenerationRequest(prompt_ids=prompt, seed=0, max_new_tokens=16)
    parameters = make_sampling_params(request, SamplingSettings(max_new_tokens=16, stop_strings=(stop,)), 64)
    fields = dict.fromkeys(EngineCoreRequest.__struct_fields__)
    fields |= {"request_id": "r", "prompt_token_ids": prompt.tolist(), "sampling_params": parameters}
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, EngineCoreRequest(**fields))
    ids = core.encode("a<|im_end|>\nb\nc").ids
    stops = [detokenizer.update([token], stop_terminated=False) for token in ids]
    assert [name for name in stops if name] == [stop]


def test_a_core_that_wakes_takes_no_step_before_it_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own call goes on with responses in flight, whose next token the canary has not allowed."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState

    monkeypatch.setattr(EngineCore, "wake_paused", wake_paused, raising=False)
    states = [PauseState.PAUSED_ALL]
    woken: list[str] = []
    core: Any = EngineCoreProc.__new__(EngineCoreProc)
    core.scheduler = SimpleNamespace(
        set_pause_state=states.append, has_requests=lambda: states[-1] is not PauseState.PAUSED_ALL
    )
    core.model_executor = SimpleNamespace(wake_up=woken.extend, is_sleeping=False, collective_rpc=lambda _: None)
    core.engines_running, core.batch_queue, core.output_queue = False, None, queue.Queue()
    core.shutdown_state = EngineShutdownState.RUNNING
    core._handle_client_request(EngineCoreRequestType.UTILITY, (0, 1, "wake_up", [["kv_cache"]]))
    assert core.has_work(), "a forward pass comes next"
    core._handle_client_request(EngineCoreRequestType.UTILITY, (0, 2, "wake_paused", [["kv_cache"]]))
    assert not core.has_work()
    assert states[-2:] == [PauseState.UNPAUSED, PauseState.PAUSED_ALL]
    assert woken == ["kv_cache"] * 2
    answers = [core.output_queue.get()[1].utility_output for _ in range(2)]
    assert [answer.failure_message for answer in answers] == [None, None]
