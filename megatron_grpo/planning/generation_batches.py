"""A simulation of an engine's batches: responses begin, grow, end, and make room for each other."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.config.schema import Config
from megatron_grpo.planning.generation_cost import BLOCK_TOKENS, Decoder, EngineSize


@dataclass(frozen=True, slots=True)
class Room:
    """Sequences that an engine decodes at once."""

    sequences: int
    """Most of them (generation.engine.max_num_seqs)."""
    tokens: float = math.inf
    """Tokens of all of them that the KV cache holds."""
    tokens_of_sequence: float = 0.0
    """Tokens that a sequence takes besides its own: half of its last block, and states of fixed size."""


def find_room(config: Config, size: EngineSize) -> Room:
    """Find the room of an engine of this size."""
    fixed = (size.state_blocks + 0.5) * BLOCK_TOKENS
    return Room(config.generation.sequences_per_engine, size.cache_tokens, fixed)


@dataclass(frozen=True, slots=True)
class GenerationSeconds:
    """Time of an engine to answer its share of a step."""

    seconds: float
    """Until the last response is complete."""
    busy: float
    """Mean number of sequences that decode, over `seconds`."""
    peak: int = 0
    """Most sequences that decode at once."""
    preempted: int = 0
    """How often a sequence lost its room, and was computed again later."""


@dataclass(slots=True)
class _Sequence:
    length: float
    decoded: float = 0.0
    """Tokens of the response when it last began."""
    start: float = 0.0
    """The engine's step at which it would have begun if it had never lost its room."""


@dataclass
class _Batch:
    """Running and waiting sequences of an engine, as vLLM schedules them."""

    decoder: Decoder
    prompt: float
    copies: int
    room: Room
    waiting: deque[_Sequence]
    running: dict[int, _Sequence] = field(default_factory=dict)
    """By number, in the order in which they began."""
    ends: list[tuple[float, int]] = field(default_factory=list)
    """Heap of the engine's steps at which sequences end; some of them have lost their room since."""
    begun: int = 0
    clock: float = 0.0
    step: float = 0.0
    """Decoding steps of the engine since its start."""
    sequence_s: float = 0.0
    start_sum: float = 0.0
    peak: int = 0
    preempted: int = 0

    @property
    def used(self) -> float:
        """Tokens in the cache."""
        number = len(self.running)
        return number * (self.prompt + self.room.tokens_of_sequence + self.step) - self.start_sum

    def admit(self) -> None:
        """Let sequences begin in their order while they have room as they are."""
        first_tokens = self.prompt + self.room.tokens_of_sequence
        while self.waiting and len(self.running) < self.room.sequences:
            sequence = self.waiting[0]
            margin = BLOCK_TOKENS * (len(self.running) + 1)  # the next block of each
            if self.running and self.used + first_tokens + sequence.decoded + margin > self.room.tokens:
                break
            self.waiting.popleft()
            # Copies share the prompt's prefill; what a sequence had when it lost its room is computed again.
            tokens = self.prompt + sequence.decoded if sequence.decoded else self.prompt / self.copies
            self.clock += self.decoder.time_prefill(tokens, self.prompt + sequence.decoded)
            sequence.start = self.step - sequence.decoded
            self.start_sum += sequence.start
            self.running[self.begun] = sequence
            heapq.heappush(self.ends, (sequence.start + sequence.length, self.begun))
            self.begun += 1
        self.peak = max(self.peak, len(self.running))

    def decode(self) -> None:
        """Decode until a sequence ends or the last one loses its room."""
        while self.ends[0][1] not in self.running:
            heapq.heappop(self.ends)
        number, end = len(self.running), self.ends[0][0]
        steps = end - self.step
        until_full = (
            math.floor((self.room.tokens - self.used) / number) if math.isfinite(self.room.tokens) else math.inf
        )
        is_full = until_full < steps and number > 1
        steps = max(0.0, until_full) if is_full else steps
        # Between two such events the batch does not change, and every step takes as long as the one in their middle.
        context = self.prompt + self.step + steps / 2 - self.start_sum / number
        seconds = steps * self.decoder.time_step(number, context)
        self.clock, self.sequence_s = self.clock + seconds, self.sequence_s + seconds * number
        self.step = self.step + steps if is_full else end
        if is_full:
            self._take_room()
            return
        while self.ends and self.ends[0][0] <= self.step:
            ended = self.running.pop(heapq.heappop(self.ends)[1], None)
            self.start_sum -= ended.start if ended else 0.0

    def _take_room(self) -> None:
        _, youngest = self.running.popitem()
        youngest.decoded = self.step - youngest.start
        self.start_sum -= youngest.start
        self.waiting.appendleft(youngest)
        self.preempted += 1


def simulate_generation(
    decoder: Decoder, prompt: float, responses: NDArray[np.float64] | Iterable[float], room: Room, copies: int
) -> GenerationSeconds:
    """Simulate an engine's decoding; a response begins when there is room for its prompt.

    Args:
        decoder: the engine.
        prompt: tokens of each prompt.
        responses: [responses of the engine]: their lengths.
        room: sequences that run at once.
        copies: responses to the same prompt, which share its prefill (the prefix cache).
    """
    assert room.sequences > 0, "the engine holds no sequence"
    batch = _Batch(decoder, prompt, copies, room, deque(_Sequence(float(length)) for length in responses))
    while batch.running or batch.waiting:
        batch.admit()
        batch.decode()
    busy = batch.sequence_s / batch.clock if batch.clock else 0.0
    return GenerationSeconds(batch.clock, busy, batch.peak, batch.preempted)
