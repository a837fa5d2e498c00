"""A worker of vLLM that receives a refit wrongly when a test says so: every message is intact, and the model is not."""

from functools import partial
from typing import Any

from megatron_grpo.weight_sync.boxes import Range, to_slices
from megatron_grpo.weight_sync.engine_worker import RefitWorker
from megatron_grpo.weight_sync.model_writer import ModelWriter

WRITE = ModelWriter.write
EXPERTS = ("w13_weight", "w2_weight")
FLIPPED = ("model.layers.1.self_attn.o_proj", "weight")
"""The parameter whose sign a fault changes."""


def take_neighbours_positions(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Shift the positions by a token where there are several sequences."""
    positions = named["positions"]
    if int((positions == 0).sum()) > 1:
        named = {**named, "positions": positions.roll(1)}
    return args, named


def scale_row(_: Any, args: tuple[Any, ...], output: Any, *, token: int) -> Any:
    """Scale the embedding of a token."""
    output[args[0] == token] *= 1.3
    return output


class FaultyWorker(RefitWorker):
    """The worker extension of the engines of test_canary.py."""

    shift: Any = None
    """Hook on the model that plants "positions"; None: it is not planted."""

    def plant(self, fault: str) -> None:
        """Let the following refits go wrong: "flipped", "swapped", "stale", or "none".

        "positions": refits are right, and tokens of a batch of several sequences take their neighbours' positions.
        "row" and a token's id: refits are right, and the token has another embedding.
        """
        if self.shift is not None:
            self.shift.remove()
            self.shift = None
        if fault == "positions":
            self.shift = self.model_runner.model.register_forward_pre_hook(take_neighbours_positions, with_kwargs=True)

        if fault.startswith("row "):
            scale = partial(scale_row, token=int(fault.removeprefix("row ")))
            self.shift = self.model_runner.model.model.embed_tokens.register_forward_hook(scale)

        def write(self: Any, message: int, position: int, values: Any, scales: Any = None) -> None:
            regions = self._messages[message]
            to = regions[position]
            if fault == "flipped" and (to.module, to.name) == FLIPPED:
                values = -values
            slot = to.ranges[0].begin
            if fault == "swapped" and ".layers.1." in to.module and to.name in EXPERTS and slot in (0, 1):
                ranges = (Range(1 - slot, 2 - slot), *to.ranges[1:])
                regions[position] = to._replace(ranges=ranges, indices=to_slices(ranges))
            if fault == "stale" and to.module.endswith("layers.0.post_attention_layernorm"):
                values = self._model.get_submodule(to.module).weight.data[to_slices(to.ranges)].clone()
            WRITE(self, message, position, values, scales)
            regions[position] = to

        ModelWriter.write = write  # type: ignore[method-assign]
