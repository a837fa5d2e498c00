"""A driver of its own for test_generation: samples a fixed batch, prints it with its vLLM processes, then waits."""

import json
import sys
import time
from pathlib import Path

import psutil

from megatron_grpo.batch.generation_requests import GenerationRequest, SamplingSettings
from tests.integration.vllm_helpers import engines, generate, request, start_ray


def requests() -> list[GenerationRequest]:
    """More than the engine decodes at once, of different lengths."""
    return [request([2 + i % 7, 5, 3 + i % 5][: 1 + i % 3], seed=100 + i, max_new_tokens=6 + i % 10) for i in range(80)]


SETTINGS = SamplingSettings(max_new_tokens=12, temperature=0.8)


def main() -> None:
    start_ray()
    with engines(Path(sys.argv[1]), pipeline=2) as generation:
        outputs = generate(generation, requests(), SETTINGS)
        children = psutil.Process().children(recursive=True)
        (actor,) = [child for child in children if child.cmdline()[0].startswith("ray::VllmEngine")]
        processes = [child.pid for child in [actor, *actor.children(recursive=True)]]
        samples = [(output.token_ids.tolist(), output.logprobs.tolist()) for output in outputs]
        print("RESULT", json.dumps({"samples": samples, "processes": processes}), flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main()
