"""The generation worker's half of a refit shard to shard: receive messages, verify them, put slices in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.models.families import shape_of_folder, weight_entries
from megatron_grpo.models.places import engine_places
from megatron_grpo.refit.buckets import broken_seal
from megatron_grpo.refit.groups import Rendezvous, left_on_failure
from megatron_grpo.refit.reshard.landing import ModelWriter
from megatron_grpo.refit.reshard.links import BUFFERS, Links


class ReshardReceiver:
    """One worker's end of its links.

    Args:
        model: vLLM's model.
        vllm_config: vLLM's settings of the engine.
        device: where the model is.
        rendezvous: where to meet.
        number: the worker's among those of all engines.
    """

    def __init__(
        self, model: torch.nn.Module, vllm_config: Any, device: torch.device, rendezvous: Rendezvous, number: int
    ) -> None:
        parallel = vllm_config.parallel_config
        shape = shape_of_folder(vllm_config.model_config.model)
        layout = GenerationParallelConfig(
            tensor=parallel.tensor_parallel_size,
            pipeline=parallel.pipeline_parallel_size,
            expert=parallel.tensor_parallel_size if parallel.enable_expert_parallel else 1,
        )
        self._entries = weight_entries(shape)
        self._links = Links(rendezvous, "target", number, device)
        place = engine_places(layout, shape)[parallel.rank]
        messages = [message.pieces for message in self._links.messages]
        scaled = {entry for entry, dtype in enumerate(self._links.dtypes) if dtype == torch.float8_e4m3fn}
        self._writer = ModelWriter(model, vllm_config.model_config.dtype, shape, place, messages, scaled)

    def begin(self) -> None:
        """Nothing is written yet."""
        self._writer.begin()

    def receive(self, version: int) -> None:
        """Take one version: a message is put in place while the next one arrives.

        Raises:
            ValueError: a seal was broken. Raised after the last message, so that nobody else is kept waiting; nothing
                that comes after it is written.
            RuntimeError: a rank of the policy stopped sending, or the links failed before.
        """
        with left_on_failure(self._links.close):
            self._receive(version)

    def _receive(self, version: int) -> None:
        links, messages = self._links, self._links.messages
        under_way = {number: links.begin(number) for number in range(min(BUFFERS, len(messages)))}
        broken: list[str] = []
        for number, message in enumerate(messages):
            try:
                under_way.pop(number).wait()
            except RuntimeError as error:
                which = f"message {number} of {len(messages)}, which begins with {message.begins_with(self._entries)},"
                raise RuntimeError(f"{which} did not come from {links.peer(message)}: {error}") from error
            problem = broken_seal(links.buffer(number), version)
            if problem is not None:
                first = message.begins_with(self._entries)
                broken.append(f"message {number} from {links.peer(message)}: {problem}; it begins with {first}")
            if not broken:
                self._write(number, links.buffer(number))
            links.emptied(number)
            if number + BUFFERS < len(messages):  # into the buffer that has just been emptied
                under_way[number + BUFFERS] = links.begin(number + BUFFERS)
        if broken:
            raise ValueError("; ".join(broken))

    def _write(self, number: int, message: Tensor) -> None:
        """Put the pieces of the message of this number, [bytes], uint8, where they belong."""
        for position, parcel in enumerate(self._links.parcels[number]):
            scales = parcel.scales(message) if parcel.scaled else None
            self._writer.write(number, position, parcel.numbers(message), scales)

    def finish(self) -> None:
        """Let vLLM make what it derives from weights."""
        self._writer.finish()

    def abandon(self) -> None:
        """Put back what layers that are half written had before; the rest is written over by the next version."""
        self._writer.abandon()
