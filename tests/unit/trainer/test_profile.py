"""A rank's profile: what it did is in the trace, and nothing of before."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from megatron_grpo.trainer.actor import RankActor


def test_the_trace_has_the_operators_of_the_step(tmp_path: Path) -> None:
    torch.ones(4).cumsum(0)
    rank = RankActor.__new__(RankActor)  # without the log of a process
    for name in ("policy rank 1", "policy rank 2"):
        rank.name = name
        rank.begin_profile()
        torch.ones(8, 8) @ torch.ones(8, 8)
        rank.end_profile(str(tmp_path))
        events = json.loads((tmp_path / f"{name.replace(' ', '_')}.json").read_text())["traceEvents"]
        names = {event.get("name") for event in events}
        assert "aten::mm" in names
        assert "aten::cumsum" not in names
        assert any(event.get("name") == "[memory]" for event in events)
