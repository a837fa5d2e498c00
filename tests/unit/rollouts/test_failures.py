"""How many rollouts may fail, and what is said when more do."""

import pytest

from megatron_grpo.config.errors import SamplingError
from megatron_grpo.rollouts.failures import require_few_failures
from tests.support.trajectories import failed_trajectory, make_outcome


def test_as_many_as_allowed_pass() -> None:
    outcomes = [make_outcome() for _ in range(9)] + [failed_trajectory().outcome]
    require_few_failures(outcomes, 0.1)
    require_few_failures([], 0.0)
    require_few_failures(outcomes[:9], 0.0)


def test_one_more_is_told_with_the_most_frequent_reasons_and_an_example() -> None:
    kinds = [("rare", 4), ("often", 7), ("often", 9), ("seldom", 1), ("other", 2), ("last", 3)]
    failed = [failed_trajectory(failure=reason, prompt_idx=row).outcome for reason, row in kinds]
    message = (
        r"^6 of 26 rollouts failed, more than rollouts.max_failed_fraction=0.2 allows: 2 x often, row 7; 1 x rare, "
        r"row 4; 1 x seldom, row 1; and 2 other reasons$"
    )
    with pytest.raises(SamplingError, match=message):
        require_few_failures([make_outcome() for _ in range(20)] + failed, 0.2)
