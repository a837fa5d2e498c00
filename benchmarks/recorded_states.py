"""Cost of recording hidden states on a step of logger.replay_every: the pass for log-probabilities with and without.

    python benchmarks/recorded_states.py [layers] [hidden] [tokens]

One rank on the CPU computes the same sequences in turn, watched and not. Prints JSON: CPU seconds of both (medians, so
that other programs of the machine matter little), their ratio, the bytes of the file's hidden states, and the seconds
to write them.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from header import header
from small_model import WORDS, make_model
from torch.distributed import HashStore

from megatron_grpo.batch.replay_files import StepFigures, choose_watched_tokens, sum_states, write_figures
from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.config.schema import ModelConfig, PolicyConfig
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.parallel import initialize_parallel
from megatron_grpo.trainer.rank import PolicyRank

LENGTH, ROUNDS = 256, 7


def measure(folder: Path, tokens: int) -> dict[str, Any]:
    """Time passes for log-probabilities over `tokens` tokens in sequences of LENGTH, by a model in a folder."""
    config = PolicyConfig(model=ModelConfig(path=str(folder)), precision="float32", microbatch_tokens=4096)
    initialize_parallel(config.parallel, rank=0, store=HashStore(), seed=0, timeout_s=60)
    rank = PolicyRank(RankSettings(config=config, shape=read_model_shape(folder), folder=str(folder), decay_steps=1))
    lengths = [LENGTH] * (tokens // LENGTH)
    batch = TokenBatch(lengths, TokenFields(token_ids=torch.randint(2, WORDS, (sum(lengths),)).int()))
    rows = 4096 // LENGTH
    microbatches = [list(range(begin, min(begin + rows, len(lengths)))) for begin in range(0, len(lengths), rows)]
    watched = choose_watched_tokens(sum(lengths))
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * ROUNDS + 2):
        is_watched = turn % 2 == 1
        began = time.process_time()
        if is_watched:
            rank.recorder.watch(watched, watched)
        rank.compute_logprobs(batch, microbatches)
        parts = rank.recorder.end_states()
        if turn > 1:  # the first turns warm up
            seconds[is_watched].append(time.process_time() - began)
    states = sum_states([parts])
    figures = StepFigures(
        loss=0.0, grad_norm=0.0, learning_rate=0.0, tensors=[], states=states, config={}, device="cpu"
    )
    began, file = time.monotonic(), folder / "step.parquet"
    write_figures(file, figures)
    without, recorded = (statistics.median(seconds[is_watched]) for is_watched in (False, True))
    return {
        "pass_s": without,
        "recorded_pass_s": recorded,
        "ratio": recorded / without,
        "points": len({state.point for state in states}),
        "file_bytes": file.stat().st_size,
        "write_s": time.monotonic() - began,
        "watched": int(np.size(watched)),
    }


def main(layers: int = 8, hidden: int = 384, tokens: int = 16384) -> None:
    """Measure a model of this size and print the result."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(make_model(Path(folder), hidden=hidden, layers=layers), tokens)
    sizes = {"layers": layers, "hidden": hidden, "tokens": tokens}
    print(json.dumps({**header("recorded_states"), **sizes, **result}, indent=2))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
