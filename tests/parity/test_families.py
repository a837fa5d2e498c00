"""Every family of models against transformers: log-probabilities, gradients, weights, in each layout that it allows."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config.schema import ParallelConfig
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.preflight.layout_checks import check_split
from megatron_grpo.verification.problem import TINY, Truth, compute_truth, make_batch, prepare_model
from megatron_grpo.verification.ranks import RankResults, Row, Task, compare_layout, measure
from megatron_grpo.verify import add_sequence_parallelism, read_layouts
from tests.parity.ranks import Layout, run_on_ranks
from tests.support.rotation import choose_part
from tests.support.vision_models import CONTAINERS, make_vision_model

# Of a decay, of which each token's exponential is multiplied on; of heads whose products have no scale, so that the
# softmax is sharp (Gemma 4); and of factors of experts, whose gradients are small.
GRADIENTS = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_next", "nemotron_h", "gemma4"), 5e-5),
    "gemma4_moe": 1e-4,
}
"""Largest relative error of a gradient where it is not 1e-5."""
QUICK = ["tp2sp", "pp2", "ep2"]
SLOW = ["cp2", "tp2", "tp2pp2", "pp2vp2", "dp2", "cp2dp2", "tp2cp2", "tp2ep2", "pp2ep2", "ep2etp2"]
TURNS = {name: [family for family in TINY if name in choose_part(family, QUICK, 1)] for name in QUICK}
"""By quick layout, the families whose turn it is; `make test-slow` has all of each."""
BATCH = make_batch(vocab=131, sequences=7, longest=40, seed=0)
"""For every replica of the widest layout at least one sequence."""


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Truth]]:
    """A family's tiny model, and what transformers computes with it."""
    problems: dict[str, tuple[Path, Truth]] = {}
    folder = tmp_path_factory.mktemp("families")

    def make(family: str) -> tuple[Path, Truth]:
        if family not in problems:
            path = prepare_model(f"tiny:{family}", False, folder / family, 0)
            problems[family] = path, compute_truth(path, BATCH)
        return problems[family]

    return make


def measure_on_rank(_layout: Layout, tasks: list[Task]) -> list[dict[str, Any]]:
    return [measure(task, lambda _phase: None) for task in tasks]


CASES = [
    pytest.param("tp1", True, TINY, id="tp1-packed"),
    *(pytest.param(name, True, families, id=f"{name}-packed") for name, families in TURNS.items()),
    *(pytest.param(name, True, TINY, marks=pytest.mark.slow, id=f"{name}-packed-all") for name in (*QUICK, *SLOW)),
    *(pytest.param(name, False, TINY, marks=pytest.mark.slow, id=f"{name}-padded") for name in ("tp1", *QUICK, *SLOW)),
]


@pytest.mark.parametrize(("name", "packed", "families"), CASES)
def test_families_compute_what_transformers_computes(
    name: str,
    packed: bool,
    families: Collection[str],
    problem: Callable[[str], tuple[Path, Truth]],
    record_property: Callable[[str, object], None],
) -> None:
    ((_, requested),) = read_layouts("layouts", name)
    by_layout: dict[Layout, list[str]] = {}
    for family in families:
        shape = read_model_shape(problem(family)[0])
        parallel = add_sequence_parallelism(requested, shape)
        if not any(is_broken for is_broken, _key, _text in check_split("parallel", parallel, shape)):
            by_layout.setdefault(lay_out(parallel), []).append(family)
    for layout, members in by_layout.items():
        tasks = [Task(str(problem(family)[0]), layout.parallel, packed, BATCH, 1, 0, 600.0) for family in members]
        ranks = run_on_ranks(layout, measure_on_rank, tasks, timeout_s=600.0)
        for number, family in enumerate(members):
            results = [RankResults(**rank[number]) for rank in ranks]
            row = compare_layout(name, packed, results, problem(family)[1], BATCH, None)
            record_property(family, f"{row.logprob:.1e} {row.gradient:.1e} {row.exact}")
            expect_equal(family, row)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(tensor=2, sequence=True), Layout(pipeline=2)], ids=str)
def test_text_parts_of_vision_models_compute_what_transformers_computes(layout: Layout, tmp_path: Path) -> None:
    truths = {}
    for name in CONTAINERS:
        make_vision_model(name, tmp_path / name)
        truths[name] = compute_truth(tmp_path / name, BATCH)
    tasks = [Task(str(tmp_path / name), layout.parallel, True, BATCH, 1, 0, 600.0) for name in truths]
    ranks = run_on_ranks(layout, measure_on_rank, tasks, timeout_s=600.0)
    for number, (name, truth) in enumerate(truths.items()):
        results = [RankResults(**rank[number]) for rank in ranks]
        expect_equal(name, compare_layout(str(layout), True, results, truth, BATCH, None))


def expect_equal(family: str, row: Row) -> None:
    assert row.logprob <= 2e-5, f"{family}: log-probabilities differ by {row.logprob:.1e}"
    limit = GRADIENTS.get(family, 1e-5)
    assert row.gradient <= limit, f"{family}: {row.worst_tensor} has a gradient that is off by {row.gradient:.1e}"
    assert row.exact, f"{family}: exported weights are not those of the folder"


def lay_out(parallel: ParallelConfig) -> Layout:
    """The layout of the tests' processes."""
    return Layout(**{name: getattr(parallel, name) for name in Layout.__dataclass_fields__})
