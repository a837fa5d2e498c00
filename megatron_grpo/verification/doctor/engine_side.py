"""A vLLM engine that loads a folder and computes recorded tokens again: its log-probabilities and hidden states.

The engine runs in a process of its own, `python -m megatron_grpo.verification.doctor.engine_side REQUEST RESULT`,
because vLLM reads environment variables at its start and keeps its memory until its process ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import Config
from megatron_grpo.generation.engine_arguments import add_model_settings
from megatron_grpo.verification.doctor.law import Tokens
from megatron_grpo.verification.hf_model import find_halves

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model is computed in this process, where its layers can be hooked
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "TQDM_DISABLE": "1",
}
_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
_QUOTED_LINES = 5  # of the engine's output, the last ones, in a message


def run_engine_again(config: Config, folder: Path, sequences: Sequence[Tokens]) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute sequences in a new engine of one rank, without CUDA graphs.

    Args:
        config: the run's configuration.
        folder: the weights in Hugging Face format, which vLLM's own loaders read.
        sequences: the tokens.

    Returns:
        Log-probabilities of the chosen tokens at temperature 1 without penalties and filters, [chosen tokens of all
        sequences], float32; and hidden states by point (`verification.doctor.layer_outputs`), [tokens of all
        sequences, width].

    Raises:
        RunError: the engine failed or was not done within generation.timeout_s.
    """
    arguments = {
        "model": str(folder),
        "dtype": config.engine_dtype,
        "max_model_len": max(len(sequence.ids) for sequence in sequences) + 1,
        "max_num_batched_tokens": max(2048, max(len(sequence.ids) for sequence in sequences) + 1),
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "language_model_only": True,
        "gpu_memory_utilization": config.generation.engine.gpu_memory_utilization,
        **config.generation.engine_args,
    }
    add_model_settings(arguments, str(folder))
    with tempfile.TemporaryDirectory() as scratch:
        request, result = Path(scratch, "request"), Path(scratch, "result")
        torch.save({"arguments": arguments, "ids": [sequence.ids for sequence in sequences]}, request)
        command = [sys.executable, "-m", __name__, str(request), str(result)]
        environment = {**os.environ, **_ENVIRONMENT, **({} if torch.cuda.is_available() else _CPU)}
        try:
            process = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=config.generation.timeout_s
            )
        except subprocess.TimeoutExpired:
            raise RunError(
                f"the engine was not done within generation.timeout_s={config.generation.timeout_s}"
            ) from None
        if process.returncode or not result.exists():
            raise RunError("the engine failed: " + " | ".join(process.stderr.strip().splitlines()[-_QUOTED_LINES:]))
        result_values = torch.load(result, weights_only=True)
    logprobs = [values[sequence.chosen] for values, sequence in zip(result_values["logprobs"], sequences, strict=True)]
    return torch.cat(logprobs), {point: torch.cat(pieces) for point, pieces in result_values["states"].items()}


def _serve(request: Path, result: Path) -> None:
    """Compute a request in the engine's process."""
    from vllm import LLM, SamplingParams

    request_values = torch.load(request, weights_only=True)
    llm = LLM(**request_values["arguments"])
    states: dict[str, list[Tensor]] = {}
    (_,) = llm.apply_model(lambda model: _register_hooks(model, states))
    parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    logprobs = []
    # One sequence at a time, so that the hooks see its tokens in one forward pass.
    for ids in request_values["ids"]:
        prompt: Any = {"prompt_token_ids": ids.tolist()}
        (output,) = llm.generate(prompt, parameters, use_tqdm=False)
        listed: Sequence[Any] = output.prompt_logprobs or ()
        sampled_logprobs = [
            logprobs_by_token[int(token)].logprob for logprobs_by_token, token in zip(listed[1:], ids[1:], strict=True)
        ]
        logprobs.append(torch.tensor([0.0, *sampled_logprobs]))
    torch.save({"logprobs": logprobs, "states": states}, result)


def _register_hooks(model: Any, states: dict[str, list[Tensor]]) -> None:
    """Keep the hidden states of every forward pass."""

    def keep(point: str) -> Any:
        def keep_output(_module: Any, _inputs: Any, output: Any) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            # A layer of vLLM returns its output and the residual, not yet added: the next layer's fused norm adds them.
            is_layer = point.count(".") == 1
            value = parts[0] + parts[1] if is_layer and len(parts) > 1 and parts[1] is not None else parts[0]
            states.setdefault(point, []).append(value.detach().float().cpu().clone())

        return keep_output

    inner = getattr(model, "language_model", model).model
    inner.embed_tokens.register_forward_hook(keep("embedding"))
    for number, layer in enumerate(inner.layers):
        for half, module in find_halves(layer).items():
            module.register_forward_hook(keep(f"layers.{number}.{half}"))
        layer.register_forward_hook(keep(f"layers.{number}"))
    final_norm = inner.norm if hasattr(inner, "norm") else inner.norm_f
    final_norm.register_forward_hook(keep("norm"))


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), Path(sys.argv[2]))
