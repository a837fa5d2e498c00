"""Training on ranks, of the policy or the value model: who works on what, and what all ranks export together."""

from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_grpo.batch.packing import SequencePadder
from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.losses.loss import GlobalCounts, LossFunction
from megatron_grpo.models.hf_weights import iter_hf_tensors
from megatron_grpo.trainer.rank import PolicyRank, ValueRank
from tests.parity.ranks import Layout

LENGTHS = [5, 9, 7, 12, 6, 12, 8, 4]


def random_mask(generator: torch.Generator) -> Tensor:
    """[sum(LENGTHS)]: a loss mask over sequences of these lengths."""
    mask = (torch.rand(sum(LENGTHS), generator=generator) < 0.7).float()
    for start in torch.tensor([0, *LENGTHS]).cumsum(0)[:-1].tolist():
        mask[start] = 0.0  # nothing comes before a first token
    return mask


def step_counts(batch: TokenBatch) -> GlobalCounts:
    """Counts of an optimizer step on the whole batch, from its masks."""
    masks = [piece.tolist() for piece in batch.fields.loss_mask.split(batch.lengths)]
    weight = torch.ones(sum(batch.lengths)) if batch.fields.weight is None else batch.fields.weight
    weights = [float(piece[0]) for piece in weight.split(batch.lengths)]
    weighted = batch.fields.loss_mask * weight
    return GlobalCounts(
        tokens=sum(map(sum, masks)),
        sequences=sum(sequence_weight for sequence_weight, mask in zip(weights, masks, strict=True) if any(mask)),
        all_sequences=sum(weights),
        positive_tokens=0.0 if batch.fields.positive is None else float(weighted @ batch.fields.positive),
        imitated_tokens=0.0 if batch.fields.imitated is None else float(batch.fields.imitated.sum()),
        token_weight=float(weighted.sum()) / sum(map(sum, masks)),
    )


def fetch(model: PolicyRank | ValueRank, batch: TokenBatch, loss_fn: LossFunction | None) -> TokenBatch:
    """The batch as this rank gets it in a run: entries that its stage uses, and what follows from them.

    Args:
        model: this rank's.
        batch: with every entry.
        loss_fn: of an optimizer step; None: the pass only computes outputs.
    """
    names = {*model.list_needed_fields(loss_fn)}
    if "sampled" in names:
        names |= {"loss_mask", "positive", "weight", "imitated"}
    fields = {name: value for name, value in batch.fields.as_dict().items() if name in names}
    if "routed_experts" in fields:
        fields["routed_experts"] = torch.from_numpy(model.routing.select_layers(fields["routed_experts"].numpy()))
    return TokenBatch(batch.lengths, TokenFields(**fields))


def rank_share(batch: TokenBatch, layout: Layout) -> tuple[TokenBatch, list[list[int]], list[int]]:
    """This replica's sequences, its microbatches, and which sequences of the batch they are, as the driver plans it."""
    plan = SequencePadder(30, 2).assign_microbatches(batch.lengths, layout.data)
    indices = plan[parallel_state.get_data_parallel_rank()]
    order = [index for microbatch in indices for index in microbatch]
    return batch.select(order), [[order.index(index) for index in microbatch] for microbatch in indices], order


def whole_tensors(engine: PolicyRank | ValueRank) -> dict[str, Tensor]:
    """This rank's part of the weights, under the names and in the shapes of transformers."""
    tensors = iter_hf_tensors(engine.gather_chunks(), engine.shape)
    return {name: tensor.clone().cpu() for name, tensor in tensors if tensor is not None}


def parameters_of(engine: PolicyRank | ValueRank) -> list[Any]:
    """This rank's parameters, up to date; trained ones have a `main_grad`."""
    return [parameter for chunk in engine.gather_chunks() for parameter in chunk.parameters()]


def merge(by_rank: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What the ranks export together; ranks that export the same tensor export the same values."""
    tensors: dict[str, Tensor] = {}
    for rank_tensors in by_rank:
        for name, tensor in rank_tensors.items():
            torch.testing.assert_close(tensor, tensors.setdefault(name, tensor), atol=0, rtol=0)
    return tensors
