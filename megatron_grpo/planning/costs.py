"""Seconds of the work that a dry run records: operators by a roofline, messages by the network between their ranks."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_grpo.platform.hardware import Efficiency, Hardware

if TYPE_CHECKING:
    from megatron_grpo.planning.dry.work import Work

TILES = ((128, 256, 1.0), (128, 128, 0.9), (64, 128, 0.7), (64, 64, 0.5), (16, 64, 0.25))
"""Rows and columns of the result that one multiprocessor computes at a time, and the relative speed of such kernels:
smaller tiles read more for each operation. cuBLAS chooses by heuristics; here the fastest is taken."""

# Names of torch's collectives by which Megatron-Core's data parallelism reduces gradients and gathers weights.
_GRADIENTS = "reduce_scatter_tensor_coalesced_", "allreduce_coalesced_"
_PARAMETERS = "allgather_into_tensor_coalesced_"
_OF_TENSOR = "allgather", "reduce_scatter", "allreduce"
"""Messages of the linear layers among tensor-parallel ranks."""
_RING_LAUNCHES = 8
"""Operators of a turn of Transformer Engine's ring attention over packed sequences, counted in its code: send, receive,
slices, lengths, attention, and corrections of the sum and of the output; as many back."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Which messages go on while something else computes."""

    gradients: bool = True
    """Gradients are reduced over data-parallel ranks during the backward passes (policy.overlap_grad_reduce)."""
    parameters: bool = True
    """Weights are gathered during the forward passes (policy.overlap_param_gather)."""
    tensor: bool = False
    """Every message of a tensor-parallel layer overlaps with its product (Transformer Engine's user buffers)."""
    experts: bool = False
    """Tokens travel to experts while another microbatch computes (overlap_moe_expert_parallel_comm)."""
    expert_copies: int = 1
    """Copies of a token, for its experts, that a domain gets as one message: top_k with a dispatcher that sends a token
    once to each domain (DeepEP, HybridEP), 1 with an all-to-all of NCCL."""
    expert_skew: float = 1.0
    """Tokens of the fullest rank's experts, relative to the mean: the other ranks wait for it in every layer."""


@dataclass(slots=True)
class PassSeconds:
    """Seconds of a pass of one microbatch through a model chunk."""

    compute: float = 0.0
    launch: float = 0.0
    exposed: float = 0.0
    """Messages that nothing hides."""
    kinds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by kind of work, hidden messages included."""

    def compute_seconds(self, tokens: float = 1.0, context: float = 1.0) -> float:
        """Seconds of kernels and exposed messages, or of slower launches.

        Args:
            tokens: tokens of a microbatch relative to the dry run's.
            context: tokens that a token sees, relative to the dry run's; attention is proportional to it.
        """
        attention = self.kinds["attention"]
        remainder = self.compute - attention + self.exposed
        return max(tokens * (remainder + attention * context), self.launch)


@dataclass(slots=True)
class PhaseSeconds:
    """Seconds of a rank in one phase."""

    passes: dict[tuple[int, bool], PassSeconds]
    """By model chunk, and whether the pass is a backward pass."""
    outside: float = 0.0
    """Outside of the passes: the optimizer's update, the gradient's norm, other collectives of the step."""
    gradients: float = 0.0
    """Messages that reduce the gradients, once a step."""
    parameters: float = 0.0
    """Messages that gather the weights, once a step."""
    send_s: float = 0.0
    """A message to a neighbouring pipeline stage."""


def time_product(hardware: Hardware, work: Work) -> float:
    """Seconds of a product, or of a layer's expert products: a roofline."""
    # Products are computed in tiles of the result. The last wave of tiles leaves multiprocessors idle, and every tile
    # has a start and an end that do not depend on the inner dimension, hence k / (k + inner).
    (m, k, n, number), efficiency = work.sizes, hardware.efficiency
    if not work.flops:
        return 0.0
    filled = max(_fill_share(m / number, n, number, hardware.sms, tile) for tile in TILES)
    fp8 = efficiency.matmul_fp8 / efficiency.matmul if work.dtype == "fp8" else 1.0
    share = (efficiency.grouped if work.kind == "grouped_matmul" else efficiency.matmul) * fp8
    speed = hardware.flops.get(work.dtype, hardware.flops["bfloat16"]) * share * filled * k / (k + efficiency.inner)
    return (
        max(work.flops / speed, work.nbytes / (hardware.memory_bytes_per_s * efficiency.memory)) + efficiency.kernel_s
    )


