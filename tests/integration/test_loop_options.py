"""Whole runs with the options of the loop: exact across a resume, and bad rewards that stop the run."""

import json
from pathlib import Path

import pytest
import yaml

from tests.integration.runs import TrainingRun, read_jsonl, without_timing
from tests.integration.whole_runs import complete, read_options
from tests.support.documents import undocumented
from tests.support.grpo_parameters import GRPO_PARAMETERS, WITHOUT_CORRECTION

OPTIONS = read_options("loop_options")

pytestmark = pytest.mark.slow

EVERYTHING = OPTIONS["everything"]


def test_every_option_of_the_loop_continues_exactly(tmp_path: Path) -> None:
    """Dynamic sampling, four optimizer steps a step, a moving reference: steps 3 and 4 after a restart are the same."""
    straight = complete(TrainingRun(tmp_path / "straight", *EVERYTHING))
    rows = straight.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["optimizer_steps"] == 4
        assert row["groups_without_signal"] == 0
        assert row["clip_fraction_low"] + row["clip_fraction_high"] > 0, "the policy moved within the step"
        assert row["token_mult_prob_error_max"] < 1.001, "the old log-probabilities are those that sampling used"
        assert row["num_masked_seqs"] == 0
        assert row["effective_sample_size"] == pytest.approx(1.0, abs=1e-4)
        shares = row["groups_all_wrong"] + row["groups_mixed"] + row["groups_all_right"]
        assert shares == pytest.approx(1.0)
        assert 0 < row["throughput"]["slowest_rank_speed"] <= 1
        assert row["throughput"]["tokens_per_s"] > row["throughput"]["samples_per_s"] > 0
    assert [row["learning_rate"] for row in rows[:2]] == pytest.approx([4e-4, 8e-4]), "warm-up counts optimizer steps"
    assert "reference.decoder" in str(list_keys(straight.run_dir / "checkpoints" / "step_2"))

    resumed = complete(
        TrainingRun(tmp_path / "resumed", *EVERYTHING, f"checkpointing.resume={straight.run_dir}/checkpoints/step_2")
    )
    assert without_timing(resumed.metrics()) == without_timing(rows[2:])
    assert resumed.rollouts(4) == straight.rollouts(4)


def test_a_run_that_is_good_enough_ends_early_and_is_saved(tmp_path: Path) -> None:
    limits = ("grpo.max_num_steps=6", "grpo.num_prompts_per_step=8", "grpo.val_period=2", "grpo.max_val_samples=32")
    stop = ("grpo.early_stop.enabled=true", "grpo.early_stop.threshold=0.01", "grpo.val_at_start=false")
    run = complete(TrainingRun(tmp_path / "run", *limits, *stop))
    assert [row["step"] for row in run.metrics()] == [1, 2]
    assert "training ends after step 2" in run.log()
    state = json.loads((run.run_dir / "checkpoints" / "step_2" / "state.json").read_text())
    assert state["metrics"]["val_accuracy"] >= 0.01, "the last checkpoint is ranked by its metrics like the others"


def test_a_run_ends_with_its_data(tmp_path: Path) -> None:
    """Two epochs of sixteen prompts, eight of them a step."""
    rows = [{"prompt": f"{n}+{n}=", "answer": f"{2 * n:03d}"} for n in range(10, 26)]
    data = tmp_path / "sixteen.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    limits = ("grpo.max_num_steps=9", "grpo.max_num_epochs=2", "grpo.num_prompts_per_step=8", "grpo.val_at_end=false")
    run = complete(TrainingRun(tmp_path / "run", *limits, f"data.train_path={data}", "grpo.val_at_start=false"))
    assert [row["step"] for row in run.metrics()] == [1, 2, 3, 4]
    assert "the data is used up: 2 epoch(s)" in run.log()
    first, second = (
        sorted(row["prompt_idx"] for step in steps for row in run.rollouts(step)) for steps in ((1, 2), (3, 4))
    )
    assert first == second == sorted(list(range(16)) * 8)


def test_what_dynamic_sampling_has_when_the_data_ends_is_there_when_the_run_goes_on(tmp_path: Path) -> None:
    """Four of twelve prompts have an answer that nobody gives: ten never fill a step of ten, twenty do."""
    rows = [{"prompt": f"{n}+{n}=", "answer": f"{2 * n:03d}" if n < 18 else "987"} for n in range(10, 22)]
    data = tmp_path / "twelve.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sampling = ("grpo.use_dynamic_sampling=true", "grpo.num_prompts_per_step=10", "grpo.num_generations_per_prompt=16")
    limits = (f"data.train_path={data}", "grpo.max_num_steps=1", "grpo.val_at_start=false", "grpo.val_at_end=false")
    straight = complete(TrainingRun(tmp_path / "straight", *sampling, *limits, "grpo.max_num_epochs=9"))
    first = complete(TrainingRun(tmp_path / "run", *sampling, *limits, "grpo.max_num_epochs=1"))
    assert first.metrics() == []
    state = json.loads((first.run_dir / "checkpoints" / "step_0" / "state.json").read_text())
    assert 0 < len(state["batch_cache"]) < 10
    second = complete(TrainingRun(tmp_path / "run", *sampling, *limits, "grpo.max_num_epochs=9"))
    waited = {row["prompt_idx"] for group in state["batch_cache"] for row in group}
    trained = second.rollouts(1)
    assert waited <= {row["prompt_idx"] for row in trained}
    assert trained == straight.rollouts(1)


