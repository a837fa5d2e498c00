"""Runs in an engine's worker: receives messages over links and loads their pieces into vLLM's model.

`ShardReceiver` gets the slices that the worker keeps (reshard), `TensorReceiver` whole tensors (broadcast).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.weight_sync.boxes import Box, to_slices
from megatron_grpo.weight_sync.engine_adapters import make_loader
from megatron_grpo.weight_sync.links import BUFFERS, Links
from megatron_grpo.weight_sync.model_writer import ModelWriter
from megatron_grpo.weight_sync.pieces import NO_RELAY, find_checksum_problem, read_ranges
from megatron_grpo.weight_sync.refit_group import Rendezvous, Transfer


class TargetLinks(Links):
    """The links of an engine's rank, which receives."""

    side, peer_side = "target", "source"

    def __init__(self, rendezvous: Rendezvous, rank: int, device: torch.device, names: Sequence[str]) -> None:
        super().__init__(rendezvous, rank, device, names)
        self._connect(rendezvous)
        if not self._shared.keys() >= set(self._peers):  # some messages do not come in shared memory
            self._buffers = torch.empty(self._buffer_bytes, dtype=torch.uint8, device=device)

    def receive(self, load: Callable[[int, Tensor], None], version: int) -> None:
        """Receive a version: a message is loaded while the next arrives.

        Raises:
            ValueError: a checksum was broken, and nothing was loaded from there on. Raised after the last message, so
                that no sender is kept waiting.
            RuntimeError: a sender stopped sending, or the links failed before.
        """
        problems: list[str] = []
        with self._fail_together():
            pending = {number: self.begin(number) for number in range(min(BUFFERS, len(self.messages)))}
            for number, peer in enumerate(self._peers):
                self._finish(number, pending)
                buffer = self.view_buffer(number)
                problem = find_checksum_problem(buffer, version)
                if problem is not None:
                    first = self._names[self.messages[number][0]["tensor"]]
                    problems.append(f"message {number} from {self._name_peer(peer)}: {problem}; it begins with {first}")
                if not problems:
                    load(number, buffer)
                if self._memory is not None and peer in self._shared:
                    self._memory.synchronize()  # the message has been read
                    self._wait(self._start(peer, self._notices[number % BUFFERS], sends=True))
                if number + BUFFERS < len(self.messages):  # into the buffer that is free now
                    pending[number + BUFFERS] = self.begin(number + BUFFERS)
            if problems:
                raise ValueError("; ".join(problems))

    def view_buffer(self, number: int) -> Tensor:
        memory = self._shared.get(self._peers[number])
        if memory is None:
            return super().view_buffer(number)
        return memory.view(BUFFERS, -1)[int(self._notices[number % BUFFERS]), : self.sizes[number]]

    def begin(self, number: int) -> list[Transfer]:
        """Start receiving a message, or the notice that it can be read."""
        peer = self._peers[number]
        destination = self._notices[number % BUFFERS] if peer in self._shared else self.view_buffer(number)
        return [self._start(peer, destination, sends=False)]

    def _find_peer(self, piece: Any) -> int:
        return int(piece["source"] if piece["relay"] == NO_RELAY else piece["relay"])

    def _open_link(self, peer: int, notice: Tensor) -> Tensor | None:
        self._move_first(peer, notice, sends=False)
        source, target = notice[:2].tolist()
        address = json.loads(self._store.get(f"memory/{source}/{target}"))
        if address is None:
            return None
        memory = self._memory.map_address(address) if self._memory is not None else None
        notice[2] = int(memory is not None)
        self._move_first(peer, notice, sends=True)
        return memory


class ShardReceiver:
    """Receives the worker's slices, and writes them to its model."""

    def __init__(self, worker: Any, boxes: Sequence[Box], source: dict[str, Any], number: int) -> None:
        self._links = TargetLinks(Rendezvous(**source["rendezvous"]), number, worker.device, list(source["tensors"]))
        scaled = {entry for entry, dtype in enumerate(self._links.dtypes) if dtype == torch.float8_e4m3fn}
        model, dtype = worker.model_runner.get_model(), worker.vllm_config.model_config.dtype
        self._writer = ModelWriter(model, dtype, boxes, self._links.messages, scaled)

    def receive(self, version: int) -> None:
        self._writer.begin()
        self._links.receive(self._load, version)
        self._writer.finish()

    def abandon(self) -> None:
        self._writer.abandon()

    def _load(self, number: int, message: Tensor) -> None:
        for position, packed in enumerate(self._links.packed_pieces[number]):
            self._writer.write(number, position, packed.view_values(message), packed.view_scales(message))


class TensorReceiver:
    """Receives whole tensors, of which vLLM takes the worker's shard."""

    def __init__(self, worker: Any, source: dict[str, Any], number: int) -> None:
        self._tensors = list(source["tensors"].items())
        names = [name for name, _ in self._tensors]
        self._links = TargetLinks(Rendezvous(**source["rendezvous"]), number, worker.device, names)
        self._reload = make_loader(worker, source)
        self._incomplete: dict[str, Tensor] = {}  # tensors of which some pieces have come
        self._missing: dict[str, int] = {}  # number of elements of these tensors that have not come yet

    def receive(self, version: int) -> None:
        self._reload.begin()
        self._links.receive(self._load, version)
        self._reload.finish()

    def abandon(self) -> None:
        self._reload.abandon()

    def _load(self, number: int, message: Tensor) -> None:
        complete: list[tuple[str, Tensor]] = []
        for piece, packed in zip(self._links.messages[number], self._links.packed_pieces[number], strict=True):
            name, shape = self._tensors[piece["tensor"]]
            if name not in self._incomplete:
                tensor = torch.empty(shape, dtype=packed.dtype, device=message.device)
                self._incomplete[name], self._missing[name] = tensor, tensor.numel()
            values = packed.view_values(message)
            self._incomplete[name][to_slices(read_ranges(piece))].copy_(values)
            self._missing[name] -= values.numel()
            if not self._missing[name]:
                complete.append((name, self._incomplete.pop(name)))
        if complete:
            self._reload.load(complete)
