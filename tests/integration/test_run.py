"""Whole runs: resume after SIGKILL to the last digit, other layouts, failures that say what happened, no orphans."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_grpo.cluster.heartbeat import HEARTBEATS_FOLDER, Heartbeat, read_heartbeats
from megatron_grpo.cluster.process_log import LOGS_FOLDER
from tests.integration.runs import SHORT, TrainingRun, read_jsonl, without_timing
from tests.integration.whole_runs import complete, kill_after, read_options

OPTIONS = read_options("run")


def test_a_run_writes_everything_that_explains_it(straight_run: TrainingRun) -> None:
    rows = straight_run.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["weight_version"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert all(row["token_mult_prob_error_max"] < 1.001 for row in rows)
    assert [row["step"] for row in read_jsonl(straight_run.run_dir / "validation.jsonl")] == [0, 3, 6]
    summary = json.loads((straight_run.run_dir / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["token_mult_prob_error_max"] <= 1.001
    for name in ("config.yaml", "curves.png", "checkpoints/step_3", "checkpoints/step_6", "tensorboard"):
        assert (straight_run.run_dir / name).exists(), name
    rollouts = straight_run.rollouts(1)
    assert len(rollouts) == 16 * 8
    assert len({tuple(row["token_ids"]) for row in rollouts[:8]}) > 1, "samples of a prompt are all the same"


@pytest.mark.ci
@pytest.mark.slow  # the longest test; tests/parity loads checkpoints to the last digit
def test_killed_and_started_again_it_ends_as_if_nothing_had_happened(straight_run: TrainingRun, tmp_path: Path) -> None:
    first = kill_after(TrainingRun(tmp_path / "run", *SHORT), 3)
    assert not (first.run_dir / "checkpoints" / "step_6").exists(), "killed too late to test anything"
    # What a kill in the middle of a write leaves behind is never taken for a checkpoint.
    (first.run_dir / "checkpoints" / ".writing_step_5" / "megatron").mkdir(parents=True)

    second = complete(TrainingRun(tmp_path / "run", *SHORT))
    assert "resumed after step 3" in second.log()
    assert without_timing(second.metrics()) == without_timing(straight_run.metrics())
    name = "validation.jsonl"
    validations = [read_jsonl(run.run_dir / name) for run in (second, straight_run)]
    assert without_timing(validations[0]) == without_timing(validations[1])
    starts = read_jsonl(second.run_dir / "starts.jsonl")
    assert [start["resumed_after"] for start in starts] == [None, 3]
    assert f"report in {second.run_dir / 'report.html'}" in second.log()
    assert second.rollouts(6) == straight_run.rollouts(6)
    assert not (first.run_dir / "checkpoints" / ".writing_step_5").exists()


@pytest.mark.slow  # tests/parity/test_training.py loads checkpoints in other layouts with every `make test`
def test_another_layout_continues_the_run(straight_run: TrainingRun, tmp_path: Path) -> None:
    """From the PP2 run's third step on, TP2 and two generation engines: the same numbers up to rounding."""
    run = complete(
        TrainingRun(
            tmp_path / "run",
            *SHORT,
            f"checkpointing.resume={straight_run.run_dir}/checkpoints/step_3",
            "policy.parallel.pipeline=1",
            "policy.parallel.tensor=2",
            "generation.parallel.pipeline=1",
            "generation.parallel.data=2",
        )
    )
    assert [row["step"] for row in run.metrics()] == [4, 5, 6]
    for ours, theirs in zip(run.metrics(), straight_run.metrics()[3:], strict=True):
        for name in ("reward", "loss", "grad_norm", "approx_entropy"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), f"step {ours['step']}: {name}"


@pytest.mark.slow
def test_kl_penalty_with_an_offloaded_reference_and_two_replicas(tmp_path: Path) -> None:
    run = complete(
        TrainingRun(tmp_path / "run", *SHORT[1:], *OPTIONS["kl_penalty_with_an_offloaded_reference_and_two_replicas"])
    )
    kl = [row["kl_penalty"] for row in run.metrics()]
    assert kl[0] == pytest.approx(0.0, abs=1e-9), "policy and reference start from the same weights"
    assert 0 < kl[1] < kl[2]
    assert all("logprobs" in row["timing"] for row in run.metrics())


def test_an_exported_checkpoint_answers_as_the_run_did(straight_run: TrainingRun, tmp_path: Path) -> None:
    """Greedy decoding by transformers from the exported folder gives the accuracy that the run validated."""
    checkpoint, output = straight_run.run_dir / "checkpoints" / "step_6", tmp_path / "exported"
    command = [sys.executable, "-m", "megatron_grpo.export", f"checkpoint={checkpoint}", f"output={output}"]
    subprocess.run(command, check=True, timeout=120)
    data = Path(yaml.safe_load((straight_run.run_dir / "config.yaml").read_text())["data"]["val_path"])
    tokenizer = AutoTokenizer.from_pretrained(output)
    model = AutoModelForCausalLM.from_pretrained(output)
    rows = read_jsonl(data)[:64]
    prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt", add_special_tokens=False).input_ids
    answers = model.generate(prompts, max_new_tokens=5, do_sample=False)[:, prompts.shape[1] :]
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    right = sum(text == row["answer"] for text, row in zip(texts, rows, strict=True))
    validated = read_jsonl(straight_run.run_dir / "validation.jsonl")[-1]
    assert validated["step"] == 6
    assert right / len(rows) == validated["val_accuracy"]


