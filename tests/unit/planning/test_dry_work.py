"""The work that a dry run records is what arithmetic says: operations, messages, passes."""

from collections import Counter

import pytest

from megatron_grpo.planning.dry.work import Work
from megatron_grpo.planning.dry_run import DryReport, run_dry
from tests.unit.planning.test_dry_run import DENSE, EXPERTS, recompute, small_run

TOKENS, LENGTH = 128, 64
"""Of a microbatch: all tokens, and tokens of a sequence."""


def flops(report: DryReport, phase: str, **fields: object) -> float:
    """Operations of the entries with these fields, over all microbatches of a phase."""
    return sum(number * entry.flops for entry, number in select_work(report, phase, **fields).items())


def select_work(report: DryReport, phase: str, **fields: object) -> Counter[Work]:
    entries = {
        entry: number
        for entry, number in report.work.items()
        if entry.phase == phase and all(getattr(entry, name) == value for name, value in fields.items())
    }
    return Counter(entries)


def layer_numbers() -> int:
    """Numbers in the matrices of a dense layer."""
    heads = DENSE.attention_heads + 2 * DENSE.key_value_heads
    attention = DENSE.hidden * DENSE.head_dim * (heads + DENSE.attention_heads)
    return attention + 3 * DENSE.hidden * DENSE.ffn_hidden


def attention_flops() -> float:
    """Of a layer's forward pass: two products of [length, head_dim] and [head_dim, length], half of them masked."""
    return 4 * TOKENS * LENGTH / 2 * DENSE.attention_heads * DENSE.head_dim


ROWS = TOKENS - TOKENS // LENGTH
"""Tokens whose log-probability the head computes: all but the first of each sequence."""


def test_operations_of_a_dense_model() -> None:
    report = run_dry(small_run(), DENSE, 0)
    head = 2 * ROWS * DENSE.hidden * DENSE.vocab
    forward = DENSE.layers * 2 * TOKENS * layer_numbers() + head
    assert flops(report, "logprobs", kind="matmul") == forward
    assert flops(report, "train", kind="matmul", is_backward=False) == forward
    assert flops(report, "train", kind="matmul", is_backward=True) == 2 * (forward - head) + 3 * head  # logits again
    assert flops(report, "logprobs", kind="attention") == DENSE.layers * attention_flops()
    assert flops(report, "train", kind="attention", is_backward=True) == 2.5 * DENSE.layers * attention_flops()


@pytest.mark.parametrize("name", ["fipo", "kl_cov"])
def test_losses_that_look_at_other_tokens_have_plans(name: str) -> None:
    config = small_run(context=2)
    config.loss_fn.objective = name
    assert flops(run_dry(config, DENSE, 0), "train", kind="matmul", is_backward=True) > 0


@pytest.mark.slow
def test_a_recomputed_layer_runs_forward_twice() -> None:
    config = small_run()
    plain = run_dry(config, DENSE, 0)
    recompute(config)
    report = run_dry(config, DENSE, 0)
    again = flops(report, "train", is_backward=True) - flops(plain, "train", is_backward=True)
    assert again == DENSE.layers * (2 * TOKENS * layer_numbers() + attention_flops())


def test_tensor_parallel_ranks_share_operations_and_exchange_activations() -> None:
    report = run_dry(small_run(tensor=2, sequence=True, data=2), DENSE, 3)
    products = flops(report, "logprobs", kind="matmul", name="linear")
    assert products == DENSE.layers * 2 * TOKENS * layer_numbers() / 2
    nbytes = 2 * TOKENS * DENSE.hidden
    for name, forward, backward in (("allgather", 2, 4), ("reduce_scatter", 2, 2)):
        for is_backward, expected in ((False, forward), (True, backward)):
            collectives = select_work(report, "train", kind="collective", name=name, is_backward=is_backward)
            assert {(entry.nbytes, entry.ranks) for entry in collectives} == {(nbytes, (2, 3))}
            assert collectives.total() == expected * DENSE.layers


def test_context_parallel_ranks_share_operations() -> None:
    report = run_dry(small_run(context=2), DENSE, 1)
    assert flops(report, "logprobs", kind="attention") == DENSE.layers * attention_flops() / 2
    key_value = 2 * 2 * TOKENS * DENSE.key_value_heads * DENSE.head_dim
    ring = select_work(report, "logprobs", name="ring")
    assert {(entry.nbytes, entry.ranks) for entry in ring} == {(key_value, (0, 1))}
    assert ring.total() == DENSE.layers


def test_experts_get_the_tokens_of_all_ranks() -> None:
    report = run_dry(small_run(expert=2, data=2), EXPERTS, 1)
    experts = EXPERTS.experts
    numbers = 3 * EXPERTS.hidden * experts.ffn_hidden
    forward = flops(report, "train", kind="grouped_matmul", is_backward=False)
    assert forward == EXPERTS.layers * 2 * TOKENS * experts.top_k * numbers
    sent = select_work(report, "train", name="alltoall_base_", is_backward=False)
    rows = max(entry.nbytes for entry in sent) / (2 * EXPERTS.hidden)
    assert rows == TOKENS * experts.top_k


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_every_chunk_has_its_own_passes(rank: int) -> None:
    report = run_dry(small_run(pipeline=2, virtual_pipeline=2), DENSE, rank)
    assert report.passes == {(phase, chunk): 4 for phase in ("logprobs", "train") for chunk in (0, 1)}
    forward = 2 * TOKENS * layer_numbers()  # of a layer, and every chunk has one
    for chunk in (0, 1):
        for is_backward, times in ((False, 1), (True, 2)):
            count = flops(report, "train", name="linear", chunk=chunk, is_backward=is_backward)
            assert count == 4 * times * forward
    sends = select_work(report, "train", name="send")
    assert {(send.nbytes, send.ranks) for send in sends} == {(2 * TOKENS * DENSE.hidden, (rank, 1 - rank))}


def test_the_optimizer_updates_every_number_of_the_rank() -> None:
    report = run_dry(small_run(), DENSE, 0)
    numbers = DENSE.layers * (layer_numbers() + 2 * DENSE.hidden + 2 * DENSE.head_dim) + DENSE.hidden
    numbers += 2 * DENSE.vocab * DENSE.hidden
    updated = sum(number * entry.nbytes for entry, number in select_work(report, "train", name="adam").items())
    assert updated == pytest.approx(7 * 4 * numbers, rel=1e-3)