def test_a_reward_function_that_breaks_costs_no_step(tmp_path: Path) -> None:
    """It fails in step 3, long before a checkpoint is due; once it is repaired the run goes on."""
    rows = [{"prompt": f"{n}+{n}=", "answer": f"{2 * n:03d}", "broken": n >= 28} for n in range(10, 42)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    limits = (
        "data.shuffle=false",
        "grpo.max_num_steps=4",
        "grpo.num_prompts_per_step=8",
        "checkpointing.keep_top_k=null",
    )

    def run_with(function: str, folder: str) -> TrainingRun:
        funcs = [f"tests.integration.{function}"]
        environment = {"name": "sums", "type": "reward_functions", "reward_funcs": funcs, "dataset": str(data)}
        job = tmp_path / f"{function}.yaml"
        job.write_text(yaml.safe_dump({"environment": environment}))
        return TrainingRun(tmp_path / folder, f"job={job}", *limits)

    straight = complete(run_with("example_rewards.right", "straight"))
    broken = run_with("bad_rewards.right_unless_broken", "run")
    assert broken.finish() == 1, broken.log()
    assert "rollouts failed, more than rollouts.max_failed_fraction=0.1 allows: " in broken.log()
    assert "environment sums: tests.integration.bad_rewards.right_unless_broken raised KeyError" in broken.log()
    assert [row["step"] for row in broken.metrics()] == [1, 2]
    repaired = complete(run_with("example_rewards.right", "run"))
    assert "resumed after step 2" in repaired.log()
    renamed = {"reward/right_unless_broken", "reward_std/right_unless_broken", "reward/right", "reward_std/right"}
    after, expected = (
        [{key: row[key] for key in row.keys() - renamed} for row in without_timing(run.metrics())]
        for run in (repaired, straight)
    )
    assert after == expected
    assert not (straight.run_dir / "validation.jsonl").read_text(), "the recipe's held-out prompts are of another task"


def test_responses_that_nothing_scores_are_left_out(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    function = "tests.integration.example_rewards.right_if_even"
    environment = {"name": "addition", "type": "reward_functions", "reward_funcs": [function]}
    job.write_text(yaml.safe_dump({"environment": environment, "num_prompts_per_step": 32}))
    run = complete(TrainingRun(tmp_path / "run", f"job={job}", "grpo.max_num_steps=3", "grpo.val_at_start=false"))
    assert run.log().count("no reward function gave a reward for") == 1
    for row in run.metrics():
        assert 0.2 < row["unscored_rate"] < 0.8
        assert row["valid_tokens"] == pytest.approx((1 - row["unscored_rate"]) * 256 * row["response_length"], rel=0.1)
        assert row["reward"] == row["reward/right_if_even"]
        assert undocumented(row.keys() - {"step", "timing", "throughput"}) == set()
    rollouts = run.rollouts(1)
    assert {row["reward"] for row in rollouts} == {0.0, 1.0, None}


def list_keys(checkpoint: Path) -> list[str]:
    """Names of the tensors in a checkpoint."""
    from torch.distributed.checkpoint import FileSystemReader

    return list(FileSystemReader(checkpoint / "megatron").read_metadata().state_dict_metadata)


def test_a_job_with_every_field_runs(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump({"environment": "addition", **WITHOUT_CORRECTION}))
    run = complete(TrainingRun(tmp_path / "run", f"job={job}", "grpo.max_num_steps=2", "grpo.val_at_start=false"))
    for row in run.metrics():
        assert row["grad_norm"] > 0
        assert row["kl_penalty"] >= 0
        assert row["sampling_importance_ratio"] < 1, "top-p made the sampled tokens likelier than they are"
    samples = GRPO_PARAMETERS["num_prompts_per_step"] * GRPO_PARAMETERS["num_generations_per_prompt"]
    assert len(run.rollouts(2)) == samples


def test_a_job_whose_rewards_are_not_finite_stops_and_says_for_which_prompts(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    function = "tests.integration.bad_rewards.not_a_number_for_odd_answers"
    environment = {"name": "addition", "type": "reward_functions", "reward_funcs": [function]}
    job.write_text(yaml.safe_dump({"environment": environment, "num_prompts_per_step": 8, "generation_top_p": 0.95}))
    run = TrainingRun(tmp_path / "run", f"job={job}", "grpo.max_num_steps=3", "grpo.val_at_start=false")
    assert run.finish() == 1, run.log()
    assert "Traceback" not in run.log(), run.log()
    assert "run failed: step 1: the reward of not_a_number_for_odd_answers is not finite for" in run.log(), run.log()
    written = json.loads((run.run_dir / "non_finite_step_1.json").read_text())
    data = Path(yaml.safe_load((run.run_dir / "config.yaml").read_text())["data"]["train_path"])
    answers = [row["answer"] for row in read_jsonl(data)]
    assert written["prompt_ids"]
    assert all(int(answers[prompt]) % 2 for prompt in written["prompt_ids"])
    assert not (run.run_dir / "checkpoints").exists()
    run.assert_nothing_left()