ENDLESS = (*SHORT[1:], "grpo.max_num_steps=100000", "checkpointing.save_period=1000000")


def steps(run: TrainingRun) -> int:
    return len(run.metrics()) if (run.run_dir / "metrics.jsonl").exists() else 0


def heartbeat(run: TrainingRun, name: str) -> Heartbeat:
    return read_heartbeats(run.run_dir / LOGS_FOLDER / HEARTBEATS_FOLDER)[name]


@pytest.mark.slow
def test_a_killed_vllm_process_ends_the_run_with_one_message(tmp_path: Path) -> None:
    run = TrainingRun(tmp_path / "run", *ENDLESS, "generation.engine_restarts=0")
    run.start()
    run.wait_for(lambda: steps(run) >= 2)
    killed = time.monotonic()
    psutil.Process(heartbeat(run, "generation engine 0 worker 1").pid).kill()
    assert run.finish(timeout_s=60) == 1, run.log()
    assert time.monotonic() - killed < 45
    assert "generation engine 0" in run.log(), run.log()
    assert "Traceback" not in run.log(), run.log()
    run.assert_nothing_left()
    assert (run.run_dir / "checkpoints" / f"step_{steps(run)}").exists(), "the steps that were finished are saved"


@pytest.mark.slow  # test_rollout_pool.py replaces an engine with every `make test`
@pytest.mark.parametrize("when", ["generate", "receive weights"])
def test_a_killed_vllm_process_is_replaced_and_the_run_goes_on(
    when: str, straight_run: TrainingRun, tmp_path: Path
) -> None:
    """Over a response, and in a refit: it learns what it would have learnt."""
    run = TrainingRun(tmp_path / "run", *SHORT)
    run.start()
    run.wait_for(lambda: steps(run) >= 2)
    # A refit takes the engine some hundredths of a second.
    run.wait_for(lambda: when in [phase.name for phase in heartbeat(run, "generation engine 0").phases], every_s=0.002)
    killed = [process.pid for process in psutil.process_iter() if _is_of_engine(run, process)]
    psutil.Process(heartbeat(run, "generation engine 0 worker 1").pid).kill()
    assert run.finish(timeout_s=480) == 0, run.log()
    assert not [pid for pid in killed if psutil.pid_exists(pid)]
    assert sum(row["engine_restarts"] for row in run.metrics()) == 1
    assert "generation engine 0 was replaced: " in run.log()
    assert [row["step"] for row in run.metrics()] == [1, 2, 3, 4, 5, 6]
    for ours, theirs in zip(run.metrics(), straight_run.metrics(), strict=True):
        assert ours["failed_rollouts"] == 0
        assert ours["token_mult_prob_error_max"] < 1.001, "what is sampled is sampled from the policy's weights"
        for name in ("reward", "loss", "grad_norm", "approx_entropy"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), f"step {ours['step']}: {name}"
    run.assert_nothing_left()


def _is_of_engine(run: TrainingRun, process: psutil.Process) -> bool:
    beats = read_heartbeats(run.run_dir / LOGS_FOLDER / HEARTBEATS_FOLDER).values()
    return process.pid in [beat.pid for beat in beats if beat.name.startswith("generation engine 0")]


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_with_one_message_that_says_what_is_left(tmp_path: Path) -> None:
    run = TrainingRun(tmp_path / "run", *ENDLESS, "checkpointing.save_period=2", "cluster.max_restarts=0")
    run.start()
    run.wait_for(lambda: (run.run_dir / "checkpoints" / "step_2").exists() and steps(run) >= 3)
    psutil.Process(heartbeat(run, "policy rank 1").pid).kill()
    assert run.finish(timeout_s=90) == 1, run.log()
    message = run.log().strip().splitlines()[-1]
    print(message)
    assert message.startswith("run failed: ")
    assert "policy rank 1" in message
    assert "Traceback" not in run.log(), run.log()
    run.assert_nothing_left()
    saved = sorted(int(path.name.removeprefix("step_")) for path in (run.run_dir / "checkpoints").glob("step_*"))
    assert f"checkpoints/step_{saved[-1]} is the last one" in message


@pytest.mark.slow
@pytest.mark.parametrize("when", ["starting", "training"])
def test_ctrl_c_leaves_nothing_behind(when: str, tmp_path: Path) -> None:
    run = TrainingRun(tmp_path / "run", *SHORT[1:], "grpo.max_num_steps=100000", "checkpointing.save_period=1000000")
    driver = run.start()
    if when == "starting":
        run.wait_for(lambda: any("RankActor" in " ".join(process.cmdline()) for process in run.processes()))
    else:
        run.wait_for(lambda: (run.run_dir / "metrics.jsonl").exists() and len(run.metrics()) >= 1)
    driver.send_signal(signal.SIGINT)
    assert run.finish(timeout_s=60) == 130, run.log()
    assert "Traceback" not in run.log(), run.log()
    run.assert_nothing_left()


def test_a_run_directory_is_for_one_run_at_a_time(straight_run: TrainingRun) -> None:
    other_run = TrainingRun(straight_run.run_dir, *SHORT, "grpo.seed=7")
    assert other_run.finish() == 2
    assert "holds another run: its grpo.seed is 42, this one's is 7" in other_run.log()
