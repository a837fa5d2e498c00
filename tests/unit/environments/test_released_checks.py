"""`--check` says of each released layout what its walk shows: refused tools, settings without effect, changed turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config.compose import compose_typed
from megatron_grpo.config.schema import Config
from megatron_grpo.data.tokenizer import load_tokenizer
from megatron_grpo.environments.conversation_checks import examine_conversations
from tests.support.released.layout import Layout
from tests.support.released.table import LAYOUTS

every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)


@pytest.fixture
def examine(tmp_path: Path) -> Any:
    def examine(layout: Layout, *overrides: str, kind: str = "tools") -> tuple[list[str], list[str]]:
        folder = layout.write(tmp_path / layout.name)
        config = compose_typed(
            [f"policy.model.path={folder}", "data.train_path=rows.jsonl", f"env.math.type={kind}", *overrides]
        ).config
        assert isinstance(config, Config)
        problems, remarks = examine_conversations(config, load_tokenizer(folder))
        return [f"{one.subject} {one.text}" for one in problems], [f"{one.subject} {one.text}" for one in remarks]

    return examine


@every_layout
def test_tools_that_the_template_cannot_show_are_refused(examine: Any, layout: Layout) -> None:
    problems, _ = examine(layout)
    expected = {"refused": "refuses messages of the role tool", "left out": "leaves out messages of the role tool"}
    assert len(problems) == (layout.tool_role in expected)
    assert all(expected[layout.tool_role] in problem for problem in problems)
