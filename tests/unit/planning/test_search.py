"""A search leaves layouts out that take as much memory as one that does not fit, or more: dry runs say that they do."""

import pytest

from megatron_grpo.models.shape import ModelShape
from megatron_grpo.planning.dry_run import run_dry
from megatron_grpo.planning.estimates import count_static_bytes
from megatron_grpo.planning.policy_layouts import Candidate
from megatron_grpo.planning.search import _takes_more
from tests.unit.planning.test_dry_run import DENSE, EXPERTS, needs_no_gpu, small_run

pytestmark = needs_no_gpu


def measure_candidate(shape: ModelShape, **parallel: int | bool) -> tuple[Candidate, int]:
    """A layout, and the most bytes that its first rank takes."""
    config = small_run(**parallel)
    return Candidate(config, count_static_bytes(config, shape), 0.0), run_dry(config, shape, 0).peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "larger", "smaller"),
    [
        pytest.param(DENSE, {"data": 4}, {"context": 2, "data": 2}, id="tokens"),
        pytest.param(
            DENSE, {"pipeline": 2, "data": 2}, {"pipeline": 2, "context": 2}, id="pipeline", marks=pytest.mark.slow
        ),
        pytest.param(EXPERTS, {"expert": 2, "data": 4}, {"expert": 4, "data": 4}, id="experts"),
    ],
)
def test_a_layout_that_is_left_out_takes_more_memory(
    shape: ModelShape, larger: dict[str, int | bool], smaller: dict[str, int | bool]
) -> None:
    (candidate, its_bytes), (larger_, least) = measure_candidate(shape, **larger), measure_candidate(shape, **smaller)
    assert _takes_more(candidate, larger_)
    assert not _takes_more(larger_, candidate)
    assert its_bytes >= least


@pytest.mark.parametrize("change", [{"tensor": 2}, {"pipeline": 2}, {"pipeline": 2, "virtual_pipeline": 2}])
def test_layouts_of_other_kinds_are_not_compared(change: dict[str, int]) -> None:
    first, second = (Candidate(small_run(data=4, **settings), 1.0, 0.0) for settings in ({}, change))
    assert not _takes_more(first, second)
    assert not _takes_more(second, first)
