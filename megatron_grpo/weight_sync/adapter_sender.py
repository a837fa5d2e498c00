"""Runs on a rank of the policy: sends its stage's adapters alone (refit.adapters=alone)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_grpo.models.adapter_names import measure_adapters
from megatron_grpo.models.hf_weights import iter_adapter_tensors
from megatron_grpo.weight_sync.refit_group import Rendezvous
from megatron_grpo.weight_sync.shard_sender import SourceLinks, pack_piece

if TYPE_CHECKING:
    from megatron_grpo.trainer.rank import PolicyRank


class AdapterSender:
    """The sending end of a policy rank's links; only first ranks of stages send."""

    def __init__(self, rank: PolicyRank, rendezvous: Rendezvous) -> None:
        self._rank = rank
        self._names = list(measure_adapters(rank.shape, rank.config.lora))
        self.links = SourceLinks(rendezvous, torch.distributed.get_rank(), rank.platform.device, self._names)

    def send(self, version: int) -> tuple[int, int, int]:
        """Send a version; return its bytes (with checksums), matrices and messages."""
        gathered = iter_adapter_tensors(self._rank.gather_chunks(), self._rank.shape, Tensor.detach)
        tensors = {name: tensor for name, tensor in gathered if tensor is not None}
        links = self.links

        def fill(number: int, message: Tensor) -> None:
            for piece, packed in zip(links.messages[number], links.packed_pieces[number], strict=True):
                pack_piece(packed, message, tensors[self._names[piece["tensor"]]])

        links.send(fill, version)
        filled = [number for number, is_relayed in enumerate(links.is_relayed) if not is_relayed]
        return (
            sum(links.sizes[number] for number in filled),
            sum(len(links.messages[number]) for number in filled),
            len(filled),
        )


def connect_adapters(rank: PolicyRank, rendezvous: Rendezvous) -> None:
    """Join the group of all ranks, and test this rank's links."""
    rank.weight_sender = None
    rank.weight_sender = AdapterSender(rank, rendezvous)


@torch.no_grad()
def send_adapters(rank: PolicyRank, version: int) -> tuple[int, int, int]:
    assert isinstance(rank.weight_sender, AdapterSender), "connect_adapters() comes first"
    return rank.weight_sender.send(version)
