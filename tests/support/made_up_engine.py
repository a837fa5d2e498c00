"""A made-up engine: responses drawn with their requests' seeds, and failures where it is told to fail.

Each is a process of Ray, which imports this module and little else.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np

from megatron_grpo.batch.generation_requests import EngineCounts, GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.trajectory import Span
from megatron_grpo.cluster.futures import wrap_for_pickling

VERSION = 3


def made_up_response(request: GenerationRequest, settings: SamplingSettings) -> GenerationOutput:
    """Tokens and log-probabilities drawn with the request's seed; the text is the seed."""
    generator = np.random.default_rng(request.seed)
    limit = min(request.max_new_tokens, settings.max_new_tokens)
    length = int(generator.integers(1, limit + 1))
    return GenerationOutput(
        token_ids=generator.integers(0, 1000, length).astype(np.int32),
        logprobs=-generator.random(length).astype(np.float32),
        text=str(request.seed),
        stop_reason="length" if length == limit else "stop",
        spans=[Span(0, length, VERSION)],
    )


class MadeUpEngine:
    """Yields `chunk` responses at a time, the last requests first.

    Args:
        chunk: responses of one yield.
        stuck: seeds whose requests are never answered, each as often as it is in here.
        refused: seeds whose requests are given up, each as often as it is in here.
        dies_after: yields after which the process ends; None: it does not.
    """

    def __init__(
        self, chunk: int = 5, stuck: Sequence[int] = (), refused: Sequence[int] = (), dies_after: int | None = None
    ) -> None:
        self.chunk, self.stuck, self.refused, self.dies_after = chunk, list(stuck), list(refused), dies_after
        self.calls: list[list[int]] = []
        self.aborted: list[tuple[str, int]] = []
        self._yields = 0

    async def generate(
        self, requests: list[GenerationRequest], settings: SamplingSettings, call: str
    ) -> AsyncIterator[Any]:
        """As `VllmEngine.generate`."""
        self.calls.append([request.seed for request in requests])
        answers: list[tuple[int, GenerationOutput | str]] = []
        stuck = 0
        for index, request in reversed(list(enumerate(requests))):
            if request.seed in self.stuck:
                self.stuck.remove(request.seed)
                stuck += 1
            elif request.seed in self.refused:
                self.refused.remove(request.seed)
                answers.append((index, "refused by the engine"))
            else:
                answers.append((index, made_up_response(request, settings)))
        for begin in range(0, len(answers), self.chunk):
            if self._yields == self.dies_after:
                os._exit(1)
            self._yields += 1
            yield wrap_for_pickling(answers[begin : begin + self.chunk])
            await asyncio.sleep(0)
        if stuck:
            await asyncio.sleep(600)

    def take_counts(self) -> EngineCounts:
        """As `VllmEngine.take_counts`, of the calls."""
        calls, self.calls = self.calls, []
        return EngineCounts(running=max(map(len, calls), default=0))

    async def abort(self, call: str, indices: list[int]) -> None:
        """As `VllmEngine.abort`, but that nothing ends."""
        self.aborted += [(call, index) for index in indices]

    def break_over(self, stuck: Sequence[int] = (), refused: Sequence[int] = ()) -> None:
        """Fail over more seeds."""
        self.stuck += stuck
        self.refused += refused

    async def history(self) -> tuple[list[list[int]], list[tuple[str, int]]]:
        """Seeds of every call, and what was aborted."""
        return self.calls, self.aborted
