"""Runs whose sampling filters tokens: trainer and engine agree, with asynchronous sampling and with several options."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import TrainingRun
from tests.integration.whole_runs import read_options
from tests.support.documents import undocumented

pytestmark = pytest.mark.slow

OPTIONS = read_options("filtered_run")

SHORT = OPTIONS["short"]
FILTERS = ("generation.top_p=0.9", "generation.top_k=20")


def finish(run: TrainingRun) -> list[dict[str, Any]]:
    assert run.finish() == 0, run.log()
    rows: list[dict[str, Any]] = run.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
    return rows


def test_an_asynchronous_run_filters(tmp_path: Path) -> None:
    """In the first step sampler and trainer have equal weights: their log-probabilities agree, kept token by token."""
    options = ("policy.parallel.tensor=2", "policy.parallel.pipeline=1", "generation.temperature=1.5")
    rows = finish(TrainingRun(tmp_path / "run", *SHORT, *FILTERS, *options, recipe="quickstart_async"))
    assert rows[0]["token_mult_prob_error"] < 1.001
    assert rows[0]["sampling_importance_ratio"] == pytest.approx(1, abs=1e-3)
    assert all(row["outside_filter_fraction"] < 0.05 for row in rows)
    assert undocumented(name for name in rows[0] if name not in ("step", "timing", "throughput")) == set()


def test_filters_beside_what_compares_and_a_reference(tmp_path: Path) -> None:
    """With min-p, a KL in the reward, the pass before the step, a threshold and a replay."""
    options = OPTIONS["filters_beside_what_compares_and_a_reference"]
    for row in finish(TrainingRun(tmp_path / "run", *SHORT, *FILTERS, *options)):
        assert row["token_mult_prob_error"] < 1.001
        assert row["max_seq_mult_prob_error"] < 1.01
        assert row["num_masked_seqs"] == 0
        assert row["outside_filter_fraction"] < 0.01
