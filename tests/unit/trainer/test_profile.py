"""A rank's profile: what it did is in the trace, and nothing of before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_grpo.trainer.actor import begin_profile, end_profile


def test_the_trace_has_the_operators_of_the_step(tmp_path: Path) -> None:
    torch.ones(4).cumsum(0)
    for step in (1, 2):
        begin_profile(None)
        torch.ones(8, 8) @ torch.ones(8, 8)
        end_profile(None, str(tmp_path), f"policy_rank_{step}")
        events = json.loads((tmp_path / f"policy_rank_{step}.json").read_text())["traceEvents"]
        names = {event.get("name") for event in events}
        assert "aten::mm" in names
        assert "aten::cumsum" not in names
        assert any(event.get("name") == "[memory]" for event in events)


def test_an_end_without_a_beginning_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="did not begin"):
        end_profile(None, str(tmp_path), "rank")
