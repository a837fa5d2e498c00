"""A vLLM engine in a process of its own, whose model a test may spoil: python -m tests.support.one_engine JSON"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
}


def ask(folder: Path, calls: Sequence[dict[str, Any]], *, spoil: str = "", dtype: str = "float32") -> list[Any]:
    """Responses of one engine to several calls, each {"prompts": token ids, "temperature": ...}.

    Args:
        folder: the engine's weights.
        calls: what is sampled, one after the other; further entries are vLLM's sampling options.
        spoil: "routers": they compute in bfloat16.
        dtype: type of the engine's weights and activations.

    Returns:
        For each call and each of its prompts, [token ids, log-probabilities under which they were drawn].
    """
    request = {"folder": str(folder), "calls": list(calls), "spoil": spoil, "dtype": dtype}
    process = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(request),
        env=os.environ | ENVIRONMENT,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    (line,) = [text for text in process.stdout.splitlines() if text.startswith("RESULT")] or [process.stderr[-3000:]]
    assert line.startswith("RESULT"), line
    responses: list[Any] = json.loads(line.removeprefix("RESULT"))
    return responses


def _serve() -> None:
    from vllm import LLM, SamplingParams

    request = json.loads(sys.stdin.read())
    llm = LLM(
        request["folder"],
        dtype=request["dtype"],
        max_model_len=160,
        enforce_eager=True,
        enable_prefix_caching=False,
        logprobs_mode="processed_logprobs",
    )
    if request["spoil"] == "routers":
        llm.apply_model(partial(_round_routers, _tensors(Path(request["folder"]))))
    responses = []
    for number, call in enumerate(request["calls"]):
        prompts: list[Any] = [{"prompt_token_ids": ids} for ids in call.pop("prompts")]
        parameters = [
            SamplingParams(
                **call, seed=1000 * number + index, max_tokens=24, logprobs=0, detokenize=False, stop_token_ids=[2]
            )
            for index in range(len(prompts))
        ]
        outputs = [output.outputs[0] for output in llm.generate(prompts, parameters, use_tqdm=False)]
        responses.append(
            [
                [
                    list(output.token_ids),
                    [step[token].logprob for step, token in zip(output.logprobs, output.token_ids, strict=True)],
                ]
                for output in outputs
            ]
        )
    print("RESULT" + json.dumps(responses))


def _tensors(folder: Path) -> dict[str, Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def _round_routers(weights: dict[str, Tensor], model: Any) -> None:
    """vLLM's layers of experts get router logits whose inputs, weights and outputs were rounded.

    Weights are those of the folder, since vLLM's layers on a CPU keep theirs only in a packed form.
    """

    def rounded(number: int, _gate: Any, tensors: tuple[Tensor, ...], output: Any) -> Any:
        weight = weights[f"model.layers.{number}.mlp.gate.weight"].bfloat16()
        logits = torch.nn.functional.linear(tensors[0].bfloat16(), weight).float()
        return (logits, *output[1:]) if isinstance(output, tuple) else logits

    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(partial(rounded, number))


if __name__ == "__main__":
    _serve()
