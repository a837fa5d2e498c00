"""The refit_plan command line: what it prints, and what it says to mistakes."""

import json

import pytest

from megatron_grpo import refit_plan
from megatron_grpo.planning import meta_engine

LAYOUT = ["+exp=quickstart", "policy.parallel.tensor=2", "policy.parallel.pipeline=1"]


def test_numbers_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert refit_plan.main([*LAYOUT, "--json", "--gb-per-s=2"]) == 0
    plan = json.loads(capsys.readouterr().out)
    sending, receiving = plan["sending"], plan["receiving"]
    assert (sending["ranks"], receiving["ranks"]) == (2, 2)
    assert sending["most_peers"] == receiving["most_peers"] == 2, "both halves of every matrix go to both stages"
    # The embedding, which is tied to the head, is on both stages; everything else is on one.
    assert plan["bytes"] == receiving["bytes"]["smallest"] + receiving["bytes"]["largest"]
    assert plan["estimated_s"] >= receiving["bytes"]["largest"] / 2e9
    assert plan["nccl"] == {"communicators": 0, "ranks": 0, "sending_bytes": 0, "receiving_bytes": 0}, "on CPUs"


def test_on_gpus_all_ranks_share_one_communicator(capsys: pytest.CaptureFixture[str]) -> None:
    assert refit_plan.main([*LAYOUT, "cluster.gpus_per_node=4"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("NCCL:")]
    assert line.split(":")[1].strip() == (
        "one communicator of 4 ranks, up to 671.09 MB of a GPU that sends, 1.21 GB of one that receives"
    )


def test_links_are_listed_where_they_are_few(capsys: pytest.CaptureFixture[str]) -> None:
    assert refit_plan.main(LAYOUT) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if "->" in line] == [
        f"  policy rank {source} -> worker {target}" for source in (0, 1) for target in (0, 1)
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["+exp=quickstart", "--speed=3"], "--speed=3 is not an argument"),
        (["+exp=quickstart", "--gb-per-s=fast"], "--gb-per-s=fast must be float > 0"),
        (["+exp=quickstart", "policy.parallel.tensor=3"], "policy.parallel.tensor=3"),
        (["+exp=llama3_70b_slurm"], "give a folder with the model's config.json"),
    ],
)
def test_a_mistake_is_one_message(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refit_plan.main(words) == 2
    assert message in capsys.readouterr().err


def test_a_trace_that_does_not_end_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_engine, "TIMEOUT_S", 0.01)
    with pytest.raises(ValueError, match=r"the process that traces vLLM's loaders had not ended after 0\.01 s"):
        meta_engine._run("{}")
