"""The curriculum's loader: levels follow accuracy, and a resumed run continues exactly."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from megatron_grpo.config.data_schema import CurriculumConfig
from megatron_grpo.config.errors import ConfigError, RunError
from megatron_grpo.data.curriculum import CurriculumLoader, read_levels
from megatron_grpo.data.loader import iterate_batches
from tests.support.trajectories import make_outcome

LEVELS = [0] * 7 + [2] * 9 + [5] * 6
CONFIG = CurriculumConfig(column="level", raise_at=0.75, window=8)


class Rows:
    """Prompts that are their numbers; the third is left out."""

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"idx": number, "loss_multiplier": float(number != 3)}


def make(levels: list[int] = LEVELS, size: int = 3) -> CurriculumLoader:
    rows: Any = Rows()
    return CurriculumLoader(rows, levels, CONFIG, prompts_per_batch=size, seed=4)


def draw(batches: Iterator[Any], count: int) -> list[list[int]]:
    return [[datum["idx"] for datum in batch] for batch in islice(batches, count)]


def judge(loader: CurriculumLoader, rows: list[int], correct: int) -> str | None:
    """Two responses to each row, the first `correct` of them right."""
    outcomes = [make_outcome(0, prompt_idx=row, correct=False) for row in rows for _ in range(2)]
    for outcome in outcomes[:correct]:
        outcome.correct = True
    return loader.observe(outcomes)


def test_a_level_begins_when_the_last_responses_are_accurate() -> None:
    loader = make()
    batches = iterate_batches(loader, 100)
    first = draw(batches, 2)
    assert {row for batch in first for row in batch} == {0, 1, 2, 4, 5, 6}, "row 3 is left out"
    assert judge(loader, first[0], 6) is None, "six responses are fewer than the window"
    assert judge(loader, first[1], 3) is None, "5 of the last 8 are right"
    assert judge(loader, [0, 8, 9], 2) is None, "those to rows of other levels do not count"
    (again,) = draw(batches, 1)
    assert {*again} < {*range(7)}, "the next pass over the same level"
    assert loader.epoch == 1
    assert judge(loader, again, 6) == "100% of 8 responses to level 0 are correct: level 2 begins"
    (second,) = draw(batches, 1)
    assert {*second} < {*range(7, 16)}
    assert loader.epoch == 1, "a level's end ends no epoch"
    assert judge(loader, [7, 8, 9], 6) is None, "a level has a window of its own"
    judge(loader, [*range(7, 11)], 8)
    (third,) = draw(batches, 1)
    assert {*third} < {*range(16, 22)}
    assert judge(loader, [*range(16, 20)], 8) is None, "the highest level stays"
    assert {row for batch in draw(batches, 3) for row in batch} == {*range(16, 22)}


def test_passes_have_different_orders_and_end_with_the_epochs() -> None:
    batches = iterate_batches(make(), 2)
    drawn = draw(batches, 100)
    assert len(drawn) == 4
    assert sorted(drawn[0] + drawn[1]) == sorted(drawn[2] + drawn[3])
    assert drawn[:2] != drawn[2:]
    with pytest.raises(RunError, match="not one batch of 8 prompts of level 0: it has 7 rows, of which 1 are left out"):
        draw(iterate_batches(make(size=8), 2), 1)


def test_a_resumed_loader_continues_exactly() -> None:
    loader = make()
    batches = iterate_batches(loader, 100)
    states, drawn = [], []
    for step in range(12):
        drawn += draw(batches, 1)
        judge(loader, drawn[-1], 6 if step > 3 else 3)
        states.append(loader.state_dict())
    assert loader.level == 5
    for step in range(11):
        resumed = make()
        resumed.load_state_dict(states[step])
        again, rest = iterate_batches(resumed, 100), []
        for later in range(step + 1, 12):
            rest += draw(again, 1)
            judge(resumed, rest[-1], 6 if later > 3 else 3)
        assert rest == drawn[step + 1 :]
    with pytest.raises(ConfigError, match="written by a run with other rows"):
        make([0] * 8).load_state_dict(states[0])


@pytest.mark.parametrize("level", [None, "2", -1, True, 1.5])
def test_rows_need_a_level(level: Any) -> None:
    assert read_levels([{"level": 0}, {"level": 7}], "level") == [0, 7]
    with pytest.raises(ValueError, match="names no level: usable row 1 has"):
        read_levels([{"level": 0}, {"level": level}], "level")
