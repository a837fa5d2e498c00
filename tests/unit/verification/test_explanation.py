"""Which explanation of a record is named, and which are mentioned, by planted numbers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.verification.doctor.diagnosis import FLOAT32, Distance, is_rounding
from megatron_grpo.verification.doctor.evidence import Rollout
from megatron_grpo.verification.doctor.explanation import SCREENED, Search
from megatron_grpo.verification.doctor.law import Law, Tokens
from megatron_grpo.verification.doctor.suspects.side import Candidate, Side, Suspect, fit

COUNT = 40


def make_side(recorded: Tensor, rollouts: int = 4) -> Side:
    """A side whose rollouts have equally many tokens; nothing computes it."""
    size = len(recorded) // rollouts
    tokens = Tokens(torch.zeros(size + 1, dtype=torch.int64), torch.arange(1, size + 1), torch.ones(size).long())
    one: Any = Rollout({"group": 0, "sample": 0}, tokens, torch.arange(size))
    oracle: Any = None
    return Side("engine", oracle, [one] * rollouts, [tokens] * rollouts, Law(), recorded)


def candidate(name: str, predicted: Tensor, assumes: int = 1) -> Candidate:
    suspect = Suspect(name, "weights", f"is {name}", "a key", assumes)
    return suspect, lambda side: predicted[: len(side.recorded)]


def search(recorded: Tensor, base: Tensor, rounding: Distance = FLOAT32) -> Search:
    return Search(make_side(recorded), base, rounding, time.monotonic() + 60)


def numbers(seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(COUNT, generator=torch.Generator().manual_seed(seed))


BASE = numbers(0) - 3
RECORDED = BASE + numbers(1, 0.1)


def test_what_reproduces_the_record_is_named_and_what_comes_near_is_mentioned() -> None:
    tried = search(RECORDED, BASE)
    near, far = RECORDED + numbers(2, 0.003), BASE + 0.3 * (RECORDED - BASE)
    tried_out = [candidate("near", near), candidate("far", far), candidate("exact", RECORDED + 1e-6)]
    assert tried.try_groups([lambda _: iter(tried_out)])
    finding = tried.conclude()
    assert finding is not None
    assert (finding.name, round(finding.explained, 3)) == ("exact", 1.0)
    assert [text.partition(":")[0] for text in finding.others] == ["is near"]


def test_of_equal_explanations_the_one_that_assumes_least_is_named() -> None:
    tried = search(RECORDED, BASE)
    tried.try_groups([lambda _: iter([candidate("set", RECORDED, 5), candidate("tensor", RECORDED + 1e-6, 1)])])
    finding = tried.conclude()
    assert finding is not None
    assert finding.name == "tensor"


def test_what_leaves_much_of_the_gap_is_only_mentioned() -> None:
    """77% were once enough for innocent tensors."""
    tried = search(RECORDED, BASE)
    assert not tried.try_groups([lambda _: iter([candidate("innocent", BASE + 0.77 * (RECORDED - BASE))])])
    assert tried.conclude() is None
    assert tried.describe_mentioned() == ["is innocent: 77.0%"]


def test_what_leaves_a_little_is_named_as_not_all() -> None:
    tried = search(RECORDED, BASE)
    tried.try_groups([lambda _: iter([candidate("most", BASE + 0.9 * (RECORDED - BASE))])])
    finding = tried.conclude()
    assert finding is not None
    assert "something else differs, too" in finding.text


def test_near_rounding_a_small_gain_is_no_explanation() -> None:
    """A difference a little above rounding is within it after any gain."""
    rounding = Distance(0.05, 1.0)
    recorded = BASE + numbers(3, 0.07)
    tried = search(recorded, BASE, rounding)
    assert not tried.try_groups([lambda _: iter([candidate("innocent", BASE + 0.3 * (recorded - BASE))])])
    assert tried.conclude() is None


def test_the_closest_on_the_rollouts_that_differ_most_are_tried_on_all() -> None:
    count = 8 * SCREENED
    base, recorded = torch.full((count,), -2.0), torch.full((count,), -2.0)
    recorded[: count // 2] += torch.linspace(0.1, 0.5, count // 2)
    seen: list[int] = []

    def group(part: Side) -> Iterator[Candidate]:
        def predict(side: Side) -> Tensor:
            seen.append(len(side.recorded))
            return side.recorded

        for number in range(20):
            yield Suspect(f"suspect {number}", "weights", f"is {number}", "a key"), predict

    side = make_side(recorded, rollouts=32)
    tried = Search(side, base, FLOAT32, time.monotonic() + 60)
    tried.try_groups([group])
    assert seen[:20] == [SCREENED] * 20
    assert set(seen[20:]) == {count}
    assert len(seen) < 40


def test_a_search_ends_in_time_and_says_so() -> None:
    tried = Search(make_side(RECORDED), BASE, FLOAT32, time.monotonic() - 1)
    tried.try_groups([lambda _: iter([candidate("first", BASE), candidate("second", RECORDED)])])
    assert tried.ran_out_of_time
    assert [one.suspect.name for one in tried.explanations] == ["first"]


def test_rounding_moves_the_same_tokens_the_same_way_and_a_wrong_tensor_does_not() -> None:
    coarse = BASE + numbers(4, 0.01)
    another_program = coarse + numbers(5, 0.005)
    assert is_rounding(make_side(another_program), BASE, coarse)
    wrong_tensor = BASE + numbers(6, 0.01)
    assert not is_rounding(make_side(wrong_tensor), BASE, coarse), "as large, and elsewhere"
    larger = BASE + 10 * (coarse - BASE)
    assert not is_rounding(make_side(larger), BASE, coarse)
    one_sided = BASE + (coarse - BASE).abs()
    assert not is_rounding(make_side(one_sided), BASE, coarse)
    one_rollout = torch.cat([coarse[:10], BASE[10:]])
    assert not is_rounding(make_side(one_rollout), BASE, coarse)


def test_a_number_is_fitted_until_it_predicts_the_record() -> None:
    side = make_side(BASE * 1.234567)
    fitted = fit(side, [0.5, 1.0, 2.0, 4.0], lambda tried: (BASE * number for number in tried))
    assert abs(fitted - 1.234567) < 1e-5
