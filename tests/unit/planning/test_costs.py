"""Seconds of operators and messages against closed forms."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron_grpo.planning.costs import Overlap, sum_phase, time_collective, time_message, time_operator, time_product
from megatron_grpo.planning.dry.work import Work
from megatron_grpo.platform.hardware import Efficiency, load_hardware

IDEAL = Efficiency(
    matmul=1, matmul_fp8=1, inner=0, grouped=1, attention=1, memory=1, nvlink=1, network=1, kernel_s=0, launch_s=0,
    message_s=0, hidden=1, hidden_tensor=1,
)  # fmt: skip
H100 = replace(load_hardware("h100"), efficiency=IDEAL)


def work(**fields: object) -> Work:
    defaults = {"phase": "train", "chunk": 0, "is_backward": False, "kind": "elementwise", "name": "norm"} | fields
    return Work(**defaults)  # type: ignore[arg-type]


def product(m: int, k: int, n: int, number: int = 1, dtype: str = "bfloat16") -> Work:
    nbytes = 2 * (m * k + number * k * n + m * n)
    kind = "grouped_matmul" if number > 1 else "matmul"
    return work(kind=kind, flops=2.0 * m * k * n, nbytes=nbytes, sizes=(m, k, n, number), dtype=dtype)


def test_a_product_that_fills_the_gpu_runs_at_its_peak() -> None:
    m, n = 128 * 132, 2048
    assert time_product(H100, product(m, 8192, n)) == pytest.approx(2 * m * 8192 * n / 989.4e12)
    assert time_product(H100, product(m, 8192, n, dtype="fp8")) == pytest.approx(2 * m * 8192 * n / 1978.9e12)


def test_a_last_wave_of_tiles_costs_as_much_as_a_full_one() -> None:
    full, partial = (time_product(H100, product(128 * tiles, 8192, 2048)) for tiles in (132, 133))
    assert partial == pytest.approx(9 / 8 * full)  # 133 * 8 tiles of 128 x 256 on 132 multiprocessors


def test_a_thin_product_runs_at_the_speed_of_the_memory() -> None:
    thin = product(1, 4096, 4096)
    assert time_product(H100, thin) == pytest.approx(thin.nbytes / 3.35e12)


def test_experts_pay_for_their_unfilled_tiles() -> None:
    together, apart = product(5280, 4096, 4096), product(5280, 4096, 4096, number=20)
    assert 1.1 < time_product(H100, apart) / time_product(H100, together) < 1.6  # 264 rows each, three tiles of 128


def test_traffic_and_attention() -> None:
    assert time_operator(H100, work(nbytes=3350)) == pytest.approx(1e-9)
    attention = work(kind="attention", flops=989.4e12, nbytes=1)
    assert time_operator(H100, attention) == pytest.approx(1.0)


def test_rings_within_and_between_domains() -> None:
    nbytes, node, nodes = 10**9, tuple(range(8)), tuple(range(16))
    assert time_collective(H100, "allgather", nbytes, node) == pytest.approx(7 / 8 / 450)
    assert time_collective(H100, "allreduce_", nbytes, node) == pytest.approx(2 * 7 / 8 / 450)
    assert time_collective(H100, "allgather", nbytes, nodes) == pytest.approx(15 / 16 / 400)  # eight ports of 50 GB/s
    assert time_collective(H100, "allgather", nbytes, tuple(range(0, 64, 8))) == pytest.approx(7 / 8 / 50)
    assert time_collective(H100, "ring", nbytes, nodes) == pytest.approx(15 / 16 / 50)
    assert time_collective(H100, "allgather", nbytes, (3,)) == 0.0


def test_all_to_all_sends_the_copies_of_a_token_once_to_a_domain() -> None:
    nbytes, ranks = 10**9, tuple(range(32))
    plain = time_collective(H100, "alltoall_base_", nbytes, ranks)
    assert plain == pytest.approx(24 / 32 / 50)
    # Brute force: the mean number of distinct domains among 8 draws of 4 domains.
    ways = sum(_distinct(draws, 4) for draws in range(4**6)) / 4**6 / 6
    assert time_collective(H100, "alltoall_base_", nbytes, ranks, copies=6) == pytest.approx(plain * ways)


def _distinct(number: int, domains: int) -> int:
    return len({number // domains**index % domains for index in range(6)})


def test_a_send_takes_the_link_between_its_ranks() -> None:
    inside, between = (work(kind="send", name="send", nbytes=10**9, ranks=(0, outside)) for outside in (7, 8))
    assert time_message(H100, inside) == pytest.approx(1 / 450)
    assert time_message(H100, between) == pytest.approx(1 / 50)


def test_passes_hide_what_the_configuration_overlaps() -> None:
    ring = (0, 1)
    times = Counter(
        {
            work(kind="matmul", flops=0.0): 2,
            work(nbytes=int(3.35e12)): 4,
            work(kind="collective", name="allgather", nbytes=900 * 10**9, ranks=ring): 2,
            work(is_backward=True, kind="collective", name="allgather", nbytes=900 * 10**9, ranks=ring): 2,
            work(is_backward=True, kind="collective", name="reduce_scatter", nbytes=900 * 10**9, ranks=ring): 2,
            work(chunk=None, nbytes=int(3.35e12)): 3,
            work(chunk=None, kind="collective", name="reduce_scatter_tensor_coalesced_", nbytes=10**9, ranks=ring): 1,
        }
    )
    passes = {("train", 0): 2}
    plain = sum_phase(times, passes, "train", H100, Overlap())
    assert plain.passes[0, False].compute_seconds() == pytest.approx(
        2 + 1
    )  # of two microbatches, each message takes a second
    assert plain.passes[0, True].compute_seconds() == pytest.approx(0.5)  # half of what is gathered
    assert plain.outside == pytest.approx(3.0)
    assert plain.gradients == pytest.approx(0.5 / 450)
    overlapped = sum_phase(times, passes, "train", H100, Overlap(tensor=True))
    assert overlapped.passes[0, False].compute_seconds() == pytest.approx(2.0)


def test_ranks_wait_for_the_one_whose_experts_have_most_tokens() -> None:
    work_counts = Counter(
        {
            product(128 * 132, 8192, 2048, number=4): 1,
            work(kind="collective", name="alltoall_base_", nbytes=10**9, ranks=tuple(range(8))): 1,
            work(nbytes=int(3.35e12)): 1,
        }
    )
    even, skewed = (
        sum_phase(work_counts, {("train", 0): 1}, "train", H100, Overlap(expert_skew=skew))
        .passes[0, False]
        .compute_seconds()
        for skew in (1.0, 1.5)
    )
    assert skewed - 1.0 == pytest.approx(1.5 * (even - 1.0))  # but for the second of other work


def test_attention_grows_with_the_tokens_that_a_token_sees() -> None:
    work_counts = Counter({work(kind="attention", flops=989.4e12): 1, work(nbytes=int(3.35e12)): 1})
    unit = sum_phase(work_counts, {("train", 0): 1}, "train", H100, Overlap()).passes[0, False]
    assert unit.compute_seconds() == pytest.approx(2.0)
    assert unit.compute_seconds(tokens=0.5, context=0.5) == pytest.approx(0.5 + 0.25)


def test_a_pass_takes_as_long_as_the_host_launches_it() -> None:
    slow = replace(H100, efficiency=replace(IDEAL, launch_s=1.0))
    work_counts = Counter({work(nbytes=1): 10})
    assert sum_phase(work_counts, {("train", 0): 5}, "train", slow, Overlap()).passes[0, False].compute_seconds() == 2.0


def test_ring_attention_is_launched_once_for_each_rank_of_the_ring() -> None:
    slow = replace(H100, efficiency=replace(IDEAL, launch_s=1.0))
    ring = work(kind="collective", name="ring", nbytes=8, ranks=tuple(range(0, 32, 4)))
    attention = work(kind="attention", flops=1.0)
    passes = sum_phase(Counter({ring: 3, attention: 3}), {("train", 0): 1}, "train", slow, Overlap()).passes
    # Three layers on eight ranks: eight turns of eight operators each, and one operator that is the attention itself.
    assert passes[0, False].compute_seconds() == 3 * (8 * 8 + 1)


def test_hosts_of_grace_launch_more_slowly() -> None:
    # Published for a linear layer of torch: 37.08 us on GB200, 13.48 us in a DGX H100.
    seconds = {name: load_hardware(name).efficiency.launch_s for name in ("h100", "b200", "gb200")}
    assert seconds == pytest.approx({"h100": 13.48e-6, "b200": 13.48e-6, "gb200": 37.08e-6}, rel=0.01)


def test_profiles_are_complete_and_faster_from_one_to_the_next() -> None:
    profiles = [load_hardware(name) for name in ("a100", "h100", "h200", "b200", "gb200")]
    assert all({"float32", "bfloat16"} == set(profile.flops) - {"fp8"} for profile in profiles)
    speeds = [profile.memory_bytes_per_s for profile in profiles]
    assert speeds == sorted(speeds)


def test_a_profile_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    ours = replace(load_hardware("h100"), name="ours", reserve_gib=4.0)
    file.write_text(yaml.safe_dump({"ours": ours.as_dict()}))
    assert load_hardware(str(file)) == ours
    file.write_text("ours: {speed: 4}")
    with pytest.raises(ValueError, match="no entry speed"):
        load_hardware(str(file))
    file.write_text("ours: {sms: 4}")
    with pytest.raises(ValueError, match="is not complete"):
        load_hardware(str(file))
    file.write_text("ours: 4")
    with pytest.raises(ValueError, match="needs one entry"):
        load_hardware(str(file))
    with pytest.raises(ValueError, match="a100, h100"):
        load_hardware("h999")
