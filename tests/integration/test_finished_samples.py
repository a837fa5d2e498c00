"""A killed run's finished agents do not work again, and the run ends as if nothing had happened."""

from pathlib import Path

import pytest

from tests.integration import slow_agent
from tests.integration.runs import SHORT, TrainingRun
from tests.integration.whole_runs import complete

pytestmark = pytest.mark.slow
OPTIONS = (
    *SHORT,
    "grpo.max_num_steps=2",
    "grpo.num_prompts_per_step=8",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "data.val_path=null",
    "checkpointing.save_period=1",
    "rollouts.keep_finished=true",
    "env.addition.type=reward_functions",
    "generation.endpoint.enabled=true",
    "env.addition.reward_funcs=[tests.integration.example_agent.longer]",
    "env.addition.agent_func=tests.integration.slow_agent.work",
)


def test_finished_agents_do_not_work_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calm = tmp_path / "calm"
    calm.mkdir()
    monkeypatch.setenv(slow_agent.WORK, str(calm))
    straight = complete(TrainingRun(tmp_path / "straight", *OPTIONS))
    works = len((calm / "done").read_text().splitlines())

    folder = tmp_path / "held_up"
    folder.mkdir()
    (folder / "wait").touch()
    monkeypatch.setenv(slow_agent.WORK, str(folder))
    run = TrainingRun(tmp_path / "run", *OPTIONS)
    run.start()
    samples = run.run_dir / "finished_samples"
    run.wait_for(lambda: count_lines(samples) >= slow_agent.DONE_FIRST)
    run.kill()
    run.assert_nothing_left()
    works_before = len((folder / "done").read_text().splitlines())
    finished = count_lines(samples)
    (folder / "wait").unlink()
    complete(run_again := TrainingRun(run.run_dir, *OPTIONS))
    assert len((folder / "done").read_text().splitlines()) == works_before + works - finished
    for step in (1, 2):
        assert run_again.rollouts(step) == straight.rollouts(step)
    assert list(samples.iterdir()) == []


def count_lines(folder: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in folder.glob("*.jsonl"))