def _fill_share(rows: float, columns: int, number: int, sms: int, tile: tuple[int, int, float]) -> float:
    """Share of the peak that a tile reaches on results [rows, columns]."""
    high, wide = math.ceil(rows / tile[0]), math.ceil(columns / tile[1])
    used = rows / tile[0] / high * columns / tile[1] / wide
    tiles = number * high * wide
    return used * tiles / (math.ceil(tiles / sms) * sms) * tile[2]


def time_operator(hardware: Hardware, work: Work) -> float:
    """Seconds of an operator that is not a message."""
    efficiency = hardware.efficiency
    moved = work.nbytes / (hardware.memory_bytes_per_s * efficiency.memory)
    if work.kind in ("matmul", "grouped_matmul"):
        return time_product(hardware, work)
    if work.kind == "attention":
        return max(work.flops / (hardware.flops["bfloat16"] * efficiency.attention), moved) + efficiency.kernel_s
    return moved + efficiency.kernel_s


def time_message(hardware: Hardware, work: Work, copies: int = 1) -> float:
    """Seconds of a message: a collective, or a send between two ranks."""
    if work.kind == "send":
        first_domain, second_domain = (rank // hardware.gpus_per_domain for rank in work.ranks)
        efficiency = hardware.efficiency
        inside, outside = (
            hardware.local_bytes_per_s * efficiency.nvlink,
            hardware.network_bytes_per_s * efficiency.network,
        )
        return work.nbytes / (inside if first_domain == second_domain else outside) + efficiency.message_s
    return time_collective(hardware, work.name, work.nbytes, work.ranks, copies)


def time_collective(hardware: Hardware, name: str, nbytes: int, ranks: tuple[int, ...], copies: int = 1) -> float:
    """Seconds of a collective.

    Rings (all-gather, reduce-scatter; twice for an all-reduce) move (n - 1) / n of the bytes through every rank: at
    NVLink's speed within a domain, else at that of the ports of all ranks that a domain has in the group together, and
    at most NVLink's. In an all-to-all each rank sends 1 / n of its bytes to every rank, over NVLink or its own port.

    Args:
        hardware: the GPUs.
        name: the collective's name in torch, or that of a fused layer.
        nbytes: bytes of the larger side on each rank.
        ranks: global ranks.
        copies: of an all-to-all, copies of a token that a domain gets as one message (`Overlap.expert_copies`). With d
            domains they go to d (1 - (1 - 1/d)^copies) of them on average.
    """
    count, efficiency = len(ranks), hardware.efficiency
    if count < 2:
        return 0.0
    domains = Counter(rank // hardware.gpus_per_domain for rank in ranks)
    local, number = max(domains.values()), len(domains)
    inside, outside = hardware.local_bytes_per_s * efficiency.nvlink, hardware.network_bytes_per_s * efficiency.network
    if "alltoall" in name:
        # A token's copies for experts of one domain may travel as one and be copied there: the share of the copies that
        # travel. For one copy it is 1.
        way = number * (1 - (1 - 1 / number) ** copies) / copies
        remote = nbytes * (count - local) / count * way
        return max(remote / outside, nbytes * (count - 1) / count / inside) + efficiency.message_s
    if name == "ring":  # every rank passes its part to the next one, and one link of the ring is the slowest
        speed = inside if number == 1 else outside
    else:
        speed = inside if number == 1 else min(inside, outside * local)
    times = 2 if name.startswith("allreduce") else 1
    return times * nbytes * (count - 1) / count / speed + efficiency.message_s


def time_tree(ranks: int, domain: int) -> float:
    """Seconds of an all-reduce of NCCL between domains, besides its bytes.

    NCCL's own model of its tree with the protocol LL128 (src/graph/tuning.cc of NCCL 2.28): 14 us, and twice, up and
    down the tree, 1.25 us for each further rank of a domain and 8.5 us for each level of domains.
    """
    domains = math.ceil(ranks / domain)
    return 14e-6 + 2 * ((min(ranks, domain) - 1) * 1.25e-6 + math.ceil(math.log2(domains)) * 8.5e-6)


def time_local_reduce(ranks: int) -> float:
    """Seconds of an all-reduce of NCCL within a domain, besides its bytes.

    As in `time_tree`, the faster of two: a ring with the protocol LL, 6.6 us and 0.6 us for each of 2 (n - 1) steps,
    and the reduction by NVLink's switches (NVLS), 25 us.
    """
    return min(6.6e-6 + 2 * (ranks - 1) * 0.6e-6, 25e-6)


def sum_phase(
    work: Mapping[Work, int], passes: Mapping[tuple[str, int], int], phase: str, hardware: Hardware, overlap: Overlap
) -> PhaseSeconds:
    """Add up the seconds of a phase, by passes of a microbatch.

    Args:
        work: `DryReport.work`.
        passes: `DryReport.passes`.
        phase: name of the phase, as in the dry run.
        hardware: the GPUs.
        overlap: messages that something hides.
    """
    total = PhaseSeconds({}, 0.0)
    number = {chunk: times for (name, chunk), times in passes.items() if name == phase}
    # By pass: seconds of ring attention's messages, and of its attention.
    rings: dict[tuple[int, bool], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for piece, times in work.items():
        if piece.phase != phase:
            continue
        if piece.name in _GRADIENTS:
            total.gradients += times * time_message(hardware, piece)
        elif piece.name == _PARAMETERS:
            total.parameters += times * time_message(hardware, piece)
        elif piece.kind == "send":
            total.send_s = max(total.send_s, time_message(hardware, piece))
        elif piece.chunk is None:
            messages = piece.kind == "collective"
            total.outside += times * (time_message(hardware, piece) if messages else time_operator(hardware, piece))
        else:
            key, share = (piece.chunk, piece.is_backward), times / number[piece.chunk]
            seconds_of_pass = total.passes.setdefault(key, PassSeconds())
            _add_work(seconds_of_pass, piece, share, hardware, overlap, rings[key])
    # Ring attention passes keys on while it computes, so only what takes longer than the attention is exposed.
    for key, (ring, attention) in rings.items():
        total.passes[key].exposed += max(0.0, ring - attention)
    return total


def _add_work(
    total: PassSeconds, piece: Work, share: float, hardware: Hardware, overlap: Overlap, ring: list[float]
) -> None:
    launches = _RING_LAUNCHES * len(piece.ranks) if piece.name == "ring" else 1
    total.launch += share * launches * hardware.efficiency.launch_s
    share *= overlap.expert_skew if piece.kind == "grouped_matmul" or "alltoall" in piece.name else 1.0
    if piece.kind != "collective":
        seconds = share * time_operator(hardware, piece)
        total.compute += seconds
        total.kinds[piece.kind] += seconds
        ring[1] += seconds if piece.kind == "attention" else 0.0
        return
    seconds = share * time_message(hardware, piece, overlap.expert_copies)
    total.kinds[piece.name] += seconds
    if piece.name == "ring":
        ring[0] += seconds
    else:
        total.exposed += seconds * (1 - _find_hidden_share(piece, overlap, hardware.efficiency))


def _find_hidden_share(message: Work, overlap: Overlap, efficiency: Efficiency) -> float:
    """Find the share of a pass's message that computing hides."""
    # In a backward pass a column-parallel layer gathers its input while it computes the gradient of that input, and
    # scatters this gradient while it computes the weight's; the row-parallel layer's gathering is not hidden. So all
    # that is scattered or reduced is hidden, and half of what is gathered.
    if "alltoall" in message.name:
        return efficiency.hidden if overlap.experts else 0.0
    if message.name not in _OF_TENSOR:
        return 0.0
    if overlap.tensor:
        return efficiency.hidden_tensor
    if not message.is_backward:
        return 0.0
    return efficiency.hidden_tensor / 2 if message.name == "allgather" else efficiency.hidden_tensor
