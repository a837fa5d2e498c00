"""A run whose engine is a server elsewhere, and whose turns an agent makes over the endpoint: trained on as sampled."""

from pathlib import Path

import pytest

from megatron_grpo.prepare.models import prepare
from tests.integration.runs import TrainingRun
from tests.integration.server_process import serving

AGENT = "tests.integration.example_agent"


@pytest.mark.slow
def test_a_run_trains_against_a_server_through_a_folder(tmp_path: Path) -> None:
    prepare("addition", str(tmp_path / "prepared"))
    with serving(tmp_path / "prepared" / "model", tmp_path / "server.log") as server:
        run = TrainingRun(
            tmp_path / "run",
            f"prepare.folder={tmp_path / 'prepared'}",
            f"generation.server.urls=[{server.url}]",
            "generation.parallel.pipeline=1",
            "generation.endpoint.enabled=true",
            "refit.mode=files",
            f"refit.directory={tmp_path / 'shared'}",
            "env.addition.type=reward_functions",
            f"env.addition.reward_funcs=[{AGENT}.exact]",
            f"env.addition.agent_func={AGENT}.single",
            "grpo.max_num_steps=3",
            "grpo.num_prompts_per_step=4",
            "grpo.val_at_start=false",
            "grpo.val_at_end=false",
            "checkpointing.enabled=false",
        )
        assert run.finish() == 0, run.log() + server.log()[-3000:]
    rows = run.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4), "the server has the policy's weights"
        samples = run.rollouts(row["step"])
        assert len(samples) == 32
        assert {span[2] for sample in samples for span in sample["spans"]} == {row["step"] - 1}
        assert {sample["reward"] for sample in samples} <= {0.0, 1.0}
    assert not any((tmp_path / "shared").iterdir()), "the run takes its weights away with it"
