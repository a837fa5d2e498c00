"""verify loss=NAME, on real ranks: formulas without dependence on the layout pass, and planted others are told."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_grpo import verify
from megatron_grpo.config.formulas import ADVANTAGES, CORRECTIONS, OBJECTIVES
from megatron_grpo.verification import formula_layouts

LAYOUTS = "[tp2,cp2,pp2,dp2]"
SHORT = ("steps=1", "longest=24", "--json")
PLANTED = """
import torch

def average_of_microbatch(log_ratio, advantages, mask):
    return -log_ratio.exp() * (advantages - advantages[mask].mean())

def read_padding(log_ratio, advantages):
    return -log_ratio.exp() * (advantages - advantages.mean())

def own_tokens(log_ratio, advantages, responses):
    if responses.segments is None:
        sums = (log_ratio * responses.mask).sum(dim=1, keepdim=True)
    else:
        index = responses.segments.sequence_index
        sums = torch.zeros_like(responses.segments.sizes).index_add(0, index, log_ratio)[index]
    return -log_ratio.exp() * advantages * (1 + sums.detach().square())

def towards_engine(logprobs, sampling_logprobs, advantages, *, weight: float = 0.1):
    return -logprobs * advantages + weight * (logprobs - sampling_logprobs).square()

def centred(rewards):
    return rewards - rewards.nanmean(dim=1, keepdim=True)
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working folder."""
    monkeypatch.chdir(tmp_path)
    name = f"planted_in_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(PLANTED)
    return name


def verify_rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[tuple[str, bool], Any]]:
    """The exit code, and the rows by layout and packing."""
    code = verify.main([*arguments, *SHORT])
    rows = json.loads(capsys.readouterr().out)["rows"]
    return code, {(row["layout"], row["packed"]): row for row in rows}


@pytest.mark.parametrize(
    "names", [["gspo", "maxrl"], pytest.param([*OBJECTIVES, *CORRECTIONS, *ADVANTAGES], marks=pytest.mark.slow)]
)
def test_built_in_formulas_pass(names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """All of them on the same ranks, which start once for each layout."""
    is_short = len(names) == 2
    loss, layouts = (f"[{','.join(names)}]", "[cp2]") if is_short else ("all", LAYOUTS)
    code = verify.main([f"loss={loss}", f"layouts={layouts}", *SHORT])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert code == 0, [row for row in rows if not row["passed"]]
    layout_names = ("tp1", "1 batch", "many", *layouts.strip("[]").split(","))
    verified = {(row["formula"], row["layout"], row["packed"]) for row in rows}
    assert verified == {(name, layout, packed) for name in names for layout in layout_names for packed in (True, False)}
    assert all(row["gradient"] > 0 for row in rows)


def test_what_was_verified_and_the_verdict_are_printed(
    planted: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = f"loss={planted}.towards_engine"
    for is_equal, verdict in ((True, "passed: all 2 are equal"), (False, "FAILED: 2 of 2 are further away")):
        rows = [SimpleNamespace(passed=is_equal)] * 2
        monkeypatch.setattr(verify, "verify", lambda request, folder, rows=rows: iter(rows))
        assert verify.main([loss, "options=[weight=0.2]"]) == (0 if is_equal else 1)
        first, last = capsys.readouterr().out.splitlines()
        assert first == f"verifies {loss} options=[weight=0.2] with model=tiny:qwen3"
        assert last.startswith(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["towards_engine", "centred"])
def test_functions_of_the_user_pass(planted: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["options=[weight=0.2]"] if name == "towards_engine" else []
    code, rows = verify_rows(capsys, f"loss={planted}.{name}", f"layouts={LAYOUTS}", *options)
    assert code == 0, rows


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("average_of_microbatch", "depends on its microbatch"),
        ("read_padding", "depends on padding"),
        ("own_tokens", "depends on context parallelism"),
    ],
)
def test_a_planted_objective_is_named_before_ranks_start(
    planted: str, name: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify.main([f"loss={planted}.{name}"]) == 1
    assert f"loss={planted}.{name} {reason}" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "failing"),
    [("average_of_microbatch", "tp1", "many"), ("read_padding", "tp1", "many"), ("own_tokens", "cp2", "cp2")],
)
def test_ranks_show_what_trials_would_have_shown(
    planted: str,
    name: str,
    layout: str,
    failing: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(formula_layouts, "find_objective_problem", lambda objective: None)
    code, rows = verify_rows(capsys, f"loss={planted}.{name}", f"layouts=[{layout}]")
    assert code == 1
    assert not rows[failing, True]["passed"]
