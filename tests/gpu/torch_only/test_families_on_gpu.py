"""Every family's tiny model on one GPU, in float32 by torch's layers, against transformers on the CPU."""

from pathlib import Path

import pytest
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING

from megatron_grpo.verification.problem import TINY, compute_truth, prepare_model
from megatron_grpo.verification.ranks import RankResults, Task, compare_layout
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.test_families import BATCH, measure_on_rank

LOGPROB, GRADIENT = 2e-4, 2e-3
"""Tolerances. Products on a GPU are summed in another order than transformers' on the CPU."""


@pytest.mark.parametrize("family", TINY)
def test_a_family_computes_what_transformers_computes(family: str, tmp_path: Path) -> None:
    if TINY[family].get("model_type", family) not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {family}")
    if family == "minimax_m2" and Version(transformers.__version__) < Version("5.19"):
        pytest.skip("before 5.19 transformers rotates whole heads of MiniMax-M2, against its rotary_dim")
    folder = prepare_model(f"tiny:{family}", False, tmp_path / family, 0)
    layout = Layout()
    task = Task(str(folder), layout.parallel, True, BATCH, 1, 0, 300.0)
    results = [RankResults(**rank[0]) for rank in run_on_ranks(layout, measure_on_rank, [task], timeout_s=300.0)]
    row = compare_layout("tp1", True, results, compute_truth(folder, BATCH), BATCH, None)
    assert row.exact
    assert row.logprob <= LOGPROB, f"{family}: log-probabilities differ by {row.logprob:.1e}"
    assert row.gradient <= GRADIENT, f"{family}: gradient of {row.worst_tensor} is off by {row.gradient:.1e}"
